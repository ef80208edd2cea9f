"""What attacks find: cross-fitted scores, and numbers that carry their uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import sample_ids
from .errors import UserError
from .intervals import Estimate, auc, auc_difference, proportion, rate_difference, tpr_at
from .measures import Effort, References, measure, starting_images, with_references
from .signals import CannotLearn, Known, Needs, Signals, join, needs_of
from .stages import Stage

FPRS = (0.01, 0.001)


class Attack(Protocol):
    """Scores the query, higher = more likely a member; may learn from `known`, never from the query."""

    def __call__(self, known: Known, query: Signals) -> Tensor: ...  # (n,)


# --- thresholds ----------------------------------------------------------------------------------


def best_threshold(scores: np.ndarray, members: np.ndarray) -> tuple[float, float]:
    """(threshold, advantage): the t that maximises TPR - FPR of `score >= t`, by one sort.

    The advantage is in-sample and so too high by construction: use it to choose, not to report.
    """
    order = np.argsort(-scores, kind="stable")
    sorted_scores, sorted_members = scores[order], members[order]
    positives, negatives = max(1, int(members.sum())), max(1, int((~members).sum()))
    gain = np.cumsum(np.where(sorted_members, 1 / positives, -1 / negatives))
    last_of_tie = np.append(sorted_scores[1:] != sorted_scores[:-1], True)
    candidates = np.flatnonzero(last_of_tie)
    best = candidates[gain[candidates].argmax()]
    if gain[best] <= 0:  # calling nobody a member is as good as it gets
        return float("inf"), 0.0
    return float(sorted_scores[best]), float(gain[best])


def _direction(scores: np.ndarray, members: np.ndarray) -> int:
    """-1 where low scores mark members, as some defenses bring about; else 1."""
    return -1 if best_threshold(-scores, members)[1] > best_threshold(scores, members)[1] else 1


def fold_of(members: np.ndarray, folds: int, seed: int, labels: np.ndarray | None = None) -> np.ndarray:
    """A fold for each sample, members and non-members dealt evenly, within each class too.

    Without the classes, holding a sample out would make its own class rarer among what an attack learns from, and that
    alone would tell members of balanced splits from non-members.
    """
    fold = np.empty(len(members), dtype=int)
    rng = np.random.default_rng(seed)
    for kind in (True, False):
        mine = rng.permutation(np.flatnonzero(members == kind))
        if labels is not None:
            mine = mine[np.argsort(labels[mine], kind="stable")]
        fold[mine] = np.arange(len(mine)) % folds
    return fold


@dataclass(frozen=True)
class MembershipScores:
    """Scores joined with the truth; every number comes with an interval."""

    scores: np.ndarray  # (n,)
    members: np.ndarray  # (n,) bool
    labels: np.ndarray | None = None  # (n,), for per-class thresholds
    folds: int = 5
    seed: int = 0
    rows: np.ndarray | None = None  # (n,) ascending: which samples of a larger set these are; None: the first n

    def __post_init__(self):
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(self.scores)))
        for name, kind in (("scores", float), ("members", bool)):
            object.__setattr__(self, name, np.asarray(getattr(self, name)).astype(kind))
        if not np.isfinite(self.scores).all():
            raise UserError(f"score of sample {int(np.flatnonzero(~np.isfinite(self.scores))[0])} is not finite")

    @property
    def auc(self) -> Estimate:
        return auc(self.scores[self.members], self.scores[~self.members])

    def auc_at(self, confidence: float) -> Estimate:
        return auc(self.scores[self.members], self.scores[~self.members], confidence)

    def tpr_at(self, fpr: float, confidence: float = 0.95) -> Estimate:
        return tpr_at(self.scores[self.members], self.scores[~self.members], fpr, confidence)

    @property
    def advantage(self) -> Estimate:
        """TPR - FPR with one threshold, fitted on folds that are not scored."""
        return self._advantage(self._guess())

    @property
    def advantage_per_class(self) -> Estimate:
        """TPR - FPR with a threshold for each class, fitted on folds that are not scored."""
        return self._advantage(self._guess(per_class=True))

    @property
    def balanced_accuracy(self) -> Estimate:
        """(TPR + TNR)/2 = (1 + advantage)/2, of the cross-fitted threshold."""
        a = self.advantage
        return Estimate((1 + a.value) / 2, (1 + a.low) / 2, (1 + a.high) / 2, a.note)

    @property
    def turned(self) -> MembershipScores:
        """Turned around if low scores mark members, as the attacker would."""
        return self if self.auc.value >= 0.5 else replace(self, scores=-self.scores)

    def advantage_at(self, confidence: float) -> Estimate:
        return self._advantage(self._guess(), confidence)

    def _advantage(self, guessed: np.ndarray, confidence: float = 0.95) -> Estimate:
        hits, false_alarms = int(guessed[self.members].sum()), int(guessed[~self.members].sum())
        # Folds share what they learn from, and the direction is learnt too: without a leak a nominal 95 % covers
        # 0 in about 86 % of draws only, 99 % in 96 %.
        nominal = 1 - (1 - confidence) / 5
        return rate_difference(hits, int(self.members.sum()), false_alarms, int((~self.members).sum()), nominal)

    def _guess(self, per_class: bool = False) -> np.ndarray:
        """Member or not, for each sample, by direction and thresholds from the other folds. (n,) bool"""
        fold = fold_of(self.members, self.folds, self.seed, self.labels)
        guessed = np.zeros(len(self.scores), dtype=bool)
        for k in range(self.folds):
            fit, judge = fold != k, fold == k
            scores = self.scores * _direction(self.scores[fit], self.members[fit])
            overall, _ = best_threshold(scores[fit], self.members[fit])
            thresholds = np.full(len(scores), overall)
            if per_class:
                for c in np.unique(self.labels):
                    mine = fit & (self.labels == c)
                    if self.members[mine].any() and not self.members[mine].all():  # else the global one serves
                        thresholds[self.labels == c], _ = best_threshold(scores[mine], self.members[mine])
            guessed[judge] = scores[judge] >= thresholds[judge]
        return guessed

    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """(false-positive rates, true-positive rates)"""
        from sklearn.metrics import roc_curve

        fpr, tpr, _ = roc_curve(self.members, self.scores, drop_intermediate=False)
        return fpr, tpr

    def to_dict(self) -> dict:
        found = {"auc": self.auc, "advantage": self.advantage, "balanced_accuracy": self.balanced_accuracy}
        if self.labels is not None:
            found["advantage_per_class"] = self.advantage_per_class
        found |= {f"tpr@{fpr:g}": self.tpr_at(fpr) for fpr in FPRS}
        sizes = {"members": int(self.members.sum()), "nonmembers": int((~self.members).sum())}
        return {name: estimate.to_dict() for name, estimate in found.items()} | sizes


# --- the evaluation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One model: how useful it is, and what each attack finds."""

    train_accuracy: Estimate
    test_accuracy: Estimate
    attacks: dict[str, MembershipScores] = field(repr=False)
    skipped: dict[str, str] = field(default_factory=dict)  # attack -> what it lacks
    references: str = ""  # the reference models, in words

    @property
    def strongest(self) -> tuple[str, Estimate]:
        """The attack whose AUC is furthest from 1/2, its interval Bonferroni-corrected for having looked at all of them.

        One that surely finds something goes before one that may have found it by chance, on a handful of samples say. An AUC
        below 1/2 is turned around, as the attacker would, and says so.
        """
        found = {name: scores.auc_at(self._corrected).turned for name, scores in self.attacks.items()}
        return max(found.items(), key=lambda item: (item[1].low > 0.5, item[1].value))

    def tpr_of_strongest(self, fpr: float) -> Estimate:
        """Turned around, and its interval corrected, as the AUC."""
        return self.attacks[self.strongest[0]].turned.tpr_at(fpr, self._corrected)

    @property
    def _corrected(self) -> float:
        return 1 - 0.05 / len(self.attacks)

    def to_dict(self) -> dict:
        name, estimate = self.strongest
        most = max(self.attacks.values(), key=lambda scores: len(scores.members))
        return {
            "train_accuracy": self.train_accuracy.to_dict(),
            "test_accuracy": self.test_accuracy.to_dict(),
            "members": int(most.members.sum()),
            "nonmembers": int((~most.members).sum()),
            "attacks": {attack: scores.to_dict() for attack, scores in self.attacks.items()},
            "strongest": {
                "attack": name,
                "auc": estimate.to_dict(),
                **{f"tpr@{fpr:g}": self.tpr_of_strongest(fpr).to_dict() for fpr in FPRS},
                "corrected_for": len(self.attacks),
            },
            "skipped": self.skipped,
            "references": self.references,
        }


