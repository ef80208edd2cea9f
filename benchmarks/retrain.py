"""What a retraining step costs: whole model, frozen trunk, cached trunk, and the suffix alone on ready tensors.

    python benchmarks/retrain.py            # about 15 minutes on 2 cores
    python benchmarks/retrain.py --quick    # a smoke run

Made images, batch 64, SGD, no augmentation; seconds a step, each kind in turn, median of the rounds. `limit` is the last layers cut out
by hand and run on ready tensors in a bare loop: no data loader, no hooks, no cache. Memory is the peak of a fresh process above
what it held before training. The frontier is timed against one training from scratch with the same defense, at the same number
of epochs a point and at a tenth of it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

sys.path.remove(str(Path(__file__).resolve().parent))

import pptp
from defenses import DEFENSES
from pptp.attacking import frontier_run
from pptp.cache import Policy, TrunkCache
from pptp.commands import train_run
from pptp.config import experiment
from pptp.data import Pool
from pptp.runs import Run, measured, versions
from pptp.suffix import Suffix, run_until
from pptp.training import fit

BATCH = 64
CASES = {  # model, image size, cut, and the layers from there on, by hand
    "resnet18": (64, "layer4", lambda m: nn.Sequential(m.layer4, m.global_pool, m.fc)),
    "vit_tiny_patch16_224": (
        96,
        "blocks.9",
        lambda m: nn.Sequential(*m.blocks[9:], m.norm, First(), m.fc_norm, m.head),
    ),
    "convnext_atto": (64, "stages.3", lambda m: nn.Sequential(m.stages[3], m.norm_pre, m.head)),
}


class First(nn.Module):
    """The class token."""

    def forward(self, x):
        return x[:, 0]


def made(samples: int, size: int) -> pptp.Splits:
    rng = np.random.default_rng(0)
    pixels = torch.tensor(rng.integers(0, 255, (samples + 60, 3, size, size)), dtype=torch.uint8)
    pool = Pool(pixels, np.arange(samples + 60) % 20, (0.5,) * 3, (0.25,) * 3)
    return pptp.split(pool, samples, 0, 40, 20)


def retrained(name: str, cut: str, kind: str, splits: pptp.Splits, cache: TrunkCache | None = None) -> float:
    """Seconds a step of one epoch under plain cross-entropy; the cache, if there is one, is filled before."""
    size = CASES[name][0]
    model = pptp.create(name, 20, size)
    parts = pptp.stages(model, (3, size, size))
    recipe = pptp.Recipe(epochs=1, batch_size=BATCH, lr=0.01, augment=False)
    cache = cache or TrunkCache(Policy(kind))
    with contextlib.redirect_stdout(io.StringIO()):
        if kind != "none":
            cache.prepare(model, parts, cut, splits.for_defense(), augment=False)
        result = pptp.retrain(model, None, cut, DEFENSES["plain"](), splits, recipe, parts=parts, cache=cache)
    return result["seconds"] / (len(splits.members) // BATCH)


def limit(name: str, splits: pptp.Splits) -> tuple[float, float]:
    """Seconds a step of (the last layers alone on ready tensors, a forward pass of the trunk)."""
    size, cut, by_hand = CASES[name]
    model = pptp.create(name, 20, size)
    parts = pptp.stages(model, (3, size, size))
    suffix = Suffix(model, parts, cut, (3, size, size))
    x = torch.stack([splits.members[i][0] for i in range(BATCH)])
    y = torch.as_tensor(splits.members.labels[:BATCH])
    started = time.perf_counter()
    steps = len(splits.members) // BATCH
    for _ in range(steps):
        ready = run_until(model.eval(), suffix.plan.boundary, x)
    forward = (time.perf_counter() - started) / steps
    last = by_hand(model).train()
    with torch.no_grad():
        agrees = torch.allclose(last.eval()(ready), model.eval()(x), atol=1e-4)
    assert agrees, "the layers cut out by hand are not the suffix"
    last.train()
    optimizer = torch.optim.SGD(last.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)
    started = time.perf_counter()
    for _ in range(steps):
        F.cross_entropy(last(ready.clone()), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - started) / steps, forward


def steps(name: str, samples: int, rounds: int) -> dict:
    size, cut, _ = CASES[name]
    splits = made(samples, size)
    rows: dict[str, list[float]] = {"whole": [], "frozen": [], "cached": [], "limit": [], "trunk": []}
    retrained(name, cut, "none", splits)  # warm up
    for _ in range(rounds):
        rows["whole"].append(retrained(name, "scratch", "none", splits))
        rows["frozen"].append(retrained(name, cut, "none", splits))
        rows["cached"].append(retrained(name, cut, "memory", splits))
        suffix, trunk = limit(name, splits)
        rows["limit"].append(suffix)
        rows["trunk"].append(trunk)
    median = {kind: statistics.median(values) for kind, values in rows.items()}
    return {
        "model": name,
        "seconds": median,
        "cached_over_limit": median["cached"] / median["limit"],
        "frozen_over_trunk_plus_limit": median["frozen"] / (median["trunk"] + median["limit"]),
        "cached_over_whole": median["cached"] / median["whole"],
        "frozen_over_whole": median["frozen"] / median["whole"],
        "limit_over_whole": median["limit"] / median["whole"],
    }


def options(name: str, samples: int, rounds: int) -> dict:
    """Seconds an epoch of the whole model under each option over those without, once compiled; kinds in turn, median of the rounds."""
    size = CASES[name][0]
    splits = made(samples, size)
    kinds = {"plain": {}, "channels_last": {"channels_last": True}, "compiled": {"compile": "inductor"}}
    kinds["both"] = kinds["channels_last"] | kinds["compiled"]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, change in kinds.items():
            recipe = pptp.Recipe(epochs=3, batch_size=BATCH, lr=0.01, augment=False, **change)
            rows = fit(pptp.create(name, 20, size), splits.members, recipe).rows
            seconds[kind].append(min(row["seconds"] for row in rows[1:]))
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {"model": name, **{f"{kind}_over_plain": median[kind] / median["plain"] for kind in kinds}}


def memory_job(name: str, kind: str, samples: int) -> None:
    size, cut, _ = CASES[name]
    splits = made(samples, size)
    before = psutil.Process().memory_info().rss / 2**20
    cost: dict[str, float] = {}
    with measured(cost, every=0.005):
        limit(name, splits) if kind == "limit" else retrained(
            name, "scratch" if kind == "whole" else cut, "none" if kind == "whole" else kind, splits
        )
    print(cost["peak_mb"] - before)


def memory(name: str, samples: int) -> dict:
    def peak(kind: str) -> float:
        command = [sys.executable, __file__, "--memory-of", name, "--kind", kind, "--samples", str(samples)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])

    found = {kind: peak(kind) for kind in ("whole", "memory", "limit")}
    return {
        "cached_over_limit": found["memory"] / found["limit"],
        "cached_over_whole": found["memory"] / found["whole"],
        "mb": found,
    }


def frontier(epochs: int, members: int) -> dict:
    """Ten points from the shared cache, evaluation included, against one training from scratch."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        settings = {
            "model": "resnet18",
            "data": "digits",
            "img_size": 64,
            "members": members,
            "reference": 20,
            "nonmembers": 200,
        }
        settings |= {"test": 200, "epochs": 1, "batch_size": BATCH, "augment": False, "lr": 0.02}
        train_run(folder, experiment(settings))
        run = Run.open(folder)
        recipe = pptp.Recipe(epochs=epochs, batch_size=BATCH, augment=False, lr=0.02)
        started = time.perf_counter()
        model = run.model("undefended")
        defense = DEFENSES["relaxloss"](alpha=0.5)
        pptp.retrain(model, run.initial_weights(), "scratch", defense, run.splits, recipe, parts=run.parts(model))
        scratch = time.perf_counter() - started
        alphas, found = [f"{0.1 * k:.1f}" for k in range(1, 11)], {}
        for kind, each in (("same epochs", epochs), ("a tenth", max(2, epochs // 10))):
            started = time.perf_counter()
            changes = {"epochs": each, "augment": False}
            frontier_run(folder, "relaxloss", {"alpha": alphas}, ["layer4"], changes)
            found[kind] = (time.perf_counter() - started) / scratch
    return {"ten_points_over_one_from_scratch": found, "epochs": epochs, "members": members}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=("steps", "frontier", "options"), help="one part only (all)")
    parser.add_argument("--model", choices=CASES, help="steps of this model only (all)")
    for hidden in ("--memory-of", "--kind", "--samples"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.memory_of:
        return memory_job(given.memory_of, given.kind, int(given.samples))
    samples, rounds = (128, 1) if given.quick else (512, 5)
    asked = [given.part] if given.part else ["steps", "frontier", "options"]
    rows, chosen = {"steps": [], "options": []}, [given.model] if given.model else list(CASES)
    for kind, name in [(kind, name) for kind in rows if kind in asked for name in chosen]:
        measures = {"steps": lambda: {**steps(name, samples, rounds), "memory": memory(name, samples)}}  # noqa: B023
        measures["options"] = lambda: options(name, samples, min(rounds, 3))  # noqa: B023
        rows[kind].append(measures[kind]())
        print(json.dumps(rows[kind][-1]), file=sys.stderr, flush=True)
    found = {
        **rows,
        "frontier": None if "frontier" not in asked else frontier(2, 64) if given.quick else frontier(20, 256),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
