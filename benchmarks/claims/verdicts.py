"""Every claim of the paper that can be checked here, and our own, against whatever results there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from .claim import (
    AUGMENTED,
    GOAL,
    OURS,
    PLAIN,
    Claim,
    Results,
    Verdict,
    counted,
    difference,
    listed,
    seeds_in_words,
    shown,
    test_accuracy,
)
from .compare import (
    MARGIN,
    WORDS,
    By,
    Gap,
    by_confidence,
    by_strongest,
    compared,
    gap_of,
    having,
    kept,
    leaks_less,
    mean_difference,
    mean_leak,
    spread_of_differences,
    turned,
    undefended_accuracy,
    utility,
    with_models,
)
from .pairs import BARE, BOLD, RELAXED, TEN, claims_of_pairs
from .pooling import mean_of, spread_of
from .where import WHERE

GOAL_ACCURACY, GOAL_LEAK = 0.95, 0.55
CSKD, SEARCH, MORE_CLASSES = "resnet18-cskd", "resnet18-search", "resnet18-40classes"
UNDEFENDED = "undefended"
LIKE_THE_PAPER = 0.80, 0.1  # training accuracy of its RelaxLoss model (Table 7: 0.797), and how far from it one may be
Judged = Callable[[Results], tuple[str, str] | None]


# --- one model against another ---------------------------------------------------------------------


def _beats(
    mine: str, theirs: str, base: str = AUGMENTED, answer: Callable[[Gap], str] = compared, rival_base: str = ""
) -> Judged:
    """One model against another, over the seeds that have both; of the same base, or of `rival_base` with the same members."""

    def judge(results: Results) -> tuple[str, str] | None:
        rivals = with_models(results, rival_base or base, [theirs])
        seeds = {s: m for s, m in with_models(results, base, [mine]).items() if s in rivals}
        if not seeds:
            return None
        rivals = {s: rivals[s] for s in seeds}
        gap = gap_of(results, [(m[mine], rivals[s][theirs]) for s, m in seeds.items()])
        of_whom = f"{rival_base}: " if rival_base else ""
        ours = f"{base}: {utility(seeds, mine)}; {of_whom}{utility(rivals, theirs)} ({seeds_in_words(seeds)})"
        return ours, answer(gap)

    return judge


def _beats_relaxloss(mine: str, base: str) -> Judged:
    """One model against every RelaxLoss from scratch of its base, over the seeds that have both."""

    def judge(results: Results) -> tuple[str, str] | None:
        answers = {}
        for rival in sorted(named(results, base, is_rival)):
            seeds = with_models(results, base, [mine, rival])
            if seeds:
                gap = gap_of(results, [(m[mine], m[rival]) for m in seeds.values()])
                answers[f"{rival} ({seeds_in_words(seeds)})"] = compared(gap)
        return (f"{base}: against {listed(answers)}", counted(answers)) if answers else None

    return judge


def named(results: Results, base: str, wanted: Callable[[Mapping], bool]) -> set[str]:
    return {name for found in results.get(base, {}).values() for name, m in found["models"].items() if wanted(m)}


def is_rival(model: Mapping) -> bool:
    return model.get("defense") == "relaxloss" and model["cut"] == "scratch"


def is_short(name: str) -> bool:
    """Whether it was trained for other epochs than the plan has for its kind, which its name then says."""
    return "ep-" in name


# --- what the paper says of RelaxLoss and of models as such -------------------------------------------


def _more_capacity_leaks_more(results: Results) -> tuple[str, str] | None:
    """Undefended models with more channels, larger maps or more depth, against the smallest of each."""
    families = (
        (PLAIN, "resnet34-plain"),
        (PLAIN, "resnet18-map2"),
        (PLAIN, "resnet18-map4"),
        ("resnet18-wide256", PLAIN),
        ("resnet18-wide256", "resnet18-wide1024"),
    )
    spread = spread_of([[[leak_of(r) for r in seeds.values()]] for seeds in results.values()])
    answers = {}
    for small, large in families:
        shared = sorted(set(results.get(small, {})) & set(results.get(large, {})))
        if shared:
            apart = [difference(leak_of(results[large][s]), leak_of(results[small][s])) for s in shared]
            gap = mean_of(apart, spread)
            word = "yes" if gap["low"] > 0 else "no" if gap["high"] < 0 else "undecided"
            answers[f"{large} less {small} {shown(gap)}"] = word
    return (listed(answers), counted(answers)) if answers else None


def leak_of(found: Mapping) -> Mapping:
    return turned(by_confidence(found["models"][UNDEFENDED]))


def _keeps_accuracy(results: Results) -> tuple[str, str] | None:
    """RelaxLoss from a cut on, at the strengths of the paper's search space, against the undefended model."""
    answers = {}
    for name in (mine for mine, _ in RELAXED):
        seeds = with_models(results, AUGMENTED, [name])
        if not seeds:
            continue
        pairs = [(m[name], {"test_accuracy": undefended_accuracy(m, name)}) for m in seeds.values()]
        gap = mean_difference(results, pairs, test_accuracy)
        word = "yes" if gap["low"] > -MARGIN else "no" if gap["high"] < -MARGIN else "undecided"
        answers[f"{name} {shown(gap)} ({seeds_in_words(seeds)})"] = word
    return (listed(answers), counted(answers)) if answers else None


