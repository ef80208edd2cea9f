"""BatchNorm audit: the mechanism at initialisation, influence against its definition, norms swapped and matched."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pptp
from pptp.intervals import Estimate
from pptp.monitors.batchnorm import (
    BATCH,
    Influence,
    Samples,
    Stretched,
    batch_statistics,
    compared,
    gradient_ratio,
    influence,
    influence_ratio,
    leaks,
    learned,
    matched_epochs,
    verdict,
)
from pptp.norms import batch_norms, norms_of, swap_as_told, swap_norms
from pptp.training import fit


def variant(kind: str):
    model = pptp.create("test_resnet", classes=4, img_size=32, seed=3)
    swap_norms(model, kind)
    return model


def test_an_outlier_pulls_most_with_batchnorm_and_least_with_groupnorm(splits):
    """At initialisation, batch 32, the outlier's input scaled: the mechanism of the paper."""
    found = {
        kind: influence_ratio(variant(kind), splits.members, Stretched(splits.members, 5.0), most=8).value
        for kind in ("bn", "none", "gn")
    }
    assert found["bn"] > found["none"] > found["gn"], found


def test_influence_is_the_gradient_with_and_without_a_sample(splits):
    model = variant("gn").eval()
    x = torch.stack([splits.members[k][0] for k in range(6)])
    y = torch.tensor([splits.members[k][1] for k in range(6)])

    def gradient(rows):
        model.zero_grad()
        sum(F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]) for k in rows).div(len(rows)).backward()
        return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])

    expected = [float((gradient(range(6)) - gradient([k for k in range(6) if k != i])).norm()) for i in (0, 4)]
    assert influence(model, x, y, (0, 4)).tolist() == pytest.approx(expected, rel=1e-3)


def test_nothing_of_the_model_moves(model, splits):
    model.train()
    model.layer1.eval()
    modes = [m.training for m in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    influence_ratio(model, splits.members, Stretched(splits.members), most=2)
    gradient_ratio(model, splits.members, Stretched(splits.members), most=8)
    assert [m.training for m in model.modules()] == modes and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_norms_taken_out_of_the_batchs_hands_go_by_their_running_statistics(model, splits):
    x = torch.stack([splits.members[k][0] for k in range(8)])
    expected = copy.deepcopy(model).eval()(x)
    with batch_statistics(model, list(batch_norms(model).values())), torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-6)
    with batch_statistics(model), torch.no_grad():
        assert not torch.allclose(model(x), expected, atol=1e-3)


def test_swapped_norms_keep_scales_and_leave_no_batchnorm(model):
    names = list(batch_norms(model))
    with torch.no_grad():
        batch_norms(model)[names[0]].weight.fill_(0.7)
    for kind in ("gn", "ln", "none"):
        swapped = copy.deepcopy(model)
        swap_norms(swapped, kind)
        assert not batch_norms(swapped) and swapped(torch.randn(2, 3, 32, 32)).shape == (2, 4)
        if kind != "none":
            assert torch.equal(
                swapped.get_submodule(names[0]).weight, torch.full_like(swapped.get_submodule(names[0]).weight, 0.7)
            )
    assert list(batch_norms(model)) == names


def test_norms_of_one_stage_only(model):
    parts = pptp.stages(model)
    swap_as_told(model, "gn:layer4", lambda m: parts)
    assert batch_norms(model) and not any(name.startswith("layer4") for name in batch_norms(model))
    assert norms_of(model, parts[1]) and all(name.startswith("layer1") for name in norms_of(model, parts[1]))
    with pytest.raises(pptp.UserError, match="norm names layer9: the stages of this model are"):
        swap_as_told(model, "gn:layer9", lambda m: parts)
    with pytest.raises(pptp.UserError, match="norm is 'other'"):
        swap_norms(model, "other")
    with pytest.raises(pptp.UserError, match="no BatchNorm"):
        swap_as_told(pptp.create("test_vit", 4, 64), "gn", lambda m: parts)


def test_norms_are_compared_near_the_lowest_loss_that_both_reach():
    bn, gn, far = np.array([2.0, 0.5, 0.01]), np.array([2.2, 1.0, 0.45]), np.array([2.2, 2.1, 1.1])
    assert matched_epochs(bn, gn) == ((1, 2), True)  # nearest to .45, not the first below it
    assert matched_epochs(bn, far) == ((0, 2), False)
    assert learned(bn, 10) and not learned(np.array([2.3, 2.25]), 10)


def test_a_planted_leak_about_outliers_is_found_and_judged():
    rng = np.random.default_rng(0)
    n = 400
    samples = Samples(np.zeros(n, int), np.arange(n) % 2 == 0, np.arange(n) < 200)
    plain = torch.tensor(rng.normal(size=(n, 2)))
    leaky = plain.clone()
    leaky[:, 0] += torch.tensor(4.0 * (samples.members & samples.outliers))
    a, b = leaks(leaky, samples), leaks(plain, samples)
    assert a["auc_outliers"].low > 0.9 and a["auc_typical"].low < 0.5 < a["auc_typical"].high
    gap = compared(a, b, samples)
    assert gap["outliers"].low > 0 and gap["typical"].value == 0
    assert verdict("GroupNorm", gap).startswith("BatchNorm leaks more about outliers than GroupNorm")
    assert verdict("GroupNorm", {**gap, "outliers": Estimate(0.0, -0.1, 0.1)}).startswith("no difference")


def test_the_monitor_watches_the_pull_of_outliers(model, pool, quick):
    watch = Influence(pool, every=2, most=2)
    history = fit(model, pool, quick, monitors=[watch])
    assert "influence_ratio" in history.rows[1] and "influence_ratio" not in history.rows[0]
    assert watch.arrays()["influence"].shape == (1, 3) and watch.watched == 3 * BATCH * 2
