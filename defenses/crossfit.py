"""Cross-fitted labels: SELENA's idea (Tang et al., USENIX Security 2022, arXiv 2110.08324) with the halves of localisation as teachers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pptp.errors import UserError
from pptp.retrain import Defense
from pptp.training import fit

from .selena import Lookup, tempered


@dataclass(frozen=True)
class CrossFit(Defense):
    """Teach every sample what a model that was not trained on it says of it.

    The members were halved for localisation; the model of each half labels the other. Under PPTP these teachers have trunks of their own,
    unlike SELENA's sub-models: unless their initial weights had seen the sample, their labels know nothing of it. Label: weight * t +
    (1 - weight) * one-hot, t the outside probabilities to the power 1/temperature, normalised. Soft cross-entropy to it.
    """

    needs_outside = True

    weight: float = 1.0  # of the outside label; the rest is on the true class
    temperature: float = 2.0

    def check(self, classes, recipe):
        if not 0 <= self.weight <= 1:
            raise UserError(f"crossfit weight is {self.weight}: it must lie between 0, the true labels, and 1")
        if not self.temperature > 0:
            raise UserError(f"crossfit temperature is {self.temperature}: it must be above 0")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        outside = data.outside.probabilities(data.members)
        labels = mixed(outside, data.members.labels, self.weight, self.temperature)
        history = fit(
            model,
            data.members,
            recipe,
            loss=Lookup(data.members, labels, repr(self)).loss,
            monitors=monitors,
            checkpoint=checkpoint,
            title="crossfit",
        )
        right = float((outside.argmax(1).numpy() == data.members.labels).mean())
        return {"active": 1.0 if self.weight else 0.0, "outside_accuracy": right, **history.summary()}


def mixed(outside: Tensor, labels, weight: float, temperature: float) -> Tensor:
    """(n, classes): weight * normalised outside^(1/temperature) + (1 - weight) * one-hot."""
    soft = tempered(outside, temperature)
    hot = F.one_hot(torch.as_tensor(labels), outside.shape[1]).to(soft)
    return weight * soft + (1 - weight) * hot
