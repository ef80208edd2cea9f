"""What each sub-command does: load from the run directory, call the library, save. No logic of its own."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from . import models
from .cache import Policy, TrunkCache
from .config import Experiment, Recipe
from .data import Part
from .describe import describe
from .describe import table as describe_table
from .errors import UserError
from .intervals import rate_difference
from .localize import localize
from .outside import Teachers
from .plugins import find
from .procedures import OPTIONAL, KeepWeights, Setting, make_defense, train_base
from .report import activity, write_report
from .retrain import Defense, retrain
from .runs import (
    HARDENED,
    UNDEFENDED,
    Run,
    differences,
    forget_checkpoints,
    keep_history,
    measured,
    read_json,
    write_json,
    write_npz,
)
from .signals import collect
from .splits import TrainingData, copies_of_members
from .stages import SCRATCH, split_at, stages
from .studies import save as save_section
from .training import main_process, make_optimizer
from .watching import Watching, keep_watched, slowdown


def train_run(path: str, experiment: Experiment, fresh: bool = False, watching: Watching | None = None) -> Run:
    """M_all on the members and M_h1 on their first half, from the same initial weights; monitors look at M_all."""
    run, watching = Run.create(path, experiment, fresh), watching or Watching()
    print("\n".join([_sizes(run), *_contents(run)]))
    _announce(run, watching)
    jobs = (
        (UNDEFENDED, run.splits.members, experiment.full_checkpoint),
        ("half", run.splits.h1, experiment.half_checkpoint),
    )
    for name, part, given in jobs:
        if (run.folder(name) / "last.safetensors").exists():
            print(f"{run.folder(name)}: already there")
        elif given:
            _adopt(run, name, given)
        else:
            _train_one(run, name, part, watching if name == UNDEFENDED else Watching())
    if experiment.half_checkpoint:
        _doubt(run)
    return run


def _announce(run: Run, watching: Watching) -> None:
    """What the monitors will cost, before they do."""
    if not watching.names:
        return
    if watching.every > run.experiment.recipe.epochs:
        raise UserError(
            f"monitor_every is {watching.every}, but there are {run.experiment.recipe.epochs} epochs: monitors would never look"
        )
    folder = run.folder(UNDEFENDED)
    if (folder / "last.safetensors").exists() and all((folder / f"{name}.npz").exists() for name in watching.names):
        return  # they have looked, and what is left to train is not watched
    if run.experiment.full_checkpoint or (folder / "last.safetensors").exists():
        raise UserError(
            f"monitors look on while the model is trained, and that of {run.path} is trained already: leave them out, or train again with --fresh"
        )
    for name, factor in slowdown(run, run.splits.members, watching).items():
        print(f"monitor {name}: training will take about {factor:.2f} times as long (every {watching.every} epochs)")


def _sizes(run: Run) -> str:
    parts = {name: len(ids) for name, ids in run.splits.indices.items()}
    unused = len(run.splits.pool) - sum(parts.values())
    canaries = run.canaries()
    odd = "" if canaries is None else f" with {int(canaries.included.sum())} of {len(canaries.ids)} canaries"
    return (
        f"members {parts['h1'] + parts['h2']}{odd} (halves {parts['h1']} and {parts['h2']}), reference {parts['reference']}, "
        f"non-members {parts['nonmembers']}, test {parts['test']}, unused {unused}; {run.splits.classes} classes"
    )


SHOWN_CLASSES = 12


def _contents(run: Run) -> list[str]:
    """What was taken for a class, and what may be amiss with the images."""
    pool, lines = run.splits.pool, []
    if pool.class_names:
        counts = np.bincount(pool.labels, minlength=len(pool.class_names))
        names = [os.fsencode(name).decode("utf-8", "replace") for name in pool.class_names[:SHOWN_CLASSES]]
        shown = [f"{name} {count}" for name, count in zip(names, counts)]
        lines.append("classes: " + ", ".join(shown) + (", ..." if len(counts) > SHOWN_CLASSES else ""))
    if pool.left_out:
        lines.append(f"{pool.left_out} files were left out: they are hidden, or no images")
    if pool.other_splits:
        hint = "" if run.experiment.source.val_split else f": --val-split {pool.other_splits[0]} takes non-members and test from there"
        lines.append(f"not read, since they are other splits: {', '.join(pool.other_splits)}{hint}")
    copies = copies_of_members(run.splits)
    if copies is None:
        lines.append("copies of members among the others were not looked for, since images are read one by one")
    elif copies:
        lines.append(
            f"{copies} non-members or test images are copies of members, so that what is found about them is not about outsiders: remove duplicates from the data"
        )
    return lines


def _doubt(run: Run) -> None:
    """Ids in another order than the data's make members of non-members, and every leak look mended: the half model would show it."""
    model, workers = run.model("half"), run.experiment.recipe.workers
    right = []
    for part in (run.splits.h1, run.splits.h2):
        said = collect(model, part, workers=workers)
        right += [int((said.logits.argmax(1) == said.labels).sum()), len(said)]
    more = rate_difference(*right)
    if not more.low > 0:
        print(
            f"the half model is not surely more accurate on h1 than on h2 ({more}): are these the samples that it was trained on? {run.path}/samples.csv says which file each id stands for"
        )


