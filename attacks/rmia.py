"""RMIA: the relative membership inference attack (Zarifzadeh, Liu & Shokri, ICML 2024, arXiv 2312.03262)."""

import math

import torch
from torch import Tensor

from pptp.signals import Known, Signals, log_true, needs


@needs(outside=1, inside=1)
def rmia(known: Known, query: Signals, *, gamma: float = 2.0) -> Tensor:
    """Pr_z[(p(x)/pbar(x)) / (p(z)/pbar(z)) >= gamma], pbar the mean of the models with and of those without the sample."""
    return relative_rank(known, query, lambda s: torch.logaddexp(*_mean_in_out(s)) - math.log(2), gamma)


@needs(outside=1)
def rmia_offline(known: Known, query: Signals, *, gamma: float = 2.0, a: float = 0.3) -> Tensor:
    """The same with models that did not see the sample alone: pbar = ((1 + a) pbar_out + 1 - a) / 2."""

    def log_average(s: Signals) -> Tensor:
        _, outside = _mean_in_out(s)
        return torch.log(((1 + a) * outside.exp() + 1 - a) / 2)

    return relative_rank(known, query, log_average, gamma)


def relative_rank(known: Known, query: Signals, log_average, gamma: float) -> Tensor:
    """Share of population samples z whose ratio the query's beats by gamma; the population are the known non-members.

    By one sort instead of the (queries x population) table: the same numbers.
    """
    population = known.signals[torch.nonzero(~known.members).flatten()]
    z = (population.log_true - log_average(population)).sort().values
    x = query.log_true - log_average(query)
    return torch.searchsorted(z, (x - math.log(gamma)).contiguous(), right=True).double() / max(1, len(z))


def _mean_in_out(signals: Signals) -> tuple[Tensor, Tensor]:
    """log of the mean p_y over models trained with the sample, and without it, each (n,)."""
    log_p = log_true(signals.reference_logits, signals.labels)  # (m, n)

    def mean(chosen: Tensor) -> Tensor:
        kept = log_p.masked_fill(~chosen, -float("inf"))
        return kept.logsumexp(0) - chosen.sum(0).clamp(min=1).log()

    return mean(signals.reference_members), mean(~signals.reference_members)
