"""Attacks that are networks: fitted on known samples (Nasr et al. 2018) or on shadow models (Shokri et al., S&P 2017)."""

import warnings

import numpy as np
import torch
from torch import Tensor

from pptp.signals import CannotLearn, Known, Signals, needs

MOST = 20_000  # rows that a network is fitted on


def network(known: Known, query: Signals) -> Tensor:
    """A network on the outputs and the true class of the target, fitted on its known members and non-members."""
    rows = chosen(len(known.members))
    logits, labels, members = known.signals.logits[rows], known.signals.labels[rows], known.members.numpy()[rows]
    score = fitted(inputs(logits, labels), members, class_weights(labels.numpy(), members))
    return score(inputs(query.logits, query.labels))


@needs(outside=1, inside=1)
def shadow_network(known: Known, query: Signals) -> Tensor:
    """The same network fitted on what shadow models say of samples that they were, and were not, trained on."""
    signals = known.signals
    models, n = signals.reference_members.shape
    rows = chosen(models * n)
    model, sample = rows // n, rows % n
    logits = signals.reference_logits[model, sample]
    score = fitted(inputs(logits, signals.labels[sample]), signals.reference_members[model, sample].numpy())
    return score(inputs(query.logits, query.labels))


def inputs(logits: Tensor, labels: Tensor) -> np.ndarray:
    """(n, 2 classes + 1): log-probabilities in descending order, log p_y, and the true class as one-hot."""
    log_p = logits.double().log_softmax(1).clamp(min=-30)
    true = log_p.gather(1, labels[:, None])
    one_hot = torch.zeros(logits.shape).scatter_(1, labels[:, None], 1.0)
    return torch.cat([log_p.sort(1, descending=True).values.float(), true.float(), one_hot], 1).numpy()


def chosen(available: int) -> np.ndarray:
    """At most MOST row numbers, always the same ones."""
    return np.sort(np.random.default_rng(0).permutation(available)[:MOST])


def class_weights(labels: np.ndarray, members: np.ndarray) -> np.ndarray:
    """(n,): members and non-members of a class weigh the same, and nothing where one of them is missing.

    A split that was not drawn class by class has more members in some classes. They are the same classes among the samples to
    be scored, so that a network could find members by class alone where the model tells nothing.
    """
    weights = np.zeros(len(labels))
    for label in np.unique(labels):
        kinds = [(labels == label) & (members == kind) for kind in (True, False)]
        counts = [int(kind.sum()) for kind in kinds]
        if all(counts):
            for kind, count in zip(kinds, counts):
                weights[kind] = sum(counts) / (2 * count)
    return weights


def fitted(x: np.ndarray, members: np.ndarray, weights: np.ndarray | None = None):
    """A scorer of rows: log-odds of a network that stops by a part of its own training rows, never by what it scores."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if weights is not None:
        x, members, weights = x[weights > 0], members[weights > 0], weights[weights > 0]
    if members.all() or not members.any():
        raise CannotLearn("needs both members and non-members of a class to learn from")
    enough = len(x) >= 50  # to spare a tenth for knowing when to stop
    classifier = MLPClassifier((64,), early_stopping=enough, n_iter_no_change=5, max_iter=60, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 60 epochs are the budget
        model = make_pipeline(StandardScaler(), classifier).fit(x, members, mlpclassifier__sample_weight=weights)

    def score(rows: np.ndarray) -> Tensor:
        p = torch.from_numpy(model.predict_proba(rows)[:, 1]).double().clamp(1e-12, 1 - 1e-12)
        return torch.logit(p)

    return score
