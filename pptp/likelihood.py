"""Gaussian fits of what models trained with and without a sample say of it (after LiRA, Carlini et al., S&P 2022, arXiv 2112.03570)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

OWN_VARIANCE_FROM = 64  # models; with fewer, a variance for each sample is noise


def log_normal(x: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """Up to a constant."""
    spread = spread.clamp(min=1e-12)
    return -torch.log(spread) - 0.5 * ((x - centre) / spread) ** 2


def gaussian(
    phi: np.ndarray, chosen: np.ndarray, own_variance_from: int = OWN_VARIANCE_FROM
) -> tuple[np.ndarray, np.ndarray]:
    """Median over the chosen models, and the standard deviation about it: one for all samples when models are few.

    phi: (m, n), chosen: (m, n) bool -> two arrays (n,). NaN where no model was chosen.
    """
    kept = np.where(chosen, phi, np.nan)
    some = chosen.any(0)
    centre = np.full(phi.shape[1], np.nan)
    centre[some] = np.nanmedian(kept[:, some], axis=0)
    if len(phi) >= own_variance_from:
        spread = np.full(phi.shape[1], np.nan)
        spread[some] = np.nanstd(kept[:, some], axis=0)
    else:
        spread = np.full(phi.shape[1], np.nanstd(kept - centre) if some.any() else np.nan)
    return centre, spread


def leave_one_out(phi: np.ndarray, members: np.ndarray) -> np.ndarray:
    """log N(phi; in) - log N(phi; out) of every model, by the fits of the others. (m, n)

    A model that was trained on just what this one was not is left out with it: else one kind of fit would come from a model more
    than the other, by membership, and shift scores where nothing is memorised.

    phi: (m, n) log(p_y / (1 - p_y)); members: (m, n) bool.
    """
    scores = np.empty_like(phi)
    for k in range(len(phi)):
        others = (np.arange(len(phi)) != k) & ~(members != members[k]).all(1)
        fits = [gaussian(phi[others], chosen[others]) for chosen in (members, ~members)]
        inside, outside = (log_normal(*map(torch.from_numpy, (phi[k], *fit))) for fit in fits)
        scores[k] = (inside - outside).numpy()
    return scores
