"""The paper's claims that can be checked here, each against whatever results there are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

INTERPOLATES = 0.99  # training accuracy of both models, before anything is said about where they memorise
HARDLY = 0.03  # a change of test accuracy that the paper calls insignificant (Table 3 spans 0.025)

GOAL_ACCURACY, GOAL_LEAK = 0.95, 0.55

Results = Mapping[str, Mapping[int, Mapping]]  # base -> seed -> what work.py kept
AUGMENTED, PLAIN, CSKD = "resnet18-augmented", "resnet18-plain", "resnet18-cskd"


@dataclass(frozen=True)
class Verdict:
    claim: str
    paper: str
    ours: str
    agrees: str  # yes, no, partly, or why it cannot be said


Judge = Callable[[Results], Verdict | None]


def first(results: Results, base: str) -> Mapping:
    """Of the first seed whose two models interpolate, else of the first; {} if the base is not there."""
    seeds = [results[base][seed] for seed in sorted(results.get(base, {}))]
    return next(filter(interpolates, seeds), seeds[0] if seeds else {})


def shown(e: Mapping) -> str:
    return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"


# --- where, by one seed of each base ---------------------------------------------------------


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
    found = {n: first(results, n) for n in names}
    return {n: r for n, r in found.items() if interpolates(r)}


def behind(results: Results, names: Sequence[str]) -> str:
    """Those that are there and do not interpolate, with their training accuracies."""
    found = {n: first(results, n) for n in names}
    return ", ".join(
        f"{n} (full {r['risk']['train_accuracy']['full']['value']:.3f}, half {r['risk']['train_accuracy']['half']['value']:.3f})"
        for n, r in found.items()
        if r and not interpolates(r)
    )


def _early_stages_safe(results: Results) -> Verdict | None:
    r = first(results, PLAIN)
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
    r = first(results, PLAIN)
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
        there = [n for n in names if first(results, n)]
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
    if not first(results, name):
        return None
    if not able(results, [name]):
        return Verdict(claim, paper, f"not interpolating: {behind(results, [name])}", "cannot be said")
    r = first(results, name)
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
    same = [r["risk"]["stall"] == start(r)[0] and not start(r)[1] for r in found.values()]
    agrees = "yes" if all(same) else f"in {sum(same)} of {len(same)}"
    return Verdict("probe accuracy stalls where disparity starts", "Figures 8 and 9", ours, agrees)


def _accuracy_of(claim: str, paper: str, names: Sequence[str], judge_it: Callable[[list[Mapping]], str]) -> Judge:
    """Test accuracies of the undefended models of these bases, in this order."""

    def judge(results: Results) -> Verdict | None:
        found = {n: first(results, n)["models"]["undefended"]["test_accuracy"] for n in names if first(results, n)}
        if len(found) < 2:
            return None
        ours = ", ".join(f"{n} {shown(e)}" for n, e in found.items())
        return Verdict(claim, paper, ours, judge_it(list(found.values())))

    return judge


def _grows(e: list[Mapping]) -> str:
    return "yes" if e[-1]["low"] > e[0]["high"] else "no" if e[-1]["high"] < e[0]["low"] else "cannot be said"


def _stays(e: list[Mapping]) -> str:
    values = [x["value"] for x in e]
    return "yes" if max(values) - min(values) <= HARDLY else f"no: it changes by {max(values) - min(values):.3f}"


# --- what it buys, over all seeds ------------------------------------------------------------------


def leak(model: Mapping) -> dict[str, float]:
    """AUC of the confidence attack, turned around if it is below 1/2, as the attacker would."""
    return turned(model["attacks"]["confidence"]["auc"])


def turned(e: Mapping) -> dict[str, float]:
    far = sorted(abs(e[end] - 0.5) for end in ("low", "high"))
    low = 0.0 if e["low"] <= 0.5 <= e["high"] else far[0]
    return {"value": 0.5 + abs(e["value"] - 0.5), "low": 0.5 + low, "high": 0.5 + far[1]}


def spread(found: Sequence[Mapping]) -> str:
    """Value with its interval of one seed, mean and standard deviation of several."""
    if len(found) == 1:
        return shown(found[0])
    values = [e["value"] for e in found]
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def with_models(results: Results, base: str, names: Sequence[str]) -> dict[int, Mapping]:
    """seed -> models, of the seeds that have all of them."""
    seeds = {seed: r["models"] for seed, r in results.get(base, {}).items()}
    return {seed: models for seed, models in seeds.items() if all(name in models for name in names)}


def utility(seeds: Mapping[int, Mapping], name: str) -> str:
    accuracy, leaks = (spread([of(m[name]) for m in seeds.values()]) for of in (lambda m: m["test_accuracy"], leak))
    return f"{name}: test {accuracy}, confidence AUC {leaks}"


def surely_better(mine: Mapping, theirs: Mapping) -> bool:
    """Surely better in accuracy or leakage, and surely worse in neither."""
    a, b, x, y = mine["test_accuracy"], theirs["test_accuracy"], leak(mine), leak(theirs)
    more_useful, less_leaky = a["low"] > b["high"], x["high"] < y["low"]
    return (more_useful and not x["low"] > y["high"]) or (less_leaky and not a["high"] < b["low"])


def leaks_less(mine: Mapping, theirs: Mapping) -> bool:
    return leak(mine)["high"] < leak(theirs)["low"]


def in_seeds(wins: Sequence[bool], losses: Sequence[bool]) -> str:
    """The answers of several seeds in one."""
    if all(wins):
        return "yes" if len(wins) == 1 else f"yes, in all {len(wins)} seeds"
    if all(losses):
        return "no: the other way round"
    if not any(wins) and not any(losses):
        return "cannot be said: neither is surely better"
    return f"in {sum(wins)} of {len(wins)} seeds" + (f", the other way round in {sum(losses)}" if any(losses) else "")


def _beats(
    claim: str, paper: str, mine: str, theirs: str, base: str = AUGMENTED, by=surely_better, rival_base: str = ""
) -> Judge:
    """One model against another with the same members, seed by seed; of the same base, or of `rival_base`."""

    def judge(results: Results) -> Verdict | None:
        rivals = with_models(results, rival_base or base, [theirs])
        seeds = {s: m for s, m in with_models(results, base, [mine]).items() if s in rivals}
        if not seeds:
            return None
        wins = [by(m[mine], rivals[s][theirs]) for s, m in seeds.items()]
        losses = [by(rivals[s][theirs], m[mine]) for s, m in seeds.items()]
        ours = f"{base}: {utility(seeds, mine)}; {rival_base}{': ' if rival_base else ''}"
        ours += utility({s: rivals[s] for s in seeds}, theirs)
        return Verdict(claim, paper, ours, in_seeds(wins, losses))

    return judge


def _beats_scratch(defenses: Sequence[str], claim: str, paper: str, base: str = AUGMENTED) -> Judge:
    """Is every from-scratch point of RelaxLoss beaten by some PPTP point of the same seed, in every seed that has any?"""

    def judge(results: Results) -> Verdict | None:
        lines, won, lost = [], 0, 0
        for name in sorted({n for r in results.get(base, {}).values() for n, m in r["models"].items() if _rival(m)}):
            seeds = {s: m for s, m in with_models(results, base, [name]).items() if _candidates(m, defenses)}
            if not seeds:
                continue
            mine = {s: [n for n in _candidates(m, defenses) if surely_better(m[n], m[name])] for s, m in seeds.items()}
            best = max(set.intersection(*map(set, mine.values())), key=lambda n: _gain(seeds, n), default=None)
            lines.append(utility(seeds, name) + (f" (best against it: {utility(seeds, best)})" if best else ""))
            won += all(mine.values())
            lost += all(surely_better(m[name], m[n]) for m in seeds.values() for n in _candidates(m, defenses))
        if not lines:
            return None
        agrees = "yes" if won == len(lines) else f"for {won} of {len(lines)} points from scratch"
        agrees += f"; {lost} beat every one of these" if lost else ""
        return Verdict(claim, paper, f"{base}: " + "; ".join(lines), agrees)

    return judge


def _rival(model: Mapping) -> bool:
    return model.get("defense") == "relaxloss" and model["cut"] == "scratch"


def _candidates(models: Mapping, defenses: Sequence[str]) -> list[str]:
    """Rewound and retrained from a cut on under one of these defenses."""
    return [
        name
        for name, m in models.items()
        if m.get("defense") in defenses and m["cut"] != "scratch" and m["rewind"] == "init"
    ]


def _gain(seeds: Mapping[int, Mapping], name: str) -> float:
    return statistics.mean(m[name]["test_accuracy"]["value"] - leak(m[name])["value"] for m in seeds.values())


def _goal(results: Results) -> Verdict | None:
    """Of the PPTP models that every seed of the base has: the least leaky that keeps 95 % of the accuracy on average and, if that leaks
    more than the goal, the most accurate that does not; beside the RelaxLoss from scratch nearest in leakage."""
    seeds = {s: r["models"] for s, r in results.get(AUGMENTED, {}).items()}
    if not seeds:
        return None
    everywhere = set.intersection(*(set(_candidates(m, (*OURS, "relaxloss"))) for m in seeds.values()))
    able_ones = [n for n in everywhere if _kept(seeds, n) >= GOAL_ACCURACY]
    rivals = {n for m in seeds.values() for n, row in m.items() if _rival(row)}
    if not able_ones or not rivals:
        return None
    best = min(able_ones, key=lambda n: _mean_leak(seeds, n))
    reached = _mean_leak(seeds, best)
    rival = min(sorted(rivals), key=lambda n: abs(_mean_leak(_having(seeds, n), n) - reached))
    quiet = [n for n in everywhere if _mean_leak(seeds, n) <= GOAL_LEAK]
    shown_ones = [best]
    if reached > GOAL_LEAK and quiet:
        shown_ones.append(max(quiet, key=lambda n: _kept(seeds, n)))
    ours = "; ".join(
        f"{utility(_having(seeds, n), n)} ({_kept(_having(seeds, n), n):.3f} of undefended, {_seeds(_having(seeds, n))})"
        for n in (*shown_ones, rival)
    )
    agrees = "met" if reached <= GOAL_LEAK else f"missed by {reached - GOAL_LEAK:.3f} of AUC"
    claim = f"at least {GOAL_ACCURACY:.0%} of the undefended test accuracy at confidence AUC {GOAL_LEAK} or below"
    return Verdict(claim, "goal of this project", f"{AUGMENTED}: {ours}", agrees)


def _having(seeds: Mapping[int, Mapping], name: str) -> dict[int, Mapping]:
    return {s: m for s, m in seeds.items() if name in m}


def _seeds(seeds: Mapping) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _kept(seeds: Mapping[int, Mapping], name: str) -> float:
    """Test accuracy over that of the undefended model of the same seed, mean over seeds."""
    return statistics.mean(
        m[name]["test_accuracy"]["value"] / m["undefended"]["test_accuracy"]["value"] for m in seeds.values()
    )


def _mean_leak(seeds: Mapping[int, Mapping], name: str) -> float:
    return statistics.mean(leak(m[name])["value"] for m in seeds.values())


def _features_move_more(results: Results) -> Verdict | None:
    """Mean RMS distance from the undefended model's features, stage by stage: RelaxLoss on all data against cross-entropy on half."""
    for base in (PLAIN, AUGMENTED):
        for models in (r["models"] for r in results.get(base, {}).values()):
            names = [n for n, m in models.items() if _rival(m) and "from_base" in m]
            if not names or "from_base" not in models["undefended"]:
                continue
            half, relaxed = models["undefended"]["from_base"], models[names[0]]["from_base"]
            more = [stage for stage in half if relaxed[stage] > half[stage]]
            ours = f"{base}, {names[0]} / half data: " + ", ".join(
                f"{s} {relaxed[s]:.3f} / {half[s]:.3f}" for s in half
            )
            agrees = "yes" if len(more) == len(half) else f"in {len(more)} of {len(half)} stages"
            return Verdict("RelaxLoss moves features more than halving the data does", "Figure 17", ours, agrees)
    return None


