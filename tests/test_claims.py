"""Verdicts on the paper's claims: each word of them follows from the numbers, and nothing is said where numbers do not allow it."""

import shutil

import numpy as np
import pytest
from scipy.stats import norm

from benchmarks.claims import cost, verdicts
from benchmarks.claims import work as harness
from benchmarks.claims.__main__ import main
from benchmarks.claims.pooling import DELTA, Spread, _stall, mean_of, spread_of
from benchmarks.claims.render import adaptive_table, block_table, buys_table, in_short, load, not_run
from benchmarks.claims.verdicts import gap_of, judge_all, leak, surely_better, turned
from benchmarks.claims.where import Verdict
from benchmarks.claims.work import Cell, plan
from pptp.config import Recipe
from pptp.harden import ladder
from pptp.intervals import Estimate
from pptp.localize import judge


def estimate(value, width=0.01):
    return {"value": value, "low": value - width, "high": value + width}


def model(accuracy, auc, **more):
    return {
        "train_accuracy": estimate(0.9),
        "test_accuracy": estimate(accuracy),
        "attacks": {"confidence": {"auc": estimate(auc)}, "correctness": {"auc": estimate(0.5)}},
        "strongest": {"attack": "confidence", "auc": estimate(auc), "tpr@0.01": estimate(0.02)},
        "references": "one",
        "cost": {"seconds": 10.0},
        **more,
    }


def stage(name, rms, verdict):
    auc = estimate(rms)
    low = 0.0 if auc["low"] <= 0.5 <= auc["high"] else min(abs(auc[k] - 0.5) for k in ("low", "high"))
    effect = [low, max(abs(auc[k] - 0.5) for k in ("low", "high"))]
    distances = {metric: {"auc": auc, "effect": effect} for metric in ("rms", "cosine")}
    return {"name": name, "distances": distances, "verdict": verdict, "by_member_gap": "safe"}


def found(where="layer4", train=1.0, models=None, last=0.7):
    names = ["layer3", "layer4"]
    stages = [stage(n, last if n >= where else 0.5, "risky" if n >= where else "safe") for n in names]
    risk = {
        "stages": [*stages, stage("head", 0.9, "risky")],
        "train_accuracy": {"full": estimate(1.0), "half": estimate(train)},
        "stall": "layer4",
    }
    return {"risk": risk, "models": {"undefended": model(0.4, 0.9), **(models or {})}}


def settings(row):
    """All but lengths of training, which from scratch are others."""
    return [s for s in row.get("set", []) if not s.startswith("sub_epochs")]


def said(results, start):
    return next((v.agrees for v in judge_all(results) if v.claim.startswith(start)), None)


def test_the_same_place_needs_the_same_stage_and_models_that_interpolate():
    same = {"resnet18-plain": {42: found()}, "resnet34-plain": {42: found()}}
    assert said(same, "depth does not move the disparity") == "yes"
    assert said({**same, "resnet34-plain": {42: found("layer3")}}, "depth does not move the disparity") == "no"
    assert "does not interpolate" in said({**same, "resnet34-plain": {42: found(train=0.98)}}, "depth does not move")
    assert said({"resnet18-plain": {42: found()}}, "depth does not move the disparity") is None, "one base says nothing"
    seeds = {42: found("layer3", train=0.9), 43: found()}
    assert said({**same, "resnet34-plain": seeds}, "depth does not move the disparity") == "yes", (
        "by the seed that can tell"
    )


def test_where_an_earlier_stage_is_undecided_nothing_is_said():
    doubtful = found()
    doubtful["risk"]["stages"][0]["verdict"] = "undecided"
    results = {"resnet18-plain": {42: found()}, "resnet34-plain": {42: doubtful}}
    assert said(results, "depth does not move the disparity") == "cannot be said: undecided at layer3 of resnet34-plain"
    assert said({"resnet18-plain": {42: doubtful}}, "ResNet18: disparity starts").startswith("cannot be said")


