"""`pptp monitor` and `pptp train --monitor`, as a user types them, on a small real run."""

import json
import shutil

import numpy as np
import pytest

from pptp.cli import main
from pptp.runs import Run
from pptp.studies import load

SMALL = [
    "--model", "test_resnet", "--data", "digits", "--members", "120", "--reference", "20", "--nonmembers", "120", "--test", "60", "--epochs", "6",
    "-b", "20", "--opt", "adamw", "--lr", "0.003", "--no-augment", "--label-noise", "0.1", "--keep-epochs", "2",
]  # fmt: skip
MONITORS = ["--monitor", "curvature", "--monitor", "dynamics", "--monitor", "tokens", "--monitor", "batchnorm"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("studies") / "r")
    for command in (
        ["train", path, *SMALL, *MONITORS, "--monitor-every", "3", "--monitor-samples", "40"],
        ["retrain", path, "--defense", "plain", "--cut", "layer4", "--epochs", "2", "--name", "again"],
        ["ensemble", path, "--models", "8", "--record-epochs", "1,2,6"],
        ["monitor", "dynamics", path],
        ["monitor", "curvature", path, "--samples", "60"],
        ["monitor", "tokens", path, "--batches", "20", "--token-batch", "2", "--dlg-steps", "1", "--extractor", "autoencoder", "--critic-iterations", "5"],
        ["monitor", "batchnorm", path, "--variants", "bn,gn", "--epochs", "14", "--canaries", "5"],
        ["report", path],
    ):  # fmt: skip
        assert main(command) == 0, command
    return Run.open(path)


def section(run, name):
    return json.loads((run.path / "monitors" / f"{name}.json").read_text())


def test_what_monitors_saw_is_beside_the_model(run):
    folder = run.folder("undefended")
    with np.load(folder / "curvature.npz") as saved:
        assert len(saved["ids"]) == 40 and {"epoch_3", "epoch_6"} <= set(saved)
    with np.load(folder / "dynamics.npz") as saved:
        assert saved["epochs"].tolist() == [3, 6] and saved["loss"].shape == (2, 40)
    for name in ("tokens", "batchnorm"):
        assert (folder / f"{name}.npz").exists()
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert {"curvature", "watched_loss", "token_auc", "influence_ratio", "monitor_seconds"} <= set(rows[2])


def test_monitors_change_nothing_in_the_weights_and_cannot_come_late(run, tmp_path, capsys):
    bare = str(tmp_path / "bare")
    assert main(["train", bare, *SMALL]) == 0
    assert Run.open(bare).model_digest("undefended") == run.model_digest("undefended")
    assert main(["train", bare, *SMALL, "--monitor", "curvature"]) == 2
    assert "is trained already" in capsys.readouterr().err
    seen = ["--monitor-every", "3", "--monitor-samples", "40"]
    assert main(["train", str(run.path), *SMALL, *MONITORS, *seen]) == 0  # done, and watched: nothing to refuse


def test_dynamics_has_a_plane_for_each_recorded_epoch_and_a_list_to_act_on(run):
    data = section(run, "dynamics")["data"]
    assert data["epochs"] == [1, 2, 6] and np.array(data["cells"]).sum((1, 2)).tolist() == [240] * 3
    assert sum(data["regions"].values()) == 240
    assert {"cumulative_loss", "forgetting", "epistemic"} <= set(data["difficulty"])
    by_loss = [row for row in data["warnings"] if row["by"] == "cumulative_loss"]
    assert by_loss and set(by_loss[-1]["flagged"]) <= set(run.splits.members.indices.tolist())


def test_curvature_is_compared_over_models_and_with_memorization(run):
    data = section(run, "curvature")["data"]
    assert set(data["models"]) == {"undefended", "again"}
    mine = data["models"]["undefended"]
    assert mine["rho"]["low"] <= mine["rho"]["value"] <= mine["rho"]["high"] and mine["memorization"] is not None
    assert data["models"]["again"]["rho"] is None  # no reference models of its own
    assert section(run, "curvature")["images"]


