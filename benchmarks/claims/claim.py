"""A claim, what there is to judge it by, and the verdict; with the few words and numbers that all of them share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Results = Mapping[str, Mapping[int, Mapping]]  # base -> seed -> what work.py kept
AUGMENTED, PLAIN = "resnet18-augmented", "resnet18-plain"
OURS, GOAL = "ours, not the paper's", "goal of this project"
STANDINGS = ("holds", "in part", "open", "fails")


@dataclass(frozen=True)
class Verdict:
    claim: str
    paper: str  # where it says so; OURS or GOAL if it does not
    ours: str
    agrees: str  # yes, no, partly, in 2 of 3, met, missed, or why it cannot be said

    @property
    def of_the_paper(self) -> bool:
        return self.paper not in (OURS, GOAL)

    @property
    def standing(self) -> str:
        """One of STANDINGS, by how `agrees` begins."""
        if self.agrees.startswith(("cannot be said", "undecided")):
            return "open"
        if self.agrees == "met" or self.agrees.startswith("yes"):
            return "holds"
        return "fails" if re.match(r"no\b|missed|(met )?in 0 of", self.agrees) else "in part"


@dataclass(frozen=True)
class Claim:
    text: str
    paper: str
    judge: Callable[[Results], tuple[str, str] | None]  # (our figures, whether they agree); None if what it needs was not run

    def verdict(self, results: Results) -> Verdict | None:
        found = self.judge(results)
        return Verdict(self.text, self.paper, *found) if found else None


def shown(e: Mapping) -> str:
    return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"


def seeds_in_words(seeds: Mapping) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"


def test_accuracy(model: Mapping) -> Mapping:
    return model["test_accuracy"]


def difference(a: Mapping, b: Mapping) -> dict[str, float]:
    """a - b with its interval, their errors taken as independent."""
    value = a["value"] - b["value"]
    down = math.hypot(a["value"] - a["low"], b["high"] - b["value"])
    up = math.hypot(a["high"] - a["value"], b["value"] - b["low"])
    return {"value": value, "low": value - down, "high": value + up}


def counted(answers: Mapping[str, str]) -> str:
    """One answer for several cases, by how each begins: yes, no, or anything else for what is undecided."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    yes, no = (sum(a.startswith(word) for a in answers.values()) for word in ("yes", "no"))
    undecided = len(answers) - yes - no
    if undecided == len(answers):
        return "cannot be said of any"
    if yes == len(answers):
        return "yes"
    rest = [f"not in {no}"] * bool(no) + [f"{undecided} undecided"] * bool(undecided)
    return "; ".join([f"in {yes} of {len(answers)}", *rest])


def listed(answers: Mapping[str, str]) -> str:
    """Case by case, those of one answer together."""
    by_answer: dict[str, list[str]] = {}
    for case, answer in answers.items():
        by_answer.setdefault(answer, []).append(case)
    return "; ".join(f"{', '.join(cases)}: {answer}" for answer, cases in by_answer.items())