def test_an_inverted_distance_is_only_part_of_the_claim():
    assert said({"resnet18-plain": {42: found(last=0.7)}}, "ResNet18: disparity starts") == "yes"
    assert said({"resnet18-plain": {42: found(last=0.3)}}, "ResNet18: disparity starts").startswith("partly")


def test_overlapping_effects_decide_nothing():
    results = {"resnet18-wide256": {42: found(last=0.6)}, "resnet18-wide1024": {42: found(last=0.61)}}
    assert "cannot be said" in said(results, "disparity at stage 4 grows")
    results["resnet18-wide1024"] = {42: found(last=0.7)}
    assert said(results, "disparity at stage 4 grows") == "yes"


@pytest.mark.parametrize(
    "mine, theirs, better",
    [
        ((0.40, 0.60), (0.40, 0.70), True),
        ((0.45, 0.70), (0.40, 0.70), True),
        ((0.30, 0.60), (0.40, 0.70), False),  # less leaky, but surely less accurate
        ((0.395, 0.60), (0.40, 0.70), False),  # less leaky, but less accurate by value
        ((0.40, 0.69), (0.40, 0.70), False),  # not surely
    ],
)
def test_better_is_sure_in_one_and_not_worse_in_the_other(mine, theirs, better):
    gap = gap_of({}, [(model(*mine), model(*theirs))])
    assert surely_better(gap) is better and not surely_better(gap.turned())


def test_an_attack_below_one_half_is_turned_around():
    assert leak(model(0.4, 0.3))["value"] == pytest.approx(0.7)
    assert turned(estimate(0.505))["low"] == 0.5


@pytest.mark.parametrize(
    "agrees, standing",
    [
        ("yes", "hold"), ("met", "hold"),
        ("partly: by RMS", "hold in part"), ("in 10 of 11; in the others it surely does", "hold in part"),
        ("met by the mean over seeds, alone by 0 of 3", "hold in part"), ("met in 2 of 8", "hold in part"),
        ("surely for 2 of 9, surely not for 2", "hold in part"),
        ("cannot be said: intervals overlap", "cannot be said here"),
        ("no: the other way round", "do not hold"), ("no", "do not hold"), ("in 0 of 10; 4 undecided", "do not hold"),
        ("met in 0 of 8", "do not hold"), ("surely for 0 of 3", "do not hold"), ("surely for 0 of 1, surely not for 1", "do not hold"),
        ("for 0 of 2 points from scratch; 1 beat every one of these", "do not hold"), ("missed by 0.010 of AUC", "do not hold"),
    ],
)  # fmt: skip
def test_how_a_claim_stands(agrees, standing):
    assert Verdict("a claim", "Figure 3", "numbers", agrees).standing == standing


def test_in_short_every_claim_is_named_once():
    verdicts = [
        Verdict("claim a", "Figure 3", "", "yes"),
        Verdict("claim b", "Table 1", "", "no"),
        Verdict("claim c", "goal of this project", "", "met by the mean over seeds, alone by 0 of 3"),
    ]
    text = in_short(verdicts)
    assert text.startswith("Of 2 claims of the paper:\n\n- 1 hold: claim a.\n- 1 do not hold: claim b.")
    assert text.endswith("Of 1 goals and claims of our own:\n\n- 1 hold in part: claim c.")


def test_recorded_claims_have_names_of_their_own():
    claims = [v.claim for v in judge_all(load())]
    assert len(claims) == len(set(claims))


def test_seeds_are_compared_together():
    """One seed leaves a difference undecided (0.40 ± 0.01 against 0.39 ± 0.01), three do not; unless they disagree."""

    def answer(mine, theirs):
        rows = [{"advreg-3-layer4": model(a, 0.6), "advreg-3-scratch": model(b, 0.6)} for a, b in zip(mine, theirs)]
        results = {
            42 + i: found(models={**m, "undefended": model(b, 0.9)}) for i, (m, b) in enumerate(zip(rows, theirs))
        }
        return said({"resnet18-augmented": results}, "AdvReg under PPTP beats it from scratch")

    assert answer([0.40], [0.39]).startswith("cannot be said")
    assert answer([0.40] * 3, [0.39] * 3) == "yes"
    assert answer([0.39] * 3, [0.40] * 3) == "no: the other way round"
    assert answer([0.36, 0.44, 0.40], [0.39] * 3).startswith("cannot be said"), "by the spread between seeds"
    assert answer([0.36, 0.40, 0.44], [0.35, 0.39, 0.43]) == "yes", "what seeds share cancels"


