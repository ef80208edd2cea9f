"""Going on after a kill: all that is needed to continue a training."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from .errors import UserError
from .fingerprint import whole
from .models import atomically

if TYPE_CHECKING:
    from .training import Monitor


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
