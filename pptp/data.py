"""Data sets by name, or your own.

Every data set becomes a `Pool`: random access to (x, y, index), with stable indices and known labels.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .config import DIGITS, Source
from .errors import UserError

IN_MEMORY_BYTES = 2 * 1024**3  # decoded uint8 images up to this size are held in memory


class Pool(Dataset):
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


class Indexed(Dataset):
    """A data set of (x, y), yours or a lazily decoded one, made to answer (x, y, index)."""

    def __init__(self, dataset: Dataset, labels: Sequence[int] | None = None, transform: Callable | None = None):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"{type(dataset).__name__} can only be read in a stream: membership needs stable sample ids, "
                "use a data set with random access"
            )
        self.dataset, self.transform = dataset, transform
        self.labels = _labels_of(dataset) if labels is None else np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        x = self.dataset[index][0]
        return (self.transform(x) if self.transform else x), int(self.labels[index]), int(index)


class Part(Dataset):
    """A named subset of a pool; answers (x, y, index) with the pool's index."""

    def __init__(self, pool: Dataset, indices: Sequence[int], name: str):
        self.pool, self.name = pool, name
        self.indices = np.asarray(indices, dtype=np.int64)
        self.labels = pool.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int):
        return self.pool[int(self.indices[position])]


class Augmented(Dataset):
    """Random crop (zero padding of an eighth) and horizontal flip, as in the PPTP paper.

    The draw is a pure function of (seed, epoch, position): the same for any number of workers, and
    after a resume.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int):
        x, *rest = self.dataset[position]
        rng = np.random.default_rng((self.seed, self.epoch, position))
        return (crop_and_flip(x, rng), *rest)


def crop_and_flip(x: Tensor, rng: np.random.Generator) -> Tensor:
    """x: (channels, h, w), already normalised, so that padding is the mean colour."""
    height, width = x.shape[-2:]
    pad = max(1, height // 8)
    top, left = rng.integers(0, 2 * pad + 1, size=2)
    x = torch.nn.functional.pad(x, (pad, pad, pad, pad))[:, top : top + height, left : left + width]
    return x.flip(-1) if rng.random() < 0.5 else x


def indexed(dataset: Dataset) -> Dataset:
    """The data set itself if it already answers (x, y, index), else wrapped to do so."""
    if isinstance(dataset, (Pool, Indexed, Part, Augmented)):
        return dataset
    return Indexed(dataset)


def batches(dataset: Dataset, like: nn.Module, batch_size: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) in order and un-augmented, on the device of the model `like`."""
    device = next(like.parameters()).device
    for inputs, targets, _ in DataLoader(indexed(dataset), batch_size=batch_size, num_workers=workers):
        yield inputs.to(device, non_blocking=True), targets.to(device)


def _labels_of(dataset: Dataset) -> np.ndarray:
    """Without decoding an image where torchvision or timm keeps a list of labels."""
    reader = getattr(dataset, "reader", None)
    for found in (getattr(owner, name, None) for owner in (dataset, reader) for name in ("labels", "targets")):
        if found is not None and len(found) == len(dataset):
            return np.asarray(found, dtype=np.int64)
    if hasattr(reader, "samples"):  # timm's folder reader: (path, label)
        return np.asarray([label for _, label in reader.samples], dtype=np.int64)
    return np.asarray([int(dataset[i][1]) for i in range(len(dataset))], dtype=np.int64)


# --- data sets by name ---------------------------------------------------------------------------


