"""`pptp harden`: what it tries, what it chooses, and that it says so."""

import json
from dataclasses import replace

import pytest

from pptp.cli import main
from pptp.config import Recipe
from pptp.ensemble import HALF_AS_REFERENCE
from pptp.frontier import Point
from pptp.harden import around, cuts_to_try, explanation, ladder, why_these
from pptp.intervals import Estimate
from pptp.models import read_weights, weights_digest
from pptp.procedures import Setting, make_defense
from pptp.runs import Run, read_json

STAGES = ["stem", "layer1", "layer2", "layer3", "layer4", "head"]


def risk(cut, strict):
    return {"stages": [{"name": name} for name in STAGES], "cut": cut, "strict_cut": strict}


@pytest.mark.parametrize(
    ("cut", "strict", "tried"),
    [
        ("layer4", "layer3", ["layer2", "layer3", "layer4"]),
        ("layer4", "layer4", ["layer3", "layer4"]),
        ("head", "layer4", ["layer3", "layer4"]),
        ("layer2", "layer1", ["layer1", "layer2"]),
        ("scratch", "scratch", ["layer2", "layer3", "layer4"]),
    ],
)
def test_cuts_around_what_localisation_says(cut, strict, tried):
    assert cuts_to_try(risk(cut, strict)) == tried


@pytest.mark.parametrize(
    ("cut", "strict", "words"),
    [
        ("layer4", "layer3", "localisation says layer4, its stricter gate layer3"),
        ("layer4", "scratch", "no stage could be called safe by the stricter gate"),
        ("scratch", "scratch", "no stage could be called safe, so"),
    ],
)
def test_why_these_cuts(cut, strict, words):
    assert words in why_these(risk(cut, strict))


def test_the_ladder_is_short_but_not_too_short_and_relaxloss_gets_even_epochs():
    long = ladder(["layer4"], Recipe(epochs=60, batch_size=32), 20, 2500)
    assert {s.defense: s.recipe.epochs for s in long} == {"plain": 4, "crossfit": 6, "relaxloss": 6, "selena": 20}
    assert "sub_epochs=7" in long[-1].settings
    few = ladder(["layer3", "layer4"], Recipe(epochs=20, batch_size=32), 10, 300)
    assert all(s.recipe.epochs == 20 for s in few)  # 300 steps would be more than the whole training
    assert [s.cut for s in few if s.defense == "selena"] == ["layer3"] and len(few) == 9
    three = ladder(["layer1", "layer2", "layer3"], Recipe(epochs=20, batch_size=32), 10, 300)
    assert [s.cut for s in three if s.defense == "selena"] == ["layer1", "layer2"]


def point(weight, leak, accuracy, reported=None, epochs=6):
    e = Estimate(leak, leak - 0.02, leak + 0.02)
    a = Estimate(accuracy, accuracy - 0.02, accuracy + 0.02)
    setting = Setting("crossfit", (f"weight={weight}",), "layer3", "init", Recipe(epochs=epochs))
    return Point(
        setting,
        a,
        e,
        "confidence",
        a,
        e if reported is None else Estimate(reported, reported - 0.02, reported + 0.02),
        "confidence",
        e.high,
        1.0,
        1.0,
    )


def test_refines_between_neighbours_and_in_length():
    points = [point(0.5, 0.7, 0.5), point(1.0, 0.55, 0.4)]
    found = around(points[1].setting, points)
    assert [(s.settings, s.recipe.epochs) for s in found] == [
        (("weight=0.7071",), 6), (("weight=1.0",), 4), (("weight=1.0",), 8),
    ]  # fmt: skip
    short = point(1.0, 0.55, 0.4, epochs=4)
    assert [s.recipe.epochs for s in around(short.setting, [short])] == [2, 6], "a longer one even after four epochs"


def selena_settings():
    recipe = Recipe(epochs=60, batch_size=32)
    return [s for s in ladder(["layer2", "layer3"], recipe, 20, 2500) if s.defense == "selena"]


def tried(*settings):
    return [replace(point(1.0, 0.55, 0.4), setting=s) for s in settings]


def test_refines_the_labels_of_selena():
    """Softer and sharper ones from the same sub-models, and ones from twice as many."""
    (selena,) = selena_settings()
    found = around(selena, tried(selena))
    assert [(s.recipe.epochs, s.settings[-1]) for s in found] == [
        (12, "temperature=0.5"), (26, "temperature=0.5"), (20, "temperature=0.35"), (20, "temperature=0.714"), (20, "temperature=0.5"),
    ]  # fmt: skip
    *same, more = found
    assert {s.settings[:-1] for s in same} == {("k=10", "l=3", "views=8", "sub_epochs=7")}
    assert more.settings[:-1] == ("k=20", "l=6", "views=8", "sub_epochs=7")
    back = around(found[2], tried(selena, *found))
    assert "temperature=0.5" not in [s.settings[-1] for s in back if s.recipe.epochs == 20], "tried already"


