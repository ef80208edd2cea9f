"""Label smoothing (Szegedy et al., CVPR 2016, arXiv 1512.00567)."""

from dataclasses import dataclass

import torch.nn.functional as F

from pptp.errors import UserError
from pptp.retrain import LossDefense


@dataclass(frozen=True)
class LabelSmoothing(LossDefense):
    """Cross-entropy to a label that keeps 1 - `smoothing` on the true class and spreads the rest evenly."""

    smoothing: float = 0.1

    def check(self, classes, recipe):
        if not 0 < self.smoothing < 1:
            raise UserError(f"label_smoothing smoothing is {self.smoothing}: it must lie between 0 and 1")

    def loss(self, step):
        return F.cross_entropy(step.logits, step.targets, label_smoothing=self.smoothing)