def test_tokens_compare_the_whole_model_with_what_a_suffix_would_share(run):
    rows = section(run, "tokens")["data"]["rows"]
    assert [(r["model"], r["when"], r["shared"]) for r in rows] == [
        ("undefended", "start", "whole"), ("undefended", "epoch 2", "whole"), ("undefended", "end", "whole"),
        ("again", "end", "whole"), ("again", "end", "suffix"),
    ]  # fmt: skip
    assert all(name.startswith("layer4") for name in rows[-1]["layers"])
    assert all(np.isfinite(row["rebuilt"][0]["psnr"]) for row in rows)


def test_the_norm_audit_gives_a_verdict_and_keeps_its_models(run, capsys):
    found = section(run, "batchnorm")
    assert set(found["data"]["variants"]) == {"bn, as gn", "gn"} and "GroupNorm" in found["lines"][0]
    assert {"all", "layer4"} <= set(found["data"]["stages"])
    before = (run.path / "monitors" / "batchnorm").stat().st_mtime_ns
    assert (
        main(["monitor", "batchnorm", str(run.path), "--variants", "bn,gn", "--epochs", "14", "--canaries", "5"]) == 0
    )
    assert (run.path / "monitors" / "batchnorm").stat().st_mtime_ns == before  # nothing was trained again


def test_the_report_shows_every_section_with_a_figure(run):
    page = (run.path / "report.html").read_text()
    for title in (
        "When it memorises",
        "How sharply it bends",
        "What gradients tell",
        "What BatchNorm adds",
        "While it was trained",
    ):
        assert title in page
    assert page.count("<svg") == 5
    assert main(["report", str(run.path), "--no-images"]) == 0
    assert "rebuilt from gradients" not in (run.path / "report.html").read_text()


def test_a_section_of_other_weights_is_not_shown(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run.path, copy)
    assert (
        main(
            [
                "retrain",
                str(copy),
                "--defense",
                "plain",
                "--cut",
                "layer3",
                "--epochs",
                "2",
                "--name",
                "again",
                "--fresh",
            ]
        )
        == 0
    )
    current, stale = load(Run.open(copy))
    assert "curvature" in stale and "dynamics" in current
    assert main(["report", str(copy)]) == 0
    page = (copy / "report.html").read_text()
    assert "How sharply it bends" not in page and "pptp monitor curvature" in page


def test_factors_are_compared_by_one_command(run, capsys):
    assert main(["monitor", "factors", str(run.path), "--vary", "sam_rho=0.05", "--checkpoints", "2"]) == 0
    assert "sam_rho=0.05: samples end" in capsys.readouterr().out
    rows = section(run, "factors")["data"]["rows"]
    assert (
        set(rows) == {"as it is", "sam_rho=0.05"} and rows["as it is"]["gap"]["low"] <= rows["as it is"]["gap"]["high"]
    )


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["monitor", "dynamics", "RUN", "--fpr", "2"], "fpr is 2.0: it must lie between 0 and 1"),
        (["monitor", "dynamics", "RUN", "--procedure", "again"], "pptp ensemble"),
        (["monitor", "curvature", "RUN", "--estimator", "x"], "must be one of hutchinson, fd_norm, fisher"),
        (["monitor", "tokens", "RUN", "--batches", "3"], "at least 20 batches"),
        (["monitor", "batchnorm", "RUN", "--variants", "gn"], "give bn and at least one other"),
        (["monitor", "batchnorm", "RUN", "--canaries", "1"], "must lie between 5 and half"),
        (["monitor", "factors", "RUN", "--vary", "sam_rho"], "give SETTING=VALUE"),
        (["monitor", "factors", "RUN", "--vary", "colour=3"], "no setting called 'colour'"),
        (["monitor", "factors", "RUN", "--vary", "sam_rho=0.1", "--models", "3"], "even number of at least 8"),
        (["train", "NEW", *SMALL, "--monitor", "dynamics", "--monitor-every", "7"], "monitors would never look"),
        (["train", "NEW", *SMALL, "--monitor", "curvature", "--monitor-every", "0"], "at least 1 epoch"),
        (["monitor", "dynamics", "NOWHERE"], "pptp train"),
    ],
)
def test_bad_input_gets_one_sentence(run, tmp_path, capsys, command, sentence):
    places = {"RUN": str(run.path), "NEW": str(tmp_path / "new"), "NOWHERE": str(tmp_path / "nowhere")}
    assert main([places.get(word, word) for word in command]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert sentence in said[-1], said
