"""Lower bounds on epsilon from attacks: what a claim of differential privacy must not be below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .errors import UserError
from .evaluate import fold_of


@dataclass(frozen=True)
class Bound:
    """epsilon is at least `epsilon`, with the stated confidence; 0 says that nothing was found."""

    epsilon: float
    delta: float
    confidence: float
    how: str

    def __str__(self) -> str:
        return f"epsilon >= {self.epsilon:.3f} at delta {self.delta:.2g} ({self.confidence:.0%}, {self.how})"

    def to_dict(self) -> dict:
        return {"epsilon": self.epsilon, "delta": self.delta, "confidence": self.confidence, "how": self.how}


def threshold_bound(
    scores: np.ndarray, members: np.ndarray, delta: float = 0.0, confidence: float = 0.95, seed: int = 0
) -> Bound:
    """From one threshold: (epsilon, delta)-DP asks TPR <= e^epsilon FPR + delta, and the same of the complements.

    The threshold, and which of the two ways round, are chosen on one half of the samples, and the bound is taken on the other:
    choosing on the same half finds leaks where there are none. Samples are taken as independent draws.
    """
    scores, members = np.asarray(scores, float), np.asarray(members, bool)
    if min(members.sum(), (~members).sum()) < 4:
        raise UserError("an audit needs at least 4 members and 4 non-members")
    fold = fold_of(members, 2, seed)
    choose, judge = fold == 0, fold == 1
    threshold, flipped = _best_cut(scores[choose], members[choose], delta, confidence)
    (epsilon,) = _epsilons(scores[judge], members[judge], np.array([threshold]), flipped, delta, confidence)
    how = f"threshold chosen on {int(choose.sum())} samples, judged on {int(judge.sum())}"
    return Bound(float(epsilon), delta, confidence, how)


def _epsilons(scores, members, thresholds: np.ndarray, flipped: bool, delta: float, confidence: float) -> np.ndarray:
    """The bound of each threshold (t,): log (TPR - delta)/FPR, or log (TNR - delta)/FNR if flipped, and 0 at least.

    Clopper-Pearson on each rate, with half of the error each.
    """
    inside, outside = np.sort(scores[members]), np.sort(scores[~members])
    m, n = len(inside), len(outside)
    hits, alarms = m - np.searchsorted(inside, thresholds), n - np.searchsorted(outside, thresholds)
    good, of, bad, out_of = (n - alarms, n, m - hits, m) if flipped else (hits, m, alarms, n)
    tail = (1 - confidence) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(good > 0, stats.beta.ppf(tail, good, of - good + 1), 0.0)
        high = np.where(bad < out_of, stats.beta.ppf(1 - tail, bad + 1, out_of - bad), 1.0)
        return np.maximum(0.0, np.log(np.maximum(0.0, low - delta) / high))


def _best_cut(scores: np.ndarray, members: np.ndarray, delta: float, confidence: float) -> tuple[float, bool]:
    """The threshold and direction with the largest bound on these samples."""
    thresholds = np.unique(scores)
    found = np.stack([_epsilons(scores, members, thresholds, flipped, delta, confidence) for flipped in (False, True)])
    flipped, at = np.unravel_index(found.argmax(), found.shape)
    return float(thresholds[at]), bool(flipped)


# --- one run, with canaries ----------------------------------------------------------------------


def guess_p_value(epsilon: float, m: int, r: int, v: int, delta: float) -> float:
    """Probability that an (epsilon, delta)-DP training of m independent coin flips lets v of r guesses be right, at most.

    Steinke, Nasr & Jagielski, NeurIPS 2023 (arXiv 2305.08846), Theorem 5.2: with q = e^epsilon / (1 + e^epsilon),
    P[Bin(r, q) >= v] + 2 m delta max_i P[v - i <= Bin(r, q) < v] / i.
    """
    q = 1 / (1 + np.exp(-epsilon))
    tail = float(stats.binom.sf(v - 1, r, q))
    if delta == 0 or v == 0:
        return tail
    i = np.arange(1, v + 1)
    below = np.cumsum(stats.binom.pmf(v - i, r, q))
    return min(1.0, tail + 2 * m * delta * float((below / i).max()))


def one_run_bound(m: int, r: int, v: int, delta: float = 0.0, p: float = 0.05) -> float:
    """The largest epsilon that v right guesses of r (among m canaries) refute at level p."""
    if not 0 <= v <= r <= m:
        raise UserError(
            f"{v} right of {r} guesses among {m} canaries: it must hold that 0 <= right <= guesses <= canaries"
        )
    if guess_p_value(0.0, m, r, v, delta) > p:
        return 0.0
    return _largest(lambda epsilon: guess_p_value(epsilon, m, r, v, delta) <= p)


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest value that holds, where all below it hold too."""
    low, high = 0.0, 1.0
    while holds(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def canary_bound(
    scores: np.ndarray, included: np.ndarray, delta: float = 0.0, share: float = 0.25, p: float = 0.05
) -> Bound:
    """One-run audit: the `share` of canaries with the highest scores are guessed to be in, that with the lowest to be out.

    How many guesses are made is fixed beforehand, by `share`. Ties are broken by position, which knows nothing.
    """
    m = len(scores)
    k = int(share * m)
    if not 0 < share <= 0.5 or k < 1:
        raise UserError(f"{m} canaries with a share of {share}: it must lie in (0, 0.5] and leave at least one guess")
    order = np.argsort(-np.asarray(scores, float), kind="stable")
    included = np.asarray(included, bool)
    right = int(included[order[:k]].sum() + (~included[order[-k:]]).sum())
    how = f"one run, {right} of {2 * k} guesses by confidence right on {m} canaries"
    return Bound(one_run_bound(m, 2 * k, right, delta, p), delta, 1 - p, how)
