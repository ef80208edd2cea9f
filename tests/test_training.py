import copy
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import pptp
from defenses import DEFENSES
from pptp.models import weights_digest
from pptp.stages import freeze, split_at, stages
from pptp.training import Batches, Monitor, cross_entropy, fit


def train(model, data, recipe, **more):
    fit(model, data, recipe, **more)
    return weights_digest(model)


def test_training_is_a_function_of_the_seed(model, splits, quick):
    models = [copy.deepcopy(model) for _ in range(3)]
    other = pptp.Recipe(**{**vars(quick), "seed": 6})
    digests = [train(m, splits.members, r) for m, r in zip(models, (quick, quick, other))]
    assert digests[0] == digests[1] != digests[2]


def test_training_leaves_the_global_random_state_alone(model, splits, quick):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    fit(model, splits.members, quick)
    assert torch.equal(torch.rand(1), expected)


class Killed(Exception):
    pass


class KillAfter(Monitor):
    def __init__(self, epoch):
        self.epoch = epoch

    def after_backward(self, step):
        if step.epoch == self.epoch:
            raise Killed


@pytest.mark.parametrize("opt, amount", [("sgd", 0.0), ("adamw", 0.3)])
def test_killed_run_resumes_to_the_same_weights(splits, tmp_path, opt, amount):
    """Dropout and augmentation on: random state and data order must be restored too."""
    model = pptp.create("test_resnet", 4, 32, drop_rate=amount)
    recipe = pptp.Recipe(epochs=4, batch_size=20, opt=opt, lr=0.01, augment=True, warmup_epochs=1)
    undisturbed, killed = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(undisturbed, splits.members, recipe)
    checkpoint = tmp_path / "checkpoint.pt"
    with pytest.raises(Killed):
        fit(killed, splits.members, recipe, monitors=[KillAfter(2)], checkpoint=checkpoint)
    resumed = copy.deepcopy(model)
    history = fit(resumed, splits.members, recipe, checkpoint=checkpoint)
    assert weights_digest(resumed) == expected and len(history.rows) == 4


def test_checkpoint_of_another_recipe_is_refused(model, splits, quick, tmp_path):
    fit(model, splits.members, quick, checkpoint=tmp_path / "c.pt")
    with pytest.raises(pptp.UserError, match="another configuration"):
        fit(model, splits.members, pptp.Recipe(**{**vars(quick), "lr": 0.5}), checkpoint=tmp_path / "c.pt")


def test_damaged_checkpoint_is_refused(model, splits, quick, tmp_path):
    path = tmp_path / "c.pt"
    fit(model, splits.members, quick, checkpoint=path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(pptp.UserError, match="damaged"):
        fit(model, splits.members, quick, checkpoint=path)


def test_frozen_layers_do_not_move(model, splits, quick):
    trunk, suffix = split_at(stages(model), "layer4")
    freeze(trunk)
    before = pptp.snapshot(model)
    fit(model, splits.members, quick)
    inside = {n for part in suffix for n in part.parameter_names + part.buffer_names}
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == inside


def test_everything_frozen_is_refused(model, splits, quick):
    model.requires_grad_(False)
    with pytest.raises(pptp.UserError, match="frozen"):
        fit(model, splits.members, quick)


def test_non_finite_loss_stops_with_a_sentence(model, splits, quick):
    with pytest.raises(pptp.UserError, match="the loss became nan in epoch 1: lower lr"):
        fit(model, splits.members, quick, loss=lambda step: cross_entropy(step) * float("nan"))


def test_history_has_a_row_per_epoch_and_what_the_loss_logged(model, splits, quick):
    def loss(step):
        step.logs["active"] = float(step.epoch)
        return cross_entropy(step)

    history = fit(model, splits.members, quick, loss=loss)
    assert [row["active"] for row in history.rows] == [0.0, 1.0]
    assert history.summary()["active"] == 0.5 and history.summary()["epochs"] == 2


def test_monitor_sees_gradients_and_adds_to_the_history(model, splits, quick):
    class Norm(Monitor):
        seen = 0

        def after_backward(self, step):
            assert model.fc.weight.grad is not None
            self.seen += len(step.indices)

        def after_epoch(self, model, epoch):
            return {"seen": self.seen}

    history = fit(model, splits.members, quick, monitors=[Norm()])
    assert [row["seen"] for row in history.rows] == [80, 160]


def test_gradient_clipping_bounds_the_step(model, splits):
    before = pptp.snapshot(model)
    recipe = pptp.Recipe(
        epochs=1, batch_size=80, opt="momentum", lr=1.0, weight_decay=0.0, clip_grad=0.01, augment=False
    )
    fit(model, splits.members, recipe)
    moved = sum((p.detach() - before[n]).square().sum() for n, p in model.named_parameters()).sqrt()
    assert 0 < float(moved) <= 0.0101


@pytest.mark.parametrize(
    "field, value",
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("lr", 0.0),
        ("amp", "half"),
        ("device", "cuda:1"),
        ("sched", "plateau"),
        ("weight_decay", -1.0),
        ("clip_grad", -1.0),
        ("workers", -1),
        ("warmup_epochs", 30),
    ],
)
def test_bad_recipe_is_refused(field, value):
    with pytest.raises(pptp.UserError, match=f"{field} is"):
        pptp.Recipe(**{field: value})


