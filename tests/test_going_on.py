"""What a run holds stays right: after a kill between two files, with another device, beside plug-ins of your own."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import SMALL, fails

import pptp
from pptp.cli import main
from pptp.errors import own_file
from pptp.models import weights_digest
from pptp.plugins import convert
from pptp.runs import Run, read_json
from pptp.training import _schedule, make_optimizer

PLUGIN = '''
from dataclasses import dataclass
import torch.nn.functional as F
from pptp import LossDefense

@dataclass(frozen=True)
class Half(LossDefense):
    beta: float | None = None

    def loss(self, step):
        return F.cross_entropy(step.logits, step.targets)

@dataclass(frozen=True)
class Sloppy(Half):
    beta: float = None

@dataclass(frozen=True)
class Needy(LossDefense):
    beta: float

    def loss(self, step):
        return 0

@dataclass(frozen=True)
class Breaking(LossDefense):
    def loss(self, step):
        raise RuntimeError("a mistake of mine")

inst = Half()
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mydef.py").write_text(PLUGIN)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("mydef", "broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mydef:Half", "name is 'half'"),  # whose folder would be that of the half model
        ("mydef:Sloppy", "the setting beta=None, which cannot be read back from text as float"),
        ("mydef:Needy", "needs a value for beta"),
        ("mydef:inst", "must be a class that inherits from pptp.Defense"),
        ("broken:Thing", "cannot load 'broken:Thing' (ZeroDivisionError: division by zero)"),
        ("./mydef.py:Half", "write my_module:Name"),
    ],
)
def test_own_defenses_that_cannot_work_are_refused_before_training(copy_of_run, mine, name, says, capsys):
    before = weights_digest(Run.open(copy_of_run).model("half"))
    assert says in fails(capsys, "retrain", copy_of_run, "--defense", name, "--cut", "auto", "--no-control")
    assert weights_digest(Run.open(copy_of_run).model("half")) == before


def test_a_setting_may_be_missing_and_a_model_outlives_its_defense(copy_of_run, mine, tmp_path, monkeypatch):
    retrain = ["retrain", str(copy_of_run), "--defense", "mydef:Half", "--epochs", "2", "--cut", "layer4", "--no-control"]
    assert main([*retrain, "--name", "none"]) == 0
    assert main([*retrain, "--name", "some", "--set", "beta=0.5"]) == 0
    assert read_json(copy_of_run / "retrain/some/defense.json", "")["set"] == ["beta=0.5"]
    (tmp_path / "mydef.py").unlink()
    monkeypatch.chdir("/")
    monkeypatch.delitem(sys.modules, "mydef")
    assert main(["evaluate", str(copy_of_run), "--attack", "confidence"]) == 0, "it swaps no layers: its weights suffice"


def test_a_mistake_in_an_own_defense_is_not_called_a_bug_of_pptp(copy_of_run, mine, capsys):
    said = fails(capsys, "retrain", copy_of_run, "--defense", "mydef:Breaking", "--cut", "layer4", "--no-control")
    assert "mydef.py, line" in said and "RuntimeError: a mistake of mine" in said and "bug of pptp" not in said


def test_optional_settings_are_numbers():
    assert convert("x", "0.5", float | None) == 0.5 and convert("x", "None", float | None) is None


# --- controls and settings ---------------------------------------------------------------------------


def test_starting_one_defense_over_leaves_the_control_of_another(copy_of_run):
    run = Run.open(copy_of_run)
    before = run.model_digest("plain-layer3")
    words = ["retrain", str(copy_of_run), "--defense", "ccl", "--cut", "layer3", "--epochs", "2", "--fresh"]
    assert main(words) == 0
    assert run.model_digest("plain-layer3") == before and len(list(copy_of_run.glob("retrain/plain-layer3*"))) == 2


def test_a_control_is_the_same_wherever_it_was_trained(copy_of_run):
    words = ["retrain", str(copy_of_run), "--defense", "ccl", "--cut", "layer3", "--epochs", "4", "-j", "1"]
    assert main(words) == 0 and len(list(copy_of_run.glob("retrain/plain-layer3*"))) == 1
    assert main(["evaluate", str(copy_of_run), "--attack", "scores"]) == 0 and main(["report", str(copy_of_run)]) == 0
    headline = json.loads((copy_of_run / "report.json").read_text())["headline"]
    assert any(line.startswith("ccl-layer3") and "against the control plain-layer3" in line for line in headline)


def test_kept_views_are_settings_in_both_directions(copy_of_run, capsys):
    words = ["retrain", copy_of_run, "--defense", "ccl", "--cut", "layer4", "--epochs", "2", "--no-control"]
    assert main([str(w) for w in [*words, "--cache-dtype", "float16"]]) == 0
    assert "cache_dtype was 'float16', now None" in fails(capsys, *words)


def test_what_did_not_get_anywhere_may_be_started_with_other_settings(copy_of_run, capsys):
    words = ["retrain", copy_of_run, "--defense", "ccl", "--cut", "layer4", "--epochs", "2", "--no-control"]
    assert "lower lr" in fails(capsys, *words, "--lr", "1e30")
    assert main([str(w) for w in words]) == 0


def test_a_short_retraining_shortens_the_warm_up(tmp_path):
    assert main(["train", str(tmp_path / "r"), *SMALL, "--epochs", "8", "--warmup-epochs", "5"]) == 0
    assert main(["retrain", str(tmp_path / "r"), "--defense", "plain", "--cut", "layer4"]) == 0
    recipe = read_json(tmp_path / "r/retrain/plain-layer4/defense.json", "")["recipe"]
    assert (recipe["epochs"], recipe["warmup_epochs"]) == (4, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "alpha=0.5", "--set", "alpha=0.9"], "alpha is given twice"),
        (["--opt", "adahessian"], "needs second derivatives"),
        (["--opt", "fusedadam"], "cannot be used here"),
        (["--weight-decay", "nan"], "weight_decay is nan"),
        (["--amp", "fp16"], "fp16 needs a GPU"),
        (["--seed", "99999999999999"], "seed is 99999999999999"),
    ],
)
def test_settings_that_cannot_work_are_refused(copy_of_run, words, says, capsys):
    if says.startswith("fp16") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shown = fails(capsys, "retrain", copy_of_run, "--defense", "relaxloss", "--cut", "layer4", "--no-control", *words)
    assert says in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [("epochs: true", "epochs is True"), ("lr: .inf", "lr is inf"), ("members: .nan", "members is nan"), (b"model: caf\xe9", "not UTF-8")],
)  # fmt: skip
def test_bad_configs_are_refused(text, says, tmp_path, capsys):
    (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert says in fails(capsys, "train", tmp_path / "r", "--model", "test_resnet", "--config", tmp_path / "c.yaml")
    assert not (tmp_path / "r").exists()


def test_every_option_of_the_model_counts(tmp_path, capsys):
    words = ["train", str(tmp_path / "r"), *SMALL, "--epochs", "1"]
    assert main([*words, "--model-kwargs", "zero_init_last=False", "--model-kwargs", "drop_rate=0.1"]) == 0
    assert Run.open(tmp_path / "r").experiment.model_kwargs == {"zero_init_last": False, "drop_rate": 0.1}
    assert "num_classes: that is for pptp to say" in fails(
        capsys, "train", tmp_path / "s", *SMALL, "--model-kwargs", "num_classes=5"
    )


# --- after a kill ------------------------------------------------------------------------------------


def test_a_directory_that_was_left_half_made_can_be_used(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    np.savez(tmp_path / "r" / "splits.npz", h1=[1])
    assert main(["train", str(tmp_path / "r"), *SMALL, "--epochs", "1"]) == 0
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("mine")
    assert "not a run of pptp" in fails(capsys, "train", tmp_path / "s", *SMALL)


def test_a_folder_of_your_own_is_not_taken_for_a_run_that_was_left_half_made(tmp_path, capsys):
    """Whatever its name: starting a run clears what pptp makes."""
    mine = tmp_path / "r" / "full"
    mine.mkdir(parents=True)
    (mine / "weights.pt").write_text("precious")
    assert "not a run of pptp" in fails(capsys, "train", tmp_path / "r", *SMALL)
    assert (mine / "weights.pt").read_text() == "precious"


def test_a_gate_whose_output_nobody_reads_is_not_passed(copy_of_run):
    command = f"{sys.executable} -m pptp evaluate {copy_of_run} --fail-if 'test_accuracy<0.99'"
    piped = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True)
    assert piped.returncode != 0


def test_runs_of_before_are_loaded_with_their_defense(copy_of_run):
    """Records that say nothing of swapped layers may be of a defense that swaps them."""
    words = ["retrain", str(copy_of_run), "--defense", "hamp", "--cut", "layer4", "--epochs", "2", "--no-control"]
    assert main(words) == 0
    record = copy_of_run / "retrain/hamp-layer4/defense.json"
    made = read_json(record, "")
    assert made["swaps_layers"] is True
    record.write_text(json.dumps({k: v for k, v in made.items() if k != "swaps_layers"}))
    assert Run.open(copy_of_run).model("hamp-layer4")._forward_hooks, "its output is modified as before"
    assert main(words) == 0, "and it is there already"


def test_python_itself_is_not_taken_for_a_file_of_yours(monkeypatch):
    monkeypatch.chdir("/")
    with pytest.raises(TypeError) as raised:
        json.dumps(object())
    assert not own_file(raised.value).startswith("encoder")


def test_scores_without_their_evaluation_are_made_again(copy_of_run):
    folder = copy_of_run / "evaluate" / "undefended"
    before = read_json(folder / "evaluation.json", "")["attacks"]
    (folder / "evaluation.json").unlink()  # as a kill between the two files leaves it
    np.savez(folder / "scores.npz", ids=[1])
    assert main(["evaluate", str(copy_of_run)]) == 0
    assert read_json(folder / "evaluation.json", "")["attacks"] == before


def test_damaged_scores_are_named(copy_of_run, capsys):
    (copy_of_run / "evaluate" / "undefended" / "scores.npz").write_bytes(b"PK junk")
    assert "run pptp evaluate" in fails(capsys, "report", copy_of_run)


def test_a_run_goes_on_where_it_is_told_to(tmp_path):
    words = ["train", str(tmp_path / "r"), *SMALL, "--epochs", "1"]
    assert main(words) == 0
    experiment = Run.open(tmp_path / "r").experiment
    moved = replace(experiment, recipe=replace(experiment.recipe, device="cpu", workers=1))
    again = Run.create(tmp_path / "r", moved)
    assert (again.experiment.recipe.device, again.experiment.recipe.workers) == ("cpu", 1)


def test_files_may_be_given_from_where_the_command_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a", *SMALL, "--epochs", "1"]) == 0
    checkpoints = [w for m in ("full", "half") for w in (f"--{m}-checkpoint", f"a/{m}/last.safetensors")]
    words = ["train", "b", *SMALL, *checkpoints, "--initial-checkpoint", "a/full/init.safetensors"]
    words += ["--splits-file", "a/splits.npz"]
    assert main(words) == 0
    monkeypatch.chdir("/")
    assert main(["ensemble", str(tmp_path / "b"), "--models", "2", "--only", "0"]) == 0


# --- schedules and rewinding -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sched", "expected"),
    [
        ("constant", [0.1] * 6),
        ("multistep", [0.1, 0.1, 0.1, 0.01, 0.001, 0.001]),
        ("step", [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]),
        ("poly", [0.1, 0.1 * 5 / 6, 0.1 * 4 / 6, 0.05, 0.1 * 2 / 6, 0.1 / 6]),
    ],
)
def test_schedules_are_what_their_names_say(sched, expected):
    """Drops at a half and three quarters, at thirds, and a straight line."""
    model, recipe = torch.nn.Linear(2, 2), pptp.Recipe(epochs=6, sched=sched, lr=0.1)
    optimizer = make_optimizer(model, recipe)
    schedule, found = _schedule(optimizer, recipe), []
    for epoch in range(6):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step(epoch + 1)
    assert found == pytest.approx(expected, abs=1e-4)


def test_weights_to_rewind_to_must_be_of_this_model_and_of_before(model, splits, quick):
    from defenses import Plain

    initial = pptp.snapshot(model)
    other = pptp.snapshot(pptp.create("test_resnet", classes=5, img_size=32))
    short = {name: tensor for name, tensor in initial.items() if "layer4" not in name}
    for state, says in ((other, "of another model"), (short, "of another model"), (model.state_dict(), "a copy before")):
        with pytest.raises(pptp.UserError, match=says):
            pptp.retrain(model, state, "layer4", Plain(), splits, quick)
        now = model.state_dict()
        assert all(torch.equal(now[name], initial[name]) for name in now), "nothing is half rewound"


def test_what_a_model_must_return_is_said(splits, quick):
    class Answering(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 4)

        def forward(self, x):
            return {"logits": self.head(self.conv(x).mean((2, 3)))}

    for work in (lambda m: pptp.stages(m, (3, 32, 32)), lambda m: pptp.fit(m, splits.members, quick)):
        with pytest.raises(pptp.UserError, match="the model returns a dict: it must return logits"):
            work(Answering())


@pytest.mark.parametrize("bias", [True, False])
def test_a_single_layer_is_a_head(bias):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 4, bias=bias))
    assert [stage.name for stage in pptp.stages(model, (3, 8, 8))] == ["head"]


def test_boundary_distances_depend_on_the_sample_alone(splits):
    from pptp.boundary import LEAST, boundary_distances
    from pptp.data import Part

    model = pptp.create("test_resnet", classes=4, img_size=32, seed=3)
    starts = torch.stack([splits.pool[i][0] for i in range(20)])
    one = boundary_distances(model, splits.members, starts, LEAST + 60, batch_size=64)
    small = boundary_distances(model, splits.members, starts, LEAST + 60, batch_size=7)
    turned = Part(splits.pool, splits.members.indices[::-1], "turned")
    other = boundary_distances(model, turned, starts, LEAST + 60, batch_size=64).flip(0)
    assert torch.allclose(one, small, rtol=1e-3) and torch.allclose(one, other, rtol=1e-3) and one.std() > 0
