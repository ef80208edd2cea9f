"""What BatchNorm does to the memorisation of outliers (arXiv 2605.24420): the same model with other norms, at matched training loss.

With BatchNorm a sample has no gradient of its own in training, since it moves the statistics of the batch that all others are normed
by. Its influence is therefore measured by leaving it out: ||g(B) - g(B without i)||, g the gradient of the batch's mean loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..checkpoint import check_same
from ..data import Part, indexed, some
from ..gradients import squared_norms
from ..intervals import Estimate, auc, auc_difference, bootstrap, proportion, rate_difference
from ..norms import batch_norms
from ..signals import collect, log_true
from ..stages import bare, eval_mode
from ..training import Monitor

BATCH = 32


@contextmanager
def batch_statistics(model: nn.Module, apart_from: Iterable[nn.Module] = ()):
    """While open, BatchNorm norms by the batch as in training, all else is as in use, and running statistics do not move.

    apart_from: BatchNorm layers that go by their running statistics all the same.
    """
    apart, saved = set(apart_from), {id(buffer): buffer.clone() for buffer in model.buffers()}
    with eval_mode(model):
        for norm in batch_norms(model).values():
            norm.training = norm not in apart
        try:
            yield
        finally:
            model.eval()
            with torch.no_grad():
                for buffer in model.buffers():
                    buffer.copy_(saved[id(buffer)])


def _batch_gradient(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    weights = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(F.cross_entropy(model(x), y), weights, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(weights, found)]


def influence(model: nn.Module, x: Tensor, y: Tensor, rows: Iterable[int], apart_from=()) -> np.ndarray:
    """||g(B) - g(B without i)|| for each i of `rows`; x: (n, channels, h, w), y: (n,). Nothing of the model changes."""
    found = []
    with bare(model), batch_statistics(model, apart_from):
        whole = _batch_gradient(model, x, y)
        for row in rows:
            others = torch.arange(len(x), device=x.device) != row
            less = _batch_gradient(model, x[others], y[others])
            found.append(float(sum((a - b).square().sum() for a, b in zip(whole, less)) ** 0.5))
    return np.array(found)


def influence_ratio(
    model: nn.Module, typical: Dataset, outliers: Dataset, most: int = 16, seed: int = 0, apart_from=()
) -> Estimate:
    """Mean influence of an outlier over that of an ordinary sample of the same batch, one outlier among 31 others."""
    rng, device = np.random.default_rng(seed), next(model.parameters()).device
    pairs = []
    for k in rng.permutation(len(outliers))[:most]:
        rows = [*rng.choice(len(typical), min(BATCH - 1, len(typical)), replace=False)]
        samples = [typical[int(row)] for row in rows] + [outliers[int(k)]]
        x = torch.stack([sample[0] for sample in samples]).to(device)
        y = torch.tensor([sample[1] for sample in samples], device=device)
        pairs.append(influence(model, x, y, (len(samples) - 1, 0), apart_from))
    table = np.array(pairs)  # (batches, 2)
    return bootstrap(lambda rows: table[rows, 0].mean() / max(table[rows, 1].mean(), 1e-12), len(table), least=0.0)


def gradient_ratio(model: nn.Module, typical: Dataset, outliers: Dataset, most: int = 64) -> Estimate:
    """Mean norm of an outlier's own gradient over that of ordinary samples, in eval mode."""
    norms = []
    for data in (outliers, typical):
        rows = np.random.default_rng(0).permutation(len(data))[:most]
        x, y = torch.stack([data[int(k)][0] for k in rows]), torch.tensor([data[int(k)][1] for k in rows])
        device = next(model.parameters()).device
        with eval_mode(model):
            _, squares = squared_norms(model, x.to(device), y.to(device))
        norms.append(torch.stack(list(squares.values())).sum(0).sqrt().cpu().numpy())
    odd, usual = norms
    both = np.concatenate(norms)  # resampled together, each side by its own rows

    def ratio(rows: np.ndarray) -> float:
        mine, others = rows[rows < len(odd)], rows[rows >= len(odd)]
        return both[mine].mean() / max(both[others].mean(), 1e-12) if len(mine) and len(others) else 1.0

    return bootstrap(ratio, len(odd) + len(usual), least=0.0)


