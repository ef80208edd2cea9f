"""Cost of each defense under PPTP over the same defense from scratch, and of DP-SGD over plain SGD.

    python benchmarks/defenses.py            # about 15 minutes on 2 cores
    python benchmarks/defenses.py --quick    # a smoke run

ResNet18 at 32 px on made images, batch 64, without augmentation; one epoch of each, the two cuts taken alternately, median
of the rounds. Memory is the peak of a fresh process above what it held before training. Everything in one run, as ratios.
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
from pathlib import Path

import numpy as np
import psutil
import torch

sys.path.remove(str(Path(__file__).resolve().parent))  # this file would hide the package of the same name

import pptp
from defenses import DEFENSES
from pptp.data import Pool
from pptp.runs import measured, versions

CUT = "layer4"
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
    pixels = torch.tensor(rng.integers(0, 255, (2 * samples, 3, 32, 32)), dtype=torch.uint8)
    pool = Pool(pixels, np.arange(2 * samples) % 20, (0.5,) * 3, (0.25,) * 3)
    return pptp.split(pool, samples, samples // 4, samples // 4, samples // 4)


def run_once(variant: str, cut: str, splits: pptp.Splits) -> float:
    """Seconds of one retraining: an epoch (relaxloss: the second of two, since they alternate)."""
    name, settings = VARIANTS[variant]
    model = pptp.create("resnet18", 20, 32)
    recipe = pptp.Recipe(epochs=2 if name == "relaxloss" else 1, batch_size=64, lr=0.01, augment=False)
    parts = pptp.stages(model, (3, 32, 32))
    defense = DEFENSES[name](**settings)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        pptp.retrain(model, None, cut, defense, splits, recipe, parts=parts)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
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
                "dpsgd_over_plain": over_plain,
                "threads": torch.get_num_threads(),
                "versions": versions(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
