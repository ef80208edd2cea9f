"""Where nothing leaks nothing is found, and what is certain is not hidden by what is not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

import pptp
from attacks import ATTACKS
from attacks.neural import class_weights
from pptp.evaluate import Evaluation, MembershipScores, run_attacks
from pptp.gate import Rule, judge
from pptp.intervals import Estimate, auc, auc_difference, bootstrap
from pptp.likelihood import leave_one_out
from pptp.measures import References, with_references
from pptp.monitors.dynamics import plane, vulnerable_by_chance
from pptp.results import read_slices
from pptp.signals import CHUNK, Known, log_true

OF = Estimate(1, 1, 1)


def coin_flips(seed, classes=50, per_class=16):
    """Outputs that know nothing of membership, which is drawn at random and not class by class."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(np.arange(classes * per_class) % classes)
    logits = torch.from_numpy(rng.normal(size=(len(labels), classes)) * 1.5)
    features = torch.from_numpy(rng.normal(size=(len(labels), 6))).float()
    signals = pptp.Signals(logits + 4 * torch.nn.functional.one_hot(labels), labels, measured={"feature/a": features})
    return signals, rng.permutation(len(labels)) < len(labels) // 2


@pytest.mark.parametrize("name", ["network", "feature_probe"])
def test_classes_with_more_members_than_others_do_not_look_like_a_leak(name):
    """The held-out fold has them too, so that what learns who is a member by class would find a sure leak."""
    found = []
    for seed in range(4):
        (scores,) = run_attacks({name: ATTACKS[name]}, *coin_flips(seed)).values()
        found.append(scores.auc.value)
    assert abs(np.mean(found) - 0.5) < 3 * 0.0205 / len(found) ** 0.5, found


def test_members_and_others_of_a_class_weigh_the_same():
    labels, members = np.array([0, 0, 0, 1, 1, 2]), np.array([True, False, False, True, False, True])
    assert class_weights(labels, members).tolist() == [1.5, 0.75, 0.75, 1, 1, 0], "nothing, where there is one kind only"
    with pytest.raises(pptp.UserError, match="members and non-members of a class"):
        signals = pptp.Signals(torch.zeros(40, 2), torch.arange(40) % 2)
        run_attacks({"network": ATTACKS["network"]}, signals, np.arange(40) % 2 == 0)


def test_an_attack_that_asks_for_no_references_gets_none():
    """Who the half model was trained on is who is a member."""

    def careless(known, query):
        return query.log_true + (0 if query.reference_members is None else 9 * query.reference_members[0])

    members = np.arange(60) < 30
    signals = pptp.Signals(torch.zeros(60, 2), torch.zeros(60, dtype=torch.long))
    signals = replace(signals, reference_logits=torch.zeros(1, 60, 2), reference_members=torch.as_tensor(members)[None])
    (scores,) = run_attacks({"careless": careless}, signals, members).values()
    assert scores.auc.value == 0.5


def test_a_sure_leak_is_not_hidden_by_a_guess_on_a_handful_of_samples():
    rng, members = np.random.default_rng(0), np.arange(400) < 200
    sure = MembershipScores(rng.normal(size=400) + 0.5 * members, members)
    rows = np.array([0, 1, 2, 3, 4, 5, 396, 397, 398, 399])
    chance = MembershipScores(np.arange(10)[::-1] % 7, members[rows], rows=rows)
    assert abs(chance.auc.value - 0.5) > abs(sure.auc.value - 0.5) and chance.auc.effect[0] == 0
    assert Evaluation(OF, OF, {"chance": chance, "sure": sure}).strongest[0] == "sure"
    assert Evaluation(OF, OF, {"chance": chance}).strongest[0] == "chance"


def test_a_true_positive_rate_the_other_way_round_is_not_kept_by_its_first_way():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=2000)
    scores[:290] = rng.normal(-2.4, 0.05, 290)  # found with low scores, where non-members are rare too
    scores[500:510] += 6  # and surely a few with high ones
    (verdict,) = judge([Rule.parse("tpr@0.01>0.05")], {"m": {"a": MembershipScores(scores, np.arange(2000) < 1000)}}, {})
    assert verdict.status == "undecided" and verdict.estimate.high > 0.2


