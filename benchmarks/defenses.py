"""Cost of each defense under PPTP over the same defense from scratch, and of DP-SGD over plain SGD.

    python benchmarks/defenses.py --data digits     # or a folder or .tar of images; half an hour on one core
    python benchmarks/defenses.py --quick           # a smoke run

ResNet18, batch 64, without augmentation and without the trunk cache (see retrain.py for that). Per epoch: made images at 64 px, one epoch of each, the two cuts taken alternately,
median of the rounds. Per converged run: images of `--data` at 64 px and a constant learning rate; a run has converged in the
first epoch whose held-out accuracy is within one point of the best of all its epochs. Memory is the peak of a fresh process
above what it held before training. Everything in one run, as ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

sys.path.remove(str(Path(__file__).resolve().parent))  # this file would hide the package of the same name

import pptp
from defenses import DEFENSES
from pptp.cache import Policy, TrunkCache
from pptp.config import Source
from pptp.data import Pool
from pptp.runs import measured, versions
from pptp.sources import load
from pptp.training import Monitor

CUT = "layer4"
SIZE = 64
SETTINGS = {
    "selena": {"k": 3, "l": 1},
    "advreg": {"warmup": 0},
    "early_stopping": {"share": 0.9},
    "dpsgd": {"noise_multiplier": 1.0},
}
VARIANTS = {
    **{name: (name, SETTINGS.get(name, {})) for name in DEFENSES},
    "dpsgd ghost": ("dpsgd", {"noise_multiplier": 1.0, "clipping": "ghost"}),
}


def made(samples: int) -> pptp.Splits:
    rng = np.random.default_rng(0)
    pixels = torch.tensor(rng.integers(0, 255, (2 * samples, 3, SIZE, SIZE)), dtype=torch.uint8)
    pool = Pool(pixels, np.arange(2 * samples) % 20, (0.5,) * 3, (0.25,) * 3)
    return pptp.split(pool, samples, samples // 4, samples // 4, samples // 4)


def run_once(variant: str, cut: str, splits: pptp.Splits) -> float:
    """Seconds of one retraining: an epoch (relaxloss: the second of two, since they alternate)."""
    name, settings = VARIANTS[variant]
    model = pptp.create("resnet18", 20, SIZE)
    recipe = pptp.Recipe(epochs=2 if name == "relaxloss" else 1, batch_size=64, lr=0.01, augment=False)
    parts = pptp.stages(model, (3, SIZE, SIZE))
    defense = DEFENSES[name](**settings)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        pptp.retrain(model, None, cut, defense, splits, recipe, parts=parts, cache=TrunkCache(Policy("none")))
    return (time.perf_counter() - started) / recipe.epochs


def peak_mb(variant: str, cut: str, samples: int) -> float:
    """Memory that a fresh process adds while it trains."""
    command = [sys.executable, __file__, "--memory-of", variant, "--cut", cut, "--samples", str(samples)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def memory_job(variant: str, cut: str, samples: int) -> None:
    splits = made(samples)
    before = psutil.Process().memory_info().rss / 2**20
    cost: dict[str, float] = {}
    with measured(cost, every=0.005):
        run_once(variant, cut, splits)
    print(cost["peak_mb"] - before)


class HeldOutAccuracy(Monitor):
    """After every epoch, and the training seconds up to it."""

    def __init__(self, data):
        self.data, self.rows, self.started, self.own = data, [], time.perf_counter(), 0.0

    def after_epoch(self, model, epoch):
        now = time.perf_counter()
        said = pptp.collect(model, self.data)
        self.own += time.perf_counter() - now
        self.rows.append((now - self.started - self.own, float((said.logits.argmax(1) == said.labels).float().mean())))
        return {}

    def converged(self) -> dict:
        best = max(accuracy for _, accuracy in self.rows)
        epoch = next(i for i, (_, accuracy) in enumerate(self.rows) if accuracy >= best - 0.01)
        return {"epochs": epoch + 1, "seconds": self.rows[epoch][0], "accuracy": best}


def converged(data: str, epochs: int, per_class: int) -> list[dict]:
    """Plain and RelaxLoss, from scratch and from the cut on; the base is the plain model from scratch."""
    source = Source(data=data, img_size=SIZE, limit_classes=10, limit_per_class=per_class)
    pool = load(source)[0]
    splits = pptp.split(pool, 0.6, 0.1, 0.1, 0.2)
    recipe = pptp.Recipe(epochs=epochs, batch_size=64, lr=0.02, sched="constant", augment=False)
    base = pptp.create("resnet18", splits.classes, SIZE)
    initial, rows = pptp.snapshot(base), []
    for name, settings in (("plain", {}), ("relaxloss", {"alpha": 0.5})):
        found = {}
        for cut in ("scratch", CUT):
            model = pptp.create("resnet18", splits.classes, SIZE)
            model.load_state_dict(base.state_dict())
            watch = HeldOutAccuracy(splits.test)
            with contextlib.redirect_stdout(io.StringIO()):
                made_of = DEFENSES[name](**settings)
                uncached = TrunkCache(Policy("none"))
                pptp.retrain(model, initial, cut, made_of, splits, replace(recipe), [watch], cache=uncached)
            found[cut] = watch.converged()
            if name == "plain" and cut == "scratch":
                base = model
        ratio = found[CUT]["seconds"] / found["scratch"]["seconds"]
        rows.append({"defense": name, "time": ratio, "pptp": found[CUT], "scratch": found["scratch"]})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", default="digits", help="images for the converged runs")
    for hidden in ("--memory-of", "--cut", "--samples"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.memory_of:
        return memory_job(given.memory_of, given.cut, int(given.samples))
    samples, rounds = (128, 1) if given.quick else (256, 3)
    splits = made(samples)
    run_once("plain", "scratch", splits)  # warm up
    rows, step = [], {}
    for variant in VARIANTS:
        pairs = [(run_once(variant, CUT, splits), run_once(variant, "scratch", splits)) for _ in range(rounds)]
        step[variant] = {
            "suffix": statistics.median(a for a, _ in pairs),
            "scratch": statistics.median(b for _, b in pairs),
        }
        row = {
            "defense": variant,
            "time": statistics.median(a / b for a, b in pairs),
            "memory": peak_mb(variant, CUT, samples) / peak_mb(variant, "scratch", samples),
        }
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    over_plain = {
        f"{variant}, {where}": step[variant][where] / step["plain"][where]
        for variant in ("dpsgd", "dpsgd ghost")
        for where in ("suffix", "scratch")
    }
    print(
        json.dumps(
            {
                "pptp_over_scratch": rows,
                "converged_run": converged(given.data, 2, 20) if given.quick else converged(given.data, 24, 300),
                "dpsgd_over_plain": over_plain,
                "threads": torch.get_num_threads(),
                "versions": versions(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
