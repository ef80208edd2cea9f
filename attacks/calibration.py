"""Difficulty calibration (Watson et al., ICLR 2022, arXiv 2111.08440)."""

from torch import Tensor

from pptp.signals import Known, Signals, log_true, needs


@needs(outside=1)
def calibration(known: Known, query: Signals) -> Tensor:
    """log p_y minus its mean over models that were not trained on the sample: easy samples score low for everyone."""
    theirs = log_true(query.reference_logits, query.labels)  # (m, n)
    outside = ~query.reference_members
    return query.log_true - (theirs * outside).sum(0) / outside.sum(0)
