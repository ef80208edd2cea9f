"""The paper's claims that can be checked here, each against whatever results there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

INTERPOLATES = 0.99  # training accuracy of both models, before anything is said about where they memorise

Results = Mapping[str, Mapping]  # base -> results of its first seed


@dataclass(frozen=True)
class Verdict:
    claim: str
    paper: str
    ours: str
    agrees: str  # yes, no, partly, or why it cannot be said


def last_stage(results: Mapping) -> Mapping:
    """The one before the head."""
    return results["risk"]["stages"][-2]


def interpolates(results: Mapping) -> bool:
    return all(accuracy["value"] >= INTERPOLATES for accuracy in results["risk"]["train_accuracy"].values())


def shown(e: Mapping) -> str:
    return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"


def first_risky(results: Mapping) -> str:
    """The first stage with a sure disparity; the cut may come earlier, since undecided stages are retrained too."""
    return next(s["name"] for s in results["risk"]["stages"] if s["verdict"] == "risky")


def distances(found: Mapping) -> str:
    return f"RMS {shown(found['distances']['rms']['auc'])}, cosine {shown(found['distances']['cosine']['auc'])}"


def effect(found: Mapping) -> tuple[float, float]:
    """(low, high) of |AUC - 1/2|, of the metric that shows more."""
    return max((tuple(d["effect"]) for d in found["distances"].values()), key=lambda e: e[0])


def _early_stages_safe(results: Results) -> Verdict | None:
    r = results.get("resnet18-plain")
    if not r or not interpolates(r):
        return None
    early = {s["name"]: s["verdict"] for s in r["risk"]["stages"][:-2]}
    gaps = {s["name"]: s["by_member_gap"] for s in r["risk"]["stages"][:-2] if s["by_member_gap"] != "safe"}
    ours = ", ".join(f"{name} {verdict}" for name, verdict in early.items())
    ours += "; by the member gap " + (", ".join(f"{n} {v}" for n, v in gaps.items()) or "all safe")
    kinds = set(early.values())
    agrees = "no" if "risky" in kinds else "yes" if kinds == {"safe"} else "cannot be said: some are undecided"
    return Verdict("ResNet18: no disparity in stages 1 to 3", "Figure 3, by eye", ours, agrees)


def _last_stage_risky(results: Results) -> Verdict | None:
    r = results.get("resnet18-plain")
    if not r or not interpolates(r):
        return None
    found = last_stage(r)
    ours = f"{found['verdict']}: {distances(found)}"
    if found["verdict"] != "risky":
        agrees = "no" if found["verdict"] == "safe" else "cannot be said: undecided"
    elif first_risky(r) != found["name"]:
        agrees = f"no: it starts in {first_risky(r)}"
    else:
        inverted = found["distances"]["rms"]["auc"]["high"] < 0.5
        agrees = "partly: there is a disparity, but by RMS seen samples are the farther ones" if inverted else "yes"
    return Verdict("ResNet18: disparity starts in stage 4", "Figure 3", ours, agrees)


def _same_place(claim: str, paper: str, names: list[str]) -> Callable[[Results], Verdict | None]:
    """The first stage with a sure disparity is the same for all of these bases."""

    def judge(results: Results) -> Verdict | None:
        there = [n for n in names if n in results]
        able = [n for n in there if interpolates(results[n])]
        if len(there) < 2:
            return None
        cuts = {n: first_risky(results[n]) for n in able}
        ours = ", ".join(
            f"{n} from {cut} on ({distances(last_stage(results[n]))} at the last stage)" for n, cut in cuts.items()
        )
        if len(able) < len(there):
            behind = ", ".join(
                f"{n} (full {results[n]['risk']['train_accuracy']['full']['value']:.3f}, half {results[n]['risk']['train_accuracy']['half']['value']:.3f})"
                for n in there
                if n not in able
            )
            return Verdict(
                claim, paper, f"{ours}; not interpolating: {behind}", "cannot be said: a model does not interpolate"
            )
        return Verdict(claim, paper, ours, "yes" if len(set(cuts.values())) == 1 else "no")

    return judge


def _more_channels_more_disparity(results: Results) -> Verdict | None:
    names = [
        n
        for n in ("resnet18-wide256", "resnet18-plain", "resnet18-wide1024")
        if n in results and interpolates(results[n])
    ]
    if len(names) < 2:
        return None
    found = [effect(last_stage(results[n])) for n in names]
    ours = ", ".join(f"{n} |AUC - 1/2| [{low:.3f}, {high:.3f}]" for n, (low, high) in zip(names, found))
    rising = found[-1][0] > found[0][1]
    falling = found[-1][1] < found[0][0]
    return Verdict(
        "disparity at stage 4 grows with its channels",
        "Figure 6",
        ours,
        "yes" if rising else "no: it falls" if falling else "cannot be said: intervals overlap",
    )


def _stall(results: Results) -> Verdict | None:
    able = {n: r for n, r in results.items() if interpolates(r)}
    if not able:
        return None
    ours = ", ".join(
        f"{n}: stalls at {r['risk']['stall'] or 'no stage'}, disparity from {first_risky(r)} on (stricter cut {r['risk']['strict_cut']})"
        for n, r in able.items()
    )
    same = [r["risk"]["stall"] == first_risky(r) for r in able.values()]
    return Verdict(
        "probe accuracy stalls where disparity starts",
        "Figures 8 and 9",
        ours,
        "yes" if all(same) else f"in {sum(same)} of {len(same)}",
    )


def _models(results: Results) -> Mapping:
    return results.get("resnet18-augmented", {}).get("models", {})


def leak(model: Mapping) -> dict[str, float]:
    """AUC of the confidence attack, turned around if it is below 1/2, as the attacker would."""
    return turned(model["attacks"]["confidence"]["auc"])


def turned(e: Mapping) -> dict[str, float]:
    far = sorted(abs(e[end] - 0.5) for end in ("low", "high"))
    low = 0.0 if e["low"] <= 0.5 <= e["high"] else far[0]
    return {"value": 0.5 + abs(e["value"] - 0.5), "low": 0.5 + low, "high": 0.5 + far[1]}


def utility(model: Mapping) -> str:
    return f"test {shown(model['test_accuracy'])}, confidence AUC {shown(leak(model))}"


def _last_layer_fails(results: Results) -> Verdict | None:
    """Retraining the head leaks more than retraining the last stage, with the same defense."""
    models, names = _models(results), ("undefended", "relaxloss-1.5-head", "relaxloss-1.5-layer4")
    if any(name not in models for name in names):
        return None
    ours = "; ".join(f"{name}: {utility(models[name])}" for name in names)
    head, stage = leak(models[names[1]]), leak(models[names[2]])
    agrees = (
        "yes"
        if head["low"] > stage["high"]
        else "no"
        if head["high"] < stage["low"]
        else "cannot be said: intervals overlap"
    )
    return Verdict(
        "retraining the last layer only does not remove the risk, the last stage does", "Figure 12", ours, agrees
    )


def surely_better(mine: Mapping, theirs: Mapping) -> bool:
    """Surely better in accuracy or leakage, and surely worse in neither."""
    a, b, x, y = mine["test_accuracy"], theirs["test_accuracy"], leak(mine), leak(theirs)
    more_useful, less_leaky = a["low"] > b["high"], x["high"] < y["low"]
    return (more_useful and not x["low"] > y["high"]) or (less_leaky and not a["high"] < b["low"])


def _rewinding(results: Results) -> Verdict | None:
    models, names = _models(results), ("relaxloss-1.5-layer4", "relaxloss-1.5-finetune")
    if any(name not in models for name in names):
        return None
    rewound, tuned = (models[name] for name in names)
    ours = "; ".join(f"{name}: {utility(models[name])}" for name in names)
    agrees = (
        "yes"
        if surely_better(rewound, tuned)
        else "no"
        if surely_better(tuned, rewound)
        else "cannot be said: neither is surely better"
    )
    return Verdict("rewinding beats fine-tuning", "section 5.2.1", ours, agrees)


def _beats_scratch(defenses: tuple[str, ...], claim: str, paper: str) -> Callable[[Results], Verdict | None]:
    """Is every from-scratch point of RelaxLoss beaten by a PPTP point, or the other way round?"""

    def judge(results: Results) -> Verdict | None:
        models = _models(results)
        scratch = {n: m for n, m in models.items() if m.get("defense") == "relaxloss" and m["cut"] == "scratch"}
        suffix = {
            n: m
            for n, m in models.items()
            if m.get("defense") in defenses and m["cut"] != "scratch" and m["rewind"] == "init"
        }
        if not scratch or not suffix:
            return None
        beaten = {b: [a for a in suffix if surely_better(suffix[a], scratch[b])] for b in scratch}
        beating = {b: [a for a in suffix if surely_better(scratch[b], suffix[a])] for b in scratch}
        lines = []
        for b in scratch:
            lines.append(
                f"{b}: {utility(scratch[b])}, beaten by {len(beaten[b])} and beating {len(beating[b])} of {len(suffix)}"
            )
            best = max(
                beaten[b], key=lambda a: suffix[a]["test_accuracy"]["value"] - leak(suffix[a])["value"], default=None
            )
            lines += [f"best: {best}: {utility(suffix[best])}"] if best else []
        won = sum(map(bool, beaten.values()))
        agrees = "yes" if won == len(scratch) else f"for {won} of {len(scratch)} points from scratch"
        return Verdict(claim, paper, "; ".join(lines), agrees)

    return judge


CLAIMS: list[Callable[[Results], Verdict | None]] = [
    _early_stages_safe,
    _last_stage_risky,
    _same_place("augmentation does not move it", "Figure 3", ["resnet18-plain", "resnet18-long"]),
    _same_place("depth does not move it in ResNets", "Figure 10", ["resnet18-plain", "resnet34-plain"]),
    _same_place("feature-map size does not move it", "Figure 4", ["resnet18-plain", "resnet18-map2"]),
    _same_place("channels do not move it", "Figure 6", ["resnet18-wide256", "resnet18-plain", "resnet18-wide1024"]),
    _more_channels_more_disparity,
    _stall,
    _last_layer_fails,
    _rewinding,
    _beats_scratch(("relaxloss",), "RelaxLoss under PPTP beats RelaxLoss from scratch", "Figures 13 and 14"),
    _beats_scratch(
        ("crossfit", "plain"),
        "PPTP with short retraining or labels from outside beats RelaxLoss from scratch",
        "ours, not the paper's",
    ),
]


def judge_all(results: Results) -> list[Verdict]:
    return [verdict for verdict in (claim(results) for claim in CLAIMS) if verdict is not None]
