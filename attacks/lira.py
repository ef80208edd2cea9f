"""LiRA: the likelihood-ratio attack (Carlini et al., S&P 2022, arXiv 2112.03570)."""

import torch
from torch import Tensor

from pptp.likelihood import gaussian, log_normal
from pptp.signals import Known, Signals, join, logit_margin, needs


@needs(outside=2, inside=2)
def lira(known: Known, query: Signals) -> Tensor:
    """Online: log N(phi; in) - log N(phi; out), phi = log(p_y / (1 - p_y)), mean over augmented queries."""
    inside, outside = _fits(known, query)
    return _mean_over_queries(query, lambda q, phi: log_normal(phi, *inside[q]) - log_normal(phi, *outside[q]))


@needs(outside=2)
def lira_offline(known: Known, query: Signals) -> Tensor:
    """log P(phi' <= phi) under the models that were not trained on the sample: one-sided, in log space."""
    _, outside = _fits(known, query)
    return _mean_over_queries(
        query, lambda q, phi: torch.special.log_ndtr((phi - outside[q][0]) / outside[q][1].clamp(min=1e-12))
    )


def _views(signals: Signals) -> Tensor:
    """(q, n, classes): the sample itself, and as many of its augmented queries as the reference models were asked."""
    own, asked = signals.logits[None], signals.reference_augmented
    return own if asked is None else torch.cat([own, signals.augmented[: asked.shape[1]]])


def _reference_views(signals: Signals) -> Tensor:
    """(m, q, n, classes)"""
    own = signals.reference_logits[:, None]
    return own if signals.reference_augmented is None else torch.cat([own, signals.reference_augmented], 1)


def _mean_over_queries(query: Signals, score) -> Tensor:
    phi = logit_margin(_views(query), query.labels)  # (q, n)
    return torch.stack([score(q, row) for q, row in enumerate(phi)]).mean(0)


def _fits(known: Known, query: Signals) -> tuple[list, list]:
    """Per query view: (centre, spread), each (n,), of phi under models trained on the sample, and under the others.

    A shared spread is estimated on all samples whose reference outputs are there, which tells nothing of the target.
    """
    everything = join(known.signals, query)
    phi = logit_margin(_reference_views(everything), everything.labels).numpy()  # (m, q, n)
    members = everything.reference_members.numpy()
    mine = slice(len(known.signals), None)
    found = ([], [])
    for q in range(phi.shape[1]):
        for which, chosen in zip(found, (members, ~members)):
            centre, spread = gaussian(phi[:, q], chosen)
            which.append((torch.from_numpy(centre[mine]), torch.from_numpy(spread[mine])))
    return found
