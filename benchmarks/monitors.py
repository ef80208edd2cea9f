"""What each monitor adds to a training when it looks after every epoch: (epoch + look) / epoch.

    python benchmarks/monitors.py              # ten minutes on one core
    python benchmarks/monitors.py --quick      # a smoke run

ResNet18 at 32 px on made images, batch 64, plain cross-entropy; monitors watch 2,000 samples (tokens: 200 batches of 8; batchnorm: 16
outliers, each left out of a batch of 32). Epoch and look are timed in turn in one training; medians over its epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.remove(
    str(Path(__file__).resolve().parent)
)  # the benchmarks beside this file would hide packages of the same names

import pptp
from pptp.data import Pool
from pptp.monitors.batchnorm import Influence
from pptp.monitors.curvature import Curvature
from pptp.monitors.dynamics import Recording
from pptp.monitors.tokens import Settings, Tokens
from pptp.runs import versions
from pptp.training import fit

GOAL = {"curvature": 1.25, "dynamics": 1.25}


def made(samples: int) -> Pool:
    rng = np.random.default_rng(0)
    pixels = torch.tensor(rng.integers(0, 255, (samples, 3, 32, 32)), dtype=torch.uint8)
    return Pool(pixels, np.arange(samples) % 20, (0.5,) * 3, (0.25,) * 3)


def watchers(data: Pool, most: int) -> dict:
    return {
        "curvature": Curvature(data, most=most),
        "curvature, all classes": Curvature(data, most=most, samples=0),
        "dynamics": Recording(data, most=most),
        "batchnorm": Influence(data),
        "tokens": Tokens(data, settings=Settings(batches=max(20, most // 10))),
    }


def overhead(monitor, data: Pool, epochs: int) -> tuple[float, float, float]:
    """(ratio, seconds of an epoch, seconds of a look)"""
    recipe = pptp.Recipe(epochs=epochs, batch_size=64, augment=False)
    history = fit(pptp.create("resnet18", 20, 32), data, recipe, monitors=[monitor])
    epoch, look = (statistics.median(row[key] for row in history.rows) for key in ("seconds", "monitor_seconds"))
    return 1 + look / epoch, epoch, look


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples, one epoch")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    for members in (200,) if quick else (5000, 10000):
        data = made(members)
        for name, monitor in watchers(data, 40 if quick else 2000).items():
            if members > 5000 and name not in GOAL:  # the slow ones once
                continue
            ratio, epoch, look = overhead(monitor, data, 1 if quick else 2)
            goal = f" (goal {GOAL[name]})" if name in GOAL else ""
            print(f"{members} members, {name}: {ratio:.2f}{goal}; epoch {epoch:.1f} s, look {look:.1f} s", flush=True)
    print(json.dumps(versions()))


if __name__ == "__main__":
    main()
