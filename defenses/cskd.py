"""Class-wise self-knowledge distillation (Yun et al., CVPR 2020, arXiv 2003.13964): the paper's pre-training variant."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from pptp.errors import UserError
from pptp.retrain import Defense
from pptp.training import Monitor, Step, fit


@dataclass(frozen=True)
class CSKD(Defense):
    """Predict alike for two images of a class: CE(x) + weight T^2 KL(softmax(f(x')/T) held fixed || softmax(f(x)/T))."""

    temperature: float = 4.0
    weight: float = 1.0

    def check(self, classes, recipe):
        for name in ("temperature", "weight"):
            if not getattr(self, name) > 0:
                raise UserError(f"cskd {name} is {getattr(self, name)}: it must be above 0")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        partners = Partners(self, data.members, recipe.seed)
        history = fit(
            model,
            data.members,
            recipe,
            loss=partners.loss,
            monitors=(*monitors, partners),
            checkpoint=checkpoint,
            title="cs-kd",
        )
        return {**history.summary(), "active": 1.0}


def distillation(logits: Tensor, others: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(others/T) || softmax(logits/T)), mean over the batch; `others` is held fixed."""
    target = (others.detach() / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(
        (logits / temperature).log_softmax(1), target, log_target=True, reduction="batchmean"
    )


class Partners(Monitor):
    """For each sample one of its class, now and then itself, drawn anew each step."""

    def __init__(self, settings: CSKD, members, seed: int):
        self.settings, self.members, self.seed, self.steps = settings, members, seed, 0
        self.of_class = {int(c): np.flatnonzero(members.labels == c) for c in np.unique(members.labels)}

    def loss(self, step: Step) -> Tensor:
        self.steps += 1
        rng = np.random.default_rng((self.seed, self.steps))
        rows = [int(rng.choice(self.of_class[int(y)])) for y in step.targets]
        others = default_collate([self.members[row][0] for row in rows]).to(step.inputs.device)
        with torch.no_grad():
            answers = step.model(others)
        plain = F.cross_entropy(step.logits, step.targets)
        return plain + self.settings.weight * distillation(step.logits, answers, self.settings.temperature)

    def state_dict(self) -> dict:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
