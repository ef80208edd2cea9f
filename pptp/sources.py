"""Data sets by name: the embedded digits, folders, tars, torchvision and Hugging Face."""

from __future__ import annotations

import difflib
import tarfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .config import DIGITS, Source
from .data import Indexed, Pool, labels_of
from .errors import UserError
from .folders import SPLIT_NAMES, Classed, folder, in_archive, is_hidden, read_image, synonyms

IN_MEMORY_BYTES = 2 * 1024**3  # decoded uint8 images up to this size are held in memory


def load(
    source: Source, mean: Sequence[float] = (0.5,) * 3, std: Sequence[float] = (0.5,) * 3
) -> tuple[Dataset, np.ndarray]:
    """The pool, and for each sample whether it may be a member (False: it comes from the validation split)."""
    if source.data == DIGITS:
        if source.val_split:
            raise UserError("digits has no splits: leave out --val-split")
        pool = digits(source.img_size, source.pixel_noise, source.label_noise, mean=mean, std=std)
        datasets = [pool]
    else:
        splits = [source.train_split] + ([source.val_split] if source.val_split else [])
        datasets = [_named(source, split) for split in splits]
        _check_classes(source, datasets)
    labels = [labels_of(d) for d in datasets]
    keep = [_limited(y, source) for y in labels]
    labels = [y[k] for y, k in zip(labels, keep)]
    _check_labels(source, labels)
    may_be_member = np.concatenate([np.full(len(y), i == 0) for i, y in enumerate(labels)])
    if source.data == DIGITS:
        if len(keep[0]) < len(pool):
            pool = Pool(pool.pixels[keep[0]], labels[0], mean, std)
        return pool, may_be_member
    pool = _prepared(datasets, keep, np.concatenate(labels), source.img_size, mean, std)
    pool.left_out = sum(getattr(dataset, "left_out", 0) for dataset in datasets)
    pool.other_splits = sorted(set.intersection(*(set(getattr(dataset, "other_splits", ())) for dataset in datasets)))
    pool.files, pool.class_names = _files(datasets, keep), _names_of_classes(datasets[0], source)
    _check_distinct(pool, may_be_member, source)
    return pool, may_be_member


def _files(datasets: list[Dataset], keep: list[np.ndarray]) -> list[str] | None:
    """Names of the files of all samples, in their order; None where some are not files."""
    if not all(hasattr(dataset, "files") for dataset in datasets):
        return None
    return [dataset.files[int(i)] for dataset, positions in zip(datasets, keep) for i in positions]


def _names_of_classes(dataset: Dataset, source: Source) -> list[str] | None:
    by_label: dict[int, str] = {}
    for name, label in (_class_names(dataset) or {}).items():
        by_label.setdefault(label, name)  # of synonyms the first
    return [by_label[label] for label in sorted(by_label)][: source.limit_classes or None] or None


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
    name, root = source.data, source.data_dir
    wanted = [source.train_split, *([source.val_split] if source.val_split else [])]
    if name == "torch/image_folder":
        return folder(Path(root), split, wanted, name)
    if name.startswith("hfds/") and find_spec("datasets") is None:
        raise UserError(f"{name} needs the package datasets, of the extra hfds: install pptp[hfds]")
    if name.split("/")[0] in ("torch", "hfds") and "/" in name:
        return _create(name, root or str(Path.home() / ".cache" / "pptp"), split, source.download)
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
    return _tar(path, split, wanted, name) if path.suffix == ".tar" else folder(path, split, wanted, name)


def _create(name: str, root: str, split: str, download: bool = False) -> Dataset:
    from timm.data import create_dataset

    try:
        return create_dataset(name, root=root, split=split, download=download)
    except (RuntimeError, AssertionError, ImportError, ValueError, OSError, tarfile.TarError) as error:
        hint = (
            "; pass --download to fetch it, or --data-dir for where it lies"
            if "ownload" in str(error) and not download
            else ""
        )
        raise UserError(
            f"cannot read {name or root!r}, split {split!r}: {str(error).strip() or type(error).__name__}{hint}"
        ) from error


def _tar(path: Path, split: str, wanted: Sequence[str], where: str) -> Dataset:
    """timm reads a tar whole: keep what lies below the folder of the split."""
    dataset = _create("", str(path), split)
    names = [Path(name).as_posix() for name in dataset.filenames()]
    return _Chosen(dataset, *in_archive(names, split, wanted, where))


class _Chosen(Dataset):
    def __init__(self, dataset: Dataset, classed: Classed, files: Sequence[str], other_splits: Sequence[str]):
        self.dataset, self.positions, self.files, self.other_splits = dataset, classed.positions, files, other_splits
        self.labels, self.class_to_idx = classed.labels, classed.class_to_idx

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, position: int):
        return read_image(self.dataset.reader[self.positions[position]][0], self.files[position]), int(
            self.labels[position]
        )


