"""Algorithm 1 of PPTP: freeze the safe layers, rewind the risky ones, retrain those under a defense."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from .cache import TrunkCache
from .errors import UserError
from .models import weights_digest
from .splits import Splits, TrainingData
from .stages import SCRATCH, Stage, freeze, rewind, split_at, stages, unfreeze
from .training import Monitor, Recipe, Step, device, fit


class Defense(ABC):
    """The f(D, M, C) of Algorithm 1: a training procedure, not just a loss.

    Subclasses are frozen dataclasses whose fields are the method's hyper-parameters.
    """

    needs_outside = False  # True: it asks `data.outside`, models that speak of members they were not trained on
    needs_images = False  # True: it changes images itself, so activations of a frozen trunk cannot stand in for them

    def check(self, classes: int, recipe: Recipe) -> None:
        """Refuse hyper-parameters that cannot work, before any training."""

    def check_start(self, rewound: bool) -> None:
        """Refuse a start that the method cannot stand; rewound: from initial weights, not from ones that saw the members."""

    def adapt(self, model: nn.Module) -> None:
        """Swap layers that are not frozen, in place, where the method needs it; replayed when the model is loaded."""

    @abstractmethod
    def train(
        self,
        model: nn.Module,
        data: TrainingData,
        recipe: Recipe,
        *,
        monitors: Sequence[Monitor] = (),
        checkpoint: str | Path | None = None,
    ) -> dict[str, float]:
        """Train the weights that require gradients; return what there is to report.

        "active" in the result is the share of steps in which the defense differed from plain training.
        """


class LossDefense(Defense):
    """A defense that is nothing but another loss."""

    @abstractmethod
    def loss(self, step: Step) -> Tensor:
        """Scalar to minimise in place of cross-entropy; may log "active" where it does not differ from it in every step."""

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        title = type(self).__name__.lower()
        history = fit(
            model, data.members, recipe, loss=self.loss, monitors=monitors, checkpoint=checkpoint, title=title
        )
        return {"active": 1.0, **history.summary()}


class FrozenLayersMoved(RuntimeError):
    """A weight or buffer before the cut changed during retraining."""


def retrain(
    model: nn.Module,
    rewind_to: Mapping[str, Tensor] | nn.Module | None,
    cut: str,
    defense: Defense,
    data: Splits | TrainingData,
    recipe: Recipe,
    monitors: Sequence[Monitor] = (),
    *,
    parts: Sequence[Stage] | None = None,
    checkpoint: str | Path | None = None,
    cache: TrunkCache | None = None,
) -> dict[str, float]:
    """Retrain `model` in place from `cut` on, and prove that nothing before it moved.

    rewind_to: the weights the suffix starts from, initial or of an early epoch (a state dict, or a model);
    None keeps the trained ones (fine-tuning). cut: a stage or block name, "head" or "scratch".
    cache: keeps what the frozen layers say, here and for later calls with the same trunk; one of its own by default.
    """
    if isinstance(data, Splits):
        data = data.for_defense()
    classes = _class_count(model, data)
    defense.check(classes, recipe)
    if defense.needs_outside and data.outside is None:
        raise UserError(
            f"{type(defense).__name__} needs what models say of members that they were not trained on: give TrainingData(..., outside=pptp.Teachers(...))"
        )
    if parts is None:
        sample = data.members[0][0]
        parts = stages(model, sample.shape)
    parts = [stage.on(model) for stage in parts]
    trunk, suffix = split_at(parts, cut)
    if rewind_to is not None:
        rewind(suffix, rewind_to.state_dict() if isinstance(rewind_to, nn.Module) else rewind_to)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    freeze(trunk)
    before = _trunk_digest(trunk)
    try:
        defense.adapt(model)
        trained, data, kept, recipe = _from_cache(model, parts, cut, defense, data, recipe, cache)
        result = defense.train(trained, data, recipe, monitors=monitors, checkpoint=checkpoint) or {}
    finally:
        unfreeze(model, wanted)
    if _trunk_digest(trunk) != before:
        raise FrozenLayersMoved(
            f"layers before the cut {cut!r} changed while retraining under {type(defense).__name__}"
        )
    model.eval()
    retrained = sum(p.numel() for part in suffix for p in part.parameters())
    share = retrained / sum(p.numel() for p in model.parameters())
    return {**result, "retrained_share": share, "cache": kept}


def _from_cache(model, parts, cut: str, defense: Defense, data: TrainingData, recipe: Recipe, cache: TrunkCache | None):
    """(model, data, what was cached, recipe) to train with: the suffix on the trunk's outputs where that is possible."""
    if cut == SCRATCH:
        return model, data, "nothing is frozen", recipe
    if defense.needs_images:
        return model, data, f"{type(defense).__name__} changes images itself", recipe
    if recipe.compile != "no":
        return model, data, "torch.compile cannot trace the cut", recipe
    model.to(device(recipe))
    cache = TrunkCache() if cache is None else cache
    trained, cached, kept = cache.prepare(model, parts, cut, data, recipe.augment, recipe.batch_size)
    return trained, cached, kept, replace(recipe, augment=False) if trained is not model else recipe


def replay_adapt(model: nn.Module, parts: Sequence[Stage], cut: str, defense: Defense) -> None:
    """Swap the layers of a fresh model as the retraining under `defense` did, so that its weights fit."""
    trunk, _ = split_at(parts, cut)
    freeze(trunk)
    defense.adapt(model)
    unfreeze(model, {})


def _class_count(model: nn.Module, data: TrainingData) -> int:
    classes = getattr(model, "num_classes", None) or data.classes
    if data.classes > classes:
        raise UserError(
            f"the data has {data.classes} classes, the model {classes}: build the model with num_classes={data.classes}"
        )
    return classes


def _trunk_digest(trunk: Sequence[Stage]) -> str:
    state = {
        name: tensor
        for part in trunk
        for names, tensors in ((part.parameter_names, part.parameters()), (part.buffer_names, part.buffers()))
        for name, tensor in zip(names, tensors)
    }
    return weights_digest(state)
