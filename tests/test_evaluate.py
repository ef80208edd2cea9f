from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch.utils.data import TensorDataset

import pptp
from pptp.attacking import table
from pptp.evaluate import Evaluation, MembershipScores, best_threshold, fold_of, run_attacks
from pptp.gate import Rule, judge
from pptp.intervals import Estimate, auc, proportion, rate_difference, tpr_at

scores_strategy = st.lists(st.integers(-5, 5), min_size=2, max_size=30)


def test_golden_loss_attack():
    members, nonmembers = -np.array([0.1, 0.2, 0.3, 0.9]), -np.array([0.25, 0.8, 1, 2])
    assert auc(members, nonmembers).value == 0.8125
    both, truth = np.concatenate([members, nonmembers]), np.repeat([True, False], 4)
    assert best_threshold(both, truth)[1] == 0.5


@settings(max_examples=60, deadline=None)
@given(scores_strategy, scores_strategy)
def test_auc_is_the_pairwise_definition_also_with_ties(a, b):
    naive = np.mean([(x > y) + 0.5 * (x == y) for x in a for y in b])
    found = auc(np.array(a), np.array(b))
    assert found.value == pytest.approx(naive) and 0 <= found.low <= found.value <= found.high <= 1


def test_auc_agrees_with_scikit_learn_and_its_interval_with_a_bootstrap():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.7, 1, 300), rng.normal(0, 1.3, 400)
    found = auc(a, b)
    assert found.value == pytest.approx(roc_auc_score(np.repeat([1, 0], [300, 400]), np.concatenate([a, b])))
    draws = [auc(rng.choice(a, 300), rng.choice(b, 400)).value for _ in range(800)]
    assert [found.low, found.high] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.006)


def test_auc_interval_covers_the_truth():
    rng = np.random.default_rng(1)
    truth = stats.norm.cdf(1 / 2**0.5)
    covered = [
        (lambda e: e.low <= truth <= e.high)(auc(rng.normal(1, 1, 60), rng.normal(0, 1, 80))) for _ in range(400)
    ]
    assert np.mean(covered) > 0.92


def test_null_is_half_and_covered():
    rng = np.random.default_rng(2)
    covered = [(lambda e: e.low <= 0.5 <= e.high)(auc(rng.normal(size=100), rng.normal(size=100))) for _ in range(400)]
    assert np.mean(covered) > 0.92


def test_perfect_separation_still_has_an_interval():
    found = auc(np.arange(10, 40), np.arange(0, 10))
    assert found.value == 1 and 0.6 < found.low < 0.999 and found.high == 1
    assert auc(np.arange(0, 10), np.arange(10, 40)).high < 0.4
    assert auc(np.ones(20), np.ones(20)).low < 0.5 < auc(np.ones(20), np.ones(20)).high


def test_few_samples_are_marked():
    assert auc(np.arange(5), np.arange(5)).note == "too few samples"
    assert tpr_at(np.arange(500), np.arange(500), 0.01).note == "too few samples"
    assert tpr_at(np.arange(500), np.arange(2000), 0.01).note == ""


def test_nan_is_refused():
    with pytest.raises(pptp.UserError, match="finite"):
        auc(np.array([0.0, np.nan]), np.array([1.0, 2.0]))
    with pytest.raises(pptp.UserError, match="sample 1"):
        MembershipScores(np.array([0.0, np.inf]), np.array([True, False]))


@settings(max_examples=60, deadline=None)
@given(scores_strategy, scores_strategy)
def test_threshold_by_sorting_is_the_quadratic_answer(a, b):
    scores = np.array(a + b, dtype=float)
    members = np.repeat([True, False], [len(a), len(b)])
    candidates = [*np.unique(scores), np.inf]
    naive = max((scores[members] >= t).mean() - (scores[~members] >= t).mean() for t in candidates)
    threshold, advantage = best_threshold(scores, members)
    assert advantage == pytest.approx(naive, abs=1e-12)
    assert (scores[members] >= threshold).mean() - (scores[~members] >= threshold).mean() == pytest.approx(
        naive, abs=1e-12
    )


