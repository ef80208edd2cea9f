"""mixup (Zhang et al., ICLR 2018, arXiv 1710.09412)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pptp.errors import UserError
from pptp.retrain import LossDefense


@dataclass(frozen=True)
class Mixup(LossDefense):
    """Train on blends of two images and of their losses, with weight lambda ~ Beta(alpha, alpha)."""

    needs_images = True
    alpha: float = 1.0

    def check(self, classes, recipe):
        if not self.alpha > 0:
            raise UserError(f"mixup alpha is {self.alpha}: it must be above 0")

    def loss(self, step):
        weight = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        other = torch.randperm(len(step.targets)).to(step.targets.device)
        logits = step.model(weight * step.inputs + (1 - weight) * step.inputs[other])
        return weight * F.cross_entropy(logits, step.targets) + (1 - weight) * F.cross_entropy(
            logits, step.targets[other]
        )
