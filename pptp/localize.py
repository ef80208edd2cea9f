"""Where a model memorises: half/full feature distances, linear probes, and a verdict per stage.

M_all was trained on h1 + h2, M_h1 on h1 only, from the same initial weights. Samples of h1 are *seen* by both,
samples of h2 are *unseen* by M_h1. Where a layer treats seen and unseen samples alike, the distances between
the two models' features are distributed alike (PPTP, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats as scipy_stats
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import batches, indexed
from .errors import UserError
from .intervals import Estimate, auc, proportion
from .probes import Probe, probe
from .stages import HEAD, SCRATCH, Stage, stages, watch

RISKY, SAFE, UNDECIDED = "risky", "safe", "undecided"
METRICS = ("rms", "cosine")
ENOUGH_ACCURACY = 0.95  # below this training accuracy distances show nothing, so nothing is called safe
UNRELATED = 0.02  # cosine of two models' weights below which they cannot have started from the same ones


@dataclass(frozen=True)
class Disparity:
    """How differently one metric's distances fall for unseen and seen samples."""

    auc: Estimate  # P(distance of unseen > distance of seen); 0.5 = no disparity
    ks: float  # Kolmogorov-Smirnov statistic
    ks_p: float


@dataclass(frozen=True)
class StageRisk:
    """One stage or block: distances, probes, verdicts."""

    name: str
    distances: dict[str, Disparity]
    verdict: str  # verdict of the paper's gate
    probe: Probe | None = None  # None for blocks, the head, and where probes were not run
    by_member_gap: str = ""  # verdict of the stricter gate; "" where it was not run
    blocks: tuple[StageRisk, ...] = ()

    @property
    def strict_verdict(self) -> str:
        """The worse of the two gates."""
        found = {self.verdict, self.by_member_gap}
        return next(v for v in (RISKY, UNDECIDED, SAFE) if v in found)


