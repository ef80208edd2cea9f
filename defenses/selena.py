"""SELENA: self-distillation from an ensemble of sub-models (Tang et al., USENIX Security 2022, arXiv 2110.08324)."""

import copy
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pptp.data import Part, indexed, sample_ids
from pptp.errors import UserError
from pptp.fingerprint import fingerprint_of
from pptp.models import atomically
from pptp.outside import probabilities
from pptp.plugins import HOW_ONLY
from pptp.retrain import Defense
from pptp.training import Step, cross_entropy, fit


@dataclass(frozen=True)
class Selena(Defense):
    """Teach the model what sub-models say of samples they were not trained on.

    Split-AI: each sample is left out of `l` of `k` sub-models, and its teacher label is the mean prediction of
    those, on the un-augmented image. The student minimises the soft cross-entropy to it, with no hard label.

    Beyond the paper: labels over `views` augmented images besides; sub-models of their own number of epochs, since one
    that has memorised a sample tells of it in its labels for that sample's neighbours; and labels to the power
    1 / `temperature`, normalised, which below 1 are surer than the sub-models are.
    """

    k: int = 25
    l: int = 10  # noqa: E741, the paper's name
    views: int = 0  # augmented views of the image that a teacher label is the mean over, besides itself
    sub_epochs: int = 0  # of a sub-model; 0: as many as the student's
    temperature: float = 1.0  # of the teacher labels
    clip_grad: float = 1.0  # largest gradient norm of the student
    processes: int = field(default=1, metadata=HOW_ONLY)  # sub-models trained at once

    @property
    def needs_images(self):
        return self.views > 0

    def check(self, classes, recipe):
        if not 1 <= self.l < self.k:
            raise UserError(
                f"selena l is {self.l} and k is {self.k}: 1 <= l < k, since each sample is left out of l of k sub-models"
            )
        if not self.clip_grad > 0:
            raise UserError(f"selena clip_grad is {self.clip_grad}: it must be above 0")
        if self.processes < 1:
            raise UserError(f"selena processes is {self.processes}: it must be at least 1")
        if self.views < 0:
            raise UserError(f"selena views is {self.views}: it must be 0, for the image alone, or above")
        if self.sub_epochs < 0:
            raise UserError(f"selena sub_epochs is {self.sub_epochs}: it must be 0, for the student's, or above")
        if not self.temperature > 0:
            raise UserError(f"selena temperature is {self.temperature}: it must be above 0")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        members = indexed(data.members)
        left_out = leave_out(len(members), self.k, self.l, recipe.seed)  # (n, k) bool
        shared = any(getattr(module, "pptp_frozen", False) for module in model.modules())
        folder = data.shelf or (Path(checkpoint).with_suffix(".selena") if checkpoint else None)
        said, seconds = self._sub_models(model, members, left_out, recipe, folder)  # (k, n, classes)
        teacher = tempered(_mean_over(said, left_out), self.temperature)
        confidence = _in_out_confidence(said, left_out, members.labels)
        print(
            f"selena: sub-models give the true class {confidence['in_confidence']:.3f} on samples they trained on, "
            f"{confidence['out_confidence']:.3f} on samples they did not"
            + ("; they share a trunk that saw every sample, so no teacher is a true non-member" if shared else "")
        )
        labels = Lookup(members, teacher, str(replace(self, processes=1)))
        history = fit(
            model,
            members,
            replace(recipe, clip_grad=recipe.clip_grad or self.clip_grad),
            loss=labels.loss,
            monitors=monitors,
            checkpoint=checkpoint,
            title="selena student",
        )
        summary = history.summary()
        return {**summary, "seconds": summary["seconds"] + seconds, "active": 1.0, **confidence}

    def _sub_models(
        self, model: nn.Module, members: Dataset, left_out: np.ndarray, recipe, folder: Path | None
    ) -> tuple[Tensor, float]:
        """What every sub-model says of every member: probabilities (k, n, classes). Finished ones are read back."""
        recipe = replace(recipe, epochs=self.sub_epochs or recipe.epochs)
        jobs = [
            (
                model,
                members,
                np.flatnonzero(~left_out[:, k]),
                replace(recipe, seed=recipe.seed + 1000 * (k + 1)),
                k,
                self.views,
                folder,
            )
            for k in range(self.k)
        ]
        if self.processes == 1:
            done = [_sub_model(*job) for job in jobs]
            return torch.stack([said for said, _ in done]), sum(seconds for _, seconds in done)
        threads = max(1, torch.get_num_threads() // self.processes)
        with ProcessPoolExecutor(
            self.processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)
        ) as pool:
            futures = {pool.submit(_sub_model, *job): job[4] for job in jobs}
            done = {futures[future]: future.result() for future in as_completed(futures)}
        return torch.stack([done[k][0] for k in range(self.k)]), sum(done[k][1] for k in done)


