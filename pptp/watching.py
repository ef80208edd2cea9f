"""Monitors during `pptp train`: which there are, what they will cost, and what they leave in the run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from .config import Recipe
from .data import Part, indexed, some
from .errors import UserError
from .monitors.batchnorm import Influence
from .monitors.curvature import Curvature
from .monitors.dynamics import Recording
from .monitors.tokens import Settings, Tokens
from .norms import batch_norms
from .runs import UNDEFENDED, Run, write_npz
from .training import Monitor, make_optimizer

SMALL = 32  # samples (batches for tokens) that the cost is measured on
WARM_ENOUGH = 2.0  # seconds; what takes longer is not measured twice


@dataclass(frozen=True)
class Watching:
    """What to look at while training; nothing of it changes the weights."""

    names: tuple[str, ...] = ()
    every: int = 1  # epochs
    samples: int = 2000  # watched at most

    def __post_init__(self):
        unknown = [name for name in self.names if name not in WATCHERS]
        if unknown:
            raise UserError(f"there is no monitor called {', '.join(unknown)}: there are {', '.join(WATCHERS)}")
        if self.every < 1 or self.samples < 20:
            raise UserError(
                f"monitor_every is {self.every} and monitor_samples {self.samples}: at least 1 epoch and 20 samples are needed"
            )

    def monitors(self, run: Run, part: Part) -> dict[str, Monitor]:
        return {name: WATCHERS[name](run, part, self.every, self.samples) for name in self.names}


def _curvature(run: Run, part: Part, every: int, samples: int) -> Monitor:
    return Curvature(part, every, samples)


def _dynamics(run: Run, part: Part, every: int, samples: int) -> Monitor:
    return Recording(part, every, samples, workers=run.experiment.recipe.workers)


def _tokens(run: Run, part: Part, every: int, samples: int) -> Monitor:
    settings = Settings(batches=max(20, min(200, samples // Settings.batch_size)))
    return Tokens(part, every, settings)


def _batchnorm(run: Run, part: Part, every: int, samples: int) -> Monitor:
    """Outliers are the canaries that are trained on, where there are some."""
    if not batch_norms(run.fresh_model()):
        raise UserError(f"{run.experiment.model} has no BatchNorm: leave out the monitor batchnorm")
    canaries, outliers = run.canaries(), None
    if canaries is not None and canaries.included.any():
        outliers = Part(run.splits.pool, canaries.ids[canaries.included], "canaries")
    return Influence(part, every, outliers, most=max(2, min(16, samples // 96)))


WATCHERS: dict[str, Callable[[Run, Part, int, int], Monitor]] = {
    "curvature": _curvature,
    "dynamics": _dynamics,
    "tokens": _tokens,
    "batchnorm": _batchnorm,
}


def slowdown(run: Run, part: Part, watching: Watching) -> dict[str, float]:
    """name -> how many times as long an epoch will take with this monitor, measured now on a few samples and scaled up."""
    model, recipe = run.fresh_model(), run.experiment.recipe
    epoch = _seconds_a_sample(model, part, recipe) * len(part)
    found = {}
    for name in watching.names:
        real = WATCHERS[name](run, part, watching.every, watching.samples)
        small = WATCHERS[name](run, some(part, max(SMALL, 8), "few"), 1, SMALL)
        twin = copy.deepcopy(model)
        took = _seconds_of(small, twin)
        if took < WARM_ENOUGH:  # the first look warms up
            took = _seconds_of(small, twin)
        look = took * real.watched / small.watched
        found[name] = 1 + look / watching.every / epoch
    return found


def _seconds_of(monitor: Monitor, model: nn.Module) -> float:
    started = time.perf_counter()
    monitor.after_epoch(model, 0)
    return time.perf_counter() - started


def _seconds_a_sample(model: nn.Module, part: Part, recipe: Recipe) -> float:
    """Of a training step on a copy of the model."""
    twin = copy.deepcopy(model).train()
    optimizer = make_optimizer(twin, recipe)
    size = min(recipe.batch_size, len(part))
    x, y, _ = next(iter(DataLoader(indexed(part), batch_size=size)))
    for _ in range(2):  # the first warms up
        started = time.perf_counter()
        F.cross_entropy(twin(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started) / size


def keep_watched(run: Run, monitors: dict[str, Monitor]) -> None:
    """Write what each has seen beside the model: full/NAME.npz."""
    for name, monitor in monitors.items():
        write_npz(run.folder(UNDEFENDED) / f"{name}.npz", monitor.arrays())
