"""Attacks that score one output of the model, no training needed.

Correctness and confidence: Yeom et al. 2018 (arXiv 1709.01604); entropy: Shokri et al. 2017
(arXiv 1610.05820); modified entropy: Song & Mittal 2021 (arXiv 2003.10595). All in log space and float64.
"""

import torch
from torch import Tensor

from pptp.signals import Known, Signals, in_chunks


def correctness(known: Known, query: Signals) -> Tensor:
    """1[argmax = y]: members are classified correctly more often."""
    return (query.logits.argmax(1) == query.labels).double()


def confidence(known: Known, query: Signals) -> Tensor:
    """log p_y, which is minus the loss: members get more of it."""
    return query.log_true


def entropy(known: Known, query: Signals) -> Tensor:
    """sum_c p_c log p_c: predictions on members are sharper."""
    return _entropy(query.logits, query.labels)


def modified_entropy(known: Known, query: Signals) -> Tensor:
    """(1 - p_y) log p_y + sum_{c != y} p_c log(1 - p_c): sharp *and* right."""
    return _modified_entropy(query.logits, query.labels)


@in_chunks
def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.double().log_softmax(1)
    return (log_p.exp() * log_p).sum(1)


@in_chunks
def _modified_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.double().log_softmax(1)  # (n, classes)
    log_rest = _log_one_minus_exp(log_p)  # log(1 - p_c)
    true = labels[:, None]
    wrong = (log_p.exp() * log_rest).scatter(1, true, 0.0).sum(1)
    return (log_rest.gather(1, true).exp() * log_p.gather(1, true)).squeeze(1) + wrong


def _log_one_minus_exp(log_p: Tensor) -> Tensor:
    """log(1 - e^x) for x <= 0 without cancellation (Maechler 2012); x = 0 is taken as the smallest step below."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    return torch.where(log_p > -0.6931471805599453, torch.log(-torch.expm1(log_p)), torch.log1p(-log_p.exp()))
