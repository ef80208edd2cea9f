"""How a model falls into blocks, found by running it; there is no table of model names.

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
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .calls import Call, at_call, on_every_call
from .errors import UserError
from .trees import can_pack, pack, tensors_in


@dataclass
class Group:
    """A block in the making. `first` and `last` are positions in the trace."""

    stage: int
    names: list[str]
    first: int = -1
    last: int = -1
    boundary: tuple[str, int] = ("", 0)
    overwritten: bool = False
    modules: list[str] = field(default_factory=list)
    note: str = ""
    shared: list[str] = field(default_factory=list)  # modules that also run later


@dataclass(frozen=True)
class Event:
    module: str
    call: int
    leaving: bool
    output: object = None
    versions: tuple[int, ...] = ()

    @property
    def overwritten(self) -> bool:
        """Whether something changed the output in place after the module returned it."""
        return tuple(t._version for t in tensors_in(self.output)) != self.versions


def partition(model: nn.Module, input_size: tuple[int, ...], ends: Sequence[str] = ()) -> list[Group]:
    """The blocks of `model` in execution order, each with a verified boundary; `ends` names the boundaries to use instead."""
    probe = _probe_copy(model)
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(2, *input_size, generator=generator).double() for _ in range(2))
    _settle_statistics(probe, torch.cat([x, other]))
    events = _trace(probe, x)
    if ends:
        groups = _between(probe, ends, events, x, other)
    else:
        groups = _settle_shared(probe, _named_groups(probe), events)
        groups = _in_execution_order(probe, groups, events)
        groups = _join_norms(probe, groups)
        groups = _verified(probe, groups, events, x, other)
    _place_loose(probe, groups, events, x)
    _assign_modules(probe, groups, events)
    return groups


def _probe_copy(model: nn.Module) -> nn.Module:
    """A copy to trace, in float64 and with no zero scale left (BatchNorm gamma, LayerScale): zeros hide data flow."""
    probe = copy.deepcopy(model).cpu().double().eval().requires_grad_(False)
    probe._forward_hooks.clear()  # a defense may run the model again to change its output
    generator = torch.Generator().manual_seed(1)
    for parameter in probe.parameters():
        if parameter.ndim <= 1 or not parameter.any():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return probe


def _settle_statistics(probe: nn.Module, x: Tensor) -> None:
    """Give BatchNorm the statistics of these inputs: with those of an untrained network deep signals fade to nothing."""
    norms = [m for m in probe.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    before = {id(m): m.momentum for m in norms}
    for norm in norms:
        norm.momentum = 1.0
        norm.training = True
    try:
        with torch.no_grad():
            probe(x)
    except ValueError:  # one value per channel: nothing to take statistics of
        pass
    for norm in norms:
        norm.momentum, norm.training = before[id(norm)], False
        if norm.running_var is not None:
            norm.running_var.clamp_(min=1e-6)


def _trace(model: nn.Module, x: Tensor) -> list[Event]:
    """Every module entered and left during one forward pass, in order."""
    events: list[Event] = []

    def leave(call: Call, output: object) -> None:
        events.append(Event(*call, True, output, tuple(t._version for t in tensors_in(output))))

    with torch.no_grad(), on_every_call(model, lambda call: events.append(Event(*call, False)), leave):
        model(x)
    return events


def _all_names(model: nn.Module) -> list[str]:
    return [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]


def _named_groups(model: nn.Module) -> list[Group]:
    """Groups by name alone: timm's coarse groups as stages, its fine groups (or list items) as blocks."""
    names = _all_names(model)
    coarse, fine = _group_ids(model, names, coarse=True), _group_ids(model, names, coarse=False)
    tree = _tree_ids(names)
    if (
        len(set(coarse.values())) <= 2 < len(set(tree.values()))
    ):  # one stage and a head, at most: the module tree tells more
        coarse = fine = tree
    if len(set(coarse.values())) == len(set(fine.values())):
        coarse = _merge_by_feature_info(model, coarse)
    groups: dict[tuple, Group] = {}
    for stage in sorted(set(coarse.values())):
        members = [name for name in names if coarse[name] == stage]
        keys = {name: fine[name] for name in members}
        if len(set(keys.values())) == 1 and 0 < stage < max(coarse.values()):
            keys = _list_item_keys(members)
        for name in members:
            groups.setdefault((stage, keys[name]), Group(stage, [])).names.append(name)
    return list(groups.values())


