"""DP-SGD: per-sample gradients, noise and epsilon against the definition, and never more claimed than covered."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pptp
from defenses import DPSGD
from defenses.dpsgd import Session, per_sample_ready
from pptp.cli import main
from pptp.norms import group_norm
from pptp.runs import Run
from pptp.stages import freeze, split_at, stages, train_mode

FAMILIES = [("test_resnet", "layer4"), ("test_resnet", "scratch"), ("test_vit", "blocks.4"), ("convnext_atto", "stages.3"),
            ("mobilenetv3_small_100", "blocks.5"), ("efficientnet_b0", "blocks.6"), ("regnetx_002", "s4")]  # fmt: skip


@pytest.mark.parametrize("name, cut", FAMILIES)
def test_per_sample_gradients_equal_one_at_a_time(name, cut):
    from opacus.grad_sample import GradSampleModule

    model = pptp.create(name, 5, 64)
    trunk, _ = split_at(stages(model, (3, 64, 64)), cut)
    freeze(trunk)
    DPSGD().adapt(model)
    model.double()
    train_mode(model)
    x, y = torch.randn(3, 3, 64, 64, dtype=torch.float64), torch.tensor([0, 1, 2])
    torch.manual_seed(0)
    for module in model.modules():  # what is drawn at random differs between the two ways
        if "drop" in type(module).__name__.lower():
            module.training = False
    with per_sample_ready(model):
        wrapped = GradSampleModule(model)
        F.cross_entropy(wrapped(x), y).backward()
        found = {n: p.grad_sample for n, p in model.named_parameters() if p.requires_grad}
        wrapped.remove_hooks()
        for i in range(3):
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            for n, p in model.named_parameters():
                if p.requires_grad:
                    assert torch.allclose(found[n][i], p.grad, rtol=1e-8, atol=1e-10), n


def test_epsilon_is_that_of_the_accountant_called_by_hand(model, splits, quick):
    from opacus.accountants import RDPAccountant

    result = pptp.retrain(model, None, "layer4", DPSGD(noise_multiplier=1.3), splits, quick)
    by_hand = RDPAccountant()
    for _ in range(2 * 4):  # epochs x steps of 20 among 80
        by_hand.step(noise_multiplier=1.3, sample_rate=20 / 80)
    assert result["epsilon"] == pytest.approx(by_hand.get_epsilon(1 / 80))
    assert result["delta"] == 1 / 80 and result["noise_multiplier"] == 1.3


def test_noise_is_calibrated_to_the_epsilon_asked_for(model, splits, quick):
    result = pptp.retrain(model, None, "head", DPSGD(epsilon=3.0), splits, quick)
    assert 2.8 < result["epsilon"] <= 3.0


def test_scope_never_claims_more_than_it_covers():
    same, public = DPSGD().scope(3.0, 1e-3, frozen=True), DPSGD(trunk_data="public").scope(3.0, 1e-3, frozen=True)
    assert "NO guarantee" in same and "given the frozen ones" in same
    assert "as a whole has NO guarantee" in same and "as a whole has NO guarantee" not in public and "stated" in public
    assert all(
        "which must not have seen the members" in text
        for text in (same, public, DPSGD().scope(3.0, 1e-3, frozen=False))
    )
    assert "whole model" in DPSGD().scope(3.0, 1e-3, frozen=False)


def test_batchnorm_becomes_groupnorm_with_its_scale_and_shift_behind_the_cut_only():
    model = pptp.create("efficientnet_b0", 3, 32)
    with torch.no_grad():
        model.bn2.weight.uniform_(0.5, 2)
    weight = model.bn2.weight.clone()
    trunk, _ = split_at(stages(model, (3, 32, 32)), "blocks.6")
    freeze(trunk)
    DPSGD().adapt(model)
    assert isinstance(model.bn2, nn.GroupNorm) and torch.equal(model.bn2.weight, weight)
    assert isinstance(model.bn2.act, type(pptp.create("efficientnet_b0", 3, 32).bn2.act))
    assert isinstance(model.bn1, nn.BatchNorm2d)


def test_groupnorm_of_a_plain_batchnorm():
    assert group_norm(nn.BatchNorm2d(48)).num_groups == 16 and group_norm(nn.BatchNorm2d(7)).num_groups == 1


def test_training_leaves_no_hook_and_no_switched_off_in_place_behind(splits, quick):
    model = pptp.create("resnet18", 4, 32)
    in_place = [n for n, m in model.named_modules() if getattr(m, "inplace", False) is True]
    pptp.retrain(model, None, "layer4", DPSGD(), splits, quick)
    assert in_place == [n for n, m in model.named_modules() if getattr(m, "inplace", False) is True] != []
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_empty_poisson_batches_are_taken_as_steps(model, splits, quick):
    """Batches of one among 80 are empty every third time; each is a step of the accountant all the same."""
    sizes = []

    class Count(pptp.Monitor):
        def after_backward(self, step):
            sizes.append(len(step.targets))

    recipe = pptp.Recipe(**{**vars(quick), "epochs": 1, "batch_size": 1})
    pptp.retrain(model, None, "head", DPSGD(noise_multiplier=1.0), splits, recipe, [Count()])
    assert len(sizes) == 80 and 0 in sizes and max(sizes) > 1


def test_virtual_batches_change_nothing_but_memory(model, splits, quick):
    twin = copy.deepcopy(model)
    whole = pptp.retrain(model, None, "head", DPSGD(noise_multiplier=1.0), splits, quick)
    split = pptp.retrain(twin, None, "head", DPSGD(noise_multiplier=1.0, physical_batch=6), splits, quick)
    assert whole["epsilon"] == split["epsilon"]
    assert torch.allclose(model.fc.weight, twin.fc.weight, atol=1e-5)


def test_secret_noise_does_not_repeat(model, splits, quick):
    twin = copy.deepcopy(model)
    for m in (model, twin):
        pptp.retrain(m, None, "head", DPSGD(noise_multiplier=1.0, secret_noise=True), splits, quick)
    assert not torch.equal(model.fc.weight, twin.fc.weight)


def test_calibration_is_by_the_steps_that_are_taken(quick):
    assert Session(DPSGD(epsilon=1.0), 80, quick).noise > Session(DPSGD(epsilon=8.0), 80, quick).noise


def test_from_the_command_line_swaps_are_replayed_and_the_scope_is_reported(tmp_path, capsys):
    run = tmp_path / "r"
    small = [
        "--model",
        "test_resnet",
        "--members",
        "60",
        "--reference",
        "20",
        "--nonmembers",
        "60",
        "--test",
        "40",
        "--epochs",
        "2",
        "-b",
        "20",
        "--no-augment",
    ]
    assert main(["train", str(run), *small]) == 0
    assert (
        main(["retrain", str(run), "--defense", "dpsgd", "--set", "epsilon=5", "--cut", "layer4", "--no-control"]) == 0
    )
    assert "NO guarantee" in capsys.readouterr().out
    assert main(["retrain", str(run), "--defense", "dpsgd", "--cut", "layer4", "--rewind", "none"]) == 2
    assert "weights that have seen the members" in capsys.readouterr().err
    assert isinstance(Run.open(run).model("dpsgd-layer4").layer4[0].bn1, nn.GroupNorm)
    assert main(["evaluate", str(run)]) == 0 and main(["report", str(run)]) == 0
    assert (
        "NO guarantee" in (run / "report.html").read_text()
        and "NO guarantee" in (run / "retrain/dpsgd-layer4/README.md").read_text()
    )


def test_ghost_clipping_does_what_hooks_do(splits, quick):
    results = []
    for clipping in ("hooks", "ghost"):
        model = pptp.create("test_vit", 4, 32)
        pptp.retrain(model, None, "blocks.5", DPSGD(noise_multiplier=0.5, clipping=clipping), splits, quick)
        results.append(torch.cat([p.detach().flatten() for p in model.blocks[5].parameters()]))
    assert torch.allclose(*results, atol=1e-3)