def test_a_rival_from_scratch_is_compared_on_the_seeds_that_have_both():
    row = {"defense": "relaxloss", "rewind": "init"}
    rival = model(0.35, 0.65, cut="scratch", **row)
    good, bad = (model(accuracy, 0.6, cut="layer3", **row) for accuracy in (0.4, 0.3))

    def results(second):
        rows = [{"relaxloss-2-scratch": rival, "relaxloss-2-layer3": m} for m in (good, second)]
        return {"resnet18-augmented": {seed: found(models=m) for seed, m in zip((42, 43), rows)}}

    assert said(results(good), "RelaxLoss under PPTP beats") == "yes"
    one = results(good)
    del one["resnet18-augmented"][43]["models"]["relaxloss-2-layer3"]
    assert said(one, "RelaxLoss under PPTP beats") == "yes"
    worse = results(bad)
    del worse["resnet18-augmented"][42]["models"]["relaxloss-2-layer3"]
    verdict = said(worse, "RelaxLoss under PPTP beats")
    assert verdict == "for 0 of 1 points from scratch", "less accurate, but less leaky"
    alone = {"resnet18-augmented": {42: found(models={"relaxloss-2-scratch": rival})}}
    assert said(alone, "RelaxLoss under PPTP beats") is None, "nothing to compare with yet"
    lost = results(model(0.3, 0.7, cut="layer3", **row))
    del lost["resnet18-augmented"][42]["models"]["relaxloss-2-layer3"]
    assert said(lost, "RelaxLoss under PPTP beats").endswith("; 1 beat every one of these")


@pytest.mark.parametrize("auc, answer", [(0.55, "met"), (0.56, "missed by 0.010 of AUC")])
def test_the_goal_is_for_models_that_keep_the_accuracy(auc, answer):
    rows = {
        "private": model(0.3, 0.51, defense="plain", rewind="init", cut="layer2"),  # but useless
        "good": model(0.39, auc, defense="selena", rewind="init", cut="layer2"),
        "rival": model(0.3, 0.6, defense="relaxloss", rewind="init", cut="scratch"),
    }
    results = {"resnet18-augmented": {42: found(models=rows)}}
    verdict = next(v for v in judge_all(results) if v.claim.startswith("at least 95% of the undefended"))
    assert verdict.agrees == answer
    assert ("private:" in verdict.ours) is (answer != "met"), (
        "what would leak little enough is shown where nothing else does"
    )
    results["resnet18-augmented"][43] = found(models={"rival": rows["rival"]})
    assert said(results, "at least 95% of the undefended") is None, "no model is there in every seed"


def test_a_goal_met_on_average_says_how_many_seeds_meet_it_alone():
    def seed(auc):
        good = model(0.39, auc, defense="selena", rewind="init", cut="layer2")
        return found(models={"good": good, "rival": model(0.3, 0.6, defense="relaxloss", rewind="init", cut="scratch")})

    results = {"resnet18-augmented": {42: seed(0.53), 43: seed(0.56)}}
    assert said(results, "at least 95% of the undefended") == "met by the mean over seeds, alone by 1 of 2"


