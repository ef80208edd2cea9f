"""Several seeds of a base as one: every interval of where it memorises narrows, and verdicts are made anew from those."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from scipy.stats import norm

from pptp.intervals import Estimate
from pptp.localize import METRICS, judge, stall_of

DELTA = 0.05  # of pptp.localize, by which the single seeds were judged


def mean_of(found: Sequence[Mapping]) -> dict:
    """Mean of estimates of independent seeds, each with its 95 % interval.

    Variance of the mean: the larger of the seeds' own (mean square of their half-widths / 1.96) and the one between them, over their number.
    """
    if len(found) == 1:
        return dict(found[0])
    z = norm.ppf(0.975)
    values = [e["value"] for e in found]
    own = statistics.mean(((e["high"] - e["low"]) / 2 / z) ** 2 for e in found)
    half = z * (max(own, statistics.variance(values)) / len(found)) ** 0.5
    centre = statistics.mean(values)
    return Estimate(centre, centre - half, centre + half).to_dict()


def pool(seeds: Sequence[Mapping]) -> dict:
    """What work.py kept of several seeds of one base, as if of one; what is no estimate is the first seed's."""
    risks = [found["risk"] for found in seeds]
    stages = [_stage(together) for together in zip(*(risk["stages"] for risk in risks), strict=True)]
    train = {name: mean_of([risk["train_accuracy"][name] for risk in risks]) for name in risks[0]["train_accuracy"]}
    stall = risks[0]["stall"] if len(seeds) == 1 else _stall(stages)
    return {**seeds[0], "risk": {**risks[0], "stages": stages, "train_accuracy": train, "stall": stall}}


def _stage(seeds: Sequence[Mapping]) -> dict:
    """One stage or block over seeds; judged as `localize` judges, both models at interpolation."""
    if len(seeds) == 1:
        return dict(seeds[0])
    distances = {metric: _distance([s["distances"][metric]["auc"] for s in seeds]) for metric in METRICS}
    stage = {
        **seeds[0],
        "distances": distances,
        "verdict": judge([d["effect"] for d in distances.values()], DELTA, True),
        "blocks": [_stage(blocks) for blocks in zip(*(s.get("blocks", ()) for s in seeds), strict=True)],
    }
    stage |= {k: mean_of([s[k] for s in seeds]) for k in ("probe", "probe_gain", "member_gap") if seeds[0].get(k)}
    if stage.get("member_gap"):
        stage["by_member_gap"] = judge([(stage["member_gap"]["low"], stage["member_gap"]["high"])], DELTA, True)
    return stage


def _distance(aucs: Sequence[Mapping]) -> dict:
    together = mean_of(aucs)
    return {"auc": together, "effect": list(Estimate(**together).effect)}


def _stall(stages: Sequence[Mapping]) -> str:
    return stall_of(
        [(s["name"], Estimate(**s["probe_gain"]) if s.get("probe_gain") else None) for s in stages if s.get("probe")]
    )
