"""Who is a member, in which half, and what a defense may never see."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import Dataset

from .arrays import read_npz
from .data import Part, Samples, indexed, sample_ids
from .errors import UserError

if TYPE_CHECKING:
    from .outside import Teachers

PARTS = ("members", "reference", "nonmembers", "test")


@dataclass(frozen=True)
class Splits:
    """Disjoint parts of one pool. `members` is halved into h1 and h2, class by class."""

    pool: Dataset = field(repr=False)
    indices: dict[str, np.ndarray] = field(repr=False)  # h1, h2, reference, nonmembers, test

    def __post_init__(self):
        everything = np.concatenate(list(self.indices.values()))
        if len(np.unique(everything)) != len(everything):
            raise UserError(
                "the parts of a split share samples: members, reference, nonmembers and test must be disjoint"
            )

    @property
    def members(self) -> Part:
        return Part(self.pool, np.sort(np.concatenate([self.indices["h1"], self.indices["h2"]])), "members")

    @property
    def h1(self) -> Part:
        return Part(self.pool, self.indices["h1"], "h1")

    @property
    def h2(self) -> Part:
        return Part(self.pool, self.indices["h2"], "h2")

    @property
    def reference(self) -> Part:
        return Part(self.pool, self.indices["reference"], "reference")

    @property
    def nonmembers(self) -> Part:
        return Part(self.pool, self.indices["nonmembers"], "nonmembers")

    @property
    def test(self) -> Part:
        return Part(self.pool, self.indices["test"], "test")

    @property
    def classes(self) -> int:
        return int(self.pool.labels.max()) + 1

    def for_defense(self, outside: Teachers | None = None) -> TrainingData:
        """What a defense may use: members and reference, over a pool that raises for anything else."""
        forbidden = np.concatenate([self.indices["nonmembers"], self.indices["test"]])
        fenced = Fenced(self.pool, forbidden)
        return TrainingData(
            Part(fenced, self.members.indices, "members"), Part(fenced, self.reference.indices, "reference"), outside
        )

    def digest(self) -> str:
        return digest(self.indices)


class EvaluationDataTouched(UserError):
    """A defense reached for samples that only the evaluation may see."""


class Fenced(Samples):
    """A pool that raises when a forbidden sample is read."""

    def __init__(self, pool: Dataset, forbidden: Sequence[int]):
        self.pool, self.labels, self.ids = pool, pool.labels, sample_ids(pool)
        self._forbidden = set(map(int, forbidden))

    def __len__(self) -> int:
        return len(self.pool)

    def __getitem__(self, index: int):
        if int(index) in self._forbidden:
            raise EvaluationDataTouched(
                f"a defense read sample {index}, which belongs to the evaluation: train on members and reference only"
            )
        return self.pool[index]


@dataclass(frozen=True)
class TrainingData:
    """All that a defense is given. Python users without `Splits` may build it from their own data sets."""

    members: Dataset
    reference: Dataset | None = None
    outside: Teachers | None = field(default=None, repr=False)  # models that speak of members they did not see
    shelf: Path | None = (
        None  # a folder for what other trainings on the same trunk can use again, named by all that made it
    )

    def __post_init__(self):
        object.__setattr__(self, "members", indexed(self.members))  # once, so that labels are read once
        if self.reference is not None:
            object.__setattr__(self, "reference", indexed(self.reference))

    @property
    def classes(self) -> int:
        return int(self.members.labels.max()) + 1

    def __getattr__(self, name: str):
        if name in ("nonmembers", "test", "h1", "h2"):
            raise EvaluationDataTouched(f"a defense asked for {name!r}: it may use members and reference only")
        raise AttributeError(name)


def split(
    pool: Dataset,
    members: float = 0.5,
    reference: float = 0.1,
    nonmembers: float = 0.25,
    test: float = 0.15,
    seed: int = 42,
    may_be_member: np.ndarray | None = None,
) -> Splits:
    """Draw disjoint parts at random, class by class.

    Sizes above 1 are counts, up to 1 shares of the pool. Where `may_be_member` marks a validation
    split, members and reference come from the rest, non-members and test from it, and shares are of each side.
    """
    pool = indexed(pool)
    wanted = {"members": members, "reference": reference, "nonmembers": nonmembers, "test": test}
    two_sided = may_be_member is not None and not may_be_member.all()
    sides = (
        [(("members", "reference"), may_be_member), (("nonmembers", "test"), ~may_be_member)]
        if two_sided
        else [(PARTS, np.ones(len(pool), bool))]
    )
    rng = np.random.default_rng(seed)
    drawn: dict[str, np.ndarray] = {}
    for names, side in sides:
        available = np.flatnonzero(side)
        sizes = [_count(name, wanted[name], len(available)) for name in names]
        if sum(sizes) > len(available):
            raise UserError(
                f"{' + '.join(f'{n} {s}' for n, s in zip(names, sizes))} = {sum(sizes)} samples, but there are {len(available)}: ask for fewer"
            )
        drawn |= dict(zip(names, _stratified(available, pool.labels, sizes, rng)))
    _check_not_empty(drawn)
    _check_classes(drawn, pool)
    _check_two_classes(drawn, pool, ("test",))
    chosen = drawn.pop("members")
    h1, h2 = halves(chosen, pool.labels, rng)
    return Splits(pool, {"h1": h1, "h2": h2, **drawn})


def _count(name: str, wanted: float, available: int) -> int:
    if not 0 <= wanted < math.inf or (wanted > 1 and wanted != int(wanted)):
        raise UserError(f"{name} is {wanted}: give a share between 0 and 1, or a whole number of samples")
    return int(wanted) if wanted > 1 else int(wanted * available)


def _stratified(available: np.ndarray, labels: np.ndarray, sizes: list[int], rng) -> list[np.ndarray]:
    """Deal samples into parts one after another, each with its share of every class to within one sample."""
    y = labels[available]
    left = {c: list(rng.permutation(available[y == c])) for c in np.unique(y)}
    parts = []
    for size in sizes:
        counts = np.array([len(samples) for samples in left.values()])
        quota = size * counts / max(1, counts.sum())
        take = np.floor(quota).astype(int)
        by_remainder = np.lexsort((rng.random(len(take)), take - quota))  # largest remainder first, ties at random
        take[by_remainder[: size - take.sum()]] += 1
        parts.append(
            np.sort(
                np.array([samples.pop() for samples, k in zip(left.values(), take) for _ in range(k)], dtype=np.int64)
            )
        )
    return parts


def halves(chosen: np.ndarray, labels: np.ndarray, rng) -> tuple[np.ndarray, np.ndarray]:
    """Two halves of the chosen samples, class by class."""
    h1 = []
    for c in np.unique(labels[chosen]):
        mine = rng.permutation(chosen[labels[chosen] == c])
        extra = len(mine) % 2 and rng.random() < 0.5
        h1.append(mine[: len(mine) // 2 + int(extra)])
    h1 = np.sort(np.concatenate(h1))
    return h1, np.setdiff1d(chosen, h1)


def _check_not_empty(parts: Mapping[str, np.ndarray]) -> None:
    for name in ("members", "nonmembers", "test"):
        if len(parts[name]) == 0:
            raise UserError(f"no sample is left for {name!r}: make the other parts smaller")


def _check_two_classes(parts: Mapping[str, np.ndarray], pool: Samples, names: Sequence[str]) -> None:
    for name in names:
        classes = np.unique(pool.labels[parts[name]])
        if len(classes) < 2:
            raise UserError(f"{name} has {len(parts[name])} samples of {len(classes)} classes: it needs some of two at least")


def _check_classes(parts: Mapping[str, np.ndarray], pool: Samples) -> None:
    classes, counts = np.unique(pool.labels[parts["members"]], return_counts=True)
    absent = np.setdiff1d(np.unique(pool.labels), classes)
    if len(absent):
        raise UserError(f"class {_called(absent[0], pool)} has no member: every class needs at least two, to be halved")
    if counts.min() < 2:
        raise UserError(
            f"class {_called(classes[counts.argmin()], pool)} has one member: every class needs at least two, to be halved"
        )


def _called(label: int, pool: Samples) -> str:
    return repr(pool.class_names[label]) if pool.class_names else str(label)


def from_indices(pool: Dataset, *, h1, h2, nonmembers, test, reference=()) -> Splits:
    """Splits that you chose yourself, as arrays of positions in the pool."""
    pool = indexed(pool)
    arrays = {"h1": h1, "h2": h2, "reference": reference, "nonmembers": nonmembers, "test": test}
    indices = {name: np.sort(_positions(name, np.asarray(ids), pool)) for name, ids in arrays.items()}
    members = np.concatenate([indices["h1"], indices["h2"]])
    _check_not_empty({"members": members, **indices})
    _check_two_classes(indices, pool, ("h1", "h2", "test"))
    return Splits(pool, indices)


def _positions(name: str, given: np.ndarray, pool: Samples) -> np.ndarray:
    """Numbers are positions; texts are names of files."""
    if given.size == 0:
        return np.empty(0, np.int64)
    if given.ndim == 1 and given.dtype.kind == "U":
        return _of_files(name, given, pool)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise UserError(f"{name} is {given.dtype} of shape {given.shape}: it must be a list of sample ids, or of file names")
    given = given.astype(np.int64)
    if given.min() < 0 or given.max() >= len(pool):
        odd = given.min() if given.min() < 0 else given.max()
        raise UserError(f"{name} names sample {odd}, but the data has {len(pool)}: the ids belong to other data")
    return given


def _of_files(name: str, given: np.ndarray, pool: Samples) -> np.ndarray:
    if not pool.files:
        raise UserError(f"{name} names files, but these samples do not come from files: give sample ids")
    place = {file: position for position, file in enumerate(pool.files)}
    missing = [file for file in given.tolist() if file not in place]
    if missing:
        raise UserError(f"{name} names the file {missing[0]!r}, which is not in the data: its first one is {pool.files[0]!r}")
    return np.array([place[file] for file in given.tolist()], dtype=np.int64)


NAMES = ("h1", "h2", "reference", "nonmembers", "test")


def read_ids(path: str | Path) -> dict[str, np.ndarray]:
    """Sample ids (or file names) of each part from an .npz file."""
    ids = read_npz(path, "sample ids, or file names, of h1, h2, nonmembers and test")
    missing = {"h1", "h2", "nonmembers", "test"} - set(ids)
    if missing:
        raise UserError(f"{path} has no ids for {', '.join(sorted(missing))}: it needs h1, h2, nonmembers and test")
    return {name: ids.get(name, np.empty(0, np.int64)) for name in NAMES}


def from_file(pool: Dataset, path: str | Path) -> Splits:
    """Splits that were saved, or that you wrote yourself: ids count the samples of the data from 0, as samples.csv of a run lists them."""
    try:
        return from_indices(pool, **read_ids(path))
    except UserError as error:
        raise UserError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error


def copies_of_members(splits: Splits) -> int | None:
    """How many of the samples that stand for the outside have a member's very pixels; None where images are not held in memory."""
    pixels = getattr(splits.pool, "pixels", getattr(getattr(splits.pool, "dataset", None), "pixels", None))
    if pixels is None:
        return None

    def of(i: int) -> bytes:
        return hashlib.blake2b(pixels[int(i)].numpy().tobytes(), digest_size=16).digest()

    members = {of(i) for i in splits.members.indices}
    return sum(of(i) in members for i in np.concatenate([splits.indices["nonmembers"], splits.indices["test"]]))


def digest(indices: Mapping[str, np.ndarray]) -> str:
    """Short hash of who is where; equal digests mean equal membership."""
    h = hashlib.sha256()
    for name in sorted(indices):
        h.update(name.encode() + np.ascontiguousarray(indices[name], dtype=np.int64).tobytes())
    return h.hexdigest()[:16]
