"""How the models of a run are trained: the base by its recipe, then what a retraining did to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from . import models
from .config import Experiment, Recipe
from .errors import UserError
from .plugins import build
from .retrain import Defense, retrain
from .splits import TrainingData
from .stages import SCRATCH, Stage, snapshot
from .training import Monitor, fit


class KeepWeights(Monitor):
    """Save the weights after the listed epochs ("1,5"), for `--rewind epoch=K`."""

    def __init__(self, folder: Path, epochs: str):
        self.folder, self.epochs = folder, [int(k) for k in epochs.split(",") if k]

    def after_epoch(self, model, epoch):
        if epoch + 1 in self.epochs:
            models.write_weights(model, self.folder / f"epoch_{epoch + 1}.safetensors")
        return {}


def make_defense(name: str, settings: Sequence[str] = ()) -> Defense:
    built = build("defenses", name, settings)
    if not isinstance(built, Defense):
        raise UserError(f"{name!r} is not a defense: it must be a class that inherits from pptp.Defense")
    return built


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
) -> str:
    """Train `model` in place from its initial weights as the base was, and then as the retraining `plan` (defense.json) says.

    choose_cut: called with the trained base, for a cut of its own; otherwise the plan's. Returns the cut.
    """
    initial, base_recipe = snapshot(model), replace(experiment.recipe, seed=seed)
    keep = KeepWeights(folder, plan["rewind"].partition("=")[2] if plan else "")
    if plan is None or plan["cut"] != SCRATCH or plan["rewind"] != "init" or choose_cut:
        watching = (keep, *monitors) if plan is None else (keep,)
        train_base(experiment, model, data, base_recipe, watching, folder / "base.pt", "reference")
    if plan is None:
        return ""
    cut = choose_cut(model, initial) if choose_cut else plan["cut"]
    defense = make_defense(plan["defense"], plan["set"])
    recipe = replace(Recipe(**plan["recipe"]), seed=seed)
    start = _start(plan["rewind"], initial, folder)
    retrain(model, start, cut, defense, data, recipe, monitors, parts=parts, checkpoint=folder / "checkpoint.pt")
    return cut


def _start(rewind: str, initial: Mapping[str, Tensor], folder: Path) -> Mapping[str, Tensor] | None:
    if rewind == "none":
        return None
    return (
        initial if rewind == "init" else models.read_weights(folder / f"epoch_{rewind.partition('=')[2]}.safetensors")
    )
