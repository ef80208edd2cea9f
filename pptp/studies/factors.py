"""`pptp monitor factors`: the dynamics of one run beside those of variants that differ in one setting each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from ..config import Experiment, Parts, Recipe, Source, experiment
from ..ensemble import Job, record_ensemble, train_all
from ..errors import UserError
from ..intervals import Estimate, bootstrap, proportion
from ..monitors.dynamics import Dynamics
from ..runs import UNDEFENDED, Run
from . import Section, Table
from .dynamics import trajectories


def study(
    run: Run, changes: Sequence[dict], models: int = 8, checkpoints: int = 6, processes: int = 1, fpr: float = 0.1
) -> Section:
    """changes: one dict of settings for each variant, as the config takes them. Trains `models` reference models of each."""
    if not changes or models < 8 or models % 2 or checkpoints < 2:
        raise UserError(
            f"factors need a setting to vary, an even number of at least 8 models (not {models}) and 2 checkpoints (not {checkpoints})"
        )
    plans = {"as it is": run, **{_label(change): _variant(run, change) for change in changes}}
    found = {label: _dynamics(variant, models, checkpoints, processes, fpr) for label, variant in plans.items()}
    rows = {label: _numbers(dynamics) for label, dynamics in found.items()}
    return Section(
        "factors",
        "What makes it memorise faster",
        [_compared(label, found[label], found["as it is"]) for label in found if label != "as it is"],
        [_table(rows)],
        [
            f"{models} reference models of each, {checkpoints} checkpoints; one split and one seed: intervals are over samples, not over trainings.",
            "Settings that suit the run may not suit a variant: compare test accuracies before concluding anything about a factor.",
        ],
        {"rows": {label: {k: e.to_dict() for k, e in row.items()} for label, row in rows.items()}},
    )


def _label(change: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in change.items())


def _variant(run: Run, change: dict) -> Run:
    """A run below this one that differs in the given settings only; its target is never trained."""
    flat = {
        f.name: getattr(owner, f.name)
        for owner in (run.experiment, run.experiment.source, run.experiment.parts, run.experiment.recipe)
        for f in fields(owner)
        if not isinstance(getattr(owner, f.name), Source | Parts | Recipe)
    }
    plan: Experiment = experiment({**flat, **change})
    return Run.create(run.path / "factors" / _label(change).replace("/", "_"), plan)


def _dynamics(run: Run, models: int, checkpoints: int, processes: int, fpr: float) -> Dynamics:
    last = run.experiment.recipe.epochs
    epochs = np.unique(np.geomspace(1, last, checkpoints).round().astype(int))
    jobs = [Job(str(run.path), UNDEFENDED, index, 0, 0, tuple(map(int, epochs))) for index in range(models)]
    record_ensemble(jobs, run)
    train_all(jobs, processes)
    return trajectories(run, UNDEFENDED, fpr, jobs).dynamics


def _numbers(found: Dynamics) -> dict[str, Estimate]:
    speed, n = found.encoding_speed, len(found.ids)
    gap = found.states[-1, :, 1] - found.states[-1, :, 0]
    return {
        "net": found.displacement()["net"],
        "cumulative": found.displacement()["cumulative"],
        "speed": bootstrap(lambda rows: speed[rows].mean(), n),
        "gap": bootstrap(lambda rows: gap[rows].mean(), n),
        "vulnerable": proportion(int(found.vulnerable.sum()), n),
    }


def _table(rows: dict[str, dict[str, Estimate]]) -> Table:
    cells = [
        [
            label,
            str(row["vulnerable"]),
            str(row["gap"]),
            f"{row['speed'].value:.4f} [{row['speed'].low:.4f}, {row['speed'].high:.4f}]",
            str(row["net"]),
            str(row["cumulative"]),
        ]
        for label, row in rows.items()
    ]
    header = ["variant", "vulnerable at the end", "mean TPR - FPR", "encoding speed", "net displacement", "cumulative"]
    return Table(
        "Dynamics of each variant (speed: TPR - FPR per epoch; displacement of the centre of mass: sides of the plane)",
        header,
        cells,
    )


def _compared(label: str, found: Dynamics, base: Dynamics) -> str:
    mine, theirs = (bootstrap(lambda rows, d=d: d.vulnerability[rows].mean(), len(d.ids)) for d in (found, base))
    gap = mine.value - theirs.value
    half = ((mine.high - mine.low) ** 2 + (theirs.high - theirs.low) ** 2) ** 0.5 / 2
    said = Estimate(gap, gap - half, gap + half)
    word = "more" if said.low > 0 else "less" if said.high < 0 else "not surely more or less"
    return f"{label}: samples end {word} vulnerable than as it is (mean TPR - FPR {said} apart)."