class Influence(Monitor):
    """How much outliers pull, after every `every`-th epoch. Without outliers, training samples of three times the contrast stand in."""

    def __init__(self, typical: Dataset, every: int = 1, outliers: Dataset | None = None, most: int = 16):
        self.typical, self.every = indexed(typical), every
        self.outliers = Stretched(some(typical, most, "outliers")) if outliers is None else outliers
        self.watched = 3 * BATCH * min(most, len(self.outliers))
        self.most, self.rows = most, []

    def after_epoch(self, model, epoch):
        if (epoch + 1) % self.every:
            return {}
        pull = influence_ratio(model, self.typical, self.outliers, self.most)
        own = gradient_ratio(model, self.typical, self.outliers)
        self.rows.append({"epoch": epoch + 1, "influence": pull.to_dict(), "own": own.to_dict()})
        return {"influence_ratio": pull.value}

    def arrays(self) -> dict[str, np.ndarray]:
        """For batchnorm.npz: (t, 3) value, low, high."""
        kept = {
            k: np.array([[row[k][v] for v in ("value", "low", "high")] for row in self.rows])
            for k in ("influence", "own")
        }
        return {"epochs": np.array([row["epoch"] for row in self.rows]), **kept}

    def state_dict(self):
        return {"how": [self.every, self.most], "rows": self.rows}

    def load_state_dict(self, state):
        check_same(state["how"], [self.every, self.most], "other batches, or at other epochs")
        self.rows = list(state["rows"])


class Stretched(Dataset):
    """Images with their values multiplied, as simple outliers."""

    def __init__(self, data: Dataset, by: float = 3.0):
        self.data, self.by = data, by

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        x, *rest = self.data[index]
        return (x * self.by, *rest)


class Watch(Influence):
    """The same, with the training loss and outputs on every sample asked about."""

    def __init__(self, typical: Dataset, outliers: Dataset, asked: Part, members: np.ndarray, workers: int = 0):
        super().__init__(typical, 1, outliers)
        self.asked, self.members, self.workers = asked, torch.from_numpy(members), workers  # members: (n,) bool

    def after_epoch(self, model, epoch):
        found = super().after_epoch(model, epoch)
        said = collect(model, self.asked, workers=self.workers)
        loss = float(-log_true(said.logits, said.labels)[self.members].mean())
        self.rows[-1] |= {"loss": loss, "logits": said.logits}
        return {**found, "matched_loss": loss}


# --- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Who is asked about, row by row."""

    labels: np.ndarray  # (n,)
    members: np.ndarray  # (n,) bool: trained on
    outliers: np.ndarray  # (n,) bool: canaries


MATCHED = 0.25  # largest |log| of the ratio of two training losses that still counts as matched


def learned(losses: np.ndarray, classes: int) -> bool:
    """Whether a training came anywhere: below 0.9 log(classes)."""
    return bool(losses.min() < 0.9 * np.log(classes))


def matched_epochs(a: np.ndarray, b: np.ndarray) -> tuple[tuple[int, int], bool]:
    """((epoch of a, epoch of b), whether their losses match) where both are nearest to the lowest training loss that both reach.

    Nearest, not first below: the first epoch below would favour whichever learns in larger steps.
    """
    level = max(a.min(), b.min())
    at = tuple(int(np.abs(np.log(np.maximum(losses, 1e-12) / max(level, 1e-12))).argmin()) for losses in (a, b))
    return at, bool(abs(np.log(max(a[at[0]], 1e-12) / max(b[at[1]], 1e-12))) <= MATCHED)


def leaks(logits: Tensor, samples: Samples) -> dict:
    """Accuracy, canaries learned by heart, and the confidence attack on outliers and on the others apart."""
    right = (logits.argmax(1).numpy() == samples.labels).astype(int)
    score = log_true(logits, torch.from_numpy(samples.labels)).numpy()
    typical, odd, inside = ~samples.outliers, samples.outliers, samples.members

    def rate(rows: np.ndarray) -> Estimate:
        return proportion(int(right[rows].sum()), int(rows.sum()))

    return {
        "test_accuracy": rate(typical & ~inside),
        "canaries_learned": rate(odd & inside),
        "canaries_not_seen": rate(odd & ~inside),
        "auc_outliers": auc(score[odd & inside], score[odd & ~inside]),
        "auc_typical": auc(score[typical & inside], score[typical & ~inside]),
        "score": score,
        "right": right,
    }


def compared(a: dict, b: dict, samples: Samples) -> dict[str, Estimate]:
    """How much more a leaks than b, on the same samples; the accuracy beside it."""
    odd, typical = samples.outliers, ~samples.outliers
    unseen = typical & ~samples.members
    k, n = [int(found["right"][unseen].sum()) for found in (a, b)], int(unseen.sum())
    return {
        "outliers": auc_difference(a["score"][odd], b["score"][odd], samples.members[odd]),
        "typical": auc_difference(a["score"][typical], b["score"][typical], samples.members[typical]),
        "accuracy": rate_difference(k[0], n, k[1], n),
    }


def verdict(name: str, difference: Mapping[str, Estimate]) -> str:
    """One sentence: does BatchNorm leak more about outliers than `name`?"""
    gap, useful = difference["outliers"], difference["accuracy"]
    price = f" in this one training of each; test accuracy with BatchNorm minus with {name} {useful}"
    if gap.low > 0:
        return f"BatchNorm leaks more about outliers than {name} (AUC {gap}){price}"
    if gap.high < 0:
        return f"BatchNorm leaks less about outliers than {name} (AUC {gap}){price}"
    return f"no difference between BatchNorm and {name} was seen on outliers (AUC {gap}){price}"
