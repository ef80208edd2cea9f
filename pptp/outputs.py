"""Outputs of a model that was not trained here, from one .npz file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .arrays import read_npz
from .errors import UserError
from .signals import Signals

NEEDED = "logits (or probabilities) of shape (n, classes), labels (n,) and members (n,)"


def read_outputs(path: str | Path) -> tuple[Signals, np.ndarray]:
    """(signals, members): arrays logits or probabilities, labels, members; optionally reference_logits (models, n, classes), or
    reference_probabilities, and reference_members (models, n)."""
    arrays = read_npz(path, NEEDED)
    for name in ("labels", "members"):
        if name not in arrays:
            raise UserError(f"{path} has no {name}: it must hold {NEEDED}")
    logits = _logits(arrays, "", path)
    if logits is None:
        raise UserError(f"{path} has neither logits nor probabilities: it must hold {NEEDED}")
    members = _truth(arrays["members"], "members", path)
    if members.shape != (len(logits),) or members.all() or not members.any():
        raise UserError(
            f"members of {path} must say of each of {len(logits)} samples whether it was trained on, and name some of both"
        )
    labels = arrays["labels"]
    if labels.shape != (len(logits),) or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"labels of {path} must be {len(logits)} class numbers, got {labels.dtype} of shape {labels.shape}"
        )
    references = _logits(arrays, "reference_", path)
    masks = _truth(arrays["reference_members"], "reference_members", path) if "reference_members" in arrays else None
    return (
        Signals(
            logits,
            torch.from_numpy(labels.astype(np.int64)),
            references,
            torch.from_numpy(masks) if masks is not None else None,
        ),
        members,
    )


def _truth(values: np.ndarray, name: str, path) -> np.ndarray:
    if values.dtype != bool and not np.isin(values, (0, 1)).all():
        raise UserError(f"{name} of {path} must be true or false, or 0 and 1")
    return values.astype(bool)


def _logits(arrays: dict, prefix: str, path) -> torch.Tensor | None:
    """Logits as they are, or the logs of probabilities, which serve as logits."""
    for name in (f"{prefix}logits", f"{prefix}probabilities"):
        found = arrays.get(name)
        if found is not None and (not np.issubdtype(found.dtype, np.number) or found.ndim != (3 if prefix else 2)):
            raise UserError(f"{name} of {path} is {found.dtype} of shape {found.shape}: it must be numbers, {NEEDED}")
    if f"{prefix}logits" in arrays:
        z = arrays[f"{prefix}logits"].astype(np.float64)
        if z.size and z.min() >= 0 and z.max() <= 1 and np.allclose(z.sum(-1), 1, atol=1e-3):
            raise UserError(f"{prefix}logits of {path} look like probabilities: store them as {prefix}probabilities")
        return torch.from_numpy(z)
    name = f"{prefix}probabilities"
    if name not in arrays:
        return None
    p = arrays[name].astype(np.float64)
    if not ((p >= 0) & (p <= 1)).all() or not np.allclose(p.sum(-1), 1, atol=1e-3):
        raise UserError(f"{name} of {path} must lie between 0 and 1 and sum to 1: are they logits?")
    smallest = np.finfo(np.float32).tiny  # a probability rounded to 0 is known to be below this, no more
    return torch.from_numpy(np.log(np.maximum(p, smallest)))
