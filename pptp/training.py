"""The one training loop: `fit`. Defenses and monitors plug into it; nothing here copies it."""

from __future__ import annotations

import atexit
import difflib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from tqdm import tqdm

from .checkpoint import Checkpoint
from .config import Recipe
from .data import Augmented, indexed
from .errors import UserError
from .fingerprint import fingerprint_of, whole
from .stages import train_mode


@dataclass(frozen=True)
class Step:
    """One batch in flight, as a loss sees it."""

    model: nn.Module
    inputs: Tensor  # (n, channels, h, w)
    targets: Tensor  # (n,)
    indices: Tensor  # (n,) sample ids
    epoch: int
    logs: dict[str, float] = field(default_factory=dict)  # a loss may add numbers; `fit` averages them per epoch

    @cached_property
    def logits(self) -> Tensor:
        """(n, classes); computed when first asked for, since some losses run other inputs instead."""
        found = self.model(self.inputs)
        if not isinstance(found, Tensor):
            raise UserError(f"the model returns a {type(found).__name__}: it must return logits (n, classes)")
        return found

    def accuracy(self) -> float | None:
        """Of the logits, if the loss used them."""
        if "logits" not in vars(self) or not len(self.targets):
            return None
        return float((self.logits.argmax(1) == self.targets).float().mean())


Loss = Callable[[Step], Tensor]
Prepare = Callable[[nn.Module, torch.optim.Optimizer, DataLoader], tuple[nn.Module, torch.optim.Optimizer, DataLoader]]


def cross_entropy(step: Step) -> Tensor:
    return F.cross_entropy(step.logits, step.targets)


class Monitor:
    """Looks on during `fit`; override what you need."""

    def after_backward(self, step: Step) -> None:
        """Gradients are there, the weights have not moved yet."""

    def after_epoch(self, model: nn.Module, epoch: int) -> dict[str, float]:
        """Numbers to add to this epoch's row of the history."""
        return {}

    def state_dict(self) -> dict:
        """What a checkpoint must hold for this monitor to go on after a kill."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Undo `state_dict`."""


