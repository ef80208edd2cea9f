"""Curvature estimators against exact answers, memorisation against its definition, and flipped labels in a small real run."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pptp
from pptp.data import Pool
from pptp.intervals import rank_correlation
from pptp.monitors.curvature import (
    Curvature,
    curvature,
    fd_norm,
    fisher,
    hutchinson,
    is_piecewise_linear,
    memorization,
)
from pptp.sources import digits
from pptp.training import fit


def enrichment(scores, marked, share=0.1):
    """(share of marked samples among the top `share` by score, share among all)."""
    top = np.argsort(-scores, kind="stable")[: max(1, int(share * len(scores)))]
    return float(marked[top].mean()), float(marked.mean())



def exact_trace(model, x, y):
    return torch.stack(
        [
            torch.autograd.functional.hessian(lambda z, i=i: F.cross_entropy(model(z[None]), y[i : i + 1]), x[i])
            .reshape(x[0].numel(), -1)
            .trace()
            for i in range(len(x))
        ]
    )


@pytest.fixture
def relu_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def test_fisher_is_the_trace_of_a_relu_network(relu_net):
    x, y = torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    expected = exact_trace(relu_net, x, y)
    assert torch.allclose(fisher(relu_net, x, y), expected, atol=1e-9)
    assert torch.allclose(hutchinson(relu_net, x, y, probes=4000), expected, rtol=0.1, atol=1e-3)
    assert torch.allclose(fisher(relu_net, x, y, samples=4000), expected, rtol=0.1, atol=1e-3)
    assert is_piecewise_linear(relu_net) and not is_piecewise_linear(nn.Sequential(nn.GELU()))


def test_hutchinson_equals_fisher_where_every_probe_is_exact():
    """One input dimension: v^2 = 1, so that a single probe gives the trace."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(6, 1, 1, 1, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    assert torch.allclose(hutchinson(model, x, y, probes=1), fisher(model, x, y), atol=1e-6)


def test_trace_and_difference_norm_of_a_quadratic():
    """loss = log(1 + e^{-2 q}) has no quadratic form, so the curvature of logits +-x.A.x/2 is compared with autograd's Hessian."""

    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            root = torch.randn(4, 4, dtype=torch.float64)
            self.a = nn.Parameter(root @ root.T)

        def forward(self, x):
            q = (x.flatten(1) @ self.a * x.flatten(1)).sum(1) / 2
            return torch.stack([q, -q], 1)

    model = Quadratic()
    x, y = 0.1 * torch.randn(3, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 0])
    assert torch.allclose(hutchinson(model, x, y, probes=4000), exact_trace(model, x, y), rtol=0.1, atol=0.1)
    h = 1e-4
    for i in range(3):
        hessian = torch.autograd.functional.hessian(
            lambda z, i=i: F.cross_entropy(model(z[None]), y[i : i + 1]), x[i]
        ).reshape(4, 4)
        probes = [(torch.tensor([(k >> b) & 1 for b in range(4)]) * 2.0 - 1).double() for k in range(16)]
        expected = h * np.mean([float((hessian @ v).norm()) for v in probes])
        assert float(fd_norm(model, x[i : i + 1], y[i : i + 1], probes=1000, h=h)[0]) == pytest.approx(
            expected, rel=0.05
        )


def test_scores_do_not_depend_on_the_batch(model, splits):
    assert torch.allclose(
        curvature(model, splits.members, batch_size=64), curvature(model, splits.members, batch_size=7), rtol=1e-3
    )
    with pytest.raises(pptp.UserError, match="estimator is 'other'"):
        curvature(model, splits.members, "other")


def test_memorization_equals_its_definition():
    g = torch.Generator().manual_seed(0)
    logits, masks = torch.randn(6, 20, 3, generator=g), torch.rand(6, 20, generator=g) < 0.5
    masks[:, 0] = True  # never left out: not defined
    labels = np.arange(20) % 3
    score = memorization((logits.argmax(-1).numpy() == labels), masks.numpy())
    assert np.isnan(score[0]) and np.isfinite(score[1:]).all()
    for i, value in enumerate(score[1:], 1):
        right = [bool(logits[m, i].argmax() == labels[i]) for m in range(6)]
        inside = [r for r, m in zip(right, masks[:, i]) if m]
        outside = [r for r, m in zip(right, masks[:, i]) if not m]
        assert value == pytest.approx(np.mean(inside) - np.mean(outside))


def test_rank_correlation_covers():
    rng, misses = np.random.default_rng(0), 0
    for _ in range(200):
        found = rank_correlation(rng.normal(size=60), rng.normal(size=60))
        misses += not found.low <= 0 <= found.high
    assert misses <= 17
    assert rank_correlation(np.arange(50), np.arange(50)).low > 0.99
    assert rank_correlation(np.zeros(50), np.arange(50)).note


def test_flipped_labels_are_enriched_in_the_top_decile():
    pool = digits(32, label_noise=0.0)
    rows = np.random.default_rng(0).permutation(len(pool))[:400]
    labels = pool.labels[rows].copy()
    flipped = np.random.default_rng(1).random(400) < 0.1
    labels[flipped] = (labels[flipped] + 1 + np.random.default_rng(2).integers(0, 9, flipped.sum())) % 10
    noisy = Pool(pool.pixels[rows], labels, (0.5,) * 3, (0.5,) * 3)
    model = pptp.create("test_resnet", 10, 32)
    watch = Curvature(noisy, every=2, samples=0)
    history = fit(
        model, noisy, pptp.Recipe(epochs=12, batch_size=32, opt="adamw", lr=2e-3, augment=False), monitors=[watch]
    )
    assert "curvature" in history.rows[-1] and sorted(watch.found) == [2, 4, 6, 8, 10, 12]
    top, everywhere = enrichment(watch.mean, flipped[watch.ids])
    assert top > 2 * everywhere, (top, everywhere)
    assert set(watch.arrays()) == {"estimator", "ids", "mean", *(f"epoch_{e}" for e in watch.found)}
