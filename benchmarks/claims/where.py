"""The paper's claims about where a model memorises, each against whatever results there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .pooling import Spread, mean_of, pool, spread_of, spreads_of

INTERPOLATES = 0.99  # training accuracy of both models, before anything is said about where they memorise
HARDLY = 0.03  # a change of test accuracy that the paper calls insignificant (Table 3 spans 0.025)

Results = Mapping[str, Mapping[int, Mapping]]  # base -> seed -> what work.py kept
AUGMENTED, PLAIN = "resnet18-augmented", "resnet18-plain"


@dataclass(frozen=True)
class Verdict:
    claim: str
    paper: str
    ours: str
    agrees: str  # yes, no, partly, or why it cannot be said

    @property
    def of_the_paper(self) -> bool:
        return not self.paper.startswith(("goal of", "ours,", "not in"))

    @property
    def standing(self) -> str:
        """One of STANDINGS, by how `agrees` begins."""
        if self.agrees.startswith("cannot be said"):
            return "cannot be said here"
        if self.agrees == "met" or self.agrees.startswith("yes"):
            return "hold"
        return (
            "do not hold" if re.match(r"no\b|missed|((met|surely) )?((in|for) )?0 of", self.agrees) else "hold in part"
        )


STANDINGS = ("hold", "hold in part", "cannot be said here", "do not hold")
Judge = Callable[[Results], Verdict | None]


def telling(results: Results, base: str) -> dict[int, Mapping]:
    """The seeds whose two models interpolate, else the first; {} if the base is not there."""
    seeds = dict(sorted(results.get(base, {}).items()))
    return {seed: found for seed, found in seeds.items() if interpolates(found)} or dict(list(seeds.items())[:1])


def pooled(results: Results, base: str) -> Mapping:
    """Those seeds as one; {} if the base is not there."""
    seeds = telling(results, base)
    if not seeds:
        return {}
    spreads = spreads_of([list(telling(results, b).values()) for b in results]) if len(seeds) > 1 else {}
    return pool(list(seeds.values()), spreads)


def spread_in(results: Results, of: Callable[[Mapping], Mapping]) -> Spread:
    """How much seeds vary in some number of a model, over all models of all bases."""
    bases = []
    for seeds in results.values():
        models = [found["models"] for found in seeds.values()]
        names = dict.fromkeys(name for m in models for name in m)
        bases.append([[of(m[name]) for m in models if name in m] for name in names])
    return spread_of(bases)


def test_accuracy(model: Mapping) -> Mapping:
    return model["test_accuracy"]


def shown(e: Mapping) -> str:
    return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"


# --- where, over the seeds that can tell ---------------------------------------------------------


def last_stage(results: Mapping) -> Mapping:
    """The one before the head."""
    return results["risk"]["stages"][-2]


def interpolates(results: Mapping) -> bool:
    return bool(results) and all(a["value"] >= INTERPOLATES for a in results["risk"]["train_accuracy"].values())


def start(results: Mapping) -> tuple[str, list[str]]:
    """The first stage with a sure disparity, and the undecided ones before it, in any of which it may have started."""
    stages = [(s["name"], s["verdict"]) for s in results["risk"]["stages"]]
    at = next(
        (i for i, (_, verdict) in enumerate(stages) if verdict == "risky"), len(stages) - 1
    )  # the head at the latest
    return stages[at][0], [name for name, verdict in stages[:at] if verdict == "undecided"]


def begins(results: Mapping) -> str:
    name, doubtful = start(results)
    return f"surely from {name} on" + (f" ({', '.join(doubtful)} undecided)" if doubtful else "")


def doubts(found: Mapping[str, Mapping]) -> str:
    """Why it cannot be said where disparity starts; "" if it can."""
    unsure = {n: start(r)[1] for n, r in found.items() if start(r)[1]}
    return ", ".join(f"{', '.join(stages)} of {n}" for n, stages in unsure.items())


def place(results: Mapping) -> int:
    return [s["name"] for s in results["risk"]["stages"]].index(start(results)[0])


def distances(found: Mapping) -> str:
    return f"RMS {shown(found['distances']['rms']['auc'])}, cosine {shown(found['distances']['cosine']['auc'])}"


def effect(found: Mapping) -> tuple[float, float]:
    """(low, high) of |AUC - 1/2|, of the metric that shows more."""
    return max((tuple(d["effect"]) for d in found["distances"].values()), key=lambda e: e[0])


def able(results: Results, names: Sequence[str]) -> dict[str, Mapping]:
    """Those that are there and interpolate."""
    found = {n: pooled(results, n) for n in names}
    return {n: r for n, r in found.items() if interpolates(r)}


def behind(results: Results, names: Sequence[str]) -> str:
    """Those that are there and do not interpolate, with their training accuracies."""
    found = {n: pooled(results, n) for n in names}
    return ", ".join(
        f"{n} (full {r['risk']['train_accuracy']['full']['value']:.3f}, half {r['risk']['train_accuracy']['half']['value']:.3f})"
        for n, r in found.items()
        if r and not interpolates(r)
    )


def _early_stages_safe(results: Results) -> Verdict | None:
    r = pooled(results, PLAIN)
    if not interpolates(r):
        return None
    early = {s["name"]: s["verdict"] for s in r["risk"]["stages"][:-2]}
    gaps = {s["name"]: s["by_member_gap"] for s in r["risk"]["stages"][:-2] if s["by_member_gap"] != "safe"}
    ours = ", ".join(f"{name} {verdict}" for name, verdict in early.items())
    ours += "; by the member gap " + (", ".join(f"{n} {v}" for n, v in gaps.items()) or "all safe")
    kinds = set(early.values())
    agrees = "no" if "risky" in kinds else "yes" if kinds == {"safe"} else "cannot be said: some are undecided"
    return Verdict("ResNet18: no disparity in stages 1 to 3", "Figure 3, by eye", ours, agrees)


def _last_stage_risky(results: Results) -> Verdict | None:
    r = pooled(results, PLAIN)
    if not interpolates(r):
        return None
    found = last_stage(r)
    ours = f"{found['verdict']}: {distances(found)}"
    if found["verdict"] != "risky":
        agrees = "no" if found["verdict"] == "safe" else "cannot be said: undecided"
    elif start(r)[0] != found["name"]:
        agrees = f"no: it starts in {start(r)[0]} or before"
    elif doubts({PLAIN: r}):
        agrees = f"cannot be said: undecided at {doubts({PLAIN: r})}"
    else:
        inverted = found["distances"]["rms"]["auc"]["high"] < 0.5
        agrees = "partly: there is a disparity, but by RMS seen samples are the farther ones" if inverted else "yes"
    return Verdict("ResNet18: disparity starts in stage 4", "Figure 3", ours, agrees)


def _same_place(claim: str, paper: str, names: Sequence[str]) -> Judge:
    """The first stage with a sure disparity is the same for all of these bases."""

    def judge(results: Results) -> Verdict | None:
        there = [n for n in names if pooled(results, n)]
        found = able(results, names)
        if len(there) < 2:
            return None
        ours = ", ".join(f"{n} {begins(r)}, {distances(last_stage(r))} at the last stage" for n, r in found.items())
        if len(found) < len(there):
            why = f"{ours}; not interpolating: {behind(results, names)}"
            return Verdict(claim, paper, why, "cannot be said: a model does not interpolate")
        if doubts(found):
            return Verdict(claim, paper, ours, f"cannot be said: undecided at {doubts(found)}")
        return Verdict(claim, paper, ours, "yes" if len({start(r)[0] for r in found.values()}) == 1 else "no")

    return judge


def _ordered_effect(claim: str, paper: str, names: Sequence[str], rises: str, falls: str) -> Judge:
    """How |AUC - 1/2| at the last stage of the last base lies to that of the first one."""

    def judge(results: Results) -> Verdict | None:
        found = {n: effect(last_stage(r)) for n, r in able(results, names).items()}
        if len(found) < 2:
            return None
        ours = ", ".join(f"{n} |AUC - 1/2| [{low:.3f}, {high:.3f}]" for n, (low, high) in found.items())
        ours += f"; not interpolating: {behind(results, names)}" if behind(results, names) else ""
        start, *_, end = found.values()
        agrees = rises if end[0] > start[1] else falls if end[1] < start[0] else "cannot be said: intervals overlap"
        return Verdict(claim, paper, ours, agrees)

    return judge


def _deeper_vgg_earlier(results: Results) -> Verdict | None:
    names = ("vgg11-plain", "vgg19-plain")
    found = able(results, names)
    if len(found) < 2:
        return None
    ours = ", ".join(f"{n} {begins(r)}" for n, r in found.items())
    gap = place(found[names[1]]) - place(found[names[0]])
    agrees = "yes" if gap < 0 else "no: at the same stage" if gap == 0 else "no: later"
    agrees = f"cannot be said: undecided at {doubts(found)}" if doubts(found) else agrees
    return Verdict("in VGG19 disparity starts earlier than in VGG11", "Figure 9", ours, agrees)


def _token_mixers_early(results: Results) -> Verdict | None:
    claim, paper = "token mixers: disparity starts in stage 3 of 4", "Figure 11 (Active Token Mixer)"
    name = "pvt-plain"
    if not pooled(results, name):
        return None
    if not able(results, [name]):
        return Verdict(claim, paper, f"not interpolating: {behind(results, [name])}", "cannot be said")
    r = pooled(results, name)
    stages = [s["name"] for s in r["risk"]["stages"]]
    ours = f"PVT-v2-b1 {begins(r)}, of {', '.join(stages)}"
    doubtful = doubts({name: r})
    agrees = f"cannot be said: undecided at {doubtful}" if doubtful else "yes" if start(r)[0] == "stages.2" else "no"
    return Verdict(claim, paper, ours, agrees)


def _stall(results: Results) -> Verdict | None:
    found = able(results, list(results))
    if not found:
        return None
    ours = ", ".join(
        f"{n}: stalls at {r['risk']['stall'] or 'no stage'}, disparity {begins(r)}" for n, r in found.items()
    )
    sure = [r for r in found.values() if not start(r)[1]]
    same = [r["risk"]["stall"] == start(r)[0] for r in sure]
    agrees = "yes" if all(same) else f"in {sum(same)} of {len(same)}"
    agrees += f"; {len(found) - len(sure)} undecided" if len(sure) < len(found) else ""
    agrees = agrees if sure else "cannot be said: undecided in all"
    return Verdict("probe accuracy stalls where disparity starts", "Figures 8 and 9", ours, agrees)


def _accuracy_of(claim: str, paper: str, names: Sequence[str], judge_it: Callable[[list[Mapping]], str]) -> Judge:
    """Test accuracies of the undefended models of these bases, in this order, over the seeds that all of them have."""

    def judge(results: Results) -> Verdict | None:
        there = [n for n in names if results.get(n)]
        shared = set.intersection(*(set(results[n]) for n in there)) if len(there) > 1 else set()
        if not shared:
            return None
        spread = spread_in(results, test_accuracy)
        found = {
            n: mean_of([test_accuracy(results[n][s]["models"]["undefended"]) for s in sorted(shared)], spread)
            for n in there
        }
        ours = ", ".join(f"{n} {shown(e)}" for n, e in found.items())
        return Verdict(claim, paper, ours, judge_it(list(found.values())))

    return judge


def _grows(e: list[Mapping]) -> str:
    return "yes" if e[-1]["low"] > e[0]["high"] else "no" if e[-1]["high"] < e[0]["low"] else "cannot be said"


def _stays(e: list[Mapping]) -> str:
    """Whether no two of them differ by more than HARDLY, with an interval of the difference."""
    gaps = [difference(a, b) for a in e for b in e if a is not b]
    if all(gap["high"] <= HARDLY for gap in gaps):
        return "yes"
    return (
        "no" if any(gap["low"] > HARDLY for gap in gaps) else "cannot be said: a larger change is within the intervals"
    )


def difference(a: Mapping, b: Mapping) -> dict[str, float]:
    """a - b with its interval, their errors taken as independent."""
    value = a["value"] - b["value"]
    down = math.hypot(a["value"] - a["low"], b["high"] - b["value"])
    up = math.hypot(a["high"] - a["value"], b["value"] - b["low"])
    return {"value": value, "low": value - down, "high": value + up}


MAPS = (PLAIN, "resnet18-map2", "resnet18-map4")
CHANNELS = ("resnet18-wide256", PLAIN, "resnet18-wide1024")

WHERE: list[Judge] = [
    _early_stages_safe,
    _last_stage_risky,
    _same_place("augmentation does not move the disparity", "Figure 3", (PLAIN, AUGMENTED)),
    _ordered_effect(
        "augmentation shrinks the disparity", "Figure 3", (PLAIN, AUGMENTED), rises="no: it grows", falls="yes"
    ),
    _same_place("depth does not move the disparity in ResNets", "Figure 10", (PLAIN, "resnet34-plain")),
    _same_place("feature-map size does not move the disparity", "Figure 4", MAPS),
    _accuracy_of("larger maps at stage 4 raise test accuracy", "Table 1", MAPS, _grows),
    _same_place("channels do not move the disparity", "Figure 6", CHANNELS),
    _ordered_effect(
        "disparity at stage 4 grows with its channels", "Figure 6", CHANNELS, rises="yes", falls="no: it falls"
    ),
    _accuracy_of("channels at stage 4 hardly change test accuracy", "Table 3", CHANNELS, _stays),
    _deeper_vgg_earlier,
    _token_mixers_early,
    _stall,
]
