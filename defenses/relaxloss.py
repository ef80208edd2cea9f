"""RelaxLoss (Chen, Yu & Fritz, ICLR 2022, arXiv 2207.05801)."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pptp.errors import UserError
from pptp.retrain import LossDefense

VARIANTS = ("image", "tabular", "stopgrad")


@dataclass(frozen=True)
class RelaxLoss(LossDefense):
    """Keep the training loss near `alpha` instead of driving it to zero.

    Even epochs descend on |L - alpha|. Odd epochs take plain cross-entropy while L > alpha, and flatten the
    posterior below it. Three flattening losses that are not equivalent are in circulation: `image` (the
    authors' CIFAR code), `tabular` (their tabular code) and `stopgrad` (soft label held constant).
    """

    alpha: float = 1.0
    upper: float = 1.0  # the soft label keeps at most this much on the true class
    variant: str = "image"

    def check(self, classes, recipe):
        if self.variant not in VARIANTS:
            raise UserError(f"relaxloss variant is {self.variant!r}: it must be one of {', '.join(VARIANTS)}")
        if not 0 < self.alpha < math.log(classes):
            raise UserError(
                f"relaxloss alpha is {self.alpha}: it must lie between 0 and ln(classes) = {math.log(classes):.3f}, "
                "since above that the model would have to be worse than guessing"
            )
        if not 0 < self.upper <= 1:
            raise UserError(f"relaxloss upper is {self.upper}: it must lie in (0, 1]")
        if recipe.epochs % 2:
            raise UserError(
                f"relaxloss alternates between even and odd epochs and must not stop between them: epochs is {recipe.epochs}, make it even"
            )

    def loss(self, step) -> Tensor:
        mean = F.cross_entropy(step.logits, step.targets)
        below = float(mean.detach()) <= self.alpha
        step.logs["active"] = float(below)
        if step.epoch % 2 == 0:
            return (mean - self.alpha).abs()
        return flattening(step.logits, step.targets, self.upper, self.variant) if below else mean


def flattening(logits: Tensor, targets: Tensor, upper: float, variant: str) -> Tensor:
    """Posterior flattening towards t: t_y = min(p_y, upper), t_c = (1 - t_y)/(C - 1). Returns a scalar.

    image: mean[(1 - correct) CE(z, t) - CE(z, y)]; tabular: mean CE(z, t); stopgrad: mean CE(z, sg(t)).
    """
    log_p = logits.log_softmax(1)  # (n, classes)
    true = targets[:, None]
    kept = log_p.exp().gather(1, true).clamp(max=upper)  # (n, 1)
    soft = ((1 - kept) / (logits.shape[1] - 1)).expand_as(log_p).scatter(1, true, kept)
    if variant == "stopgrad":
        soft = soft.detach()
    to_soft = -(soft * log_p).sum(1)
    if variant == "image":
        wrong = (logits.argmax(1) != targets).to(to_soft.dtype)
        return (wrong * to_soft - F.cross_entropy(logits, targets, reduction="none")).mean()
    return to_soft.mean()