def _group_ids(model: nn.Module, names: list[str], coarse: bool) -> dict[str, int]:
    """name -> position of its group; timm's matcher if it has one, else the children of the model."""
    found = _matched(model, names, coarse)
    if found:
        first = min(found.values())
        return {name: found.get(name, first) for name in names}  # what no group claims (a position table) comes first
    depth = _wrappers(names)
    order: dict[str, int] = {}
    return {n: order.setdefault(".".join(n.split(".")[: depth + 1]), len(order)) for n in names}


def _wrappers(names: list[str]) -> int:
    """How many levels of names are the same for all, such as a single `self.net`; a module that holds tensors itself is none."""
    depth, deepest = 0, max(0, min(n.count(".") for n in names) - 1) if names else 0
    while depth < deepest and len({tuple(n.split(".")[: depth + 1]) for n in names}) == 1:
        depth += 1
    return depth


def _tree_ids(names: list[str]) -> dict[str, int]:
    """name -> position of its child of the model, or of the item in a child that is a list (`stages.2`)."""
    depth, order = _wrappers(names), {}

    def key(path: list[str]) -> str:
        if len(path) == depth + 1:  # a tensor of the model's own, such as a class token
            return ""
        return ".".join(path[: depth + 2 if path[depth + 1].isdigit() and len(path) > depth + 2 else depth + 1])

    order[""] = 0
    ids = {n: order.setdefault(key(n.split(".")), len(order)) for n in names}
    return {n: max(1, i) for n, i in ids.items()}  # such tensors come with the first child


def _matched(model: nn.Module, names: list[str], coarse: bool) -> dict[str, int]:
    """By timm's matcher; nothing where a model has none, or one that does not work."""
    if not hasattr(model, "group_matcher"):
        return {}
    from timm.models._manipulate import group_with_matcher

    try:
        return group_with_matcher([(n, None) for n in names], model.group_matcher(coarse=coarse), reverse=True)
    except (AssertionError, KeyError, TypeError, NotImplementedError):
        return {}


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
    if len(set(stage_of.values())) < 2:  # it says nothing
        return ids
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


def _in_execution_order(model: nn.Module, groups: list[Group], events: list[Event]) -> list[Group]:
    """Order groups by when they first run; groups that run interleaved become one."""
    group_of = {name: i for i, group in enumerate(groups) for name in group.names}
    owner = _sole_owner(model, group_of)
    shared = tuple(module for group in groups for module in group.shared)
    for position, event in enumerate(events):
        if any(event.module == module or event.module.startswith(module + ".") for module in shared):
            continue
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
    return _stages_in_a_row(ordered)


def _stages_in_a_row(groups: list[Group]) -> list[Group]:
    """Number stages as they run: a group whose stage was left before it ran (a patch embedding named like the stem) goes with its neighbour."""
    number: dict[int, int] = {}
    for group in groups:
        number.setdefault(group.stage, len(number))
    last = 0
    for group in groups:
        group.stage = last = max(last, number[group.stage])
    return groups


