"""Model outputs, computed once: all that a black-box attack may look at."""

from __future__ import annotations

from dataclasses import dataclass

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

    def __post_init__(self):
        if self.logits.ndim != 2 or self.labels.shape != self.logits.shape[:1]:
            raise UserError(
                f"logits must be (n, classes) and labels (n,), got {tuple(self.logits.shape)} and {tuple(self.labels.shape)}"
            )
        if not torch.isfinite(self.logits).all():
            bad = int((~torch.isfinite(self.logits)).any(1).nonzero()[0])
            raise UserError(f"logits of sample {bad} are not finite: no attack can rank them")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.logits.shape[1]:
            raise UserError(
                f"labels run from {int(self.labels.min())} to {int(self.labels.max())}, but there are {self.logits.shape[1]} logits"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Signals:
        references = None if self.reference_logits is None else self.reference_logits[:, rows]
        members = None if self.reference_members is None else self.reference_members[:, rows]
        return Signals(self.logits[rows], self.labels[rows], references, members)

    @property
    def log_probabilities(self) -> Tensor:
        """(n, classes) in float64: in float32 confident probabilities are all 1."""
        return self.logits.double().log_softmax(1)


def join(a: Signals, b: Signals) -> Signals:
    """Samples of `a`, then of `b`."""

    def cat(x, y, dim):
        return None if x is None or y is None else torch.cat([x, y], dim)

    return Signals(
        cat(a.logits, b.logits, 0),
        cat(a.labels, b.labels, 0),
        cat(a.reference_logits, b.reference_logits, 1),
        cat(a.reference_members, b.reference_members, 1),
    )


@dataclass(frozen=True)
class Known:
    """What an attacker may learn from: signals whose membership it knows, none of which it is asked about."""

    signals: Signals
    members: Tensor  # (n,) bool


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