def test_unknown_optimizer_gets_the_nearest(model, splits):
    with pytest.raises(pptp.UserError, match="adamw"):
        fit(model, splits.members, pptp.Recipe(opt="adamww"))


@pytest.mark.parametrize("sched", ["cosine", "step", "multistep", "poly", "tanh", "constant"])
def test_schedules(model, splits, sched):
    recipe = pptp.Recipe(epochs=4, batch_size=80, sched=sched, augment=False, lr=0.1)
    rates = [row["lr"] for row in fit(model, splits.members, recipe).rows]
    assert rates[0] == pytest.approx(0.1) and (rates[-1] == 0.1 if sched == "constant" else rates[-1] < 0.1)


def test_last_batch_of_one_joins_the_one_before(splits, quick):
    """resnet18 at 32 px ends in 1 x 1 maps, on which BatchNorm cannot train with one sample."""
    sizes = []

    def loss(step):
        sizes.append(len(step.targets))
        return cross_entropy(step)

    fit(
        pptp.create("resnet18", 4, 32),
        splits.members,
        pptp.Recipe(**{**vars(quick), "epochs": 1, "batch_size": 79}),
        loss=loss,
    )
    assert sizes == [80]


@pytest.mark.parametrize("length, size", [(10, 3), (10, 4), (9, 4), (1, 4), (5, 1), (4, 4), (5, 4)])
def test_batches_hold_every_sample_once(length, size):
    batches = Batches(range(length), size, False)
    found = list(batches)
    assert [i for batch in found for i in batch] == list(range(length)) and len(found) == len(batches)
    assert all(len(batch) > 1 for batch in found) or length == 1 or size == 1


def test_batches_of_one_on_batchnorm_are_refused_with_a_sentence(splits, quick):
    with pytest.raises(pptp.UserError, match="BatchNorm cannot train on a batch of one"):
        fit(pptp.create("resnet18", 4, 32), splits.members, pptp.Recipe(**{**vars(quick), "batch_size": 1}))


@pytest.mark.parametrize("change", ["samples", "loss", "start"])
def test_checkpoint_of_other_samples_loss_or_start_is_refused(change, model, splits, quick, tmp_path):
    from defenses import RelaxLoss

    subset = torch.utils.data.Subset(splits.pool, range(40))
    fit(copy.deepcopy(model), subset, quick, checkpoint=tmp_path / "c.pt", loss=RelaxLoss(alpha=0.5).loss)
    if change == "samples":
        subset = torch.utils.data.Subset(splits.pool, [0, *range(41, 79), 39])
    if change == "start":
        model = pptp.create("test_resnet", 4, 32, seed=9)
    alpha = 0.6 if change == "loss" else 0.5
    with pytest.raises(pptp.UserError, match="another configuration"):
        fit(model, subset, quick, checkpoint=tmp_path / "c.pt", loss=RelaxLoss(alpha=alpha).loss)