@dataclass
class History:
    """One row an epoch: loss, accuracy (both as seen while training), lr, seconds, and what losses logged."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """The last row's loss and accuracy, total seconds, and of everything logged the mean over the epochs that logged it."""
        if not self.rows:
            return {}
        own = ("epoch", "lr", "loss", "accuracy", "seconds", "monitor_seconds")
        logged = {k for row in self.rows for k, value in row.items() if k not in own and value is not None}
        means = {k: _mean([row[k] for row in self.rows if row.get(k) is not None]) for k in sorted(logged)}
        last = self.rows[-1]
        return {
            "epochs": len(self.rows),
            "loss": last["loss"],
            "accuracy": last.get("accuracy"),  # None where the loss ran other inputs
            "seconds": sum(row["seconds"] for row in self.rows),
            **means,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def fit(
    model: nn.Module,
    data: Dataset,
    recipe: Recipe,
    *,
    loss: Loss = cross_entropy,
    monitors: Sequence[Monitor] = (),
    checkpoint: str | Path | None = None,
    prepare: Prepare | None = None,
    stop_after: int | None = None,
    title: str = "training",
) -> History:
    """Train the weights of `model` that require gradients, in place; frozen modules stay in eval mode.

    checkpoint: a file to resume from if it is there, rewritten after every epoch.
    prepare: wraps (model, optimizer, loader) instead of Accelerate, for engines that bring their own.
    stop_after: epochs to train, on the schedule of all of them.
    """
    accelerator = _accelerator(recipe)
    data = indexed(data)
    if len(data) < 2:
        raise UserError(f"there are {len(data)} samples to train on: at least 2 are needed")
    views = Augmented(data, recipe.seed) if recipe.augment else data
    order = EpochOrder(len(data), recipe.seed)
    loader = DataLoader(views, batch_sampler=Batches(order, recipe.batch_size, False), num_workers=recipe.workers)
    fingerprint = fingerprint_of(model, data, recipe, loss) if checkpoint else ""
    optimizer = make_optimizer(whole(model), recipe)  # which weights decay goes by their names
    schedule = _schedule(optimizer, recipe)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model.to(accelerator.device)
        if recipe.channels_last:
            model.to(memory_format=torch.channels_last)
        wrapped, optimizer, loader = (prepare or accelerator.prepare)(model, optimizer, loader)
        run = _compiled(wrapped, recipe)
        saved = Checkpoint(checkpoint, model, optimizer, schedule, accelerator.scaler, monitors, fingerprint)
        history = History(saved.resume())
        with _progress(title, recipe, loader, len(history.rows), accelerator) as bar:
            for epoch in range(len(history.rows), min(recipe.epochs, stop_after or recipe.epochs)):
                train_mode(wrapped)
                loader.set_epoch(epoch)
                if hasattr(views, "set_epoch"):  # accelerate reaches the sampler or the data set, not both
                    views.set_epoch(epoch)
                started = time.perf_counter()
                row = _epoch(accelerator, run, loader, optimizer, loss, epoch, recipe, monitors, bar)
                schedule.step(epoch + 1)
                row["seconds"] = time.perf_counter() - started
                history.rows.append(_finite(row | _looked(monitors, model, epoch)))
                if accelerator.is_main_process:
                    saved.write(history.rows)
        _share_buffers(model, accelerator)
    if hasattr(data, "set_epoch"):
        data.set_epoch(None)
    accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    if recipe.channels_last:
        model.to(memory_format=torch.contiguous_format)
    model.eval()
    return history


def _looked(monitors: Sequence[Monitor], model: nn.Module, epoch: int) -> dict[str, float]:
    """What monitors say after an epoch; they draw no random number that training would have drawn."""
    if not monitors:
        return {}
    row, started = {}, time.perf_counter()
    with torch.random.fork_rng():
        for monitor in monitors:
            row |= {name: float(value) for name, value in monitor.after_epoch(model, epoch).items()}
    return {**row, "monitor_seconds": time.perf_counter() - started}


def _finite(row: dict[str, float]) -> dict[str, float | None]:
    """None for what is no number, say the mean over samples of which an epoch had none."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _compiled(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The model as a step calls it; the weights are the same tensors."""
    if recipe.compile == "no":
        return model
    torch.compiler.reset()  # graphs of an earlier model in this process would count against the limit of recompilations
    return torch.compile(model, backend=recipe.compile)


def _share_buffers(model: nn.Module, accelerator) -> None:
    """Running statistics of the first process for all: each has seen other samples."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
    accelerator.wait_for_everyone()


def _epoch(accelerator, model, loader, optimizer, loss, epoch, recipe, monitors, bar) -> dict[str, float]:
    """One pass over the data; returns sample-weighted means."""
    totals: dict[str, float] = {}
    seen = 0
    lr = optimizer.param_groups[0]["lr"]
    for batch in loader:
        inputs, targets, indices = (tensor.to(accelerator.device) for tensor in batch)
        if recipe.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        step = Step(model, inputs, targets, indices, epoch)
        value = _checked(loss, step)
        number = float(value.item())
        if not math.isfinite(number):
            raise UserError(
                f"the loss became {number} in epoch {epoch + 1}: lower lr (now {recipe.lr}), or set clip_grad"
            )
        _backward(accelerator, value)
        if recipe.sam_rho:
            sharpness_aware(model, lambda: _backward(accelerator, _checked(loss, again(step))), recipe.sam_rho)  # noqa: B023
        for monitor in monitors:
            monitor.after_backward(step)
        if recipe.clip_grad:
            accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], recipe.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += len(targets)
        for name, amount in {"loss": number, "accuracy": step.accuracy(), **step.logs}.items():
            if amount is not None:
                totals[name] = totals.get(name, 0.0) + float(amount) * len(targets)
        bar.update()
        shown = {name: f"{totals[name] / seen:.3f}" for name in ("loss", "accuracy") if name in totals and seen}
        bar.set_postfix(epoch=epoch + 1, **shown, refresh=False)
    means = _over_processes(accelerator, {**totals, "seen": float(seen)})
    seen = max(1.0, means.pop("seen"))
    return {"epoch": epoch + 1, "lr": lr, **{name: total / seen for name, total in means.items()}}


def _checked(loss: Loss, step: Step) -> Tensor:
    if len(step.targets) == 0:  # Poisson sampling can draw nobody; the step is taken all the same, for its noise
        return step.logits.sum()
    try:
        return loss(step)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise UserError(
                "BatchNorm cannot train on a batch of one sample: raise --batch-size or --img-size"
            ) from error
        raise
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise UserError(
            f"torch.compile does not work here ({str(error.inner_exception).splitlines()[0]}): train with --compile no"
        ) from error


def _backward(accelerator, value) -> None:
    """Through Accelerate for tensors; Opacus' ghost clipping returns an object with a backward of its own."""
    if isinstance(value, Tensor):
        accelerator.backward(value)
    else:
        value.backward()


def again(step: Step) -> Step:
    """The same batch, to be run anew."""
    return replace(step, logs={})


def sharpness_aware(model: nn.Module, backward: Callable[[], None], rho: float) -> None:
    """Replace the gradient by the one at w + rho g/||g|| (SAM, Foret et al., ICLR 2021, arXiv 2010.01412).

    BatchNorm's running statistics are held during the second pass, which is not where the model is.
    """
    moved = [p for p in model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in moved]).norm() + 1e-12
    steps = [rho / norm * p.grad for p in moved]
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    with torch.no_grad():
        torch._foreach_add_(moved, steps)
    for m in norms:
        m.momentum = 0.0
    for p in moved:
        p.grad = None
    backward()
    with torch.no_grad():
        torch._foreach_sub_(moved, steps)
    for m, momentum in zip(norms, momenta):
        m.momentum = momentum


