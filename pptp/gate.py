"""Bounds that a release must keep: "auc>0.6" fails it, but only where the interval lies beyond the bound."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from .errors import UserError
from .evaluate import MembershipScores
from .intervals import Estimate

UTILITIES = ("test_accuracy", "train_accuracy")
RULE = re.compile(
    r"^\s*(?P<who>.*?)(?P<metric>auc|advantage|balanced_accuracy|test_accuracy|train_accuracy|tpr@(?P<fpr>[0-9.eE-]+))\s*"
    r"(?P<sign>[<>])\s*(?P<bound>[0-9.eE-]+)\s*$"
)


@dataclass(frozen=True)
class Rule:
    """What must not be: `metric` `sign` `bound`, of one model or all, by one attack or the worst of all."""

    text: str
    metric: str
    sign: str
    bound: float
    who: str = ""  # "", "MODEL:", "ATTACK." or "MODEL:ATTACK."
    fpr: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Rule:
        found = RULE.match(text)
        try:
            if not found or (found["who"] and found["who"][-1] not in ":."):
                raise ValueError
            bound, fpr = float(found["bound"]), float(found["fpr"] or 0)
        except ValueError:
            raise UserError(
                f"{text!r} is not a rule: write auc>0.6, tpr@0.01>0.03, advantage>0.2 or test_accuracy<0.7, "
                "with model: before it for one model, attack. for one attack"
            ) from None
        if found["who"].endswith(".") and found["metric"] in UTILITIES:
            raise UserError(f"{text!r} names an attack, but {found['metric']} has nothing to do with attacks")
        if found["fpr"] and not 0 < fpr < 1:
            raise UserError(f"{text!r} asks for a false-positive rate of {fpr}: it must lie between 0 and 1")
        if not 0 <= bound <= 1:
            raise UserError(
                f"{text!r} has the bound {bound:g}: it must lie between 0 and 1, since all of these are shares"
            )
        return cls(text.strip(), found["metric"], found["sign"], bound, found["who"], fpr)

    def check(self, models: Collection[str], attacks: Collection[str]) -> None:
        """Refuse a name that is neither, before anything is attacked; attacks of stages ("gradient_norm/layer4") by what they begin with."""
        said = self.who[:-1]
        parts = {said, *said.partition(":")[::2]} - {""}
        if said and not any(part in models or part.partition("/")[0] in attacks for part in parts):
            raise UserError(
                f"{self.text!r} speaks of {said!r}, which is neither a model ({', '.join(models)}) nor an attack that was asked for ({', '.join(attacks)})"
            )

    def target(self, scores: Mapping[str, Mapping[str, object]]) -> tuple[str, str]:
        """(model, attack) that it names, "" for all; names may hold dots and colons, so those that exist decide."""
        name = self.who[:-1]
        if not name:
            return "", ""
        if self.who.endswith(":"):
            model, attack = name, ""
        elif any(name in attacks for attacks in scores.values()):
            model, attack = "", name
        else:
            model, _, attack = name.partition(":") if ":" in name else ("", "", name)
        if model and model not in scores:
            raise UserError(f"{self.text!r} speaks of {model!r}, which is not among {', '.join(scores)}")
        for attacks in [scores[model]] if model else scores.values():
            if attack and attack not in attacks:
                raise UserError(
                    f"{self.text!r} speaks of the attack {attack!r}, which is not among {', '.join(attacks)}"
                )
        return model, attack


@dataclass(frozen=True)
class Verdict:
    """One rule on one model."""

    model: str
    rule: Rule
    status: str  # "violated", "kept" or "undecided"
    estimate: Estimate
    attack: str = ""

    def __str__(self) -> str:
        by = f" by {self.attack}" if self.attack else ""
        return f"{self.model}: {self.rule.text} {self.status}: {self.rule.metric} is {self.estimate}{by}"

    def to_dict(self) -> dict:
        return {
            "model": self.model,
            "rule": self.rule.text,
            "status": self.status,
            "attack": self.attack,
            "estimate": self.estimate.to_dict(),
        }


def judge(
    rules: Sequence[Rule],
    scores: Mapping[str, Mapping[str, MembershipScores]],
    utility: Mapping[str, Mapping[str, Estimate]],
) -> list[Verdict]:
    """Every rule on every model it speaks of. scores: model -> attack -> scores; utility: model -> metric -> estimate."""
    verdicts = []
    for rule in rules:
        named, attack = rule.target(scores)
        for model in [named] if named else scores:
            if rule.metric in UTILITIES:
                if rule.metric not in utility.get(model, {}):
                    raise UserError(f"{rule.text!r} needs {rule.metric}, which is not known of {model}")
                estimate = utility[model][rule.metric]
                verdicts.append(Verdict(model, rule, _status(rule, estimate), estimate))
            else:
                verdicts.append(_leak(rule, model, scores[model], attack))
    return verdicts


def _leak(rule: Rule, model: str, attacks: Mapping[str, MembershipScores], attack: str) -> Verdict:
    """By the named attack, or by all of them with intervals corrected for their number: one that violates is enough."""
    names = [attack] if attack else list(attacks)
    found = {name: _estimate(rule, attacks[name], 1 - 0.05 / len(names)) for name in names}
    sign = 1 if rule.sign == ">" else -1
    worst = max(names, key=lambda name: (_status(rule, found[name]) == "violated", sign * found[name].value))
    undecided = any(_status(rule, found[name]) == "undecided" for name in names)
    status = _status(rule, found[worst])
    return Verdict(model, rule, "undecided" if status == "kept" and undecided else status, found[worst], worst)


def _estimate(rule: Rule, scores: MembershipScores, confidence: float) -> Estimate:
    """An AUC below 1/2 is turned around: the attacker would."""
    if rule.metric == "auc":
        return scores.auc_at(confidence).turned
    if rule.fpr:  # either way round, each with half of the error: the attacker takes the better one
        turned = replace(scores, scores=-scores.scores)
        ways = [way.tpr_at(rule.fpr, (1 + confidence) / 2) for way in (scores, turned)]
        return replace(max(ways, key=lambda e: (e.low, e.value)), high=max(way.high for way in ways))
    found = scores.advantage_at(confidence)
    if rule.metric == "advantage":
        return found
    return replace(found, value=(1 + found.value) / 2, low=(1 + found.low) / 2, high=(1 + found.high) / 2)


def _status(rule: Rule, estimate: Estimate) -> str:
    beyond, within = (estimate.low > rule.bound, estimate.high <= rule.bound)
    if rule.sign == "<":
        beyond, within = (estimate.high < rule.bound, estimate.low >= rule.bound)
    return "violated" if beyond else "kept" if within else "undecided"


def junit(verdicts: Sequence[Verdict], fail_undecided: bool = False) -> str:
    """The verdicts as JUnit XML, one test case each."""
    failing = [v for v in verdicts if fails(v, fail_undecided)]
    suite = ElementTree.Element(
        "testsuite", name="pptp", tests=str(len(verdicts)), failures=str(len(failing)), errors="0"
    )
    for verdict in verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"pptp.{verdict.model}", name=f"not {verdict.rule.text}"
        )
        if verdict in failing:
            ElementTree.SubElement(case, "failure", message=str(verdict), type=verdict.status)
        else:
            ElementTree.SubElement(case, "system-out").text = str(verdict)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def fails(verdict: Verdict, fail_undecided: bool = False) -> bool:
    return verdict.status == "violated" or (fail_undecided and verdict.status == "undecided")
