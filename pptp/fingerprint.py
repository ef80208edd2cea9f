"""What a training is told apart by: its checkpoint is continued where all of it is the same, and nowhere else."""

from __future__ import annotations

import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor, nn

from .config import Recipe
from .data import Samples
from .models import weights_digest
from .plugins import code_of
from .suffix import Suffix

DEPTH = 4  # how far into what a loss holds


def whole(model: nn.Module) -> nn.Module:
    """The model itself, where it is trained from the activations of its trunk: what is trained is the same."""
    return model.model if isinstance(model, Suffix) else model


def fingerprint_of(model: nn.Module, data: Samples, recipe: Recipe, loss: Callable) -> str:
    """Of recipe, samples and their labels, loss, starting and trained weights.

    Images are not read for it: data sets of the same labels are told apart by their paths alone.
    """
    model = whole(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    text = json.dumps([asdict(anywhere(recipe)), trained, said(loss), weights_digest(model), _samples(data)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def anywhere(recipe: Recipe) -> Recipe:
    """Where it is trained is not what is trained."""
    return replace(recipe, device="auto", workers=0)


def said(loss: Callable, depth: int = DEPTH) -> str:
    """A loss in words that are the same in another process: its name, its code, and all that it is bound to."""
    if isinstance(loss, partial):
        return repr([said(loss.func, depth), _value(loss.args, depth), _value(loss.keywords, depth)])
    owner = getattr(loss, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):  # a method, of a defense say
        return repr([loss.__name__, _value(owner, depth), _code(type(owner))])
    if not hasattr(loss, "__qualname__"):  # an object that is called
        return repr([_value(loss, depth), _code(type(loss))])
    bound = [getattr(loss, name, None) for name in ("__defaults__", "__kwdefaults__")]
    bound += [_content(cell) for cell in getattr(loss, "__closure__", None) or ()]
    return repr([loss.__qualname__, _value(bound, depth), _code(loss)])


def _content(cell) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _code(thing: object) -> str:
    """Of a function or class that is not ours, which is told apart by settings: its text, or its instructions where it was typed in."""
    if (thing.__module__ or "").partition(".")[0] in ("pptp", "defenses"):
        return ""
    functions = [f for f in vars(thing).values() if inspect.isfunction(f)] if inspect.isclass(thing) else [thing]
    return code_of(thing) or repr([_instructions(f.__code__) for f in functions if hasattr(f, "__code__")])


def _instructions(code: types.CodeType) -> list:
    constants = [_instructions(c) if inspect.iscode(c) else _value(c) for c in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _samples(data: Samples) -> str:
    return f"{len(data)} {hashlib.sha256(data.ids.tobytes() + data.labels.tobytes()).hexdigest()} {data.kept}"


def _value(value: object, depth: int = DEPTH) -> str:
    """What a value says of itself, without addresses and without what it keeps for itself; of what lies too deep, its kind."""
    if isinstance(value, (int, float, str, bytes, type(None), np.generic, Enum, PurePath)):
        return repr(value)
    if isinstance(value, Tensor):
        return weights_digest({"": value})
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Recipe):
        return repr(anywhere(value))
    if isinstance(value, Samples):
        return _samples(value)
    if isinstance(value, nn.Module):
        return _module(whole(value))
    if depth == 0 or isinstance(value, torch.optim.Optimizer):  # which has done nothing yet
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return repr(sorted((str(k), _value(v, depth - 1)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return repr([_value(one, depth - 1) for one in value])
    if isinstance(value, (set, frozenset)):
        return repr(sorted(_value(one, depth - 1) for one in value))
    if callable(value) and hasattr(value, "__qualname__"):
        return said(value, depth - 1)
    if getattr(value, "made_by", ""):  # computed, and perhaps not to the last bit when it is computed again
        return f"{type(value).__qualname__} {value.made_by}"
    return f"{type(value).__qualname__} {_value(_public(value), depth - 1)}"


def _module(module: nn.Module) -> str:
    """Its weights, what its parts print of themselves, and their settings that are plain values."""
    settings = {
        f"{name}.{key}": value for name, part in module.named_modules() for key, value in _public(part).items() if key != "training"
    }
    return f"{type(module).__qualname__} {module!r} {weights_digest(module)} {_value(settings, 1)}"


def _public(value: object) -> dict[str, object]:
    slots = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return {name: one for name, one in {**slots, **getattr(value, "__dict__", {})}.items() if not name.startswith("_")}
