"""What attacks look at besides one output a sample: augmented queries, features, gradients, the boundary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .boundary import boundary_distances
from .data import View, indexed
from .errors import UserError
from .gradients import gradient_norms
from .monitors.curvature import curvature
from .probes import pooled_features
from .signals import Needs, Signals, collect
from .stages import Stage, stages


@dataclass(frozen=True)
class References:
    """What other models, trained on known parts of the same pool, say of its samples."""

    ids: np.ndarray  # (n,) sample ids
    logits: Tensor  # (m, n, classes)
    members: Tensor  # (m, n) bool
    augmented: Tensor | None = None  # (m, q, n, classes), on the views that `augmented` makes
    source: str = ""  # where they come from, in words

    def digest(self) -> str:
        """Short hash of what they say and of whom they know."""
        h = hashlib.sha256()
        for tensor in (self.logits, self.members, self.augmented):
            if tensor is not None:
                h.update(tensor.contiguous().numpy().tobytes())
        return h.hexdigest()[:16]

    def of(self, wanted: np.ndarray) -> Tensor:
        """Columns of the wanted sample ids."""
        if len(np.unique(wanted)) != len(wanted):
            raise UserError(
                "members and non-members share sample ids: give parts of one data set, so that reference outputs can be told apart"
            )
        order = np.argsort(self.ids, kind="stable")
        at = np.searchsorted(self.ids[order], wanted)
        if len(self.ids) == 0 or (self.ids[order[np.minimum(at, len(order) - 1)]] != wanted).any():
            raise UserError("the reference models were not asked about every sample: their outputs are of other data")
        return torch.from_numpy(order[at])


def augmented(model: nn.Module, data: Dataset, queries: int, batch_size: int = 256, workers: int = 0) -> Tensor:
    """(queries, n, classes): outputs on random crops and flips."""
    return torch.stack([collect(model, View(data, k), batch_size, workers).logits for k in range(queries)])


@dataclass(frozen=True)
class Effort:
    """How much an evaluation may spend on measurements."""

    queries: int = 8  # augmented views of each sample
    budget: int = 100  # label-only queries of each sample
    batch_size: int = 256
    workers: int = 0

    def __post_init__(self):
        if self.queries < 1:
            raise UserError(f"queries is {self.queries}: it must be at least 1")


EXACT_CLASSES = 20  # above, so many are sampled for the curvature
STARTS = 200  # images that the search for the boundary starts from


def starting_images(data: Dataset) -> Tensor:
    """(k, channels, h, w): a seeded choice, the same for all samples that are measured."""
    data = indexed(data)
    rows = np.random.default_rng(0).permutation(len(data))[:STARTS]
    return torch.stack([data[int(row)][0] for row in rows])


def measure(
    model: nn.Module,
    data: Dataset,
    wanted: Sequence[Needs],
    effort: Effort,
    parts: Sequence[Stage] | None = None,
    starts: Tensor | None = None,
) -> Signals:
    """Outputs on `data`, and whatever else the wanted attacks look at; starts: as in `boundary_distances`."""
    signals = collect(model, data, effort.batch_size, effort.workers)
    kinds = {need.measured for need in wanted}
    if any(need.augmented for need in wanted):
        found = augmented(model, data, effort.queries, effort.batch_size, effort.workers)
        signals = replace(signals, augmented=found)
    measured: dict[str, Tensor] = {}
    if kinds & {"gradient", "feature"}:
        parts = [part.on(model) for part in parts or stages(model, indexed(data)[0][0].shape)]
    if "gradient" in kinds:
        norms = gradient_norms(model, data, parts, min(64, effort.batch_size), effort.workers)
        measured |= {f"gradient/{name}": values for name, values in norms.items()}
    if "curvature" in kinds:
        classes = signals.logits.shape[1]
        drawn = 0 if classes <= EXACT_CLASSES else EXACT_CLASSES  # exact costs a backward pass a class
        measured["curvature"] = curvature(
            model, data, "fisher", min(64, effort.batch_size), effort.workers, samples=drawn
        )
    if "feature" in kinds:
        features, _ = pooled_features(model, parts, data, effort.batch_size, effort.workers)
        measured |= {f"feature/{name}": torch.from_numpy(values) for name, values in features.items()}
    if "boundary" in kinds:
        starts = starting_images(data) if starts is None else starts
        measured["boundary"] = boundary_distances(
            model, data, starts, effort.budget, min(64, effort.batch_size), effort.workers
        )
    return replace(signals, measured=measured)


def with_references(signals: Signals, ids: np.ndarray, references: References | None) -> Signals:
    """The same signals with what the reference models say of these samples."""
    if references is None:
        return signals
    at = references.of(ids)
    views = None
    if references.augmented is not None and signals.augmented is not None:
        views = references.augmented[:, : len(signals.augmented), at]
    return replace(
        signals,
        reference_logits=references.logits[:, at],
        reference_members=references.members[:, at],
        reference_augmented=views,
    )
