"""Cross-fitted labels: SELENA's idea (Tang et al., USENIX Security 2022, arXiv 2110.08324) with the halves of localisation as teachers."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pptp.data import sample_ids
from pptp.errors import UserError
from pptp.outside import Teachers
from pptp.retrain import Defense
from pptp.training import Step, fit

from .selena import Lookup, soft_cross_entropy


@dataclass(frozen=True)
class CrossFit(Defense):
    """Teach every sample what a model that was not trained on it says of it.

    The members were halved for localisation; the model of each half labels the other. Under PPTP these teachers have trunks of their own,
    unlike SELENA's sub-models: unless their initial weights had seen the sample, their labels know nothing of it. Label: weight * t + (1 - weight) * one-hot, t the outside
    probabilities to the power 1/temperature, normalised. Soft cross-entropy to it.

    With `mix` the student sees blends of two members of one half instead, with weight lambda ~ Beta(mix, mix), and its teacher is asked
    about that very blend (after Beyer et al., CVPR 2022, arXiv 2106.05237).
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
        loss = Blends(self, data.outside) if self.mix else self.fixed(data)
        history = fit(
            model, data.members, recipe, loss=loss.loss, monitors=monitors, checkpoint=checkpoint, title="crossfit"
        )
        said = data.outside.probabilities(torch.as_tensor(sample_ids(data.members)))
        right = float((said.argmax(1).numpy() == data.members.labels).mean())
        return {"active": 1.0 if self.weight or self.mix else 0.0, "outside_accuracy": right, **history.summary()}

    def fixed(self, data) -> Lookup:
        """Labels that are computed once."""
        said = data.outside.probabilities(torch.as_tensor(sample_ids(data.members)))
        soft = softened(said.clamp(min=1e-12).log(), self.temperature)
        hot = F.one_hot(torch.as_tensor(data.members.labels), soft.shape[1])
        return Lookup(data.members, mixed(soft, hot, self.weight), repr(self))


@dataclass
class Blends:
    """The loss of batches of blends, each labelled as its teacher sees it."""

    defense: CrossFit
    teachers: Teachers = field(repr=False)

    def loss(self, step: Step) -> Tensor:
        share = float(torch.distributions.Beta(self.defense.mix, self.defense.mix).sample())
        other = partners(self.teachers.halves(step.indices))
        x = share * step.inputs + (1 - share) * step.inputs[other]
        soft = softened(self.teachers.say(x, step.indices), self.defense.temperature)
        hot = F.one_hot(step.targets, soft.shape[1]).to(soft)
        label = mixed(soft, share * hot + (1 - share) * hot[other], self.defense.weight)
        return soft_cross_entropy(step.model(x), label)


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
