"""Other norms in the place of BatchNorm, which mixes the samples of a batch and keeps statistics of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .errors import UserError
from .stages import Stage

KINDS = {"bn": "BatchNorm", "gn": "GroupNorm", "ln": "LayerNorm", "none": "no norm"}


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm layers by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def group_norm(norm: nn.Module, groups: int = 0) -> nn.Module:
    """GroupNorm (of at most 32 groups) with scale and shift of a BatchNorm; timm's norm-and-activation layers keep their activation."""
    from timm.layers import GroupNormAct

    groups = groups or math.gcd(32, norm.num_features)
    if hasattr(norm, "act"):
        new = GroupNormAct(norm.num_features, groups, eps=norm.eps)
        new.drop, new.act = norm.drop, norm.act
    else:
        new = nn.GroupNorm(groups, norm.num_features, eps=norm.eps)
    if norm.affine:
        with torch.no_grad():
            new.weight.copy_(norm.weight)
            new.bias.copy_(norm.bias)
    return new.to(norm.running_mean if norm.running_mean is not None else torch.empty(0))


def _replacement(norm: nn.Module, kind: str) -> nn.Module:
    if kind == "gn":
        return group_norm(norm)
    if kind == "ln":  # over all channels and positions of a sample
        return group_norm(norm, 1)
    return nn.Sequential(norm.drop, norm.act) if hasattr(norm, "act") else nn.Identity()


def swap_norms(model: nn.Module, kind: str, names: Iterable[str] | None = None) -> None:
    """Replace the BatchNorm layers of these names (all by default) in place."""
    if kind not in KINDS:
        raise UserError(f"norm is {kind!r}: it must be one of {', '.join(KINDS)}")
    there = batch_norms(model)
    for name in list(there if names is None else names) if kind != "bn" else ():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, _replacement(there[name], kind))


def swap_as_told(model: nn.Module, text: str, parts: Callable[[nn.Module], Sequence[Stage]]) -> None:
    """ "gn" swaps all, "gn:layer3,layer4" those of these stages."""
    kind, _, wanted = text.partition(":")
    if not batch_norms(model):
        raise UserError(f"norm is {text!r}, but this model has no BatchNorm: leave it out")
    if not wanted:
        return swap_norms(model, kind)
    stages = {stage.name: stage for stage in parts(model)}
    unknown = [name for name in wanted.split(",") if name not in stages]
    if unknown:
        raise UserError(f"norm names {', '.join(unknown)}: the stages of this model are {', '.join(stages)}")
    chosen = [stages[name] for name in wanted.split(",")]
    return swap_norms(model, kind, [name for stage in chosen for name in norms_of(model, stage)])


def norms_of(model: nn.Module, stage: Stage) -> list[str]:
    """Names of the BatchNorm layers of a stage."""
    return [name for name in batch_norms(model) if name in stage.module_names]
