"""Numbers with their uncertainty: rates, differences, areas under curves, and paired comparisons of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit, logit

from .errors import UserError

TOO_FEW = "too few samples"
TURNED = "turned around: low scores mark members"


@dataclass(frozen=True)
class Estimate:
    """A number with its two-sided confidence interval; `note` says when the interval means nothing."""

    value: float
    low: float
    high: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]" + (f" ({self.note})" if self.note else "")

    @property
    def effect(self) -> tuple[float, float]:
        """Interval of |value - 1/2|, for an AUC: an order that is surely inverted tells as much as a right one."""
        low, high = self.low - 0.5, self.high - 0.5
        return max(0.0, low, -high), max(abs(low), abs(high))

    @property
    def turned(self) -> Estimate:
        """Of an AUC: what an attacker has of it who turns the guess around where it is below 1/2."""
        low, high = self.effect
        notes = [self.note] * bool(self.note) + [TURNED] * (self.value < 0.5)
        return replace(self, value=0.5 + abs(self.value - 0.5), low=0.5 + low, high=0.5 + high, note="; ".join(notes))

    def to_dict(self) -> dict:
        return {"value": self.value, "low": self.low, "high": self.high, "note": self.note}


def auc(positive: np.ndarray, negative: np.ndarray, confidence: float = 0.95) -> Estimate:
    """P(positive > negative) + P(tie)/2 with DeLong's interval (DeLong et al. 1988).

    With midranks R over both samples (r within one): V10 = (R - r)/n_neg, V01 = 1 - (R - r)/n_pos, and
    var = var(V10)/n_pos + var(V01)/n_neg. The interval is symmetric in log(AUC / (1 - AUC)): on the AUC itself its lower end is too
    high near 1. Where one of the two terms is 0 (no overlap on that side) it says nothing, and Newcombe's score interval (2006,
    method 5) is used as well. Scores of two values are a difference of two rates.
    """
    positive, negative = np.asarray(positive, float), np.asarray(negative, float)
    m, n = len(positive), len(negative)
    if not m or not n:
        raise UserError(f"AUC needs both kinds of samples, got {m} and {n}")
    if not (np.isfinite(positive).all() and np.isfinite(negative).all()):
        raise UserError("scores are not finite: they cannot be ranked")
    v10, v01 = _placements(positive, negative)
    value = float(v10.mean())
    z = stats.norm.ppf(0.5 + confidence / 2)
    if len(np.unique(np.concatenate([positive, negative]))) <= 2:  # right or wrong, say: a difference of two rates
        top = max(positive.max(), negative.max())
        gap = rate_difference(int((positive == top).sum()), m, int((negative == top).sum()), n, confidence)
        low, high = 0.5 + gap.low / 2, 0.5 + gap.high / 2
    else:
        parts = (v10.var(ddof=1) / m if m > 1 else 0.0), (v01.var(ddof=1) / n if n > 1 else 0.0)
        low, high = _on_logits(value, z * sum(parts) ** 0.5)
        if min(parts) < 1e-12:  # nothing was seen to vary on one side: that is no certainty
            wide = _auc_score_interval(value, m, n, z)
            low, high = min(low, wide[0]), max(high, wide[1])
    return Estimate(value, max(0.0, float(low)), min(1.0, float(high)), TOO_FEW if min(m, n) < 10 else "")


def _on_logits(value: float, half: float) -> tuple[float, float]:
    """value ± half, to first order, symmetric in log(value / (1 - value))."""
    if not 0 < value < 1:
        return value, value
    half /= value * (1 - value)
    return float(expit(logit(value) - half)), float(expit(logit(value) + half))


def _auc_score_interval(value: float, m: int, n: int, z: float) -> tuple[float, float]:
    def variance(t: float) -> float:  # Hanley & McNeil with both sample sizes replaced by their mean
        size = (m + n) / 2 - 1
        return t * (1 - t) * (1 + size * (1 - t) / (2 - t) + size * t / (1 + t)) / (m * n)

    def gap(t: float, sign: int) -> float:
        return t + sign * z * variance(t) ** 0.5 - value

    low = (
        0.0
        if gap(0.0, 1) >= 0
        else brentq(gap, 0.0, value, args=(1,))
        if gap(value, 1) > 0
        else brentq(gap, 0.0, 1 - 1e-9, args=(1,))
    )
    high = (
        1.0
        if gap(1.0, -1) <= 0
        else brentq(gap, value, 1.0, args=(-1,))
        if gap(value, -1) < 0
        else brentq(gap, 1e-9, 1.0, args=(-1,))
    )
    return low, high


def proportion(successes: int, total: int, confidence: float = 0.95) -> Estimate:
    """A rate with its Clopper-Pearson interval."""
    if total == 0:
        return Estimate(float("nan"), 0.0, 1.0, TOO_FEW)
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, successes, total - successes + 1) if successes else 0.0
    high = stats.beta.ppf(1 - tail, successes + 1, total - successes) if successes < total else 1.0
    return Estimate(successes / total, float(low), float(high))


def rate_difference(k1: int, n1: int, k2: int, n2: int, confidence: float = 0.95) -> Estimate:
    """k1/n1 - k2/n2 with Newcombe's interval (1998, method 10: from two Wilson intervals)."""
    if not n1 or not n2:
        return Estimate(float("nan"), -1.0, 1.0, TOO_FEW)
    z = stats.norm.ppf(0.5 + confidence / 2)

    def wilson(k: int, n: int) -> tuple[float, float, float]:
        p = k / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5 / (1 + z * z / n)
        return p, centre - half, centre + half

    (p1, l1, u1), (p2, l2, u2) = wilson(k1, n1), wilson(k2, n2)
    low = p1 - p2 - ((p1 - l1) ** 2 + (u2 - p2) ** 2) ** 0.5
    high = p1 - p2 + ((u1 - p1) ** 2 + (p2 - l2) ** 2) ** 0.5
    return Estimate(p1 - p2, float(low), float(high), TOO_FEW if min(n1, n2) < 10 else "")