@settings(max_examples=60, deadline=None)
@given(scores_strategy, scores_strategy, st.sampled_from([0.0, 0.1, 0.25, 0.5]))
def test_tpr_is_the_best_among_thresholds_within_the_fpr(a, b, fpr):
    a, b = np.array(a, float), np.array(b, float)
    thresholds = [-np.inf, *np.unique(np.concatenate([a, b]))]
    naive = max((a > t).mean() for t in thresholds if (b > t).mean() <= fpr + 1e-12)
    assert tpr_at(a, b, fpr).value == pytest.approx(naive)


@pytest.mark.parametrize("n, fpr", [(200, 0.05), (1500, 0.01)])
def test_tpr_interval_covers_the_truth(n, fpr):
    rng = np.random.default_rng(3)
    truth = 1 - stats.norm.cdf(stats.norm.ppf(1 - fpr) - 1)
    covered = []
    for _ in range(200):
        found = tpr_at(rng.normal(1, 1, n), rng.normal(0, 1, n), fpr)
        covered.append(found.low <= truth <= found.high)
    assert np.mean(covered) >= 0.95


def test_clopper_pearson():
    found = proportion(5, 50)
    assert (found.low, found.high) == pytest.approx(stats.binomtest(5, 50).proportion_ci(0.95, "exact"))
    assert proportion(0, 20).low == 0 and proportion(20, 20).high == 1


def test_rate_difference_newcombe():
    """Newcombe 1998, table II, method 10: 56/70 against 48/80 gives 0.0524 to 0.3339."""
    found = rate_difference(56, 70, 48, 80)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_cross_fitted_advantage_finds_nothing_where_there_is_nothing():
    """The in-sample maximum would report about 0.15 here, always above 0."""
    rng = np.random.default_rng(4)
    members = np.repeat([True, False], 100)
    drawn = [rng.normal(size=200) for _ in range(200)]
    found = [MembershipScores(s, members, np.arange(200) % 5) for s in drawn]
    assert np.mean([best_threshold(s, members)[1] for s in drawn]) > 0.08
    for name in ("advantage", "advantage_per_class"):
        estimates = [getattr(f, name) for f in found]
        assert abs(np.mean([e.value for e in estimates])) < 0.02
        assert np.mean([e.low <= 0 <= e.high for e in estimates]) >= 0.94


def test_per_class_thresholds_win_where_classes_differ():
    rng = np.random.default_rng(5)
    labels, members = np.arange(2000) % 2, np.repeat([True, False], 1000)
    scores = rng.normal(size=2000) + 1.0 * members + 5.0 * labels
    found = MembershipScores(scores, members, labels)
    assert found.advantage_per_class.low > found.advantage.high
    assert found.balanced_accuracy.value == pytest.approx((1 + found.advantage.value) / 2)


def test_inverted_leak_is_found_and_said_so():
    """Scores that rank members lowest tell as much: the attacker turns its guess around."""
    rng = np.random.default_rng(6)
    members = np.repeat([True, False], 500)
    inverted = MembershipScores(rng.normal(size=1000) - 1.5 * members, members, np.arange(1000) % 3)
    weak = MembershipScores(rng.normal(size=1000) + 0.3 * members, members, np.arange(1000) % 3)
    assert inverted.advantage.low > 0.3 and inverted.advantage_per_class.low > 0.3
    some = Estimate(0.5, 0.4, 0.6)
    name, found = Evaluation(some, some, {"weak": weak, "inverted": inverted}).strongest
    assert name == "inverted" and found.low > weak.auc.high and "turned around" in found.note
    evaluation = Evaluation(some, some, {"inverted": inverted})
    assert evaluation.tpr_of_strongest(0.01).value == replace(inverted, scores=-inverted.scores).tpr_at(0.01).value


