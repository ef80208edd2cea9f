"""Every claim of the paper that can be checked here, against whatever results there are; those about what retraining buys are judged here."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .pooling import Spread, mean_of, spread_of
from .where import AUGMENTED, PLAIN, WHERE, Judge, Results, Verdict, difference, shown, test_accuracy

GOAL_ACCURACY, GOAL_LEAK = 0.95, 0.55
HARDLY_AUC = 0.02  # a gain that is none
CSKD, SEARCH, MORE_CLASSES = "resnet18-cskd", "resnet18-search", "resnet18-40classes"

# --- what it buys, over all seeds ------------------------------------------------------------------


def leak(model: Mapping) -> dict[str, float]:
    """AUC of the confidence attack, turned around if it is below 1/2, as the attacker would."""
    return turned(by_confidence(model))


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


def auc_by(attack: str, model: Mapping) -> Mapping:
    return model["attacks"][attack]["auc"]


by_confidence, by_correctness = partial(auc_by, "confidence"), partial(auc_by, "correctness")


@dataclass(frozen=True)
class Gap:
    """One model less another, the mean over seeds, each number with its 95 % interval."""

    accuracy: Mapping
    leak: Mapping

    def turned(self) -> Gap:
        return Gap(*({"value": -e["value"], "low": -e["high"], "high": -e["low"]} for e in (self.accuracy, self.leak)))


def gap_of(results: Results, pairs: Sequence[tuple[Mapping, Mapping]]) -> Gap:
    """Over pairs of models of the same members, one a seed; `results` tell how much such differences vary from seed to seed."""
    found = []
    for of in (test_accuracy, by_confidence):
        apart = [difference(of(mine), of(theirs)) for mine, theirs in pairs]
        found.append(mean_of(apart, spread_of_differences(results, of)))
    return Gap(*found)


def spread_of_differences(results: Results, of) -> Spread:
    """Between any two models of the same base and seed."""
    bases = []
    for seeds in results.values():
        models = [found["models"] for found in seeds.values()]
        pairs = itertools.combinations(dict.fromkeys(name for m in models for name in m), 2)
        bases.append([[difference(of(m[a]), of(m[b])) for m in models if a in m and b in m] for a, b in pairs])
    return spread_of(bases)


def surely_better(gap: Gap) -> bool:
    """Surely better in accuracy or leakage, and by its value not worse in the other."""
    return (gap.accuracy["low"] > 0 and gap.leak["value"] <= 0) or (gap.leak["high"] < 0 and gap.accuracy["value"] >= 0)


def leaks_less(gap: Gap) -> bool:
    return gap.leak["high"] < 0


def compared(gap: Gap, by=surely_better) -> str:
    if by(gap):
        return "yes"
    return "no: the other way round" if by(gap.turned()) else "cannot be said: neither is surely better"


def _beats(
    claim: str, paper: str, mine: str, theirs: str, base: str = AUGMENTED, by=surely_better, rival_base: str = ""
) -> Judge:
    """One model against another, over the seeds that have both; of the same base, or of `rival_base` with the same members."""

    def judge(results: Results) -> Verdict | None:
        rivals = with_models(results, rival_base or base, [theirs])
        seeds = {s: m for s, m in with_models(results, base, [mine]).items() if s in rivals}
        if not seeds:
            return None
        rivals = {s: rivals[s] for s in seeds}
        gap = gap_of(results, [(m[mine], rivals[s][theirs]) for s, m in seeds.items()])
        ours = f"{base}: {utility(seeds, mine)}; {rival_base}{': ' if rival_base else ''}{utility(rivals, theirs)} ({_seeds(seeds)})"
        return Verdict(claim, paper, ours, compared(gap, by))

    return judge


def _beats_scratch(defenses: Sequence[str], claim: str, paper: str, base: str = AUGMENTED) -> Judge:
    """Is every from-scratch point of RelaxLoss beaten by some PPTP point, over the seeds that have both?"""

    def judge(results: Results) -> Verdict | None:
        lines, won, lost = [], 0, 0
        rivals, mine = (sorted(_named(results, base, _is)) for _is in (_rival, lambda m: _candidate(m, defenses)))
        for name in rivals:
            pairs = {n: seeds for n in mine if (seeds := with_models(results, base, [name, n]))}
            answers = {
                n: compared(gap_of(results, [(m[n], m[name]) for m in seeds.values()])) for n, seeds in pairs.items()
            }
            if not pairs:
                continue
            best = max((n for n in pairs if answers[n] == "yes"), key=lambda n: _gain(pairs[n], n), default=None)
            seeds = with_models(results, base, [name])
            lines.append(f"{utility(seeds, name)} ({_seeds(seeds)})")
            if best:
                lines[-1] += f", best against it {utility(pairs[best], best)} ({_seeds(pairs[best])})"
            won += bool(best)
            lost += all(answer.startswith("no") for answer in answers.values())
        if not lines:
            return None
        agrees = "yes" if won == len(lines) else f"for {won} of {len(lines)} points from scratch"
        agrees += f"; {lost} beat every one of these" if lost else ""
        return Verdict(claim, paper, f"{base}: " + "; ".join(lines), agrees)

    return judge


def _named(results: Results, base: str, wanted) -> set[str]:
    return {name for found in results.get(base, {}).values() for name, m in found["models"].items() if wanted(m)}


def _rival(model: Mapping) -> bool:
    return model.get("defense") == "relaxloss" and model["cut"] == "scratch"


def _candidate(model: Mapping, defenses: Sequence[str]) -> bool:
    """Rewound and retrained from a cut on under one of these defenses."""
    return model.get("defense") in defenses and model["cut"] != "scratch" and model["rewind"] == "init"


def _gain(seeds: Mapping[int, Mapping], name: str) -> float:
    return statistics.mean(m[name]["test_accuracy"]["value"] - leak(m[name])["value"] for m in seeds.values())


def _goal(base: str) -> Judge:
    """Is the goal reached on this base?"""
    return lambda results: _reached(base, {s: r["models"] for s, r in results.get(base, {}).items()})


def _reached(base: str, seeds: Mapping[int, Mapping]) -> Verdict | None:
    """Of the PPTP models that every seed of the base has: the least leaky that keeps 95 % of the accuracy on average and, if that leaks
    more than the goal, the most accurate that does not; beside the RelaxLoss from scratch nearest in leakage."""
    if not seeds:
        return None
    wanted = (*OURS, "relaxloss")
    everywhere = set.intersection(*({n for n, row in m.items() if _candidate(row, wanted)} for m in seeds.values()))
    able_ones = [n for n in everywhere if kept(seeds, n) >= GOAL_ACCURACY]
    rivals = {n for m in seeds.values() for n, row in m.items() if _rival(row)}
    if not able_ones or not rivals:
        return None
    best = min(able_ones, key=lambda n: _mean_leak(seeds, n))
    reached = _mean_leak(seeds, best)
    rival = min(sorted(rivals), key=lambda n: abs(_mean_leak(having(seeds, n), n) - reached))
    quiet = [n for n in everywhere if _mean_leak(seeds, n) <= GOAL_LEAK]
    shown_ones = [best]
    if reached > GOAL_LEAK and quiet:
        shown_ones.append(max(quiet, key=lambda n: kept(seeds, n)))
    ours = "; ".join(
        f"{utility(having(seeds, n), n)} ({kept(having(seeds, n), n):.3f} of undefended, {_seeds(having(seeds, n))})"
        for n in (*shown_ones, rival)
    )
    each = [{seed: models} for seed, models in seeds.items()]
    alone = sum(kept(one, best) >= GOAL_ACCURACY and _mean_leak(one, best) <= GOAL_LEAK for one in each)
    met = "met" if alone == len(seeds) else f"met by the mean over seeds, alone by {alone} of {len(seeds)}"
    agrees = met if reached <= GOAL_LEAK else f"missed by {reached - GOAL_LEAK:.3f} of AUC"
    claim = f"at least {GOAL_ACCURACY:.0%} of the undefended test accuracy at confidence AUC {GOAL_LEAK} or below"
    return Verdict(claim, "goal of this project", f"{base}: {ours}", agrees)


def having(seeds: Mapping[int, Mapping], name: str) -> dict[int, Mapping]:
    return {s: m for s, m in seeds.items() if name in m}


def _seeds(seeds: Mapping) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def kept(seeds: Mapping[int, Mapping], name: str) -> float:
    """Test accuracy over that of the undefended model it was made from, mean over seeds.

    A base that was trained again on another processor is not quite the one in the table: rows made since say which accuracy theirs had.
    """
    return statistics.mean(
        m[name]["test_accuracy"]["value"] / m[name].get("base", m["undefended"])["test_accuracy"]["value"]
        for m in seeds.values()
    )


def _mean_leak(seeds: Mapping[int, Mapping], name: str) -> float:
    return statistics.mean(leak(m[name])["value"] for m in seeds.values())


def _features_move_more(results: Results) -> Verdict | None:
    """Mean RMS distance from the undefended model's features, stage by stage: RelaxLoss on all data against cross-entropy on half."""
    lines, wins, rows = [], 0, 0
    for base in (PLAIN, AUGMENTED):
        for seed, models in ((s, r["models"]) for s, r in results.get(base, {}).items()):
            half = models["undefended"].get("from_base", {})
            for name, m in models.items() if half else ():
                if _rival(m) and "from_base" in m:
                    more = [stage for stage in half if m["from_base"][stage] > half[stage]]
                    wins, rows = wins + (len(more) == len(half)), rows + 1
                    lines.append(f"{base}, seed {seed}, {name} at {', '.join(more) or 'no stage'}")
    if not rows:
        return None
    agrees = "yes" if wins == rows else f"in {wins} of {rows} trainings at every stage"
    claim = "RelaxLoss moves features more than halving the data does"
    return Verdict(claim, "Figure 17, at every stage", "more: " + "; ".join(lines), agrees)


