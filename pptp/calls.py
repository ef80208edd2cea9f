"""Every call of every module of a model, as it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Call = tuple[str, int]  # module name, and which call of it, counted from 0


@contextmanager
def on_every_call(
    model: nn.Module, enter: Callable[[Call], None], leave: Callable[[Call, object], None]
) -> Iterator[None]:
    """While open, `enter(call)` before and `leave(call, output)` after each; hooks are removed on exit."""
    calls: dict[str, int] = {}

    def entering(name: str):
        def hook(module, inputs):
            calls[name] = calls.get(name, -1) + 1
            enter((name, calls[name]))

        return hook

    def leaving(name: str):
        def hook(module, inputs, output):
            leave((name, calls[name]), output)

        return hook

    handles = []
    for name, module in model.named_modules():
        if name:
            handles += [module.register_forward_pre_hook(entering(name)), module.register_forward_hook(leaving(name))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def at_call(model: nn.Module, call: Call, hook: Callable) -> Iterator[None]:
    """While open, run a forward hook (module, inputs, output) at one particular call of a module."""
    count = [-1]

    def only_then(module, inputs, output):
        count[0] += 1
        return hook(module, inputs, output) if count[0] == call[1] else None

    handle = model.get_submodule(call[0]).register_forward_hook(only_then)
    try:
        yield
    finally:
        handle.remove()
