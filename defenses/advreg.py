"""Adversarial regularization (Nasr, Shokri & Houmansadr, CCS 2018, arXiv 1807.05852)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from pptp.errors import UserError
from pptp.retrain import Defense
from pptp.stages import eval_mode
from pptp.training import Monitor, Step, fit

CHANCE = math.log(0.5)  # gain of a network that cannot tell; until it can, the added term does nothing


@dataclass(frozen=True)
class AdvReg(Defense):
    """Train against an inference network that tries to tell members from a reference set by the model's outputs.

    Classifier: CE + alpha (mean h(f(x), y) - 1/2). Inference network h: maximises its gain
    (mean log h on members + mean log(1 - h) on reference)/2, `k` steps per classifier step.
    """

    alpha: float = 1.0  # lambda in the original, alpha in the PPTP paper
    k: int = 3
    warmup: int = 1  # epochs of plain cross-entropy first
    attack_lr: float = 1e-3

    def check(self, classes, recipe):
        if not self.alpha > 0:
            raise UserError(f"advreg alpha is {self.alpha}: it must be above 0")
        if self.k < 1:
            raise UserError(f"advreg k is {self.k}: it must be at least 1")
        if not 0 <= self.warmup < recipe.epochs:
            raise UserError(f"advreg warmup is {self.warmup}: it must lie between 0 and the {recipe.epochs} epochs")
        if not self.attack_lr > 0:
            raise UserError(f"advreg attack_lr is {self.attack_lr}: it must be above 0")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        if data.reference is None or len(data.reference) == 0:
            raise UserError(
                "advreg needs reference samples that are neither members nor evaluated: train with --reference"
            )
        adversary = Adversary(self, model, data, recipe)
        history = fit(
            model,
            data.members,
            recipe,
            loss=adversary.loss,
            monitors=(*monitors, adversary),
            checkpoint=checkpoint,
            title="advreg",
        )
        if hasattr(data.reference, "set_epoch"):  # as `fit` leaves the members
            data.reference.set_epoch(None)
        return {"active": 0.0, **history.summary()}


class InferenceNetwork(nn.Module):
    """The published attack network: (probabilities, one-hot label) -> membership logit."""

    def __init__(self, classes: int):
        super().__init__()
        self.of_output = _layers(classes, 1024, 512, 64)
        self.of_label = _layers(classes, 128, 64)
        self.together = nn.Sequential(_layers(128, 256, 128, 64), nn.Linear(64, 1))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """probabilities (n, classes), labels (n,) -> logits of being a member (n,)."""
        one_hot = F.one_hot(labels, probabilities.shape[1]).to(probabilities.dtype)
        return self.together(torch.cat([self.of_output(probabilities), self.of_label(one_hot)], 1)).squeeze(1)


def _layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())))


class Adversary(Monitor):
    """The inference network in training, and the regularised loss it gives the classifier."""

    def __init__(self, settings: AdvReg, model: nn.Module, data, recipe):
        self.settings, self.model, self.recipe = settings, model, recipe
        self.members, self.reference = data.members, data.reference
        self.draws = 0
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            classes = getattr(model, "num_classes", None) or data.classes
            self.network = InferenceNetwork(classes)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=settings.attack_lr)

    def loss(self, step: Step) -> Tensor:
        plain = F.cross_entropy(step.logits, step.targets)
        if step.epoch < self.settings.warmup:
            step.logs["active"] = 0.0
            return plain
        self.network.to(step.inputs.device)
        gains = [self._attack_step(step) for _ in range(self.settings.k)]
        gain = sum(gains) / len(gains)
        step.logs.update(active=float(gain > CHANCE + 0.01), gain=gain)
        guessed = self.network(step.logits.softmax(1), step.targets).sigmoid()
        return plain + self.settings.alpha * (guessed.mean() - 0.5)

    def _attack_step(self, step: Step) -> float:
        """One step of the inference network on fresh members and reference samples; returns its gain."""
        inside, outside = (self._outputs(step, part) for part in (self.members, self.reference))
        self.optimizer.zero_grad(set_to_none=True)
        gain = 0.5 * (F.logsigmoid(self.network(*inside)).mean() + F.logsigmoid(-self.network(*outside)).mean())
        (-gain).backward()
        self.optimizer.step()
        return float(gain.detach())

    @torch.no_grad()
    def _outputs(self, step: Step, part: Dataset) -> tuple[Tensor, Tensor]:
        """Probabilities and labels of a random batch, the classifier in eval mode: h must not feed BatchNorm."""
        self.draws += 1
        if hasattr(part, "set_epoch"):  # kept views: of both the same, or the network would learn to tell views
            part.set_epoch(step.epoch)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.draws)
        rows = torch.randint(len(part), (min(len(part), self.recipe.batch_size),), generator=generator).tolist()
        inputs, labels = default_collate([tuple(part[row][:2]) for row in rows])
        with eval_mode(self.model):
            probabilities = self.model(inputs.to(step.inputs.device)).softmax(1)
        return probabilities, labels.to(step.inputs.device)

    def state_dict(self) -> dict:
        return {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "draws": self.draws}

    def load_state_dict(self, state: dict) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.draws = state["draws"]
