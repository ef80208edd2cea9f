"""Several seeds of a base as one: every interval of where it memorises narrows, and verdicts are made anew from those."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import norm, t

from pptp.intervals import Estimate
from pptp.localize import METRICS, judge, stall_of

NORMAL = float(norm.ppf(0.975))
DELTA = 0.05  # of pptp.localize, by which the single seeds were judged


@dataclass(frozen=True)
class Spread:
    """How much seeds vary beyond the choice of images, over all bases that have several; two or three seeds of one cannot tell."""

    ratio: float = 0.0  # variance between seeds over the variance of a seed's own interval
    df: float = math.inf  # what the ratio was estimated from: seeds beyond the first, of every base

    def half_width(self, own: float, seeds: int) -> float:
        """Of the 95 % interval of a mean over `seeds`, each with the variance `own`."""
        quantile = t.ppf(0.975, self.df) if self.ratio > 1 else NORMAL
        return float(quantile * (max(1.0, self.ratio) * own / seeds) ** 0.5)


ALIKE = Spread()


def spread_of(bases: Iterable[Sequence[Sequence[Mapping]]]) -> Spread:
    """From quantities of one kind: base -> quantity -> its estimates of several seeds. Quantities of one base are not independent."""
    excess, weight, df = 0.0, 0, 0
    for quantities in bases:
        several = [found for found in quantities if len(found) > 1]
        for found in several:
            excess += (len(found) - 1) * statistics.variance([e["value"] for e in found]) / own_variance(found)
            weight += len(found) - 1
        df += max((len(found) - 1 for found in several), default=0)
    return Spread(excess / weight, df) if weight else ALIKE


def own_variance(found: Sequence[Mapping]) -> float:
    """Mean variance that the seeds' own 95 % intervals, over images, stand for."""
    return statistics.mean(((e["high"] - e["low"]) / 2 / NORMAL) ** 2 for e in found)


def mean_of(found: Sequence[Mapping], spread: Spread = ALIKE) -> dict:
    """Mean of estimates of these seeds, with a 95 % interval for other seeds too as far as the spread tells."""
    if len(found) == 1 and spread.ratio <= 1:
        return dict(found[0])
    half = spread.half_width(own_variance(found), len(found))
    centre = statistics.mean(e["value"] for e in found)
    return Estimate(centre, centre - half, centre + half).to_dict()


KINDS = ("body", "head", "probe", "probe_gain", "member_gap")


def kinds_of(seeds: Sequence[Mapping]) -> dict[str, list[list[Mapping]]]:
    """Kind -> quantity -> its estimates of these seeds of one base; distances of the head, which vary much more, are a kind of their own."""
    found: dict[str, list[list[Mapping]]] = {kind: [] for kind in KINDS}
    stages = list(zip(*(r["risk"]["stages"] for r in seeds), strict=True))
    for stage in stages:
        kind = "head" if stage is stages[-1] else "body"
        found[kind] += [[s["distances"][metric]["auc"] for s in stage] for metric in METRICS]
        for name in KINDS[2:]:
            if stage[0].get(name):
                found[name].append([s[name] for s in stage])
    return found


def spreads_of(bases: Sequence[Sequence[Mapping]]) -> dict[str, Spread]:
    """Of every kind, from what work.py kept: base -> its seeds."""
    found = [kinds_of(seeds) for seeds in bases if len(seeds) > 1]
    return {kind: spread_of([one[kind] for one in found]) for kind in KINDS}


def pool(seeds: Sequence[Mapping], spreads: Mapping[str, Spread]) -> dict:
    """What work.py kept of the seeds of one base, as if of one; what is no estimate is the first seed's.

    One seed alone is no surer of the others than two: its intervals widen by the same spread.
    """
    risks = [found["risk"] for found in seeds]
    together = list(zip(*(risk["stages"] for risk in risks), strict=True))
    powered = all(risk["powered"] for risk in risks)
    stages = [_stage(same, spreads, "head" if same is together[-1] else "body", powered) for same in together]
    train = {name: mean_of([risk["train_accuracy"][name] for risk in risks]) for name in risks[0]["train_accuracy"]}
    stall = risks[0]["stall"] if len(seeds) == 1 and spreads["probe_gain"].ratio <= 1 else _stall(stages)
    return {**seeds[0], "risk": {**risks[0], "stages": stages, "train_accuracy": train, "stall": stall}}


def _stage(seeds: Sequence[Mapping], spreads: Mapping[str, Spread], kind: str, powered: bool) -> dict:
    """One stage or block over seeds; judged as `localize` judges, which calls nothing safe before both models know the members."""
    if len(seeds) == 1 and all(s.ratio <= 1 for s in spreads.values()):
        return dict(seeds[0])
    distances = {m: _distance([s["distances"][m]["auc"] for s in seeds], spreads[kind]) for m in METRICS}
    stage = {
        **seeds[0],
        "distances": distances,
        "verdict": judge([d["effect"] for d in distances.values()], DELTA, powered),
        "blocks": [_stage(same, spreads, kind, powered) for same in zip(*(s.get("blocks", ()) for s in seeds), strict=True)],
    }
    stage |= {k: mean_of([s[k] for s in seeds], spreads[k]) for k in KINDS[2:] if seeds[0].get(k)}
    if stage.get("member_gap"):
        stage["by_member_gap"] = judge([(stage["member_gap"]["low"], stage["member_gap"]["high"])], DELTA, powered)
    return stage


def _distance(aucs: Sequence[Mapping], spread: Spread) -> dict:
    together = mean_of(aucs, spread)
    return {"auc": together, "effect": list(Estimate(**together).effect)}


def _stall(stages: Sequence[Mapping]) -> str:
    return stall_of(
        [(s["name"], Estimate(**s["probe_gain"]) if s.get("probe_gain") else None) for s in stages if s.get("probe")]
    )
