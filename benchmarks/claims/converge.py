"""How many epochs a retraining takes to converge, and the same defense from scratch.

Both get the epochs of the base, at a constant learning rate, so that no schedule decides it. A training has converged in the first
epoch whose accuracy on the test images is within a point of the best of all its epochs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pptp
from pptp.procedures import make_defense
from pptp.runs import UNDEFENDED, Run, read_json, versions, write_json
from pptp.stages import SCRATCH
from pptp.training import Monitor

from .claim import AUGMENTED, Verdict
from .work import HERE, Cell, trained

PATH = HERE / "converge.json"
CUT = "layer3"
DEFENSES = {"plain": [], "relaxloss": ["alpha=2.0"], "advreg": ["alpha=1.0"]}
LR = 0.02
WITHIN = 0.01
LESS_THAN = 0.5  # of the epochs, as the paper has it


class OnTestImages(Monitor):
    """After every epoch."""

    def __init__(self, images):
        self.images, self.found = images, []

    def after_epoch(self, model, epoch):
        said = pptp.collect(model, self.images)
        self.found.append(float((said.logits.argmax(1) == said.labels).float().mean()))
        return {}


def measure(data: str, runs: Path, seed: int) -> None:
    """What is not in converge.json yet."""
    run = trained(Cell(AUGMENTED, seed), data, runs)
    for defense in DEFENSES:
        for cut in (CUT, SCRATCH):
            rows = load()
            if cut in rows.get(defense, {}):
                continue
            rows.setdefault(defense, {})[cut] = watched(run, defense, cut)
            print(f"{defense} {cut}: {rows[defense][cut]}", file=sys.stderr, flush=True)
            write_json(PATH, {"trainings": rows, "base": AUGMENTED, "seed": seed, "lr": LR, "versions": versions()})


def watched(run: Run, defense: str, cut: str) -> dict:
    """One training, with its accuracy after every epoch."""
    model, images = run.model(UNDEFENDED), OnTestImages(run.splits.test)
    recipe = replace(run.experiment.recipe, lr=LR, sched="constant")
    made = make_defense(defense, DEFENSES[defense])
    result = pptp.retrain(model, run.initial_weights(), cut, made, run.splits, recipe, [images], parts=run.parts(model))
    return {"seconds": result["seconds"], "accuracy": images.found}


def load() -> dict[str, dict]:
    """defense -> cut -> its training."""
    return read_json(PATH, "")["trainings"] if PATH.exists() else {}


def converged(accuracy: Sequence[float]) -> int:
    """The first epoch, from 1, within a point of the best."""
    return next(i for i, value in enumerate(accuracy, 1) if value >= max(accuracy) - WITHIN)


def compared(trainings: Mapping[str, Mapping]) -> list[dict]:
    """Of the defenses that are there with both cuts: epochs until converged, and best accuracies. What an epoch takes is measured by `cost`."""
    rows = []
    for defense, cuts in trainings.items():
        if set(cuts) >= {CUT, SCRATCH}:
            mine, theirs = (cuts[cut] for cut in (CUT, SCRATCH))
            epochs = [converged(t["accuracy"]) for t in (mine, theirs)]
            best = [max(t["accuracy"]) for t in (mine, theirs)]
            rows.append({"defense": defense, "epochs": epochs, "best": best})
    return rows


def verdicts(trainings: Mapping[str, Mapping]) -> list[Verdict]:
    rows = compared(trainings)
    if not rows:
        return []
    fewer = sum(mine < LESS_THAN * theirs for mine, theirs in (row["epochs"] for row in rows))
    ours = ", ".join(f"{r['defense']} {r['epochs'][0]} from {CUT} on, {r['epochs'][1]} from scratch" for r in rows)
    agrees = "yes" if fewer == len(rows) else f"in {fewer} of {len(rows)}"
    claim = "retraining converges in less than half of the epochs of the same defense from scratch"
    return [Verdict(claim, "section 5.2.3", f"epochs: {ours} (1 seed)", agrees)]