def _sub_model(
    model: nn.Module, members: Dataset, rows: np.ndarray, recipe, k: int, views: int, folder: Path | None
) -> tuple[Tensor, float]:
    """Train a copy of the model, sub-model k, on `rows` of the members: its probabilities on all of them, (n, classes), and the seconds it took."""
    part = Part(members, rows, f"sub-model {k}")
    name = f"{fingerprint_of(model, part, recipe, cross_entropy)}-{views}"  # students of another length or temperature share it
    saved = folder / f"said_{name}.pt" if folder else None
    if saved and saved.exists():
        there = torch.load(saved, weights_only=True)
        return there["said"], there["seconds"]
    started = time.perf_counter()
    model = copy.deepcopy(model)  # only now, so that no more than one is held at a time
    checkpoint = folder / f"sub_{name}.pt" if folder else None
    fit(model, part, recipe, checkpoint=checkpoint, title=f"selena sub-model {k + 1}")
    said, seconds = probabilities(model, members, views), time.perf_counter() - started
    if saved:
        atomically(saved, lambda temporary: torch.save({"said": said, "seconds": seconds}, temporary))
        checkpoint.unlink(missing_ok=True)
    return said, seconds


def leave_out(samples: int, k: int, l: int, seed: int) -> np.ndarray:  # noqa: E741
    """(samples, k) bool: which sub-models do not train on a sample; exactly l in every row, about as many in every column."""
    return np.random.default_rng(seed).random((samples, k)).argsort(1).argsort(1) < l


def _mean_over(said: Tensor, left_out: np.ndarray) -> Tensor:
    """Mean prediction of the sub-models that did not train on a sample. (n, classes)"""
    weight = torch.as_tensor(left_out.T, dtype=said.dtype)[:, :, None]  # (k, n, 1)
    return (said * weight).sum(0) / weight.sum(0)


def tempered(label: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised. (n, classes)"""
    return (label.clamp(min=1e-12).log() / temperature).softmax(1)


def _in_out_confidence(said: Tensor, left_out: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    true = said.gather(2, torch.as_tensor(labels)[None, :, None].expand(len(said), -1, 1)).squeeze(2)  # (k, n)
    out = torch.as_tensor(left_out.T)
    return {"in_confidence": float(true[~out].mean()), "out_confidence": float(true[out].mean())}


@dataclass
class Lookup:
    """Teacher labels by sample id."""

    members: Dataset = field(repr=False)
    teacher: Tensor = field(repr=False)  # (n, classes), in the order of the members
    made_by: str = ""  # a checkpoint is continued only with labels that were made in the same way

    def __post_init__(self):
        ids = sample_ids(self.members)
        self.row = torch.full((int(ids.max()) + 1,), -1)
        self.row[torch.as_tensor(ids)] = torch.arange(len(ids))

    def loss(self, step: Step) -> Tensor:
        rows = self.row[step.indices.cpu()]
        if (rows < 0).any():
            raise UserError(f"there is no teacher label for sample {int(step.indices[rows.to(step.indices) < 0][0])}")
        return soft_cross_entropy(step.logits, self.teacher[rows].to(step.logits))


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-sum_c t_c log p_c, mean over the batch; through log_softmax, since log(softmax(z)) overflows at gaps of ~100."""
    return -(target * logits.log_softmax(1)).sum(1).mean()
