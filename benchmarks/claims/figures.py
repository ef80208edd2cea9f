"""Where models memorise, and what retraining buys, as figures."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from pptp.plots import GREY, INK, MODEL_COLOURS, RISK, SEEN, as_svg, canvas, error_bars

from .compare import WORDS, having, kept, mean_leak
from .verdicts import GOAL_ACCURACY, GOAL_LEAK, UNDEFENDED
from .where import INTERPOLATES, interpolates


def where_figure(one: Mapping[str, Mapping]) -> str:
    """Distances' AUC per stage, a panel a base."""
    columns = min(3, len(one))
    rows = -(-len(one) // columns)
    figure, axes = canvas(3.4 * columns, 2.4 * rows, rows, columns, sharey=True)
    for axis in axes.flat[len(one) :]:
        axis.set_visible(False)
    for axis, (base, found) in zip(axes.flat, one.items()):
        _distances(axis, found["risk"]["stages"])
        axis.set_title(base if interpolates(found) else f"{base} (train < {INTERPOLATES:.0%})", fontsize=9)
    axes[0, 0].set_ylabel("AUC, unseen over seen")
    axes[0, 0].legend(fontsize=7)
    return as_svg(figure, "where")


def _distances(axis, stages) -> None:
    at = np.arange(len(stages))
    for metric, colour, shift in (("rms", SEEN, -0.1), ("cosine", RISK, 0.1)):
        e = [s["distances"][metric]["auc"] for s in stages]
        axis.errorbar(
            at + shift,
            [x["value"] for x in e],
            yerr=error_bars(e),
            fmt="o-",
            color=colour,
            markersize=3,
            linewidth=1,
            label=metric,
        )
    axis.axhspan(0.45, 0.55, color=GREY, alpha=0.25, linewidth=0)
    names = [s["name"].replace("features.", "f").replace("stages.", "s") for s in stages]
    axis.set_xticks(at, names, rotation=40, fontsize=7)


def frontier_figure(seeds: Mapping[int, Mapping]) -> str:
    """Accuracy against leakage, to the confidence attack and to the strongest of all, a line a defense and place."""
    figure, axes = canvas(10.4, 4.6, 1, 2, sharey=True)
    names = list(dict.fromkeys(name for models in seeds.values() for name in models))
    kinds = list(dict.fromkeys(map(kind_of, names)))
    defenses = list(dict.fromkeys(kind.partition(",")[0] for kind in kinds))
    for axis, by in zip(axes[0], WORDS):
        for kind in kinds:
            mine = [(n, having(seeds, n)) for n in names if kind_of(n) == kind]
            axis.plot(
                *zip(*sorted((mean_leak(of, n, by), kept(of, n)) for n, of in mine)),
                "s--" if "scratch" in kind else "o",
                color=MODEL_COLOURS[defenses.index(kind.partition(",")[0]) % len(MODEL_COLOURS)],
                label=kind,
                markersize=5,
                linewidth=0.8,
            )
        axis.set_xlim(left=0.5)
        axis.axvline(GOAL_LEAK, color=INK, linestyle=":", linewidth=1)
        axis.axhline(GOAL_ACCURACY, color=INK, linestyle=":", linewidth=1)
        axis.set(xlabel=f"{WORDS[by]} (0.5 = no leak)")
    axes[0, 0].set(ylabel="test accuracy, of the undefended model's")
    axes[0, 1].legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    return as_svg(figure, "buys")


def kind_of(name: str) -> str:
    if name == UNDEFENDED:
        return name
    place = "from scratch" if name.endswith("scratch") else "from a cut on"
    return f"{re.split(r'[-0-9]', name)[0].replace('control', 'plain')}, {place}"