def test_the_number_of_sub_models_is_doubled_once_and_never_halfway():
    (selena,) = selena_settings()
    *_, more = first = around(selena, tried(selena))
    found = around(more, tried(selena, *first))
    assert found and {s.settings[:2] for s in found} == {("k=20", "l=6")}
    for setting in found:
        make_defense(setting.defense, setting.settings)


@pytest.mark.parametrize(
    ("reported", "sentence"),
    [(0.52, "surely reached"), (0.54, "reached by its value"), (0.6, "The target of 0.55 is not reached")],
)
def test_the_verdict_is_that_of_samples_it_was_not_chosen_by(reported, sentence):
    best = point(1.0, 0.53, 0.4, reported)
    assert any(sentence in line for line in explanation(best, [best, point(0.5, 0.7, 0.5)], 0.55, "16 models"))
    assert "the least leaky" in " ".join(explanation(best, [best], 0.51, "16 models"))


def test_the_half_model_is_called_a_teacher_only_where_it_is_the_reference():
    best = replace(point(1.0, 0.53, 0.4), reported_attack="rmia_offline")
    said = [" ".join(explanation(best, [best], 0.55, source)) for source in (HALF_AS_REFERENCE, "16 models")]
    assert ["one of its teachers" in text for text in said] == [True, False]
    assert f"attacked with {HALF_AS_REFERENCE}." in said[0] and "attacked with 16 models." in said[1]


def test_the_whole_command(tmp_path, capsys):
    flags = ["--members", "80", "--reference", "20", "--nonmembers", "80", "--test", "40", "--epochs", "2", "-b", "20", "--opt", "adamw",
             "--limit-classes", "4", "--limit-per-class", "60", "--lr", "0.003", "--no-augment"]  # fmt: skip
    path = tmp_path / "r"

    def harden(target, rounds):
        return main(
            ["harden", "test_resnet", "digits", "--run", str(path), "--target-auc", target, "--rounds", rounds, *flags]
        )

    assert harden("0.99", "1") == 0
    said = capsys.readouterr().out
    assert "leaks surely no more than 0.99 already" in said and not (path / "harden.json").exists()
    code = harden("0.55", "1")
    said = capsys.readouterr().out
    assert "Chosen:" in said and ("The target of 0.55 is not reached" in said) is (code == 1)
    kept = json.loads((path / "harden.json").read_text())
    assert sum(p["chosen"] for p in kept["points"]) == 1 and len(kept["points"]) > 14, "14, and those of refinement"
    run = Run.open(path)
    assert run.trained_names() == ["undefended", "hardened"]
    page = (path / "report.html").read_text()
    assert "How hardened was chosen" in page and "On the other half alone: test accuracy" in page
    assert f"try {len(kept['points'])} settings" in page and "train other" in page and "There is no control" not in page
    tried = [weights_digest(read_weights(p)) for p in path.glob("frontier/*/last.safetensors")]
    assert weights_digest(run.model("hardened").state_dict()) in tried, (
        "the model that was measured, not another of its kind"
    )
    chosen = next(p["setting"] for p in kept["points"] if p["chosen"])
    record, rows = read_json(run.folder("hardened") / "defense.json", ""), run.folder("hardened") / "history.jsonl"
    assert chosen.startswith(record["defense"]) and record["recipe"]["epochs"] == len(rows.read_text().splitlines())
    assert record["cost"]["seconds"] > 0 and not list(path.glob("frontier/*/checkpoint*"))
    assert not (path / "frontier" / "shelf").exists(), "what points share is needed by no one now"
    stamps = {p: p.stat().st_mtime_ns for p in path.glob("frontier/*/point.json")}
    assert harden("0.501", "0") == 1, "a target that is missed"
    assert "The target of 0.501 is not reached" in capsys.readouterr().out and "hardened" in run.trained_names()
    assert stamps == {p: p.stat().st_mtime_ns for p in path.glob("frontier/*/point.json")}, "nothing is made twice"


def test_bad_targets_are_refused_before_any_work(tmp_path, capsys):
    assert main(["harden", "test_resnet", "digits", "--run", str(tmp_path / "r"), "--target-auc", "0.4"]) == 2
    assert "between 0.5, no leak, and 1" in capsys.readouterr().err and not (tmp_path / "r").exists()
    assert main(["harden", "test_resnet", "digits", "--run", str(tmp_path / "r"), "--rounds", "-1"]) == 2
    assert "rounds is -1" in capsys.readouterr().err and not (tmp_path / "r").exists()
