"""Verdicts on the paper's claims: each word of them follows from the numbers, and nothing is said where numbers do not allow it."""

import pytest
from made_results import estimate, found, model, said

from benchmarks.claims.claim import Verdict, counted, listed
from benchmarks.claims.compare import compared, gap_of, kept, leak, surely_better, turned
from benchmarks.claims.pairs import FIVE
from benchmarks.claims.tables import of_base_time
from benchmarks.claims.verdicts import claims

AUGMENTED, BOLD = "resnet18-augmented", "selena-10-t0.5-layer2"


@pytest.mark.parametrize(
    "mine, theirs, better",
    [
        ((0.40, 0.60), (0.40, 0.70), True),
        ((0.45, 0.70), (0.40, 0.70), True),
        ((0.30, 0.60), (0.40, 0.70), False),  # less leaky, but surely less accurate
        ((0.395, 0.60), (0.40, 0.70), True),  # less leaky, and surely less accurate by no more than the margin
        ((0.390, 0.60), (0.40, 0.70), False),  # perhaps by more
        ((0.40, 0.69), (0.40, 0.70), False),  # not surely
    ],
)
def test_better_is_sure_in_one_and_not_worse_in_the_other(mine, theirs, better):
    gap = gap_of({}, [(model(*mine), model(*theirs))])
    assert surely_better(gap) is better and not surely_better(gap.turned())


def test_an_attack_below_one_half_is_turned_around():
    assert leak(model(0.4, 0.3))["value"] == pytest.approx(0.7)
    for value in (0.505, 0.495):
        assert turned(estimate(value)) == pytest.approx(estimate(0.505)), "its width is its error, also near 1/2"


@pytest.mark.parametrize(
    "agrees, standing",
    [
        ("yes", "holds"), ("yes; by the strongest attack no", "holds"), ("met", "holds"),
        ("partly: by RMS", "in part"), ("in 10 of 11; not in 1", "in part"), ("met, not surely", "in part"),
        ("met by the mean over seeds, alone by 0 of 3", "in part"), ("met in 2 of 8", "in part"),
        ("cannot be said: intervals overlap", "open"), ("cannot be said of any", "open"), ("undecided", "open"),
        ("no: the other way round", "fails"), ("no", "fails"), ("in 0 of 10; not in 6; 4 undecided", "fails"),
        ("met in 0 of 8", "fails"), ("missed by 0.010 of AUC", "fails"),
    ],
)  # fmt: skip
def test_how_a_claim_stands(agrees, standing):
    assert Verdict("a claim", "Figure 3", "numbers", agrees).standing == standing


def test_several_answers_are_counted():
    assert counted({"a": "no: worse"}) == "no: worse"
    assert counted({"a": "yes", "b": "yes"}) == "yes"
    assert counted({"a": "yes", "b": "no: worse", "c": "cannot be said"}) == "in 1 of 3; not in 1; 1 undecided"
    assert counted({"a": "undecided", "b": "cannot be said"}) == "cannot be said of any"
    assert listed({"a": "yes", "b": "no", "c": "yes"}) == "a, c: yes; b: no"


def test_claims_have_names_of_their_own():
    names = [claim.text for claim in claims()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "mine, theirs, answer",
    [
        ((0.45, 0.60), (0.40, 0.70), "yes"),
        ((0.35, 0.70), (0.40, 0.60), "no: the other way round"),
        ((0.45, 0.75), (0.40, 0.70), "no: it is surely more accurate but leaks surely more"),
        ((0.35, 0.60), (0.40, 0.70), "no: it leaks surely less but is surely less accurate"),
        ((0.39, 0.75), (0.40, 0.70), "no: the other way round"),
        ((0.41, 0.75), (0.40, 0.70), "no: it leaks surely more"),
        ((0.41, 0.71), (0.40, 0.70), "cannot be said: neither is surely better"),
    ],
)
def test_a_trade_is_no_win_and_no_riddle(mine, theirs, answer):
    assert compared(gap_of({}, [(model(*mine), model(*theirs))])) == answer


