"""Speed and memory of the attack suite against the textbook loops, everything in one run.

    python benchmarks/attacks.py            # a few minutes on 2 cores
    python benchmarks/attacks.py --quick    # a smoke run

Suite: every score-based attack, cross-fitted, with all intervals, on 50,000 + 50,000 samples x 200 classes; its time is given
over one float64 log-softmax of the logits, its memory over the size of the logits. Threshold and RMIA: 20,000 samples against the
loop that compares each threshold (each query) with all samples, numbers compared. Gradients: norms of 256 samples' gradients of
a ResNet18 at 32 px against one backward pass a sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F

sys.path.remove(str(Path(__file__).resolve().parent))  # this file would hide the package of the same name

import pptp
from attacks import ATTACKS
from attacks.rmia import rmia_offline
from pptp.evaluate import applicable, best_threshold, run_attacks
from pptp.gradients import squared_norms
from pptp.runs import measured, versions
from pptp.signals import Known, log_true


def seconds(work, rounds: int = 3) -> tuple[float, object]:
    """Median time, and what came out."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        out = work()
        times.append(time.perf_counter() - started)
    return statistics.median(times), out


def suite(half: int, classes: int) -> dict:
    g = torch.Generator().manual_seed(0)
    signals = pptp.Signals(
        torch.randn(2 * half, classes, generator=g), torch.randint(0, classes, (2 * half,), generator=g)
    )
    members = np.arange(2 * half) < half
    one_pass, _ = seconds(lambda: signals.logits.double().log_softmax(1))
    usable, _ = applicable(ATTACKS, signals, members)
    before, cost, each = psutil.Process().memory_info().rss, {}, {}
    with measured(cost, every=0.01):
        for name, attack in usable.items():
            started = time.perf_counter()
            for scores in run_attacks({name: attack}, signals, members).values():
                scores.to_dict()
            each[name] = (time.perf_counter() - started) / one_pass
    size = signals.logits.numel() * 4
    return {
        "samples": 2 * half,
        "classes": classes,
        "seconds": cost["seconds"],
        "time_over_one_log_softmax": cost["seconds"] / one_pass,
        "each_over_one_log_softmax": each,
        "memory_over_logits": (cost["peak_mb"] * 2**20 - before) / size,
    }


def threshold(n: int) -> dict:
    rng = np.random.default_rng(0)
    members = np.arange(n) % 2 == 0
    scores = rng.normal(size=n) + 0.3 * members

    def loop() -> float:
        return max((scores[members] >= t).mean() - (scores[~members] >= t).mean() for t in scores)

    ours, (_, found) = seconds(lambda: best_threshold(scores, members))
    naive, expected = seconds(loop, 1)
    return {"speedup": naive / ours, "difference": abs(found - expected)}


def rmia(n: int, models: int = 4, classes: int = 10) -> dict:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (n,), generator=g)
    logits, references = torch.randn(n, classes, generator=g), torch.randn(models, n, classes, generator=g)
    signals = pptp.Signals(logits, labels, references, torch.rand(models, n, generator=g) < 0.5)
    some_out = torch.nonzero((~signals.reference_members).any(0)).flatten()
    signals = signals[some_out]
    half = len(signals) // 2
    known = Known(signals[torch.arange(half)], torch.zeros(half, dtype=torch.bool))
    query = signals[torch.arange(half, len(signals))]

    def ratio(s: pptp.Signals) -> np.ndarray:
        p = log_true(s.reference_logits, s.labels).exp()
        out = (p * ~s.reference_members).sum(0) / (~s.reference_members).sum(0)
        return (log_true(s.logits, s.labels).exp() / ((1.3 * out + 0.7) / 2)).numpy()

    z, x = ratio(known.signals), ratio(query)

    def loop() -> np.ndarray:
        return np.array([(one / z >= 2.0).mean() for one in x])

    def ranking() -> np.ndarray:
        ordered = torch.from_numpy(np.log(z)).sort().values
        at = torch.searchsorted(ordered, torch.from_numpy(np.log(x)) - np.log(2.0), right=True)
        return at.numpy() / len(z)

    softmax, _ = seconds(lambda: (ratio(known.signals), ratio(query)))
    ours, found = seconds(lambda: rmia_offline(known, query).numpy())
    ranked, _ = seconds(ranking)
    naive, expected = seconds(loop, 1)
    return {
        "whole_attack_speedup": (softmax + naive) / ours,  # both read the reference outputs, which takes most of ours
        "ranking_speedup": naive / ranked,
        "difference": float(np.abs(found - expected).max()),
    }


def gradients(samples: int, chunk: int = 64) -> dict:
    model = pptp.create("resnet18", 20, 32).eval()
    x, y = torch.randn(samples, 3, 32, 32), torch.randint(0, 20, (samples,))

    def ours() -> torch.Tensor:
        parts = [squared_norms(model, a, b)[1] for a, b in zip(x.split(chunk), y.split(chunk))]
        return torch.cat([torch.stack(list(part.values())).sum(0) for part in parts]).sqrt()

    def one_by_one() -> torch.Tensor:
        found = []
        for i in range(samples):
            model.zero_grad()
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            found.append(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt())
        return torch.stack(found)

    fast, found = seconds(ours)
    slow, expected = seconds(one_by_one, 1)
    return {"speedup": slow / fast, "relative_difference": float((found / expected - 1).abs().max()), "chunk": chunk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    found = {
        "suite": suite(500, 20) if quick else suite(50_000, 200),
        "threshold": threshold(2000 if quick else 20_000),
        "rmia": rmia(2000 if quick else 40_000),
        "gradients": gradients(16 if quick else 256),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
