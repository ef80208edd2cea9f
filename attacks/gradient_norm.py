"""White-box: how much a sample still pulls at the model (Nasr, Shokri & Houmansadr, S&P 2019, arXiv 1812.00910)."""

import torch
from torch import Tensor

from pptp.signals import Known, Signals, needs


@needs(measured="gradient")
def gradient_norm(known: Known, query: Signals, *, stage: str = "gradient/input") -> Tensor:
    """-log ||gradient of the loss||, with respect to the input or to the weights of a stage: members pull less."""
    norm = query.measured[stage].double()
    return -norm.clamp(min=torch.finfo(torch.float64).tiny).log()