def _over_processes(accelerator, totals: dict[str, float]) -> dict[str, float]:
    """Sums over all processes."""
    if accelerator.num_processes == 1:
        return totals
    together = accelerator.reduce(torch.tensor(list(totals.values()), device=accelerator.device), "sum")
    return dict(zip(totals, together.tolist()))


class EpochOrder(Sampler):
    """A shuffle that is a function of (seed, epoch) alone, so that a resumed run sees the same batches."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


class Batches(BatchSampler):
    """Batches of `batch_size`; a last batch of one joins the one before, since BatchNorm cannot train on it."""

    def __iter__(self) -> Iterator[list[int]]:
        *body, last = super().__iter__()
        if body and len(last) == 1 and self.batch_size > 1:
            body[-1] = body[-1] + last
            last = []
        yield from body
        if last:
            yield last

    def __len__(self) -> int:
        joined = len(self.sampler) % self.batch_size == 1 and len(self.sampler) > self.batch_size > 1
        return super().__len__() - joined


SECOND_ORDER = ("adahessian",)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """timm's optimizer of that name over the weights that require gradients."""
    from timm.optim import create_optimizer_v2, list_optimizers

    if recipe.opt not in list_optimizers():
        near = difflib.get_close_matches(recipe.opt, list_optimizers(), n=3) or ["sgd", "adamw"]
        raise UserError(f"timm has no optimizer called {recipe.opt!r}: did you mean {', '.join(near)}?")
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("every weight of the model is frozen: there is nothing to train")
    if recipe.opt in SECOND_ORDER:
        raise UserError(f"the optimizer {recipe.opt!r} needs second derivatives, which training does not keep: take another")
    try:
        return create_optimizer_v2(
            model, opt=recipe.opt, lr=recipe.lr, weight_decay=recipe.weight_decay, momentum=recipe.momentum
        )
    except (ValueError, AssertionError, ImportError) as error:  # one that needs a GPU, or a package that is not there
        raise UserError(f"the optimizer {recipe.opt!r} cannot be used here: {error}") from error


def _schedule(optimizer, recipe: Recipe):
    """timm's schedule of that name; "constant" keeps the learning rate."""
    from timm.scheduler import create_scheduler_v2

    name = "step" if recipe.sched == "constant" else recipe.sched
    never = recipe.epochs + 1
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=name,
        num_epochs=recipe.epochs,
        warmup_epochs=recipe.warmup_epochs,
        warmup_lr=recipe.lr / 100,
        decay_epochs=never if recipe.sched == "constant" else max(1, recipe.epochs // 3),
        decay_milestones=[recipe.epochs // 2 + 1, recipe.epochs * 3 // 4 + 1],  # timm counts them from 1
        decay_rate=1.0 if recipe.sched == "poly" else 0.1,  # of poly it is the power
    )
    return schedule


def _accelerator(recipe: Recipe):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # it is a singleton: another precision in the same process is refused otherwise
    accelerator = Accelerator(cpu=recipe.device == "cpu", mixed_precision=recipe.amp)
    if recipe.device == "cpu" and accelerator.device.type != "cpu":  # an earlier fit in this process chose another
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=recipe.amp)
    if recipe.amp == "fp16" and accelerator.device.type == "cpu":
        raise UserError("fp16 needs a GPU, and would train in full precision here: use --amp no")
    if recipe.amp == "bf16" and accelerator.device.type == "cpu" and not cpu_runs_bfloat16():
        raise UserError("this processor dies on bfloat16: use --amp no")
    if accelerator.device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    return accelerator


def device(recipe: Recipe) -> torch.device:
    """Where models run under this recipe."""
    from accelerate import PartialState

    return torch.device("cpu") if recipe.device == "cpu" else PartialState().device


def main_process() -> bool:
    """Whether this is the process that writes files, under torchrun one of several."""
    from accelerate import PartialState

    return PartialState().is_main_process


@atexit.register
def leave_gloo() -> None:
    """A process that ends while Gloo's threads still hold tensors is aborted now and then, after all work was done.

    Other backends are left alone: leaving NCCL waits for the other processes, which may have failed.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def cpu_runs_bfloat16() -> bool:
    """Tried in a child process, since a processor without it may be killed by an illegal instruction."""
    code = (
        "import torch; c = torch.nn.Conv2d(3, 8, 3);\n"
        "with torch.autocast('cpu', torch.bfloat16): c(torch.randn(2, 3, 8, 8)).sum().backward()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def _progress(title: str, recipe: Recipe, loader, epochs_done: int, accelerator) -> tqdm:
    if accelerator.num_processes > 1 and accelerator.is_main_process:
        tqdm.write(f"{title}: {accelerator.num_processes} processes")
    return tqdm(
        total=recipe.epochs * len(loader),
        initial=epochs_done * len(loader),
        desc=title,
        unit="step",
        mininterval=0.5,
        leave=True,
        disable=None if accelerator.is_main_process else True,
    )
