"""Reference models: trained as the target was, on random halves of the attacked samples, each its own resumable job.

Models come in pairs, the second trained on what the first was not: every sample is in exactly half of any even number of models,
all are trained on equally many, and more models can be added without touching those that are there. Which samples a reference
model was trained on is drawn independently of who is a member of the target, so knowing it tells an attack nothing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .data import Part
from .errors import UserError
from .localize import localize
from .measures import References, augmented
from .models import load_weights, read_weights, weights_digest
from .plugins import code_of, find
from .procedures import train_base, train_like
from .runs import UNDEFENDED, Run, read_json, write_json, write_npz
from .signals import collect, logit_margin
from .splits import TrainingData
from .stages import SCRATCH
from .training import Monitor

TRIES = 3


@dataclass(frozen=True)
class Job:
    """One reference model: with the run it belongs to, all that decides what comes out."""

    run: str
    procedure: str = UNDEFENDED  # or the name of a retraining of the run, to be repeated whole
    index: int = 0
    seed: int = 0
    queries: int = 0  # augmented views of every sample to record as well
    epochs: tuple[int, ...] = ()  # epochs after which to record outputs too
    own_cut: bool = False  # localise anew instead of taking the cut of the retraining

    def plan(self, run: Run) -> dict | None:
        """What the retraining of that name did; None for the undefended procedure."""
        if self.procedure == UNDEFENDED:
            return None
        record = read_json(
            run.folder(self.procedure) / "defense.json", f"pptp retrain {run.path} --name {self.procedure} ..."
        )
        told = ("defense", "set", "cut", "rewind", "recipe", "code", "views", "cache_dtype")
        return {key: record[key] for key in told if key in record}

    def key(self, run: Run) -> str:
        """Hash of everything that makes the model: not of where it is, nor of how many processes made it."""
        made, plan, start = run.experiment.to_dict(), self.plan(run), run.experiment.initial_checkpoint
        for name in ("keep_epochs", "half_checkpoint", "full_checkpoint", "initial_checkpoint"):
            made.pop(name)
        for recipe in (made["recipe"], (plan or {}).get("recipe", {})):
            for name in ("workers", "device"):
                recipe.pop(name, None)
        own = {name: value for name, value in asdict(self).items() if name != "run"}
        data = read_json(run.path / "run.json", "")["data"]
        procedure = run.experiment.procedure
        code = code_of(find("defenses", procedure)) if ":" in procedure else ""
        what = [made, plan, own, data, run.splits_digest(), code, weights_digest(read_weights(start)) if start else ""]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def folder(self, run: Run) -> Path:
        return home(run, self.procedure) / self.key(run)

    def shared(self, run: Run) -> Path:
        """Where the undefended models behind this one are kept: every procedure starts from the same."""
        bare = replace(self, procedure=UNDEFENDED, queries=0, epochs=(), own_cut=False)
        return home(run, UNDEFENDED) / "bases" / bare.key(run)


def home(run: Run, procedure: str) -> Path:
    return run.path / "ensembles" / procedure


def half_mask(index: int, samples: int, seed: int) -> np.ndarray:
    """(samples,) bool: a random half for an even index, the other half for the odd one after it."""
    order = np.random.default_rng((seed, index // 2)).permutation(samples)
    first = np.zeros(samples, dtype=bool)
    first[order[: samples // 2]] = True
    return first if index % 2 == 0 else ~first


def attacked_ids(run: Run) -> np.ndarray:
    """The samples that attacks are asked about, members and not: reference models are trained on halves of these."""
    return np.sort(np.concatenate([part.indices for part in run.attacked()]))


class RecordOutputs(Monitor):
    """Save what the model says of every sample after some epochs."""

    def __init__(self, data, folder: Path, epochs: Sequence[int], workers: int):
        self.data, self.folder, self.epochs, self.workers = data, folder, epochs, workers

    def after_epoch(self, model, epoch):
        if epoch + 1 in self.epochs:
            said = collect(model, self.data, workers=self.workers).logits
            write_npz(self.folder / f"outputs_{epoch + 1}.npz", {"logits": said.numpy()})
        return {}


def train_reference(config: Mapping, folder: str | Path) -> Path:
    """The whole job, from a plain dict and a folder: train, ask about every sample, write outputs.npz. Resumes; done is done."""
    job = Job(**{**config, "epochs": tuple(config["epochs"])})
    folder = Path(folder)
    target = folder / "outputs.npz"
    if target.exists():
        return target
    run = Run.open(job.run)
    ids = attacked_ids(run)
    mine = ids[half_mask(job.index, len(ids), job.seed)]
    seed = run.experiment.recipe.seed + 7919 * (job.index + 1)
    model = run.fresh_model(seed)
    if run.experiment.initial_checkpoint:  # where the target started, too
        load_weights(model, read_weights(run.experiment.initial_checkpoint), run.experiment.initial_checkpoint)
    data = TrainingData(Part(run.splits.pool, mine, f"reference {job.index}"), run.splits.reference)
    workers = run.experiment.recipe.workers
    recording = [RecordOutputs(run.splits.pool, folder, job.epochs, workers)] if job.epochs else []
    plan, shared = job.plan(run), job.shared(run)
    choose = _own_cut(run, mine, folder, seed) if job.own_cut and plan else None
    cut = train_like(run.experiment, plan, model, run.parts(model), data, folder, seed, recording, choose, shared)
    said = {"logits": collect(model, run.splits.pool, workers=workers).logits.numpy()}
    if job.queries:
        said["augmented"] = augmented(model, run.splits.pool, job.queries, workers=workers).numpy()
    members = np.isin(np.arange(len(run.splits.pool)), mine)
    write_json(folder / "job.json", {**asdict(job), "cut": cut, "members": len(mine)})
    write_npz(target, {**said, "members": members})
    for left in (*folder.glob("*.pt"), *folder.glob("*.safetensors")):
        left.unlink()
    shutil.rmtree(folder / "checkpoint.selena", ignore_errors=True)
    return target


def _own_cut(run: Run, mine: np.ndarray, folder: Path, seed: int) -> Callable:
    """Localisation as `pptp localize` does it, within the reference model's own samples."""
    rng = np.random.default_rng(seed)
    first = np.isin(np.arange(len(mine)), rng.permutation(len(mine))[: len(mine) // 2])
    h1, h2 = (Part(run.splits.pool, mine[rows], name) for rows, name in ((first, "h1"), (~first, "h2")))

    def choose(full, initial) -> str:
        half = run.fresh_model(seed)
        half.load_state_dict(initial)
        recipe = replace(run.experiment.recipe, seed=seed)
        data = TrainingData(h1, run.splits.reference)
        train_base(run.experiment, half, data, recipe, (), folder / "half.pt", "reference half")
        delta = run.risk()["settings"]["delta"] if (run.path / "risk.json").exists() else 0.05
        return localize(full, half, h1, h2, delta=delta, probes=False, parts=run.parts(full)).cut

    return choose


# --- many of them --------------------------------------------------------------------------------


def train_all(jobs: Sequence[Job], processes: int = 1, say: Callable[[str], None] = print) -> None:
    """Every job that is not done, one after the other or in processes of their own; what a dying process left undone is tried again."""
    run = Run.open(jobs[0].run)
    work = {job.index: (asdict(job), job.folder(run)) for job in jobs}
    waiting = [index for index, (_, folder) in work.items() if not (folder / "outputs.npz").exists()]
    say(f"{len(work) - len(waiting)} of {len(work)} reference models are there, {len(waiting)} to train")
    if processes == 1 or len(waiting) < 2:
        for index in waiting:
            train_reference(*work[index])
            say(f"reference {index}: done")
        return
    for attempt in range(TRIES):
        try:
            _in_processes({index: work[index] for index in waiting}, processes, say)
        except BrokenProcessPool as error:
            if attempt == TRIES - 1:
                raise UserError(
                    f"a process that trained a reference model died {TRIES} times, perhaps for want of memory: use fewer --processes"
                ) from error
        waiting = [index for index in waiting if not (work[index][1] / "outputs.npz").exists()]
        if not waiting:
            return


def _in_processes(work: Mapping[int, tuple], processes: int, say) -> None:
    threads = max(1, torch.get_num_threads() // processes)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start_worker, (threads,)) as pool:
        futures = {pool.submit(train_reference, *config): index for index, config in work.items()}
        try:
            for future in as_completed(futures):
                future.result()
                say(f"reference {futures[future]}: done")
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):
                process.terminate()
            raise


def _start_worker(threads: int) -> None:
    """An interrupt is for the main process, which ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def record_ensemble(jobs: Sequence[Job], run: Run) -> None:
    """ensemble.json: which jobs belong together, for every kind of ensemble that was asked for."""
    path = home(run, jobs[0].procedure) / "ensemble.json"
    template = json.loads(json.dumps({n: v for n, v in asdict(jobs[0]).items() if n not in ("run", "index")}))
    there = read_json(path, "")["ensembles"] if path.exists() else []
    models = max([len(jobs), *(entry["models"] for entry in there if entry["job"] == template)])
    others = [entry for entry in there if entry["job"] != template]
    write_json(path, {"ensembles": [*others, {"job": template, "models": models}]})


def ready_jobs(run: Run, procedure: str, recorded: bool = False) -> list[Job]:
    """Of the ensembles that were asked for the one with most outputs there (the last of equals), for models and data as they are now.

    recorded: only among those with outputs of several epochs.
    """
    path = home(run, procedure) / "ensemble.json"
    entries = read_json(path, "")["ensembles"] if path.exists() else []
    entries = [entry for entry in entries if entry["job"]["epochs"] or not recorded]
    return max((_ready(run, entry) for entry in reversed(entries)), key=len, default=[])


@dataclass(frozen=True)
class Recorded:
    """What reference models said of the attacked samples during their training."""

    epochs: np.ndarray  # (t,)
    ids: np.ndarray  # (n,)
    phi: np.ndarray  # (t, m, n): log(p_y / (1 - p_y))
    members: np.ndarray  # (m, n) bool


def recorded_margins(run: Run, procedure: str, jobs: Sequence[Job] = ()) -> Recorded | None:
    """Of these jobs, or of the largest ensemble with recorded epochs; None if there is none."""
    jobs = jobs or ready_jobs(run, procedure, recorded=True)
    if not jobs:
        return None
    last = (jobs[0].plan(run) or {"recipe": asdict(run.experiment.recipe)})["recipe"]["epochs"]
    files = {epoch: f"outputs_{epoch}.npz" for epoch in sorted(jobs[0].epochs) if epoch != last} | {last: "outputs.npz"}
    ids = attacked_ids(run)
    labels = torch.from_numpy(run.splits.pool.labels[ids])

    def margins(job: Job, name: str) -> np.ndarray:
        with np.load(job.folder(run) / name) as saved:
            return logit_margin(torch.from_numpy(saved["logits"])[ids], labels).numpy()

    phi = np.stack([[margins(job, name) for job in jobs] for name in files.values()])
    masks = np.stack([half_mask(job.index, len(ids), job.seed) for job in jobs])
    return Recorded(np.array(list(files)), ids, phi, masks)


def unfinished(run: Run, procedure: str) -> str:
    """What to say of an ensemble that is not complete."""
    path = home(run, procedure) / "ensemble.json"
    wanted = max((entry["models"] for entry in read_json(path, "")["ensembles"]), default=0) if path.exists() else 0
    ready = len(ready_jobs(run, procedure))
    return (
        f"; {wanted} were asked for, whole pairs are used: pptp ensemble trains the rest" if 0 < ready < wanted else ""
    )


def _ready(run: Run, entry: Mapping) -> list[Job]:
    settings = {**entry["job"], "epochs": tuple(entry["job"]["epochs"])}
    jobs = [Job(run=str(run.path), index=index, **settings) for index in range(entry["models"])]
    done = {job.index for job in jobs if (job.folder(run) / "outputs.npz").exists()}
    return [job for job in jobs if {job.index, job.index ^ 1} <= done]  # a lone half would unbalance the mask


def load_references(run: Run, procedure: str) -> References | None:
    """Outputs of an ensemble as attacks take them; None if there is none."""
    jobs = ready_jobs(run, procedure)
    if not jobs:
        return None
    logits, members, views = [], [], []
    for job in jobs:
        with np.load(job.folder(run) / "outputs.npz") as saved:
            logits.append(torch.from_numpy(saved["logits"]))
            members.append(torch.from_numpy(saved["members"]))
            views += [torch.from_numpy(saved["augmented"])] if "augmented" in saved else []
    size, target = int(members[0].sum()), len(run.splits.members)
    like = "without a defense" if procedure == UNDEFENDED else f"like {procedure}, {_whose_trunk(jobs[0], run)}"
    source = f"{len(jobs)} reference models trained {like}, on {size} samples each (the target on {target}){unfinished(run, procedure)}"
    return References(
        np.arange(logits[0].shape[0]),
        torch.stack(logits),
        torch.stack(members),
        torch.stack(views) if len(views) == len(jobs) else None,
        source,
    )


def _whose_trunk(job: Job, run: Run) -> str:
    if job.own_cut:
        return "each with a trunk and cut of its own"
    return "from scratch as it was" if job.plan(run)["cut"] == SCRATCH else "each with a trunk of its own"


def references_for(run: Run, name: str) -> References:
    """The best there is for attacking model `name`: its own procedure, the undefended one, or the half model of localisation."""
    own = load_references(run, name)
    return undefended_references(run) if own is None else own


def undefended_references(run: Run) -> References:
    """For a model that was made by another procedure."""
    plain = load_references(run, UNDEFENDED)
    if plain is not None:
        return replace(
            plain, source=f"{plain.source}: not by the target's procedure, so an attacker who knows it may find more"
        )
    return half_as_reference(run)


HALF_AS_REFERENCE = "one reference model, the half model of localisation, on the samples that it was not trained on"


def half_as_reference(run: Run) -> References:
    """M_h1, for which h1 is IN: attacks use it for the samples that it was not trained on, and leave out h1."""
    said = run.half_logits
    members = torch.from_numpy(np.isin(np.arange(len(run.splits.pool)), run.splits.h1.indices))
    return References(np.arange(len(said)), said[None], members[None], None, HALF_AS_REFERENCE)
