"""Linear SVM probes per stage: what generalises (the paper's), and what members get extra (stricter)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import Part, batches, indexed
from .intervals import Estimate, proportion, rate_difference
from .stages import Stage, bare, watch


@dataclass(frozen=True)
class Probe:
    """What linear probes read from one stage."""

    accuracy: Estimate  # on held-out samples, fitted on members' features of M_all
    gain: Estimate | None  # over the stage before, on the same samples; None for the first stage
    member_gap: Estimate  # accuracy on seen minus held-out samples, fitted on *unseen* samples' features of M_h1


def probe(
    full: nn.Module,
    half: nn.Module,
    parts: Sequence[Stage],
    seen: Dataset,
    unseen: Dataset,
    held_out: Dataset,
    most: int = 2000,
    batch_size: int = 128,
    workers: int = 0,
    seed: int = 0,
) -> dict[str, Probe]:
    """Probe every part, with at most `most` samples of each kind, so that memory stays bounded.

    The member gap needs no member to be fitted on: a probe that has seen neither kind reads seen samples
    better than held-out ones only if the layer itself treats them differently.
    """
    rng = np.random.default_rng(seed)
    data = {"seen": seen, "unseen": unseen, "held_out": indexed(held_out)}
    data = {kind: _sample(samples, most, rng) for kind, samples in data.items()}
    of_full = {kind: pooled_features(full, parts, samples, batch_size, workers) for kind, samples in data.items()}
    of_half = {kind: pooled_features(half, parts, samples, batch_size, workers) for kind, samples in data.items()}
    y = {kind: labels for kind, (_, labels) in of_full.items()}
    found: dict[str, Probe] = {}
    before = None
    for part in parts:
        x = {kind: features[part.name] for kind, (features, _) in of_full.items()}
        members, labels = np.concatenate([x["seen"], x["unseen"]]), np.concatenate([y["seen"], y["unseen"]])
        right = fit_svm(members, labels, seed).predict(x["held_out"]) == y["held_out"]
        gap = _member_gap({kind: features[part.name] for kind, (features, _) in of_half.items()}, y, seed)
        gain = None if before is None else _paired_gain(right, before)
        found[part.name] = Probe(proportion(int(right.sum()), len(right)), gain, gap)
        before = right
    return found


def _member_gap(x: dict[str, np.ndarray], y: dict[str, np.ndarray], seed: int) -> Estimate:
    svm = fit_svm(x["unseen"], y["unseen"], seed)
    hits = {kind: int((svm.predict(x[kind]) == y[kind]).sum()) for kind in ("seen", "held_out")}
    return rate_difference(hits["seen"], len(y["seen"]), hits["held_out"], len(y["held_out"]))


def _paired_gain(right: np.ndarray, before: np.ndarray) -> Estimate:
    """Accuracy gained over the stage before, on the same samples: mean of the differences, normal interval."""
    difference = right.astype(float) - before.astype(float)
    half = 1.959964 * difference.std(ddof=1) / len(difference) ** 0.5
    return Estimate(float(difference.mean()), float(difference.mean() - half), float(difference.mean() + half))


def _sample(data: Dataset, most: int, rng) -> Dataset:
    if len(data) <= most:
        return data
    return Part(data, np.sort(rng.choice(len(data), most, replace=False)), "sample")


@torch.no_grad()
def pooled_features(model: nn.Module, parts: Sequence[Stage], data: Dataset, batch_size: int, workers: int = 0):
    """({part: (n, channels)}, labels): features averaged over positions."""
    model.eval()
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    kept: dict[str, list[np.ndarray]] = {part.name: [] for part in parts}
    labels = []

    def pool(name: str, features: Tensor) -> None:
        if features.ndim == 4:
            features = features.mean((1, 2) if channels_last else (2, 3))
        elif features.ndim == 3:  # tokens: (n, tokens, channels)
            features = features.mean(1)
        kept[name].append(features.flatten(1).float().cpu().numpy())

    with bare(model), watch([p.on(model) for p in parts], pool):
        for inputs, targets in batches(data, model, batch_size, workers):
            model(inputs)
            labels.append(targets.cpu().numpy())
    return {name: np.concatenate(values) for name, values in kept.items()}, np.concatenate(labels)


def fit_svm(x: np.ndarray, y: np.ndarray, seed: int, class_weight: str | None = None):
    """A linear SVM on standardised features, as a fitted scikit-learn pipeline."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    # C below 1: features outnumber what a few thousand samples can pin down
    return make_pipeline(StandardScaler(), LinearSVC(C=0.01, random_state=seed, max_iter=5000, class_weight=class_weight)).fit(x, y)
