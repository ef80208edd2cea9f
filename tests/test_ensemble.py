"""Reference models: balanced, resumable, keyed by all that made them, and repeating the whole procedure of the target."""

import json
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import pptp
from pptp import ensemble
from pptp.cli import main
from pptp.ensemble import Job, half_mask, load_references, ready_jobs, references_for, train_reference
from pptp.runs import Run, read_json

SMALL = [
    "--model", "test_resnet", "--data", "digits", "--limit-classes", "4", "--limit-per-class", "60", "--members", "80", "--reference", "20",
    "--nonmembers", "80", "--test", "40", "--epochs", "4", "-b", "20", "--opt", "adamw", "--lr", "0.003", "--no-augment",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("ensemble") / "r"
    assert main(["train", str(path), *SMALL]) == 0
    assert (
        main(
            [
                "retrain",
                str(path),
                "--defense",
                "relaxloss",
                "--set",
                "alpha=0.5",
                "--cut",
                "layer3",
                "--name",
                "r",
                "--no-control",
            ]
        )
        == 0
    )
    assert main(["ensemble", str(path), "--models", "4", "--queries", "1", "--record-epochs", "2,4"]) == 0
    return path


def test_every_sample_is_in_exactly_half_of_the_models_whatever_their_number():
    for models in (2, 4, 16):
        masks = np.stack([half_mask(i, 101, seed=3) for i in range(models)])
        assert (masks.sum(0) == models // 2).all() and set(masks.sum(1)) == {50, 51}
    assert not np.array_equal(half_mask(0, 101, 3), half_mask(2, 101, 3))


def test_outputs_of_all_samples_are_recorded(run):
    opened = Run.open(run)
    found = load_references(opened, "undefended")
    n = len(opened.splits.pool)
    assert (
        found.logits.shape == (4, n, 4)
        and found.augmented.shape == (4, 1, n, 4)
        and "4 reference models" in found.source
    )
    attacked = ensemble.attacked_ids(opened)
    assert (found.members[:, attacked].sum(0) == 2).all() and found.members.sum() == 2 * len(attacked)
    job = ready_jobs(opened, "undefended")[0]
    with np.load(job.folder(opened) / "outputs.npz") as last, np.load(job.folder(opened) / "outputs_4.npz") as recorded:
        assert np.allclose(last["logits"], recorded["logits"], atol=1e-5)
    assert (job.folder(opened) / "outputs_2.npz").exists() and not list(job.folder(opened).glob("*.pt"))
    trained = found.members[0]
    right = found.logits[0].argmax(1) == torch.as_tensor(opened.splits.pool.labels)
    assert right[trained].float().mean() > right[attacked][~trained[attacked]].float().mean()


def test_nothing_is_trained_twice_and_more_can_be_added(run, tmp_path, capsys):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    opened = Run.open(copy)
    stamps = {
        job.index: (job.folder(opened) / "outputs.npz").stat().st_mtime_ns for job in ready_jobs(opened, "undefended")
    }
    assert main(["ensemble", str(copy), "--models", "6", "--queries", "1", "--record-epochs", "2,4"]) == 0
    assert "4 of 6 reference models are there, 2 to train" in capsys.readouterr().out
    after = {
        job.index: (job.folder(opened) / "outputs.npz").stat().st_mtime_ns for job in ready_jobs(opened, "undefended")
    }
    assert len(after) == 6 and all(after[index] == stamp for index, stamp in stamps.items())


def test_the_key_tells_apart_what_differs_and_not_where_it_is(run, tmp_path):
    opened, job = Run.open(run), Job(str(run), "r", 0)
    keys = {
        replace(job, **change).key(opened)
        for change in (
            {},
            {"index": 1},
            {"seed": 1},
            {"queries": 2},
            {"epochs": (1,)},
            {"own_cut": True},
            {"procedure": "undefended"},
        )
    }
    assert len(keys) == 7
    shutil.copytree(run, tmp_path / "elsewhere")
    assert Job(str(tmp_path / "elsewhere"), "r", 0).key(Run.open(tmp_path / "elsewhere")) == job.key(opened)


def test_a_killed_job_goes_on_to_the_same_outputs(run, tmp_path, monkeypatch):
    job = asdict(Job(str(run), "r", 1))
    whole = train_reference(job, tmp_path / "whole")
    shutil.rmtree(Job(**job).shared(Run.open(run)))
    real = pptp.checkpoint.Checkpoint.write
    calls = []

    def dies(self, history):
        real(self, history)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(pptp.checkpoint.Checkpoint, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        train_reference(job, tmp_path / "killed")
    monkeypatch.undo()
    assert not (tmp_path / "killed/outputs.npz").exists()
    again = train_reference(job, tmp_path / "killed")
    with np.load(whole) as a, np.load(again) as b:
        assert np.array_equal(a["logits"], b["logits"]) and np.array_equal(a["members"], b["members"])


def test_the_adaptive_attacker_repeats_the_whole_procedure(run, tmp_path):
    """A trunk of its own, trained on its own half, and the target's defense on top."""
    opened = Run.open(run)
    target = train_reference(asdict(Job(str(run), "r", 0, own_cut=True)), tmp_path / "own")
    assert read_json(tmp_path / "own/job.json", "")["cut"]
    plan = Job(str(run), "r", 0).plan(opened)
    assert plan["defense"] == "relaxloss" and "alpha=0.5" in plan["set"] and plan["cut"] == "layer3"
    with np.load(target) as adaptive:
        plain = load_references(opened, "undefended")
        assert not np.allclose(adaptive["logits"], plain.logits[0], atol=1e-3)
        assert np.array_equal(adaptive["members"], plain.members[0]), "the same half, whatever the procedure"


def test_procedures_share_the_undefended_models_behind_them(run, tmp_path, monkeypatch):
    """A second procedure trains its own part only, and comes to what it would have come to alone."""
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "ensembles")
    job = asdict(Job(str(copy), "r", 0))
    with np.load(train_reference(job, tmp_path / "alone")) as found:
        alone = found["logits"]
    monkeypatch.setattr("pptp.procedures.train_base", lambda *_: pytest.fail("the base was trained again"))
    with np.load(train_reference(job, tmp_path / "after")) as found:
        assert np.array_equal(found["logits"], alone)
    with np.load(train_reference(asdict(Job(str(copy), "undefended", 0)), tmp_path / "base")) as found:
        assert np.allclose(found["logits"], load_references(Run.open(run), "undefended").logits[0], atol=1e-4)


def test_processes_train_the_same_models(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "ensembles")
    arguments = ["ensemble", str(copy), "--models", "2", "--queries", "1", "--record-epochs", "2,4"]
    assert main([*arguments, "--only", "1"]) == 0
    assert main([*arguments, "--processes", "2"]) == 0
    one, two = (load_references(Run.open(where), "undefended") for where in (run, copy))
    assert torch.allclose(one.logits[:2], two.logits, atol=1e-4)


def test_evaluation_takes_the_best_references_there_are(run, tmp_path, capsys):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    assert main(["evaluate", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert "undefended: attacked with 4 reference models trained without a defense" in shown
    assert (
        "r: attacked with 4 reference models trained without a defense" in shown
        and "an attacker who knows it may find more" in shown
    )
    found = json.loads((copy / "evaluate/undefended/evaluation.json").read_text())
    assert {"lira", "rmia", "shadow_network", "attack_r"} <= set(found["attacks"]) and found["strongest"][
        "corrected_for"
    ] == len(found["attacks"])
    assert main(["ensemble", str(copy), "--models", "2", "--procedure", "r"]) == 0
    assert main(["evaluate", str(copy), "--attack", "all", "--query-budget", "40"]) == 0
    shown = capsys.readouterr().out
    assert "r: attacked with 2 reference models trained like r, each with a trunk of its own" in shown
    found = json.loads((copy / "evaluate/r/evaluation.json").read_text())
    assert {
        "gradient_norm/layer4",
        "gradient_norm/input",
        "feature_probe/layer2",
        "boundary_distance",
        "agreement",
    } <= set(found["attacks"])
    assert main(["report", str(copy)]) == 0
    assert "trained like r" in (copy / "report.html").read_text()


def test_references_from_scratch_have_no_trunk_to_speak_of(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    options = ["--defense", "relaxloss", "--set", "alpha=0.5", "--cut", "scratch", "--name", "whole", "--no-control"]
    assert main(["retrain", str(copy), *options]) == 0
    assert main(["ensemble", str(copy), "--models", "2", "--procedure", "whole"]) == 0
    source = load_references(Run.open(copy), "whole").source
    assert "trained like whole, from scratch as it was" in source and "trunk" not in source


def test_without_an_ensemble_the_half_model_serves_where_it_is_out(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "ensembles")
    opened = Run.open(copy)
    found = references_for(opened, "undefended")
    assert found.logits.shape[0] == 1 and set(np.flatnonzero(found.members[0])) == set(opened.splits.h1.indices)


def test_the_half_model_is_asked_once_for_all_models(run, tmp_path, monkeypatch):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "ensembles")
    asked, real = [], pptp.runs.collect
    monkeypatch.setattr("pptp.runs.collect", lambda *a, **k: asked.append(1) or real(*a, **k))
    assert main(["evaluate", str(copy)]) == 0
    assert len(Run.open(copy).trained_names()) > 1 and len(asked) == 1


def test_an_ensemble_of_another_retraining_is_not_used(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    assert main(["ensemble", str(copy), "--models", "2", "--procedure", "r"]) == 0
    assert load_references(Run.open(copy), "r") is not None
    again = [
        "--defense",
        "relaxloss",
        "--set",
        "alpha=0.7",
        "--cut",
        "layer3",
        "--name",
        "r",
        "--no-control",
        "--fresh",
    ]
    assert main(["retrain", str(copy), *again]) == 0
    assert load_references(Run.open(copy), "r") is None


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--models", "3"], "models is 3: it must be even"), (["--procedure", "other"], "no model called 'other'"), (["--only", "16"], "only is 16"),
        (["--record-epochs", "9"], "epochs 1 to 4"), (["--record-epochs", "x"], "give epochs such as"), (["--processes", "0"], "processes is 0: it must be at least 1"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(run, flags, says, capsys):
    assert main(["ensemble", str(run), *flags]) == 2
    assert says in capsys.readouterr().err


def test_another_ensemble_or_other_slices_are_noticed(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)

    def scores(*more):
        assert main(["evaluate", str(copy), "--attack", "lira", "--attack", "confidence", *more]) == 0
        with np.load(copy / "evaluate/undefended/scores.npz") as saved:
            return saved["score/lira"]

    def slices(*ids):
        np.savez(tmp_path / "s.npz", mine=np.array(ids))
        scores("--slices", str(tmp_path / "s.npz"))
        return json.loads((copy / "evaluate/undefended/evaluation.json").read_text())["exposure"]["slices"][0]

    first = scores()
    ids = ensemble.attacked_ids(Run.open(copy))
    assert slices(*ids[:40]) != slices(*ids[40:80])
    assert main(["ensemble", str(copy), "--models", "4", "--ensemble-seed", "5"]) == 0
    assert not np.array_equal(first, scores())
    assert main(["ensemble", str(copy), "--models", "2", "--ensemble-seed", "6"]) == 0
    assert len(ready_jobs(Run.open(copy), "undefended")) == 4, "a smaller one does not take the place of a larger one"


def test_what_a_defense_does_to_outputs_is_part_of_the_model(run, tmp_path):
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    digests = []
    for modify in ("true", "false"):
        settings = [
            "--defense",
            "hamp",
            "--set",
            f"modify_outputs={modify}",
            "--cut",
            "layer4",
            "--name",
            "h",
            "--no-control",
            "--fresh",
            "--epochs",
            "1",
        ]
        assert main(["retrain", str(copy), *settings]) == 0
        digests.append(Run.open(copy).model_digest("h"))
        assert main(["evaluate", str(copy), "--attack", "white_box", "--attack", "calibration"]) == 0
    assert digests[0] != digests[1]


def test_reference_models_start_where_the_target_started(run, tmp_path):
    start = run / "full/init.safetensors"
    assert (
        main(
            [
                "train",
                str(tmp_path / "r"),
                *SMALL,
                "--epochs",
                "1",
                "--lr",
                "1e-12",
                "--opt",
                "momentum",
                "--initial-checkpoint",
                str(start),
            ]
        )
        == 0
    )
    job = Job(str(tmp_path / "r"), "undefended", 0)
    with np.load(train_reference(asdict(job), tmp_path / "ref")) as said:
        opened = Run.open(tmp_path / "r")
        model = opened.fresh_model()
        pptp.models.load_weights(model, pptp.models.read_weights(start), start)
        pptp.fit(
            model,
            pptp.data.Part(opened.splits.pool, np.flatnonzero(said["members"]), "mine"),
            replace(opened.experiment.recipe, seed=opened.experiment.recipe.seed + 7919),
        )
        assert np.allclose(said["logits"], pptp.collect(model, opened.splits.pool).logits, atol=1e-4)


def test_a_reference_model_is_retrained_on_as_many_kept_views_as_its_target(
    model, splits, quick, tmp_path, monkeypatch
):
    from pptp import procedures
    from pptp.config import Experiment

    said, real = [], procedures.retrain
    monkeypatch.setattr(procedures, "retrain", lambda *a, **k: said.append(real(*a, **k)["cache"]))
    augmented = replace(quick, augment=True)
    parts = pptp.stages(model, (3, 32, 32))
    for views in (0, 2):
        plan = procedures.Setting("plain", (), "layer4", "init", augmented, views).plan()
        procedures.train_like(
            Experiment(recipe=quick), plan, model, parts, splits.for_defense(), tmp_path / str(views), seed=1
        )
    assert "every epoch sees fresh views" in said[0] and said[1].endswith("in memory")
