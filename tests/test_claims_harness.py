"""The harness of the claims, and the tables it renders."""

import shutil

import pytest
from made_results import estimate, found, model, stage

from benchmarks.claims import cost, pairs, verdicts
from benchmarks.claims import work as harness
from benchmarks.claims.__main__ import main
from benchmarks.claims.claim import Verdict
from benchmarks.claims.headline import HEADER, ROWS, headline_rows
from benchmarks.claims.render import PAGE, README, TOWARDS_GOAL, claims_text, load
from benchmarks.claims.tables import (
    adaptive_table,
    bases_trained_again,
    block_table,
    buys_table,
    goal_table,
    not_run,
    table,
    where_summary,
)
from benchmarks.claims.verdicts import judged
from benchmarks.claims.work import Cell, plan
from pptp.config import Recipe
from pptp.harden import ladder


def test_tables_give_intervals_for_one_seed_and_deviations_for_several():
    one = {42: found(models={"x": model(0.4, 0.6, epochs=3)})["models"]}
    assert "0.400 [0.390, 0.410]" in buys_table(one)
    assert "active" not in one[42]["x"].get("result", {}) and "| x | 1 | 3 |  | 0.900" in buys_table(one)
    acts = model(0.4, 0.6, epochs=3, defense="relaxloss", result={"active": 0.003}, cut="scratch")
    assert "| x | 1 | 3 | 0.3% | 0.900" in buys_table({42: found(models={"x": acts})["models"]}), "else it is cross-entropy in disguise"
    assert "| x | 1 | 3 |  | 0.900" in buys_table({42: found(models={"x": {**acts, "defense": "plain"}})["models"]})
    two = {**one, 43: found(models={"x": model(0.42, 0.6, epochs=3)})["models"]}
    assert "0.410 ± 0.014" in buys_table(two)
    row = adaptive_table({"models": one[42], "adaptive": {"x": model(0.4, 0.65)}}).splitlines()[-1]
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
    some = {42: found(models={first: model(0.4, 0.6)})["models"], 43: found()["models"]}
    assert not_run("resnet18-cskd", some).endswith(f"not run: {', '.join(others)}.")
    assert not_run("resnet18-cskd", {42: {name: model(0.4, 0.6) for name in rows}}) == ""


def test_readme_shows_rows_of_the_plan():
    for base, names in ROWS.items():
        assert set(names) <= {"undefended", *plan()["retrainings"][base]}
    made = {"resnet18-augmented": {42: found(models={"selena-10-t0.5-layer2": model(0.38, 0.55)})}}
    bare, bold = headline_rows(made)
    assert (bare[0], bare[-1]) == ("undefended", "60")
    assert bold[1:] == ["42", "0.380 [0.370, 0.390]", "0.95", *["0.550 [0.540, 0.560]"] * 2, "69"]


def test_readme_shows_what_is_recorded():
    assert table(HEADER, headline_rows(load())) in README.read_text(), "run: python -m benchmarks.claims render"


def test_the_plan_is_whole():
    """Every row can be made: its base is there, its defense and settings are, and rivals of verdicts have the names that these ask for."""
    from pptp.procedures import make_defense

    made = plan()
    assert set(made["retrainings"]) | set(made["ensembles"]) <= set(made["bases"])
    for base, rows in made["retrainings"].items():
        for row in rows.values():
            make_defense(row["defense"], row.get("set", []))
        asked = [*cost.SAME_DEFENSE, *(pair for kind in pairs.KINDS for pair in kind.pairs)]
        there = [pair for pair in asked if set(pair) <= set(rows)]
        for mine, theirs in ((rows[a], rows[b]) for a, b in there):
            assert mine["defense"] == theirs["defense"] and (mine["cut"], theirs["cut"]) != ("scratch", "scratch")
            assert mine["defense"] == "selena" or mine.get("set") == theirs.get("set"), "but for labels and lengths"
        assert there or base in ("resnet18-cskd", "resnet18-search", "resnet18-40classes")
    named = set(made["retrainings"]["resnet18-augmented"])
    rows = [set(rows) for rows in made["retrainings"].values()]
    assert all(any(set(pair) <= names for names in rows) for pair in cost.SAME_DEFENSE)
    assert {"relaxloss-1.5-layer4", "relaxloss-1.5-head", "relaxloss-1.5-finetune"} <= named
    for base, wanted in made["ensembles"].items():
        assert set(wanted["procedures"]) <= {"undefended", *made["retrainings"][base]}
    assert {name for _, name in verdicts.VARIANTS} < set(made["retrainings"]["resnet18-search"])
    every = set().union(*rows)
    assert {name for kind in pairs.KINDS for pair in kind.pairs for name in pair} | set(TOWARDS_GOAL) <= every


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


