"""The commands as a user types them, on a small real run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import SMALL, fails

import pptp
from pptp.cli import main
from pptp.config import experiment, flat_fields
from pptp.models import read_weights, weights_digest
from pptp.runs import Run


def test_every_artifact_is_where_it_is_promised(run):
    expected = [
        "run.json",
        "splits.npz",
        "full/init.safetensors",
        "full/last.safetensors",
        "full/history.jsonl",
        "half/last.safetensors",
        "risk.json",
        "distances.npz",
        "retrain/relaxloss-layer3/defense.json",
        "retrain/relaxloss-layer3/last.safetensors",
        "retrain/relaxloss-layer3/history.jsonl",
        "retrain/plain-layer3/last.safetensors",
        "evaluate/undefended/evaluation.json",
        "evaluate/relaxloss-layer3/scores.npz",
        "report.html",
        "report.json",
        "full/epoch_1.safetensors",
        "full/epoch_3.safetensors",
    ]
    assert [name for name in expected if not (run / name).exists()] == []
    assert not list(run.rglob("*.tmp")) and not list(run.rglob("checkpoint.pt"))


def test_both_models_start_from_the_same_weights(run):
    assert weights_digest(read_weights(run / "full/init.safetensors")) == weights_digest(
        read_weights(run / "half/init.safetensors")
    )


def test_retrained_model_keeps_the_trunk_bit_by_bit(run):
    full, defended = (
        read_weights(run / "full/last.safetensors"),
        read_weights(run / "retrain/relaxloss-layer3/last.safetensors"),
    )
    changed = {name.split(".")[0] for name in full if not torch.equal(full[name], defended[name])}
    assert changed == {"layer3", "layer4", "fc"}


@pytest.mark.parametrize("folder", ["full", "retrain/relaxloss-layer3"])
def test_timm_loads_a_saved_model_without_pptp(run, folder):
    script = (
        "import sys, timm, torch; m = timm.create_model(sys.argv[1], pretrained=True).eval(); assert 'pptp' not in sys.modules;"
        "torch.save(m.state_dict(), sys.argv[2]); print(m.num_classes, *m.pretrained_cfg['input_size'])"
    )
    saved = run / "timm.pt"
    done = subprocess.run(
        [sys.executable, "-c", script, f"local-dir:{run / folder}", str(saved)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["10", "3", "32", "32"]
    assert weights_digest(read_weights(saved)) == weights_digest(read_weights(run / folder / "last.safetensors"))


def test_fixed_size_family_round_trips_through_timm(tmp_path):
    run = Run.create(
        tmp_path / "vit",
        experiment({"model": "test_vit", "img_size": 48, "members": 40, "reference": 0, "nonmembers": 20, "test": 20}),
    )
    model = run.fresh_model()
    run.save_model("undefended", model, "card")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'vit' / 'full'}", pretrained=True)
    assert weights_digest(loaded) == weights_digest(model)


def test_results_are_json_with_intervals(run):
    found = json.loads((run / "evaluate/relaxloss-layer3/evaluation.json").read_text())
    assert {"correctness", "confidence", "attack_p", "network", "calibration", "rmia_offline"} == set(
        found["attacks"]
    ) - {
        "entropy",
        "modified_entropy",
    }
    for attack in found["attacks"].values():
        assert {"auc", "advantage", "advantage_per_class", "balanced_accuracy", "tpr@0.01", "tpr@0.001"} <= set(attack)
        assert all(e["low"] <= e["value"] <= e["high"] for e in attack.values() if isinstance(e, dict))
        assert attack["tpr@0.001"]["note"] == "too few samples"
    defense = json.loads((run / "retrain/relaxloss-layer3/defense.json").read_text())
    assert 0 <= defense["result"]["active"] <= 1 and defense["repr"].startswith("RelaxLoss(alpha=1.0")


def test_scores_carry_sample_ids(run):
    splits = np.load(run / "splits.npz")
    scores = np.load(run / "evaluate/undefended/scores.npz")
    members = set(scores["ids"][scores["members"]])
    assert members == {*splits["h1"], *splits["h2"]} and not members & {*splits["nonmembers"]}


def test_report_is_one_self_contained_page(run):
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 6 and "<script" not in page
    links = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert links and all(link.startswith("data:image/png;base64,") for link in links)
    for word in ("relaxloss-layer3", "plain-layer3", "undefended", "What this does not show", "cut", "active in"):
        assert word in page
    ids = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "clip paths of two figures share an id"


def test_commands_do_nothing_twice(run, capsys):
    stamps = {p: p.stat().st_mtime_ns for p in run.rglob("*.safetensors")}
    assert main(["train", str(run), *SMALL, "--keep-epochs", "1,3"]) == 0
    assert (
        main(["retrain", str(run), "--defense", "relaxloss", "--set", "alpha=1.0", "--cut", "layer3", "--epochs", "4"])
        == 0
    )
    assert "already there" in capsys.readouterr().out
    assert stamps == {p: p.stat().st_mtime_ns for p in run.rglob("*.safetensors")}


def test_several_defenses_in_one_go(copy_of_run):
    words = "--defense label_smoothing --defense mixup --set mixup.alpha=0.3 --set smoothing=0.2 --cut head --epochs 2".split()
    assert main(["retrain", str(copy_of_run), *words]) == 0
    saved = {
        p.parent.name: json.loads(p.read_text())["set"] for p in (copy_of_run / "retrain").glob("*-head/defense.json")
    }
    assert saved == {"label_smoothing-head": ["smoothing=0.2"], "mixup-head": ["alpha=0.3"], "plain-head": []}


def test_base_trained_by_another_procedure(tmp_path):
    assert main(["train", str(tmp_path / "r"), *SMALL, "--epochs", "2", "--procedure", "cskd"]) == 0
    plain = pptp.create("test_resnet", 10, 32)
    assert Run.open(tmp_path / "r").model("undefended").fc.weight.shape == plain.fc.weight.shape
    assert len((tmp_path / "r/half/history.jsonl").read_text().splitlines()) == 2


def test_rewind_to_an_early_epoch_and_fine_tuning(copy_of_run):
    for rewind, name in (("epoch=3", "plain-head-epoch3"), ("none", "plain-head-none")):
        assert (
            main(
                [
                    "retrain",
                    str(copy_of_run),
                    "--defense",
                    "plain",
                    "--cut",
                    "head",
                    "--rewind",
                    rewind,
                    "--epochs",
                    "2",
                ]
            )
            == 0
        )
        assert (copy_of_run / "retrain" / name / "last.safetensors").exists()


def test_own_defense_by_module_name(copy_of_run):
    assert (
        main(
            [
                "retrain",
                str(copy_of_run),
                "--defense",
                "defenses.plain:Plain",
                "--cut",
                "head",
                "--epochs",
                "2",
                "--name",
                "mine",
                "--no-control",
            ]
        )
        == 0
    )
    assert json.loads((copy_of_run / "retrain/mine/defense.json").read_text())["defense"] == "defenses.plain:Plain"


def test_checkpoints_trained_elsewhere_are_taken_over_with_their_own_membership(run, tmp_path, capsys):
    given = [
        "--full-checkpoint",
        run / "full/last.safetensors",
        "--half-checkpoint",
        run / "half/last.safetensors",
        "--seed",
        "7",
    ]
    assert "membership would be invented" in fails(capsys, "train", tmp_path / "b", *SMALL, *given)
    given += ["--splits-file", run / "splits.npz"]
    assert main([str(w) for w in ("train", tmp_path / "b", *SMALL, *given)]) == 0
    assert "initial weights are unknown" in capsys.readouterr().out
    assert main(["localize", str(tmp_path / "b"), "--delta", "0.2"]) == 0
    again, first = (json.loads((p / "risk.json").read_text()) for p in (tmp_path / "b", run))
    distances = [[stage["distances"] for stage in risk["stages"]] for risk in (again, first)]
    assert distances[0] == distances[1]


def test_ids_of_other_data_are_refused(tmp_path, capsys):
    np.savez(tmp_path / "ids.npz", h1=[0, 1], h2=[2, 3], nonmembers=[5000], test=[7])
    assert "names sample 5000, but the data has 1797" in fails(
        capsys, "train", tmp_path / "r", *SMALL, "--splits-file", tmp_path / "ids.npz"
    )


def test_config_file_under_flags(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: test_resnet\nlr: 1e-3\nbatch-size: 10\nepochs: 3\nmembers: 40\nreference: 10\nnonmembers: 20\ntest: 20\n"
    )
    assert main(["train", str(tmp_path / "r"), "--config", str(tmp_path / "c.yaml"), "--epochs", "1"]) == 0
    recipe = json.loads((tmp_path / "r" / "run.json").read_text())["experiment"]["recipe"]
    assert (recipe["lr"], recipe["batch_size"], recipe["epochs"]) == (0.001, 10, 1)


def test_no_two_settings_share_a_name_and_every_help_text_has_its_setting():
    from dataclasses import fields

    from pptp.cli import HELP
    from pptp.config import NESTED, Experiment, Parts, Recipe, Source

    declared = [f.name for owner in (Experiment, Source, Parts, Recipe) for f in fields(owner) if f.name not in NESTED]
    assert sorted(declared) == sorted(flat_fields()) and set(HELP) <= set(declared)


def test_report_does_not_show_an_evaluation_of_other_weights(copy_of_run):
    words = [
        "retrain",
        str(copy_of_run),
        "--defense",
        "relaxloss",
        "--set",
        "alpha=0.3",
        "--cut",
        "layer3",
        "--epochs",
        "4",
        "--fresh",
        "--no-control",
    ]
    assert main(words) == 0 and main(["report", str(copy_of_run)]) == 0
    facts = json.loads((copy_of_run / "report.json").read_text())
    assert "relaxloss-layer3" not in facts["evaluations"] and "plain-layer3" in facts["evaluations"]
    assert "Not evaluated since they were last trained, and so not shown: relaxloss-layer3" in facts["caveats"][0]


def test_edited_attack_is_run_again(copy_of_run, tmp_path):
    command = [str(Path(sys.executable).with_name("pptp")), "evaluate", str(copy_of_run), "--attack", "mine:score"]
    shown = []
    for sign in ("", "-"):
        (tmp_path / "mine.py").write_text(f"def score(known, query):\n    return {sign}query.logits.amax(1).double()\n")
        shown.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)
    assert shown[0] != shown[1]


def test_defense_that_returns_nothing_is_kept(copy_of_run, tmp_path, monkeypatch):
    (tmp_path / "own_silent.py").write_text(
        "from dataclasses import dataclass\nimport pptp\n@dataclass(frozen=True)\nclass Silent(pptp.Defense):\n    def train(self, *a, **k): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["retrain", str(copy_of_run), "--defense", "own_silent:Silent", "--cut", "head", "--no-control"]
    assert main(words) == 0 and main(["evaluate", str(copy_of_run)]) == 0 and main(["report", str(copy_of_run)]) == 0


def test_same_settings_in_other_words_are_the_same(copy_of_run, capsys):
    words = [
        "retrain",
        str(copy_of_run),
        "--defense",
        "relaxloss",
        "--set",
        "upper=1",
        "--set",
        "alpha=1",
        "--cut",
        "layer3",
        "--epochs",
        "4",
    ]
    assert main(words) == 0 and "already there" in capsys.readouterr().out


def test_headline_compares_with_the_control(run):
    headline = json.loads((run / "report.json").read_text())["headline"]
    assert any(line.startswith("relaxloss-layer3") and "against the control plain-layer3" in line for line in headline)


def test_run_works_from_another_folder(tmp_path, monkeypatch):
    from test_data import write_folder

    write_folder(tmp_path / "images", splits=(".",), classes=("a", "b"), each=20)
    monkeypatch.chdir(tmp_path)
    sizes = "--members 20 --reference 0 --nonmembers 8 --test 8 --img-size 16 --epochs 1 -b 10 --model test_resnet --no-augment".split()
    assert main(["train", str(tmp_path / "r"), "--data", "images", *sizes]) == 0
    monkeypatch.chdir("/")
    assert main(["evaluate", str(tmp_path / "r")]) == 0


def test_report_survives_models_evaluated_with_different_attacks(copy_of_run):
    assert main(["evaluate", str(copy_of_run), "--attack", "entropy"]) == 0
    target = copy_of_run / "evaluate/undefended/evaluation.json"
    found = json.loads(target.read_text())
    found["attacks"] = {"other": found["attacks"]["entropy"]}
    found["strongest"]["attack"] = "other"
    target.write_text(json.dumps(found))
    scores = target.with_name("scores.npz")
    with np.load(scores) as saved:
        arrays = {name.replace("entropy", "other"): saved[name] for name in saved.files}
    np.savez(scores, **arrays)
    assert main(["report", str(copy_of_run), "--no-images"]) == 0
    assert "<img" not in (copy_of_run / "report.html").read_text()


def test_plug_ins_are_found_in_the_current_folder(copy_of_run, tmp_path):
    """As a user starts it: the installed command, from the folder of their own file."""
    (tmp_path / "mine.py").write_text("def half(known, query):\n    return query.logits[:, 0].double() * 0 + 0.5\n")
    command = [str(Path(sys.executable).with_name("pptp")), "evaluate", str(copy_of_run), "--attack", "mine:half"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0.500" in done.stdout


@pytest.mark.parametrize(
    "text, says",
    [
        ("epochs: 1.9", "epochs is 1.9"),
        ("lr: fast", "lr is 'fast'"),
        ("augment: 3", "augment is 3"),
        ("- a", "must be a list of"),
    ],
)
def test_config_values_of_the_wrong_kind(text, says, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text)
    assert says in fails(capsys, "train", tmp_path / "r", "--config", tmp_path / "c.yaml")


def test_yaml_no_means_the_word(tmp_path):
    from pptp.cli import parser, settings_of

    (tmp_path / "c.yaml").write_text("amp: no\n")
    assert settings_of(parser().parse_args(["train", "r", "--config", str(tmp_path / "c.yaml")]))["amp"] == "no"


def test_stale_evaluation_is_made_again(copy_of_run):
    target = copy_of_run / "evaluate/relaxloss-layer3/evaluation.json"
    before = json.loads(target.read_text())["key"]["weights"]
    assert (
        main(
            [
                "retrain",
                str(copy_of_run),
                "--defense",
                "relaxloss",
                "--set",
                "alpha=0.3",
                "--cut",
                "layer3",
                "--epochs",
                "4",
                "--fresh",
            ]
        )
        == 0
    )
    assert main(["evaluate", str(copy_of_run)]) == 0
    assert json.loads(target.read_text())["key"]["weights"] != before


def test_help_does_not_wait_for_torch():
    code = "import sys; from pptp.cli import parser; parser().format_help(); sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