def tpr_at(members: np.ndarray, nonmembers: np.ndarray, fpr: float, confidence: float = 0.95) -> Estimate:
    """Share of members scored above the lowest threshold whose false-positive rate is at most `fpr`.

    The interval is distribution-free and also covers the threshold's own uncertainty: the false-positive
    rate of a threshold that lets k of n non-members through is Beta(k+1, n-k), so with half of the error
    budget we find the thresholds that surely are stricter, and surely laxer, than `fpr`, and with the
    other half put a Clopper-Pearson bound on the share of members above them.
    """
    members, descending = np.asarray(members, float), np.sort(np.asarray(nonmembers, float))[::-1]
    m, n = len(members), len(descending)
    above = m - np.searchsorted(np.sort(members), descending, side="right")  # members above the (k+1)-th non-member
    above = np.append(above, m)  # k = n: everyone

    def admitted(k: int) -> int:
        """Members above the lowest threshold that admits at most k non-members (tied scores pass or fail together)."""
        return int(above[k])

    allowed = int(np.floor(fpr * n + 1e-9))
    tail = (1 - confidence) / 4
    k = np.arange(n)
    strict = np.flatnonzero(stats.beta.ppf(1 - tail, k + 1, n - k) <= fpr)
    lax = np.flatnonzero(stats.beta.ppf(tail, k + 1, n - k) >= fpr)
    level = 1 - 2 * tail
    low = proportion(admitted(int(strict[-1])), m, level).low if len(strict) else 0.0
    high = proportion(admitted(int(lax[0])), m, level).high if len(lax) else 1.0
    note = TOO_FEW if fpr * n < 10 else ""
    return Estimate(admitted(allowed) / m, low, high, note)