def test_harden_tries_the_row_that_has_the_evidence():
    made = plan()
    base = {**made["common"], **made["bases"]["resnet18-augmented"]}
    row = made["retrainings"]["resnet18-augmented"]["selena-10-t0.5-layer2"]
    recipe = Recipe(epochs=base["epochs"], batch_size=base["batch_size"])
    tried = ladder([row["cut"]], recipe, base["limit_classes"], base["members"])[-1]
    assert (tried.defense, list(tried.settings), tried.recipe.epochs) == (row["defense"], row["set"], row["epochs"])


def test_claims_that_nothing_was_run_for_are_named():
    results = {"resnet18-plain": {42: found()}}
    verdicts_made, unjudged = judged(results)
    assert "rewinding beats fine-tuning" in unjudged and "ResNet18: disparity starts in stage 4" not in unjudged
    text = claims_text(verdicts_made, unjudged)
    assert "rewinding beats fine-tuning;" in text.split("Not run: ")[1].split("\n")[0]
    assert "Not run" not in claims_text([], [])


def test_claims_are_counted_by_how_they_stand():
    verdicts_made = [
        Verdict("claim a", "Figure 3", "", "yes"),
        Verdict("claim b", "Table 1", "", "no"),
        Verdict("claim c", "goal of this project", "", "met by the mean over seeds, alone by 0 of 3"),
    ]
    text = claims_text(verdicts_made, [])
    assert text.startswith("Of the paper 2: 1 hold, 1 fail. Of our own 1: 1 hold in part.")
    papers, ours = text.split("<details>")
    assert "claim a" in papers and "claim c" not in papers and "claim c" in ours


def test_where_is_summed_up_in_a_line_a_base():
    one = {"resnet18-plain": found(), "resnet34-plain": found(train=0.9)}
    sure, unsure = where_summary(one, {base: [42] for base in one}).splitlines()[2:]
    assert "| layer4 | unseen samples are the farther ones, as in the paper |" in sure
    assert "does not interpolate" in unsure and "farther" not in unsure


def test_the_goal_is_shown_seed_by_seed_and_together():
    bold = TOWARDS_GOAL[0]
    rival = model(0.3, 0.6, defense="relaxloss", cut="scratch")
    cells = {s: found(models={bold: model(a, 0.55), "relaxloss-2-scratch": rival}) for s, a in ((42, 0.4), (43, 0.38))}
    lines = goal_table({"resnet18-augmented": cells}, TOWARDS_GOAL, ["resnet18-augmented"]).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["42", "43", "mean"] * 2
    assert "| 0.950 |" in lines[1] and "0.390 ± 0.014" in lines[2] and "relaxloss-2-scratch" in lines[3]


def test_rows_of_a_base_that_was_trained_again_are_named():
    again = {"test_accuracy": estimate(0.36), "seconds": 5.0}
    rows = {"same": model(0.4, 0.6, base={"test_accuracy": estimate(0.4)}), "other": model(0.36, 0.6, base=again)}
    said = bases_trained_again({"resnet18-plain": {42: found(models=rows)}})
    assert said == ["`resnet18-plain`, seed 42 (the table's base 0.400): other from one of 0.360"]


def test_the_page_shows_the_recorded_claims():
    results = load()
    from benchmarks.claims import converge

    made, unjudged = judged(results)
    made += cost.verdicts(cost.load(), results) + converge.verdicts(converge.load())
    assert claims_text(made, unjudged) in PAGE.read_text(), "run: python -m benchmarks.claims render"