def test_a_rival_may_be_of_another_base_with_the_same_members():
    mine, theirs = (model(0.4, auc, defense="relaxloss", rewind="init", cut="layer3") for auc in (0.6, 0.7))
    results = {
        "resnet18-cskd": {42: found(models={"relaxloss-2-layer3": mine})},
        "resnet18-augmented": {42: found(models={"relaxloss-2-layer3": theirs})},
    }
    assert said(results, "a base that was trained with CS-KD is the better one") == "yes"
    other_seed = {**results, "resnet18-augmented": {43: results["resnet18-augmented"][42]}}
    assert said(other_seed, "a base that was trained with CS-KD is the better one") is None, "other members"


def test_tables_give_intervals_for_one_seed_and_deviations_for_several():
    one = {42: found(models={"x": model(0.4, 0.6, epochs=3)})}
    assert "0.400 [0.390, 0.410]" in buys_table(one)
    two = {**one, 43: found(models={"x": model(0.42, 0.6, epochs=3)})}
    assert "0.410 ± 0.014" in buys_table(two)
    row = adaptive_table({**one[42], "adaptive": {"x": model(0.4, 0.65)}}).splitlines()[-1]
    assert "0.600 [0.590, 0.610]" in row and "0.650 [0.640, 0.660]" in row


def test_blocks_are_shown_of_models_that_interpolate():
    whole, part = found(), found(train=0.98)
    for results in (whole, part):
        results["risk"]["stages"][1]["blocks"] = [stage("layer4.0", 0.6, "undecided"), stage("layer4.1", 0.7, "risky")]
    lines = block_table({"whole": whole, "part": part}).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["layer4.0", "layer4.1"] and "| whole |" in lines[0]


def test_what_no_seed_has_is_named():
    rows = plan()["retrainings"]["resnet18-cskd"]
    first, *others = rows
    some = {42: found(models={first: model(0.4, 0.6)}), 43: found()}
    assert not_run("resnet18-cskd", some).endswith(f"not run: {', '.join(others)}.")
    assert not_run("resnet18-cskd", {42: found(models={name: model(0.4, 0.6) for name in rows})}) == ""


def test_the_plan_is_whole():
    """Every row can be made: its base is there, its defense and settings are, and rivals of verdicts have the names that these ask for."""
    from pptp.procedures import make_defense

    made = plan()
    assert set(made["retrainings"]) | set(made["ensembles"]) <= set(made["bases"])
    for base, rows in made["retrainings"].items():
        for row in rows.values():
            make_defense(row["defense"], row.get("set", []))
        pairs = [p for p in [*cost.SAME_DEFENSE, *(d[2:] for d in verdicts.DEFENSES)] if set(p) <= set(rows)]
        for mine, theirs in ((rows[a], rows[b]) for a, b in pairs):
            assert (mine["defense"], settings(mine)) == (theirs["defense"], settings(theirs))
        assert pairs or base in ("resnet18-cskd", "resnet18-search", "resnet18-40classes")
    named = set(made["retrainings"]["resnet18-augmented"])
    rows = [set(rows) for rows in made["retrainings"].values()]
    assert all(any(set(pair) <= names for names in rows) for pair in cost.SAME_DEFENSE)
    assert {"relaxloss-1.5-layer4", "relaxloss-1.5-head", "relaxloss-1.5-finetune"} <= named
    for base, wanted in made["ensembles"].items():
        assert set(wanted["procedures"]) <= {"undefended", *made["retrainings"][base]}
    assert {name for _, name in verdicts.VARIANTS} < set(made["retrainings"]["resnet18-search"])


