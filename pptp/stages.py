"""Ordered stages and blocks of a model, freezing, rewinding, and where to cut."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .errors import UserError
from .partition import Group, partition
from .trees import pack

HEAD = "head"
SCRATCH = "scratch"


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers: its parameters, its buffers, and the module whose output leaves it."""

    name: str
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    module_names: tuple[str, ...]  # what runs inside, parameter-free modules (dropout, pooling) included
    boundary: str  # module whose output is this stage's output
    boundary_call: int  # which call of it, counted from 0
    overwritten: bool = False  # a later in-place operation changes the boundary tensor
    note: str = ""
    blocks: tuple[Stage, ...] = ()
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (self.model.get_parameter(name) for name in self.parameter_names)

    def buffers(self) -> Iterator[Tensor]:
        return (self.model.get_buffer(name) for name in self.buffer_names)

    def modules(self) -> Iterator[nn.Module]:
        return (self.model.get_submodule(name) for name in self.module_names)

    def on(self, model: nn.Module) -> Stage:
        """The same stage of another model with the same architecture."""
        return replace(self, model=model, blocks=tuple(block.on(model) for block in self.blocks))


def stages(model: nn.Module, input_size: Sequence[int] | None = None, boundaries: Sequence[str] = ()) -> list[Stage]:
    """The stages of `model` in forward order; together they hold every parameter and buffer once.

    input_size: (channels, height, width) of what the model will be fed; by default the size that the
    timm model was built for. boundaries: names of the modules whose outputs end a stage, for a model of your own; by
    default they are found.
    """
    groups = partition(model, tuple(input_size or _default_input_size(model)), boundaries)
    by_stage: dict[int, list[Group]] = {}
    for group in groups:
        by_stage.setdefault(group.stage, []).append(group)
    found = []
    for position, (stage, members) in enumerate(by_stage.items()):
        name = _label(members, (group for group in groups if group.stage != stage))
        if position == len(by_stage) - 1:
            name = HEAD
        elif position == 0 and len(members) == 1:
            name = "stem"
        found.append(_to_stage(model, name, members, groups))
    return found


def split_at(parts: Sequence[Stage], cut: str) -> tuple[list[Stage], list[Stage]]:
    """Blocks before the cut (the trunk, to freeze) and from the cut on (the suffix, to retrain).

    cut: the name of the first stage or block to retrain, "head" or "scratch" (everything).
    """
    blocks = [block for stage in parts for block in stage.blocks]
    if cut == SCRATCH:
        return [], blocks
    first_of = {stage.name: stage.blocks[0].name for stage in reversed(parts)}
    names = [block.name for block in blocks]
    wanted = first_of.get(cut, cut)
    if wanted not in names:
        known = [*first_of, *names, SCRATCH]
        near = difflib.get_close_matches(cut, known, n=3) or [stage.name for stage in parts]
        raise UserError(
            f"no stage or block called {cut!r} to cut at: try {', '.join(dict.fromkeys(near))}, or {SCRATCH!r}"
        )
    at = names.index(wanted)
    return blocks[:at], blocks[at:]


def freeze(trunk: Iterable[Stage]) -> None:
    """Stop the weights of `trunk`, and mark its modules so that `train_mode` keeps their buffers still."""
    for part in trunk:
        for parameter in part.parameters():
            parameter.requires_grad_(False)
        for module in part.modules():
            module.pptp_frozen = True


