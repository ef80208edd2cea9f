"""Outputs of the frozen trunk, computed once and trained from: in memory, or in a file that is mapped into it."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import KEPT_SEED, Samples, View, batches, indexed, sample_ids
from .errors import UserError
from .models import weights_digest
from .splits import TrainingData
from .stages import SCRATCH, Stage, split_at
from .suffix import CannotCut, Suffix, run_until

KINDS = ("auto", "memory", "disk", "none")
SPARE = 0.9  # of the free disk: a file that outgrew it would end the process at its first write
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class Policy:
    """When and where to keep the trunk's outputs."""

    kind: str = "auto"  # memory if it fits the budget, else a file if there is room for one, else nothing
    gigabytes: float = 2.0  # the budget; a file may take ten times as much
    views: int = (
        0  # augmented views of each sample to keep; 0: fresh ones every epoch, and so no cache, while augmenting
    )
    dtype: str = "float32"  # float16: half the room, rounded

    def __post_init__(self):
        rules = {
            "kind": (self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            "gigabytes": (self.gigabytes >= 0, "0 or above"),
            "views": (self.views >= 0, "0 or above"),
            "dtype": (self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UserError(f"cache {name} is {getattr(self, name)!r}: it must be {rule}")

    def place(self, size: int, held: int = 0, filed: int = 0, free: float = math.inf) -> str:
        """ "memory", "disk" or "none" for so many bytes, next to those that memory and files hold already; `free` are left on the disk."""
        budget = self.gigabytes * 2**30
        if self.kind != "auto":
            return self.kind
        fits = filed + size <= 10 * budget and size <= SPARE * free
        return "memory" if held + size <= budget else "disk" if fits else "none"


class Activations(Samples):
    """Samples as the boundary sees them: (activation, y, index). View 0 is the image itself, the others are augmented.

    While training, epoch e reads view 1 + e mod views; otherwise view 0.
    """

    def __init__(self, store: Tensor, labels: np.ndarray, ids: np.ndarray, name: str):
        self.store, self.labels, self.ids, self.name = store, labels, ids, name  # store: (1 + views, n, ...)
        self.view = 0
        if len(store) > 1 or store.dtype != torch.float32:
            self.kept = f"{len(store) - 1} views, {store.dtype}"

    def set_epoch(self, epoch: int | None) -> None:
        views = len(self.store) - 1
        self.view = 0 if epoch is None or not views else 1 + epoch % views

    def __len__(self) -> int:
        return self.store.shape[1]

    def __getitem__(self, position: int):
        return self.store[self.view, position].float(), int(self.labels[position]), int(self.ids[position])


@dataclass
class TrunkCache:
    """Keeps what trunks said, for all trainings that share one: several defenses, sub-models, the points of a frontier."""

    policy: Policy = field(default_factory=Policy)
    folder: Path | None = None  # for files; a temporary one if there is none
    kept: dict[str, Activations] = field(default_factory=dict, repr=False)
    pools: dict[int, Dataset] = field(default_factory=dict, repr=False)
    in_files: set[str] = field(default_factory=set, repr=False)

    def prepare(
        self,
        model: nn.Module,
        parts: Sequence[Stage],
        cut: str,
        data: TrainingData,
        augment: bool,
        batch_size: int = 128,
    ) -> tuple[nn.Module, TrainingData, str]:
        """(model, data, why): to train the suffix from cached activations, or, where that cannot be, as they were given."""
        if self.policy.kind == "none":
            return model, data, "no cache was asked for"
        if augment and not self.policy.views:
            return model, data, "augmentation is on: every epoch sees fresh views (--views V keeps V of them)"
        shape = tuple(indexed(data.members)[0][0].shape)
        try:
            suffix = Suffix(model, parts, cut, shape)
        except CannotCut as error:
            return model, data, str(error)
        views = self.policy.views if augment else 0
        parts_of_data = [data.members] + (
            [data.reference] if data.reference is not None and len(data.reference) else []
        )
        trunk, _ = split_at(parts, cut)
        size = self.size(suffix, parts_of_data, views)
        place = self.place(suffix, trunk, parts_of_data, views)
        if place == "none":
            return (
                model,
                data,
                f"its {size / 2**30:.1f} GB and what is kept already are over the budget of {self.policy.gigabytes:g} GB (--cache-gb)",
            )
        found = [self.activations(suffix, trunk, part, views, place, batch_size) for part in parts_of_data]
        cached = replace(data, members=found[0], reference=found[1] if len(found) > 1 else data.reference)
        return suffix, cached, f"{size / 2**20:.0f} MB in {place}"

    def for_queries(
        self, model: nn.Module, parts: Sequence[Stage], cut: str, data: Sequence[Dataset]
    ) -> tuple[nn.Module, Sequence[Dataset]]:
        """The same for a model that is only asked: its suffix and what the trunk says of the data, or both as they were given."""
        trunk = [] if cut == SCRATCH else [part.on(model) for part in split_at(parts, cut)[0]]
        if not trunk or model._forward_hooks:  # a hook may look at the images themselves
            return model, data
        try:
            suffix = Suffix(model, parts, cut, indexed(data[0])[0][0].shape)
        except CannotCut:
            return model, data
        place = self.place(suffix, trunk, data)
        if place == "none":
            return model, data
        return suffix, [self.activations(suffix, trunk, part, 0, place) for part in data]

    def size(self, suffix: Suffix, data: Sequence[Dataset], views: int = 0) -> int:
        each = int(np.prod(suffix.plan.shape)) * torch.finfo(DTYPES[self.policy.dtype]).bits // 8
        return each * sum(map(len, data)) * (1 + views)

    def place(self, suffix: Suffix, trunk: Sequence[Stage], data: Sequence[Dataset], views: int = 0) -> str:
        """Where to keep what is not kept yet; if all is, where that is."""
        keys = [self._key(suffix, trunk, indexed(part), views) for part in data]
        missing = [part for part, key in zip(data, keys) if key not in self.kept]
        if not missing:
            return "disk" if self.in_files & set(keys) else "memory"
        held, filed = (
            sum(there.store.nbytes for key, there in self.kept.items() if (key in self.in_files) is in_file)
            for in_file in (False, True)
        )
        free = shutil.disk_usage(self._where()).free
        return self.policy.place(self.size(suffix, missing, views), held, filed, free)

    def _where(self) -> Path:
        """The folder for files."""
        folder = Path(tempfile.gettempdir() if self.folder is None else self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def activations(
        self,
        suffix: Suffix,
        trunk: Sequence[Stage],
        data: Dataset,
        views: int = 0,
        place: str = "memory",
        batch_size: int = 128,
    ) -> Activations:
        """What the trunk says of `data`; computed when first asked for."""
        data = indexed(data)
        key = self._key(suffix, trunk, data, views)
        if key not in self.kept:
            store = self._empty((1 + views, len(data), *suffix.plan.shape), place, key)
            fill(store, suffix, data, batch_size)
            ids = sample_ids(data)
            self.kept[key] = Activations(store, data.labels, ids, getattr(data, "name", "data"))
        return self.kept[key]

    def _key(self, suffix: Suffix, trunk: Sequence[Stage], data: Dataset, views: int) -> str:
        state = {name: t for part in trunk for name, t in zip(part.parameter_names, part.parameters())}
        state |= {name: t for part in trunk for name, t in zip(part.buffer_names, part.buffers())}
        pool = data
        while hasattr(pool, "pool"):
            pool = pool.pool
        self.pools[id(pool)] = (
            pool  # sample ids mean something within one pool only; held, so that its id stays its own
        )
        what = [
            id(pool),
            weights_digest(state),
            suffix.plan.boundary,
            suffix.input_shape,
            views,
            self.policy.dtype,
            len(data),
        ]
        return hashlib.sha256(repr(what).encode() + sample_ids(data).tobytes()).hexdigest()[:16]

    def _empty(self, shape: tuple[int, ...], place: str, key: str) -> Tensor:
        dtype = DTYPES[self.policy.dtype]
        if place == "memory":
            return torch.empty(shape, dtype=dtype)
        with tempfile.NamedTemporaryFile(prefix=".activations-", dir=self._where()) as file:
            _claim(file, math.prod(shape) * np.dtype(self.policy.dtype).itemsize)
            mapped = np.memmap(file, np.dtype(self.policy.dtype), "r+", shape=shape)
        self.in_files.add(key)  # the file has no name any more, and is gone with its mapping, even after a kill
        return torch.from_numpy(mapped)


def _claim(file, size: int) -> None:
    """Take the room now: writing into a mapped file that the disk has no room for would kill the process without a word."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    except OSError as error:
        raise UserError(
            f"there is no room for {size / 2**30:.1f} GB of the trunk's outputs in {Path(file.name).parent} ({error.strerror}): "
            "use --cache memory or none, or --cache-dtype float16"
        ) from error


@torch.no_grad()
def fill(store: Tensor, suffix: Suffix, data: Dataset, batch_size: int) -> None:
    """Run the trunk, in eval mode, on every view of every sample."""
    suffix.model.eval()
    for view in range(len(store)):
        source = data if view == 0 else View(data, view, KEPT_SEED)
        at = 0
        for inputs, _ in batches(source, suffix.model, batch_size):
            store[view, at : at + len(inputs)] = (
                run_until(suffix.model, suffix.plan.boundary, inputs).cpu().to(store.dtype)
            )
            at += len(inputs)
