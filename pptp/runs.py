"""The run directory: where each artifact lives, written atomically, never reused when stale.

    run.json splits.npz samples.csv full/{init,last}.safetensors half/last.safetensors */history.jsonl      pptp train
    risk.json distances.npz                                                                     pptp localize
    retrain/<name>/{defense.json,last.safetensors,history.jsonl}                                pptp retrain
    ensembles/<name>/{ensemble.json,<key>/outputs.npz}                                          pptp ensemble
    evaluate/<name>/{evaluation.json,scores.npz}                                                pptp evaluate
    report.html report.json                                                                     pptp report

Folders with weights are in timm's own layout too (model.safetensors + config.json), so that
`timm.create_model("local-dir:...", pretrained=True)` loads them without pptp.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from . import canaries, models, sources, splits
from .config import DIGITS, Experiment
from .data import Part
from .errors import UserError
from .norms import swap_as_told
from .plugins import build
from .retrain import Defense, replay_adapt
from .signals import collect
from .stages import SCRATCH, Stage, stages
from .training import device, make_optimizer

UNDEFENDED = "undefended"
HARDENED = "hardened"  # the model that `pptp harden` keeps


@dataclass(frozen=True)
class Run:
    """An opened run directory."""

    path: Path
    experiment: Experiment

    # --- open and create -------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path) -> Run:
        path = Path(path)
        record = read_json(path / "run.json", f"pptp train {path} --model ... --data ...")
        return cls(path, Experiment.from_dict(record["experiment"]))

    @classmethod
    def create(cls, path: str | Path, experiment: Experiment, fresh: bool = False) -> Run:
        """A new run, or the same one to be resumed; a run of another configuration is refused."""
        from accelerate import PartialState

        experiment = _anywhere(experiment)
        with PartialState(
            cpu=experiment.recipe.device == "cpu"
        ).main_process_first():  # under torchrun one makes it, the others find it
            return cls._create(Path(path), experiment, fresh and PartialState().is_main_process)

    @classmethod
    def _create(cls, path: Path, experiment: Experiment, fresh: bool) -> Run:
        if (path / "run.json").exists() and not fresh:
            there = cls.open(path)
            different = differences(there.experiment.to_dict(), experiment.to_dict())
            if different:
                raise UserError(
                    f"{path} holds a run of another configuration ({'; '.join(different[:3])}): use another directory, or --fresh to start over"
                )
            now = experiment.recipe  # where it goes on is not what it makes
            return replace(
                there,
                experiment=replace(
                    there.experiment, recipe=replace(there.experiment.recipe, device=now.device, workers=now.workers)
                ),
            )
        half_made = {"splits.npz", "samples.csv", "canaries.npz"}  # what a kill before run.json was written leaves
        if path.exists() and not (path / "run.json").exists():
            if not path.is_dir() or any(p.name not in half_made for p in path.iterdir()):
                raise UserError(f"{path} is not empty and not a run of pptp: use another directory")
        run = cls(path, experiment)
        run._check()
        _clear(path)
        record = {
            "experiment": experiment.to_dict(),
            "versions": versions(),
            "data": run._data_digest(),
            "classes": run.splits.classes,
        }
        write_npz(path / "splits.npz", run.splits.indices)
        _write_samples(path / "samples.csv", run.splits)
        if experiment.parts.canaries:
            drawn = canaries.draw(run._pool[1], experiment.parts.canaries, experiment.recipe.seed)
            write_npz(path / "canaries.npz", {"ids": drawn.ids, "included": drawn.included})
        write_json(path / "run.json", record)  # last, since it says that this is a run
        return run

    def _check(self) -> None:
        """Refuse bad data, model, optimizer or checkpoints before anything is written."""
        vars(self)["splits"] = self._draw_splits()  # anew, also where an older run left some
        model, e = self.fresh_model(), self.experiment
        make_optimizer(model, e.recipe)
        try:
            model.eval()(torch.zeros(2, 3, e.source.img_size, e.source.img_size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UserError(
                f"{e.model} cannot take images of {e.source.img_size} px: {str(error).splitlines()[0]}"
            ) from error
        procedure = build("defenses", e.procedure)
        procedure.check(self.splits.classes, e.recipe)
        if type(procedure).adapt is not Defense.adapt:
            raise UserError(
                f"{e.procedure} changes the model, so the two models cannot be trained by it: use it in pptp retrain --cut scratch"
            )
        for path in filter(None, [e.full_checkpoint, e.half_checkpoint, e.initial_checkpoint]):
            models.load_weights(model, models.read_weights(path), path)

    # --- data ------------------------------------------------------------------------------------

    @cached_property
    def _pool(self):
        mean, std = self._normalisation
        pool, may_be_member = sources.load(self.experiment.source, mean, std)
        parts, seed = self.experiment.parts, self.experiment.recipe.seed
        if parts.canaries:
            drawn = canaries.draw(may_be_member, parts.canaries, seed)
            pool = canaries.Planted(pool, drawn.ids, parts.canary_kind, seed)
        return pool, may_be_member

    def canaries(self) -> canaries.Canaries | None:
        """Who they are and which were trained on; None if there are none."""
        path = self.path / "canaries.npz"
        if not path.exists():
            return None
        with np.load(path) as saved:
            return canaries.Canaries(saved["ids"], saved["included"])

    @cached_property
    def _normalisation(self):
        """timm knows it by the model's name, before the classes are known."""
        return models.normalisation(models.create(self.experiment.model, 2, **self._model_options))

    @property
    def _model_options(self) -> dict:
        e = self.experiment
        return {"img_size": e.source.img_size, "seed": e.recipe.seed, **e.model_kwargs}

    def _data_digest(self) -> str:
        """Hash of labels and pixels (of 64 samples where the images are too many to hold)."""
        pool = self._pool[0]
        digest = hashlib.sha256(np.ascontiguousarray(pool.labels).tobytes())
        rows = range(len(pool)) if hasattr(pool, "pixels") else np.linspace(0, len(pool) - 1, 64).astype(int)
        for row in rows:
            pixels = pool.pixels[row] if hasattr(pool, "pixels") else pool[int(row)][0]
            digest.update(pixels.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def splits(self) -> splits.Splits:
        """As saved by `pptp train`, checked against the data."""
        if read_json(self.path / "run.json", f"pptp train {self.path}")["data"] != self._data_digest():
            raise UserError(
                f"the data at {self.experiment.source.data!r} is not what {self.path} was made from: restore it, or start another run"
            )
        return splits.from_file(self._pool[0], self.path / "splits.npz")

    def _draw_splits(self) -> splits.Splits:
        pool, may_be_member = self._pool
        e = self.experiment
        if e.splits_file:
            return splits.from_file(pool, e.splits_file)
        p = e.parts
        if p.canaries:
            drawn = canaries.draw(may_be_member, p.canaries, e.recipe.seed)
            return canaries.split_around(pool, drawn, p, e.recipe.seed, may_be_member)
        return splits.split(pool, p.members, p.reference, p.nonmembers, p.test, e.recipe.seed, may_be_member)

    @cached_property
    def half_logits(self) -> Tensor:
        """(pool, classes): what the half model says of every sample; asked once, since every model's attacks want it."""
        return collect(self.model("half"), self.splits.pool, workers=self.experiment.recipe.workers).logits

    def attacked(self) -> tuple[Part, Part]:
        """The members and non-members that attacks are asked about: canaries, odd on purpose, are not among them."""
        drawn, ids = self.canaries(), self.splits.members.indices
        ids = ids if drawn is None else np.setdiff1d(ids, drawn.ids)
        return Part(self.splits.pool, ids, "members"), self.splits.nonmembers

    def splits_digest(self) -> str:
        """Of the saved splits, without reading the data."""
        return splits.digest(splits.read_ids(self.path / "splits.npz"))

    # --- models ----------------------------------------------------------------------------------

    def fresh_model(self, seed: int | None = None) -> nn.Module:
        """The model with its initial weights; with those of another seed for reference models."""
        options = self._model_options if seed is None else {**self._model_options, "seed": seed}
        return self._built(pretrained=self.experiment.pretrained, **options)

    def _built(self, **options) -> nn.Module:
        model = models.create(self.experiment.model, self.splits.classes, **options)
        if self.experiment.norm:
            swap_as_told(model, self.experiment.norm, self.parts)
        return model

    def folder(self, name: str) -> Path:
        """Where a model lives: "undefended", "half", "other" (of the second half), or the name of a retraining."""
        return self.path / {UNDEFENDED: "full", "half": "half", "other": "other"}.get(name, f"retrain/{name}")

    def model(self, name: str) -> nn.Module:
        """A finished model of this run."""
        weights = self.folder(name) / "last.safetensors"
        if not weights.exists():
            command = f"pptp train {self.path}" if name in (UNDEFENDED, "half") else f"pptp retrain {self.path}"
            raise UserError(f'no {weights}: run "{command}" first')
        model = self._built(**self._model_options)
        self._adapt(model, name)
        models.load_weights(model, models.read_weights(weights), weights)
        return model.eval().to(device(self.experiment.recipe))

    def _adapt(self, model: nn.Module, name: str) -> None:
        """Replay the layer swaps of a defense, so that its weights fit."""
        record = self.folder(name) / "defense.json"
        saved = read_json(record, "") if record.exists() else {}
        if saved.get("swaps_layers", bool(saved)):  # else the defense itself is not needed any more
            defense = build("defenses", saved["defense"], saved["set"])
            replay_adapt(model, self.parts(model), saved["cut"], defense)

    def initial_weights(self) -> dict[str, Tensor]:
        return models.read_weights(self.path / "full" / "init.safetensors")

    def early_weights(self, epoch: int) -> dict[str, Tensor]:
        path = self.path / "full" / f"epoch_{epoch}.safetensors"
        if not path.exists():
            kept = sorted(int(p.stem.split("_")[1]) for p in path.parent.glob("epoch_*.safetensors"))
            raise UserError(
                f"the weights of epoch {epoch} were not kept (there are: {kept or 'none'}): train with --keep-epochs {epoch}"
            )
        return models.read_weights(path)

    def parts(self, model: nn.Module) -> list[Stage]:
        size = self.experiment.source.img_size
        return stages(model, (3, size, size))

    def trained_names(self) -> list[str]:
        """Names of all models that can be evaluated, the undefended one first."""
        retrained = sorted(p.parent.name for p in (self.path / "retrain").glob("*/last.safetensors"))
        return [UNDEFENDED, *retrained]

    def save_model(self, name: str, model: nn.Module, card: str) -> None:
        """Weights under our name and timm's, config and model card; the weights last, since they mean "done"."""
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        from timm.models._hub import save_config_for_hf

        models.atomically(
            folder / "config.json",
            lambda temporary: save_config_for_hf(model, temporary, model_args=dict(self.experiment.model_kwargs)),
        )
        models.atomically(folder / "README.md", lambda temporary: temporary.write_text(card))
        models.write_weights(model, folder / "model.safetensors")
        models.atomically(folder / "last.safetensors", lambda temporary: _link(folder / "model.safetensors", temporary))

    # --- results ---------------------------------------------------------------------------------

    def risk(self) -> dict:
        return read_json(self.path / "risk.json", f"pptp localize {self.path}")

    def model_digest(self, name: str) -> str:
        """Hash of the weights, and of the defense that may act in the outputs besides."""
        weights = models.weights_digest(models.read_weights(self.folder(name) / "last.safetensors"))
        record = self.folder(name) / "defense.json"
        if not record.exists():
            return weights
        made = read_json(record, "")
        plan = [weights, *(made.get(key) for key in ("defense", "set", "cut", "code"))]
        return hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]

    def cut_of(self, name: str) -> str:
        """Where a model was cut; "scratch" if nothing of it was frozen."""
        record = self.folder(name) / "defense.json"
        return read_json(record, "")["cut"] if record.exists() else SCRATCH

    def evaluations(self) -> tuple[dict[str, dict], list[str]]:
        """Evaluations of the models as they are now, and the names of models that were not evaluated since they changed."""
        current, missing = {}, []
        for name in self.trained_names():
            target = self.path / "evaluate" / name / "evaluation.json"
            found = read_json(target, "") if target.exists() else {"key": {}}
            now = {"weights": self.model_digest(name), "splits": self.splits_digest()}
            if {part: found["key"].get(part) for part in now} == now:
                current[name] = found
            else:
                missing.append(name)
        return current, missing


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def differences(old: Mapping, new: Mapping) -> list[str]:
    found = []
    new = json.loads(json.dumps(new))  # as the saved one was: tuples have become lists
    for key in new:
        if isinstance(new[key], Mapping) and key != "model_kwargs":
            found += differences(old.get(key, {}), new[key])
        elif old.get(key) != new[key] and key not in ("workers", "device", "download"):
            found.append(f"{key} was {old.get(key)!r}, now {new[key]!r}")
    return found