def leak_difference(a: Evaluation, b: Evaluation) -> Estimate:
    """|AUC - 1/2| of the strongest attack on `a` minus that on `b`, paired by sample.

    The interval is corrected for both having been chosen: as many comparisons could have been made as there are pairs
    of attacks. Orders below 1/2 are turned around first; the sign that was seen is taken as given.
    """
    first, second = (found.attacks[found.strongest[0]].turned for found in (a, b))
    rows = np.intersect1d(first.rows, second.rows)
    x, y = (s.scores[np.searchsorted(s.rows, rows)] for s in (first, second))
    members = first.members[np.searchsorted(first.rows, rows)]
    return auc_difference(x, y, members, 1 - 0.05 / (len(a.attacks) * len(b.attacks)))


def expanded(attacks: Mapping[str, Attack], signals: Signals) -> dict[str, Attack]:
    """Attacks on a stage become one for each stage that was measured: "gradient_norm/layer4"."""
    found: dict[str, Attack] = {}
    for name, attack in attacks.items():
        need = needs_of(attack)
        if need.measured in ("gradient", "feature"):
            for key in need.keys(signals):
                one = partial(attack, stage=key)
                one.needs = replace(need, measured="")  # it is there
                found[f"{name}/{key.partition('/')[2]}"] = one
        else:
            found[name] = attack
    return found


