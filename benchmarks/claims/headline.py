"""The few rows that README shows, in words, from the same results as all the others."""

from __future__ import annotations

from collections.abc import Mapping

from .claim import AUGMENTED, Results, test_accuracy
from .compare import by_confidence, by_strongest, kept, spread, turned, with_models
from .cost import passes
from .verdicts import MORE_CLASSES
from .work import Cell

SELENA = "PPTP from layer2 on, `selena`"
ROWS = {
    AUGMENTED: {
        "undefended": "undefended",
        "plain-12ep-scratch": "cross-entropy from scratch, stopped early",
        "relaxloss-2-scratch": "RelaxLoss, alpha 2, from scratch",
        "relaxloss-2.5-scratch": "RelaxLoss, alpha 2.5, from scratch",
        "selena-10-t1-scratch": "`selena` from scratch: 10 sub-models of 60 epochs, then 60 epochs",
        "relaxloss-2-layer3": "PPTP from layer3 on, RelaxLoss, alpha 2",
        "plain-4ep-layer3": "PPTP from layer3 on, cross-entropy",
        "plain-6ep-layer2": "PPTP from layer2 on, cross-entropy",
        "crossfit-1-layer2": "PPTP from layer2 on, `crossfit`",
        "selena-2-t0.5-layer2": f"{SELENA}: 2 sub-models of 6 epochs, sharpened labels, then 6 epochs",
        "selena-6-layer2": f"{SELENA}: 6 sub-models of 10 epochs, then 10 epochs",
        "selena-10-t0.5-layer2": f"**{SELENA}: 10 sub-models of 7 epochs, sharpened labels, then 20 epochs** (`pptp harden` tries this)",
        "selena-20-t0.5-layer2": "the same with 20 sub-models (`pptp harden` tries it when it refines)",
    },
    MORE_CLASSES: {
        "undefended": "40 classes: undefended",
        "relaxloss-3-scratch": "40 classes: RelaxLoss, alpha 3, from scratch",
        "plain-6ep-layer2": "40 classes: PPTP from layer2 on, cross-entropy",
        "selena-10-t0.5-layer2": "**40 classes: the bold row above, unchanged**",
    },
}
HEADER = [
    "model",
    "seeds",
    "test accuracy",
    "of undefended",
    "AUC, confidence",
    "AUC, strongest of eight attacks",
    "epochs in all",
]


def headline_rows(results: Results) -> list[list[str]]:
    """Of the rows that there are; epochs are passes over the members, of the suffix or, from scratch, of the whole model."""
    return [
        _row(base, name, words, seeds)
        for base, names in ROWS.items()
        for name, words in names.items()
        if (seeds := with_models(results, base, [name]))
    ]


def _row(base: str, name: str, words: str, seeds: Mapping[int, Mapping]) -> list[str]:
    cell = Cell(base, 42)
    epochs = cell.settings["epochs"] if name == "undefended" else passes(cell, cell.retrainings[name])
    return [
        words,
        ", ".join(map(str, sorted(seeds))),
        spread([test_accuracy(m[name]) for m in seeds.values()]),
        f"{kept(seeds, name):.2f}",
        *(spread([turned(by(m[name])) for m in seeds.values()]) for by in (by_confidence, by_strongest)),
        str(epochs),
    ]
