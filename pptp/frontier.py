"""Utility against leakage over settings and cuts, every point retrained from the shared trunk cache.

Points are compared on one half of the attacked and of the test samples, and what is said of the chosen one comes from the other
half: the best of many looks better than it is on the samples it was chosen by.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from . import models
from .cache import Policy, TrunkCache
from .config import Recipe
from .ensemble import undefended_references
from .errors import UserError
from .evaluate import MembershipScores, default_attacks, evaluate, fold_of
from .intervals import Estimate, auc, proportion
from .plugins import code_of
from .procedures import Setting, make_defense
from .retrain import replay_adapt, retrain
from .runs import UNDEFENDED, Run, forget_checkpoints, keep_history, measured, read_json, write_json
from .signals import collect
from .splits import TrainingData
from .stages import SCRATCH, split_at
from .training import device


@dataclass(frozen=True)
class Point:
    """What a setting gave: on the half to choose by, and on the half to report."""

    setting: Setting
    accuracy: Estimate  # test accuracy, choosing half
    leak: Estimate  # 1/2 + |AUC - 1/2| of the strongest attack, choosing half; interval corrected for choosing that attack, as below
    attack: str
    reported_accuracy: Estimate
    reported_leak: Estimate  # of the strongest attack on the other half, which it was not chosen by
    reported_attack: str
    worst: float  # the highest upper end of all attacks, on either half
    active: float | None  # share of steps in which the defense did anything; None if it does not say
    seconds: float  # of training, with the sub-models that it may share
    key: str = ""

    def to_dict(self) -> dict:
        """Its numbers, as plain data."""
        estimates = ("accuracy", "leak", "reported_accuracy", "reported_leak")
        plain = ("attack", "reported_attack", "active", "seconds", "key")
        return {n: getattr(self, n).to_dict() for n in estimates} | {n: getattr(self, n) for n in plain}


def grid(
    defense: str,
    sweeps: Mapping[str, Sequence[str]],
    cuts: Sequence[str],
    rewind: str,
    recipe: Recipe,
    policy: Policy | None = None,
) -> list[Setting]:
    """Every combination of the swept values and the cuts."""
    names, policy = list(sweeps), policy or Policy()
    settings = [tuple(f"{n}={v}" for n, v in zip(names, values)) for values in itertools.product(*sweeps.values())]
    return [
        Setting(defense, each, cut, rewind, recipe, policy.views, policy.dtype) for cut in cuts for each in settings
    ]


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in accuracy without leaking more, or in leakage without being less accurate."""
    return [
        p
        for p in points
        if not any(
            q.accuracy.value >= p.accuracy.value
            and q.leak.value <= p.leak.value
            and (q.accuracy.value, q.leak.value) != (p.accuracy.value, p.leak.value)
            for q in points
        )
    ]


def check_rounds(rounds: int) -> None:
    if rounds < 0:
        raise UserError(f"rounds is {rounds}: it must be 0 or above")


def choose(points: Sequence[Point], target_auc: float | None, min_accuracy: float | None) -> Point | None:
    """The most accurate point that leaks no more than the target, or the least leaky that is accurate enough; None if there is none."""
    fit = [
        p
        for p in points
        if (target_auc is None or p.leak.value <= target_auc)
        and (min_accuracy is None or p.accuracy.value >= min_accuracy)
    ]
    if not fit or (target_auc is None and min_accuracy is None):
        return None
    if target_auc is not None:
        return max(fit, key=lambda p: (p.accuracy.value, -p.leak.value))
    return min(fit, key=lambda p: (p.leak.value, -p.accuracy.value))


def nearest(points: Sequence[Point], target_auc: float | None) -> Point:
    """Where no point is good enough: the least leaky, or, if only an accuracy was asked for, the most accurate."""
    if target_auc is None:
        return max(points, key=lambda p: p.accuracy.value)
    return min(points, key=lambda p: p.leak.value)


