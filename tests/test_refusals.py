"""Bad input: one sentence, exit code 2, nothing lost."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import SMALL, fails

import pptp
from pptp.cli import main


@pytest.mark.parametrize(
    "extra, says",
    [
        (["--model", "resnet81"], "timm has no model called 'resnet81': did you mean"),
        (["--data", "digitz", "--pixel-noise", "0"], "no data called 'digitz'"),
        (["--members", "5000"], "there are 1797"),
        (["--members", "11"], "has one member"),
        (["--opt", "sdg"], "did you mean sgd"),
        (["--lr", "0"], "lr is 0.0"),
        (["--keep-epochs", "1,99"], "give epochs between 1 and 12"),
        (["--model-kwargs", "colour=red"], "colour"),
        (["--full-checkpoint", "missing.pt"], "give both"),
        (["--seed", "-1"], "seed is -1"),
        (["--procedure", "dpsgd"], "dpsgd changes the model"),
        (["--procedure", "cskdd"], "did you mean cskd"),
        (["--procedure", "xyz"], "no defense called 'xyz': it is one of advreg,"),
        (["--data", "hfds/cifar10", "--pixel-noise", "0"], "needs the package datasets, of the extra hfds"),
        (["--sam-rho", "-1"], "sam_rho is -1"),
        (["--img-size", "33", "--model", "test_vit"], "cannot take images of 33 px"),
        (["--val-split", "val"], "digits has no splits"),
        (["--splits-file", "missing.npz"], "missing.npz: it must be an .npz with sample ids, or file names"),
    ],
)
def test_bad_training_input(extra, says, tmp_path, capsys):
    assert says in fails(capsys, "train", tmp_path / "r", *SMALL, *extra)
    assert not list((tmp_path).rglob("*.safetensors"))


def test_unknown_config_key(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("learning_rate: 0.1\n")
    assert "no setting called 'learning_rate'" in fails(
        capsys, "train", tmp_path / "r", "--config", tmp_path / "c.yaml"
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (["--defense", "relaxlos"], "no defense called 'relaxlos': did you mean relaxloss"),
        (["--defense", "relaxloss", "--set", "alpha=2.4"], "ln(classes) = 2.303"),
        (["--defense", "relaxloss", "--set", "alfa=1"], "no setting 'alfa': it has alpha"),
        (["--defense", "relaxloss", "--set", "alpha=big"], "must be a number"),
        (["--defense", "relaxloss", "--set", "alpha"], "write field=value"),
        (["--defense", "relaxloss", "--cut", "layer9"], "no stage or block called 'layer9'"),
        (["--defense", "relaxloss", "--rewind", "epoch=2"], "train with --keep-epochs 2"),
        (["--defense", "relaxloss", "--rewind", "start"], "rewind is 'start'"),
        (["--defense", "relaxloss", "--epochs", "3"], "make it even"),
        (["--defense", "relaxloss", "--set", "alpha=0.5", "--cut", "layer3", "--epochs", "4"], "other settings"),
        (["--defense", "no.module:Thing"], "cannot load 'no.module:Thing'"),
        (
            ["--defense", "mixup", "--defense", "ccl", "--set", "hamp.gamma=1"],
            "is for 'hamp', which is not among mixup, ccl",
        ),
        (["--defense", "mixup", "--defense", "ccl", "--name", "x"], "name goes with one defense"),
    ],
)
def test_bad_retraining_input(words, says, copy_of_run, capsys):
    before = sorted(copy_of_run.rglob("*"))
    assert says in fails(capsys, "retrain", copy_of_run, *words)
    assert sorted(copy_of_run.rglob("*")) == before


def test_missing_predecessor_is_answered_with_its_command(tmp_path, capsys):
    assert f'run "pptp train {tmp_path}' in fails(capsys, "localize", tmp_path)
    assert main(["train", str(tmp_path / "r"), *SMALL, "--epochs", "1"]) == 0
    assert f'run "pptp localize {tmp_path / "r"}" first' in fails(
        capsys, "retrain", tmp_path / "r", "--defense", "plain"
    )


def test_run_of_another_configuration_is_refused(copy_of_run, capsys):
    assert "lr was 0.003, now 0.5" in fails(capsys, "train", copy_of_run, *SMALL, "--keep-epochs", "1,3", "--lr", "0.5")


def test_impossible_folder_gets_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in fails(capsys, "train", tmp_path / "file" / "run", *SMALL)


def test_no_probe_samples_are_refused(copy_of_run, capsys):
    assert "probe_samples is 0" in fails(capsys, "localize", copy_of_run, "--probe-samples", "0")


@pytest.mark.parametrize("words, says", [
    (["train", "r", "--epochs", "four"], "pptp train: argument --epochs: invalid int value: 'four'; pptp train --help shows what it takes"),
    (["frontier", "r", "--defense", "plain", "--fresh"], "pptp frontier: there is no --fresh here; pptp frontier --help shows what it takes"),
    (["retrain", "r"], "pptp retrain: the following arguments are required: --defense; pptp retrain --help shows what it takes"),
])  # fmt: skip
def test_a_mistyped_command_is_answered_in_one_line(words, says, capsys):
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    assert (code, capsys.readouterr().err) == (2, f"{says}\n")


@pytest.mark.parametrize("rule, says", [
    ("relaxlos:auc>0.6", "speaks of 'relaxlos', which is neither a model"),
    ("undefended:lirra.auc>0.6", "'lirra', which is not among"),
    ("lirra.auc>0.6", "speaks of 'lirra', which is neither a model"),
])  # fmt: skip
def test_a_gate_for_what_is_not_there_is_refused(rule, says, copy_of_run, capsys):
    shutil.rmtree(copy_of_run / "evaluate", ignore_errors=True)
    assert says in fails(capsys, "evaluate", copy_of_run, "--attack", "confidence", "--fail-if", rule)
    assert rule.startswith("undefended") or not (copy_of_run / "evaluate").exists(), "before anything was attacked"


def test_attacks_that_need_the_model_are_not_for_outputs(tmp_path, capsys):
    outputs = np.random.default_rng(0)
    np.savez(tmp_path / "o.npz", logits=outputs.normal(size=(40, 2)), labels=np.arange(40) % 2, members=np.arange(40) < 20)
    assert "curvature needs the model itself" in fails(capsys, "attack", "--logits", tmp_path / "o.npz", "--attack", "curvature")
    assert main(["attack", "--logits", str(tmp_path / "o.npz"), "--attack", "confidence"]) == 0
    assert "reference_members" in capsys.readouterr().out, "what would help, where there is no run"


def test_folder_with_other_files_is_not_touched(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("dear")
    assert "not a run of pptp" in fails(capsys, "train", tmp_path, *SMALL)
    assert "not a run of pptp" in fails(capsys, "train", tmp_path, *SMALL, "--fresh")
    assert (tmp_path / "thesis.txt").read_text() == "dear"


def test_models_with_different_initial_weights_are_refused(copy_of_run, capsys):
    other = pptp.create("test_resnet", 10, 32, seed=99)
    from pptp.models import write_weights

    write_weights(other, copy_of_run / "half/init.safetensors")
    (copy_of_run / "risk.json").unlink()
    assert "do not start from the same initial weights" in fails(capsys, "localize", copy_of_run)


def test_truncated_weights_are_refused(copy_of_run, capsys):
    path = copy_of_run / "full/last.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    (copy_of_run / "risk.json").unlink()
    assert "damaged" in fails(capsys, "localize", copy_of_run)


def test_changed_data_is_refused(copy_of_run, capsys):
    record = json.loads((copy_of_run / "run.json").read_text())
    record["data"] = "0" * 16
    (copy_of_run / "run.json").write_text(json.dumps(record))
    assert "is not what" in fails(capsys, "evaluate", copy_of_run, "--fresh")


def test_full_disk_keeps_what_is_there(copy_of_run):
    """A real limit on what a process may write, so that the writers fail in their own way."""
    words = ["retrain", str(copy_of_run), "--defense", "plain", "--cut", "head", "--epochs", "2"]
    code = "import resource, sys; from pptp.cli import main; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "the disk is full" in done.stderr.splitlines()[-1], done.stderr
    assert not list(copy_of_run.rglob("*.tmp")) and not (copy_of_run / "retrain/plain-head/last.safetensors").exists()
    assert main(words) == 0
    assert (copy_of_run / "retrain/plain-head/last.safetensors").exists()


@pytest.mark.parametrize("words", [
    ["train", *SMALL, "--model", "resnet81", "--fresh"],
    ["retrain", "--defense", "relaxloss", "--set", "alpha=99", "--cut", "layer3", "--fresh"],
    ["retrain", "--defense", "relaxloss", "--cut", "layer3", "--epochs", "3", "--fresh"],
])  # fmt: skip
def test_fresh_deletes_nothing_before_the_new_settings_are_accepted(words, copy_of_run, capsys):
    before = sorted(copy_of_run.rglob("*"))
    fails(capsys, words[0], copy_of_run, *words[1:])
    assert sorted(copy_of_run.rglob("*")) == before


@pytest.mark.parametrize("name", ["undefended", "half", ".", "../..", "a/b", "-x"])
def test_name_cannot_reach_other_folders(name, copy_of_run, capsys):
    before = {p: p.stat().st_mtime_ns for p in copy_of_run.rglob("*")}
    assert "name is" in fails(
        capsys, "retrain", copy_of_run, "--defense", "plain", "--cut", "head", f"--name={name}", "--fresh"
    )
    assert before == {p: p.stat().st_mtime_ns for p in copy_of_run.rglob("*")}


MISTAKES = {
    "NoDataclass": ("class NoDataclass(pptp.Defense):\n    def train(self, *a, **k): return {}", "is not a dataclass"),
    "Function": ("def Function(): pass", "is not a defense"),
    "Broken": ("def Broken(:", "cannot load"),
    "Cheat": (
        "@dataclass(frozen=True)\nclass Cheat(pptp.Defense):\n    def train(self, m, data, *a, **k): return len(data.test)",
        "a defense asked for 'test'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_own_defenses_get_a_sentence(name, copy_of_run, tmp_path, capsys, monkeypatch):
    code, says = MISTAKES[name]
    (tmp_path / f"own_{name}.py").write_text(f"from dataclasses import dataclass\nimport pptp\n{code}\n")
    monkeypatch.chdir(tmp_path)
    assert says in fails(
        capsys,
        "retrain",
        copy_of_run,
        "--defense",
        f"own_{name}:{name}",
        "--cut",
        "head",
        "--epochs",
        "2",
        "--no-control",
    )
