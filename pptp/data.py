"""Random access to (x, y, index): pools in memory, your own data sets, parts of them, augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .errors import UserError

VIEWS_SEED = 20_240  # of augmented queries
KEPT_SEED = 20_241  # of views that are trained on: attacks must not be asked about the very same ones


class Samples(Dataset):
    """Answers (x, y, index) with known `labels`; index is `ids[position]`, the sample's place in the data set that all parts are of."""

    labels: np.ndarray  # (n,)
    files: Sequence[str] | None = None  # (n,) names of the files that they come from, where they do
    class_names: Sequence[str] | None = None
    left_out: int = 0  # files that lay there too and were not read
    other_splits: Sequence[str] = ()  # folders of splits that lay there too
    kept: str = ""  # how inputs are kept, where that changes what is trained on

    @cached_property
    def ids(self) -> np.ndarray:
        return np.arange(len(self))


class Pool(Samples):
    """Images as (x, y, index): x normalised float (3, h, w), y an int, index the stable sample id."""

    def __init__(self, pixels: Tensor, labels: Sequence[int], mean: Sequence[float], std: Sequence[float]):
        self.pixels = pixels  # (n, 3, h, w) uint8
        self.labels = np.asarray(labels, dtype=np.int64)
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        x = (self.pixels[index].float() / 255 - self.mean) / self.std
        return x, int(self.labels[index]), int(index)


class Indexed(Samples):
    """A data set of (x, y), yours or a lazily decoded one, made to answer (x, y, index)."""

    def __init__(self, dataset: Dataset, labels: Sequence[int] | None = None, transform: Callable | None = None):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"{type(dataset).__name__} can only be read in a stream: membership needs stable sample ids, "
                "use a data set with random access"
            )
        self.dataset, self.transform = dataset, transform
        if labels is not None:
            self.labels = np.asarray(labels, dtype=np.int64)

    @cached_property
    def labels(self) -> np.ndarray:
        """(n,); read when first asked for, since it may take a pass over the data."""
        return labels_of(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def ids(self) -> np.ndarray:
        return sample_ids(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        x, y = self.dataset[index][:2]
        return (self.transform(x) if self.transform else x), int(y), int(self.ids[index])


class Part(Samples):
    """A named subset of a pool, by positions in it."""

    def __init__(self, pool: Dataset, indices: Sequence[int], name: str):
        self.pool, self.name = pool, name
        self.indices = np.asarray(indices, dtype=np.int64)
        self.labels, self.kept = pool.labels[self.indices], getattr(pool, "kept", "")

    @cached_property
    def ids(self) -> np.ndarray:
        return sample_ids(self.pool)[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int):
        return self.pool[int(self.indices[position])]

    def set_epoch(self, epoch: int | None) -> None:
        """Passed on to a pool whose samples have several views."""
        if hasattr(self.pool, "set_epoch"):
            self.pool.set_epoch(epoch)


def some(data: Dataset, most: int, name: str, seed: int = 0) -> Part:
    """A seeded choice of at most so many samples, in their order."""
    data = indexed(data)
    return Part(data, np.sort(np.random.default_rng(seed).permutation(len(data))[:most]), name)


class Augmented(Samples):
    """Random crop (zero padding of an eighth) and horizontal flip, as in the PPTP paper.

    The draw is a pure function of (seed, epoch, position): the same for any number of workers, and
    after a resume.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self.ids = sample_ids(dataset)

    @property
    def labels(self) -> np.ndarray:
        """Only where they are asked for: they may take a pass over the data."""
        return self.dataset.labels

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int):
        x, *rest = self.dataset[position]
        rng = np.random.default_rng((self.seed, self.epoch, position))
        return (crop_and_flip(x, rng), *rest)


class View(Samples):
    """Augmented view number `number` of every sample: a function of its id, so that all models see the same."""

    def __init__(self, dataset: Dataset, number: int, seed: int = VIEWS_SEED):
        self.dataset, self.number, self.seed = indexed(dataset), number, seed
        self.labels, self.ids = self.dataset.labels, sample_ids(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int):
        x, y, index = self.dataset[position]
        rng = np.random.default_rng((self.seed, self.number, int(self.ids[position])))
        return crop_and_flip(x, rng), y, index


def crop_and_flip(x: Tensor, rng: np.random.Generator) -> Tensor:
    """x: (channels, h, w), already normalised, so that padding is the mean colour."""
    height, width = x.shape[-2:]
    pad = max(1, height // 8)
    top, left = rng.integers(0, 2 * pad + 1, size=2)
    x = torch.nn.functional.pad(x, (pad, pad, pad, pad))[:, top : top + height, left : left + width]
    return x.flip(-1) if rng.random() < 0.5 else x


def indexed(dataset: Dataset) -> Dataset:
    """The data set itself if it already answers (x, y, index), else wrapped to do so."""
    if isinstance(dataset, Samples):
        return dataset
    wrapped = Indexed(dataset)
    if len(wrapped):
        _check_sample(dataset[0])
    return wrapped


def _check_sample(sample) -> None:
    """Refuse what no model here could take, by its first sample."""
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise UserError(f"a sample of your data set is a {type(sample).__name__}: it must be (image, label)")
    x, y = sample[:2]
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 3:
        what = f"{x.dtype} tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(
            f"an image of your data set is a {what}: it must be a float tensor (channels, height, width), normalised"
        )
    try:
        int(y)
    except (TypeError, ValueError):
        raise UserError(f"a label of your data set is {y!r}: it must be a class number") from None


def sample_ids(dataset: Dataset) -> np.ndarray:
    """(n,): places in the data set that a part, or a torch `Subset`, is of, however deep; positions otherwise."""
    if isinstance(dataset, Samples):
        return dataset.ids
    chosen, of = getattr(dataset, "indices", None), getattr(dataset, "dataset", None)
    if chosen is None:
        return np.arange(len(dataset))
    chosen = np.asarray(chosen, dtype=np.int64)
    return chosen if of is None else sample_ids(of)[chosen]


def batches(dataset: Dataset, like: nn.Module, batch_size: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) in order and un-augmented, on the device of the model `like`."""
    device = next(like.parameters()).device
    for inputs, targets, _ in DataLoader(indexed(dataset), batch_size=batch_size, num_workers=workers):
        yield inputs.to(device, non_blocking=True), targets.to(device)


def labels_of(dataset: Dataset) -> np.ndarray:
    """The y of every sample: from the list that torchvision and timm keep, where it tells the truth, else by reading."""
    listed = _listed_labels(dataset)
    if listed is not None and hasattr(dataset, "reader"):  # timm's own list is what it returns
        return listed
    if listed is not None:  # a target_transform makes such a list differ from what the data set returns
        some = np.unique(np.linspace(0, len(dataset) - 1, 8).astype(int))
        if all(int(dataset[int(i)][1]) == listed[i] for i in some):
            return listed
    return np.asarray([int(dataset[i][1]) for i in range(len(dataset))], dtype=np.int64)


def _listed_labels(dataset: Dataset) -> np.ndarray | None:
    reader = getattr(dataset, "reader", None)
    for found in (getattr(owner, name, None) for owner in (dataset, reader) for name in ("labels", "targets")):
        if found is not None and len(found) == len(dataset) > 0:
            return np.asarray(found, dtype=np.int64)
    if hasattr(reader, "samples"):  # timm's folder reader: (path, label)
        return np.asarray([label for _, label in reader.samples], dtype=np.int64)
    return None
