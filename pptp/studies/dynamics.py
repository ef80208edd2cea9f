"""`pptp monitor dynamics`: samples on the FPR-TPR plane over training, difficulty, and early warning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..ensemble import Job, recorded_margins
from ..errors import UserError
from ..intervals import Estimate, proportion
from ..monitors.dynamics import REGIONS, Dynamics, correlations, early_warning, plane, vulnerable_by_chance
from ..runs import UNDEFENDED, Run, write_npz
from . import Section, Table

SHOWN_CELLS = 20
FEW = 8


@dataclass(frozen=True)
class Trajectories:
    dynamics: Dynamics  # of the attacked samples
    models: int  # reference models that they come from
    by_chance: float  # share of samples that would end vulnerable if nothing were memorised


def trajectories(run: Run, procedure: str = UNDEFENDED, fpr: float = 0.1, jobs: Sequence[Job] = ()) -> Trajectories:
    """jobs: from these reference models only."""
    if not 0 < fpr < 1:
        raise UserError(f"fpr is {fpr}: it must lie between 0 and 1")
    found = recorded_margins(run, procedure, jobs)
    wanted = f"pptp ensemble {run.path} --models 16 --record-epochs 1,2,5,...{'' if procedure == UNDEFENDED else f' --procedure {procedure}'}"
    if found is None or len(found.epochs) < 2:
        raise UserError(f'dynamics need reference models with outputs of several epochs: run "{wanted}" first')
    if len(found.members) < FEW:
        raise UserError(
            f'{len(found.members)} reference models are too few for a plane, {FEW} are needed: run "{wanted}"'
        )
    states = plane(found.phi, found.members, fpr)
    by_chance = vulnerable_by_chance(found.phi[-1], found.members, fpr)
    return Trajectories(Dynamics(found.epochs, found.ids, states), len(found.members), by_chance)


def study(run: Run, procedure: str = UNDEFENDED, fpr: float = 0.1) -> Section:
    made = trajectories(run, procedure, fpr)
    found, models = made.dynamics, made.models
    traces = _traces(run) if procedure == UNDEFENDED else None
    write_npz(
        run.path / "monitors" / "dynamics.npz", {"epochs": found.epochs, "ids": found.ids, "states": found.states}
    )
    warnings = early_warning(found, traces)
    related = correlations(found, traces) if traces is not None else {}
    moved, last = found.displacement(), found.regions[-1]
    count = int(found.vulnerable.sum())
    lines = [
        f"{len(found.ids)} samples, {models} reference models ({procedure}), epochs {found.epochs[0]} to {found.epochs[-1]}: "
        f"{count} samples end vulnerable ({proportion(count, len(found.ids))}; {made.by_chance:.3f} would if nothing were memorised).",
        f"Centre of mass: moved {moved['net']} of the plane's side from first to last checkpoint, {moved['cumulative']} along the way.",
        f"Encoding speed, mean over samples: {found.encoding_speed.mean():.4f} (TPR - FPR per epoch); path {found.path_speed.mean():.4f} sides per epoch.",
    ]
    return Section(
        "dynamics",
        "When it memorises",
        lines,
        [_regions_table(found), _transitions_table(found), *_warning_table(warnings), *_difficulty_table(related)],
        _caveats(found, models, traces, fpr),
        {
            "epochs": found.epochs.tolist(),
            "cells": [_cells(state) for state in found.states],
            "centre": found.states.mean(1).tolist(),
            "warnings": warnings,
            "difficulty": {name: e.to_dict() for name, e in related.items()},
            "regions": {name: int((last == k).sum()) for k, name in enumerate(REGIONS)},
            "displacement": {name: e.to_dict() for name, e in moved.items()},
            "vulnerable_by_chance": made.by_chance,
            "encoding_speed": float(found.encoding_speed.mean()),
        },
        models=(procedure,),
    )


def _traces(run: Run) -> dict[str, np.ndarray] | None:
    path = run.folder(UNDEFENDED) / "dynamics.npz"
    if not path.exists():
        return None
    with np.load(path) as saved:
        return dict(saved)


def _cells(state: np.ndarray) -> list[list[int]]:
    counts, _, _ = np.histogram2d(*state.T, bins=SHOWN_CELLS, range=((0, 1), (0, 1)))
    return counts.astype(int).tolist()


def _regions_table(found: Dynamics) -> Table:
    entropy = found.entropy()
    rows = [
        [str(epoch), *(f"{(regions == k).mean():.3f}" for k in range(4)), f"{h:.2f}"]
        for epoch, regions, h in zip(found.epochs, found.regions, entropy)
    ]
    return Table(
        "Share of samples in each region, and spatial entropy (nats, at most 4.61)",
        ["epoch", *REGIONS, "entropy"],
        rows,
    )


def _transitions_table(found: Dynamics) -> Table:
    counts = found.transitions()
    rows = [
        [name, *(f"{c / max(1, row.sum()):.3f}" for c in row), str(row.sum())] for name, row in zip(REGIONS, counts)
    ]
    return Table("Moves between neighbouring checkpoints, from row to column", ["from", *REGIONS, "moves"], rows)


def _warning_table(warnings: list[dict]) -> list[Table]:
    rows = [
        [
            f"{row['share']:.0%}",
            row["by"],
            str(row["epoch"]),
            f"{len(row['flagged'])} of {row['of']}",
            f"{Estimate(**row['recall'])}",
            f"{Estimate(**row['precision'])}",
            f"{row['base_rate']:.3f}",
        ]
        for row in warnings
    ]
    header = ["of training", "by", "epoch", "flagged", "recall", "precision", "by chance"]
    caption = (
        "Early warning: who is flagged by then, and how many of them end vulnerable (ids in monitors/dynamics.json)"
    )
    return [Table(caption, header, rows)] if rows else []


def _difficulty_table(related: dict[str, Estimate]) -> list[Table]:
    rows = [[name, str(rho)] for name, rho in sorted(related.items(), key=lambda item: -item[1].value)]
    return (
        [
            Table(
                "Spearman correlation of difficulty (of the target's training) with final vulnerability",
                ["difficulty", "rho"],
                rows,
            )
        ]
        if rows
        else []
    )


def _caveats(found: Dynamics, models: int, traces, fpr: float) -> list[str]:
    lines = [
        f"A sample is called a member above the threshold that calls {fpr:.0%} of pairs of a sample and a model not trained on it; vulnerable: TPR at least 1/2 at FPR below 1/2.",
        "Intervals are over samples; those of other reference models would differ.",
        "A displacement is a length: it is above 0 also where nothing moved.",
        "The plane's early warning comes from the same reference models as the final state, that by difficulty from the target's own training.",
    ]
    if models < 64:
        lines.append(
            f"With {models} models a sample's rates are Gaussian estimates with one spread for all: single samples are uncertain."
        )
    if traces is None:
        lines.append("No difficulty: the target was not trained with --monitor dynamics.")
    return lines