FOLDERS = ("full", "half", "other", "retrain", "evaluate", "ensembles", "frontier", "monitors", "factors")
FILES = (
    "run.json",
    "splits.npz",
    "samples.csv",
    "risk.json",
    "distances.npz",
    "report.html",
    "report.json",
    "canaries.npz",
    "audit.json",
    "harden.json",
)


def _clear(path: Path) -> None:
    """Remove what pptp made in a run directory, and nothing else."""
    for name in FOLDERS:
        shutil.rmtree(path / name, ignore_errors=True)
    for name in FILES:
        (path / name).unlink(missing_ok=True)


def _anywhere(experiment: Experiment) -> Experiment:
    """With absolute paths, so that the run works from any folder."""
    source, e = experiment.source, experiment
    here = Path(source.data_dir, source.data)
    if source.data.startswith(("torch/", "hfds/")):
        source = replace(source, data_dir=str(Path(source.data_dir).resolve()) if source.data_dir else "")
    elif source.data != DIGITS and here.exists():
        source = replace(source, data=str(here.resolve()), data_dir="")
    files = ("full_checkpoint", "half_checkpoint", "initial_checkpoint", "splits_file")
    found = {name: str(Path(getattr(e, name)).resolve()) for name in files if getattr(e, name)}
    kind, colon, place = e.model.partition(":")
    if kind == "local-dir" and colon:
        found["model"] = f"{kind}:{Path(place).resolve()}"
    return replace(e, source=source, **found)