@dataclass(frozen=True)
class RiskReport:
    """The stages in forward order, where to cut, and everything a reader must know to trust it."""

    stages: tuple[StageRisk, ...]
    cut: str  # first stage to retrain, by the paper's gate; "scratch" if nothing is safe
    strict_cut: str  # by both gates
    block_cut: str  # as `cut`, at block resolution
    train_accuracy: dict[str, Estimate]  # of M_all on h1 + h2 ("full"), of M_h1 on h1 ("half")
    delta: float
    stall: str  # stage from which on the probe no longer gains; "" if it gains to the end or was not run
    notes: tuple[str, ...]
    samples: dict[str, int]
    raw: dict[str, dict[str, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)  # distances

    @property
    def powered(self) -> bool:
        return all(accuracy.value >= ENOUGH_ACCURACY for accuracy in self.train_accuracy.values())

    @property
    def risky(self) -> list[str]:
        """Names of the stages from the cut on."""
        names = [stage.name for stage in self.stages]
        return names if self.cut == SCRATCH else names[names.index(self.cut) :]

    def to_dict(self) -> dict:
        plain = {name: value for name, value in vars(self).items() if name not in ("raw", "stages", "train_accuracy")}
        return {
            **plain,
            "notes": list(self.notes),
            "risky": self.risky,
            "powered": self.powered,
            "train_accuracy": {k: v.to_dict() for k, v in self.train_accuracy.items()},
            "stages": [_stage_dict(stage) for stage in self.stages],
        }

    def __str__(self) -> str:
        lines = [
            f"{'stage':<24}{'AUC rms':<22}{'AUC cosine':<22}{'distance':<11}{'probe':<22}{'member gap':<25}{'strict':<10}"
        ]
        for s in self.stages:
            probe, gap = (str(s.probe.accuracy), str(s.probe.member_gap)) if s.probe else ("-", "-")
            rms, cosine = (str(s.distances[metric].auc) for metric in METRICS)
            mark = "  <- cut" if s.name == self.cut else ""
            lines.append(
                f"{s.name:<24}{rms:<22}{cosine:<22}{s.verdict:<11}{probe:<22}{gap:<25}{s.strict_verdict}{mark}"
            )
        accuracy = ", ".join(f"{name} {value}" for name, value in self.train_accuracy.items())
        lines += [
            f"cut: {self.cut} (strict: {self.strict_cut}, by block: {self.block_cut}); train accuracy: {accuracy}"
        ]
        return "\n".join(lines + [f"- {note}" for note in self.notes])


def _stage_dict(stage: StageRisk) -> dict:
    return {
        "name": stage.name,
        "verdict": stage.verdict,
        "strict_verdict": stage.strict_verdict,
        "by_member_gap": stage.by_member_gap,
        "distances": {
            m: {"auc": d.auc.to_dict(), "ks": d.ks, "ks_p": d.ks_p, "effect": list(d.auc.effect)}
            for m, d in stage.distances.items()
        },
        "probe": stage.probe and stage.probe.accuracy.to_dict(),
        "probe_gain": stage.probe and stage.probe.gain and stage.probe.gain.to_dict(),
        "member_gap": stage.probe and stage.probe.member_gap.to_dict(),
        "blocks": [_stage_dict(block) for block in stage.blocks],
    }


def localize(
    full: nn.Module,
    half: nn.Module,
    seen: Dataset,
    unseen: Dataset,
    held_out: Dataset | None = None,
    *,
    delta: float = 0.05,
    probes: bool = True,
    probe_samples: int = 2000,
    batch_size: int = 128,
    workers: int = 0,
    seed: int = 0,
    parts: Sequence[Stage] | None = None,
    check_initial_weights: bool = True,
) -> RiskReport:
    """Compare M_all (`full`) and M_h1 (`half`) stage by stage.

    seen: h1; unseen: h2; held_out: samples that neither model trained on, for the probes (none: no probes).
    delta: the smallest |AUC - 1/2|, and the smallest member gap, that is called risky.
    """
    if probe_samples < 2:
        raise UserError(f"probe_samples is {probe_samples}: it must be at least 2")
    if not 0 < delta < 0.5:
        raise UserError(f"delta is {delta}: it must lie between 0 and 0.5")
    seen, unseen = indexed(seen), indexed(unseen)
    _check_pair(full, half, check_initial_weights)
    parts = list(parts or stages(full, seen[0][0].shape))
    blocks = [block for stage in parts for block in stage.blocks]
    raw_seen, right_seen = distances(full, half, blocks, seen, batch_size, workers)
    raw_unseen, right_unseen = distances(full, half, blocks, unseen, batch_size, workers)
    train_accuracy = {
        "full": _pooled_accuracy(right_seen["full"], right_unseen["full"]),
        "half": _pooled_accuracy(right_seen["half"]),
    }
    probed = {}
    if probes and held_out is not None:
        body = [stage for stage in parts if stage.name != HEAD]
        probed = probe(full, half, body, seen, unseen, held_out, probe_samples, batch_size, workers, seed)
    disparity = {name: {m: _disparity(raw_unseen[name][m], raw_seen[name][m]) for m in METRICS} for name in raw_seen}
    samples = {"seen": len(seen), "unseen": len(unseen), "held_out": len(held_out) if held_out is not None else 0}
    raw = {
        name: {f"{m}_{kind}": of[name][m] for m in METRICS for kind, of in (("seen", raw_seen), ("unseen", raw_unseen))}
        for name in raw_seen
    }
    return _reported(parts, disparity, probed, train_accuracy, delta, samples, raw)


def _reported(parts, disparity, probed, train_accuracy, delta, samples, raw) -> RiskReport:
    """Verdicts, cuts and notes from what was measured."""
    powered = all(a.value >= ENOUGH_ACCURACY for a in train_accuracy.values())

    def judged(part: Stage, boundary: Stage, **more) -> StageRisk:
        found = disparity[boundary.name]
        return StageRisk(part.name, found, judge([found[m].auc.effect for m in METRICS], delta, powered), **more)

    risks = tuple(
        judged(
            stage,
            stage.blocks[-1],
            probe=probed.get(stage.name),
            by_member_gap=_gap_verdict(probed.get(stage.name), delta, powered),
            blocks=tuple(judged(block, block) for block in stage.blocks) if len(stage.blocks) > 1 else (),
        )
        for stage in parts
    )
    cut = _cut([(r.name, r.verdict) for r in risks])
    strict = _cut([(r.name, r.strict_verdict) for r in risks])
    block_cut = _cut([(b.name, b.verdict) for r in risks for b in (r.blocks or (r,))])
    stall = _stall(risks)
    notes = _notes(risks, cut, strict, stall, train_accuracy, powered, delta, parts)
    return RiskReport(risks, cut, strict, block_cut, train_accuracy, delta, stall, notes, samples, raw)


# --- distances -----------------------------------------------------------------------------------


@torch.no_grad()
def distances(
    full: nn.Module, half: nn.Module, parts: Sequence[Stage], data: Dataset, batch_size: int = 128, workers: int = 0
):
    """Per sample and part: RMS and cosine distance of the two models' features; per sample: was each model right.

    Streamed: only scalars are kept. Returns ({part: {metric: (n,)}}, {"full": (n,) bool, "half": (n,) bool}).
    """
    full.eval(), half.eval()
    waiting: dict[str, Tensor] = {}
    kept: dict[str, dict[str, list[Tensor]]] = {part.name: {m: [] for m in METRICS} for part in parts}
    right: dict[str, list[Tensor]] = {"full": [], "half": []}
    overwritten = {part.name for part in parts if part.overwritten}

    def remember(name: str, features: Tensor) -> None:
        waiting[name] = features.clone() if name in overwritten else features

    def compare(name: str, features: Tensor) -> None:
        rms, cosine = feature_distances(waiting.pop(name), features)
        kept[name]["rms"].append(rms.cpu())
        kept[name]["cosine"].append(cosine.cpu())

    with watch([p.on(full) for p in parts], remember), watch([p.on(half) for p in parts], compare):
        for inputs, targets in batches(data, full, batch_size, workers):
            right["full"].append((full(inputs).argmax(1) == targets).cpu())
            right["half"].append((half(inputs).argmax(1) == targets).cpu())
    gathered = {
        name: {m: torch.cat(values).double().numpy() for m, values in metrics.items()} for name, metrics in kept.items()
    }
    return gathered, {name: torch.cat(values).numpy() for name, values in right.items()}


def feature_distances(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """RMS ||p - q|| / sqrt(d) and cosine 1 - cos(p, q), each (n,), of features (n, ...).

    1 - cos = (||p - q||^2 - (||p|| - ||q||)^2) / (2 ||p|| ||q||), which does not cancel when p is close to q.
    """
    p, q = p.flatten(1).float(), q.flatten(1).float()
    gap = torch.linalg.vector_norm(p - q, dim=1)
    norm_p, norm_q = torch.linalg.vector_norm(p, dim=1), torch.linalg.vector_norm(q, dim=1)
    cosine = (gap.square() - (norm_p - norm_q).square()) / (2 * norm_p * norm_q).clamp_min(1e-30)
    return gap / p.shape[1] ** 0.5, cosine.clamp_min(0)


def _disparity(unseen: np.ndarray, seen: np.ndarray) -> Disparity:
    ks = scipy_stats.ks_2samp(unseen, seen, method="asymp")
    return Disparity(auc(unseen, seen), float(ks.statistic), float(ks.pvalue))


def _pooled_accuracy(*right: np.ndarray) -> Estimate:
    together = np.concatenate(right)
    return proportion(int(together.sum()), len(together))


# --- verdicts ------------------------------------------------------------------------------------


def judge(effects: Sequence[tuple[float, float]], delta: float, powered: bool) -> str:
    """Risky if any effect surely exceeds delta, safe if all surely stay below, else undecided."""
    if any(low > delta for low, _ in effects):
        return RISKY
    return SAFE if powered and all(high < delta for _, high in effects) else UNDECIDED


def _gap_verdict(probe: Probe | None, delta: float, powered: bool) -> str:
    return "" if probe is None else judge([(probe.member_gap.low, probe.member_gap.high)], delta, powered)


def _cut(verdicts: Sequence[tuple[str, str]]) -> str:
    """The first stage of the longest run up to the end in which nothing is safe; the head is always in it."""
    first = len(verdicts) - 1
    while first > 0 and verdicts[first - 1][1] != SAFE:
        first -= 1
    return SCRATCH if first == 0 else verdicts[first][0]


def _stall(risks: Sequence[StageRisk]) -> str:
    return stall_of([(r.name, r.probe.gain) for r in risks if r.probe is not None])


def stall_of(gains: Sequence[tuple[str, Estimate | None]]) -> str:
    """The stage after the last one whose probe gain is significant; "" where the probes gain to the end, or there are none."""
    growing = [i for i, (_, gain) in enumerate(gains) if gain is not None and gain.low > 0]
    if not gains or (growing and growing[-1] == len(gains) - 1):
        return ""
    return gains[growing[-1] + 1][0] if growing else gains[0][0]


def _notes(risks, cut, strict, stall, accuracy, powered, delta, parts) -> tuple[str, ...]:
    """Everything a reader must know to trust the verdicts, in plain words."""
    return (
        *_power_notes(accuracy, powered),
        *(note for r in risks[:-1] for note in _disagreements(r, delta, powered)),
        *_cut_notes(risks, cut, strict, powered, delta),
        *_probe_notes(risks, cut, stall),
        *(f"{stage.name}: {stage.note}." for stage in parts if stage.note),
        "Intervals cover the choice of samples, not of seeds, halves or training runs; each is for one stage alone.",
    )


def _power_notes(accuracy: dict[str, Estimate], powered: bool) -> Iterator[str]:
    if not powered:
        low = ", ".join(f"{name} {a.value:.1%}" for name, a in accuracy.items() if a.value < ENOUGH_ACCURACY)
        yield (
            f"No stage is called safe: train accuracy is below {ENOUGH_ACCURACY:.0%} ({low}), and distances show "
            "nothing before a model has memorised. Train longer, or without augmentation."
        )


def _disagreements(r: StageRisk, delta: float, powered: bool) -> Iterator[str]:
    rms, cosine = (judge([r.distances[metric].auc.effect], delta, powered) for metric in METRICS)
    if rms != cosine:
        yield f"{r.name}: the metrics disagree, RMS says {rms}, cosine says {cosine}; the worse counts."
    for metric in METRICS:
        found = r.distances[metric].auc
        if found.high < 0.5:
            yield f"{r.name}: the {metric} distance is inverted (AUC {found}): seen samples lie further apart than unseen ones."
    if r.by_member_gap and r.by_member_gap != r.verdict:
        yield f"{r.name}: {r.verdict} by distance, {r.by_member_gap} by member gap ({r.probe.member_gap})."


def _cut_notes(risks: Sequence[StageRisk], cut: str, strict: str, powered: bool, delta: float) -> Iterator[str]:
    names = [r.name for r in risks]
    for r in risks[: 0 if cut == SCRATCH else names.index(cut)]:
        if r.verdict != SAFE:
            yield (
                f"{r.name} is {r.verdict} but a later stage is safe, so it stays frozen: to a white-box attacker its "
                f"weights may still leak; use --cut {r.name} to retrain it."
            )
    if cut != strict:
        where = "before the first stage" if strict == SCRATCH else f"at {strict}"
        yield f"The stricter gate would cut earlier: {where} instead of at {cut} (use --cut strict)."
    if cut == SCRATCH and powered:
        yield (
            f"No stage can be called safe at delta {delta:g} with this many samples: the whole model would be "
            "retrained. More samples narrow the intervals; a larger delta accepts more."
        )


def _probe_notes(risks: Sequence[StageRisk], cut: str, stall: str) -> Iterator[str]:
    if not any(r.probe for r in risks):
        return
    if not stall:
        yield "The probe gains accuracy up to the last stage: it does not stall where the disparity starts, unlike in the paper."
    elif stall == risks[0].name:
        yield "Probe accuracy does not grow significantly after the first stage, so it says nothing about the cut."
    else:
        agree = "the two agree, as in the paper." if stall == cut else "the two disagree."
        yield f"Probe accuracy stops growing at {stall}, and the cut is {cut}: {agree}"


# --- is this a pair? -----------------------------------------------------------------------------


def _check_pair(full: nn.Module, half: nn.Module, check_initial_weights: bool) -> None:
    a, b = full.state_dict(), half.state_dict()
    if {k: v.shape for k, v in a.items()} != {k: v.shape for k, v in b.items()}:
        odd = next(k for k in [*a, *b] if k not in a or k not in b or a[k].shape != b[k].shape)
        raise UserError(
            f"the full and the half model differ in architecture, first at {odd}: train both from the same initial weights"
        )
    similarity = weight_similarity(full, half)
    if check_initial_weights and similarity < UNRELATED:
        raise UserError(
            f"the full and the half model do not come from the same initial weights (cosine of their weights is {similarity:.3f}): "
            "distances between them would mean nothing; train both from the same ones"
        )


def weight_similarity(full: nn.Module, half: nn.Module) -> float:
    """Cosine of all matrices and kernels of two models: near 0 for different seeds, far from it for the same one."""
    pairs = [
        (p.detach().cpu().flatten().double(), q.detach().cpu().flatten().double())
        for p, q in zip(full.parameters(), half.parameters())
        if p.ndim > 1
    ]
    dot = sum(float(p @ q) for p, q in pairs)
    return dot / (sum(float(p @ p) for p, _ in pairs) * sum(float(q @ q) for _, q in pairs)) ** 0.5
