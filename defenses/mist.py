"""MIST: membership-invariant subspace training (Li, Li & Ribeiro, USENIX Security 2024, arXiv 2311.00919)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader, Sampler

from pptp.errors import UserError
from pptp.retrain import Defense
from pptp.stages import train_mode
from pptp.training import Monitor, fit


@dataclass(frozen=True)
class MIST(Defense):
    """Keep the model from saying of a sample what models that did not train on it would not say.

    Every epoch deals the members anew to `k` local models that start from the common weights. Each trains on its own part
    by cross-entropy; then, on the same part, each descends on lam times its cross-difference
    mean_x sum_c |p_i(c|x) - mean_{j != i} p_j(c|x)| to the others as they were before; then the weights are averaged.

    After the paper's description. How long each phase is (one pass), that local optimizers start fresh in every epoch, and
    the defaults are choices made here.
    """

    k: int = 4
    lam: float = 1.0

    def check(self, classes, recipe):
        if self.k < 2:
            raise UserError(
                f"mist k is {self.k}: it must be at least 2, since local models are compared with each other"
            )
        if not self.lam > 0:
            raise UserError(f"mist lam is {self.lam}: it must be above 0")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        if len(data.members) < 2 * self.k:
            raise UserError(f"mist k is {self.k}: {len(data.members)} members are too few to deal two to each")
        rounds = Rounds(self)
        history = fit(
            model,
            data.members,
            recipe,
            loss=rounds.loss,
            monitors=(rounds, *monitors),
            checkpoint=checkpoint,
            prepare=rounds.prepare,
            title="mist",
        )
        return history.summary()


class Dealt(Sampler):
    """Batches of a round: those of part 0, of part 1, ..., and all of them once more for the second phase."""

    def __init__(self, samples: int, parts: int, batch_size: int, seed: int):
        self.samples, self.parts, self.batch_size, self.seed, self.epoch = samples, parts, batch_size, seed, 0

    def groups(self) -> list[list[list[int]]]:
        """For each part, its batches: a function of (seed, epoch). A last batch of one joins the one before."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        shuffled = torch.randperm(self.samples, generator=generator)
        groups = []
        for part in shuffled.tensor_split(self.parts):
            batches = [batch.tolist() for batch in part.split(self.batch_size)]
            if len(batches) > 1 and len(batches[-1]) == 1:
                last = batches.pop()
                batches[-1] += last
            groups.append(batches)
        return groups

    def __len__(self) -> int:
        return 2 * sum(map(len, self.groups()))

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for _ in range(2) for group in self.groups() for batch in group)


@dataclass
class Rounds(Monitor):
    """The local models of one training, which take turns in the one model that `fit` trains."""

    settings: MIST
    step_now: int = field(default=0, repr=False)
    turn: int = field(default=-1, repr=False)  # 0 .. k-1: first phase of each local model, k .. 2k-1: second

    def prepare(self, model, optimizer, loader):
        self.model, self.optimizer = model, optimizer
        order = loader.batch_sampler.sampler
        self.dealt = Dealt(len(order), self.settings.k, loader.batch_sampler.batch_size, order.seed)
        dealt = DataLoader(loader.dataset, batch_sampler=self.dealt, num_workers=loader.num_workers)
        dealt.set_epoch = self.start
        return model, optimizer, dealt

    def start(self, epoch: int) -> None:
        """A new round from the common weights."""
        self.dealt.epoch, self.step_now, self.turn = epoch, 0, -1
        self.turns = [turn for turn, batches in enumerate(2 * self.dealt.groups()) for _ in batches]
        self.common = self._weights()
        self.local: list[dict[str, Tensor]] = [self.common] * self.settings.k

    def loss(self, step):
        self._take_turn(self.turns[self.step_now])
        step.logs["active"] = float(self.turn >= self.settings.k)
        if self.turn < self.settings.k:
            return F.cross_entropy(step.logits, step.targets)
        return self.settings.lam * cross_difference(step.logits, self._others(step.inputs))

    def after_backward(self, step):
        self.step_now += 1

    def after_epoch(self, model, epoch):
        self._take_turn(-1)
        self.local = self.done
        model.load_state_dict(average(self.local), strict=False)
        return {}

    def _take_turn(self, turn: int) -> None:
        """Put the weights of the local model whose turn it is into the model, after keeping those that were in it."""
        if turn == self.turn:
            return
        k = self.settings.k
        if self.turn == -1:
            self.done: list[dict[str, Tensor]] = []
        else:
            self.done.append(self._weights())
        if turn == k:  # the first phase is over: the others are compared with as they are now
            self.local, self.done = self.done, []
        self.turn = turn
        if turn >= 0:
            self.model.load_state_dict(self.local[turn % k], strict=False)
            self.optimizer.state.clear()

    def _weights(self) -> dict[str, Tensor]:
        """What training moves: trainable weights, and buffers of layers that are not frozen."""
        still = {n for n, m in self.model.named_modules() if getattr(m, "pptp_frozen", False)}
        trained = dict(self.model.named_parameters())
        return {
            name: tensor.clone()
            for name, tensor in self.model.state_dict().items()
            if (trained[name].requires_grad if name in trained else name.rpartition(".")[0] not in still)
        }

    @torch.no_grad()
    def _others(self, inputs: Tensor) -> Tensor:
        """(n, classes): mean prediction of the other local models, each in eval mode."""
        mine = self.turn % self.settings.k
        self.model.eval()
        said = [
            functional_call(self.model, weights, (inputs,)).softmax(1)
            for j, weights in enumerate(self.local)
            if j != mine
        ]
        train_mode(self.model)
        return torch.stack(said).mean(0)


def cross_difference(logits: Tensor, others: Tensor) -> Tensor:
    """mean over samples of sum_c |p(c|x) - others(c|x)|; logits and others (n, classes)."""
    return (logits.softmax(1) - others).abs().sum(1).mean()


def average(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of each weight; counters, which are whole numbers, from the first."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if tensor.is_floating_point() else tensor
        for name, tensor in states[0].items()
    }
