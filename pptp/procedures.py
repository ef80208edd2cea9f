"""How the models of a run are trained: the base by its recipe, then what a retraining did to it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from . import models
from .cache import Policy, TrunkCache
from .config import Experiment, Recipe
from .data import Part
from .errors import UserError
from .outside import Teachers
from .plugins import build, check_written, code_of, find, settings_of
from .retrain import Defense, retrain
from .splits import TrainingData, halves
from .stages import SCRATCH, Stage, snapshot
from .training import Monitor, device, fit


class KeepWeights(Monitor):
    """Save the weights after the listed epochs ("1,5"), for `--rewind epoch=K`."""

    def __init__(self, folder: Path, epochs: str):
        self.folder, self.epochs = folder, [int(k) for k in epochs.split(",") if k]

    def after_epoch(self, model, epoch):
        if epoch + 1 in self.epochs:
            models.write_weights(model, self.folder / f"epoch_{epoch + 1}.safetensors")
        return {}


def make_defense(name: str, settings: Sequence[str] = ()) -> Defense:
    cls = find("defenses", name)
    if not isinstance(cls, type) or not issubclass(cls, Defense):
        raise UserError(f"{name!r} is not a defense: it must be a class that inherits from pptp.Defense")
    built = build("defenses", name, settings)
    check_written(name, built)
    return built


OPTIONAL = ("code", "views", "cache_dtype")  # what a plan has only where it matters


def what_recipe(recipe: Mapping) -> dict:
    """Of a recipe as plain data, what decides the result; not where it is trained."""
    return {name: value for name, value in recipe.items() if name not in ("workers", "device")}


@dataclass(frozen=True)
class Setting:
    """One retraining: everything that decides what it makes of a base."""

    defense: str
    settings: tuple[str, ...]  # field=value
    cut: str
    rewind: str
    recipe: Recipe
    views: int = 0  # of the trunk cache
    cache_dtype: str = "float32"

    def plan(self) -> dict:
        """As defense.json keeps it; of a defense from elsewhere with its code, since that has no version."""
        chosen = make_defense(self.defense, self.settings)
        own = {"code": code_of(type(chosen))} if ":" in self.defense else {}
        if self.recipe.augment and self.views:  # else every epoch sees fresh ones
            own["views"] = self.views
        if self.cache_dtype != "float32":
            own["cache_dtype"] = self.cache_dtype
        return {
            "defense": self.defense,
            "set": settings_of(chosen),
            "cut": self.cut,
            "rewind": self.rewind,
            "recipe": asdict(self.recipe),
            **own,
        }

    def key(self, base: str) -> str:
        """Hash of the plan, and of the base model's digest; not of where it is trained."""
        plan = self.plan()
        plan["recipe"] = what_recipe(plan["recipe"])
        return hashlib.sha256(json.dumps([plan, base], default=str).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return " ".join([self.cut, *self.settings])


def train_base(
    experiment: Experiment,
    model: nn.Module,
    data: TrainingData,
    recipe: Recipe,
    monitors: Sequence[Monitor] = (),
    checkpoint: Path | None = None,
    title: str = "training",
) -> dict[str, float]:
    """Plain training, or that of a defense used as a recipe (CS-KD)."""
    if experiment.procedure == "plain":
        return fit(model, data.members, recipe, monitors=monitors, checkpoint=checkpoint, title=title).summary()
    return make_defense(experiment.procedure).train(model, data, recipe, monitors=monitors, checkpoint=checkpoint)


def train_like(
    experiment: Experiment,
    plan: Mapping | None,
    model: nn.Module,
    parts: Sequence[Stage],
    data: TrainingData,
    folder: Path,
    seed: int,
    monitors: Sequence[Monitor] = (),
    choose_cut=None,
    shared: Path | None = None,
) -> str:
    """Train `model` in place from its initial weights as the base was, and then as the retraining `plan` (defense.json) says.

    choose_cut: called with the trained base, for a cut of its own; otherwise the plan's. Returns the cut.
    shared: where the base and the models of its halves are kept, for other retrainings of the same samples.
    """
    initial, base_recipe = snapshot(model), replace(experiment.recipe, seed=seed)
    keep = KeepWeights(folder, plan["rewind"].partition("=")[2] if plan else "")
    if plan is None or plan["cut"] != SCRATCH or plan["rewind"] != "init" or choose_cut:
        watching = [*([keep] if keep.epochs else []), *(monitors if plan is None else ())]
        job = partial(train_base, experiment, model, data, base_recipe, watching, folder / "base.pt", "reference")
        _trained(model, shared and shared / "base.safetensors", base_recipe, job, again=bool(watching))
    if plan is None:
        return ""
    cut = choose_cut(model, initial) if choose_cut else plan["cut"]
    defense = make_defense(plan["defense"], plan["set"])
    recipe = replace(Recipe(**plan["recipe"]), seed=seed)
    if defense.needs_outside:
        data = replace(data, outside=_own_outside(experiment, model, initial, data, base_recipe, folder, shared))
    start = _start(plan["rewind"], initial, folder)
    cache = TrunkCache(Policy(views=plan.get("views", 0), dtype=plan.get("cache_dtype", "float32")), folder)
    checkpoint = folder / "checkpoint.pt"
    retrain(model, start, cut, defense, data, recipe, monitors, parts=parts, checkpoint=checkpoint, cache=cache)
    return cut


def _trained(model: nn.Module, path: Path | None, recipe: Recipe, train: Callable[[], object], again=False) -> None:
    """Give the model the weights in `path`; where there are none, or `again`, train it and keep them there."""
    if path is not None and path.exists() and not again:
        models.load_weights(model, models.read_weights(path), str(path))
        model.to(device(recipe)).eval()  # where training would have left it
        return
    train()
    if path is not None:
        models.write_weights(model, path)


def _own_outside(
    experiment: Experiment, model: nn.Module, initial, data: TrainingData, recipe: Recipe, folder: Path, shared
) -> Teachers:
    """Teachers of a reference model's own members: models of their halves, trained as the base was."""
    rng = np.random.default_rng(recipe.seed)
    parts = [
        Part(data.members, rows, f"half {i + 1}")
        for i, rows in enumerate(halves(np.arange(len(data.members)), data.members.labels, rng))
    ]
    trained = []
    for i, part in enumerate(parts):
        half = copy.deepcopy(model)
        half.load_state_dict(initial)
        own = TrainingData(part, data.reference)
        job = partial(train_base, experiment, half, own, recipe, (), folder / f"half_{i + 1}.pt", part.name)
        _trained(half, shared and shared / f"half_{i + 1}.safetensors", recipe, job)
        trained.append(half)
    return Teachers(*trained, *parts)


def _start(rewind: str, initial: Mapping[str, Tensor], folder: Path) -> Mapping[str, Tensor] | None:
    if rewind == "none":
        return None
    return (
        initial if rewind == "init" else models.read_weights(folder / f"epoch_{rewind.partition('=')[2]}.safetensors")
    )