def _cheaper(results: Results) -> Verdict | None:
    """Time of each defense from the cut on over the same from scratch, as they were run (the cut takes fewer epochs)."""
    ratios = {}
    for base in (AUGMENTED, PLAIN):
        for mine, theirs in SAME_DEFENSE:
            seeds = with_models(results, base, (mine, theirs))
            if seeds:
                shares = [m[mine]["cost"]["seconds"] / m[theirs]["cost"]["seconds"] for m in seeds.values()]
                ratios[f"{base} {mine} / {theirs}"] = statistics.mean(shares)
    if not ratios:
        return None
    ours = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    claim = "retraining takes much less time than the same defense from scratch, with less than half the epochs"
    half = sum(ratio < 0.5 for ratio in ratios.values())
    agrees = "yes" if half == len(ratios) else f"less than half of it in {half} of {len(ratios)}"
    return Verdict(claim, "Figure 16, section 5.2.3", ours, agrees)


SAME_DEFENSE = (
    ("relaxloss-1-layer3", "relaxloss-1-scratch"),
    ("relaxloss-2-layer3", "relaxloss-2-scratch"),
    ("advreg-3-layer4", "advreg-3-scratch"),
    ("selena-layer4", "selena-scratch"),
    ("selena-10-layer2", "selena-10-scratch"),
    ("dpsgd-8-layer4", "dpsgd-8-scratch"),
    ("crossfit-1-layer2", "crossfit-1-scratch"),
)
DEFENSES = (
    ("AdvReg", "Figures 13 and 14", "advreg-3-layer4", "advreg-3-scratch"),
    ("SELENA", "Figure 14: very slightly", "selena-layer4", "selena-scratch"),
    ("SELENA with ten short sub-models", "not in the paper", "selena-10-layer2", "selena-10-scratch"),
    (
        "DP-SGD (by attacks; only from scratch does its epsilon cover the model)",
        "not in the paper",
        "dpsgd-8-layer4",
        "dpsgd-8-scratch",
    ),
)
MAPS = (PLAIN, "resnet18-map2", "resnet18-map4")
CHANNELS = ("resnet18-wide256", PLAIN, "resnet18-wide1024")
OURS = ("crossfit", "plain", "selena")

