"""What a retraining costs over the same defense from scratch: time and memory, each pair measured in turn in one run on made images.

Accuracy and leakage need whole trainings, which share a machine with others and so have no time worth quoting. Here a few epochs of
each side are timed alternately, and what an epoch takes is multiplied by the epochs of the plan. What is done once, like running the
trunk for the cache, is shared by few epochs here and by more in the plan, so that ratios are rather too high than too low.
SELENA has no epoch that stands for the rest, since it trains sub-models, asks them for labels and trains a student: it is timed whole,
on fewer images, once.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import psutil
import torch

import pptp
from pptp.config import experiment
from pptp.data import Pool
from pptp.procedures import make_defense
from pptp.runs import measured, read_json, versions, write_json

from .claim import AUGMENTED, PLAIN, Results, Verdict
from .claim import GOAL as OUR_GOAL
from .compare import active, compared, gap_of, utility, with_models
from .work import HERE, Cell, epochs_of

PATH = HERE / "cost.json"
GOAL = 0.2
EPOCHS = 2  # RelaxLoss alternates between two kinds
MEMBERS = 256
SAME_DEFENSE = (
    ("relaxloss-2-layer3", "relaxloss-2-scratch"),  # at any alpha
    ("advreg-3-layer4", "advreg-3-scratch"),
    ("selena-layer4", "selena-scratch"),
    ("selena-10-layer2", "selena-10-scratch"),
    ("selena-10-t0.5-layer2", "selena-10-t0.5-scratch"),
    ("dpsgd-8-layer4", "dpsgd-8-scratch"),
)
SHORT = (  # a short retraining, and the RelaxLoss from scratch that it is to beat
    ("plain-6ep-layer2", "relaxloss-2-scratch"),
    ("relaxloss-1-6ep-layer3", "relaxloss-1-scratch"),
    ("selena-2-t0.5-layer2", "relaxloss-2.5-scratch"),
)
FEWER = {"selena": ["k=3", "l=1", "views=0", f"sub_epochs={EPOCHS}"]}  # sub-models and views, where memory is measured


def measure(rounds: int = 3) -> None:
    """Time and memory of every pair of the plan, kept in cost.json; what is there already is not measured again."""
    rows = load()
    for base in (AUGMENTED, PLAIN):
        cell = Cell(base, 42)
        for mine, theirs in (pair for pair in (*SAME_DEFENSE, *SHORT) if set(pair) <= set(cell.retrainings)):
            if named(base, mine, theirs) in rows:
                continue
            rows[named(base, mine, theirs)] = row = _pair(cell, mine, theirs, rounds)
            print(f"{base} {mine}: {row}", file=sys.stderr, flush=True)
            write_json(PATH, {"pairs": rows, "threads": torch.get_num_threads(), "versions": versions()})


def named(base: str, mine: str, theirs: str) -> str:
    return f"{base} {mine} / {theirs}"


def _pair(cell: Cell, mine: str, theirs: str, rounds: int) -> dict:
    ours, other = cell.retrainings[mine], cell.retrainings[theirs]
    whole = "selena" in (ours["defense"], other["defense"])
    time_of = whole_seconds if whole else seconds
    timed = [(time_of(cell, ours), time_of(cell, other)) for _ in range(1 if whole else rounds)]
    ratio = statistics.median(a / b for a, b in timed)
    epochs = passes(cell, ours), passes(cell, other)
    share = epochs[0] / epochs[1]
    return {
        "epochs": list(epochs),
        "time_of_an_epoch": ratio / share if whole else ratio,
        "time": ratio if whole else ratio * share,
        "memory": peak_mb(cell.base, mine) / peak_mb(cell.base, theirs),
    }


def passes(cell: Cell, row: Mapping) -> int:
    """Trainings on as many samples as there are members: epochs, and of SELENA those of its sub-models, each on all but l of k parts."""
    epochs = epochs_of(cell, row)
    if row["defense"] != "selena":
        return epochs
    defense = make_defense("selena", row["set"])
    return epochs + (defense.k - defense.l) * (defense.sub_epochs or epochs)


def seconds(cell: Cell, row: Mapping) -> float:
    """Of `EPOCHS` epochs of one retraining, with what it keeps of its frozen layers, as the command does it."""
    return _timed(cell, row, [*row.get("set", []), *FEWER.get(row["defense"], [])], EPOCHS)


def whole_seconds(cell: Cell, row: Mapping) -> float:
    """Of all of a retraining, as the plan has it."""
    return _timed(cell, row, row.get("set", []), epochs_of(cell, row))


def _timed(cell: Cell, row: Mapping, settings: list[str], epochs: int) -> float:
    made = experiment(cell.settings)
    classes, size = made.source.limit_classes, made.source.img_size
    splits = made_splits(classes, size)
    model = pptp.create(made.model, classes, size)
    parts = pptp.stages(model, (3, size, size))
    defense = make_defense(row["defense"], settings)
    recipe = replace(made.recipe, epochs=epochs, lr=0.001)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pptp.retrain(model, None, row["cut"], defense, splits, recipe, parts=parts)
    return time.perf_counter() - started


def made_splits(classes: int, size: int) -> pptp.Splits:
    rng = np.random.default_rng(0)
    pixels = torch.tensor(rng.integers(0, 255, (2 * MEMBERS, 3, size, size)), dtype=torch.uint8)
    pool = Pool(pixels, np.arange(2 * MEMBERS) % classes, (0.5,) * 3, (0.25,) * 3)
    return pptp.split(pool, MEMBERS, MEMBERS // 4, MEMBERS // 4, MEMBERS // 4)


def peak_mb(base: str, name: str) -> float:
    """Memory that training adds to a fresh process."""
    command = f"from benchmarks.claims.cost import print_peak; print_peak({base!r}, {name!r})"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=HERE.parent.parent
    )
    return float(done.stdout.splitlines()[-1])


def print_peak(base: str, name: str) -> None:
    cell = Cell(base, 42)
    before, cost = psutil.Process().memory_info().rss / 2**20, {}
    with measured(cost, every=0.005):
        seconds(cell, cell.retrainings[name])
    print(cost["peak_mb"] - before)


# --- what follows from it ------------------------------------------------------------------------


def load() -> dict[str, dict]:
    """pair -> what was measured."""
    return read_json(PATH, "")["pairs"] if PATH.exists() else {}


def verdicts(pairs: Mapping[str, Mapping], results: Results) -> list[Verdict]:
    short = {named(AUGMENTED, *pair) for pair in SHORT}
    same = {name: row for name, row in pairs.items() if name not in short}
    about_all = [judge(same) for judge in (_faster, _smaller, _goal)] if same else []
    return about_all + [v for pair in SHORT if (v := _beaten_for_less(pair, pairs, results))]


def _beaten_for_less(pair: tuple[str, str], pairs: Mapping[str, Mapping], results: Results) -> Verdict | None:
    """A short retraining of the augmented base against RelaxLoss from scratch: accuracy and leakage over the seeds that have both, time as measured."""
    mine, theirs = pair
    seeds, row = with_models(results, AUGMENTED, pair), pairs.get(named(AUGMENTED, mine, theirs))
    if not seeds or not row:
        return None
    claim = f"{mine} beats {theirs} in at most {GOAL} of its time"
    acted = active(seeds, mine)
    ours = f"{AUGMENTED}: {utility(seeds, mine)}{f', its defense active in {acted} of steps' if acted else ''}; {utility(seeds, theirs)}; time {row['time']:.2f}, the base left out"
    better = compared(gap_of(results, [(m[mine], m[theirs]) for m in seeds.values()]))
    agrees = better if row["time"] <= GOAL else f"no: it takes {row['time']:.2f}"
    return Verdict(claim, OUR_GOAL, ours, agrees)


def _listed(pairs: Mapping[str, Mapping], what: str) -> str:
    return ", ".join(f"{name} {row[what]:.2f}" for name, row in pairs.items())


def _counted(pairs: Mapping[str, Mapping], what: str, most: float) -> str:
    below = sum(row[what] < most for row in pairs.values())
    return "yes" if below == len(pairs) else f"in {below} of {len(pairs)}"


def _faster(pairs: Mapping[str, Mapping]) -> Verdict:
    claim = "retraining takes less than half the time of the same defense from scratch, at the epochs of our plan"
    ours = f"{_listed(pairs, 'time')}; the base is in none of these times"
    return Verdict(claim, "Figure 16, section 5.2.3", ours, _counted(pairs, "time", 0.5))


def _smaller(pairs: Mapping[str, Mapping]) -> Verdict:
    claim = "retraining needs less memory than the same defense from scratch"
    return Verdict(claim, "Figure 16", _listed(pairs, "memory"), _counted(pairs, "memory", 1.0))


def _goal(pairs: Mapping[str, Mapping]) -> Verdict:
    missed = {name: row for name, row in pairs.items() if row["time"] > GOAL}
    claim = f"retraining takes at most {GOAL} of the time of the same defense from scratch"
    ours = f"above it: {_listed(missed, 'time') or 'none'}; the base is in none of these times"
    met = "met" if not missed else f"met in {len(pairs) - len(missed)} of {len(pairs)}"
    return Verdict(claim, OUR_GOAL, ours, met)
