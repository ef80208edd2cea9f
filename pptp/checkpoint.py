"""Going on after a kill: what a training is told apart by, and all that is needed to continue it."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from .config import Recipe
from .data import Samples
from .errors import UserError
from .models import atomically, weights_digest
from .plugins import code_of
from .suffix import Suffix

if TYPE_CHECKING:
    from .training import Monitor


def whole(model: nn.Module) -> nn.Module:
    """The model itself, where it is trained from the activations of its trunk: what is trained is the same."""
    return model.model if isinstance(model, Suffix) else model


def fingerprint_of(model: nn.Module, data: Samples, recipe: Recipe, loss: Callable) -> str:
    """All that makes a training: recipe, samples and their labels, loss, starting and trained weights. A checkpoint is continued
    only where it is the same. Images are not read for it: data sets of the same labels are told apart by their paths alone."""
    model, what = whole(model), replace(recipe, device="auto", workers=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    text = json.dumps([asdict(what), trained, said(loss), weights_digest(model), len(data)])
    return hashlib.sha256(text.encode() + data.ids.tobytes() + data.labels.tobytes()).hexdigest()[:16]


def said(loss: object) -> list:
    """A loss in words that are the same in another process: its name, its code, and all that it is bound to."""
    if isinstance(loss, partial):
        return [*said(loss.func), _value(loss.args), _value(loss.keywords)]
    if hasattr(loss, "__self__"):  # a method, of a defense say
        return [loss.__name__, _value(loss.__self__)]
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    bound = [getattr(loss, name, None) for name in ("__defaults__", "__kwdefaults__")]
    bound += [_value(loss)] if named is not loss else [_content(cell) for cell in getattr(loss, "__closure__", None) or ()]
    ours = (named.__module__ or "").partition(".")[0] in ("pptp", "defenses")  # told apart by settings; code of others by its text
    return [named.__qualname__, _value(bound), "" if ours else code_of(named)]


def _content(cell) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _value(value: object, depth: int = 4) -> str:
    """What a value says of itself, without addresses and without what it keeps for itself; of what lies too deep, its kind."""
    if isinstance(value, (int, float, str, bytes, type(None), np.generic)):
        return repr(value)
    if depth == 0 or isinstance(value, torch.optim.Optimizer):  # which has done nothing yet
        return type(value).__qualname__
    if isinstance(value, Tensor):
        return weights_digest({"": value})
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, nn.Module):
        return weights_digest(whole(value))
    if isinstance(value, Samples):
        return hashlib.sha256(value.ids.tobytes() + value.labels.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return repr(sorted((str(k), _value(v, depth - 1)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return repr([_value(one, depth - 1) for one in value])
    if callable(value) and hasattr(value, "__qualname__"):
        return repr(said(value))
    if getattr(value, "made_by", ""):  # computed, and perhaps not to the last bit when it is computed again
        return f"{type(value).__qualname__} {value.made_by}"
    held = {name: one for name, one in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return f"{type(value).__qualname__} {_value(held, depth - 1)}"


def check_same(before: object, now: object, what: str) -> None:
    """For monitors that go on after a kill: traces of other samples, or made in another way, cannot be continued."""
    before, now = ([*value] if isinstance(value, (tuple, np.ndarray)) else value for value in (before, now))
    if before != now:
        raise UserError(f"the training that is resumed watched {what}: ask for the same, or pass --fresh")


@dataclass
class Checkpoint:
    """Everything needed to go on after a kill: weights, optimizer, schedule, random state, history."""

    path: str | Path | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: object
    scaler: torch.amp.GradScaler | None  # of fp16
    monitors: Sequence[Monitor]
    fingerprint: str

    def resume(self) -> list[dict[str, float]]:
        """Restore what the file holds and return its history; no file, no history."""
        if self.path is None or not Path(self.path).exists():
            return []
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError, OSError) as error:
            raise UserError(
                f"{self.path} is damaged: delete it, or pass --fresh, to train again from the start"
            ) from error
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"{self.path} was written with another configuration: pass --fresh, or use another run directory"
            )
        whole(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, monitor in self._named_monitors().items():
            if name in state["monitors"]:
                monitor.load_state_dict(state["monitors"][name])
            elif monitor.state_dict():
                raise UserError(
                    f"{self.path} is of a training that {type(monitor).__name__.lower()} did not watch from its start: leave the monitor out, or pass --fresh"
                )
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available() and state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        return state["history"]

    def write(self, history: list[dict[str, float]]) -> None:
        if self.path is None:
            return
        state = {
            "fingerprint": self.fingerprint,
            "model": whole(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "monitors": {name: _readable(m.state_dict(), m) for name, m in self._named_monitors().items()},
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "history": history,
        }
        buffer = io.BytesIO()  # written by Python, so that a full disk is an OSError
        torch.save(state, buffer)
        atomically(self.path, lambda temporary: temporary.write_bytes(buffer.getbuffer()))

    def _named_monitors(self) -> dict[str, Monitor]:
        """By their class, and which of those they are."""
        seen: Counter[str] = Counter()
        named = {}
        for monitor in self.monitors:
            kind = type(monitor).__name__
            named[f"{kind}/{seen[kind]}"] = monitor
            seen[kind] += 1
        return named


def _readable(value: object, monitor: Monitor) -> object:
    """What a checkpoint can be read back from without running code: numpy's numbers as plain ones; its arrays are refused."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        raise UserError(
            f"{type(monitor).__name__}.state_dict() holds a numpy array, which no checkpoint can be read back with: give torch tensors or lists"
        )
    if isinstance(value, Mapping):
        return {_readable(key, monitor): _readable(one, monitor) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_readable(one, monitor) for one in value)
    return value
