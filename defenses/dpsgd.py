"""Differentially private SGD (Abadi et al., CCS 2016, arXiv 1607.00133) through Opacus."""

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pptp.errors import UserError
from pptp.norms import batch_norms, swap_norms
from pptp.retrain import Defense
from pptp.stages import train_mode
from pptp.training import Monitor, fit

SCOPES = {
    "same": "the frozen layers were trained on the same members without differential privacy: the model as a whole has NO guarantee",
    "disjoint": "the frozen layers are stated to have been trained on other people's data, for whom this says nothing",
    "public": "the frozen layers are stated to have seen public data only, so it covers the members in the whole model",
}


@dataclass(frozen=True)
class DPSGD(Defense):
    """Clip each sample's gradient to norm `max_grad_norm` and add Gaussian noise to their sum, on Poisson-sampled batches.

    Noise is calibrated to `epsilon` unless `noise_multiplier` is given. Trainable BatchNorm becomes GroupNorm (its scale
    and shift are kept), since it mixes samples; frozen BatchNorm stays.
    """

    epsilon: float = 8.0
    noise_multiplier: float = 0.0  # above 0: used as it is, and epsilon follows from it
    max_grad_norm: float = 1.0
    delta: float = 0.0  # 0: one over the number of members
    accountant: str = "rdp"  # or "prv", tighter and slow
    clipping: str = "hooks"  # per-sample gradients, or "ghost": their norms only, less memory
    physical_batch: int = 0  # largest batch in memory at once; 0: the whole batch
    trunk_data: str = "same"  # what the frozen layers were trained on: same, disjoint or public
    secret_noise: bool = (
        False  # noise from the system's entropy: not repeatable, and not to be subtracted by who knows the seed
    )

    def check(self, classes, recipe):
        rules = {
            "epsilon": (0 < self.epsilon < math.inf, "above 0, and finite"),
            "noise_multiplier": (self.noise_multiplier >= 0, "0 or above"),
            "max_grad_norm": (self.max_grad_norm > 0, "above 0"),
            "delta": (0 <= self.delta < 1, "between 0 and 1"),
            "accountant": (self.accountant in ("rdp", "prv"), "rdp or prv"),
            "clipping": (self.clipping in ("hooks", "ghost"), "hooks or ghost"),
            "physical_batch": (self.physical_batch >= 0, "0 or above"),
            "trunk_data": (self.trunk_data in SCOPES, f"one of {', '.join(SCOPES)}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UserError(f"dpsgd {name} is {getattr(self, name)}: it must be {rule}")
        if recipe.clip_grad or recipe.sam_rho or recipe.amp != "no" or recipe.compile != "no":
            raise UserError(
                "dpsgd clips each sample's gradient itself, by hooks and in full precision: leave out clip_grad, sam_rho, amp and compile"
            )
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError("dpsgd runs in one process here: start it without torchrun")

    def check_start(self, rewound):
        if not rewound and self.trunk_data == "same":
            raise UserError(
                "dpsgd would start from weights that have seen the members, and its epsilon would mean nothing: use --rewind init, "
                "or --trunk-data public or disjoint if the model was trained on other data"
            )

    def adapt(self, model):
        learning = [name for name, norm in batch_norms(model).items() if not getattr(norm, "pptp_frozen", False)]
        swap_norms(model, "gn", learning)

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        session = Session(self, len(data.members), recipe)
        with ExitStack() as undo:
            session.undo = undo
            history = fit(
                model,
                data.members,
                recipe,
                loss=session.loss,
                monitors=(*monitors, session),
                checkpoint=checkpoint,
                prepare=session.prepare,
                title="dpsgd",
            )
        frozen = any(getattr(module, "pptp_frozen", False) for module in model.modules())
        spent = session.spent()
        print(f"dpsgd: {self.scope(spent, session.delta, frozen)}")
        return {
            **history.summary(),
            "active": 1.0,
            "epsilon": spent,
            "delta": session.delta,
            "noise_multiplier": session.noise,
            "scope": self.scope(spent, session.delta, frozen),
        }

    def scope(self, epsilon: float, delta: float, frozen: bool) -> str:
        """What epsilon and delta cover and what they do not, to be printed wherever they are."""
        covers = f"epsilon {epsilon:.3g} at delta {delta:.2g} ({self.accountant} accountant, add or remove one member) covers "
        covers += (
            f"the retrained layers given the frozen ones; {SCOPES[self.trunk_data]}" if frozen else "the whole model"
        )
        seed = (
            ""
            if self.secret_noise
            else "; the noise comes from the run's seed, so it holds only against those who do not know it (secret_noise=true otherwise)"
        )
        start = "it counts from the weights that this training started from, which must not have seen the members"
        return f"{covers}; {start}; choosing settings by looking at the members is not covered{seed}"


class Session(Monitor):
    """Opacus' engine around one training: noise, sampling and accounting, all resumable."""

    undo: ExitStack

    def __init__(self, settings: DPSGD, members: int, recipe):
        from opacus import PrivacyEngine

        self.settings, self.recipe = settings, recipe
        self.delta = settings.delta or 1 / members
        self.engine = PrivacyEngine(accountant=settings.accountant)
        self.steps_per_epoch = math.ceil(members / recipe.batch_size)
        self.noise = settings.noise_multiplier or self._calibrated()
        self.sampling, self.noising = torch.Generator(), torch.Generator()
        self.criterion = nn.CrossEntropyLoss()

    def _calibrated(self) -> float:
        """The smallest noise that keeps `epsilon`; by RDP, which is quick, so that PRV can only find less spent."""
        from opacus.accountants.utils import get_noise_multiplier

        return get_noise_multiplier(
            target_epsilon=self.settings.epsilon,
            target_delta=self.delta,
            sample_rate=1 / self.steps_per_epoch,
            steps=self.steps_per_epoch * self.recipe.epochs,
            accountant="rdp",
        )

    def spent(self) -> float:
        return float(self.engine.get_epsilon(self.delta))

    def prepare(self, model, optimizer, loader):
        """Wrap model, optimizer and loader; everything is undone when the training ends."""
        from opacus.utils.batch_memory_manager import BatchMemoryManager
        from torch.utils.data import DataLoader

        device = next(model.parameters()).device
        self.noising = torch.Generator(device)
        plain = DataLoader(
            loader.dataset, batch_size=self.recipe.batch_size, num_workers=self.recipe.workers, generator=self.sampling
        )
        self.undo.enter_context(per_sample_ready(model))
        train_mode(model)  # Opacus asks for it; frozen layers stay in eval mode
        wrapped, optimizer, *criterion, loader = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=plain,
            noise_multiplier=self.noise,
            max_grad_norm=self.settings.max_grad_norm,
            poisson_sampling=True,
            noise_generator=self.noising,
            criterion=nn.CrossEntropyLoss(),
            grad_sample_mode=self.settings.clipping,
        )
        if criterion:  # ghost clipping brings its own, with two backward passes in one
            self.criterion = criterion[0]
        self.undo.callback(_clean, wrapped)
        if self.settings.physical_batch:
            loader = self.undo.enter_context(
                BatchMemoryManager(
                    data_loader=loader, max_physical_batch_size=self.settings.physical_batch, optimizer=optimizer
                )
            )
        loader.set_epoch = self.set_epoch
        return wrapped, optimizer, loader

    def loss(self, step):
        return self.criterion(step.logits, step.targets)

    def set_epoch(self, epoch: int) -> None:
        """Sampling and noise are functions of (seed, epoch), so that a resumed run draws the same."""
        self.sampling.manual_seed(self.recipe.seed * 1_000_003 + epoch)
        secret = int.from_bytes(os.urandom(7), "big")
        self.noising.manual_seed(
            secret if self.settings.secret_noise else self.recipe.seed * 1_000_003 + epoch + 500_009
        )

    def state_dict(self):
        return {"history": [list(row) for row in self.engine.accountant.history]}

    def load_state_dict(self, state):
        self.engine.accountant.history = [tuple(row) for row in state["history"]]


def _clean(wrapped) -> None:
    wrapped.remove_hooks()
    for parameter in wrapped.parameters():
        for name in ("grad_sample", "summed_grad"):
            if hasattr(parameter, name):
                delattr(parameter, name)


class PureOperations(TorchFunctionMode):
    """In-place arithmetic as its pure form: `x += shortcut` would overwrite what Opacus' hooks still need."""

    PURE = {
        Tensor.__iadd__: Tensor.add,
        Tensor.add_: Tensor.add,
        Tensor.__imul__: Tensor.mul,
        Tensor.mul_: Tensor.mul,
        Tensor.relu_: Tensor.relu,
        torch.relu_: torch.relu,
    }

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.PURE.get(function, function)(*args, **(kwargs or {}))


class per_sample_ready:
    """While open, the model's forward has no in-place operation, and convolutions get contiguous inputs.

    Opacus' convolution sampler reads memory by strides, and is silently wrong for a permuted input (ConvNeXt).
    """

    def __init__(self, model: nn.Module):
        self.model, self.handles, self.changed = model, [], []

    def __enter__(self):
        self.changed = [module for module in self.model.modules() if getattr(module, "inplace", False) is True]
        for module in self.changed:
            module.inplace = False
        mode = PureOperations()
        self.handles = [
            self.model.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
            self.model.register_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True),
        ]
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d):
                self.handles.append(
                    module.register_forward_pre_hook(lambda _, inputs: tuple(x.contiguous() for x in inputs))
                )
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()
        for module in self.changed:
            module.inplace = True
