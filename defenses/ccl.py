"""Convex-concave loss (Liu et al., ICML 2024, arXiv 2402.05453), with the exponential concave term."""

from dataclasses import dataclass

from pptp.errors import UserError
from pptp.retrain import LossDefense


@dataclass(frozen=True)
class CCL(LossDefense):
    """alpha CE + (1 - alpha) (-e^{p_y}): the concave term widens the spread of training losses that attacks rely on."""

    alpha: float = 0.5

    def check(self, classes, recipe):
        if not 0 < self.alpha < 1:
            raise UserError(f"ccl alpha is {self.alpha}: it must lie between 0 and 1")

    def loss(self, step):
        log_p = step.logits.log_softmax(1).gather(1, step.targets[:, None]).squeeze(1)  # (n,)
        return (-self.alpha * log_p - (1 - self.alpha) * log_p.exp().exp()).mean()