def _settle_shared(model: nn.Module, groups: list[Group], events: list[Event]) -> list[Group]:
    """A module that runs again and again (a shared position bias) belongs where it runs first; else it would tie all together."""
    group_of = {name: i for i, group in enumerate(groups) for name in group.names}
    owner = _sole_owner(model, group_of)
    calls: dict[str, list[int]] = {}
    for position, event in enumerate(events):
        if not event.leaving and event.module in owner:
            calls.setdefault(event.module, []).append(position)
    once = {position: owner[module] for module, at in calls.items() if len(at) == 1 for position in at}
    for module, at in calls.items():
        parent = module.rpartition(".")[0]
        if len(at) < 2 or len(calls.get(parent, ())) >= 2 or not any(at[0] < p < at[-1] for p in once):
            continue
        before, after = [p for p in once if p < at[0]], [p for p in once if p > at[0]]
        host = groups[once[max(before)] if before else once[min(after)]]
        mine = [name for name in groups[owner[module]].names if name.startswith(module + ".")]
        if host is groups[owner[module]] or len(mine) == len(groups[owner[module]].names):
            continue
        groups[owner[module]].names = [name for name in groups[owner[module]].names if name not in mine]
        host.names += mine
        host.shared.append(module)
    return groups


def _sole_owner(model: nn.Module, group_of: dict[str, int]) -> dict[str, int]:
    """module -> the one group that all parameters below it belong to; modules spanning groups are left out."""
    owners: dict[str, set[int]] = {}
    for name, group in group_of.items():
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            owners.setdefault(".".join(path[:depth]), set()).add(group)
    return {module: next(iter(groups)) for module, groups in owners.items() if len(groups) == 1}


def _joined(a: Group, b: Group, note: str = "") -> Group:
    notes = "; ".join(dict.fromkeys(n for n in (a.note, b.note, note) if n))
    return Group(max(a.stage, b.stage), a.names + b.names, a.first, max(a.last, b.last), note=notes)


def _join_norms(model: nn.Module, groups: list[Group]) -> list[Group]:
    """A group of vectors only (a lone norm layer) is no block of its own: it joins its neighbour in the stage."""
    parameters = dict(model.named_parameters())

    def vectors_only(group: Group) -> bool:
        return all(parameters[n].ndim <= 1 for n in group.names if n in parameters)

    joined = [groups[0]]
    for group in groups[1:]:
        if group.stage == joined[-1].stage and (vectors_only(group) or vectors_only(joined[-1])):
            joined[-1] = _joined(joined[-1], group)
        else:
            joined.append(group)
    return joined


def _verified(model, groups: list[Group], events: list[Event], x: Tensor, other: Tensor) -> list[Group]:
    """Give each group its boundary; join it to the next where the boundary does not carry everything."""
    with torch.no_grad():
        answer, distractor = _logits(model(x)), _logits(model(other))
    if float((answer - distractor).abs().max()) <= 1e-9 * float(answer.abs().max()):
        raise UserError("this model gives the same output for two different inputs: its stages cannot be told apart")
    done: list[Group] = []
    current = groups[0]
    for following in groups[1:]:
        leaving = _way_out(events, current.last, following.first)
        if leaving is not None and _carries_all(model, leaving, x, other, answer, distractor):
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


def _between(model, ends: Sequence[str], events: list[Event], x: Tensor, other: Tensor) -> list[Group]:
    """One group up to each of the named modules, and one for the rest; a boundary that does not hold is refused."""
    left = {e.module: (i, e) for i, e in enumerate(events) if e.leaving}  # the last time it ran
    for name in ends:
        if name not in left:
            raise UserError(
                f"no module called {name!r} runs in this model: name boundaries as in model.named_modules()"
            )
    marks = sorted((left[name] for name in dict.fromkeys(ends)), key=lambda mark: mark[0])
    groups = [Group(i, [], boundary=(e.module, e.call), overwritten=e.overwritten) for i, (_, e) in enumerate(marks)]
    groups.append(Group(len(marks), [], boundary=(events[-1].module, events[-1].call)))
    entered: dict[str, int] = {}
    for position, event in enumerate(events):
        entered.setdefault(event.module, position)
    for name in _all_names(model):
        first = entered.get(name.rpartition(".")[0], len(events))
        groups[sum(position < first for position, _ in marks)].names.append(name)
    with torch.no_grad():
        answer, distractor = _logits(model(x)), _logits(model(other))
    for _, event in marks:
        if not can_pack(event.output) or not _carries_all(model, event, x, other, answer, distractor):
            raise UserError(
                f"more passes by {event.module!r} than its output: it cannot be a boundary, name another one"
            )
    if not all(group.names for group in groups):
        raise UserError("two of the boundaries have no weights between them: leave one out")
    return groups


