"""Every claim of the paper that can be checked here, against whatever results there are; those about what retraining buys are judged here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from .pooling import mean_of
from .where import AUGMENTED, PLAIN, WHERE, Judge, Results, Verdict, shown

GOAL_ACCURACY, GOAL_LEAK = 0.95, 0.55
CSKD, SEARCH, MORE_CLASSES = "resnet18-cskd", "resnet18-search", "resnet18-40classes"

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


def together(seeds: Mapping[int, Mapping], name: str) -> Mapping:
    """One model over seeds: the means of its accuracy and leakage, whose intervals narrow with the number of seeds."""
    rows = [models[name] for models in seeds.values()]
    auc = mean_of([leak(row) for row in rows])
    return {
        "test_accuracy": mean_of([row["test_accuracy"] for row in rows]),
        "attacks": {"confidence": {"auc": auc}},
    }


def compared(mine: Mapping, theirs: Mapping, by=surely_better) -> str:
    if by(mine, theirs):
        return "yes"
    return "no: the other way round" if by(theirs, mine) else "cannot be said: neither is surely better"


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
        ours = f"{base}: {utility(seeds, mine)}; {rival_base}{': ' if rival_base else ''}{utility(rivals, theirs)} ({_seeds(seeds)})"
        return Verdict(claim, paper, ours, compared(together(seeds, mine), together(rivals, theirs), by))

    return judge


def _beats_scratch(defenses: Sequence[str], claim: str, paper: str, base: str = AUGMENTED) -> Judge:
    """Is every from-scratch point of RelaxLoss beaten by some PPTP point, over the seeds that have both?"""

    def judge(results: Results) -> Verdict | None:
        lines, won, lost = [], 0, 0
        rivals, mine = (sorted(_named(results, base, _is)) for _is in (_rival, lambda m: _candidate(m, defenses)))
        for name in rivals:
            pairs = {n: seeds for n in mine if (seeds := with_models(results, base, [name, n]))}
            answers = {n: compared(together(seeds, n), together(seeds, name)) for n, seeds in pairs.items()}
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


def _half_of_the_data(results: Results) -> Verdict | None:
    """Test accuracies of cross-entropy on half of the members against RelaxLoss on all, seed by seed."""
    lines, wins, losses = [], [], []
    for base in (AUGMENTED, PLAIN):
        for seed, found in results.get(base, {}).items():
            half = found.get("half", {}).get("test_accuracy")
            relaxed = {n: m["test_accuracy"] for n, m in found["models"].items() if _rival(m)} if half else {}
            wins += [e["low"] > half["high"] for e in relaxed.values()]
            losses += [e["high"] < half["low"] for e in relaxed.values()]
            if relaxed:
                each = ", ".join(f"{name} {shown(e)}" for name, e in relaxed.items())
                lines.append(f"{base}, seed {seed}: half of the data {shown(half)}, {each}")
    if not lines:
        return None
    agrees = f"surely for {sum(wins)} of {len(wins)}" + (f", surely not for {sum(losses)}" if any(losses) else "")
    claim = "RelaxLoss on all data is more accurate than cross-entropy on half of it"
    return Verdict(claim, "Table 7: 0.476 against 0.441", "; ".join(lines), agrees)


def _correctness(results: Results) -> Verdict | None:
    """Guessing by right and wrong alone: RelaxLoss from the cut on against the same from scratch, seed by seed."""
    lines, sure = [], []
    for base in (AUGMENTED, PLAIN):
        for pair in RELAXED:
            seeds = with_models(results, base, pair)
            found = [[turned(m[name]["attacks"]["correctness"]["auc"]) for m in seeds.values()] for name in pair]
            sure += [a["high"] < b["low"] for a, b in zip(*found)]
            if seeds:
                lines.append(f"{base}: " + ", ".join(f"{n} {spread(e)}" for n, e in zip(pair, found)))
    if not lines:
        return None
    agrees = "yes" if not any(sure) else f"in {len(sure) - sum(sure)} of {len(sure)}; in the others it surely does"
    return Verdict("PPTP does not help against the correctness attack", "section 5.2.2", "; ".join(lines), agrees)


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
