"""Attack-P: against the population (Ye et al., CCS 2022, arXiv 2111.09679)."""

import torch
from torch import Tensor

from pptp.signals import Known, Signals


def attack_p(known: Known, query: Signals) -> Tensor:
    """Share of known non-members of the same class whose loss is higher; of all classes where its own has fewer than 10."""
    outsiders = known.signals[torch.nonzero(~known.members).flatten()]
    ours, theirs = query.log_true, outsiders.log_true
    scores = below(theirs, ours)
    for c in query.labels.unique():
        same = outsiders.labels == c
        if same.sum() >= 10:  # ranks among fewer say more of the class than of the sample
            mine = query.labels == c
            scores[mine] = below(theirs[same], ours[mine])
    return scores


def below(population: Tensor, values: Tensor) -> Tensor:
    """For each value, the share of the population below it, ties half. (n,)"""
    ordered = population.sort().values
    low, high = (torch.searchsorted(ordered, values.contiguous(), right=side) for side in (False, True))
    return (low + high).double() / (2 * max(1, len(ordered)))
