"""Model outputs, computed once: all that an attack may look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import batches
from .errors import UserError


@dataclass(frozen=True)
class Signals:
    """What a model says of n samples. Holds no membership: an attack that gets this cannot cheat."""

    logits: Tensor  # (n, classes)
    labels: Tensor  # (n,)
    reference_logits: Tensor | None = None  # (m, n, classes), of m other models
    reference_members: Tensor | None = None  # (m, n) bool, what those were trained on
    augmented: Tensor | None = None  # (q, n, classes), on q augmented views of each sample
    reference_augmented: Tensor | None = None  # (m, q, n, classes), of the other models on the same views
    measured: Mapping[str, Tensor] = field(default_factory=dict)  # (n, ...) each: "gradient/layer4", "boundary", ...

    def __post_init__(self):
        if self.logits.ndim != 2 or self.labels.shape != self.logits.shape[:1]:
            raise UserError(
                f"logits must be (n, classes) and labels (n,), got {tuple(self.logits.shape)} and {tuple(self.labels.shape)}"
            )
        check_finite("logits", self.logits)
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.logits.shape[1]:
            raise UserError(
                f"labels run from {int(self.labels.min())} to {int(self.labels.max())}, but there are {self.logits.shape[1]} logits: count classes from 0"
            )
        if (self.reference_logits is None) != (self.reference_members is None):
            raise UserError("reference_logits and reference_members go together: give both or neither")
        if self.reference_logits is not None:
            self._check_references()

    def _check_references(self) -> None:
        models, wanted = len(self.reference_logits), (len(self), self.logits.shape[1])
        if tuple(self.reference_logits.shape[1:]) != wanted or self.reference_members.shape != (models, len(self)):
            raise UserError(
                f"reference_logits must be (models, {wanted[0]}, {wanted[1]}) and reference_members (models, {wanted[0]}), "
                f"got {tuple(self.reference_logits.shape)} and {tuple(self.reference_members.shape)}"
            )
        for model in self.reference_logits:
            check_finite("reference_logits", model)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Signals:
        def pick(tensor: Tensor | None, dim: int) -> Tensor | None:
            return None if tensor is None else tensor.index_select(dim, rows)

        return Signals(
            self.logits[rows],
            self.labels[rows],
            pick(self.reference_logits, 1),
            pick(self.reference_members, 1),
            pick(self.augmented, 1),
            pick(self.reference_augmented, 2),
            {name: values[rows] for name, values in self.measured.items()},
        )

    @property
    def log_true(self) -> Tensor:
        """(n,): log p_y."""
        return log_true(self.logits, self.labels)


def check_finite(name: str, logits: Tensor) -> None:
    if not torch.isfinite(logits).all():
        bad = int((~torch.isfinite(logits)).any(-1).nonzero()[0, -1])
        raise UserError(f"{name} of sample {bad} are not finite: no attack can rank them")


CHUNK = 8192  # outputs, of a model on a sample, that are looked at in float64 at once: what bounds the memory of an attack


def in_chunks(function: Callable) -> Callable:
    """Of (logits (..., n, classes), labels (n,)) -> (..., n): the same, CHUNK outputs at a time."""

    @wraps(function)
    def chunked(logits: Tensor, labels: Tensor) -> Tensor:
        samples = max(1, CHUNK // max(1, math.prod(logits.shape[:-2])))
        parts = [function(z, y) for z, y in zip(logits.split(samples, -2), labels.split(samples))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    return chunked


@in_chunks
def log_true(logits: Tensor, labels: Tensor) -> Tensor:
    """log p_y in float64; logits (..., n, classes), labels (n,) -> (..., n)."""
    true = labels.expand(logits.shape[:-1])[..., None]
    return logits.double().log_softmax(-1).gather(-1, true).squeeze(-1)


@in_chunks
def logit_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """z_y - logsumexp of the other logits = log(p_y / (1 - p_y)), exact and in float64; shapes as in `log_true`."""
    true = labels.expand(logits.shape[:-1])[..., None]
    z = logits.double()
    others = z.scatter(-1, true, -float("inf")).logsumexp(-1)
    return z.gather(-1, true).squeeze(-1) - others


def join(a: Signals, b: Signals) -> Signals:
    """Samples of `a`, then of `b`."""

    def cat(x, y, dim):
        return None if x is None or y is None else torch.cat([x, y], dim)

    return Signals(
        cat(a.logits, b.logits, 0),
        cat(a.labels, b.labels, 0),
        cat(a.reference_logits, b.reference_logits, 1),
        cat(a.reference_members, b.reference_members, 1),
        cat(a.augmented, b.augmented, 1),
        cat(a.reference_augmented, b.reference_augmented, 2),
        {name: torch.cat([a.measured[name], b.measured[name]]) for name in a.measured if name in b.measured},
    )


@dataclass(frozen=True)
class Known:
    """What an attacker may learn from: signals whose membership it knows, none of which it is asked about."""

    signals: Signals
    members: Tensor  # (n,) bool


class CannotLearn(ValueError):
    """An attack finds too little among the known samples to learn from."""


@dataclass(frozen=True)
class Needs:
    """What an attack looks at besides the outputs of the model."""

    outside: int = 0  # reference models that were not trained on the sample
    inside: int = 0  # reference models that were
    augmented: bool = False
    measured: str = ""  # "gradient" and "feature" come once a stage, "boundary" once

    def rows(self, signals: Signals) -> np.ndarray:
        """(n,) bool: the samples for which everything is there."""
        enough = np.ones(len(signals), dtype=bool)
        if self.outside or self.inside:
            if signals.reference_members is None:
                return ~enough
            trained = signals.reference_members.sum(0).numpy()
            enough &= (trained >= self.inside) & (len(signals.reference_members) - trained >= self.outside)
        if self.augmented and signals.augmented is None:
            return ~enough
        return enough if not self.measured or self.keys(signals) else ~enough

    def keys(self, signals: Signals) -> list[str]:
        """Names of the measurements of the wanted kind."""
        return [name for name in signals.measured if name.partition("/")[0] == self.measured]

    def __str__(self) -> str:
        models = [
            f"{n} reference model{'s' * (n > 1)} trained {w} a sample"
            for n, w in ((self.inside, "on"), (self.outside, "without"))
            if n
        ]
        return " and ".join(
            models + ["augmented queries"] * self.augmented + [f"{self.measured} measurements"] * bool(self.measured)
        )


def needs(*, outside: int = 0, inside: int = 0, augmented: bool = False, measured: str = "") -> Callable:
    """Mark an attack with what it needs besides `query.logits` and `query.labels`: see `Needs`.

    outside, inside: reference models trained without, and with, a sample (`query.reference_logits`, `query.reference_members`).
    """
    what = {"outside": outside, "inside": inside, "augmented": augmented, "measured": measured}

    def mark(attack):
        attack.needs = Needs(**what)
        return attack

    return mark


def needs_of(attack) -> Needs:
    return getattr(attack, "needs", Needs())


@torch.no_grad()
def collect(model: nn.Module, data: Dataset, batch_size: int = 256, workers: int = 0) -> Signals:
    """Outputs of `model` in eval mode on un-augmented `data`, in its order."""
    model.eval()
    logits, labels = [], []
    for inputs, targets in batches(data, model, batch_size, workers):
        logits.append(model(inputs).float().cpu())
        labels.append(targets.cpu())
    if not logits:
        raise UserError("there is no sample to query the model with")
    if any(module.training for module in model.modules()):
        raise RuntimeError("a module went back to training mode while the model was queried")
    return Signals(torch.cat(logits), torch.cat(labels))
