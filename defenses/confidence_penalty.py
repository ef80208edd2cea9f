"""Confidence penalty (Pereyra et al. 2017, arXiv 1701.06548)."""

from dataclasses import dataclass

import torch.nn.functional as F

from pptp.errors import UserError
from pptp.retrain import LossDefense


@dataclass(frozen=True)
class ConfidencePenalty(LossDefense):
    """Cross-entropy minus `beta` times the entropy of the prediction."""

    beta: float = 0.1

    def check(self, classes, recipe):
        if not self.beta > 0:
            raise UserError(f"confidence_penalty beta is {self.beta}: it must be above 0")

    def loss(self, step):
        log_p = step.logits.log_softmax(1)  # (n, classes)
        return F.nll_loss(log_p, step.targets) + self.beta * (log_p.exp() * log_p).sum(1).mean()
