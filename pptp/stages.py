"""Ordered stages and blocks of a model, freezing, rewinding, and where to cut.

How the partition is found (no table of model names):
1. names are grouped by timm's own `group_matcher` (stages: coarse, blocks: fine), or by the module
   tree where a model has none;
2. one forward pass is traced, and the groups are put in the order in which they run;
3. the boundary of a group is the last module to finish before the next group starts;
4. every boundary is *verified*: put its output for x into a forward pass on another input x', and the
   model must answer as for x. Where it does not, something flows around the boundary, and the
   two neighbours become one.
This is the only file that knows how timm names things.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .errors import UserError

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


def stages(model: nn.Module, input_size: Sequence[int] | None = None) -> list[Stage]:
    """The stages of `model` in forward order; together they hold every parameter and buffer once.

    input_size: (channels, height, width) of what the model will be fed; by default the size that the
    timm model was built for.
    """
    groups = _blocks(model, tuple(input_size or _default_input_size(model)))
    by_stage: dict[int, list[_Group]] = {}
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


def unfreeze(model: nn.Module) -> None:
    """Undo `freeze` on the whole model."""
    model.requires_grad_(True)
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
    """Copy the weights and buffers of `suffix` back from `state`, a state dict of the same model."""
    for part in suffix:
        for name in part.parameter_names:
            part.model.get_parameter(name).copy_(state[name])
        for name in part.buffer_names:
            if name in state:  # non-persistent buffers are constants that no checkpoint holds
                part.model.get_buffer(name).copy_(state[name])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict that later training does not touch."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@contextmanager
def watch(parts: Sequence[Stage], see: Callable[[str, Tensor], None]):
    """While open, call `see(name, output)` as each part's boundary is computed; hooks are removed on exit."""
    calls: dict[str, int] = {}
    wanted = {(part.boundary, part.boundary_call): part.name for part in parts}

    def hook(name: str):
        def seen(module, inputs, output):
            key = (name, calls.get(name, 0))
            calls[name] = key[1] + 1
            if key in wanted:
                see(wanted[key], output)

        return seen

    model = parts[0].model
    handles = [model.register_forward_pre_hook(lambda *_: calls.clear())]
    handles += [model.get_submodule(name).register_forward_hook(hook(name)) for name in {p.boundary for p in parts}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- how the partition is found ------------------------------------------------------------------


@dataclass
class _Group:
    """A block in the making. `first` and `last` are positions in the trace."""

    stage: int
    names: list[str]
    first: int = -1
    last: int = -1
    boundary: tuple[str, int] = ("", 0)
    overwritten: bool = False
    modules: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class _Event:
    module: str
    call: int
    leaving: bool
    output: object = None
    version: int = 0

    @property
    def overwritten(self) -> bool:
        """Whether something changed the output in place after the module returned it."""
        return isinstance(self.output, Tensor) and self.output._version != self.version


def _default_input_size(model: nn.Module) -> tuple[int, ...]:
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("input_size"):
        raise UserError("this model does not say what input it takes: pass input_size=(channels, height, width)")
    return tuple(config["input_size"])


def _blocks(model: nn.Module, input_size: tuple[int, ...]) -> list[_Group]:
    probe = _probe_copy(model)
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(2, *input_size, generator=generator).to(_device(probe)) for _ in range(2))
    events = _trace(probe, x)
    groups = _in_execution_order(probe, _named_groups(probe), events)
    groups = _join_norms(probe, groups)
    groups = _verified(probe, groups, events, x, other)
    _assign_modules(probe, groups, events)
    return groups


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _probe_copy(model: nn.Module) -> nn.Module:
    """A copy to trace, with no zero scale left (last BatchNorm gamma, LayerScale): zeros hide data flow."""
    probe = copy.deepcopy(model).eval().requires_grad_(False).float()
    generator = torch.Generator().manual_seed(1)
    for parameter in probe.parameters():
        if parameter.ndim <= 1 or not parameter.any():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return probe


def _trace(model: nn.Module, x: Tensor) -> list[_Event]:
    """Every module entered and left during one forward pass, in order."""
    events: list[_Event] = []
    calls: dict[str, int] = {}

    def enter(name):
        def hook(module, inputs):
            calls[name] = calls.get(name, -1) + 1
            events.append(_Event(name, calls[name], False))

        return hook

    def leave(name):
        def hook(module, inputs, output):
            version = output._version if isinstance(output, Tensor) else 0
            events.append(_Event(name, calls[name], True, output, version))

        return hook

    handles = []
    for name, module in model.named_modules():
        if name:
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return events


def _all_names(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]


