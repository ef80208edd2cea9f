"""Distance to the decision boundary from predicted classes alone, within a budget of queries.

After HopSkipJump (Chen, Jordan & Wainwright, S&P 2020, arXiv 1904.02144), which the label-only attack uses: start from an image
of another class, walk to the boundary by bisection, estimate the boundary's normal from the classes of random neighbours, step
along it, and again. Every distance is that of a point of another class that was really found: an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

from .data import batches, sample_ids
from .errors import UserError

BISECTIONS = 8
NEIGHBOURS = 20
ROUND = NEIGHBOURS + BISECTIONS + 1  # queries of one round, for each sample
LEAST = 1 + BISECTIONS + ROUND


@torch.no_grad()
def boundary_distances(
    model: nn.Module,
    data: Dataset,
    starts: Tensor,
    budget: int = 100,
    batch_size: int = 64,
    workers: int = 0,
    seed: int = 0,
) -> Tensor:
    """(n,): L2 distance, in units of the normalised input, to the nearest point found of a class other than the label.

    starts: (k, channels, h, w) images to start from, the same for every sample, so that a distance depends on nothing but the
    sample and the model. 0 where the sample itself is misclassified; the distance to the farthest start where none has another
    class. At most `budget` queries a sample, besides those of the starts.
    """
    if budget < LEAST:
        raise UserError(f"the query budget is {budget}: at least {LEAST} are needed, for one step along the boundary")
    model.eval()
    starts = starts.to(next(model.parameters()).device)
    classes = model(starts).argmax(1)
    found = []
    ids, at = sample_ids(data).tolist(), 0
    for inputs, targets in tqdm(
        batches(data, model, batch_size, workers),
        desc=f"boundary, {budget} queries a sample",
        total=-(-len(data) // batch_size),
        disable=None,
    ):
        own = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in ids[at : at + len(inputs)]]
        found.append(_of_batch(model, inputs, targets, starts, classes, budget, own).cpu())
        at += len(inputs)
    return torch.cat(found)


def _of_batch(
    model, x: Tensor, y: Tensor, starts: Tensor, classes: Tensor, budget: int, generators: Sequence[torch.Generator]
) -> Tensor:
    right = model(x).argmax(1) == y
    distance = torch.zeros(len(x), device=x.device)
    apart = torch.cdist(x.flatten(1), starts.flatten(1))  # (n, k)
    other = classes[None] != y[:, None]
    none = right & ~other.any(1)
    distance[none] = apart[none].amax(1) if none.any() else 0.0
    moving = right & other.any(1)
    if not moving.any():
        return distance
    nearest = apart.masked_fill(~other, float("inf")).argmin(1)
    x, y, point = x[moving], y[moving], starts[nearest[moving]]
    generators = [generator for generator, moves in zip(generators, moving.tolist()) if moves]

    def other_class(points: Tensor) -> Tensor:
        """(k, n) bool for points (k, n, channels, h, w)."""
        return (model(points.flatten(0, 1)).argmax(1) != y.repeat(len(points))).reshape(len(points), -1)

    point = _bisect(other_class, x, point)
    for turn in range(1, 1 + (budget - 1 - BISECTIONS) // ROUND):
        point = _step(other_class, x, point, turn, generators)
    distance[moving] = _length(point - x)
    return distance


def _length(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    return x * by.reshape(-1, *[1] * (x.ndim - 1))


def _bisect(other_class, x: Tensor, point: Tensor) -> Tensor:
    """Towards x as far as the class stays another one."""
    low, high = torch.zeros(len(x), device=x.device), torch.ones(len(x), device=x.device)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        beyond = other_class((x + _scaled(point - x, middle))[None])[0]
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return x + _scaled(point - x, high)


def _step(other_class, x: Tensor, point: Tensor, turn: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Along the estimated normal, and back to the boundary; kept where it came nearer to x."""
    size = _length(point - x)
    drawn = [torch.randn(NEIGHBOURS, *x.shape[1:], generator=generator) for generator in generators]
    directions = torch.stack(drawn, 1).to(x)  # (k, n, channels, h, w), each sample's from its id, whatever batch it is in
    directions /= directions.flatten(2).norm(dim=2).reshape(NEIGHBOURS, len(x), *[1] * (x.ndim - 1))
    votes = (
        other_class(point + _scaled(directions.transpose(0, 1), 0.05 * size).transpose(0, 1)).float() * 2 - 1
    )  # (k, n)
    votes = votes - votes.mean(0) * (votes.mean(0).abs() < 1)  # HopSkipJump's baseline, which lowers the variance
    normal = (directions * votes.reshape(*votes.shape, *[1] * (x.ndim - 1))).sum(0)
    normal = _scaled(normal, 1 / _length(normal).clamp(min=1e-12))
    moved = point + _scaled(normal, size / turn**0.5)
    moved = torch.where(other_class(moved[None])[0].reshape(-1, *[1] * (x.ndim - 1)), moved, point)
    back = _bisect(other_class, x, moved)
    nearer = _length(back - x) < size
    return torch.where(nearer.reshape(-1, *[1] * (x.ndim - 1)), back, point)