def _half_of_the_data(results: Results) -> Verdict | None:
    """Test accuracy of RelaxLoss on all members less that of cross-entropy on half of them, over the seeds that have both."""
    lines, gains, spread = [], [], spread_of_differences(results, test_accuracy)
    for base in (AUGMENTED, PLAIN):
        halves = {seed: r["half"]["test_accuracy"] for seed, r in results.get(base, {}).items() if "half" in r}
        for name in sorted(_named(results, base, _rival)):
            seeds = {s: m for s, m in with_models(results, base, [name]).items() if s in halves}
            if seeds:
                gains.append(mean_of([difference(test_accuracy(m[name]), halves[s]) for s, m in seeds.items()], spread))
                lines.append(f"{base}, {_seeds(seeds)}: {name} by {shown(gains[-1])}")
    if not lines:
        return None
    wins, losses = sum(g["low"] > 0 for g in gains), sum(g["high"] < 0 for g in gains)
    agrees = f"surely for {wins} of {len(gains)}" + (f", surely not for {losses}" if losses else "")
    agrees = agrees if wins or losses else "cannot be said: neither is surely better"
    claim = "RelaxLoss on all data is more accurate than cross-entropy on half of it"
    return Verdict(claim, "Table 7: 0.476 against 0.441", "; ".join(lines), agrees)


