"""The execution cut: run a model up to a boundary, or from there on, whatever its forward looks like.

Modules that finish before the boundary are not run at all: their calls return stand-ins of the right shape, and the boundary's own
call returns the activation that is given. `partition` has verified that nothing but that activation reaches what comes
after, so the stand-ins cannot show in the output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .calls import Call, at_call, on_every_call
from .errors import UserError
from .stages import Stage, eval_mode, split_at
from .trees import pack, unpack


class CannotCut(UserError):
    """This model cannot be run from this boundary on."""


class _Reached(Exception):
    """The boundary was computed: nothing after it is needed."""


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor for any batch size: dimensions that hold the batch are multiples of it."""

    sizes: tuple[int, ...]
    per_sample: tuple[bool, ...]
    dtype: torch.dtype

    def stand_in(self, n: int, like: Tensor, whole: bool) -> Tensor:
        """Zeros; one number seen from everywhere, unless something writes into it (`whole`)."""
        dtype = like.dtype if self.dtype.is_floating_point else self.dtype
        sizes = [size * n if scales else size for size, scales in zip(self.sizes, self.per_sample)]
        zero = torch.zeros((), dtype=dtype, device=like.device)
        return torch.zeros(sizes, dtype=dtype, device=like.device) if whole else zero.expand(sizes)


@dataclass(frozen=True)
class Plan:
    """Which calls to skip, and what they return: (module, call) -> a tree of `Shape`s and plain values; the boundary's is None."""

    boundary: Call
    returns: dict[Call, object]
    shape: tuple[int, ...]  # of the boundary's output, without the batch
    like: object = None  # an output of the boundary, for two samples
    whole: bool = False


class Suffix(nn.Module):
    """A model that takes activations of its boundary instead of images; images it takes as well, and runs whole."""

    def __init__(self, model: nn.Module, parts: Sequence[Stage], cut: str, input_shape: Sequence[int]):
        super().__init__()
        self.model, self.input_shape = model, tuple(input_shape)
        trunk, _ = split_at(parts, cut)
        if not trunk:
            raise CannotCut(f"there is nothing before the cut {cut!r}")
        self.plan = make_plan(model, (trunk[-1].boundary, trunk[-1].boundary_call), self.input_shape)
        if self.plan.shape == self.input_shape:  # behind a normalising layer, say
            raise CannotCut(f"what {trunk[-1].name} gives has the shape of an image: the two could not be told apart")

    def __getattr__(self, name: str):
        """Whatever else is asked of it, the model itself answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, *boundary shape), or (n, *input shape)."""
        if tuple(x.shape[1:]) == self.input_shape:
            return self.model(x)
        if tuple(x.shape[1:]) != self.plan.shape:
            raise ValueError(
                f"got {tuple(x.shape[1:])}: neither an input {self.input_shape} nor an activation {self.plan.shape}"
            )
        return run_from(self.model, self.plan, x, self.input_shape)