def _features_move_more(results: Results) -> tuple[str, str] | None:
    """Mean RMS distance from the undefended model's features, stage by stage: RelaxLoss on all data against cross-entropy on half."""
    wheres, answers = Counter(), {}
    for base in (PLAIN, AUGMENTED):
        for seed, models in ((s, r["models"]) for s, r in results.get(base, {}).items()):
            half = models[UNDEFENDED].get("from_base", {})
            for name, m in models.items() if half else ():
                if is_rival(m) and "from_base" in m:
                    more = [stage for stage in half if m["from_base"][stage] > half[stage]]
                    wheres[", ".join(more) or "no stage"] += 1
                    answers[f"{base}, {seed}, {name}"] = "yes" if more == list(half) else "no"
    if not answers:
        return None
    return "; ".join(f"more at {where} in {count} trainings" for where, count in wheres.items()), counted(answers)


def _half_of_the_data(results: Results) -> tuple[str, str] | None:
    """Test accuracy of RelaxLoss on all members less that of cross-entropy on half of them, over the seeds that have both; at
    strengths that leave about as much of the members learned as the paper's does."""
    answers, spread = {}, spread_of_differences(results, test_accuracy)
    for base in (AUGMENTED, PLAIN):
        halves = {seed: r["half"]["test_accuracy"] for seed, r in results.get(base, {}).items() if "half" in r}
        for name in sorted(named(results, base, lambda m: is_rival(m) and _learned_as_much(m))):
            seeds = {s: m for s, m in with_models(results, base, [name]).items() if s in halves}
            if seeds:
                gain = mean_of([difference(test_accuracy(m[name]), halves[s]) for s, m in seeds.items()], spread)
                word = "yes" if gain["low"] > 0 else "no" if gain["high"] < 0 else "undecided"
                answers[f"{base}, {name} by {shown(gain)} ({seeds_in_words(seeds)})"] = word
    return (listed(answers), counted(answers)) if answers else None


def _learned_as_much(model: Mapping) -> bool:
    wanted, within = LIKE_THE_PAPER
    return abs(model["train_accuracy"]["value"] - wanted) <= within


# --- our own goal ------------------------------------------------------------------------------------


def _goal(base: str, by: By) -> Judged:
    """Of the row that `harden` tries: is the goal reached on this base? Beside it the RelaxLoss from scratch nearest in leakage."""

    def judge(results: Results) -> tuple[str, str] | None:
        seeds = with_models(results, base, [BOLD])
        everyone = {seed: found["models"] for seed, found in results.get(base, {}).items()}
        rival = nearest_rival(everyone, BOLD, by)
        if not rival:
            return None
        ours = "; ".join(
            f"{utility(of, n, by)} ({kept(of, n):.3f} of undefended, {seeds_in_words(of)})"
            for n, of in ((BOLD, seeds), (rival[0], having(everyone, rival[0])))
        )
        return f"{base}: {ours}", goal_reached(results, seeds, by)

    return judge


def nearest_rival(seeds: Mapping[int, Mapping], name: str, by: By = by_confidence) -> list[str]:
    """The RelaxLoss from scratch that leaks about as much as this model; none where there is none, or no such model."""
    names = sorted({n for m in seeds.values() for n, row in m.items() if is_rival(row) and not is_short(n)})
    if not names or not having(seeds, name):
        return []
    mine = mean_leak(having(seeds, name), name, by)
    return [min(names, key=lambda n: abs(mean_leak(having(seeds, n), n, by) - mine))]


def goal_reached(results: Results, seeds: Mapping[int, Mapping], by: By) -> str:
    leaks, accuracy = mean_leak(seeds, BOLD, by), kept(seeds, BOLD)
    if leaks > GOAL_LEAK or accuracy < GOAL_ACCURACY:
        by_how_much = [f"{leaks - GOAL_LEAK:.3f} of AUC"] * (leaks > GOAL_LEAK)
        by_how_much += [f"{GOAL_ACCURACY - accuracy:.3f} of the accuracy"] * (accuracy < GOAL_ACCURACY)
        return f"missed by {' and '.join(by_how_much)}"
    each = [{seed: models} for seed, models in seeds.items()]
    alone = sum(kept(one, BOLD) >= GOAL_ACCURACY and mean_leak(one, BOLD, by) <= GOAL_LEAK for one in each)
    met = "met" if alone == len(seeds) else f"met by the mean over seeds, alone by {alone} of {len(seeds)}"
    return met + ("" if _surely_reached(results, seeds, by) else ", not surely")