def unfreeze(model: nn.Module, wanted: Mapping[str, bool]) -> None:
    """Undo `freeze`: give every weight back the `requires_grad` that it had before, by name."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted.get(name, True))
    for module in model.modules():
        if hasattr(module, "pptp_frozen"):
            del module.pptp_frozen


def train_mode(model: nn.Module) -> None:
    """`model.train()`, with frozen modules left in eval mode: else BatchNorm would go on learning."""
    model.train()
    for module in model.modules():
        if getattr(module, "pptp_frozen", False):
            module.training = False


@torch.no_grad()
def rewind(suffix: Iterable[Stage], state: dict[str, Tensor]) -> None:
    """Copy the weights and buffers of `suffix` back from `state`, a state dict of the same model as it once was."""
    suffix = list(suffix)
    for part in suffix:
        for name in part.parameter_names:
            _check_fits(name, part.model.get_parameter(name), state)
    for part in suffix:
        for name in part.parameter_names:
            part.model.get_parameter(name).copy_(state[name])
        for name in part.buffer_names:
            if name in state:  # non-persistent buffers are constants that no checkpoint holds
                part.model.get_buffer(name).copy_(state[name])


def _check_fits(name: str, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    if name not in state:
        raise UserError(f"the weights to rewind to have no {name}: they are of another model")
    if state[name].shape != parameter.shape:
        raise UserError(
            f"the weights to rewind to have {name} of shape {tuple(state[name].shape)}, the model {tuple(parameter.shape)}: they are of another model"
        )
    if state[name].data_ptr() == parameter.data_ptr() and parameter.numel():
        raise UserError(
            "the weights to rewind to are the model's own, which training has changed: take a copy before training, with pptp.snapshot(model)"
        )


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict that later training does not touch."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@contextmanager
def watch(parts: Sequence[Stage], see: Callable[[str, Tensor], None]):
    """While open, call `see(name, output)` as each part's boundary is computed; hooks are removed on exit.

    An output of several tensors is seen as one vector a sample.
    """
    calls: dict[str, int] = {}
    wanted = {(part.boundary, part.boundary_call): part.name for part in parts}

    def hook(name: str):
        def seen(module, inputs, output):
            key = (name, calls.get(name, 0))
            calls[name] = key[1] + 1
            if key in wanted:
                see(wanted[key], pack(output))

        return seen

    model = parts[0].model
    handles = [model.register_forward_pre_hook(lambda *_: calls.clear())]
    handles += [model.get_submodule(name).register_forward_hook(hook(name)) for name in {p.boundary for p in parts}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def bare(model: nn.Module):
    """Without hooks on the whole model: who reads weights or features is not stopped by what a defense does to the output."""
    hooks, model._forward_hooks = model._forward_hooks, type(model._forward_hooks)()
    try:
        yield
    finally:
        model._forward_hooks = hooks


@contextmanager
def eval_mode(model: nn.Module):
    """In eval mode while open; every module is in its own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _default_input_size(model: nn.Module) -> tuple[int, ...]:
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("input_size"):
        raise UserError("this model does not say what input it takes: pass input_size=(channels, height, width)")
    return tuple(config["input_size"])


def _label(members: Sequence[Group], others: Iterable[Group]) -> str:
    """The shortest module path that this group has for itself, e.g. "layer1" or "features.denseblock2"."""
    elsewhere = [name for group in others for name in group.names]
    names = [name for group in members for name in group.names]
    first = next((name for name in names if "." in name), names[0])
    path = first.split(".")
    for depth in range(1, len(path)):
        prefix = ".".join(path[:depth])
        if not any(name.startswith(prefix + ".") for name in elsewhere):
            return prefix
    return first


def _to_stage(model: nn.Module, name: str, members: Sequence[Group], all_groups: Sequence[Group]) -> Stage:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = [n for group in members for n in group.names]
    blocks = ()
    if all_groups:  # a stage: its blocks are made by the same function, one group each
        block_names = (
            [name]
            if len(members) == 1
            else [_label([group], (other for other in all_groups if other is not group)) for group in members]
        )
        blocks = tuple(_to_stage(model, label, [group], ()) for label, group in zip(block_names, members))
    return Stage(
        name=name,
        parameter_names=tuple(n for n in names if n in parameters),
        buffer_names=tuple(n for n in names if n in buffers),
        module_names=tuple(n for group in members for n in group.modules),
        boundary=members[-1].boundary[0],
        boundary_call=members[-1].boundary[1],
        overwritten=members[-1].overwritten,
        note="; ".join(dict.fromkeys(group.note for group in members if group.note)),
        blocks=blocks,
        model=model,
    )