def auc_difference(a: np.ndarray, b: np.ndarray, members: np.ndarray, confidence: float = 0.95) -> Estimate:
    """AUC of scores `a` minus AUC of scores `b` on the same samples, by DeLong's paired test.

    With V10 and V01 of each as in `auc`, the variance is that of their differences: what both models find hard
    cancels, which is why two overlapping intervals can hide a clear difference. Where all samples differ alike (a perfect
    score against a useless one) nothing is seen to vary, and the two intervals are combined as those of independent numbers.
    """
    members = np.asarray(members, bool)
    m, n = int(members.sum()), int((~members).sum())
    if m < 2 or n < 2:
        return Estimate(0.0, -1.0, 1.0, TOO_FEW)
    (a10, a01), (b10, b01) = (
        _placements(s[members], s[~members]) for s in (np.asarray(a, float), np.asarray(b, float))
    )
    difference = float((a10 - b10).mean())
    parts = (a10 - b10).var(ddof=1) / m, (a01 - b01).var(ddof=1) / n
    half = stats.norm.ppf(0.5 + confidence / 2) * sum(parts) ** 0.5
    low, high = difference - half, difference + half
    if difference and min(parts) < 1e-12:
        one, two = (auc(s[members], s[~members], confidence) for s in (np.asarray(a, float), np.asarray(b, float)))
        low = min(low, difference - np.hypot(one.value - one.low, two.high - two.value))
        high = max(high, difference + np.hypot(one.high - one.value, two.value - two.low))
    return Estimate(difference, float(max(-1.0, low)), float(min(1.0, high)), TOO_FEW if min(m, n) < 10 else "")


def _placements(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(share of negatives below each positive, share of positives above each negative), ties count half."""
    m, n = len(positive), len(negative)
    ranks = stats.rankdata(np.concatenate([positive, negative]))
    return (ranks[:m] - stats.rankdata(positive)) / n, 1 - (ranks[m:] - stats.rankdata(negative)) / m


def rank_correlation(a: np.ndarray, b: np.ndarray, confidence: float = 0.95) -> Estimate:
    """Spearman's rho with a Fisher interval (variance after Bonett & Wright 2000: (1 + rho^2/2)/(n - 3))."""
    n = len(a)
    if n < 10 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Estimate(0.0, -1.0, 1.0, "too few samples" if n < 10 else "one side does not vary")
    rho = float(stats.spearmanr(a, b).statistic)
    centre, half = np.arctanh(np.clip(rho, -0.999999, 0.999999)), stats.norm.ppf(0.5 + confidence / 2)
    half *= ((1 + rho**2 / 2) / (n - 3)) ** 0.5
    return Estimate(rho, float(np.tanh(centre - half)), float(np.tanh(centre + half)))


def bootstrap(
    statistic: Callable[[np.ndarray], float],
    samples: int,
    repeats: int = 200,
    seed: int = 0,
    least: float = -np.inf,
    most: float = np.inf,
) -> Estimate:
    """A number that is a function of which samples there are (rows, with repeats), with its basic bootstrap interval of 95 %.

    Basic: 2 value - quantiles of the resampled ones, so that a statistic that resampling pushes up is not pushed up twice.
    least, most: what it can be. At such a bound resampling sees no spread, and the exact bound of a rate that was never missed stands in.
    """
    rng = np.random.default_rng(seed)
    value = float(statistic(np.arange(samples)))
    drawn = [statistic(rng.integers(0, samples, samples)) for _ in range(repeats)]
    low, high = (2 * value - q for q in np.quantile(drawn, (0.975, 0.025)))
    if np.isfinite(most - least) and value in (least, most):
        never_missed = 0.025 ** (1 / samples)
        low, high = (
            (least + (most - least) * never_missed, most)
            if value == most
            else (least, most - (most - least) * never_missed)
        )
    note = TOO_FEW if samples < 10 else "rough, from few samples" if samples < 30 else ""
    return Estimate(value, float(np.clip(low, least, most)), float(np.clip(high, least, most)), note)
