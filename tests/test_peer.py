"""The same logits to adversarial-robustness-toolbox and to us: the same answers. Needs `pip install pptp[peer]`."""

import numpy as np
import pytest
import torch

art = pytest.importorskip("art", reason="adversarial-robustness-toolbox is not installed (pip install pptp[peer])")

from attacks import ATTACKS  # noqa: E402
from pptp import Signals  # noqa: E402
from pptp.evaluate import MembershipScores, run_attacks  # noqa: E402

N, CLASSES = 600, 5


@pytest.fixture
def outputs():
    rng = np.random.default_rng(0)
    members, labels = np.arange(N) < N // 2, np.arange(N) % CLASSES
    logits = rng.normal(size=(N, CLASSES)).astype(np.float32)
    logits[np.arange(N), labels] += 0.5 + 1.5 * members
    return logits, labels, members


def test_correctness_is_the_rule_based_attack(outputs):
    from art.attacks.inference.membership_inference import MembershipInferenceBlackBoxRuleBased
    from art.estimators.classification import BlackBoxClassifier

    logits, labels, members = outputs
    classifier = BlackBoxClassifier(lambda x: x, input_shape=(CLASSES,), nb_classes=CLASSES)
    theirs = MembershipInferenceBlackBoxRuleBased(classifier).infer(logits, labels)
    signals = Signals(torch.from_numpy(logits), torch.from_numpy(labels))
    ours = run_attacks({"correctness": ATTACKS["correctness"]}, signals, members)["correctness"]
    assert np.array_equal(theirs, ours.scores)
    accuracy = np.mean(theirs == members)
    train, test = theirs[members].mean(), theirs[~members].mean()
    assert accuracy == pytest.approx(0.5 + (train - test) / 2)
    assert ours.auc.value == pytest.approx(accuracy)


@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.2])
def test_true_positive_rate_at_a_false_positive_rate(outputs, fpr):
    from art.metrics.privacy.worst_case_mia_score import get_roc_for_fpr

    logits, labels, members = outputs
    signals = Signals(torch.from_numpy(logits), torch.from_numpy(labels))
    scores = signals.log_true.numpy()
    ((their_fpr, their_tpr, _),) = get_roc_for_fpr(scores, members.astype(int), targeted_fpr=fpr)
    ours = MembershipScores(scores, members)
    assert their_fpr <= fpr
    assert ours.tpr_at(fpr).value == pytest.approx(their_tpr)
    assert ours.tpr_at(fpr).low <= their_tpr <= ours.tpr_at(fpr).high