def _named_groups(model: nn.Module) -> list[_Group]:
    """Groups by name alone: timm's coarse groups as stages, its fine groups (or list items) as blocks."""
    names = _all_names(model)
    coarse, fine = _group_ids(model, names, coarse=True), _group_ids(model, names, coarse=False)
    if len(set(coarse.values())) == len(set(fine.values())):
        coarse = _merge_by_feature_info(model, coarse)
    groups: dict[tuple, _Group] = {}
    for stage in sorted(set(coarse.values())):
        members = [name for name in names if coarse[name] == stage]
        keys = {name: fine[name] for name in members}
        if len(set(keys.values())) == 1 and 0 < stage < max(coarse.values()):
            keys = _list_item_keys(members)
        for name in members:
            groups.setdefault((stage, keys[name]), _Group(stage, [])).names.append(name)
    return list(groups.values())


def _group_ids(model: nn.Module, names: list[str], coarse: bool) -> dict[str, int]:
    """name -> position of its group; timm's matcher if it has one, else the children of the model."""
    if hasattr(model, "group_matcher"):
        from timm.models._manipulate import group_with_matcher

        return group_with_matcher([(n, None) for n in names], model.group_matcher(coarse=coarse), reverse=True)
    depth = 0  # below wrappers such as a single `self.net`
    while len({tuple(n.split(".")[: depth + 1]) for n in names}) == 1:
        depth += 1
    order: dict[str, int] = {}
    return {n: order.setdefault(".".join(n.split(".")[: depth + 1]), len(order)) for n in names}


def _merge_by_feature_info(model: nn.Module, ids: dict[str, int]) -> dict[str, int]:
    """Where the matcher knows one layer per group only (VGG), stages end where timm's feature_info says."""
    info = getattr(model, "feature_info", None)
    ends = [entry["module"] for entry in info] if isinstance(info, list) else []
    head = max(ids.values())
    position = {name: i for i, (name, _) in enumerate(model.named_modules())}
    ends = sorted(position[end] for end in ends if end in position)
    body = sorted(set(ids.values()) - {head})
    if not ends or len(ends) >= len(body):
        return ids
    first_module = {g: min(position[n.rpartition(".")[0]] for n in ids if ids[n] == g) for g in body}
    stage_of = {g: sum(end < first_module[g] for end in ends) for g in body}
    stage_of[head] = max(stage_of.values()) + 1
    return {name: stage_of[g] for name, g in ids.items()}


def _list_item_keys(names: list[str]) -> dict[str, str]:
    """Inside one stage, `stages.1.blocks.0.norm.weight` belongs to the list item `stages.1.blocks.0`."""
    paths = {name: name.split(".")[:-1] for name in names}
    common = 0
    while len({tuple(p[: common + 1]) for p in paths.values()}) == 1 and common < min(map(len, paths.values())):
        common += 1

    def key(path: list[str]) -> str:
        for depth in range(common, len(path)):
            if path[depth].isdigit():
                return ".".join(path[: depth + 1])
        return ".".join(path[: common + 1])

    if not any(part.isdigit() for path in paths.values() for part in path[common:]):
        return dict.fromkeys(names, "")
    return {name: key(path) for name, path in paths.items()}


def _in_execution_order(model: nn.Module, groups: list[_Group], events: list[_Event]) -> list[_Group]:
    """Order groups by when they first run; groups that run interleaved become one."""
    group_of = {name: i for i, group in enumerate(groups) for name in group.names}
    owner = _sole_owner(model, group_of)
    for position, event in enumerate(events):
        if event.module in owner:
            group = groups[owner[event.module]]
            group.first = position if group.first < 0 else group.first
            group.last = position
    ran = sorted((g for g in groups if g.first >= 0), key=lambda g: g.first)
    if not ran:
        raise UserError("no parameter of this model is used in its forward pass")
    for idle in (g for g in groups if g.first < 0):  # never called: lives with the last stage, and is retrained
        ran[-1].names += idle.names
    ordered = [ran[0]]
    for group in ran[1:]:
        if group.first < ordered[-1].last:
            ordered[-1] = _joined(ordered[-1], group, "layers run interleaved")
        else:
            ordered.append(group)
    return ordered


def _sole_owner(model: nn.Module, group_of: dict[str, int]) -> dict[str, int]:
    """module -> the one group that all parameters below it belong to; modules spanning groups are left out."""
    owners: dict[str, set[int]] = {}
    for name, group in group_of.items():
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            owners.setdefault(".".join(path[:depth]), set()).add(group)
    return {module: next(iter(groups)) for module, groups in owners.items() if len(groups) == 1}


def _joined(a: _Group, b: _Group, note: str = "") -> _Group:
    notes = "; ".join(dict.fromkeys(n for n in (a.note, b.note, note) if n))
    return _Group(max(a.stage, b.stage), a.names + b.names, a.first, max(a.last, b.last), note=notes)


