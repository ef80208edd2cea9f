"""Attack-R: against reference models (Ye et al., CCS 2022, arXiv 2111.09679)."""

from torch import Tensor

from pptp.signals import Known, Signals, log_true, needs


@needs(outside=2)
def attack_r(known: Known, query: Signals) -> Tensor:
    """Share of the models that were not trained on the sample whose loss on it is higher than the target's, ties half."""
    theirs = log_true(query.reference_logits, query.labels)  # (m, n)
    outside = ~query.reference_members
    beaten = (theirs < query.log_true).double() + 0.5 * (theirs == query.log_true).double()
    return (beaten * outside).sum(0) / outside.sum(0)
