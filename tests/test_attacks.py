"""Golden values, naive loops, and the traps that other implementations fall into."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attacks import ATTACKS
from attacks.metric import confidence, correctness, entropy, modified_entropy
from pptp import Known, Signals, UserError
from pptp.evaluate import applicable, run_attacks
from pptp.likelihood import gaussian, log_normal
from pptp.signals import logit_margin

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


def world(n=60, models=6, classes=4, seed=0, leak=0.0, scale=2.0):
    """Signals with everything an attack may ask for, and who is a member; `leak` is added to members' true logits."""
    g = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    labels, members = torch.arange(n) % classes, torch.rand(n, generator=g) < 0.5
    hard = noise(n, classes)
    hot = torch.nn.functional.one_hot(labels, classes).double()
    masks = (torch.rand(models // 2, n, generator=g) < 0.5).repeat_interleave(2, 0)
    masks[1::2] = ~masks[::2]  # pairs of complements: every sample in half of the models
    logits = hard + noise(n, classes) / 2 + leak * hot * members[:, None]
    references = hard + noise(models, n, classes) / 2 + leak * hot * masks[..., None]
    views = logits + noise(3, n, classes) / 4
    reference_views = references[:, None] + noise(models, 3, n, classes) / 4
    measured = {
        "gradient/input": noise(n).exp() * torch.exp(-leak * members),
        "curvature": noise(n).exp() * torch.exp(-leak * members),
        "boundary": noise(n).exp() * torch.exp(leak * members),
        "feature/stem": torch.cat([hot + noise(n, classes) / (1 + leak * members[:, None]), noise(n, 2)], 1).float(),
    }
    return Signals(logits, labels, references, masks, views, reference_views, measured), members


def asked(name, signals, members, known=None):
    """Scores of the second half of the samples, by an attack that knows the first half."""
    half = len(members) // 2
    known = known or Known(signals[torch.arange(half)], members[:half])
    extra = {"stage": "feature/stem"} if name == "feature_probe" else {}
    return ATTACKS[name](known, signals[torch.arange(half, len(members))], **extra)


def shifted(signals, by):
    return replace(
        signals,
        **{f: getattr(signals, f) + by for f in ("logits", "reference_logits", "augmented", "reference_augmented")},
    )


@pytest.mark.parametrize("name", ATTACKS)
def test_scores_do_not_depend_on_a_constant_added_to_logits(name):
    signals, members = world()
    assert torch.allclose(asked(name, signals, members), asked(name, shifted(signals, 100.0), members), atol=1e-6)


@pytest.mark.parametrize("name", ATTACKS)
def test_scores_do_not_depend_on_the_order_of_the_query(name):
    signals, members = world()
    order = torch.cat([torch.arange(30), 30 + torch.randperm(30)])
    known = Known(signals[torch.arange(30)], members[:30])
    again = asked(name, signals[order], members, known)
    assert torch.allclose(again, asked(name, signals, members, known)[order[30:] - 30], atol=1e-9)


@pytest.mark.parametrize("name", ATTACKS)
def test_extreme_logits_ties_and_a_missing_class_give_finite_scores(name):
    signals, members = world(scale=1.0)
    huge = [
        getattr(signals, f).sign() * 1e4 for f in ("logits", "reference_logits", "augmented", "reference_augmented")
    ]
    tied = [torch.zeros_like(values) for values in huge]
    for logits, references, views, reference_views in (huge, tied):
        extreme = replace(
            signals, logits=logits, reference_logits=references, augmented=views, reference_augmented=reference_views
        )
        assert torch.isfinite(asked(name, extreme, members)).all()
    there = torch.nonzero((signals.labels != 3) | (torch.arange(60) >= 30)).flatten()  # class 3 is never known
    known = there[there < 30]
    assert torch.isfinite(asked(name, signals, members, Known(signals[known], members[known]))).all()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_planted_leak_is_found_and_nothing_where_there_is_none(name):
    leaky, members = world(400, seed=1, leak=4.0)
    calm, same = world(400, seed=1)
    found = {}
    for which, (signals, truth) in {"leak": (leaky, members), "none": (calm, same)}.items():
        scores = run_attacks({name: ATTACKS[name]}, signals, truth.numpy())
        (only,) = scores.values()
        found[which] = only.auc_at(0.999)
    assert found["leak"].low > 0.5, found["leak"]
    assert found["none"].low <= 0.5 <= found["none"].high, found["none"]


# --- attacks on reference models ----------------------------------------------------------------------------


def test_lira_golden_values():
    inside, outside = np.array([[1, 2, 3], [0, 1, 5.0]]).T, np.array([[0, 0.5, 1], [-1, 0, 2.0]]).T  # (models, samples)
    phi = np.concatenate([inside, outside])
    chosen = np.repeat([True, False], 3)[:, None].repeat(2, 1)
    target = torch.tensor([2.5, 0.5], dtype=torch.float64)
    constant = -0.5 * math.log(2 * math.pi)
    for own, online, offline in (
        (0, [-11.119353, 0.495735], [-12.023059, -1.220212]),
        (64, [-1.613031, 0.496344], [-3.110047, -1.000672]),
    ):
        of_in, of_out = (
            log_normal(target, *map(torch.from_numpy, gaussian(phi, which, own))) for which in (chosen, ~chosen)
        )
        assert (of_out - of_in).tolist() == pytest.approx(online, abs=1e-6)  # the golden score is low for members
        # (of our logs the constant is left out)
        assert (of_out + constant).tolist() == pytest.approx(offline, abs=1e-6)


def test_logit_margin_is_golden_and_exact_where_probabilities_saturate():
    assert logit_margin(Z, Y).tolist() == pytest.approx([1.686738, 0.025923, -4.048587, -0.844397], abs=1e-6)
    assert logit_margin(torch.tensor([[800.0, 0.0]]), torch.tensor([0])).tolist() == [800.0]


def test_lira_equals_a_loop_over_samples_and_views():
    signals, members = world(40, models=6)
    scores, offline = asked("lira", signals, members), asked("lira_offline", signals, members)
    views = torch.cat([signals.logits[None], signals.augmented])
    theirs = torch.cat([signals.reference_logits[:, None], signals.reference_augmented], 1)

    def phi(z, y):
        p = z.softmax(0)[y]
        return math.log(p / (1 - p))

    for row, (online_score, offline_score) in enumerate(zip(scores, offline), start=20):
        online_total = offline_total = 0.0
        for q in range(4):
            residuals = {True: [], False: []}
            centre = {}
            for i in range(40):
                for kind in (True, False):
                    mine = [
                        phi(theirs[m, q, i], signals.labels[i])
                        for m in range(6)
                        if bool(signals.reference_members[m, i]) == kind
                    ]
                    middle = float(np.median(mine))
                    residuals[kind] += [v - middle for v in mine]
                    if i == row:
                        centre[kind] = middle
            x = phi(views[q, row], signals.labels[row])
            spread = {kind: float(np.std(values)) for kind, values in residuals.items()}
            online_total += stats.norm.logpdf(x, centre[True], spread[True]) - stats.norm.logpdf(
                x, centre[False], spread[False]
            )
            offline_total += stats.norm.logcdf(x, centre[False], spread[False])
        assert float(online_score) == pytest.approx(online_total / 4)
        assert float(offline_score) == pytest.approx(offline_total / 4)


def test_offline_lira_does_not_saturate():
    """Adding 1e-45 to a probability would stop at -103.6."""
    signals, members = world(scale=0.01)
    low = replace(signals, logits=signals.logits - 1e3 * torch.nn.functional.one_hot(signals.labels, 4))
    assert asked("lira_offline", low, members).max() < -1e4


def test_rmia_equals_the_textbook_double_loop():
    signals, members = world(60)
    known, query = Known(signals[torch.arange(30)], members[:30]), signals[torch.arange(30, 60)]

    def p(z, y):
        return float(z.softmax(0)[y])

    def ratio(s, i, offline):
        inside = [p(s.reference_logits[m, i], s.labels[i]) for m in range(6) if s.reference_members[m, i]]
        outside = [p(s.reference_logits[m, i], s.labels[i]) for m in range(6) if not s.reference_members[m, i]]
        mean = (1.3 * np.mean(outside) + 0.7) / 2 if offline else (np.mean(inside) + np.mean(outside)) / 2
        return p(s.logits[i], s.labels[i]) / mean

    for name, offline in (("rmia", False), ("rmia_offline", True)):
        z = [ratio(known.signals, i, offline) for i in range(30) if not known.members[i]]
        naive = [np.mean([ratio(query, i, offline) / r >= 2.0 for r in z]) for i in range(30)]
        assert ATTACKS[name](known, query).tolist() == pytest.approx(naive)


def test_attacks_by_share_and_by_difference_equal_loops():
    signals, members = world(120)
    known, query = Known(signals[torch.arange(60)], members[:60]), signals[torch.arange(60, 120)]
    population = [
        (float(v), int(y)) for v, y, m in zip(known.signals.log_true, known.signals.labels, members[:60]) if not m
    ]
    p_scores, r_scores, c_scores = (ATTACKS[a](known, query) for a in ("attack_p", "attack_r", "calibration"))
    for i in range(60):
        x, y = float(query.log_true[i]), int(query.labels[i])
        same = [v for v, c in population if c == y]
        same = same if len(same) >= 10 else [v for v, _ in population]
        assert float(p_scores[i]) == pytest.approx(np.mean([(v < x) + 0.5 * (v == x) for v in same]))
        theirs = [
            float(query.reference_logits[m, i].log_softmax(0)[y]) for m in range(6) if not query.reference_members[m, i]
        ]
        assert float(r_scores[i]) == pytest.approx(np.mean([(v < x) + 0.5 * (v == x) for v in theirs]))
        assert float(c_scores[i]) == pytest.approx(x - np.mean(theirs))


def test_an_attack_without_what_it_needs_is_skipped_with_the_reason_or_refused():
    signals, members = world(60)
    bare = Signals(signals.logits, signals.labels)
    usable, skipped = applicable(ATTACKS, bare, members.numpy())
    assert set(usable) == {"correctness", "confidence", "entropy", "modified_entropy", "attack_p", "network"}
    assert "2 reference models trained on a sample and 2 reference models trained without a sample" in skipped["lira"]
    with pytest.raises(UserError, match="'lira' needs 2 reference models"):
        run_attacks({"lira": ATTACKS["lira"]}, bare, members.numpy())


def test_a_single_reference_scores_only_the_samples_it_was_not_trained_on():
    """The half model of localisation: for one half of the members it is an insider."""
    signals, members = world(80)
    half = members & (torch.arange(80) % 2 == 0)
    one = Signals(signals.logits, signals.labels, signals.reference_logits[:1], half[None])
    found = run_attacks({"calibration": ATTACKS["calibration"]}, one, members.numpy())["calibration"]
    assert set(found.rows) == set(np.flatnonzero(~half.numpy())) and found.members.sum() == int((members & ~half).sum())


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