class RawTinyImageNet(Dataset):
    """TinyImageNet as downloaded: train/<class>/images/*, val/images/* with val_annotations.txt.

    A generic folder reader takes the leaf folder `images` for the class: one class, silently.
    """

    def __init__(self, root: Path, split: str):
        classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir() and not is_hidden(p.name))
        position = {name: i for i, name in enumerate(classes)}
        if synonyms(split) not in SPLIT_NAMES[:2]:
            raise UserError(f"{root} is raw TinyImageNet, whose splits are train and val: there is no {split!r}")
        self.other_splits = ["val" if split in SPLIT_NAMES[0] else "train"]
        if split in SPLIT_NAMES[0]:
            found = [(p, c) for c in classes for p in sorted((root / "train" / c / "images").iterdir())]
        else:
            lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
            rows = [line.split("\t") for line in lines if line.strip()]
            strange = [row for row in rows if len(row) < 2 or row[1] not in position]
            if strange:
                raise UserError(
                    f"{root}/val/val_annotations.txt has the line {' '.join(strange[0])!r}, which names no class of {root}/train: take out the images of other classes"
                )
            found = [(root / "val" / "images" / row[0], row[1]) for row in rows]
        self.paths = [path for path, _ in found]
        self.files = [path.relative_to(root).as_posix() for path in self.paths]
        self.class_to_idx = position
        self.labels = [position[name] for _, name in found]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        return read_image(self.paths[index], self.files[index]), self.labels[index]


def _limited(labels: np.ndarray, source: Source) -> np.ndarray:
    keep = np.arange(len(labels))
    if source.limit_classes > len(np.unique(labels)):
        raise UserError(f"limit_classes is {source.limit_classes}, but the data has {len(np.unique(labels))} classes")
    if source.limit_classes:
        keep = keep[np.isin(labels, np.unique(labels)[: source.limit_classes])]
    if source.limit_per_class:
        y = labels[keep]
        keep = np.sort(np.concatenate([keep[y == c][: source.limit_per_class] for c in np.unique(y)]))
    return keep


def _check_classes(source: Source, datasets: list[Dataset]) -> None:
    """Both splits must be different ones, over the same classes."""
    if len(datasets) < 2:
        return
    if synonyms(source.train_split) == synonyms(source.val_split):
        raise UserError(f"train_split and val_split are both {source.train_split!r}: members would be non-members")
    first, second = (_class_names(dataset) for dataset in datasets)
    if first and second and first != second:
        odd = sorted(set(first) ^ set(second)) or ["their order"]
        raise UserError(
            f"splits {source.train_split!r} and {source.val_split!r} have different classes, first {odd[0]!r}: they must be the same"
        )


def _class_names(dataset: Dataset) -> dict[str, int] | None:
    owners = (dataset, getattr(dataset, "reader", None), getattr(getattr(dataset, "dataset", None), "reader", None))
    names = (getattr(owner, name, None) for owner in owners for name in ("class_to_idx", "class_name_to_idx"))
    return next((found for found in names if found), None)


def _check_distinct(pool: Dataset, may_be_member: np.ndarray, source: Source) -> None:
    """Refuse two splits that hold the same images (a few duplicates are ordinary, a tenth is not)."""
    if may_be_member.all() or not hasattr(pool, "pixels"):
        return
    seen = {pool.pixels[int(i)].numpy().tobytes() for i in np.flatnonzero(may_be_member)}
    others = np.flatnonzero(~may_be_member)
    same = sum(pool.pixels[int(i)].numpy().tobytes() in seen for i in others)
    if same > 0.1 * len(others):
        raise UserError(
            f"{same} of {len(others)} images of split {source.val_split!r} are also in {source.train_split!r}: members would be non-members"
        )


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
        pixels[row] = transform(_image(dataset, i))
    return Pool(pixels, labels, mean, std)


def _image(dataset: Dataset, i: int):
    """The picture. timm would put the next sample in the place of one it cannot read, under two ids: its reader is asked."""
    if not hasattr(dataset, "reader"):
        return dataset[i][0]
    return read_image(dataset.reader[i][0], dataset.filename(i, absolute=True))


class _Places(Dataset):
    def __init__(self, places: list[tuple[Dataset, int]]):
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int):
        dataset, i = self.places[index]
        return _image(dataset, i), dataset.labels[i] if hasattr(dataset, "labels") else dataset[i][1]


def _resize(size: int) -> Callable:
    from torchvision.transforms import v2

    return v2.Compose(
        [v2.PILToTensor(), v2.Lambda(_three_channels), v2.Resize(size, antialias=True), v2.CenterCrop(size)]
    )


def _three_channels(x: Tensor) -> Tensor:
    return x[:3] if x.shape[0] >= 3 else x[:1].expand(3, -1, -1)
