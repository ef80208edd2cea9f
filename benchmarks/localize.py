"""Cost of localisation over the two plain forward passes it needs, and its peak memory at n and 4n samples.

    python benchmarks/localize.py            # about 3 minutes on 2 cores
    python benchmarks/localize.py --quick    # a smoke run

Everything is measured in one run and reported as ratios. Time: the median over rounds of (localize without
probes) / (forward of both models over the same samples), the two taken alternately. Memory: the peak resident
size of a fresh process that localizes n samples, and of one that localizes 4n; samples are made when read, so
that the data set itself takes none.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import pptp
from pptp.runs import measured, versions

CASES = (("resnet18", 32), ("resnet18", 64), ("test_vit", 64), ("convnext_atto", 64))


class Made(Dataset):
    """Images that exist only while they are read."""

    def __init__(self, length: int, size: int):
        self.length, self.size, self.labels = length, size, torch.zeros(length, dtype=torch.long).numpy()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if index >= self.length:
            raise IndexError(index)
        return torch.full((3, self.size, self.size), index / self.length), 0, index


def pair(name: str, size: int):
    full = pptp.create(name, 10, size).eval()
    half = copy.deepcopy(full)
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return full, half


@torch.no_grad()
def plain_forward(full, half, data, batch_size: int) -> None:
    for inputs, _, _ in DataLoader(data, batch_size=batch_size):
        full(inputs), half(inputs)


def seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def time_ratio(name: str, size: int, samples: int, rounds: int, batch_size: int = 128) -> dict:
    full, half = pair(name, size)
    parts = pptp.stages(full, (3, size, size))  # found once per model, not once per data set
    first, second = Made(samples, size), Made(samples, size)

    def localize() -> None:
        pptp.localize(full, half, first, second, probes=False, parts=parts, batch_size=batch_size)

    def plain() -> None:
        plain_forward(full, half, first, batch_size), plain_forward(full, half, second, batch_size)

    localize(), plain()  # warm up
    pairs = [(seconds(localize), seconds(plain)) for _ in range(rounds)]
    ratios = [a / b for a, b in pairs]
    return {
        "model": name,
        "px": size,
        "samples": 2 * samples,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def peak_mb(samples: int) -> float:
    """Peak resident memory of a fresh process that localizes 2 * samples images."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory-of", str(samples)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.strip().splitlines()[-1])


def memory_job(samples: int) -> None:
    full, half = pair("resnet18", 32)
    cost: dict[str, float] = {}
    with measured(cost, every=0.005):  # not ru_maxrss: a child inherits its parent's
        pptp.localize(full, half, Made(samples, 32), Made(samples, 32), probes=False, batch_size=128)
    print(cost["peak_mb"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--memory-of", type=int, default=0, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    torch.manual_seed(0)
    if given.memory_of:
        return memory_job(given.memory_of)
    n = 256 if given.quick else 1000
    once, four = peak_mb(n), peak_mb(4 * n)
    samples, rounds = (128, 1) if given.quick else (512, 5)
    times = [time_ratio(name, size, samples, rounds) for name, size in (CASES[:1] if given.quick else CASES)]
    memory = {"n": 2 * n, "peak_mb_n": once, "peak_mb_4n": four, "ratio": four / once}
    print(
        json.dumps(
            {"time": times, "memory": memory, "threads": torch.get_num_threads(), "versions": versions()}, indent=1
        )
    )


if __name__ == "__main__":
    main()
