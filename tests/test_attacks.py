"""Golden values, naive loops, and the traps that other implementations fall into."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import ATTACKS
from attacks.metric import confidence, correctness, entropy, modified_entropy
from pptp import Known, Signals, UserError

Z = torch.tensor([[2, 0, -1], [0, 1, 0.5], [-1, 0, 3], [0.2, 0.1, 0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 2])


def run(attack, logits, labels):
    signals = Signals(logits, labels)
    return attack(Known(signals, torch.zeros(len(labels), dtype=torch.bool)), signals)


def test_golden_values():
    assert run(confidence, Z, Y).exp().tolist() == pytest.approx([0.843795, 0.506480, 0.017148, 0.300610], abs=1e-6)
    assert (-run(confidence, Z, Y)).tolist() == pytest.approx([0.169846, 0.680270, 4.065884, 1.201943], abs=1e-6)
    assert (-run(entropy, Z, Y)).tolist() == pytest.approx([0.524267, 1.020191, 0.274313, 1.095287], abs=1e-6)
    assert (-run(modified_entropy, Z, Y)).tolist() == pytest.approx([0.042181, 0.486888, 6.575502, 1.142776], abs=1e-6)
    assert run(correctness, Z, Y).tolist() == [1, 1, 0, 0]


def naive(name, z, y):
    p = [math.exp(v) for v in z]
    p = [v / sum(p) for v in p]
    if name == "correctness":
        return float(max(range(len(z)), key=lambda c: z[c]) == y)
    if name == "confidence":
        return math.log(p[y])
    if name == "entropy":
        return sum(v * math.log(v) for v in p)
    return (1 - p[y]) * math.log(p[y]) + sum(p[c] * math.log(1 - p[c]) for c in range(len(p)) if c != y)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(-6, 6), min_size=4, max_size=4, unique=True), min_size=1, max_size=5), st.integers(0, 3)
)
def test_each_formula_equals_a_loop_over_samples(rows, label):
    z, y = torch.tensor(rows, dtype=torch.float64), torch.full((len(rows),), label)
    for name in ("correctness", "confidence", "entropy", "modified_entropy"):
        assert run(ATTACKS[name], z, y).tolist() == pytest.approx(
            [naive(name, row, label) for row in rows], rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize("name", ATTACKS)
def test_scores_do_not_depend_on_a_constant_added_to_logits_nor_on_order(name):
    z, y = torch.randn(30, 5, dtype=torch.float64), torch.arange(30) % 5
    order = torch.randperm(30)
    assert torch.allclose(run(ATTACKS[name], z, y), run(ATTACKS[name], z + 100, y), atol=1e-9)
    assert torch.allclose(run(ATTACKS[name], z, y)[order], run(ATTACKS[name], z[order], y[order]))


@pytest.mark.parametrize("name", ATTACKS)
def test_extreme_logits_give_finite_scores(name):
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [0.0, 0.0, 0.0]])
    assert torch.isfinite(run(ATTACKS[name], z, torch.tensor([0, 0, 2]))).all()


def test_confidence_still_ranks_where_float32_probabilities_are_all_one():
    z = torch.tensor([[20.0, 0.0], [25.0, 0.0], [30.0, 0.0]])
    assert (z.softmax(1)[:, 0] == 1).all()
    for attack in (confidence, entropy, modified_entropy):
        scores = run(attack, z, torch.zeros(3, dtype=torch.long))
        assert scores[0] < scores[1] < scores[2]


def test_bad_signals_are_refused():
    with pytest.raises(UserError, match="sample 1 are not finite"):
        Signals(torch.tensor([[0.0, 1], [float("nan"), 0]]), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="2 logits"):
        Signals(torch.zeros(1, 2), torch.tensor([2]))
    with pytest.raises(UserError, match="labels"):
        Signals(torch.zeros(3, 2), torch.tensor([0, 1]))