def applicable(
    attacks: Mapping[str, Attack], signals: Signals, members: np.ndarray, folds: int = 5
) -> tuple[dict[str, Attack], dict[str, str]]:
    """The attacks that have what they need, with at least `folds` samples of each kind; and what the others lack."""
    usable, skipped = {}, {}
    for name, attack in attacks.items():
        rows = needs_of(attack).rows(signals)
        if min((rows & members).sum(), (rows & ~members).sum()) < folds:
            wanted = str(needs_of(attack)) if min(members.sum(), (~members).sum()) >= folds else ""
            skipped[name] = f"needs {wanted or f'at least {folds} members and {folds} non-members'}"
        else:
            usable[name] = attack
    return expanded(usable, signals), skipped


def run_attacks(
    attacks: Mapping[str, Attack],
    signals: Signals,
    members: np.ndarray,
    folds: int = 5,
    seed: int = 0,
    skipped: dict[str, str] | None = None,
) -> dict[str, MembershipScores]:
    """Score every sample that has what an attack needs, with attacks that learnt from the other folds only.

    skipped: gets the reasons of attacks that find too little to learn from; without it they are refused.
    """
    results = {}
    for name, attack in expanded(attacks, signals).items():
        try:
            results[name] = _run_one(name, attack, signals, members, folds, seed)
        except CannotLearn as error:
            if skipped is None:
                raise UserError(f"attack {name!r} cannot be run: it {error}") from error
            skipped[name] = str(error)
    return results


