"""White-box: curvature of the loss around a sample (Ravikumar et al., ICML 2024, arXiv 2402.18726)."""

import torch
from torch import Tensor

from pptp.signals import Known, Signals, needs


@needs(measured="curvature")
def curvature(known: Known, query: Signals) -> Tensor:
    """-log of the input-loss curvature (`fisher`): a model is flatter around what it has fitted."""
    found = query.measured["curvature"].double()
    return -found.clamp(min=torch.finfo(torch.float64).tiny).log()
