"""The same defense from a cut on and from scratch: what the paper's section 5.2.2 is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .claim import AUGMENTED, OURS, PLAIN, Claim, Results, counted, listed, seeds_in_words, shown, test_accuracy
from .compare import (
    WORDS,
    By,
    Gap,
    auc_by,
    by_confidence,
    by_correctness,
    by_strongest,
    compared,
    gap_of,
    mean_difference,
    spread,
    turned,
    with_models,
)
from .work import plan

BARE = ", on a base without augmentation"
BASES = {AUGMENTED: "", PLAIN: BARE}
FIVE = ("correctness", "confidence", "entropy", "modified_entropy", "network")  # those of the paper
HARDLY = 0.02  # of AUC: a gain that is none


@dataclass(frozen=True)
class Kind:
    """Pairs that one claim is about: mostly a defense at several strengths, from the same cut on."""

    claim: str
    paper: str
    pairs: tuple[tuple[str, str], ...]  # (from the cut on, from scratch)


def strengths(defense: str, values: Sequence[float], cut: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{defense}-{v:g}-{cut}", f"{defense}-{v:g}-scratch") for v in values)


BOLD = "selena-10-t0.5-layer2"  # the row that harden tries
TEN = "SELENA with ten short sub-models, from layer2 on,"
KINDS = (
    Kind(
        "RelaxLoss from layer4 on, the paper's cut, beats it from scratch",
        "Figure 14",
        strengths("relaxloss", (1, 1.5, 2), "layer4"),
    ),
    Kind("RelaxLoss from layer3 on beats it from scratch", OURS, strengths("relaxloss", (1, 1.5, 2, 2.5), "layer3")),
    Kind(
        "RelaxLoss from layer3 on beats as many epochs from scratch",
        OURS,
        tuple((f"relaxloss-{v}-layer3", f"relaxloss-{v}-20ep-scratch") for v in (1, 2)),
    ),
    Kind("AdvReg from layer4 on beats it from scratch", "Figure 14", strengths("advreg", (1, 3), "layer4")),
    Kind(
        "SELENA from layer4 on beats it from scratch",
        "Figure 14: very slightly",
        (("selena-layer4", "selena-scratch"),),
    ),
    Kind(
        "DP-SGD from layer4 on, where no epsilon covers the trunk, beats it from scratch",
        OURS,
        strengths("dpsgd", (8,), "layer4"),
    ),
    Kind(
        f"{TEN} beats the same from scratch",
        OURS,
        ((BOLD, "selena-10-t0.5-short-scratch"), ("selena-10-layer2", "selena-10-scratch")),
    ),
    Kind(
        f"{TEN} beats ten full ones from scratch",
        OURS,
        ((BOLD, "selena-10-t1-scratch"), (BOLD, "selena-10-t0.5-scratch")),
    ),
    Kind("crossfit from layer2 on beats it from scratch", OURS, (("crossfit-1-layer2", "crossfit-1-scratch"),)),
    Kind(
        "six epochs of cross-entropy from layer2 on beat twelve from scratch",
        OURS,
        (("plain-6ep-layer2", "plain-12ep-scratch"),),
    ),
)
RELAXED = [pair for kind in KINDS if kind.claim.startswith("RelaxLoss") for pair in kind.pairs if "20ep" not in pair[1]]
PAPERS = [*RELAXED, *(pair for kind in KINDS if kind.claim.startswith("AdvReg") for pair in kind.pairs)]  # Figure 15


@dataclass(frozen=True)
class Pair:
    """One pair on one base, over the seeds that have both."""

    base: str
    mine: str
    theirs: str
    seeds: Mapping[int, Mapping]
    gaps: Mapping[By, Gap]

    @property
    def models(self) -> list[tuple[Mapping, Mapping]]:
        return [(m[self.mine], m[self.theirs]) for m in self.seeds.values()]


def pair_of(results: Results, base: str, mine: str, theirs: str) -> Pair | None:
    seeds = with_models(results, base, [mine, theirs])
    if not seeds:
        return None
    models = [(m[mine], m[theirs]) for m in seeds.values()]
    return Pair(base, mine, theirs, seeds, {by: gap_of(results, models, by) for by in WORDS})


def pairs_of(results: Results, pairs: Sequence[tuple[str, str]], *bases: str) -> list[Pair]:
    """Those that are there."""
    found = [pair_of(results, base, *pair) for base in bases for pair in pairs]
    return [pair for pair in found if pair]


def _beats(kind: Kind, base: str) -> Callable[[Results], tuple[str, str] | None]:
    """By confidence; by the strongest attack besides where it answers otherwise."""

    def judge(results: Results) -> tuple[str, str] | None:
        found = pairs_of(results, kind.pairs, base)
        if not found:
            return None
        answers, by_all = ({_named(p): compared(p.gaps[by]) for p in found} for by in (by_confidence, by_strongest))
        ours = figures(found[0]) if len(found) == 1 else listed(answers)
        also = "" if counted(by_all) == counted(answers) else f"; by the strongest attack {counted(by_all)}"
        return ours, counted(answers) + also

    return judge


def _named(pair: Pair) -> str:
    return f"{pair.mine} / {pair.theirs} ({seeds_in_words(pair.seeds)})"


def figures(pair: Pair) -> str:
    gap = pair.gaps[by_confidence]
    seeds = seeds_in_words(pair.seeds)
    return f"{pair.mine} less {pair.theirs}: accuracy {shown(gap.accuracy)}, AUC {shown(gap.leak)} ({seeds})"


# --- against the paper's attacks, one by one ---------------------------------------------------------


def _under_all_five(results: Results) -> tuple[str, str] | None:
    """By none surely leakier."""
    answers = {}
    for p in pairs_of(results, PAPERS, *BASES):
        worse = [a for a in FIVE if _less(results, p, a)["low"] > 0]
        better = all(_less(results, p, a)["high"] < HARDLY for a in FIVE)
        answers[f"{_short(p)}"] = "no" if worse else "yes" if better else "undecided"
    return (listed(answers), counted(answers)) if answers else None


def _less(results: Results, pair: Pair, attack: str) -> Mapping:
    return mean_difference(results, pair.models, lambda m: turned(auc_by(attack, m)))


def _short(pair: Pair) -> str:
    return pair.mine + (" (no augmentation)" if pair.base == PLAIN else "")


def _correctness(results: Results) -> tuple[str, str] | None:
    """Guessing by right and wrong alone: from scratch less from the cut on."""
    gains = {
        _short(p): mean_difference(results, [pair[::-1] for pair in p.models], by_correctness)
        for p in pairs_of(results, RELAXED, *BASES)
    }
    if not gains:
        return None
    answers = {
        n: "yes" if g["high"] < HARDLY else "no: it surely does" if g["low"] > HARDLY else "undecided"
        for n, g in gains.items()
    }
    return listed(answers), counted(answers)


def claims_of_pairs() -> list[Claim]:
    planned = plan()["retrainings"]
    judged = [
        Claim(kind.claim + more, kind.paper, _beats(kind, base))
        for kind in KINDS
        for base, more in BASES.items()
        if any(set(pair) <= set(planned[base]) for pair in kind.pairs)
    ]
    return [
        *judged,
        Claim("AdvReg and RelaxLoss under PPTP leak no more to any of five attacks", "Figure 15", _under_all_five),
        Claim(f"PPTP does not help against the correctness attack (by {HARDLY} of AUC)", "section 5.2.2", _correctness),
    ]


# --- the table ---------------------------------------------------------------------------------------

HEADER = [
    "from the cut on",
    "from scratch",
    "seeds",
    "test accuracy",
    "less from scratch",
    "AUC, confidence",
    "less from scratch",
    "AUC, strongest",
    "less from scratch",
    "better by confidence",
    "by the strongest",
]


def pair_rows(results: Results, base: str) -> list[list[str]]:
    every = dict.fromkeys(pair for kind in KINDS for pair in kind.pairs)
    return [_row(pair) for pair in pairs_of(results, list(every), base)]


def _row(pair: Pair) -> list[str]:
    def both(of: Callable[[Mapping], Mapping]) -> str:
        return " / ".join(spread([of(m[name]) for m in pair.seeds.values()]) for name in (pair.mine, pair.theirs))

    cells = [pair.mine, pair.theirs, str(len(pair.seeds)), both(test_accuracy)]
    cells.append(shown(pair.gaps[by_confidence].accuracy))
    for by in WORDS:
        cells += [both(partial(_turned_by, by)), shown(pair.gaps[by].leak)]
    return [*cells, *(compared(pair.gaps[by]) for by in WORDS)]


def _turned_by(by: By, model: Mapping) -> Mapping:
    return turned(by(model))
