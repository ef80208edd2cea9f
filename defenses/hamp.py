"""HAMP (Chen & Pattabiraman, NDSS 2024, arXiv 2307.01610): high-entropy labels, an entropy bonus, modified outputs."""

import math
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from pptp.errors import UserError
from pptp.retrain import LossDefense


@dataclass(frozen=True)
class HAMP(LossDefense):
    """Train to soft labels of entropy `gamma` ln C with an entropy bonus, KL(t || p) - alpha H(p); answer with borrowed scores.

    At test time only the order of a prediction is kept: its values are those of the model's answer to random noise,
    sorted. Labels do not change, confidences no longer say anything about the sample.
    """

    gamma: float = 0.9
    alpha: float = 0.001
    modify_outputs: bool = True

    def check(self, classes, recipe):
        if not 0 < self.gamma < 1:
            raise UserError(
                f"hamp gamma is {self.gamma}: it must lie between 0 and 1, the share of the largest entropy"
            )
        if not self.alpha >= 0:
            raise UserError(f"hamp alpha is {self.alpha}: it must be 0 or above")

    def adapt(self, model):
        if self.modify_outputs:
            model.register_forward_hook(OutputModification())

    def loss(self, step):
        log_p = step.logits.log_softmax(1)  # (n, classes)
        soft = soft_labels(step.targets, log_p.shape[1], self.gamma).to(log_p)
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        return (soft * (soft.log() - log_p)).sum(1).mean() - self.alpha * entropy


def soft_labels(targets: Tensor, classes: int, gamma: float) -> Tensor:
    """(n, classes): most on the true class, the rest spread evenly, with entropy exactly gamma ln(classes)."""

    def excess(p: float) -> float:
        rest = (1 - p) / (classes - 1)
        return -(p * math.log(p) + (classes - 1) * rest * math.log(rest)) - gamma * math.log(classes)

    p = brentq(excess, 1 / classes, 1 - 1e-12)
    soft = torch.full((len(targets), classes), (1 - p) / (classes - 1), dtype=torch.float64)
    return soft.scatter(1, targets.cpu()[:, None], p).to(targets.device)


class OutputModification:
    """A forward hook that, in eval mode, keeps the order of the logits and borrows their values from noise images.

    Which noise image lends its values is a function of the input alone: the same for any batch it comes in.
    """

    LENDERS = 64

    def __init__(self):
        self.lent: Tensor | None = None  # (LENDERS, classes), rising; forgotten while the model trains
        self.asking = False

    def __call__(self, model: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor | None:
        if self.asking:
            return None
        if model.training:
            self.lent = None
            return None
        if self.lent is None:
            self.lent = self._ask(model, inputs[0])
        lender = (inputs[0].double().flatten(1).sum(1).abs() * 1e4).long() % self.LENDERS
        values = self.lent[lender].to(logits)
        return torch.empty_like(values).scatter(1, logits.argsort(1), values)

    @torch.no_grad()
    def _ask(self, model: nn.Module, like: Tensor) -> Tensor:
        noise = torch.rand((self.LENDERS, *like.shape[1:]), generator=torch.Generator().manual_seed(0)).to(like) * 2 - 1
        self.asking = True
        try:
            return model(noise).log_softmax(1).sort(1).values
        finally:
            self.asking = False