def refined(best: Setting, tried: Sequence[Setting]) -> list[Setting]:
    """Values halfway (by ratio, where all are positive) between the best one's and its neighbours', field by field."""
    found = []
    for position, text in enumerate(best.settings):
        name, _, value = text.partition("=")
        others = {s.settings[position].partition("=")[2] for s in tried if s.cut == best.cut}
        try:
            numbers, mine = sorted(float(v) for v in others), float(value)
        except ValueError:
            continue
        at = numbers.index(mine)
        for other in (*numbers[max(0, at - 1) : at], *numbers[at + 1 : at + 2]):
            middle = math.sqrt(mine * other) if min(mine, other) > 0 else (mine + other) / 2
            changed = (*best.settings[:position], f"{name}={middle:.4g}", *best.settings[position + 1 :])
            found.append(replace(best, settings=changed))
    return [setting for setting in found if setting not in tried]


class Sweep:
    """Trains and measures points of one run; what was computed is kept on disk, what a trunk says in memory."""

    def __init__(self, run: Run, cache: TrunkCache | None = None):
        self.run, self.cache = run, cache or TrunkCache()
        self.data: TrainingData = run.splits.for_defense()
        self.parts = run.parts(run.model(UNDEFENDED))
        self.references = undefended_references(run)
        self.attacks = default_attacks()
        self.base = run.model_digest(UNDEFENDED)
        self.folder = run.path / "frontier"
        self.shelf = self.folder / "shelf" / self.base  # on this base alone

    def check(self, settings: Sequence[Setting]) -> None:
        """Refuse what cannot work, before anything is trained."""
        for setting in settings:
            split_at(self.parts, setting.cut)
            defense = make_defense(setting.defense, setting.settings)
            defense.check(self.run.splits.classes, setting.recipe)
            defense.check_start(setting.rewind == "init")

    def point(self, setting: Setting) -> Point:
        """Trained and measured now, or read back; measured anew where the attacks or their reference models are others."""
        key = setting.key(self.base)
        folder, measured_by = self.folder / key, self._measured_by()
        path = folder / "point.json"
        if not (folder / "trained.json").exists():
            self._train(setting, folder)
        if not path.exists() or read_json(path, "")["by"] != measured_by:
            found = self.measured(self.model(setting, folder), setting.cut)
            write_json(path, {**read_json(folder / "trained.json", ""), **found, "by": measured_by})
        return point_of(read_json(path, ""), setting, key)

    def _measured_by(self) -> dict:
        codes = {name: code_of(attack) for name, attack in self.attacks.items()}
        return {"attacks": codes, "references": self.references.digest(), "splits": self.run.splits_digest()}

    def _train(self, setting: Setting, folder: Path) -> None:
        model = self.run.model(UNDEFENDED)
        defense = make_defense(setting.defense, setting.settings)
        start = {"init": self.run.initial_weights, "none": lambda: None}.get(setting.rewind)
        if start is None:
            raise UserError(f"rewind is {setting.rewind!r}: a frontier starts from init or none")
        cost: dict[str, float] = {}
        with measured(cost):
            result = retrain(
                model,
                start(),
                setting.cut,
                defense,
                replace(self.data, shelf=self.shelf),
                setting.recipe,
                parts=self.parts,
                checkpoint=folder / "checkpoint.pt",
                cache=self.cache,
            )
        cost["seconds"] = result.get("seconds", cost["seconds"])  # of all epochs, also of those before a resume
        keep_history(folder)
        models.write_weights(model, folder / "last.safetensors")
        write_json(folder / "trained.json", {"result": result, "cost": cost})
        forget_checkpoints(folder)

    def model(self, setting: Setting, folder: Path) -> nn.Module:
        """As it was trained, with the layers that its defense may have swapped."""
        model = self.run.model(UNDEFENDED)
        replay_adapt(model, self.run.parts(model), setting.cut, make_defense(setting.defense, setting.settings))
        weights = folder / "last.safetensors"
        models.load_weights(model, models.read_weights(weights), weights)
        return model.eval().to(device(setting.recipe))

    def clear_shelf(self) -> None:
        """When no more points are to come: what they shared is large, and only points need it."""
        shutil.rmtree(self.shelf.parent, ignore_errors=True)

    def undefended(self) -> Point:
        """The base itself, on the same halves."""
        found = self.measured(self.run.model(UNDEFENDED), SCRATCH)
        setting = Setting("plain", (), SCRATCH, "none", self.run.experiment.recipe)
        return point_of({**found, "result": {}, "cost": {"seconds": 0.0}}, setting, "")

    def measured(self, model: nn.Module, cut: str) -> dict:
        """Accuracy and leakage on both halves; from the cached trunk where the model allows it."""
        s = self.run.splits
        members, nonmembers = self.run.attacked()
        parts = [members, nonmembers, s.test]
        model, (inside, outside, test) = self.cache.for_queries(model, self.parts, cut, parts)
        evaluation = evaluate(model, inside, outside, test, self.attacks, references=self.references)["model"]
        halves = fold_of(np.repeat([True, False], [len(inside), len(outside)]), 2, 0)
        corrected = 1 - 0.05 / len(evaluation.attacks)
        found: dict = {
            "attacks": {
                name: [auc_of_half(scores, halves == half, corrected).to_dict() for half in (0, 1)]
                for name, scores in evaluation.attacks.items()
            }
        }
        said = collect(model, test)
        right = (said.logits.argmax(1) == said.labels).numpy()
        of_test = fold_of(np.ones(len(right), bool), 2, 0)
        found["accuracy"] = [
            proportion(int(right[of_test == k].sum()), int((of_test == k).sum())).to_dict() for k in (0, 1)
        ]
        return found


