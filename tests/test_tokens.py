"""Dependence of data and gradients: closed forms, controls, and an image rebuilt from its gradient."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pptp
from pptp.monitors.tokens import (
    Pairs,
    Settings,
    Tokens,
    collect_pairs,
    compare_images,
    default_layers,
    dependence,
    donsker_varadhan,
    info_nce,
    reconstruct,
    row_ranks,
    sketch,
)
from pptp.training import fit

FAST = {"extractor": "autoencoder", "batches": 1500, "iterations": 500, "lr": 1e-3, "extractor_lr": 1e-3}


def gaussians(rho: float, n: int = 1500, d: int = 2) -> Pairs:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=g)
    return Pairs(x[:, None], [rho * x + math.sqrt(1 - rho**2) * torch.randn(n, d, generator=g)])


@pytest.mark.parametrize("rho", [0.8, 0.9])
def test_mine_finds_the_information_of_correlated_gaussians(rho):
    truth = -math.log(1 - rho**2)  # two dimensions: 1.02 and 1.66 nats
    found = dependence(gaussians(rho), Settings(**FAST))
    assert found.mine.value == pytest.approx(truth, rel=0.1) and found.mine.low < truth
    assert found.nce.value == pytest.approx(truth, rel=0.1)
    assert found.auc.low > found.null_auc[1] and abs(found.control.value) < 0.1


def test_nothing_is_found_between_independent_gaussians():
    found = dependence(gaussians(0.0), Settings(**FAST))
    assert abs(found.mine.value) < 0.1 and abs(found.nce.value) < 0.1
    assert found.auc.low < 0.5 < found.auc.high and found.null_auc[0] < 0.5 < found.null_auc[1]


def test_transformer_tokens_see_dependence_too():
    settings = Settings("transformer", batches=300, iterations=60, lr=1e-3, extractor_lr=1e-3)
    found = dependence(gaussians(0.95, 300), settings)
    assert found.auc.low > found.null_auc[1]


def test_estimates_equal_loops():
    table, rows = np.random.default_rng(0).normal(size=(7, 7)), np.arange(7)
    off = [math.exp(table[i, j]) for i in range(7) for j in range(7) if i != j]
    assert donsker_varadhan(table, rows) == pytest.approx(np.trace(table) / 7 - math.log(np.mean(off)))
    each = [table[i, i] - math.log(np.mean(np.exp(table[i]))) for i in range(7)]
    assert (
        info_nce(table, rows) == pytest.approx(np.mean(each)) and info_nce(50 * np.eye(7), rows) <= math.log(7) + 1e-9
    )
    ranks = [[np.mean([table[i, k] < table[i, j] for k in range(7) if k != j]) for j in range(7)] for i in range(7)]
    assert row_ranks(table) == pytest.approx(np.array(ranks))


def test_a_copy_of_a_pair_is_not_a_mismatch():
    table = np.full((3, 3), -1.0) + 10 * np.eye(3)
    assert donsker_varadhan(table, np.array([0, 0, 1])) == pytest.approx(10.0)


def test_sketches_keep_inner_products():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(20_000, generator=g), torch.randn(20_000, generator=g)
    b = a + 0.5 * b
    made = [float(sketch(a, 4096, seed) @ sketch(b, 4096, seed)) for seed in range(8)]
    assert np.mean(made) == pytest.approx(float(a @ b), rel=0.03)
    assert torch.equal(sketch(a[:10], 4096, 0), a[:10])


def test_pairs_are_the_gradients_of_their_batches_and_leave_the_model_as_it_was(model, splits):
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = Settings(batches=20, batch_size=3, most=10**6)
    layers = default_layers(model)
    pairs = collect_pairs(model, splits.members, layers, settings)
    assert len(pairs) == 20 and pairs.features.shape[1] == 3
    assert model.training and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules()) and all(p.grad is None for p in model.parameters())
    rows = np.random.default_rng(settings.seed).choice(len(splits.members), 3, replace=False)
    x = torch.stack([splits.members[int(r)][0] for r in rows])
    y = torch.tensor([splits.members[int(r)][1] for r in rows])
    model.eval()
    loss = F.cross_entropy(model(x), y)
    (expected,) = torch.autograd.grad(loss, dict(model.named_parameters())[layers[0]])
    assert torch.allclose(pairs.gradients[0][0], expected.flatten(), atol=1e-6)


def test_frozen_layers_share_no_gradients(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("layer4", "fc")))
    assert all(name.startswith("layer4") for name in default_layers(model))


def test_dlg_rebuilds_the_input_of_a_smooth_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48 * 4, 64), nn.Sigmoid(), nn.Linear(64, 5))
    x, y = torch.rand(1, 3, 8, 8), torch.tensor([2])
    made = reconstruct(net, x, y, (0.0,) * 3, (1.0,) * 3, steps=40)
    assert made.mse < 1e-3 and made.psnr > 30 and made.ssim > 0.95 and made.gradient_distance < 1e-4
    nothing = reconstruct(net, x, y, (0.0,) * 3, (1.0,) * 3, steps=1, seed=3)
    assert nothing.gradient_distance >= made.gradient_distance


def test_image_scores_of_known_images():
    image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    same = compare_images(image, image, (0.0,) * 3, (1.0,) * 3, 0.0)
    assert same.mse == 0 and same.ssim == pytest.approx(1.0)
    other = compare_images(image + 0.1, image, (0.0,) * 3, (1.0,) * 3, 0.0)
    assert other.mse == pytest.approx(0.01, rel=1e-3) and other.psnr == pytest.approx(20.0, abs=0.01)


def test_the_monitor_looks_each_epoch_or_each_few_steps(model, pool, quick):
    settings = Settings("autoencoder", batches=20, batch_size=2, iterations=2)
    each, steps = Tokens(pool, 1, settings), Tokens(pool, 1, settings, steps=10)
    history = fit(model, pool, quick, monitors=[each])
    assert list(each.found) == ["epoch 1", "epoch 2"] and "token_auc" in history.rows[0]
    assert each.arrays()["mine"].shape == (2, 3)
    fit(pptp.create("test_resnet", 4, 32), pool, quick, monitors=[steps])
    assert list(steps.found) == ["step 10", "step 20"]


def test_bad_settings_are_refused(model, splits):
    with pytest.raises(pptp.UserError, match="extractor is 'other'"):
        Settings(extractor="other")
    with pytest.raises(pptp.UserError, match="at least 20 batches"):
        Settings(batches=5)
    with pytest.raises(pptp.UserError, match="no layer weights called nothing"):
        collect_pairs(model, splits.members, ["nothing"], Settings(batches=20))
