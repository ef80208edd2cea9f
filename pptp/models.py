"""A timm model by name, hub id or folder; weights read and written safely."""

from __future__ import annotations

import difflib
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from .errors import UserError

RESERVED = {"num_classes", "in_chans", "checkpoint_path", "pretrained_cfg"}


def create(name: str, classes: int, img_size: int = 0, seed: int = 42, pretrained: bool = False, **kwargs) -> nn.Module:
    """Build `name` ("resnet18", "hf-hub:...", "local-dir:...") with seeded initial weights."""
    given = sorted(RESERVED & set(kwargs))
    if given:
        raise UserError(f"model_kwargs has {', '.join(given)}: that is for pptp to say, from the data and its own flags")
    if ":" not in name and name.split(".")[0] not in timm.list_models():
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        raise UserError(
            f"timm has no model called {name!r}"
            + (f": did you mean {', '.join(near)}?" if near else ": see timm.list_models()")
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _build(name, pretrained, num_classes=classes, img_size=img_size, **kwargs)
    if img_size:
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, img_size, img_size), "crop_pct": 1.0}
    return model


def _build(name: str, pretrained: bool, img_size: int, **kwargs) -> nn.Module:
    """Fixed-size families (ViT, Swin) take `img_size`, the others refuse it: ask, and ask again without."""
    try:
        if img_size:
            try:
                return timm.create_model(name, pretrained=pretrained, img_size=img_size, **kwargs)
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except (TypeError, RuntimeError, AssertionError, OSError, ValueError) as error:
        raise UserError(
            f"timm cannot build {name!r} with {kwargs or 'no options'}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def normalisation(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that the model's inputs are normalised with."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return tuple(config.get("mean", (0.5,) * 3)), tuple(config.get("std", (0.5,) * 3))


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """A state dict from .safetensors, or from a pickle that holds nothing but tensors and plain values."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} needs to run code to be loaded, which is refused: save its state_dict() as .safetensors"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise UserError(f"{path} is damaged or not a checkpoint ({_first_line(error)}): write it again") from error
    return _state_dict_in(loaded, path)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _state_dict_in(loaded, path: Path) -> dict[str, Tensor]:
    """The state dict itself, or the one that timm and Lightning checkpoints carry under a known key."""
    for key in ("state_dict_ema", "state_dict", "model_ema", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise UserError(f"{path} holds no state dict: save model.state_dict()")
    return {name.removeprefix("module."): tensor for name, tensor in loaded.items()}


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: str | Path) -> None:
    """Copy `state` into `model`; every name and shape must fit."""
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in state:
            raise UserError(f"{source} does not fit the model: it has no {name}")
        if state[name].shape != tensor.shape:
            what = "class count differs" if state[name].shape[1:] == tensor.shape[1:] else "shape differs"
            raise UserError(
                f"{source} does not fit the model: {what} at {name}, {tuple(state[name].shape)} in the file, {tuple(tensor.shape)} in the model"
            )
    surplus = [name for name in state if name not in own]
    if surplus:
        raise UserError(f"{source} does not fit the model: it has {surplus[0]}, which the model lacks")
    model.load_state_dict(state)


def write_weights(model: nn.Module, path: str | Path) -> None:
    """Save the state dict as safetensors, atomically."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    atomically(
        path, lambda temporary: temporary.write_bytes(save(state))
    )  # save_file hides a full disk in its own error


def weights_digest(model_or_state: nn.Module | Mapping[str, Tensor]) -> str:
    """Short hash of all weights and buffers, bit by bit."""
    state = model_or_state.state_dict() if isinstance(model_or_state, nn.Module) else model_or_state
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Write beside `path`, then rename: a kill or a full disk leaves the old file as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