def load(
    source: Source, mean: Sequence[float] = (0.5,) * 3, std: Sequence[float] = (0.5,) * 3
) -> tuple[Dataset, np.ndarray]:
    """The pool, and for each sample whether it may be a member (False: it comes from the validation split)."""
    if source.data == DIGITS:
        pool = digits(source.img_size, source.pixel_noise, source.label_noise, mean=mean, std=std)
        datasets = [pool]
    else:
        splits = [source.train_split] + ([source.val_split] if source.val_split else [])
        datasets = [_named(source, split) for split in splits]
    labels = [_labels_of(d) for d in datasets]
    keep = [_limited(y, source) for y in labels]
    labels = [y[k] for y, k in zip(labels, keep)]
    _check_labels(source, labels)
    may_be_member = np.concatenate([np.full(len(y), i == 0) for i, y in enumerate(labels)])
    if source.data == DIGITS:
        if len(keep[0]) < len(pool):
            pool = Pool(pool.pixels[keep[0]], labels[0], mean, std)
        return pool, may_be_member
    return _prepared(datasets, keep, np.concatenate(labels), source.img_size, mean, std), may_be_member


def digits(
    img_size: int = 32,
    pixel_noise: float = 0.25,
    label_noise: float = 0.0,
    seed: int = 0,
    mean: Sequence[float] = (0.5,) * 3,
    std: Sequence[float] = (0.5,) * 3,
) -> Pool:
    """scikit-learn's 1,797 digits, made hard enough to memorise: noise that is fixed per image.

    The noise is the same kind in every part, so members and non-members stay exchangeable.
    """
    from sklearn.datasets import load_digits

    bundle = load_digits()
    rng = np.random.default_rng(seed)
    images = torch.tensor(bundle.images / 16, dtype=torch.float32)[:, None]
    images = torch.nn.functional.interpolate(images, size=(img_size, img_size), mode="bilinear")
    images = images + pixel_noise * torch.tensor(rng.standard_normal(images.shape), dtype=torch.float32)
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
    labels = bundle.target.copy()
    flipped = rng.random(len(labels)) < label_noise
    labels[flipped] = (labels[flipped] + rng.integers(1, 10, flipped.sum())) % 10
    return Pool(pixels, labels, mean, std)


def _named(source: Source, split: str) -> Dataset:
    """One split of a data set of (PIL image, label) pairs."""
    from timm.data import create_dataset

    name, root = source.data, source.data_dir
    if "/" in name and name.split("/")[0] in ("torch", "hfds"):
        return _create(create_dataset, name, root or str(Path.home() / ".cache" / "pptp"), split, source.download)
    if name.split("/")[0] in ("hfids", "tfds", "wds"):
        raise UserError(
            f"{name!r} can only be read in a stream: membership needs stable sample ids, use torch/, hfds/, a folder or a tar"
        )
    path = Path(root, name) if root else Path(name)
    if not path.exists():
        known = [DIGITS, "torch/cifar10", "torch/cifar100", "torch/mnist", "torch/image_folder", "hfds/"]
        near = difflib.get_close_matches(name, known, n=2) or known[:3]
        raise UserError(
            f"no data called {name!r}: it is neither a folder nor a .tar here; the nearest names are {', '.join(near)}"
        )
    if (path / "val" / "val_annotations.txt").is_file():
        return RawTinyImageNet(path, split)
    dataset = _create(create_dataset, "", str(path), split, False)
    return _tar_split(dataset, split) if path.suffix == ".tar" else dataset


def _create(create_dataset, name: str, root: str, split: str, download: bool) -> Dataset:
    try:
        return create_dataset(name, root=root, split=split, download=download)
    except (RuntimeError, AssertionError, FileNotFoundError, ImportError, ValueError, OSError) as error:
        hint = (
            ""
            if download or not name.startswith("torch/")
            else "; pass --download to fetch it, or --data-dir for where it lies"
        )
        raise UserError(
            f"cannot read {name or root!r}, split {split!r}: {str(error).strip() or type(error).__name__}{hint}"
        ) from error


_SPLIT_NAMES = {
    "train": {"train", "training"},
    "validation": {"validation", "val", "valid", "eval", "evaluation"},
    "test": {"test"},
}