@pytest.mark.parametrize(("members", "others", "value"), [(20, 20, 0.97), (50, 50, 0.98), (300, 300, 0.6)])
def test_intervals_of_an_auc_cover_far_from_one_half_too(members, others, value):
    rng, apart = np.random.default_rng(0), 2**0.5 * norm.ppf(value)
    found = [auc(rng.normal(apart, 1, members), rng.normal(0, 1, others)) for _ in range(400)]
    assert np.mean([e.low <= value <= e.high for e in found]) >= 0.915  # 95 % and three standard errors


def test_a_perfect_score_against_a_useless_one_is_no_certainty():
    members = np.arange(24) < 12
    found = auc_difference(members.astype(float), np.zeros(24), members)
    assert found.value == 0.5 and found.low < 0.35 and found.high > 0.55


def test_intervals_from_few_resampled_values_say_so():
    assert [bootstrap(len, n).note for n in (9, 29, 30)] == ["too few samples", "rough, from few samples", ""]


# --- models of complementary halves -----------------------------------------------------------------


def pairs_of_models(models, samples, seed=0):
    """(phi, members): nothing is memorised; every second model is trained on what the one before was not."""
    rng = np.random.default_rng(seed)
    halves = np.argsort(rng.random((models // 2, samples)), axis=1) < samples // 2
    return rng.normal(size=(models, samples)), np.stack([halves, ~halves], 1).reshape(models, samples)


def test_leaving_a_model_out_leaves_out_its_complement():
    """Else members' in-models are one fewer than their out-models, and the other way round for the others."""
    phi, members = pairs_of_models(8, 4000)
    scores = leave_one_out(phi, members)
    assert abs(scores[members].mean() - scores[~members].mean()) < 3 * scores.std() / 16_000**0.5 * 2
    rows = [k for k in range(8) if k not in (2, 3)]
    alone = leave_one_out(phi[[2, *rows]], members[[2, *rows]])[0]
    assert np.allclose(scores[2], alone), "model 3 made no difference to model 2"


def test_some_are_vulnerable_by_chance():
    phi, members = pairs_of_models(8, 2000)
    states = plane(phi[None], members)[0]
    assert abs((states[:, 1] - states[:, 0]).mean()) < 0.015
    by_chance = vulnerable_by_chance(phi, members)
    told = vulnerable_by_chance(phi + 6 * members, members)
    assert 0 < by_chance < 0.06 and told < 0.1, "also where samples are memorised"


# --- queries, slices, memory ------------------------------------------------------------------------


def test_reference_models_that_were_asked_less_take_no_query_from_others():
    g = torch.Generator().manual_seed(0)
    signals = pptp.Signals(torch.randn(20, 3, generator=g), torch.arange(20) % 3)
    signals = replace(signals, augmented=torch.randn(8, 20, 3, generator=g))
    masks = torch.rand(4, 20, generator=g) < 0.5
    masks[:2], masks[2:] = masks[0], ~masks[0]
    said = torch.randn(4, 20, 3, generator=g)
    references = References(np.arange(20), said, masks, augmented=torch.randn(4, 1, 20, 3, generator=g))
    joined = with_references(signals, np.arange(20), references)
    known, query = Known(joined[torch.arange(10)], torch.arange(10) < 5), joined[torch.arange(10, 20)]
    assert len(query.augmented) == 8 and query.reference_augmented.shape[1] == 1
    steps = ATTACKS["agreement"](known, query) * 9
    assert torch.allclose(steps, steps.round()), "ninths"
    assert torch.isfinite(ATTACKS["lira"](known, query)).all()


def test_slices_are_sample_ids(tmp_path):
    np.savez(tmp_path / "mask.npz", young=np.arange(8) < 3)
    with pytest.raises(pptp.UserError, match="slice young of .*bool.*a list of sample ids"):
        read_slices(tmp_path / "mask.npz")
    np.savez(tmp_path / "ids.npz", young=np.array([4, 2], dtype=np.uint8))
    assert read_slices(tmp_path / "ids.npz")["young"].tolist() == [4, 2]


def test_what_many_models_say_is_looked_at_in_smaller_parts():
    seen = []
    labels = torch.zeros(CHUNK, dtype=torch.long)
    original = torch.Tensor.double
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "double", lambda self: seen.append(self.shape[:-1].numel()) or original(self))
        log_true(torch.zeros(4, CHUNK, 2), labels)
    assert len(seen) == 4 and max(seen) == CHUNK
