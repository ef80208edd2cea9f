"""Outputs that are more than one tensor, seen as one: (features, size), several branches, lists of maps."""

from __future__ import annotations

from torch import Tensor, cat
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def pack(output: object) -> Tensor:
    """The tensor itself if there is one; several as one vector a sample, (n, elements of all)."""
    found = tensors_in(output)
    return found[0] if len(found) == 1 else cat([leaf.flatten(1) for leaf in found], 1)


def unpack(like: object, value: Tensor) -> object:
    """The inverse: `value` in the shape of the output `like`, for any number of samples."""
    leaves, spec = tree_flatten(like)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(found) == 1:
        parts = [value]
    else:
        sizes = [leaf[0].numel() for leaf in found]
        parts = [p.reshape(len(value), *leaf.shape[1:]) for p, leaf in zip(value.split(sizes, 1), found)]
    following = iter(parts)
    return tree_unflatten([next(following) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def can_pack(output: object) -> bool:
    """Whether there is a tensor, and all there are have the samples first and numbers in them."""
    found = tensors_in(output)
    return bool(found) and all(t.ndim and len(t) == len(found[0]) and t.is_floating_point() for t in found)
