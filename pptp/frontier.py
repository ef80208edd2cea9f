"""Utility against leakage over settings and cuts, every point retrained from the shared trunk cache.

Points are compared on one half of the attacked and of the test samples, and what is said of the chosen one comes from the other
half: the best of many looks better than it is on the samples it was chosen by.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from . import models
from .cache import TrunkCache
from .config import Recipe
from .ensemble import references_for
from .errors import UserError
from .evaluate import MembershipScores, default_attacks, evaluate, fold_of
from .intervals import Estimate, auc, proportion
from .procedures import make_defense
from .retrain import retrain
from .runs import UNDEFENDED, Run, forget_checkpoints, keep_history, measured, read_json, write_json
from .signals import collect
from .splits import TrainingData
from .stages import split_at


@dataclass(frozen=True)
class Setting:
    """One point to train."""

    defense: str
    settings: tuple[str, ...]  # field=value
    cut: str
    rewind: str
    recipe: Recipe

    def key(self, base: str) -> str:
        """Hash of all that makes the point, with the digest of the base model."""
        recipe = {k: v for k, v in asdict(self.recipe).items() if k not in ("workers", "device")}
        what = [self.defense, self.settings, self.cut, self.rewind, recipe, base, "strongest of each half"]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return " ".join([self.cut, *self.settings])


@dataclass(frozen=True)
class Point:
    """What a setting gave: on the half to choose by, and on the half to report."""

    setting: Setting
    accuracy: Estimate  # test accuracy, choosing half
    leak: Estimate  # 1/2 + |AUC - 1/2| of the strongest attack, choosing half
    attack: str
    reported_accuracy: Estimate
    reported_leak: Estimate  # of the strongest attack on the other half, which it was not chosen by; interval corrected for choosing that attack
    reported_attack: str
    active: float
    seconds: float
    key: str = ""


def grid(
    defense: str, sweeps: Mapping[str, Sequence[str]], cuts: Sequence[str], rewind: str, recipe: Recipe
) -> list[Setting]:
    """Every combination of the swept values and the cuts."""
    names = list(sweeps)
    return [
        Setting(defense, tuple(f"{name}={value}" for name, value in zip(names, values)), cut, rewind, recipe)
        for cut in cuts
        for values in itertools.product(*sweeps.values())
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
            found.append(Setting(best.defense, changed, best.cut, best.rewind, best.recipe))
    return [setting for setting in found if setting not in tried]


class Sweep:
    """Trains and measures points of one run; what was computed is kept on disk, what a trunk says in memory."""

    def __init__(self, run: Run, cache: TrunkCache | None = None):
        self.run, self.cache = run, cache or TrunkCache()
        self.data: TrainingData = run.splits.for_defense()
        self.base = run.model(UNDEFENDED)
        self.parts = run.parts(self.base)
        self.references = references_for(run, UNDEFENDED)
        self.digest = f"{run.model_digest(UNDEFENDED)} {self.references.digest() if self.references else ''}"
        self.folder = run.path / "frontier"
        self.shelf = self.folder / "shelf" / hashlib.sha256(self.digest.encode()).hexdigest()[:16]  # on this base alone

    def check(self, settings: Sequence[Setting]) -> None:
        """Refuse what cannot work, before anything is trained."""
        for setting in settings:
            split_at(self.parts, setting.cut)
            defense = make_defense(setting.defense, setting.settings)
            defense.check(self.run.splits.classes, setting.recipe)
            defense.check_start(setting.rewind == "init")

    def point(self, setting: Setting) -> Point:
        """Trained and measured now, or read back."""
        key = setting.key(self.digest)
        path = self.folder / key / "point.json"
        if not path.exists():
            self._train(setting, key, path)
        return _read_point(path, setting, key)

    def _train(self, setting: Setting, key: str, path: Path) -> None:
        model = self.run.model(UNDEFENDED)
        defense = make_defense(setting.defense, setting.settings)
        start = {"init": self.run.initial_weights, "none": lambda: None}.get(setting.rewind)
        if start is None:
            raise UserError(f"rewind is {setting.rewind!r}: a frontier starts from init or none")
        cost: dict[str, float] = {}
        started = time.perf_counter()
        with measured(cost):
            result = retrain(
                model,
                start(),
                setting.cut,
                defense,
                replace(self.data, shelf=self.shelf),
                setting.recipe,
                parts=self.parts,
                checkpoint=path.with_name("checkpoint.pt"),
                cache=self.cache,
            )
        cost["seconds"] = result.get("seconds", cost["seconds"])  # of all epochs, also of those before a resume
        keep_history(path.parent)
        models.write_weights(model, path.with_name("last.safetensors"))
        found = self._measured(model, setting.cut)
        seconds = time.perf_counter() - started
        point = {**found, "active": result.get("active", 1.0), "seconds": seconds, "result": result, "cost": cost}
        write_json(path, point)
        forget_checkpoints(path.parent)

    def clear_shelf(self) -> None:
        """When no more points are to come: what they shared is large, and only points need it."""
        shutil.rmtree(self.shelf.parent, ignore_errors=True)

    def _measured(self, model: nn.Module, cut: str) -> dict:
        """Accuracy and leakage on both halves; from the cached trunk where the model allows it."""
        s = self.run.splits
        members, nonmembers = self.run.attacked()
        parts = [members, nonmembers, s.test]
        model, (inside, outside, test) = self.cache.for_queries(model, self.parts, cut, parts)
        evaluation = evaluate(model, inside, outside, test, default_attacks(), references=self.references)["model"]
        corrected = 1 - 0.05 / len(evaluation.attacks)
        found: dict = {
            "attacks": {
                name: [auc_of_half(scores, 0, 0.95).to_dict(), auc_of_half(scores, 1, corrected).to_dict()]
                for name, scores in evaluation.attacks.items()
            }
        }
        said = collect(model, test)
        right = (said.logits.argmax(1) == said.labels).numpy()
        halves = fold_of(np.ones(len(right), bool), 2, 0)
        found["accuracy"] = [
            proportion(int(right[halves == k].sum()), int((halves == k).sum())).to_dict() for k in (0, 1)
        ]
        return found


def auc_of_half(scores: MembershipScores, half: int, confidence: float) -> Estimate:
    mine = fold_of(scores.members, 2, 0) == half
    return auc(scores.scores[mine & scores.members], scores.scores[mine & ~scores.members], confidence)


def _read_point(path: Path, setting: Setting, key: str) -> Point:
    value = read_json(path, "")
    leaks = {name: [_turned(Estimate(**e)) for e in halves] for name, halves in value["attacks"].items()}
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
        value["active"],
        value["seconds"],
        key,
    )


def _turned(e: Estimate) -> Estimate:
    """An AUC, turned around if it is below 1/2."""
    low, high = e.effect
    return Estimate(0.5 + abs(e.value - 0.5), 0.5 + low, 0.5 + high, e.note)


def table(points: Sequence[Point], best: Point | None) -> str:
    """Every point by leakage, Pareto points marked."""
    front = pareto(points)
    width = max(len(str(p.setting)) for p in points) + 2
    lines = [
        f"{'':6}{'point':<{width}}{'test accuracy':<24}{'AUC of strongest attack':<24}{'':14}{'active':>8}{'seconds':>9}"
    ]
    for p in sorted(points, key=lambda p: p.leak.value):
        mark = "best" if p is best else " *" if p in front else ""
        lines.append(
            f"{mark:<6}{p.setting!s:<{width}}{p.accuracy!s:<24}{p.leak!s:<24}{p.attack:<14}{p.active:>8.0%}{p.seconds:>9.1f}"
        )
    lines.append(
        "* no other point is better in both. 95 % intervals, on the half of the samples that points are chosen by."
    )
    if best is not None:
        lines.append(
            f"best: {best.setting}; on the other half, which it was not chosen by: test accuracy {best.reported_accuracy}, "
            f"AUC {best.reported_leak} by {best.reported_attack}, the strongest there (interval corrected for taking the strongest)"
        )
    return "\n".join(lines)
