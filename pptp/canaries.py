"""Canaries: odd samples that a coin decides to train on or not, for an audit of one training run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from .data import Indexed, Part
from .errors import UserError
from .splits import Splits, split

KINDS = ("mislabelled", "noise")


@dataclass(frozen=True)
class Canaries:
    """Which samples are canaries, and which of them the models are trained on."""

    ids: np.ndarray  # (m,) sample ids
    included: np.ndarray  # (m,) bool, independent fair coins


def draw(may_be_member: np.ndarray, count: int, seed: int) -> Canaries:
    """`count` samples at random, and a coin for each."""
    available = np.flatnonzero(may_be_member)
    if count > len(available) // 4:
        raise UserError(f"canaries is {count}: at most a quarter of the {len(available)} samples can be spared")
    rng = np.random.default_rng((seed, 77))
    return Canaries(np.sort(rng.choice(available, count, replace=False)), rng.random(count) < 0.5)


class Planted(Indexed):
    """A pool whose canaries carry a wrong label, or are noise with a random one; excluded ones too, so that only the coin differs."""

    def __init__(self, pool: Dataset, ids: np.ndarray, kind: str, seed: int):
        if kind not in KINDS:
            raise UserError(f"canary_kind is {kind!r}: it must be one of {', '.join(KINDS)}")
        classes = int(pool.labels.max()) + 1
        rng = np.random.default_rng((seed, 78))
        labels = pool.labels.copy()
        away = rng.integers(1, classes, len(ids)) if kind == "mislabelled" else rng.integers(0, classes, len(ids))
        labels[ids] = (labels[ids] + away) % classes
        super().__init__(pool, labels)
        self.files, self.class_names = pool.files, pool.class_names
        self.left_out, self.other_splits = pool.left_out, pool.other_splits
        self.noise_seed = seed if kind == "noise" else None
        self.planted = set(map(int, ids))

    def __getitem__(self, index: int):
        x = self.dataset[index][0]
        if self.noise_seed is not None and int(index) in self.planted:
            generator = torch.Generator().manual_seed(self.noise_seed * 1_000_003 + int(index))
            x = torch.randn(x.shape, generator=generator)
        return x, int(self.labels[index]), int(index)


def split_around(pool: Dataset, canaries: Canaries, parts, seed: int, may_be_member: np.ndarray) -> Splits:
    """Parts drawn from the other samples; the included canaries join the members, half of them h1."""
    rest = np.setdiff1d(np.arange(len(pool)), canaries.ids)
    drawn = split(
        Part(pool, rest, "rest"),
        parts.members,
        parts.reference,
        parts.nonmembers,
        parts.test,
        seed,
        may_be_member[rest],
    )
    indices = {name: rest[ids] for name, ids in drawn.indices.items()}
    inside = np.random.default_rng((seed, 79)).permutation(canaries.ids[canaries.included])
    for name, mine in (("h1", inside[::2]), ("h2", inside[1::2])):
        indices[name] = np.sort(np.concatenate([indices[name], mine]))
    return Splits(pool, indices)
