"""Two models of the same members against each other: accuracy and leakage, over all seeds that have both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .claim import Results, difference, shown, test_accuracy
from .pooling import Spread, mean_of, spread_of

MARGIN = 0.02  # of accuracy or AUC: what is surely worse by less is taken as no worse
UNSTEADY = ("advreg",)  # its trainings may collapse on a seed (alpha 3, seed 43): they vary more than the others, and are judged by that

By = Callable[[Mapping], Mapping]


# --- one model -----------------------------------------------------------------------------------


def auc_by(attack: str, model: Mapping) -> Mapping:
    return model["attacks"][attack]["auc"]


by_confidence, by_correctness = partial(auc_by, "confidence"), partial(auc_by, "correctness")


def by_strongest(model: Mapping) -> Mapping:
    """Of the eight attacks, with an interval that is corrected for taking it."""
    return turned(model["strongest"]["auc"])


WORDS = {by_confidence: "confidence AUC", by_strongest: "AUC of the strongest attack"}


def turned(e: Mapping) -> dict[str, float]:
    """An AUC, turned around if it is below 1/2, as the attacker would; its interval may reach below 1/2, whose width still tells its error."""
    low, value, high = (e[end] for end in ("low", "value", "high"))
    ends = (low, value, high) if value >= 0.5 else (1 - high, 1 - value, 1 - low)
    return dict(zip(("low", "value", "high"), ends))


def leak(model: Mapping) -> dict[str, float]:
    return turned(by_confidence(model))


def spread(found: Sequence[Mapping]) -> str:
    """Value with its interval of one seed, mean and standard deviation of several."""
    if len(found) == 1:
        return shown(found[0])
    values = [e["value"] for e in found]
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def undefended_accuracy(models: Mapping, name: str) -> Mapping:
    """Of the very model that this one was made from."""
    return test_accuracy(models[name].get("base", models["undefended"]))


# --- over seeds ----------------------------------------------------------------------------------


def with_models(results: Results, base: str, names: Sequence[str]) -> dict[int, Mapping]:
    """seed -> models, of the seeds that have all of them."""
    return having({seed: r["models"] for seed, r in results.get(base, {}).items()}, *names)


def having(seeds: Mapping[int, Mapping], *names: str) -> dict[int, Mapping]:
    return {s: m for s, m in seeds.items() if all(name in m for name in names)}


def kept(seeds: Mapping[int, Mapping], name: str) -> float:
    """Test accuracy over that of the undefended model it was made from, mean over seeds.

    A base that was trained again on another processor is not quite the one in the table: rows made since say which accuracy theirs had.
    """
    return statistics.mean(
        m[name]["test_accuracy"]["value"] / undefended_accuracy(m, name)["value"] for m in seeds.values()
    )


def mean_leak(seeds: Mapping[int, Mapping], name: str, by: By = by_confidence) -> float:
    return statistics.mean(turned(by(m[name]))["value"] for m in seeds.values())


def utility(seeds: Mapping[int, Mapping], name: str, by: By = by_confidence) -> str:
    accuracy, leaks = (spread([of(m[name]) for m in seeds.values()]) for of in (test_accuracy, lambda m: turned(by(m))))
    return f"{name}: test {accuracy}, {WORDS[by]} {leaks}"


def active(seeds: Mapping[int, Mapping], name: str) -> str:
    """In how many steps its defense did anything, mean over seeds; "" of cross-entropy: a defense that never acts is no more than that."""
    shares = [m[name]["result"]["active"] for m in having(seeds, name).values() if "active" in m[name].get("result", {})]
    plain = any(m[name].get("defense") == "plain" for m in having(seeds, name).values())
    return f"{statistics.mean(shares):.1%}" if shares and not plain else ""


# --- two models ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """One model less another, the mean over seeds, each number with its 95 % interval."""

    accuracy: Mapping
    leak: Mapping

    def turned(self) -> Gap:
        return Gap(*({"value": -e["value"], "low": -e["high"], "high": -e["low"]} for e in (self.accuracy, self.leak)))


def gap_of(results: Results, pairs: Sequence[tuple[Mapping, Mapping]], by: By = by_confidence) -> Gap:
    """Over pairs of models of the same members, one a seed; `results` tell how much such differences vary from seed to seed."""
    return Gap(*(mean_difference(results, pairs, of) for of in (test_accuracy, by)))


def mean_difference(results: Results, pairs: Sequence[tuple[Mapping, Mapping]], of: By) -> dict:
    """Of a number of two models, over such pairs."""
    apart = [difference(of(mine), of(theirs)) for mine, theirs in pairs]
    return mean_of(apart, spread_of_differences(results, of, any(map(unsteady, itertools.chain(*pairs)))))


def unsteady(model: Mapping) -> bool:
    return model.get("defense") in UNSTEADY


def spread_of_differences(results: Results, of: By, unsteady_ones: bool = False) -> Spread:
    """How much it varies from seed to seed between any two models of the same base, of which one is unsteady, or none."""
    bases = []
    for seeds in results.values():
        models = [found["models"] for found in seeds.values()]
        rows = {name: m[name] for m in models for name in m}
        pairs = [
            pair
            for pair in itertools.combinations(rows, 2)
            if any(unsteady(rows[name]) for name in pair) is unsteady_ones
        ]
        bases.append([[difference(of(m[a]), of(m[b])) for m in models if a in m and b in m] for a, b in pairs])
    return spread_of(bases)


def surely_better(gap: Gap) -> bool:
    """Surely better in accuracy or leakage, and surely no worse in the other, but for MARGIN."""
    more_accurate, less_leaky = gap.accuracy["low"] > 0, gap.leak["high"] < 0
    as_accurate, as_quiet = gap.accuracy["low"] > -MARGIN, gap.leak["high"] < MARGIN
    return (more_accurate and as_quiet) or (less_leaky and as_accurate)


def compared(gap: Gap) -> str:
    """Better, worse, surely worse in one respect (and surely better in the other: a trade), or nothing that can be said."""
    if surely_better(gap):
        return "yes"
    if surely_better(gap.turned()):
        return "no: the other way round"
    losses = [
        *(["leaks surely more"] if gap.leak["low"] > MARGIN else []),
        *(["is surely less accurate"] if gap.accuracy["high"] < -MARGIN else []),
    ]
    if not losses:
        return "cannot be said: neither is surely better"
    gains = [
        *(["is surely more accurate"] if gap.accuracy["low"] > 0 else []),
        *(["leaks surely less"] if gap.leak["high"] < 0 else []),
    ]
    return f"no: it {' but '.join([*gains, *losses])}" if gains else f"no: it {' and '.join(losses)}"


def leaks_less(gap: Gap) -> str:
    """The same for claims about leakage alone."""
    if gap.leak["high"] < 0:
        return "yes"
    return "no: the other way round" if gap.leak["low"] > 0 else "cannot be said: neither surely leaks less"