def _initial_model(run: Run, folder: Path):
    """The model at its initial weights, which are saved beside it before anything else happens."""
    model = run.fresh_model()
    if run.experiment.initial_checkpoint:
        path = run.experiment.initial_checkpoint
        models.load_weights(model, models.read_weights(path), path)
    if not (folder / "init.safetensors").exists():
        models.write_weights(model, folder / "init.safetensors")
    return model


def _train_one(run: Run, name: str, part, watching: Watching) -> None:
    folder = run.folder(name)
    model = _initial_model(run, folder)
    keep = [KeepWeights(folder, run.experiment.keep_epochs)] if name == UNDEFENDED else []
    monitors = watching.monitors(run, part)
    title = f"{name} ({len(part)} images)"
    cost: dict[str, float] = {}
    with measured(cost):
        data = TrainingData(part, run.splits.reference)
        looking = [*keep, *monitors.values()]
        summary = train_base(
            run.experiment, model, data, run.experiment.recipe, looking, folder / "checkpoint.pt", title
        )
    if not main_process():
        return
    cost["seconds"] = summary["seconds"]  # of all epochs, also of those before a resume
    keep_history(folder)
    keep_watched(run, monitors)
    write_json(folder / "cost.json", cost)
    card = "Trained by pptp without a privacy defense. It memorises; do not publish it."
    run.save_model(name, model, f"# {run.experiment.model}, {name}\n\n{card}\n")
    forget_checkpoints(folder)
    print(f"{name}: {_sentence(summary)}")


def _adopt(run: Run, name: str, checkpoint: str) -> None:
    """Take over a model that was trained elsewhere."""
    model = run.fresh_model()
    models.load_weights(model, models.read_weights(checkpoint), checkpoint)
    _initial_model(run, run.folder(name))
    card = "Trained elsewhere, taken over by pptp from a checkpoint."
    run.save_model(name, model, f"# {run.experiment.model}, {name}\n\n{card}\n")
    known = bool(run.experiment.initial_checkpoint)
    print(
        f"{name}: taken from {checkpoint}"
        + ("" if known else "; its initial weights are unknown, so a rewind goes to fresh weights of this seed")
    )


def _sentence(summary: dict) -> str:
    """What a training says of itself; a defense of your own may leave things out."""
    shown = {
        "epochs": "{:.0f} epochs",
        "loss": "loss {:.4f}",
        "accuracy": "accuracy while training {:.3f}",
        "seconds": "{:.0f} s",
    }
    return ", ".join(text.format(summary[key]) for key, text in shown.items() if summary.get(key) is not None)


