"""Norms of each sample's own gradient, for all samples of a batch in one backward pass.

The gradient of a linear or convolutional weight is sum_t g_t a_t^T over positions t (a: what goes in, g: the gradient of
what comes out), so its norm follows from a and g without being formed: ||sum_t g_t a_t^T||^2 = sum_{t,u} (a_t.a_u)(g_t.g_u)
(Goodfellow 2015, arXiv 1510.01799; "ghost norm"). Affine norms are one product. Whatever is left (tokens, position tables, scales,
modules that run more than once) goes through torch.func, those weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import Dataset

from .data import batches
from .stages import Stage, bare

INPUT = "input"


def gradient_norms(
    model: nn.Module, data: Dataset, parts: Sequence[Stage], batch_size: int = 64, workers: int = 0
) -> dict[str, Tensor]:
    """{"input": (n,), part: (n,), ...}: norms of the loss gradient with respect to the input and to each part's weights.

    The model is in eval mode, so samples do not mix; batch_size bounds the memory.
    """
    model.eval()
    kept: dict[str, list[Tensor]] = {INPUT: [], **{part.name: [] for part in parts}}
    for inputs, targets in batches(data, model, batch_size, workers):
        of_input, squares = squared_norms(model, inputs, targets)
        kept[INPUT].append(of_input.sqrt().cpu())
        for part in parts:
            mine = [squares[name] for name in part.parameter_names]
            total = torch.stack(mine).sum(0) if mine else torch.zeros_like(of_input)
            kept[part.name].append(total.sqrt().cpu())
    return {name: torch.cat(values) for name, values in kept.items()}


def squared_norms(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared gradient norms (n,) of the input, and of every parameter by name."""
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    squares: dict[str, Tensor] = {}
    inputs = inputs.detach().clone().requires_grad_()
    try:
        model.requires_grad_(False)  # no weight gradient is formed: they follow from what passes by
        with bare(model), _tapped(model) as taps:
            F.cross_entropy(model(inputs), targets, reduction="sum").backward()
        for module, (name, passes) in taps.items():
            if len(passes) == 1 and _usable(*passes[0], len(targets)):
                found = _of_module(module, *passes[0][:2])
                squares |= {f"{name}.{key}" if name else key: square for key, square in found.items()}
        left = [name for name, _ in model.named_parameters() if name not in squares]
        if left:
            with bare(model):
                squares |= _one_by_one(model, inputs.detach(), targets, left)
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted[name])
    return inputs.grad.flatten(1).square().sum(1), squares


def _usable(a: Tensor, g: Tensor | None, version: int, samples: int) -> bool:
    """One row a sample (not of windows), a gradient came back, and nothing has written into the input since."""
    return g is not None and len(a) == len(g) == samples and a._version == version


@contextmanager
def _tapped(model: nn.Module):
    """While open, records (input, gradient of the output) of every pass through a known module; hooks are removed on exit."""
    taps: dict[nn.Module, tuple[str, list]] = {}
    handles = []
    changed = [module for module in model.modules() if getattr(module, "inplace", False) is True]

    def after(module, inputs, output):
        passing = [inputs[0].detach(), None, inputs[0]._version]
        taps[module][1].append(passing)
        if output.requires_grad:
            output.register_hook(lambda gradient: passing.__setitem__(1, gradient.detach()))

    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        plain = type(module).forward in _FORWARDS and all(owners[id(p)] == 1 for p in own)
        if own and plain and (not isinstance(module, nn.Conv2d) or module.padding_mode == "zeros"):
            taps[module] = (name, [])
            handles.append(module.register_forward_hook(after))
    for module in changed:
        module.inplace = False
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()
        for module in changed:
            module.inplace = True


# Sub-classes that compute something else (padding, activations, standardised weights) are left to torch.func.
_FORWARDS = {cls.forward for cls in (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)}


def _of_module(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Squared norms (n,) of the gradients of weight and bias."""
    if isinstance(module, nn.Linear):
        return _product(module, _tokens(a), _tokens(g))
    if isinstance(module, nn.Conv2d):
        return _of_convolution(module, a, g)
    return _of_norm(module, a, g)


def _tokens(x: Tensor) -> Tensor:
    """(n, ..., c) -> (n, t, c)"""
    return x.reshape(len(x), -1, x.shape[-1])


def _product(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    """a: (n, t, in), g: (n, t, out); whichever of the two ways needs less work."""
    t, fan_in, fan_out = a.shape[1], a.shape[2], g.shape[2]
    if t * t * (fan_in + fan_out) <= t * fan_in * fan_out:
        square = ((a @ a.mT) * (g @ g.mT)).sum((1, 2))
    else:
        square = (g.mT @ a).square().sum((1, 2))
    found = {"weight": square.clamp(min=0)}
    if module.bias is not None:
        found["bias"] = g.sum(1).square().sum(1)
    return found


def _of_convolution(module: nn.Conv2d, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Each position's patch takes the place of a token; groups are convolutions of their own."""
    padding = module.padding
    if isinstance(padding, str):  # "same" or "valid"
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(module.dilation, module.kernel_size)]
        a = F.pad(a, (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2))
        padding = 0
    patches = F.unfold(a, module.kernel_size, module.dilation, padding, module.stride).mT  # (n, t, in k k)
    n, t, groups = len(a), patches.shape[1], module.groups
    patches = patches.reshape(n, t, groups, -1).transpose(1, 2).reshape(n * groups, t, -1)
    g = g.flatten(2).mT  # (n, t, out)
    own = _product(module, patches, g.reshape(n, t, groups, -1).transpose(1, 2).reshape(n * groups, t, -1))
    return {key: square.reshape(n, groups).sum(1) for key, square in own.items()}


def _of_norm(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The gradient of the scale is the sum of g times what it scales."""
    if module.weight is None:
        return {}
    if isinstance(module, nn.LayerNorm):
        scaled = F.layer_norm(a, module.normalized_shape, None, None, module.eps)
        rest = tuple(range(1, a.ndim - len(module.normalized_shape)))
    else:
        if isinstance(module, nn.GroupNorm):
            scaled = F.group_norm(a, module.num_groups, None, None, module.eps)
        else:
            scaled = F.batch_norm(a, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
        rest = tuple(range(2, a.ndim))
    found = {"weight": _summed(g * scaled, rest)}
    if module.bias is not None:
        found["bias"] = _summed(g, rest)
    return found


def _summed(x: Tensor, rest: tuple[int, ...]) -> Tensor:
    return (x.sum(rest) if rest else x).flatten(1).square().sum(1)


def _one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Per-sample gradients of the named weights by torch.func."""
    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name].detach() for name in names}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    changed = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in changed:
        module.inplace = False
    try:
        found = vmap(grad(loss), in_dims=(None, 0, 0), randomness="error")(chosen, inputs, targets)
    finally:
        for module in changed:
            module.inplace = True
    return {name: gradient.flatten(1).square().sum(1) for name, gradient in found.items()}