def _run_one(
    name: str, attack: Attack, signals: Signals, members: np.ndarray, folds: int, seed: int
) -> MembershipScores:
    need = needs_of(attack)
    rows = np.flatnonzero(need.rows(signals))
    mine, truth = (signals if len(rows) == len(signals) else signals[torch.as_tensor(rows)]), members[rows]
    if not (need.outside or need.inside):  # who the half model was trained on tells who is a member
        mine = replace(mine, reference_logits=None, reference_members=None, reference_augmented=None)
    if not truth.any() or truth.all():
        raise UserError(f"attack {name!r} needs {need}, for members and non-members")
    fold = fold_of(truth, folds, seed, mine.labels.numpy())
    scores = np.empty(len(rows))
    shuffled = np.random.default_rng(seed).permutation(len(rows))  # else the order would tell who is a member
    for k in np.unique(fold):
        known_rows, query_rows = shuffled[fold[shuffled] != k], shuffled[fold[shuffled] == k]
        known = Known(mine[torch.as_tensor(known_rows)], torch.as_tensor(truth[known_rows]))
        found = _asked(name, attack, known, mine[torch.as_tensor(query_rows)])
        if found.shape != (len(query_rows),):
            raise UserError(f"attack {name!r} returned {tuple(found.shape)} scores for {len(query_rows)} samples")
        if not torch.isfinite(found).all():
            raise UserError(f"attack {name!r} gave a score that is not finite: no sample can be ranked by it")
        scores[query_rows] = found.detach().cpu().double().numpy()
    return MembershipScores(scores, truth, mine.labels.numpy(), folds, seed, rows)


def _asked(name: str, attack: Attack, known: Known, query: Signals) -> Tensor:
    try:
        return torch.as_tensor(attack(known, query))
    except (CannotLearn, UserError):
        raise
    except Exception as error:  # whatever a user's own function does
        raise UserError(
            f"attack {name!r} failed ({type(error).__name__}: {error}): it must be a function (known, query) -> scores, one a sample"
        ) from error


def evaluate(
    models: Mapping[str, nn.Module] | nn.Module,
    members: Dataset,
    nonmembers: Dataset,
    test: Dataset | None = None,
    attacks: Mapping[str, Attack] | None = None,
    batch_size: int = 256,
    workers: int = 0,
    seed: int = 0,
    *,
    references: References | None = None,
    effort: Effort | None = None,
    parts: Sequence[Stage] | None = None,
) -> dict[str, Evaluation]:
    """Attack every model on the same samples; utility on `test` (on the non-members if there is none).

    references: outputs of other models, for the attacks that calibrate by them. effort: what may be spent on augmented
    and label-only queries. Without `attacks` all score attacks run, and those on references where there are some.
    """
    if isinstance(models, nn.Module):
        models = {"model": models}
    if attacks is None:
        attacks = default_attacks()
    effort = effort or Effort(batch_size=batch_size, workers=workers)
    wanted = [needs_of(attack) for attack in attacks.values()]
    if references is not None and references.augmented is not None:
        wanted.append(Needs(augmented=True))
    ids = np.concatenate([sample_ids(members), sample_ids(nonmembers)])
    if any(need.measured == "boundary" for need in wanted):
        starts = starting_images(nonmembers if test is None else test)
    else:
        starts = None
    results = {}
    for name, model in models.items():
        inside, outside = (measure(model, part, wanted, effort, parts, starts) for part in (members, nonmembers))
        truth = np.repeat([True, False], [len(inside), len(outside)])
        unseen = outside if test is None else measure(model, test, (), effort)
        signals = with_references(join(inside, outside), ids, references)
        usable, skipped = applicable(attacks, signals, truth)
        if not usable:
            raise UserError(f"no attack can run: {'; '.join(f'{a} {why}' for a, why in skipped.items())}")
        found = run_attacks(usable, signals, truth, seed=seed, skipped=skipped)
        results[name] = Evaluation(
            _accuracy(inside),
            _accuracy(unseen),
            found,
            skipped,
            references.source if references is not None else "",
        )
    return results


def default_attacks() -> dict[str, Attack]:
    """Those that need no more than outputs: of the model, and of reference models where there are some."""
    from .plugins import registry

    return {
        name: attack
        for name, attack in registry("attacks").items()
        if not needs_of(attack).measured and not needs_of(attack).augmented
    }


def _accuracy(signals: Signals) -> Estimate:
    return proportion(int((signals.logits.argmax(1) == signals.labels).sum()), len(signals))