def test_work_and_attack_fill_a_results_file_and_go_on_where_they_stopped(monkeypatch, tmp_path):
    """The harness itself, on digits: base, retraining, reference models, and nothing made twice."""
    common = {"img_size": 32, "members": 80, "reference": 20, "nonmembers": 80, "test": 80, "batch_size": 20}
    selena = {"defense": "selena", "set": ["k=2", "l=1", "sub_epochs=1"], "cut": "layer4"}
    short = {
        "common": {**common, "opt": "adamw", "lr": 0.002},
        "bases": {"tiny": {"model": "test_resnet", "augment": False, "epochs": 6}},
        "retrainings": {
            "tiny": {
                "plain-2ep-layer4": {"defense": "plain", "cut": "layer4", "epochs": 2},
                "selena-2ep-layer4": {**selena, "epochs": 2},
                "selena-4ep-layer4": {**selena, "epochs": 4},
            }
        },
        "ensembles": {"tiny": {"models": 2, "procedures": ["undefended", "plain-2ep-layer4"]}},
    }
    monkeypatch.setattr(harness, "plan", lambda: short)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    cell = Cell("tiny", 42)
    harness.work(cell, "digits", tmp_path / "runs")
    row = cell.results()["models"]["plain-2ep-layer4"]
    assert row["base"]["test_accuracy"] == cell.results()["models"]["undefended"]["test_accuracy"]
    assert (row["cut"], row["epochs"]) == ("layer4", 2) and cell.missing() == []
    sub_models = list((tmp_path / "runs" / cell.name / "shelf").glob("said_*"))
    assert len(sub_models) == 2, "two students of other lengths have the same teachers"
    shutil.rmtree(tmp_path / "runs" / cell.name / "retrain")  # as on another machine, where only results are
    harness.attack(cell, "digits", tmp_path / "runs", ("plain",))
    assert list(cell.results()["adaptive"]) == ["plain-2ep-layer4"]
    assert "2 reference models" in cell.results()["adaptive"]["plain-2ep-layer4"]["references"]
    monkeypatch.setattr(harness, "train_run", None)  # would fail if called
    harness.work(cell, "digits", tmp_path / "runs")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["status", "--seeds", "x"], "--seeds is x"),
        (["status", "--only", "nosuch"], "starts with nosuch"),
        (["status", "--base", "nosuch"], "no base called nosuch"),
        (["work"], "work needs --data"),
        (["attack", "--base", "resnet18-plain"], "attack needs --data"),
        (["attack", "--data", ".", "--base", "resnet18-plain", "--seeds", "1"], "no results of resnet18-plain-1"),
    ],
)
def test_a_wrong_argument_is_named(arguments, sentence, monkeypatch):
    monkeypatch.setattr("sys.argv", ["claims", *arguments])
    with pytest.raises(SystemExit, match=sentence):
        main()


def test_costs_are_judged_pair_by_pair():
    def judged(times, claim):
        pairs = {f"pair {i}": {"time": t, "memory": t + 0.5} for i, t in enumerate(times)}
        return next(v.agrees for v in cost.verdicts(pairs, {}) if v.claim.startswith(claim))

    assert judged([0.1, 0.2], "retraining takes at most 0.2") == "met"
    assert judged([0.1, 0.21], "retraining takes at most 0.2") == "met in 1 of 2"
    assert judged([0.1, 0.49], "retraining takes less than half") == "yes"
    assert judged([0.1, 0.51], "retraining takes less than half") == "in 1 of 2"
    assert judged([0.1, 0.51], "retraining needs less memory") == "in 1 of 2"
    assert cost.verdicts({}, {}) == []


@pytest.mark.parametrize(
    ("auc", "time", "answer"),
    [
        (0.6, 0.1, "yes"),
        (0.7, 0.1, "cannot be said: neither is surely better"),
        (0.75, 0.1, "no: the other way round"),
        (0.6, 0.3, "no: it takes 0.30"),
    ],
)
def test_a_short_retraining_must_be_better_and_quick(auc, time, answer):
    mine, theirs = cost.SHORT[0]
    results = {"resnet18-augmented": {42: found(models={mine: model(0.4, auc), theirs: model(0.4, 0.7)})}}
    costs = {cost.named("resnet18-augmented", mine, theirs): {"time": time, "memory": 1.0}}
    assert [v.agrees for v in cost.verdicts(costs, results)] == [answer]
    assert cost.verdicts({}, results) == cost.verdicts(costs, {}) == [], "accuracy or time is not there"


