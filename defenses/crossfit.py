"""Cross-fitted labels: SELENA's idea (Tang et al., USENIX Security 2022, arXiv 2110.08324) with the halves of localisation as teachers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pptp.errors import UserError
from pptp.outside import Teachers
from pptp.retrain import Defense
from pptp.training import Step, fit

from .selena import Lookup, soft_cross_entropy


@dataclass(frozen=True)
class CrossFit(Defense):
    """Teach every sample what a model that was not trained on it says of it.

    The members were halved for localisation; the model of each half labels the other. Under PPTP these teachers have trunks of their own,
    unlike SELENA's sub-models, so their labels hold nothing of the sample. Label: weight * t + (1 - weight) * one-hot, t the outside
    probabilities to the power 1/temperature, normalised. Soft cross-entropy to it.

    With `mix` the student sees blends of two members of one half instead, with weight lambda ~ Beta(mix, mix), and its teacher is asked
    about that very blend (Beyer et al., CVPR 2022, arXiv 2106.05237): there are too many of them to be learned by heart.
    """

    needs_outside = True

    weight: float = 1.0  # of the outside label; the rest is on the true class
    temperature: float = 2.0
    mix: float = 0.0  # 0: members as they are, and labels that are computed once

    @property
    def needs_images(self):
        return self.mix > 0

    def check(self, classes, recipe):
        if not 0 <= self.weight <= 1:
            raise UserError(f"crossfit weight is {self.weight}: it must lie between 0, the true labels, and 1")
        if not self.temperature > 0:
            raise UserError(f"crossfit temperature is {self.temperature}: it must be above 0")
        if not self.mix >= 0:
            raise UserError(f"crossfit mix is {self.mix}: it must be 0, for no blending, or above")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        teachers = data.outside
        loss = (lambda step: self.blended(step, teachers)) if self.mix else self.fixed(data)
        history = fit(
            model, data.members, recipe, loss=loss, monitors=monitors, checkpoint=checkpoint, title="crossfit"
        )
        right = float((teachers.probabilities.argmax(1).numpy() == data.members.labels).mean())
        return {"active": 1.0 if self.weight or self.mix else 0.0, "outside_accuracy": right, **history.summary()}

    def fixed(self, data):
        """Labels by sample id."""
        soft = softened(data.outside.probabilities.clamp(min=1e-12).log(), self.temperature)
        hot = F.one_hot(torch.as_tensor(data.members.labels), soft.shape[1])
        return Lookup(data.members, mixed(soft, hot, self.weight)).loss

    def blended(self, step: Step, teachers: Teachers) -> Tensor:
        """The loss of one batch of blends."""
        share = float(torch.distributions.Beta(self.mix, self.mix).sample())
        other = partners(teachers.halves(step.indices))
        x = share * step.inputs + (1 - share) * step.inputs[other]
        soft = softened(teachers.say(x, step.indices), self.temperature)
        hot = F.one_hot(step.targets, soft.shape[1]).to(soft)
        return soft_cross_entropy(step.model(x), mixed(soft, share * hot + (1 - share) * hot[other], self.weight))


def softened(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities to the power 1/temperature, normalised; of any logits that give these probabilities."""
    return (logits / temperature).softmax(1)


def mixed(soft: Tensor, hot: Tensor, weight: float) -> Tensor:
    """(n, classes): weight * soft + (1 - weight) * hot."""
    return weight * soft + (1 - weight) * hot.to(soft)


def partners(halves: Tensor) -> Tensor:
    """(n,) positions: for every sample one of the same half at random, each once."""
    found = torch.arange(len(halves), device=halves.device)
    for half in halves.unique():
        mine = (halves == half).nonzero().squeeze(1)
        found[mine] = mine[torch.randperm(len(mine)).to(mine.device)]
    return found