CLAIMS: list[Judge] = [
    _early_stages_safe,
    _last_stage_risky,
    _same_place("augmentation does not move it", "Figure 3", (PLAIN, AUGMENTED)),
    _ordered_effect("augmentation shrinks it", "Figure 3", (PLAIN, AUGMENTED), rises="no: it grows", falls="yes"),
    _same_place("depth does not move it in ResNets", "Figure 10", (PLAIN, "resnet34-plain")),
    _same_place("feature-map size does not move it", "Figure 4", MAPS),
    _accuracy_of("larger maps at stage 4 raise test accuracy", "Table 1", MAPS, _grows),
    _same_place("channels do not move it", "Figure 6", CHANNELS),
    _ordered_effect(
        "disparity at stage 4 grows with its channels", "Figure 6", CHANNELS, rises="yes", falls="no: it falls"
    ),
    _accuracy_of("channels at stage 4 hardly change test accuracy", "Table 3", CHANNELS, _stays),
    _deeper_vgg_earlier,
    _token_mixers_early,
    _stall,
    _features_move_more,
    _beats(
        "retraining the last layer only leaks more than retraining the last stage",
        "Figure 12",
        "relaxloss-1.5-layer4",
        "relaxloss-1.5-head",
        by=leaks_less,
    ),
    _beats("rewinding beats fine-tuning", "section 5.2.1", "relaxloss-1.5-layer4", "relaxloss-1.5-finetune"),
    _beats_scratch(("relaxloss",), "RelaxLoss under PPTP beats RelaxLoss from scratch", "Figures 13 and 14"),
    _beats_scratch(("relaxloss",), "the same without augmentation", "Figures 13 and 14", PLAIN),
    *(
        _beats(f"{shown_as} under PPTP beats it from scratch", paper, mine, theirs, base)
        for shown_as, paper, mine, theirs in DEFENSES
        for base in (AUGMENTED, PLAIN)
    ),
    _beats(
        "RelaxLoss under PPTP, on a base that was trained with CS-KD, beats RelaxLoss from scratch",
        "section 5.2.2",
        "relaxloss-2-layer3",
        "relaxloss-2-scratch",
        CSKD,
        rival_base=AUGMENTED,
    ),
    _beats(
        "a base that was trained with CS-KD is the better one for it",
        "not in the paper",
        "relaxloss-2-layer3",
        "relaxloss-2-layer3",
        CSKD,
        rival_base=AUGMENTED,
    ),
    _cheaper,
    _beats_scratch(
        OURS,
        "PPTP with short retraining or labels from outside (crossfit, SELENA) beats RelaxLoss from scratch",
        "ours, not the paper's",
    ),
    _beats_scratch(OURS, "the same without augmentation", "ours, not the paper's", PLAIN),
    _goal,
]


def judge_all(results: Results) -> list[Verdict]:
    return [verdict for verdict in (claim(results) for claim in CLAIMS) if verdict is not None]