def auc_of_half(scores: MembershipScores, half: np.ndarray, confidence: float) -> Estimate:
    """Of the samples in `half`, a mask over all that are attacked, of which an attack may score some only: a sample is in the same half for every attack."""
    mine = half[scores.rows]
    return auc(scores.scores[mine & scores.members], scores.scores[mine & ~scores.members], confidence)


def point_of(value: Mapping, setting: Setting, key: str) -> Point:
    leaks = {name: [replace(Estimate(**e).turned, note=e["note"]) for e in halves] for name, halves in value["attacks"].items()}
    attack, reported_attack = (max(leaks, key=lambda name: leaks[name][half].value) for half in (0, 1))
    accuracy = [Estimate(**e) for e in value["accuracy"]]
    return Point(
        setting,
        accuracy[0],
        leaks[attack][0],
        attack,
        accuracy[1],
        leaks[reported_attack][1],
        reported_attack,
        max(leak.high for halves in leaks.values() for leak in halves),
        value["result"].get("active"),
        value["cost"]["seconds"],
        key,
    )


def table(points: Sequence[Point], best: Point | None) -> str:
    """Every point by leakage, Pareto points marked."""
    front = pareto(points)
    width = max(len(str(p.setting)) for p in points) + 2
    lines = [
        f"{'':6}{'point':<{width}}{'test accuracy':<24}{'AUC of strongest attack':<24}{'':14}{'active':>8}{'seconds':>9}"
    ]
    for p in sorted(points, key=lambda p: p.leak.value):
        mark = "best" if p is best else " *" if p in front else ""
        active = "-" if p.active is None else f"{p.active:.0%}"
        lines.append(
            f"{mark:<6}{p.setting!s:<{width}}{p.accuracy!s:<24}{p.leak!s:<24}{p.attack:<14}{active:>8}{p.seconds:>9.1f}"
        )
    lines.append(
        "* no other point is better in both. 95 % intervals, on the half of the samples that points are chosen by; those of AUC are corrected for taking the strongest attack."
    )
    if best is not None:
        lines.append(
            f"best: {best.setting}; on the other half, which it was not chosen by: test accuracy {best.reported_accuracy}, "
            f"AUC {best.reported_leak} by {best.reported_attack}, the strongest there (interval corrected for taking the strongest)"
        )
    return "\n".join(lines)