def run_from(model: nn.Module, plan: Plan, activation: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """The model's output, from the boundary on."""
    n = len(activation)
    image = torch.zeros((), dtype=activation.dtype, device=activation.device).expand(n, *input_shape)

    def answer(call: Call):
        if call == plan.boundary:
            return unpack(plan.like, activation)
        return tree_map_only(Shape, lambda shape: shape.stand_in(n, activation, plan.whole), plan.returns[call])

    with _replaced(model, plan, answer):
        return model(image)


@contextmanager
def _replaced(model: nn.Module, plan: Plan, answer) -> Iterator[None]:
    """While open, the planned calls return `answer(call)` and run nothing."""
    calls: dict[str, set[int]] = {}
    for name, call in (*plan.returns, plan.boundary):
        calls.setdefault(name, set()).add(call)
    patched = []

    def patch(name: str, module: nn.Module) -> None:
        original, count = module.forward, [-1]

        def forward(*inputs, **options):
            count[0] += 1
            return answer((name, count[0])) if count[0] in calls[name] else original(*inputs, **options)

        patched.append((module, module.__dict__.get("forward")))
        module.forward = forward

    try:
        for name in calls:
            patch(name, model.get_submodule(name))
        yield
    finally:
        for module, before in patched:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before


@torch.no_grad()
def run_until(model: nn.Module, boundary: Call, x: Tensor) -> Tensor:
    """The output of the boundary; nothing after it is run."""
    found: list[Tensor] = []

    def stop(module, inputs, output):
        found.append(pack(output))
        raise _Reached

    with contextlib.suppress(_Reached), at_call(model, boundary, stop):
        model(x)
    return found[0]


# --- the plan ------------------------------------------------------------------------------------


def make_plan(model: nn.Module, boundary: Call, input_shape: tuple[int, ...]) -> Plan:
    """Trace two batch sizes, keep the outermost calls that finish before the boundary, and try the result."""
    with eval_mode(model):
        like = next(model.parameters())
        two, three = (_outermost(model, boundary, torch.zeros(n, *input_shape).to(like)) for n in (2, 3))
        if two.keys() != three.keys():
            raise CannotCut("this model runs other modules for other batch sizes")
        returns = {call: _for_any_batch(two[call], three[call]) for call in two if call != boundary}
        activation = pack(two[boundary])
        plan = Plan(boundary, returns, tuple(activation.shape[1:]), two[boundary])
        return _tried(model, plan, activation, input_shape)


def _tried(model: nn.Module, plan: Plan, activation: Tensor, input_shape: tuple[int, ...]) -> Plan:
    """The plan if it runs; with stand-ins in memory of their own where the model writes into them."""
    for candidate in (plan, replace(plan, whole=True)):
        try:
            with torch.no_grad():
                run_from(model, candidate, activation.clone(), input_shape)
            return candidate
        except (RuntimeError, TypeError, AttributeError, ValueError, AssertionError) as error:
            reason = error
    raise CannotCut(f"this model cannot be run from {plan.boundary[0]} on: {str(reason).splitlines()[0]}") from reason


@torch.no_grad()
def _outermost(model: nn.Module, boundary: Call, x: Tensor) -> dict[Call, object]:
    """Outputs of the calls that are finished when the boundary is, and are not part of another finished one."""
    open_calls: list[Call] = []
    finished: dict[Call, tuple[Call | None, object]] = {}  # call -> (parent, output)

    def leave(call: Call, output: object) -> None:
        open_calls.pop()
        kept = tree_map_only(Tensor, Tensor.clone, output) if call == boundary else output  # it may be written into
        finished[call] = (open_calls[-1] if open_calls else None, kept)
        if call == boundary:
            raise _Reached

    with contextlib.suppress(_Reached), on_every_call(model, open_calls.append, leave):
        model(x)
    if boundary not in finished:
        raise CannotCut(f"{boundary[0]} did not run")
    return {call: output for call, (parent, output) in finished.items() if parent is None or parent in open_calls}


def _for_any_batch(two: object, three: object) -> object:
    """What a call returned for two samples and for three, as a recipe for any number."""
    (a, spec), (b, other_spec) = tree_flatten(two), tree_flatten(three)
    if spec != other_spec:
        raise CannotCut("a module of this model returns something else for another batch size")
    return tree_unflatten([_leaf(x, y) for x, y in zip(a, b)], spec)


def _leaf(x: object, y: object) -> object:
    if not isinstance(x, Tensor):
        if x != y:
            raise CannotCut("a module of this model returns a number that depends on the batch size")
        return x
    per_sample = tuple(i != j for i, j in zip(x.shape, y.shape))
    if any(scales and i * 3 != j * 2 for i, j, scales in zip(x.shape, y.shape, per_sample)):
        raise CannotCut("a module of this model returns a shape that is no multiple of the batch size")
    sizes = tuple(i // 2 if scales else i for i, scales in zip(x.shape, per_sample))
    return Shape(sizes, per_sample, x.dtype)