def localize_run(
    path: str, delta: float = 0.05, probes: bool = True, probe_samples: int = 2000, fresh: bool = False
) -> dict:
    """`pptp localize`: compare the two models, write risk.json and distances.npz."""
    run = Run.open(path)
    settings = {"delta": delta, "probes": probes, "probe_samples": probe_samples}
    target = run.path / "risk.json"
    if target.exists() and not fresh:
        risk = run.risk()
        if risk["settings"] == settings:
            print(risk["text"])
            return risk
    full, half = run.model(UNDEFENDED), run.model("half")
    _check_same_start(run)
    cost: dict[str, float] = {}
    with measured(cost):
        report = localize(
            full,
            half,
            run.splits.h1,
            run.splits.h2,
            run.splits.test,
            delta=delta,
            probes=probes,
            probe_samples=probe_samples,
            batch_size=run.experiment.recipe.batch_size,
            workers=run.experiment.recipe.workers,
            seed=run.experiment.recipe.seed,
            parts=run.parts(full),
            check_initial_weights=bool(run.experiment.full_checkpoint),
        )
    write_npz(
        run.path / "distances.npz",
        {
            f"{name}/{metric}": values.astype(np.float32)
            for name, metrics in report.raw.items()
            for metric, values in metrics.items()
        },
    )
    risk = {**report.to_dict(), "settings": settings, "cost": cost, "text": str(report)}
    write_json(target, risk)
    print(report)
    return risk


def _check_same_start(run: Run) -> None:
    first, second = (models.read_weights(run.folder(name) / "init.safetensors") for name in (UNDEFENDED, "half"))
    if models.weights_digest(first) != models.weights_digest(second):
        raise UserError(
            f"the full and the half model of {run.path} do not start from the same initial weights: distances between them would mean nothing; train again with --fresh"
        )


def resolve_cut(run: Run, cut: str) -> str:
    """ "auto", "strict" and "block" ask risk.json; anything else is the name itself."""
    if cut not in ("auto", "strict", "block"):
        return cut
    return run.risk()[{"auto": "cut", "strict": "strict_cut", "block": "block_cut"}[cut]]


def retrain_run(
    path: str,
    defenses: dict[str, list[str]],
    recipe_changes: dict,
    cut: str = "auto",
    rewind: str = "init",
    name: str = "",
    control: bool = True,
    fresh: bool = False,
    policy: Policy | None = None,
    shelf: Path | None = None,
) -> None:
    """`pptp retrain`: Algorithm 1 with each defense (name -> settings), and with plain cross-entropy as their control.

    On a `shelf` lies what later retrainings of this base can use again, like SELENA's sub-models; whoever gives one clears it.
    """
    run, policy = Run.open(path), policy or Policy()
    recipe = retrain_recipe(run.experiment.recipe, recipe_changes)
    first_stage = resolve_cut(run, cut)
    if _checked_name(name) and len(defenses) > 1:
        raise UserError("name goes with one defense: leave it out, and each gets a folder of its own")
    asked = set(defenses)
    if control and "plain" not in defenses:
        defenses = {**defenses, "plain": []}
    jobs = []
    for defense, settings in defenses.items():
        make_defense(defense, settings)  # or refuse it, before anything else
        own = name and (f"{name}-control" if defense == "plain" and len(defenses) > 1 else name)
        setting = Setting(defense, tuple(settings), first_stage, rewind, recipe, policy.views, policy.dtype)
        job = _Job(_checked_name(own or _job_name(defense, cut, rewind)), setting, fresh and defense in asked)
        jobs.append(job if defense in asked else job.beside(run))
    waiting = [job for job in jobs if job.is_needed(run)]  # refuses before anything is trained or deleted
    if waiting:
        base = run.model(UNDEFENDED)
        parts = run.parts(base)
        for job in waiting:
            job.check(run, base, parts)
        cache = TrunkCache(policy, run.path)  # shared by all of them
        data = replace(training_data(run, [job.setting.defense for job in waiting]), shelf=shelf)
        for job in waiting:
            _retrain_one(run, job, data, parts, cache)