def test_costs_that_are_there_are_not_measured_again(monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(cost, "PATH", tmp_path / "cost.json")
    monkeypatch.setattr(cost, "_pair", lambda cell, mine, theirs, rounds: measured.append(mine) or {"time": 0.1})
    cost.measure()
    first = list(measured)
    assert {"relaxloss-2-layer3", "plain-6ep-layer2"} <= set(first)
    cost.measure()
    assert measured == first


def test_a_model_is_compared_with_the_base_it_was_made_from():
    """That of its own folder, where that was trained again and came out otherwise."""
    rows = {"as it was": model(0.36, 0.6), "trained again": model(0.36, 0.6, base={"test_accuracy": estimate(0.36)})}
    seeds = {42: found(models=rows)["models"]}
    assert verdicts.kept(seeds, "as it was") == pytest.approx(0.9)
    assert verdicts.kept(seeds, "trained again") == pytest.approx(1.0)


def test_what_a_pair_costs(monkeypatch):
    """Time of an epoch times epochs."""
    cell = Cell("resnet18-augmented", 42)
    took = {"layer3": 1.0, "scratch": 4.0}
    monkeypatch.setattr(cost, "seconds", lambda cell, row: took[row["cut"]])
    monkeypatch.setattr(cost, "peak_mb", lambda base, name: 50.0 if "layer3" in name else 100.0)
    row = cost._pair(cell, "relaxloss-2-layer3", "relaxloss-2-scratch", 3)
    assert row["epochs"] == [20, 60] and row["time_of_an_epoch"] == 0.25 and row["memory"] == 0.5
    assert row["time"] == pytest.approx(0.25 * 20 / 60)


@pytest.mark.parametrize("defense", ["relaxloss", "selena"])
def test_a_retraining_is_timed_for_real(defense, monkeypatch):
    monkeypatch.setattr(cost, "MEMBERS", 60)
    monkeypatch.setattr(
        Cell,
        "settings",
        {"model": "test_resnet", "img_size": 32, "limit_classes": 4, "batch_size": 20, "data": "digits"},
    )
    assert cost.seconds(Cell("any", 42), {"defense": defense, "cut": "layer4"}) > 0


def test_half_of_the_data_is_compared_with_relaxloss_on_all_of_it():
    def judged(accuracy):
        relaxed = model(accuracy, 0.6, defense="relaxloss", cut="scratch")
        cell = {**found(models={"relaxloss-1-scratch": relaxed}), "half": {"test_accuracy": estimate(0.3)}}
        return said(
            {"resnet18-plain": {42: cell, 43: found(models={"relaxloss-1-scratch": relaxed})}}, "RelaxLoss on all"
        )

    assert [judged(a) for a in (0.35, 0.31, 0.25)] == [
        "surely for 1 of 1", "cannot be said: neither is surely better", "surely for 0 of 1, surely not for 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "answer"), [(0.6, "cannot be said: intervals allow both"), (0.65, "yes"), (0.605, "yes"), (0.55, "no")]
)
def test_neither_help_nor_its_absence_is_taken_for_granted(mine, answer):
    """The gain is 0.61 less `mine`, ± 0.014: none if it is surely below 0.02."""
    rows = {
        name: model(0.4, 0.6, attacks={a: {"auc": estimate(auc)} for a in ("confidence", "correctness")})
        for name, auc in (("relaxloss-2-layer3", mine), ("relaxloss-2-scratch", 0.61))
    }
    rows = {n: {**m, "defense": "relaxloss", "cut": n.split("-")[-1], "rewind": "init"} for n, m in rows.items()}
    assert said({"resnet18-augmented": {42: found(models=rows)}}, "PPTP does not help") == answer


def test_harden_tries_the_row_that_has_the_evidence():
    made = plan()
    base = {**made["common"], **made["bases"]["resnet18-augmented"]}
    row = made["retrainings"]["resnet18-augmented"]["selena-10-t0.5-layer2"]
    recipe = Recipe(epochs=base["epochs"], batch_size=base["batch_size"])
    tried = ladder([row["cut"]], recipe, base["limit_classes"], base["members"])[-1]
    assert (tried.defense, list(tried.settings), tried.recipe.epochs) == (row["defense"], row["set"], row["epochs"])


def test_seeds_together_decide_what_one_alone_cannot():
    """0.47 ± 0.022 is undecided; two such seeds, independent, have an interval narrower by the root of two, within 0.05 of 1/2."""

    def seed(value, verdict="undecided"):
        results = found()
        results["risk"]["stages"][0] = {**stage("layer3", value, verdict), "distances": distances_of(value, 0.022)}
        return results

    one, two = {43: seed(0.470)}, {43: seed(0.470), 44: seed(0.480)}
    plain = {"resnet18-plain": {42: found()}}
    claim = "augmentation does not move the disparity"
    assert said({**plain, "resnet18-augmented": one}, claim).startswith("cannot be said: undecided at layer3")
    assert said({**plain, "resnet18-augmented": two}, claim) == "yes"
    apart = {43: seed(0.40), 44: seed(0.55)}
    assert said({**plain, "resnet18-augmented": apart}, claim).startswith("cannot be said"), (
        "seeds that differ by more than chance"
    )


def distances_of(value, width):
    auc = {**estimate(value, width), "note": ""}
    effect = list(Estimate(**auc).effect)
    return {metric: {"auc": auc, "effect": effect} for metric in ("rms", "cosine")}


def test_the_mean_of_seeds_has_the_interval_of_a_mean():
    same = [estimate(0.6, 0.02)] * 4
    assert mean_of(same)["high"] == pytest.approx(0.61) and mean_of(same)["low"] == pytest.approx(0.59)
    assert mean_of(same[:1]) == same[0]
    wider = mean_of(same, Spread(ratio=4, df=1000))
    assert wider["high"] == pytest.approx(0.62, abs=1e-4), "what differs between seeds counts"
    assert mean_of(same, Spread(ratio=4, df=2))["high"] > 0.64, "and more, if few seeds tell"
    assert mean_of(same, Spread(ratio=0.1, df=2)) == mean_of(same), "but never less than the choice of images"


def test_how_much_seeds_vary_is_learned_from_all_bases():
    sd = 0.02 / norm.ppf(0.975)
    pair = [estimate(0.6 - sd, 0.02), estimate(0.6 + sd, 0.02)]  # variance between them: twice their own
    assert spread_of([[pair]]) == Spread(pytest.approx(2), 1)
    assert spread_of([[pair, pair]]) == Spread(pytest.approx(2), 1), (
        "two quantities of the same seeds tell hardly more than one"
    )
    assert spread_of([[pair], [pair[:1] * 3]]) == Spread(pytest.approx(2 / 3), 3)
    assert spread_of([[pair[:1]]]) == Spread()


@pytest.mark.parametrize("extra", [0.0, 1.0, 8.0])
def test_intervals_of_a_mean_over_seeds_cover_what_they_say(extra):
    """Four bases of two or three seeds, whose true values vary by `extra` times the variance that images explain."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        bases = [[estimate(v, 1.96) for v in rng.normal(0, (1 + extra) ** 0.5, n)] for n in (3, 3, 2, 2)]
        mean = mean_of(bases[0], spread_of([[found] for found in bases]))
        hits += mean["low"] <= 0 <= mean["high"]
    assert hits >= 0.93 * 400


@pytest.mark.parametrize(
    "risk",
    [
        pytest.param(found["risk"], id=f"{base}-{seed}")
        for base, seeds in load().items()
        for seed, found in seeds.items()
    ],
)
def test_recorded_verdicts_are_those_of_localize(risk):
    """Pooled seeds are judged by the same rule, with the same delta, as the single ones were."""
    blocks = [block for part in risk["stages"] for block in part["blocks"]]
    for part in (*risk["stages"], *blocks):
        effects = [Estimate(**d["auc"]).effect for d in part["distances"].values()]
        assert part["verdict"] == judge(effects, DELTA, risk["powered"])
    assert risk["stall"] == _stall(risk["stages"])
