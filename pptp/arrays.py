"""Arrays in .npz files, read so that bad ones are refused in a sentence."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from .errors import UserError


def read_npz(path: str | Path, must_be: str) -> dict[str, np.ndarray]:
    """All arrays of a file; must_be: what it should have been, for the refusal."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            return {name: saved[name] for name in saved.files}
    except (OSError, ValueError, TypeError, AttributeError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"cannot read {path}: it must be an .npz with {must_be} ({error})") from error