def training_data(run: Run, defenses: Sequence[str]) -> TrainingData:
    """What defenses are given; where one of them needs them, with models of the two halves as teachers, the second of which is trained now if it is not there."""
    if not any(getattr(find("defenses", name), "needs_outside", False) for name in defenses):
        return run.splits.for_defense()
    if not (run.folder("other") / "last.safetensors").exists():
        _train_one(run, "other", run.splits.h2, Watching())
    data, s = run.splits.for_defense(), run.splits
    halves = [Part(data.members.pool, part.indices, part.name) for part in (s.h1, s.h2)]  # behind the same fence
    teachers = Teachers(run.model("half"), run.model("other"), *halves, workers=run.experiment.recipe.workers)
    return replace(data, outside=teachers)


def _checked_name(name: str) -> str:
    if name and (
        not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in (UNDEFENDED, "half", "full", "other", HARDENED)
    ):
        raise UserError(
            f"name is {name!r}: use letters, digits, dots, dashes and underscores, and not undefended, full, half, other or {HARDENED}"
        )
    return name


def _job_name(defense: str, cut: str, rewind: str) -> str:
    """The folder of a retraining: its defense, and what differs from the defaults."""
    short = defense.rpartition(":")[2].lower()
    return short + ("" if cut == "auto" else f"-{cut}") + ("" if rewind == "init" else f"-{rewind.replace('=', '')}")


