"""Figures of the monitors' sections, each from plain results to [(caption, inline SVG)]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.colors import LogNorm

from .plots import GREY, INK, MODEL_COLOURS, RISK, as_svg, canvas, error_bars, points

Figures = list[tuple[str, str]]
MOST_PANELS = 6


def dynamics(data: Mapping) -> Figures:
    """The plane at up to six checkpoints: where samples are, and the centre of mass on its way."""
    epochs, centre = data["epochs"], np.array(data["centre"])
    shown = np.unique(np.linspace(0, len(epochs) - 1, min(MOST_PANELS, len(epochs))).round().astype(int))
    columns = min(3, len(shown))
    figure, axes = canvas(2.6 * columns, 2.5 * -(-len(shown) // columns), -(-len(shown) // columns), columns)
    most = max(max(map(max, data["cells"][k])) for k in shown)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, k in zip(axes.flat, shown):
        cells = np.array(data["cells"][k], float)
        edges = np.linspace(0, 1, len(cells) + 1)
        axis.pcolormesh(
            edges, edges, np.where(cells > 0, cells, np.nan).T, cmap="Blues", norm=LogNorm(0.5, max(1.0, most))
        )
        axis.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
        axis.plot(*centre[: k + 1].T, color=RISK, marker="o", markersize=3, linewidth=1)
        axis.set(xlim=(0, 1), ylim=(0, 1), title=f"epoch {epochs[k]}", aspect="equal")
    axes[-1, 0].set(xlabel="FPR", ylabel="TPR")
    caption = "The vulnerability plane over training: darker cells hold more samples (log scale), the line is the centre of mass. Up and to the left is vulnerable."
    return [(caption, as_svg(figure, "dynamics"))]


def curvature(data: Mapping) -> Figures:
    found = []
    if data["scatter"]:
        found.append(
            ("Curvature against memorization, one point a member of the undefended model.", _scatter(data["scatter"]))
        )
    private = {name: row for name, row in data["models"].items() if row["epsilon"] is not None}
    if private:
        found.append(
            (
                "Mean curvature of members against epsilon; the line is the undefended model.",
                _against_epsilon(data["models"], private),
            )
        )
    return found


def _scatter(pairs: Sequence[Sequence[float]]) -> str:
    figure, axes = canvas(5.2, 3.6)
    bent, score = np.array(pairs).T
    axes[0, 0].plot(np.maximum(bent, 1e-12), score, ".", color=INK, alpha=0.4, markersize=4)
    axes[0, 0].set(xscale="log", xlabel="curvature", ylabel="memorization")
    return as_svg(figure, "curvature-memorization")


def _against_epsilon(models: Mapping, private: Mapping) -> str:
    figure, axes = canvas(5.2, 3.4)
    rows = sorted(private.values(), key=lambda row: row["epsilon"])
    bent = [row["members"] for row in rows]
    at = [row["epsilon"] for row in rows]
    points(axes[0, 0], at, bent, fmt="o-", color=INK)
    axes[0, 0].axhline(models["undefended"]["members"]["value"], color=RISK, linestyle="--", linewidth=1)
    axes[0, 0].set(xscale="log", yscale="log", xlabel="epsilon", ylabel="mean curvature of members")
    return as_svg(figure, "curvature-epsilon")


def tokens(data: Mapping) -> Figures:
    rows = data["rows"]
    figure, axes = canvas(6.8, 3.6)
    axis, at = axes[0, 0], np.arange(len(rows))
    for shift, key, colour in ((-0.1, "mine", INK), (0.1, "control", GREY)):
        points(axis, at + shift, [row[key] for row in rows], color=colour, label=f"{key} (nats)")
    axis.axhline(0, color=GREY, linewidth=0.8)
    names = [f"{row['model']}\n{row['when']}, {row['shared']}" for row in rows]
    axis.set_xticks(at, names, fontsize=7, rotation=30, ha="right")
    axis.set(ylabel="matched-against-mismatched\ndependence")
    handles, labels = axis.get_legend_handles_labels()
    if all(row["rebuilt"] for row in rows):
        second = axis.twinx()
        line = second.plot(
            at, [np.mean([made["psnr"] for made in row["rebuilt"]]) for row in rows], "s", color=RISK, markersize=4
        )
        second.set_ylabel("PSNR of the rebuilt image (dB)", color=RISK)
        handles, labels = [*handles, *line], [*labels, "DLG"]
    axis.legend(handles, labels, fontsize=8)
    return [
        (
            "Dependence of data and gradients on held-out batches, its shuffled control, and what DLG rebuilds.",
            as_svg(figure, "tokens"),
        )
    ]


def batchnorm(data: Mapping) -> Figures:
    variants = data["variants"]
    if not variants:
        return []
    figure, axes = canvas(6.4, 3.2, 1, 2)
    at = np.arange(len(variants))
    for axis, key, title in ((axes[0, 0], "auc", "AUC of confidence"), (axes[0, 1], "influence", "pull of an outlier")):
        kinds = (
            (("auc_typical", "typical", INK), ("auc_outliers", "outliers", RISK))
            if key == "auc"
            else ((key, "", RISK),)
        )
        for shift, (name, label, colour) in zip((-0.1, 0.1), kinds):
            points(axis, at + shift, [row[name] for row in variants.values()], color=colour, label=label)
        axis.axhline(0.5 if key == "auc" else 1, color=GREY, linestyle=":", linewidth=1)
        axis.set_xticks(at, list(variants))
        axis.set_title(title)
    axes[0, 0].legend(fontsize=8)
    return [("The same model with each norm, at matched training loss.", as_svg(figure, "batchnorm"))]


def factors(data: Mapping) -> Figures:
    rows = data["rows"]
    figure, axes = canvas(6.4, 0.6 + 0.4 * len(rows))
    at, gaps = np.arange(len(rows)), [row["gap"] for row in rows.values()]
    axes[0, 0].errorbar([e["value"] for e in gaps], at, xerr=error_bars(gaps), fmt="o", color=INK, capsize=3)
    axes[0, 0].set_yticks(at, list(rows))
    axes[0, 0].set(xlabel="mean TPR - FPR at the end")
    return [("How vulnerable samples end, by what was changed.", as_svg(figure, "factors"))]


FIGURES: dict[str, Callable[[Mapping], Figures]] = {
    "dynamics": dynamics,
    "curvature": curvature,
    "tokens": tokens,
    "batchnorm": batchnorm,
    "factors": factors,
}

WATCHED = {
    "curvature": "mean curvature of watched members",
    "watched_loss": "mean loss of watched members",
    "token_auc": "AUC, matched over mismatched gradients",
    "influence_ratio": "pull of an outlier",
}


def while_training(history: Sequence[Mapping]) -> Figures:
    """What the monitors wrote into the history, one panel each."""
    names = [name for name in WATCHED if any(name in row for row in history)]
    if not names:
        return []
    figure, axes = canvas(3.2 * len(names), 2.6, 1, len(names))
    for axis, name, colour in zip(axes.flat, names, MODEL_COLOURS):
        rows = [row for row in history if name in row]
        axis.plot(
            [row["epoch"] for row in rows], [row[name] for row in rows], "o-", color=colour, markersize=3, linewidth=1
        )
        axis.set(title=WATCHED[name], xlabel="epoch")
    return [("What the monitors saw while the undefended model was trained.", as_svg(figure, "while-training"))]
