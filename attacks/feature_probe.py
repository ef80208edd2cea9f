"""White-box: does a stage's output, of the frozen trunk too, tell who was a member?"""

import numpy as np
import torch
from torch import Tensor

from pptp.probes import fit_svm
from pptp.signals import CannotLearn, Known, Signals, needs

MOST = 5000  # non-members that a probe is fitted on


@needs(measured="feature")
def feature_probe(known: Known, query: Signals, *, stage: str) -> Tensor:
    """Margin of the true class under a linear SVM on pooled features that was fitted on known non-members alone.

    It reads members better than others only if the stage itself separates them better.
    """
    outsiders = np.flatnonzero(~known.members.numpy())
    outsiders = outsiders[np.sort(np.random.default_rng(0).permutation(len(outsiders))[:MOST])]
    x, y = known.signals.measured[stage].numpy()[outsiders], known.signals.labels.numpy()[outsiders]
    if len(np.unique(y)) < 2:
        raise CannotLearn("needs known non-members of two classes to learn from")
    svm = fit_svm(x, y, seed=0, class_weight="balanced")  # else what is rarer among non-members scores as one
    return margin(svm.decision_function(query.measured[stage].numpy()), svm.classes_, query.labels.numpy())


def margin(decision: np.ndarray, classes: np.ndarray, labels: np.ndarray) -> Tensor:
    """True class minus the best other one; a class that the probe has never seen gets the lowest there is."""
    if decision.ndim == 1:  # two classes: one column
        decision = np.stack([-decision, decision], 1)
    column = np.searchsorted(classes, labels)
    seen = classes[np.minimum(column, len(classes) - 1)] == labels
    column = np.where(seen, column, 0)
    rows = np.arange(len(labels))
    true = np.where(seen, decision[rows, column], decision.min(1))
    others = decision.copy()
    others[rows[seen], column[seen]] = -np.inf
    return torch.from_numpy(true - others.max(1))
