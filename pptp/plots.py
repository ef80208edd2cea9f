"""Figures of the report, each a function from plain results to an inline SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

INK, GREY, SEEN, UNSEEN, RISK = "#1f2933", "#9aa5b1", "#2f6f9f", "#d1603d", "#d1603d"
MODEL_COLOURS = ("#1f2933", "#d1603d", "#2f6f9f", "#5b8c5a", "#8e6c8a", "#c49b33", "#4aa3a2", "#a05195")
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def as_svg(figure, salt: str) -> str:
    """The figure as an <svg> element; `salt` keeps ids of different figures on one page apart."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": salt, **STYLE}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def png(image) -> str:
    """A data URI of an image (channels, h, w), stretched to its own range."""
    from torchvision.transforms.functional import to_pil_image

    buffer = io.BytesIO()
    image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)
    to_pil_image(image).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def error_bars(estimates: Sequence[Mapping]) -> np.ndarray:
    """(2, n) distances from the value to both ends of the interval."""
    return np.array(
        [[max(0.0, e["value"] - e["low"]) for e in estimates], [max(0.0, e["high"] - e["value"]) for e in estimates]]
    )


def points(axis, at, estimates: Sequence[Mapping], **how) -> None:
    """Values with their intervals, at the places `at`."""
    how = {"fmt": "o", "capsize": 3, **how}
    axis.errorbar(at, [e["value"] for e in estimates], yerr=error_bars(estimates), **how)


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **more):
    with plt.rc_context(STYLE):
        return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **more)


def trade_off(evaluations: Mapping[str, Mapping]) -> str:
    """Test accuracy against the AUC of the strongest attack, one point a model; up and to the left is better."""
    figure, axes = canvas(6.4, 4)
    axis = axes[0, 0]
    for (name, found), colour in zip(evaluations.items(), _colours(evaluations)):
        leak, useful = found["strongest"]["auc"], found["test_accuracy"]
        axis.errorbar(
            leak["value"],
            useful["value"],
            xerr=error_bars([leak]),
            yerr=error_bars([useful]),
            fmt="o",
            color=colour,
            label=name,
            capsize=3,
        )
    axis.axvline(0.5, color=GREY, linestyle=":", linewidth=1)
    axis.set(xlabel="AUC of the strongest attack (0.5 = no leak)", ylabel="test accuracy")
    axis.legend(loc="best")
    return as_svg(figure, "trade-off")


def frontier(points: Sequence[Mapping], target_auc: float | None = None) -> str:
    """Test accuracy against leakage of every point of a sweep, one colour a cut; Pareto points joined, the chosen one ringed."""
    figure, axes = canvas(6.4, 4.2)
    axis = axes[0, 0]
    cuts = list(dict.fromkeys(point["cut"] for point in points))
    for cut, colour in zip(cuts, _colours(dict.fromkeys(cuts))):
        mine = [point for point in points if point["cut"] == cut]
        leak, useful = ([point[key] for point in mine] for key in ("leak", "accuracy"))
        axis.errorbar(
            [e["value"] for e in leak],
            [e["value"] for e in useful],
            xerr=error_bars(leak),
            yerr=error_bars(useful),
            fmt="o",
            color=colour,
            label=cut,
            capsize=2,
            markersize=4,
            elinewidth=0.6,
        )
    front = sorted((p["leak"]["value"], p["accuracy"]["value"]) for p in points if p["pareto"])
    axis.plot(*zip(*front), color=GREY, linewidth=1, zorder=0)
    for point in points:
        if point["best"]:
            axis.plot(
                point["leak"]["value"], point["accuracy"]["value"], "o", markersize=11, fillstyle="none", color=RISK
            )
    if target_auc is not None:
        axis.axvline(target_auc, color=INK, linestyle="--", linewidth=1)
    axis.axvline(0.5, color=GREY, linestyle=":", linewidth=1)
    axis.set(xlabel="AUC of the strongest attack (0.5 = no leak)", ylabel="test accuracy")
    axis.legend(loc="best", title="cut")
    return as_svg(figure, "frontier")


def _colours(names: Mapping) -> list[str]:
    return [MODEL_COLOURS[i % len(MODEL_COLOURS)] for i in range(len(names))]