def _surely_reached(results: Results, seeds: Mapping[int, Mapping], by: By) -> bool:
    """Whether the 95 % intervals of the means over seeds lie on the good side, of leakage and of accuracy alike."""
    spread = spread_of(
        [
            [[turned(by(m[n])) for m in of_seeds if n in m] for n in {n for m in of_seeds for n in m}]
            for of_seeds in ([found["models"] for found in base.values()] for base in results.values())
        ]
    )
    leaks = mean_of([turned(by(m[BOLD])) for m in seeds.values()], spread)
    spare = [difference(test_accuracy(m[BOLD]), _needed(m)) for m in seeds.values()]
    return leaks["high"] <= GOAL_LEAK and mean_of(spare, spread_of_differences(results, test_accuracy))["low"] >= 0


def _needed(models: Mapping) -> dict[str, float]:
    """The accuracy that the goal asks for, with the interval of the undefended model's."""
    accuracy = undefended_accuracy(models, BOLD)
    return {end: GOAL_ACCURACY * accuracy[end] for end in ("value", "low", "high")}


SHORTLY = "six epochs of cross-entropy from layer2 on"
VARIANTS = (  # of six epochs of cross-entropy from layer2 on
    ("a cut a block later", "plain-6ep-layer2.1"),
    ("a cut a block earlier", "plain-6ep-layer1.1"),
    ("starting from weights of the fifth epoch instead of the initial ones", "plain-6ep-layer2-epoch5"),
    ("sharpness-aware minimisation", "plain-6ep-layer2-sam"),
)
ELSEWHERE = {AUGMENTED: "", MORE_CLASSES: ", on twice the classes"}
GOAL_IN_WORDS = f"at least {GOAL_ACCURACY:.0%} of the undefended test accuracy at {{}} {GOAL_LEAK} or below{{}}"


def claims() -> list[Claim]:
    stage4, head = "relaxloss-1.5-layer4", "relaxloss-1.5-head"
    cskd = _beats("relaxloss-2-layer3", "relaxloss-2-scratch", CSKD, rival_base=AUGMENTED)
    cskd_base = _beats("relaxloss-2-layer3", "relaxloss-2-layer3", CSKD, rival_base=AUGMENTED)
    return [
        *WHERE,
        Claim("more capacity makes an undefended model leak more", "section 3.3", _more_capacity_leaks_more),
        Claim("RelaxLoss moves features more than halving the data does", "Figure 17", _features_move_more),
        Claim(
            "RelaxLoss on all data is more accurate than cross-entropy on half of it", "Table 7", _half_of_the_data
        ),
        Claim(
            "retraining the last stage lowers leakage", "Figure 12", _beats(stage4, UNDEFENDED, answer=leaks_less)
        ),
        Claim(
            "retraining the last layer only leaks more than the last stage",
            "Figure 12",
            _beats(stage4, head, answer=leaks_less),
        ),
        Claim(
            "fine-tuning the last layer only leaks more than retraining the last stage",
            "Figure 12",
            _beats(stage4, f"{head}-finetune", answer=leaks_less),
        ),
        Claim("rewinding beats fine-tuning", "section 5.2.1", _beats(stage4, "relaxloss-1.5-finetune")),
        *claims_of_pairs(),
        Claim("RelaxLoss under PPTP keeps the undefended accuracy", "Abstract, section 6", _keeps_accuracy),
        Claim("RelaxLoss under PPTP, on a base trained with CS-KD, beats RelaxLoss from scratch", "section 5.2.2", cskd),
        Claim("a base trained with CS-KD is the better one for it", OURS, cskd_base),
        *_our_claims(),
    ]


def _our_claims() -> list[Claim]:
    bare = "selena-6-layer2"
    return [
        Claim(f"{SHORTLY} beat RelaxLoss from scratch", OURS, _beats_relaxloss("plain-6ep-layer2", AUGMENTED)),
        *(
            Claim(f"{TEN} beats RelaxLoss from scratch{more}", OURS, _beats_relaxloss(BOLD, base))
            for base, more in ELSEWHERE.items()
        ),
        Claim(f"SELENA with six sub-models, from layer2 on, beats RelaxLoss from scratch{BARE}", OURS, _beats_relaxloss(bare, PLAIN)),
        *(
            Claim(f"{what} makes six epochs from layer2 on better", OURS, _beats(name, "plain-6ep-layer2", SEARCH))
            for what, name in VARIANTS
        ),
        *(
            Claim(GOAL_IN_WORDS.format(WORDS[by], more), GOAL, _goal(base, by))
            for base, more in ELSEWHERE.items()
            for by in (by_confidence, by_strongest)
        ),
    ]  # fmt: skip


def judge_all(results: Results) -> list[Verdict]:
    return judged(results)[0]


def judged(results: Results) -> tuple[list[Verdict], list[str]]:
    """The verdicts, and the claims that nothing was run for."""
    found = {claim.text: claim.verdict(results) for claim in claims()}
    return [v for v in found.values() if v], [text for text, v in found.items() if v is None]
