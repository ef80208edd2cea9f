"""Images in folders and archives: one folder per class, and nothing else taken for one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from torch.utils.data import Dataset

from .errors import UserError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SPLIT_NAMES = (("train", "training"), ("validation", "val", "valid", "eval", "evaluation"), ("test",))
OF_SPLITS = {name for names in SPLIT_NAMES for name in names}
DEFAULT_SPLIT = "train"


def synonyms(split: str) -> tuple[str, ...]:
    return next((names for names in SPLIT_NAMES if split.lower() in names), (split,))


def is_hidden(name: str) -> bool:
    """What editors and archivers leave behind: `.ipynb_checkpoints`, `._x.png`, `__MACOSX`."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def choose_split(there: set[str], split: str, wanted: Sequence[str], where: str) -> str | None:
    """The folder of a split among the names of folders that hold folders; None for data that is not divided at all.

    wanted: the splits that are asked for. Never the whole for a part: a "validation split" that is really everything would call
    members non-members.
    """
    known = OF_SPLITS | {name.lower() for name in wanted}
    if split in there:
        return split
    found = sorted(name for name in there if name.lower() in synonyms(split))
    if len(found) > 1:
        raise UserError(f"{where!r} has {', '.join(found)} for the split {split!r}: say which one, with --train-split or --val-split")
    if found:
        return found[0]
    divided = sorted(name for name in there if name.lower() in known)
    if divided:
        raise UserError(f"{where!r} has no folder for the split {split!r}: it has {', '.join(divided)}")
    if len(wanted) > 1:
        raise UserError(
            f"{where!r} has no folder for the split {split!r}: it is not divided into splits, so leave out --val-split"
        )
    if split != DEFAULT_SPLIT:
        raise UserError(
            f"{where!r} has no folder for the split {split!r}: it is not divided into splits, so leave out --train-split"
        )
    return None


def other_splits(there: set[str], chosen: str | None) -> list[str]:
    """Beside the one that is read."""
    return sorted(name for name in there if chosen and name != chosen and name.lower() in OF_SPLITS)


@dataclass(frozen=True)
class Classed:
    """Which files are samples, of which classes."""

    positions: list[int]
    labels: np.ndarray
    class_to_idx: dict[str, int]


def by_class(names: Sequence[str], where: str) -> Classed:
    """Of names that must be CLASS/IMAGE; hidden ones are left out, whatever else lies elsewhere is refused."""
    seen = [i for i, name in enumerate(names) if not is_hidden(name)]
    for i in seen:
        if names[i].count("/") != 1:
            rule = "lies deeper than one class folder" if "/" in names[i] else "lies in no class folder"
            tops = {names[k].partition("/")[0] for k in seen}
            todo = f"give {where}/{tops.pop()} as the data" if "/" in names[i] and len(tops) == 1 else "move or remove it"
            raise UserError(f"the image {names[i]} of {where!r} {rule}: images must be in CLASS/IMAGE, {todo}")
    class_of = [names[i].partition("/")[0] for i in seen]
    classes = sorted(set(class_of), key=_natural)
    if classes and all(name.lower() in OF_SPLITS for name in classes):
        raise UserError(f"the images of {where!r} lie in {', '.join(classes)}, without classes: they must be in SPLIT/CLASS/IMAGE")
    class_to_idx = {name: k for k, name in enumerate(classes)}
    return Classed(seen, np.array([class_to_idx[name] for name in class_of], dtype=np.int64), class_to_idx)


NUMBERS = re.compile(r"(\d+)")


def _natural(name: str) -> list:
    """ "im 2" before "im 10", as timm orders files; those that it takes for equal ("a", "A") by their letters."""
    parts: list = NUMBERS.split(name.lower())
    parts[1::2] = map(int, parts[1::2])
    return [parts, name]


class ImageFolder(Dataset):
    """Images below `root`, one folder per class; in natural order, so that a sample id is a place in this list."""

    other_splits: Sequence[str] = ()

    def __init__(self, root: Path, below: str = "", where: str = ""):
        home = root / below
        names = sorted(
            (
                Path(folder, name).relative_to(home).as_posix()
                for folder, _, found in os.walk(home, followlinks=True)
                for name in found
            ),
            key=_natural,
        )
        images = [name for name in names if name.lower().endswith(ENDINGS)]
        classed = by_class(images, where or str(root))
        self.labels, self.class_to_idx = classed.labels, classed.class_to_idx
        kept = [images[i] for i in classed.positions]
        self.paths = [home / name for name in kept]
        self.files = [(PurePosixPath(below) / name).as_posix() for name in kept]
        self.left_out = len(names) - len(kept)
        if not kept:
            raise UserError(f"there is no image in {home}: {', '.join(ENDINGS)} are read, in one folder per class")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        return read_image(self.paths[index], self.files[index]), int(self.labels[index])


def folder(root: Path, split: str, wanted: Sequence[str], where: str) -> ImageFolder:
    """One split of a folder: a split is a folder of folders, so that a class may be called `train`."""
    if not root.is_dir():
        raise UserError(f"{root} is neither a folder nor a .tar")
    there = {p.name for p in root.iterdir() if p.is_dir() and not is_hidden(p.name) and _holds_folders(p)}
    chosen = choose_split(there, split, wanted, where)
    found = ImageFolder(root, chosen or "", where)
    found.other_splits = other_splits(there, chosen)
    return found


def _holds_folders(path: Path) -> bool:
    return any(p.is_dir() and not is_hidden(p.name) for p in path.iterdir())


def in_archive(names: Sequence[str], split: str, wanted: Sequence[str], where: str) -> tuple[Classed, list[str], list[str]]:
    """Which files of an archive belong to a split, their names, and the splits that lie there too."""
    parents = [PurePosixPath(name).parts[:-2] for name in names]  # above the class folder
    there = {part for parts in parents for part in parts if not is_hidden(part)}
    chosen = choose_split(there, split, wanted, where)
    if chosen is None:
        rows, cut = list(range(len(names))), [_shared_depth([n for n in names if not is_hidden(n)])] * len(names)
    else:
        rows = [i for i, parts in enumerate(parents) if chosen in parts and not is_hidden(names[i])]
        cut = [parents[i].index(chosen) + 1 for i in rows]
    inside = ["/".join(PurePosixPath(names[i]).parts[n:]) for i, n in zip(rows, cut)]
    classed = by_class(inside, where)
    kept = Classed([rows[i] for i in classed.positions], classed.labels, classed.class_to_idx)
    return kept, [names[i] for i in kept.positions], other_splits(there, chosen)


def _shared_depth(names: Sequence[str]) -> int:
    """How many folders all files lie in, the class folder not counted."""
    folders = [PurePosixPath(name).parts[:-1] for name in names]
    shared = os.path.commonprefix(folders)
    return len(shared) - all(folder == shared for folder in folders) if shared else 0


def read_image(path_or_file, name: str):
    """The picture in 8-bit RGB, or a refusal."""
    from PIL import Image

    try:
        return _rgb(Image.open(path_or_file), name)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {name} ({error}): mend or remove it") from error


def _rgb(image, name: str):
    """Pictures of 16 bits keep their upper eight: a plain conversion would clip them to black and white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # which has 16 bits at the most
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UserError(
            f"the image {name} holds numbers of 32 bits (mode {image.mode}), whose range is not known: save it with 8 or 16 bits"
        )
    return image.convert("RGB")