def _tar_split(dataset: Dataset, split: str) -> Dataset:
    """timm reads a tar whole: keep what lies below a folder named like the split, if the tar has such folders."""
    folders = [set(Path(name).parent.parts) for name in dataset.filenames()]
    split_folders = set().union(*_SPLIT_NAMES.values())
    if not any(parts & split_folders for parts in folders):
        return dataset
    wanted = next((names for names in _SPLIT_NAMES.values() if split in names), {split})
    positions = [i for i, parts in enumerate(folders) if parts & wanted]
    if not positions:
        raise UserError(
            f"the tar has no folder for split {split!r}: it has {', '.join(sorted(set().union(*folders) & split_folders))}"
        )
    return _Chosen(dataset, positions, _labels_of(dataset)[positions])


class _Chosen(Dataset):
    def __init__(self, dataset: Dataset, positions: Sequence[int], labels: Sequence[int]):
        self.dataset, self.positions, self.labels = dataset, positions, labels

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, position: int):
        return self.dataset[self.positions[position]]


class RawTinyImageNet(Dataset):
    """TinyImageNet as downloaded: train/<class>/images/*, val/images/* with val_annotations.txt.

    A generic folder reader takes the leaf folder `images` for the class: one class, silently.
    """

    def __init__(self, root: Path, split: str):
        classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
        position = {name: i for i, name in enumerate(classes)}
        if split in _SPLIT_NAMES["train"]:
            found = [(p, c) for c in classes for p in sorted((root / "train" / c / "images").iterdir())]
        else:
            rows = (line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines())
            found = [(root / "val" / "images" / row[0], row[1]) for row in rows]
        self.paths = [path for path, _ in found]
        self.labels = [position[name] for _, name in found]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        from PIL import Image

        return Image.open(self.paths[index]).convert("RGB"), self.labels[index]


def _limited(labels: np.ndarray, source: Source) -> np.ndarray:
    keep = np.arange(len(labels))
    if source.limit_classes:
        keep = keep[np.isin(labels, np.unique(labels)[: source.limit_classes])]
    if source.limit_per_class:
        y = labels[keep]
        keep = np.sort(np.concatenate([keep[y == c][: source.limit_per_class] for c in np.unique(y)]))
    return keep


def _check_labels(source: Source, labels: list[np.ndarray]) -> None:
    classes = np.unique(np.concatenate(labels))
    if len(classes) < 2:
        raise UserError(f"{source.data!r} has one class only: are the images in one folder per class?")
    if len(labels) == 2 and set(labels[0]) != set(labels[1]):
        raise UserError(
            f"split {source.train_split!r} has {len(set(labels[0]))} classes, split {source.val_split!r} has {len(set(labels[1]))}: they must be the same"
        )
    if classes[-1] != len(classes) - 1 or classes[0] != 0:
        raise UserError(f"labels of {source.data!r} are not 0 to {len(classes) - 1}: renumber them")


def _prepared(datasets: list[Dataset], keep: list[np.ndarray], labels: np.ndarray, size: int, mean, std) -> Dataset:
    """Decode to (3, size, size): once into memory where it fits, else each time a sample is read."""
    transform = _resize(size)
    places = [(dataset, int(i)) for dataset, positions in zip(datasets, keep) for i in positions]
    if len(places) * 3 * size * size > IN_MEMORY_BYTES:
        mean_, std_ = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
        return Indexed(_Places(places), labels, lambda image: (transform(image).float() / 255 - mean_) / std_)
    from tqdm import tqdm

    pixels = torch.empty(len(places), 3, size, size, dtype=torch.uint8)
    for row, (dataset, i) in enumerate(tqdm(places, desc="decoding images", unit="img", leave=False, disable=None)):
        pixels[row] = transform(dataset[i][0])
    return Pool(pixels, labels, mean, std)


class _Places(Dataset):
    def __init__(self, places: list[tuple[Dataset, int]]):
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int):
        dataset, i = self.places[index]
        return dataset[i]


def _resize(size: int) -> Callable:
    from torchvision.transforms import v2

    return v2.Compose(
        [v2.PILToTensor(), v2.Lambda(_three_channels), v2.Resize(size, antialias=True), v2.CenterCrop(size)]
    )


def _three_channels(x: Tensor) -> Tensor:
    return x[:3] if x.shape[0] >= 3 else x[:1].expand(3, -1, -1)
