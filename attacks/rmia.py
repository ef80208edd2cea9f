"""RMIA: the relative membership inference attack (Zarifzadeh, Liu & Shokri, ICML 2024, arXiv 2312.03262)."""

import math

import torch
from torch import Tensor

from pptp.signals import Known, Signals, log_true, needs


@needs(outside=1, inside=1)
def rmia(known: Known, query: Signals, *, gamma: float = 2.0) -> Tensor:
    """Pr_z[(p(x)/pbar(x)) / (p(z)/pbar(z)) >= gamma], pbar the mean of the models with and of those without the sample."""

    def log_average(log_p: Tensor, members: Tensor) -> Tensor:
        return torch.logaddexp(log_mean(log_p, members), log_mean(log_p, ~members)) - math.log(2)

    return relative_rank(known, query, log_average, gamma)


@needs(outside=1)
def rmia_offline(known: Known, query: Signals, *, gamma: float = 2.0, a: float = 0.3) -> Tensor:
    """The same with models that did not see the sample alone: pbar = ((1 + a) pbar_out + 1 - a) / 2."""

    def log_average(log_p: Tensor, members: Tensor) -> Tensor:
        return torch.log(((1 + a) * log_mean(log_p, ~members).exp() + 1 - a) / 2)

    return relative_rank(known, query, log_average, gamma)


def relative_rank(known: Known, query: Signals, log_average, gamma: float) -> Tensor:
    """Share of population samples z whose ratio the query's beats by gamma; the population are the known non-members.

    By one sort instead of the (queries x population) table: the same numbers.
    """

    def log_ratio(s: Signals) -> Tensor:
        return s.log_true - log_average(log_true(s.reference_logits, s.labels), s.reference_members)

    z = log_ratio(known.signals)[~known.members].sort().values
    x = log_ratio(query)
    return torch.searchsorted(z, (x - math.log(gamma)).contiguous(), right=True).double() / max(1, len(z))


def log_mean(log_p: Tensor, chosen: Tensor) -> Tensor:
    """log of the mean over the chosen models; (m, n) and (m, n) bool -> (n,)."""
    kept = log_p.masked_fill(~chosen, -float("inf"))
    return kept.logsumexp(0) - chosen.sum(0).clamp(min=1).log()