def test_what_a_collapsing_defense_does_to_intervals_stays_with_it():
    """AdvReg from scratch differs by 0.1 between these seeds, all others by nothing."""
    steady = {"plain-a": model(0.40, 0.6), "plain-b": model(0.38, 0.6)}
    rows = [{**steady, "advreg": model(a, 0.6, defense="advreg")} for a in (0.30, 0.20, 0.30)]
    results = {AUGMENTED: {42 + i: found(models=m) for i, m in enumerate(rows)}}
    steadily, collapsing = (
        gap_of(results, [(m["plain-a"], m[name]) for m in rows]).accuracy for name in ("plain-b", "advreg")
    )
    assert steadily["high"] - steadily["low"] == pytest.approx(2 * (2 / 3) ** 0.5 * 0.01)
    assert collapsing["high"] - collapsing["low"] > 0.2


def test_seeds_are_compared_together():
    """One seed leaves a difference undecided (0.40 ± 0.01 against 0.39 ± 0.01), three do not; unless they disagree."""

    def answer(mine, theirs):
        names = ("dpsgd-8-layer4", "dpsgd-8-scratch")
        rows = [{name: model(e, 0.6) for name, e in zip(names, pair)} for pair in zip(mine, theirs)]
        results = {
            42 + i: found(models={**m, "undefended": model(b, 0.9)}) for i, (m, b) in enumerate(zip(rows, theirs))
        }
        return said({AUGMENTED: results}, "DP-SGD from layer4 on")

    assert answer([0.40], [0.39]).startswith("cannot be said")
    assert answer([0.40] * 3, [0.39] * 3) == "yes"
    assert answer([0.39] * 3, [0.40] * 3) == "no: the other way round"
    assert answer([0.36, 0.44, 0.40], [0.39] * 3).startswith("cannot be said"), "by the spread between seeds"
    assert answer([0.36, 0.40, 0.44], [0.35, 0.39, 0.43]) == "yes", "what seeds share cancels"


def paired(mine, theirs, defense="relaxloss"):
    row = {"defense": defense, "rewind": "init"}
    names = ("relaxloss-2-layer3", "relaxloss-2-scratch")
    return {n: model(*e, cut=n.split("-")[-1], **row) for n, e in zip(names, (mine, theirs)) if e}


def test_pairs_are_compared_on_the_seeds_that_have_both():
    claim = "RelaxLoss from layer3 on beats it from scratch"
    good, bad = paired((0.4, 0.6), (0.35, 0.65)), paired((0.3, 0.6), (0.35, 0.65))

    def answer(*seeds):
        return said({AUGMENTED: {42 + i: found(models=m) for i, m in enumerate(seeds)}}, claim)

    assert answer(good) == answer(good, good) == "yes"
    alone = {name: m for name, m in bad.items() if name.endswith("scratch")}
    assert answer(good, alone) == "yes" and answer(alone) is None, "nothing to compare with yet"
    assert answer(bad) == "no: it leaks surely less but is surely less accurate"
    other = {name.replace("-2-", "-1-"): m for name, m in bad.items()}
    assert answer({**good, **other}) == "in 1 of 2; not in 1"


def test_the_strongest_attack_may_see_what_confidence_does_not():
    told = {"attack": "network", "auc": estimate(0.7), "tpr@0.01": estimate(0.05)}
    rows = paired((0.4, 0.6), (0.35, 0.6))
    rows["relaxloss-2-layer3"]["strongest"] = told
    answer = said({AUGMENTED: {42: found(models=rows)}}, "RelaxLoss from layer3 on beats it from scratch")
    assert answer == "yes; by the strongest attack no: it is surely more accurate but leaks surely more"


@pytest.mark.parametrize(
    ("attack", "auc", "answer"), [("entropy", 0.5, "yes"), ("entropy", 0.51, "undecided"), ("entropy", 0.6, "no")]
)
def test_figure_15_asks_all_five_attacks(attack, auc, answer):
    rows = paired((0.4, 0.6), (0.4, 0.65))
    rows["relaxloss-2-layer3"]["attacks"][attack] = {"auc": estimate(auc)}
    rows["relaxloss-2-layer3"]["test_accuracy"] = estimate(0.3)  # which the claim does not speak of
    assert said({AUGMENTED: {42: found(models=rows)}}, "AdvReg and RelaxLoss under PPTP leak no more") == answer


def goal_rows(auc, accuracy, strongest=0.57):
    told = {"attack": "entropy", "auc": estimate(strongest), "tpr@0.01": estimate(0.05)}
    rival = model(0.3, 0.6, defense="relaxloss", rewind="init", cut="scratch")
    return {BOLD: model(accuracy, auc, defense="selena", rewind="init", cut="layer2", strongest=told), "rival": rival}