TWO_PROCESSES = """
import atexit, sys
from pathlib import Path
import torch
said = []

@atexit.register
def at_the_very_end():  # registered first, called last
    assert not torch.distributed.is_initialized(), "ends within the process group"
    Path(sys.argv[1], said[0]).write_text(said[1])

import pptp
from accelerate import PartialState
from pptp.models import weights_digest

torch.set_num_threads(1)
splits = pptp.split(pptp.load(pptp.Source())[0], 64, 0, 64, 64, seed=1)
model = pptp.create("test_resnet", 10, 32)
seen = []
def loss(step):
    seen.append((step.epoch, step.indices.tolist(), step.inputs.sum((1, 2, 3)).tolist()))
    return torch.nn.functional.cross_entropy(step.logits, step.targets)
history = pptp.fit(model, splits.members, pptp.Recipe(epochs=2, batch_size=16, device="cpu"), loss=loss)
sums = [{i: s for e, ids, values in seen if e == epoch for i, s in zip(ids, values)} for epoch in (0, 1)]
both = set(sums[0]) & set(sums[1])
assert both and any(sums[0][i] != sums[1][i] for i in both), "augmentation repeats itself"
state = PartialState()
assert state.num_processes == 2, "silently ran one process"
said += [str(state.process_index), weights_digest(model) + repr(history.rows[-1]["loss"])]
"""


def test_two_processes_end_with_the_same_weights_buffers_and_history(tmp_path):
    script, results = tmp_path / "job.py", tmp_path / "results"
    script.write_text(TWO_PROCESSES)
    results.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
        str(results),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = sorted(results.iterdir())
    assert first.read_text() == second.read_text()


@pytest.mark.parametrize("change", [{"compile": "aot_eager"}, {"channels_last": True}])
def test_options_of_speed_change_nothing_but_rounding(model, splits, quick, change):
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    fit(model, splits.members, quick)
    fit(twin, splits.members, replace(quick, **change))
    assert all(p.is_contiguous() for p in twin.parameters())
    assert _distance(model, twin) < 0.05 * _distance(model, start)


def test_a_compiled_suffix_leaves_the_trunk_alone_and_goes_without_the_cache(model, splits, quick):
    parts, twin = stages(model, (3, 32, 32)), copy.deepcopy(model)
    plain = pptp.retrain(model, None, "layer4", DEFENSES["plain"](), splits, quick, parts=parts)
    result = pptp.retrain(
        twin, None, "layer4", DEFENSES["plain"](), splits, replace(quick, compile="aot_eager"), parts=parts
    )
    assert "torch.compile" in result["cache"] and "MB" in plain["cache"]
    assert result["loss"] == pytest.approx(plain["loss"], rel=1e-3)


def test_the_compiled_model_is_the_one_that_runs(model, splits, quick, monkeypatch):
    calls = []
    from torch._dynamo.backends.registry import lookup_backend

    inner = lookup_backend("aot_eager")
    monkeypatch.setattr(
        torch, "compile", _compile_with(torch.compile, lambda *a, **k: calls.append(1) or inner(*a, **k))
    )
    fit(model, splits.members, replace(quick, compile="aot_eager"))
    assert calls


def _compile_with(original, backend):
    return lambda model, backend=None, _mine=backend: original(model, backend=_mine)


def test_a_compiler_that_does_not_work_is_one_sentence(model, splits, quick, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", _compile_with(torch.compile, broken))
    with pytest.raises(pptp.UserError, match="no C.. compiler.*--compile no"):
        fit(model, splits.members, replace(quick, compile="inductor"))


def test_private_steps_refuse_a_compiler_and_take_channels_last(model, splits, quick):
    with pytest.raises(pptp.UserError, match="compile"):
        pptp.retrain(model, None, "layer4", DEFENSES["dpsgd"](), splits, replace(quick, compile="inductor"))
    twin = copy.deepcopy(model)
    for m, r in ((model, quick), (twin, replace(quick, channels_last=True))):
        pptp.retrain(m, None, "layer4", DEFENSES["dpsgd"](noise_multiplier=0.5), splits, r)
    assert _distance(model, twin) < 1e-4


def _distance(a, b):
    return torch.cat([(p - q).flatten() for p, q in zip(a.parameters(), b.parameters())]).norm().item()
