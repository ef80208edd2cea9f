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


def stage(results: Mapping, name: str) -> Mapping:
    return next(s for s in results["risk"]["stages"] if s["name"] == name)


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
    leaky = [s["name"] for s in r["risk"]["stages"][:-2] if s["by_member_gap"] == "risky"]
    ours = ", ".join(f"{name} {verdict}" for name, verdict in early.items())
    ours += f"; by the member gap {', '.join(leaky) if leaky else 'none of them'} risky"
    return Verdict(
        "ResNet18: no disparity in stages 1 to 3",
        "Figure 3, by eye",
        ours,
        "yes" if set(early.values()) == {"safe"} else "partly",
    )


def _last_stage_risky(results: Results) -> Verdict | None:
    r = results.get("resnet18-plain")
    if not r or not interpolates(r):
        return None
    found = last_stage(r)
    inverted = found["distances"]["rms"]["auc"]["high"] < 0.5
    agrees = (
        "no"
        if found["verdict"] == "safe"
        else "partly: there is a disparity, but seen samples are the farther ones"
        if inverted
        else "yes"
    )
    return Verdict(
        "ResNet18: disparity starts in stage 4", "Figure 3", f"{found['verdict']}: {distances(found)}", agrees
    )


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


def leak(model: Mapping) -> Mapping:
    return model["attacks"]["confidence"]["auc"]


def utility(model: Mapping) -> str:
    return f"test {shown(model['test_accuracy'])}, confidence AUC {shown(leak(model))}"


def _against(claim: str, paper: str, worse: str, better: str) -> Callable[[Results], Verdict | None]:
    """`better` leaks clearly less than `worse`."""

    def judge(results: Results) -> Verdict | None:
        models = _models(results)
        if worse not in models or better not in models:
            return None
        a, b = leak(models[worse]), leak(models[better])
        ours = f"{worse}: {utility(models[worse])}; {better}: {utility(models[better])}"
        agrees = (
            "yes" if a["low"] > b["high"] else "no" if a["high"] < b["low"] else "cannot be said: intervals overlap"
        )
        return Verdict(claim, paper, ours, agrees)

    return judge


def _beats_scratch(results: Results) -> Verdict | None:
    """By RelaxLoss, the paper's own comparison: is a PPTP point as private as a from-scratch point and more accurate?"""
    models = {n: m for n, m in _models(results).items() if m.get("defense") == "relaxloss"}
    scratch = {n: m for n, m in models.items() if m["cut"] == "scratch"}
    suffix = {n: m for n, m in models.items() if m["cut"] != "scratch" and m["rewind"] == "init"}
    if not scratch or not suffix:
        return None

    def beaten(mine: Mapping, theirs: Mapping) -> bool:
        return (
            leak(mine)["value"] <= leak(theirs)["value"]
            and mine["test_accuracy"]["low"] > theirs["test_accuracy"]["high"]
        )

    wins = [(a, b) for a in suffix for b in scratch if beaten(suffix[a], scratch[b])]
    losses = [(b, a) for a in suffix for b in scratch if beaten(scratch[b], suffix[a])]
    ours = f"{len(wins)} of {len(suffix) * len(scratch)} pairs won by PPTP, {len(losses)} by from scratch (no more leakage and surely more accurate)"
    for a, b in (wins or losses)[:1]:
        ours += f"; {a}: {utility(models[a])}; {b}: {utility(models[b])}"
    return Verdict(
        "RelaxLoss under PPTP is more accurate at the same privacy",
        "Figures 13 and 14",
        ours,
        "yes" if wins and not losses else "no" if losses else "cannot be said: no pair differs clearly",
    )


CLAIMS: list[Callable[[Results], Verdict | None]] = [
    _early_stages_safe,
    _last_stage_risky,
    _same_place("augmentation does not move it", "Figure 3", ["resnet18-plain", "resnet18-long"]),
    _same_place("depth does not move it in ResNets", "Figure 10", ["resnet18-plain", "resnet34-plain"]),
    _same_place("feature-map size does not move it", "Figure 4", ["resnet18-plain", "resnet18-map2"]),
    _same_place("channels do not move it", "Figure 6", ["resnet18-wide256", "resnet18-plain", "resnet18-wide1024"]),
    _more_channels_more_disparity,
    _stall,
    _against("retraining the last layer only does not help", "Figure 12", "relaxloss-1.5-head", "relaxloss-1.5-layer4"),
    _against("rewinding beats fine-tuning", "section 5.2.1", "relaxloss-1.5-finetune", "relaxloss-1.5-layer4"),
    _beats_scratch,
]


def judge_all(results: Results) -> list[Verdict]:
    return [verdict for verdict in (claim(results) for claim in CLAIMS) if verdict is not None]