@pytest.mark.parametrize(
    ("auc", "accuracy", "answer"),
    [
        (0.53, 0.4, "met"),
        (0.55, 0.4, "met, not surely"),
        (0.53, 0.385, "met, not surely"),
        (0.56, 0.4, "missed by 0.010 of AUC"),
        (0.53, 0.372, "missed by 0.020 of the accuracy"),
    ],
)
def test_the_goal_asks_for_accuracy_and_little_leakage(auc, accuracy, answer):
    results = {AUGMENTED: {42: found(models=goal_rows(auc, accuracy))}}
    assert said(results, "at least 95% of the undefended test accuracy at confidence") == answer
    assert said(results, "at least 95% of the undefended test accuracy at AUC of the strongest").startswith("missed")
    del results[AUGMENTED][42]["models"]["rival"]
    assert said(results, "at least 95% of the undefended") is None, "nothing stands beside it"


def test_a_goal_met_on_average_says_how_many_seeds_meet_it_alone():
    results = {AUGMENTED: {s: found(models=goal_rows(auc, 0.39)) for s, auc in ((42, 0.53), (43, 0.56))}}
    assert said(results, "at least 95% of the undefended") == "met by the mean over seeds, alone by 1 of 2, not surely"


def test_one_row_is_held_against_every_relaxloss_from_scratch():
    rows = goal_rows(0.55, 0.4)
    rows["stronger"] = model(0.3, 0.51, defense="relaxloss", rewind="init", cut="scratch")
    answer = said({AUGMENTED: {42: found(models=rows)}}, "SELENA with ten short sub-models, from layer2 on, beats Relax")
    assert answer == "in 1 of 2; not in 1", "more accurate and leakier than the other"


def test_a_rival_may_be_of_another_base_with_the_same_members():
    mine, theirs = (model(0.4, auc, defense="relaxloss", rewind="init", cut="layer3") for auc in (0.6, 0.7))
    results = {
        "resnet18-cskd": {42: found(models={"relaxloss-2-layer3": mine})},
        "resnet18-augmented": {42: found(models={"relaxloss-2-layer3": theirs})},
    }
    assert said(results, "a base trained with CS-KD is the better one") == "yes"
    other_seed = {**results, "resnet18-augmented": {43: results["resnet18-augmented"][42]}}
    assert said(other_seed, "a base trained with CS-KD is the better one") is None, "other members"


def test_a_model_is_compared_with_the_base_it_was_made_from():
    """That of its own folder, where that was trained again and came out otherwise."""
    base = {"test_accuracy": estimate(0.36), "seconds": 5.0}
    rows = {"as it was": model(0.36, 0.6), "trained again": model(0.36, 0.6, base=base)}
    seeds = {42: found(models=rows)["models"]}
    assert [of_base_time(seeds, name) for name in rows] == [1.0, 2.0], "in time too"
    assert kept(seeds, "as it was") == pytest.approx(0.9)
    assert kept(seeds, "trained again") == pytest.approx(1.0)


def test_half_of_the_data_is_compared_with_a_relaxloss_that_learned_as_much_as_the_papers():
    def judged(accuracy, train=0.8):
        relaxed = model(accuracy, 0.6, defense="relaxloss", cut="scratch", train_accuracy=estimate(train))
        cell = {**found(models={"relaxloss-1-scratch": relaxed}), "half": {"test_accuracy": estimate(0.3)}}
        return said(
            {"resnet18-plain": {42: cell, 43: found(models={"relaxloss-1-scratch": relaxed})}}, "RelaxLoss on all"
        )

    assert [judged(a) for a in (0.35, 0.31, 0.25)] == ["yes", "undecided", "no"]
    assert judged(0.35, train=0.4) is None


@pytest.mark.parametrize(
    ("mine", "answer"), [(0.6, "undecided"), (0.65, "yes"), (0.605, "yes"), (0.55, "no: it surely does")]
)
def test_neither_help_nor_its_absence_is_taken_for_granted(mine, answer):
    """The gain is 0.61 less `mine`, ± 0.014: none if it is surely below 0.02."""
    rows = {
        name: model(0.4, 0.6, attacks={a: {"auc": estimate(auc)} for a in FIVE})
        for name, auc in (("relaxloss-2-layer3", mine), ("relaxloss-2-scratch", 0.61))
    }
    rows = {n: {**m, "defense": "relaxloss", "cut": n.split("-")[-1], "rewind": "init"} for n, m in rows.items()}
    assert said({"resnet18-augmented": {42: found(models=rows)}}, "PPTP does not help") == answer