def stage_auc(risk: Mapping) -> str:
    """Disparity per stage by both metrics, the band that counts as none, and the cut."""
    stages = risk["stages"]
    figure, axes = canvas(6.4, 3.4)
    axis, at = axes[0, 0], np.arange(len(stages))
    axis.axhspan(
        0.5 - risk["delta"],
        0.5 + risk["delta"],
        color=GREY,
        alpha=0.25,
        linewidth=0,
        label=f"within delta = {risk['delta']:g}",
    )
    for metric, shift, colour, marker in (("rms", -0.08, SEEN, "s"), ("cosine", 0.08, UNSEEN, "o")):
        found = [stage["distances"][metric]["auc"] for stage in stages]
        axis.errorbar(
            at + shift,
            [e["value"] for e in found],
            yerr=error_bars(found),
            fmt=marker + "-",
            color=colour,
            label=metric,
            capsize=3,
            markersize=5,
            linewidth=1,
        )
    _mark_cut(axis, risk)
    axis.set_xticks(
        at,
        [stage["name"] for stage in stages],
        rotation=30 if len(stages) > 7 else 0,
        ha="right" if len(stages) > 7 else "center",
    )
    axis.set(ylabel="AUC, unseen over seen")
    axis.legend(loc="upper left")
    return as_svg(figure, "stage-auc")


def _mark_cut(axis, risk: Mapping) -> None:
    names = [stage["name"] for stage in risk["stages"]]
    position = names.index(risk["cut"]) if risk["cut"] in names else 0
    axis.axvline(position - 0.5, color=INK, linestyle="--", linewidth=1)
    axis.annotate("cut", (position - 0.47, 0.97), xycoords=("data", "axes fraction"), va="top", fontsize=9)


def probe_curve(risk: Mapping) -> str:
    """Held-out accuracy of a linear probe per stage, and how much better members of the half model are read."""
    stages = [stage for stage in risk["stages"] if stage["probe"]]
    figure, axes = canvas(6.4, 3.2, 1, 2)
    at, names = np.arange(len(stages)), [stage["name"] for stage in stages]
    for axis, key, title in (
        (axes[0, 0], "probe", "linear probe, held-out accuracy"),
        (axes[0, 1], "member_gap", "member gap of the half model"),
    ):
        found = [stage[key] for stage in stages]
        axis.errorbar(
            at,
            [e["value"] for e in found],
            yerr=error_bars(found),
            fmt="o-",
            color=INK,
            capsize=3,
            markersize=5,
            linewidth=1,
        )
        axis.set_xticks(at, names, rotation=45, ha="right")
        axis.set_title(title)
    axes[0, 1].axhspan(-risk["delta"], risk["delta"], color=GREY, alpha=0.25, linewidth=0)
    return as_svg(figure, "probe")


def distance_histograms(
    risk: Mapping, distances: Mapping[str, np.ndarray], last_block: Mapping[str, str], metric: str
) -> str:
    """Distances between the two models' features, seen against unseen, one panel a stage."""
    stages = risk["stages"]
    columns = min(4, len(stages))
    rows = -(-len(stages) // columns)
    figure, axes = canvas(2.3 * columns, 1.9 * rows, rows, columns)
    for axis in axes.flat[len(stages) :]:
        axis.set_visible(False)
    for axis, stage in zip(axes.flat, stages):
        seen, unseen = (distances[f"{last_block[stage['name']]}/{metric}_{which}"] for which in ("seen", "unseen"))
        top = np.quantile(np.concatenate([seen, unseen]), 0.995)
        bins = np.linspace(0, top if top > 0 else 1, 40)
        for values, colour, label in ((seen, SEEN, "seen by both"), (unseen, UNSEEN, "unseen by half")):
            axis.hist(values, bins, density=True, histtype="stepfilled", color=colour, alpha=0.45, label=label)
        axis.set_title(f"{stage['name']}: {stage['distances'][metric]['auc']['value']:.3f}")
        axis.set_yticks([])
    axes[0, 0].legend(fontsize=7, handlelength=1)
    return as_svg(figure, f"histograms-{metric}")


def roc(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], attack: str, smallest: float) -> str:
    """True against false positives on log axes, where the leak of a few samples shows."""
    figure, axes = canvas(5.2, 4.2)
    axis = axes[0, 0]
    grid = np.geomspace(smallest, 1, 200)
    axis.plot(grid, grid, color=GREY, linestyle=":", linewidth=1, label="guessing")
    for (name, (fpr, tpr)), colour in zip(curves.items(), _colours(curves)):
        heights = tpr[np.searchsorted(fpr, grid, side="right") - 1]  # a step function, seen at 200 places
        axis.step(grid, np.maximum(heights, smallest / 2), where="post", color=colour, label=name)
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(smallest, 1),
        ylim=(smallest, 1.05),
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        title=f"{attack} attack",
    )
    axis.legend(loc="lower right")
    return as_svg(figure, "roc")