def test_the_strongest_attack_is_shown_from_one_half_on_everywhere():
    """Else a table calls 0.47 the lesser leak beside 0.48, and the comparison below it the greater."""
    members = np.repeat([True, False], 400)
    scores = np.random.default_rng(0).normal(size=800) - 0.1 * members
    below = MembershipScores(scores, members, np.zeros(800))
    some = Estimate(0.5, 0.4, 0.6)
    found = Evaluation(some, some, {"confidence": below})
    _, auc = found.strongest
    assert below.auc.value < 0.5 < below.auc.high, "neither surely one way"
    assert auc.value == pytest.approx(1 - below.auc.value) and auc.low == 0.5 and auc.high > auc.value
    assert "confidence turned" in table({"undefended": found})
    judged = judge([Rule.parse("auc>0.9")], {"undefended": found.attacks}, {})[0]
    assert judged.estimate == auc
    assert found.tpr_of_strongest(0.01).to_dict() == found.to_dict()["strongest"]["tpr@0.01"]


def test_effect_is_two_sided():
    assert Estimate(0.3, 0.25, 0.35).effect == pytest.approx((0.15, 0.25))
    assert Estimate(0.5, 0.45, 0.56).effect == pytest.approx((0.0, 0.06))


def test_folds_are_balanced():
    members = np.repeat([True, False], [53, 31])
    fold = fold_of(members, 5, 0)
    assert max(np.bincount(fold[members])) - min(np.bincount(fold[members])) <= 1


def test_attack_never_sees_the_membership_of_what_it_scores():
    logits = torch.randn(60, 3)
    signals = pptp.Signals(logits, torch.arange(60) % 3)
    members = np.repeat([True, False], 30)

    def lookup(known, query):
        """Knows a sample's membership only if it was told it."""
        told = {tuple(row.tolist()): bool(m) for row, m in zip(known.signals.logits, known.members)}
        return torch.tensor(
            [0.5 if tuple(row.tolist()) not in told else float(told[tuple(row.tolist())]) for row in query.logits]
        )

    assert (run_attacks({"lookup": lookup}, signals, members)["lookup"].scores == 0.5).all()


def test_wrong_number_of_scores_is_refused():
    signals = pptp.Signals(torch.randn(40, 3), torch.arange(40) % 3)
    with pytest.raises(pptp.UserError, match="'bad' returned"):
        run_attacks({"bad": lambda known, query: query.logits}, signals, np.repeat([True, False], 20))


class Memory(torch.nn.Module):
    """Answers right, with certainty, on inputs it was given, and vaguely on others."""

    def __init__(self, known):
        super().__init__()
        self.known = torch.nn.Parameter(known)

    def forward(self, x):
        seen = (x.flatten(1)[:, None, :2] == self.known[None]).all(2).any(1)
        return torch.stack([1 + 9.0 * seen, torch.zeros(len(x))], 1)


def test_planted_leak_is_found_and_models_are_compared_side_by_side():
    x = torch.randn(200, 3, 2, 2)
    data = TensorDataset(x, torch.zeros(200, dtype=torch.long))
    inside, outside = torch.utils.data.Subset(data, range(100)), torch.utils.data.Subset(data, range(100, 200))
    leaky, blind = Memory(x[:100].flatten(1)[:, :2]), Memory(torch.full((1, 2), 99.0))
    found = pptp.evaluate({"leaky": leaky, "blind": blind}, inside, outside)
    assert found["leaky"].attacks["confidence"].auc.low > 0.9
    assert found["blind"].attacks["confidence"].auc.value == 0.5
    name, corrected = found["leaky"].strongest
    assert corrected.low <= found["leaky"].attacks[name].auc.low
    assert found["leaky"].to_dict()["strongest"]["corrected_for"] == 6


def test_model_in_training_mode_is_put_to_eval(model, splits):
    model.train()
    signals = pptp.collect(model, splits.test)
    assert not model.training and len(signals) == len(splits.test)
    assert torch.equal(pptp.collect(model, splits.test, batch_size=7).logits.argmax(1), signals.logits.argmax(1))
