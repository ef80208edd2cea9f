"""Evaluations in a run directory: written with everything needed to read them back, compared on the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .arrays import read_npz
from .errors import UserError
from .evaluate import Evaluation, MembershipScores, leak_difference
from .exposure import most_exposed, per_class, per_slice
from .intervals import Estimate
from .runs import UNDEFENDED, Run, read_json, write_json, write_npz


def save_evaluation(
    run: Run, name: str, found: Evaluation, ids: np.ndarray, members: np.ndarray, more: Mapping
) -> dict:
    """evaluation.json and scores.npz; ids: sample ids of the attacked samples, members: (n,) bool."""
    folder = run.path / "evaluate" / name
    arrays = {"ids": ids}
    for attack, scores in found.attacks.items():
        arrays |= {f"score/{attack}": scores.scores, f"rows/{attack}": scores.rows}
    labels = run.splits.pool.labels[ids]
    (folder / "evaluation.json").unlink(missing_ok=True)  # of other scores: a kill in between must not leave the two together
    write_npz(folder / "scores.npz", {**arrays, "members": members, "labels": labels})
    value = {**found.to_dict(), **more}
    write_json(folder / "evaluation.json", value)
    return value


def load_evaluation(run: Run, name: str) -> Evaluation:
    """As it was saved."""
    folder = run.path / "evaluate" / name
    value = read_json(folder / "evaluation.json", f"pptp evaluate {run.path}")
    saved = read_npz(folder / "scores.npz", f"scores: run pptp evaluate {run.path} --fresh")
    members, labels = saved["members"], saved["labels"]
    rows = {attack: saved[f"rows/{attack}"] for attack in value["attacks"]}
    attacks = {
        attack: MembershipScores(saved[f"score/{attack}"], members[at], labels[at], rows=at)
        for attack, at in rows.items()
    }
    accuracies = (Estimate(**value[which]) for which in ("train_accuracy", "test_accuracy"))
    return Evaluation(*accuracies, attacks, value["skipped"], value["references"])


def exposure(found: Evaluation, ids: np.ndarray, slices: Mapping[str, np.ndarray], k: int = 20) -> dict:
    """Who is exposed, by the strongest attack."""
    name, _ = found.strongest
    scores = found.attacks[name].turned
    return {
        "attack": name,
        "classes": per_class(scores),
        "slices": per_slice(scores, ids, slices) if slices else [],
        **most_exposed(scores, ids, k),
    }


def against(evaluations: Mapping[str, Evaluation], base: str = UNDEFENDED) -> dict[str, Estimate]:
    """How much more each model leaks than `base`: difference of the strongest attacks' |AUC - 1/2|, paired by sample."""
    if base not in evaluations:
        return {}
    return {name: leak_difference(found, evaluations[base]) for name, found in evaluations.items() if name != base}


def in_words(difference: Estimate) -> str:
    """What a paired difference in leakage says."""
    if difference.high < 0:
        what = "it leaks less"
    elif difference.low > 0:
        what = "it leaks more"
    else:
        return f"no clear difference in leakage ({difference}, paired)"
    return f"{what}: AUC {difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}], paired"


def read_slices(path: str | Path) -> dict[str, np.ndarray]:
    """Named groups of sample ids from an .npz file."""
    found = read_npz(path, "named arrays of sample ids")
    for name, ids in found.items():
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise UserError(f"slice {name} of {path} is {ids.dtype} of shape {ids.shape}: it must be a list of sample ids")
    return {name: ids.astype(np.int64) for name, ids in found.items()}