def retrain_recipe(trained: Recipe, changes: dict) -> Recipe:
    """The recipe of training with half of its epochs (made even), unless told otherwise."""
    epochs = changes.get("epochs", max(2, trained.epochs // 4 * 2))
    warmup = trained.warmup_epochs * epochs // trained.epochs
    return replace(trained, **{"epochs": epochs, "warmup_epochs": min(warmup, epochs - 1), **changes})


@dataclass(frozen=True)
class _Job:
    """One retraining and the folder it goes to."""

    name: str
    setting: Setting
    fresh: bool = False  # whether to replace what is there

    def different(self, there: dict) -> list[str]:
        """How another retraining, as its defense.json tells it, was made otherwise."""
        plan = {**dict.fromkeys(OPTIONAL), **self.setting.plan()}
        return differences({key: there.get(key) for key in plan}, plan)

    def beside(self, run: Run) -> _Job:
        """Itself, or under another name where a control of other settings has the place: earlier defenses are compared with that."""
        taken = run.folder(self.name) / "defense.json"
        if not taken.exists() or not self.different(read_json(taken, "")):
            return self
        return replace(self, name=f"{self.name}-{self.setting.key('')[:6]}")

    def is_needed(self, run: Run) -> bool:
        """False if it was done; refuses a folder that was made with other settings."""
        folder = run.folder(self.name)
        begun = (folder / "last.safetensors").exists() or any(folder.glob("checkpoint.*"))
        if self.fresh or not (folder / "defense.json").exists() or not begun:
            return True
        different = self.different(read_json(folder / "defense.json", ""))
        if different:
            raise UserError(
                f"{folder} was retrained with other settings ({'; '.join(different[:2])}): pass --name for another folder, or --fresh to replace it"
            )
        done = (folder / "last.safetensors").exists()
        if done:
            print(f"{folder}: already there")
        return not done

    def check(self, run: Run, base, parts) -> None:
        """Refuse whatever cannot work."""
        setting = self.setting
        defense = make_defense(setting.defense, setting.settings)
        defense.check(run.splits.classes, setting.recipe)
        defense.check_start(setting.rewind == "init")
        split_at(parts, setting.cut)
        make_optimizer(base, setting.recipe)
        _rewind_state(run, setting.rewind)


def _rewind_state(run: Run, rewind: str):
    if rewind == "init":
        return run.initial_weights()
    if rewind == "none":
        return None
    if rewind.startswith("epoch=") and rewind[6:].isdigit():
        return run.early_weights(int(rewind[6:]))
    raise UserError(f"rewind is {rewind!r}: it must be init, none or epoch=K")


def _retrain_one(run: Run, job: _Job, data: TrainingData, parts, cache: TrunkCache) -> None:
    folder, setting = run.folder(job.name), job.setting
    if job.fresh and main_process():
        shutil.rmtree(folder, ignore_errors=True)
    defense = make_defense(setting.defense, setting.settings)
    model, state = run.model(UNDEFENDED), _rewind_state(run, setting.rewind)
    write_json(folder / "defense.json", {**setting.plan(), "swaps_layers": _swaps_layers(defense)})
    cost: dict[str, float] = {}
    with measured(cost):
        checkpoint = folder / "checkpoint.pt"
        result = retrain(
            model, state, setting.cut, defense, data, setting.recipe, parts=parts, checkpoint=checkpoint, cache=cache
        )
    if not main_process():
        return
    cost["seconds"] = result.get("seconds", cost["seconds"])  # of all epochs, also of those before a resume
    keep_history(folder)
    _save_retrained(run, job, model, result, cost)
    forget_checkpoints(folder)
    print(
        f"{job.name}: cut {setting.cut}, {result['retrained_share']:.1%} of the weights retrained, {_sentence(result)}; trunk cache: {result['cache']}"
    )
    if setting.defense != "plain":
        print(f"{job.name}: {activity(result)}")


def _save_retrained(run: Run, job: _Job, model: nn.Module, result: dict, cost: dict) -> None:
    defense = make_defense(job.setting.defense, job.setting.settings)
    made = {"swaps_layers": _swaps_layers(defense), "repr": repr(defense), "result": result, "cost": cost}
    record = {**job.setting.plan(), **made}
    write_json(run.folder(job.name) / "defense.json", record)
    run.save_model(job.name, model, _card(run, job, defense, result))  # last, since weights mean "done"


def _swaps_layers(defense: Defense) -> bool:
    """Whether its model can be loaded only with it."""
    return type(defense).adapt is not Defense.adapt


def adopt(run: Run, name: str, model: nn.Module, setting: Setting, trained: Path) -> None:
    """The model that a sweep has trained by `setting`, in the folder `trained`, as a retraining of the run; what had that name makes room."""
    made, folder = read_json(trained / "trained.json", ""), run.folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(trained / "history.jsonl", folder)
    _save_retrained(run, _Job(name, setting), model, made["result"], made["cost"])


def _card(run: Run, job: _Job, defense, result: dict) -> str:
    cut = job.setting.cut
    what = "retrained whole" if cut == SCRATCH else f"frozen before {cut}, retrained from there on"
    swapped = _swaps_layers(defense) or run.experiment.norm
    loading = (
        "Some of its layers were swapped, so it loads with pptp only."
        if swapped
        else 'Load it with `timm.create_model("local-dir:<this folder>", pretrained=True)`.'
    )
    return (
        f"---\nlibrary_name: timm\n---\n# {run.experiment.model}, {job.name}\n\n"
        f"Made by pptp: {what}, rewound to {job.setting.rewind}, under {defense!r}.\n\n"
        f"Differential privacy: {result.get('scope', 'none')}. What attacks find is in evaluate/ of the run it comes from.\n\n{loading}\n"
    )


def report_run(path: str, images: bool = True) -> Path:
    run = Run.open(path)
    target = write_report(run, images)
    print(f"wrote {target}")
    return target


def monitor_run(path: str, name: str, **settings) -> Path:
    """`pptp monitor`: study a finished run and keep the section for the report."""
    from .studies import batchnorm, curvature, dynamics, factors, tokens

    kinds = {"dynamics": dynamics, "curvature": curvature, "tokens": tokens, "batchnorm": batchnorm, "factors": factors}
    run = Run.open(path)
    return save_section(run, kinds[name].study(run, **settings))


def stages_of(model_name: str, img_size: int = 0, blocks: bool = False) -> None:
    """`pptp stages`: where a timm model can be cut, and what that would save."""
    model = models.create(model_name, 10, **({"img_size": img_size} if img_size else {}))
    size = (3, img_size, img_size) if img_size else None
    size = size or tuple(model.pretrained_cfg["input_size"])
    try:
        parts = stages(model, size)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"{model_name} cannot take images of {size[-1]} px: {str(error).splitlines()[0]}") from error
    print(f"{model_name}, input {'x'.join(map(str, size))}, 10 classes")
    print(describe_table(describe(model, size, blocks, parts)))
