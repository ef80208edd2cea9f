"""Norms of per-sample gradients, features and boundary distances against one sample at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pptp
from attacks import ATTACKS
from pptp.boundary import LEAST, boundary_distances
from pptp.data import Pool
from pptp.gradients import gradient_norms, squared_norms
from pptp.measures import Effort, measure
from pptp.signals import Needs


@pytest.mark.parametrize(
    "name, size", [("test_resnet", 32), ("test_vit", 160), ("test_convnext", 64), ("test_efficientnet", 64), ("densenet121", 32), ("swin_tiny_patch4_window7_224", 224)]
)  # fmt: skip
def test_norms_equal_those_of_one_sample_at_a_time(name, size):
    small = {"depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 2, 2)} if "swin" in name else {}
    model = pptp.create(name, 5, size, **small).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zero-initialised scales would hide errors
            parameter.add_(0.01 * torch.randn_like(parameter))
    x, y = torch.randn(3, 3, size, size, dtype=torch.float64), torch.tensor([0, 3, 4])
    of_input, squares = squared_norms(model, x, y)
    for i in range(3):
        one = x[i : i + 1].clone().requires_grad_()
        model.zero_grad()
        F.cross_entropy(model(one), y[i : i + 1]).backward()
        assert float(of_input[i]) == pytest.approx(float(one.grad.square().sum()), rel=1e-9)
        for key, parameter in model.named_parameters():
            expected = 0.0 if parameter.grad is None else float(parameter.grad.square().sum())
            assert float(squares[key][i]) == pytest.approx(expected, rel=1e-9, abs=1e-15), key
    assert all(p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_grouped_strided_dilated_and_shared_layers_too():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.grouped = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
            self.dilated = nn.Conv2d(6, 6, 3, padding="same", dilation=2, bias=False)
            self.shared = nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.rand(6))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            x = self.dilated(self.grouped(x).relu()).mean((2, 3))
            return self.head(self.shared(self.shared(x).tanh()) * self.scale)

    model = Odd().double().eval()
    x, y = torch.randn(4, 4, 9, 9, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    _, squares = squared_norms(model, x, y)
    for i in range(4):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for key, parameter in model.named_parameters():
            assert float(squares[key][i]) == pytest.approx(float(parameter.grad.square().sum()), rel=1e-9), key


def test_stages_add_up_to_the_whole_and_batches_do_not_matter(model, splits):
    parts = pptp.stages(model, (3, 32, 32))
    norms = gradient_norms(model, splits.members, parts, batch_size=64)
    again = gradient_norms(model, splits.members, parts, batch_size=7)
    assert set(norms) == {"input", *(part.name for part in parts)}
    for name in norms:
        assert norms[name].shape == (80,) and torch.allclose(norms[name], again[name], rtol=1e-4, atol=1e-6)


def test_measurements_come_by_kind_in_the_order_of_the_samples(model, splits):
    wanted = [Needs(measured="gradient"), Needs(measured="feature"), Needs(augmented=True)]
    found = measure(model, splits.members, wanted, Effort(queries=2))
    assert found.augmented.shape == (2, 80, 4) and not torch.allclose(found.augmented[0], found.augmented[1])
    names = [part.name for part in pptp.stages(model, (3, 32, 32))]
    assert set(found.measured) == {f"feature/{n}" for n in names} | {f"gradient/{n}" for n in [*names, "input"]}
    assert np.allclose(found.measured["feature/head"], found.logits, atol=1e-5)
    half = measure(
        model, pptp.data.Part(splits.pool, splits.members.indices[40:], "half"), wanted[2:], Effort(queries=2)
    )
    assert torch.allclose(
        half.augmented, found.augmented[:, 40:], atol=1e-4
    )  # a view depends on the sample, not its place


class Plane(nn.Module):
    """Class 1 where w.x > b: the distance to the boundary is known."""

    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = nn.Parameter(w / w.norm()), b

    def forward(self, x):
        side = x.flatten(1) @ self.w - self.b
        return torch.stack([-side, side], 1)


def test_boundary_distance_of_a_half_space():
    torch.manual_seed(0)
    pixels = torch.randint(0, 255, (40, 3, 4, 4), dtype=torch.uint8)
    plane = Plane(torch.randn(48), 0.0)
    x = torch.stack([Pool(pixels, [0] * 40, (0.5,) * 3, (0.25,) * 3)[i][0] for i in range(40)])
    side = x.flatten(1) @ plane.w.detach()
    labels = (side > 0).long()
    labels[:3] = 1 - labels[:3]
    found = boundary_distances(plane, Pool(pixels, labels.numpy(), (0.5,) * 3, (0.25,) * 3), x[:20], budget=600)
    assert (found[:3] == 0).all(), "misclassified samples are on the wrong side already"
    ratio = found[3:] / side[3:].abs().clamp(min=1e-6)
    far = side[3:].abs() > 0.2
    assert (ratio[far] > 0.999).all(), "an upper bound"
    assert ratio[far].median() < 1.6
    few = boundary_distances(plane, Pool(pixels, labels.numpy(), (0.5,) * 3, (0.25,) * 3), x[:20], budget=LEAST)
    assert few[3:].mean() > found[3:].mean(), "more queries come nearer"


def test_the_boundary_does_not_know_in_which_batch_a_sample_came():
    """Class-sorted parts of different sizes, nobody trained on."""
    torch.manual_seed(0)
    pixels, plane = torch.randint(0, 255, (300, 3, 4, 4), dtype=torch.uint8), Plane(torch.randn(48), 0.0)
    x = torch.stack([Pool(pixels, [0] * 300, (0.5,) * 3, (0.25,) * 3)[i][0] for i in range(300)])
    labels = (x.flatten(1) @ plane.w.detach() > 0).long()
    by_class = labels.argsort()
    pool = Pool(pixels[by_class], labels[by_class].numpy(), (0.5,) * 3, (0.25,) * 3)
    inside, outside = (
        pptp.data.Part(pool, np.arange(0, 300, 3), "a"),
        pptp.data.Part(pool, np.flatnonzero(np.arange(300) % 3), "b"),
    )
    found = pptp.evaluate(plane, inside, outside, None, {"boundary_distance": ATTACKS["boundary_distance"]})["model"]
    scores = found.attacks["boundary_distance"].auc_at(0.999)
    assert scores.low < 0.5 < scores.high, scores


def test_too_small_a_budget_is_refused(model, splits):
    with pytest.raises(pptp.UserError, match="the query budget is 5"):
        boundary_distances(model, splits.members, torch.zeros(2, 3, 32, 32), budget=5)
