"""Input-loss curvature (Ravikumar et al. 2024, arXiv 2402.18726), a sign of memorised samples, by three estimators.

They are different quantities and keep their own names. All take the model in eval mode, the loss summed over the batch, and answer in
units of loss per squared unit of the normalised input (`fd_norm`: loss per unit).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..checkpoint import check_same
from ..data import batches, sample_ids, some
from ..errors import UserError
from ..stages import bare
from ..training import Monitor

SMOOTH = (nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Mish)


def hutchinson(model: nn.Module, x: Tensor, y: Tensor, probes: int = 10, seed: int = 0) -> Tensor:
    """tr(d^2 loss / dx^2) = E_v[v^T H v], Rademacher v, by double backward. (n,)"""
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x, create_graph=True)
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for v in _rademacher(x, probes, seed):
        (product,) = torch.autograd.grad(gradient, x, v, retain_graph=True)
        total += (v * product).flatten(1).sum(1).detach()
    return total / probes


def fd_norm(model: nn.Module, x: Tensor, y: Tensor, probes: int = 10, h: float = 1e-3, seed: int = 0) -> Tensor:
    """mean_v ||grad(x + h v) - grad(x)||, Rademacher v: close to h sqrt(tr H^2), not the trace; what the paper plots. (n,)"""
    start = _gradient(model, x, y)
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for v in _rademacher(x, probes, seed):
        total += (_gradient(model, x + h * v, y) - start).flatten(1).norm(dim=1)
    return total / probes


def fisher(model: nn.Module, x: Tensor, y: Tensor, samples: int = 0, seed: int = 0) -> Tensor:
    """E_{c ~ p} ||grad_x log p_c||^2, which is the trace for piecewise linear networks; y is not needed. (n,)

    samples = 0: exactly, one backward pass a class; otherwise that many classes drawn from p.
    """
    x = x.detach().clone().requires_grad_()
    log_p = model(x).log_softmax(1)
    p = log_p.detach().exp()
    total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    if samples:
        drawn = torch.multinomial(p.cpu(), samples, True, generator=torch.Generator().manual_seed(seed)).to(x.device)
        for chosen in drawn.T:
            total += _squared_gradient(log_p, x, chosen) / samples
        return total
    for c in range(p.shape[1]):
        total += p[:, c] * _squared_gradient(log_p, x, torch.full_like(y, c))
    return total


def _squared_gradient(log_p: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(log_p.gather(1, chosen[:, None]).sum(), x, retain_graph=True)
    return gradient.flatten(1).square().sum(1)


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)[0]


def _rademacher(x: Tensor, probes: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(probes):
        yield (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {"hutchinson": hutchinson, "fd_norm": fd_norm, "fisher": fisher}


def curvature(
    model: nn.Module, data: Dataset, estimator: str = "fisher", batch_size: int = 64, workers: int = 0, **settings
) -> Tensor:
    """The estimator on every sample of `data`, the model in eval mode. (n,)"""
    if estimator not in ESTIMATORS:
        raise UserError(f"curvature estimator is {estimator!r}: it must be one of {', '.join(ESTIMATORS)}")
    model.eval()
    with bare(
        model
    ):  # what is done to outputs afterwards has no gradient, and someone who holds the weights can leave it out
        found = [
            ESTIMATORS[estimator](model, x, y, **settings).detach().cpu()
            for x, y in batches(data, model, batch_size, workers)
        ]
    return torch.cat(found)


def is_piecewise_linear(model: nn.Module) -> bool:
    """Whether no smooth activation is in it, so that `fisher` is the trace."""
    return not any(isinstance(module, SMOOTH) for module in model.modules())


def memorization(right: np.ndarray, members: np.ndarray) -> np.ndarray:
    """(n,) Pr[correct | trained on] - Pr[correct | not] over models (Feldman & Zhang 2020); NaN where one kind of model is missing.

    right, members: (m, n) bool.
    """
    inside, outside = members.sum(0), (~members).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (right & members).sum(0) / inside - (right & ~members).sum(0) / outside


class Curvature(Monitor):
    """Curvature of a fixed choice of training samples after every `every`-th epoch; the mean over epochs ranks them.

    At a training loss near 0 curvature collapses, which is why one look at the end is not enough. `fisher` with one sampled class is
    the default because it is cheap; with samples=0 it is exact, and ranks better.
    """

    def __init__(
        self, data: Dataset, every: int = 1, most: int = 2000, estimator: str = "fisher", seed: int = 0, **settings
    ):
        self.data = some(data, most, "watched", seed)
        self.ids, self.watched = sample_ids(self.data), len(self.data)
        self.every, self.estimator = every, estimator
        self.settings = settings or ({"samples": 1} if estimator == "fisher" else {})
        self.found: dict[int, Tensor] = {}

    def after_epoch(self, model, epoch):
        if (epoch + 1) % self.every:
            return {}
        self.found[epoch + 1] = curvature(model, self.data, self.estimator, **self.settings)
        return {"curvature": float(self.found[epoch + 1].mean())}

    @property
    def mean(self) -> np.ndarray:
        """(n,): over the epochs that were looked at."""
        return torch.stack(list(self.found.values())).mean(0).numpy()

    def arrays(self) -> dict[str, np.ndarray]:
        """For curvature.npz."""
        return {
            "estimator": np.array(self.estimator),
            "ids": self.ids,
            "mean": self.mean,
            **{f"epoch_{e}": values.numpy() for e, values in self.found.items()},
        }

    def state_dict(self):
        return {"ids": self.ids.tolist(), "how": self._how, "found": self.found}

    @property
    def _how(self) -> list:
        return [self.estimator, self.every, sorted(self.settings.items())]

    def load_state_dict(self, state):
        check_same(state["ids"], self.ids, "the curvature of other samples")
        check_same(state["how"], self._how, "curvature by another estimator, or at other epochs")
        self.found = dict(state["found"])