def _write_samples(path: Path, made: splits.Splits) -> None:
    """Which file every sample id stands for, and which part it is in."""
    pool, part_of = made.pool, np.full(len(made.pool), "", dtype=object)
    for name, rows in made.indices.items():
        part_of[rows] = name
    files = pool.files or [""] * len(pool)
    names = [pool.class_names[y] if pool.class_names else str(y) for y in pool.labels]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["id", "file", "class", "part"])
    table.writerows(zip(range(len(pool)), files, names, part_of))
    models.atomically(  # a name that is no UTF-8 is written byte by byte as it is
        path, lambda temporary: temporary.write_text(text.getvalue(), encoding="utf-8", errors="surrogateescape")
    )


# --- files ---------------------------------------------------------------------------------------


def read_json(path: Path, made_by: str) -> dict:
    if not path.exists():
        raise UserError(f'no {path.name} in {path.parent}: run "{made_by}" first')
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is damaged ({error}): delete it and run its command again") from error


def write_json(path: Path, value: Mapping) -> None:
    models.atomically(
        path,
        lambda temporary: temporary.write_text(json.dumps(value, indent=1, allow_nan=False, default=_plain) + "\n"),
    )


def _plain(value):
    """numpy scalars as numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def write_jsonl(path: Path, rows: list[Mapping]) -> None:
    models.atomically(path, lambda temporary: temporary.write_text("".join(json.dumps(row) + "\n" for row in rows)))


def keep_history(folder: Path) -> None:
    """The rows of every epoch, from the last checkpoint."""
    if (folder / "checkpoint.pt").exists():
        write_jsonl(folder / "history.jsonl", torch.load(folder / "checkpoint.pt", weights_only=True)["history"])


def forget_checkpoints(folder: Path) -> None:
    """What was needed to resume, of sub-models too."""
    for path in folder.glob("checkpoint.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:  # a name would get ".npz" appended
            np.savez_compressed(file, **arrays)

    models.atomically(path, write)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("pptp", "torch", "torchvision", "timm", "accelerate", "scikit-learn", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


# --- what it cost --------------------------------------------------------------------------------


@contextmanager
def measured(cost: dict[str, float], every: float = 0.05):
    """Fill `cost` with seconds and the peak memory of the process (of the GPU, where there is one) in MB."""
    process, peak, done = psutil.Process(), [0], threading.Event()

    def sample() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            done.wait(every)

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    started = time.perf_counter()
    try:
        yield
    finally:
        done.set()
        thread.join()
        cost["seconds"] = time.perf_counter() - started
        cost["peak_mb"] = max(peak[0], process.memory_info().rss) / 2**20
        if torch.cuda.is_available():
            cost["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