def _way_out(events: list[Event], last: int, following: int) -> Event | None:
    """The module whose output leaves a group that ends at `last`, when the next one starts at `following`.

    It is the last to finish before the next group starts, but not a pooling that throws features away:
    the feature map is what the paper measures, and what tells the most.
    """
    exits = [e for e in events[last:following] if e.leaving and can_pack(e.output)]
    if not exits or exits[0] is not events[last]:
        return None
    return [e for e in exits if _elements(e.output) >= _elements(exits[0].output)][-1]


def _elements(output: object) -> int:
    return sum(t.numel() for t in tensors_in(output))


def _logits(output) -> Tensor:
    found = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(found, Tensor):
        raise UserError(f"the model returns a {type(found).__name__}: it must return logits (n, classes), wrap it in a module that does")
    return found


def _carries_all(model, leaving: Event, x: Tensor, other: Tensor, answer: Tensor, distractor: Tensor) -> bool:
    """Whether the model, fed `other` but given this boundary's output for `x`, answers as for `x`."""
    value = _output_at(model, leaving, x) if leaving.overwritten else leaving.output

    def put(module, inputs, output):
        return value

    with torch.no_grad(), at_call(model, (leaving.module, leaving.call), put):
        given = _logits(model(other))
    return _same(given, answer, scale=answer - distractor)


def _same(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    """Equal up to rounding: untrained networks answer nearly alike to everything, so only ratios mean anything."""
    return float((a - b).abs().max()) <= 1e-6 * float(scale.abs().max())


def _output_at(model, leaving: Event, x: Tensor) -> object:
    kept: list[object] = []

    def keep(module, inputs, output):
        kept.append(tree_map_only(Tensor, Tensor.clone, output))

    with torch.no_grad(), at_call(model, (leaving.module, leaving.call), keep):
        model(x)
    return kept[0]


def _assign_modules(model: nn.Module, groups: list[Group], events: list[Event]) -> None:
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


@torch.no_grad()
def _place_loose(model: nn.Module, groups: list[Group], events: list[Event], x: Tensor) -> None:
    """A tensor that belongs to no module that runs (class token, position table) lives where changing it first shows."""
    ran = {event.module for event in events}
    loose = [n for g in groups for n in g.names if n.rpartition(".")[0] not in ran]
    home = {name: group for group in groups for name in group.names}
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    before = _at_boundaries(model, groups, x) if loose else []
    for name in loose:
        tensor = state[name]
        if not tensor.is_floating_point():
            continue
        kept = tensor.clone()
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)).to(tensor))
        after = _at_boundaries(model, groups, x)
        tensor.copy_(kept)
        first = next((g for g, a, b in zip(groups, before, after) if not torch.equal(a, b)), None)
        if first is not None and first is not home[name]:
            home[name].names.remove(name)
            first.names.append(name)


def _at_boundaries(model: nn.Module, groups: list[Group], x: Tensor) -> list[Tensor]:
    """What leaves each group, in order."""
    found: dict[Call, Tensor] = {}
    wanted = {group.boundary for group in groups}

    def keep(call: Call, output: object) -> None:
        if call in wanted:
            found[call] = pack(output).clone()

    with on_every_call(model, lambda call: None, keep):
        model(x)
    return [found[group.boundary] for group in groups]


def _position(events: list[Event], boundary: tuple[str, int]) -> int:
    return next(i for i, e in enumerate(events) if e.leaving and (e.module, e.call) == boundary)
