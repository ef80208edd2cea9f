"""Attacks that see predicted classes alone (Choquette-Choo et al., ICML 2021, arXiv 2007.14321)."""

from torch import Tensor

from pptp.signals import Known, Signals, needs


@needs(augmented=True)
def agreement(known: Known, query: Signals) -> Tensor:
    """Share of the sample and its augmented queries that are classified as the true class."""
    right = (query.augmented.argmax(-1) == query.labels).double().sum(0)
    own = (query.logits.argmax(1) == query.labels).double()
    return (right + own) / (1 + len(query.augmented))


@needs(measured="boundary")
def boundary_distance(known: Known, query: Signals) -> Tensor:
    """Distance to the nearest other class that was found within the query budget; 0 where the sample is misclassified."""
    return query.measured["boundary"].double()