def _correctness(results: Results) -> Verdict | None:
    """Guessing by right and wrong alone: RelaxLoss from scratch less the same from the cut on, over the seeds that have both."""
    lines, gains, spread = [], [], spread_of_differences(results, by_correctness)
    for base in (AUGMENTED, PLAIN):
        for mine, theirs in RELAXED:
            seeds = with_models(results, base, (mine, theirs))
            if seeds:
                apart = [difference(by_correctness(m[theirs]), by_correctness(m[mine])) for m in seeds.values()]
                gains.append(mean_of(apart, spread))
                lines.append(f"{base}, {_seeds(seeds)}: {mine} less by {shown(gains[-1])} than {theirs}")
    if not lines:
        return None
    hardly, helps = sum(g["high"] < HARDLY_AUC for g in gains), sum(g["low"] > 0 for g in gains)
    if not hardly and not helps:
        agrees = "cannot be said: intervals allow both"
    else:
        agrees = "yes" if hardly == len(gains) else "no" if helps == len(gains) else f"in {hardly} of {len(gains)}"
        agrees += f"; it surely does in {helps}" if 0 < helps < len(gains) else ""
    claim = f"PPTP does not help against the correctness attack (by less than {HARDLY_AUC} of AUC)"
    return Verdict(claim, "section 5.2.2", "; ".join(lines), agrees)


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
OURS = ("crossfit", "plain", "selena")
OUTSIDE = "PPTP with short retraining or labels from outside (crossfit, SELENA)"
BARE = "on a base without augmentation"
VARIANTS = (  # of six epochs of cross-entropy from layer2 on
    ("a cut a block later", "plain-6ep-layer2.1"),
    ("a cut a block earlier", "plain-6ep-layer1.1"),
    ("starting from weights of the fifth epoch instead of the initial ones", "plain-6ep-layer2-epoch5"),
    ("sharpness-aware minimisation", "plain-6ep-layer2-sam"),
)
RELAXED = [(f"relaxloss-{alpha}-layer3", f"relaxloss-{alpha}-scratch") for alpha in (1, 2, 2.5)]

CLAIMS: list[Judge] = [
    *WHERE,
    _features_move_more,
    _half_of_the_data,
    _beats(
        "retraining the last layer only leaks more than retraining the last stage",
        "Figure 12",
        "relaxloss-1.5-layer4",
        "relaxloss-1.5-head",
        by=leaks_less,
    ),
    _beats("rewinding beats fine-tuning", "section 5.2.1", "relaxloss-1.5-layer4", "relaxloss-1.5-finetune"),
    _beats_scratch(("relaxloss",), "RelaxLoss under PPTP beats RelaxLoss from scratch", "Figures 13 and 14"),
    _beats_scratch(
        ("relaxloss",), f"RelaxLoss under PPTP beats RelaxLoss from scratch, {BARE}", "Figures 13 and 14", PLAIN
    ),
    _correctness,
    *(
        _beats(f"{shown_as} under PPTP beats it from scratch{more}", paper, mine, theirs, base)
        for shown_as, paper, mine, theirs in DEFENSES
        for base, more in ((AUGMENTED, ""), (PLAIN, f", {BARE}"))
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
    _beats_scratch(OURS, f"{OUTSIDE} beats RelaxLoss from scratch", "ours, not the paper's"),
    _beats_scratch(OURS, f"{OUTSIDE} beats RelaxLoss from scratch, {BARE}", "ours, not the paper's", PLAIN),
    *(
        _beats(f"{what} makes a short retraining better", "ours, not the paper's", name, "plain-6ep-layer2", SEARCH)
        for what, name in VARIANTS
    ),
    _goal(AUGMENTED),
    _goal(MORE_CLASSES),
]


def judge_all(results: Results) -> list[Verdict]:
    return [verdict for verdict in (claim(results) for claim in CLAIMS) if verdict is not None]