def _join_norms(model: nn.Module, groups: list[_Group]) -> list[_Group]:
    """A group of vectors only (a lone norm layer) is no block of its own: it joins its neighbour in the stage."""
    parameters = dict(model.named_parameters())

    def vectors_only(group: _Group) -> bool:
        return all(parameters[n].ndim <= 1 for n in group.names if n in parameters)

    joined = [groups[0]]
    for group in groups[1:]:
        if group.stage == joined[-1].stage and (vectors_only(group) or vectors_only(joined[-1])):
            joined[-1] = _joined(joined[-1], group)
        else:
            joined.append(group)
    return joined


def _verified(model, groups: list[_Group], events: list[_Event], x: Tensor, other: Tensor) -> list[_Group]:
    """Give each group its boundary; join it to the next where the boundary does not carry everything."""
    with torch.no_grad():
        answer, distractor = _logits(model(x)), _logits(model(other))
    if torch.allclose(answer, distractor, rtol=1e-3, atol=1e-5):
        raise UserError("this model gives the same output for two different inputs: its stages cannot be told apart")
    done: list[_Group] = []
    current = groups[0]
    for following in groups[1:]:
        leaving = _way_out(events, current.last, following.first)
        if leaving is not None and _carries_all(model, leaving, answer, x, other):
            current.boundary = (leaving.module, leaving.call)
            current.overwritten = leaving.overwritten
            done.append(current)
            current = following
        else:
            crossing = current.stage != following.stage
            current = _joined(
                current,
                following,
                "joined with its neighbour: more than one tensor crosses between them" if crossing else "",
            )
    current.boundary = (events[-1].module, events[-1].call)
    return [*done, current]


def _way_out(events: list[_Event], last: int, following: int) -> _Event | None:
    """The module whose output leaves a group that ends at `last`, when the next one starts at `following`.

    It is the last to finish before the next group starts, but not a pooling that throws features away:
    the feature map is what the paper measures, and what tells the most.
    """
    exits = [e for e in events[last:following] if e.leaving and isinstance(e.output, Tensor)]
    if not exits or exits[0] is not events[last]:
        return None
    return [e for e in exits if e.output.numel() >= exits[0].output.numel()][-1]


def _logits(output) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def _carries_all(model, leaving: _Event, answer: Tensor, x: Tensor, other: Tensor) -> bool:
    """Whether the model, fed `other` but given this boundary's output for `x`, answers as for `x`."""
    value = _output_at(model, leaving, x) if leaving.overwritten else leaving.output

    def put(module, inputs, output):
        return value

    with torch.no_grad(), _on_call(model, leaving, put):
        given = _logits(model(other))
    return torch.allclose(given, answer, rtol=1e-3, atol=1e-5)


def _output_at(model, leaving: _Event, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    with torch.no_grad(), _on_call(model, leaving, lambda module, inputs, output: kept.append(output.clone())):
        model(x)
    return kept[0]


@contextmanager
def _on_call(model: nn.Module, at: _Event, hook: Callable):
    """Run a forward hook at one particular call of a module."""
    calls = [-1]

    def only_then(module, inputs, output):
        calls[0] += 1
        return hook(module, inputs, output) if calls[0] == at.call else None

    handle = model.get_submodule(at.module).register_forward_hook(only_then)
    try:
        yield
    finally:
        handle.remove()


def _assign_modules(model: nn.Module, groups: list[_Group], events: list[_Event]) -> None:
    """Every module that runs belongs to the group in whose time it was first entered."""
    owner = _sole_owner(model, {name: i for i, group in enumerate(groups) for name in group.names})
    has_state = {n.rpartition(".")[0] for n in _all_names(model)}
    above_state = {".".join(n.split(".")[:depth]) for n in has_state for depth in range(1, n.count(".") + 2)}
    ends = [_position(events, group.boundary) for group in groups]
    entered = {}
    for position, event in enumerate(events):
        entered.setdefault(event.module, position)
    for name, _ in model.named_modules():
        if name in owner:
            groups[owner[name]].modules.append(name)
        elif name in entered and name not in above_state:
            index = next((i for i, end in enumerate(ends) if entered[name] <= end), len(groups) - 1)
            groups[index].modules.append(name)


def _position(events: list[_Event], boundary: tuple[str, int]) -> int:
    return next(i for i, e in enumerate(events) if e.leaving and (e.module, e.call) == boundary)


def _label(members: Sequence[_Group], others: Iterable[_Group]) -> str:
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


def _to_stage(model: nn.Module, name: str, members: Sequence[_Group], all_groups: Sequence[_Group]) -> Stage:
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
