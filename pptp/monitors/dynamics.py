"""When memorisation happens (Chen et al. 2025, arXiv 2507.23291): samples on the FPR-TPR plane over training, and early warning.

The plane is made of reference models, whose outputs were recorded at some epochs: the state of a sample is the share of models *not*
trained on it that call it a member (FPR), and of those trained on it (TPR), by leave-one-model-out LiRA. Difficulty is made of the target's
own training, so that neither is computed from what it is compared with. Regions, threshold and estimator are ours where the paper's
text was not at hand; each is stated in its function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import stats
from torch.utils.data import Dataset

from ..checkpoint import check_same
from ..data import sample_ids, some
from ..intervals import Estimate, bootstrap, proportion, rank_correlation
from ..likelihood import OWN_VARIANCE_FROM, leave_one_out
from ..signals import collect, logit_margin
from ..training import Monitor

REGIONS = ("secure", "ambiguous", "over-exposed", "vulnerable")
CELLS = 10  # of each axis, for the entropy


def plane(phi: np.ndarray, members: np.ndarray, fpr: float = 0.1, counted: bool | None = None) -> np.ndarray:
    """(t, n, 2): (FPR, TPR) of every sample at every checkpoint.

    phi: (t, m, n) log(p_y / (1 - p_y)); members: (m, n) bool. A sample is called a member above the threshold that calls a share `fpr`
    of all pairs of a sample and a model not trained on it. counted: shares of models; otherwise, by default below 64 models, the
    Gaussian estimate TPR = 1 - Phi((tau - mu_in)/sigma), with each sample's mean and one sigma for all.
    """
    counted = len(members) >= OWN_VARIANCE_FROM if counted is None else counted
    states = []
    for at_epoch in phi:
        scores = leave_one_out(at_epoch, members)
        tau = np.quantile(scores[~members], 1 - fpr)
        rate = _counted if counted else _gaussian
        states.append(np.stack([rate(scores, chosen, tau) for chosen in (~members, members)], -1))
    return np.stack(states)


def vulnerable_by_chance(phi: np.ndarray, members: np.ndarray, fpr: float = 0.1, seed: int = 0) -> float:
    """Share of samples that come out vulnerable though nothing tells of membership: with each sample's models drawn from another one's.

    phi: (m, n) at one checkpoint; members: (m, n) bool.
    """
    shuffled = members[:, np.random.default_rng(seed).permutation(members.shape[1])]
    states = plane(phi[None], shuffled, fpr)
    return float(Dynamics(np.zeros(1), np.arange(phi.shape[1]), states).vulnerable.mean())


def _counted(scores: np.ndarray, chosen: np.ndarray, tau: float) -> np.ndarray:
    return ((scores > tau) & chosen).sum(0) / chosen.sum(0)


def _gaussian(scores: np.ndarray, chosen: np.ndarray, tau: float) -> np.ndarray:
    kept, count = np.where(chosen, scores, 0.0), chosen.sum(0)
    centre = kept.sum(0) / count
    squares = np.where(chosen, (scores - centre) ** 2, 0.0).sum()
    sigma = (squares / max(1, (count - 1).clip(min=0).sum())) ** 0.5
    return stats.norm.sf(tau, centre, max(sigma, 1e-12))


@dataclass(frozen=True)
class Dynamics:
    """States of samples over training, and what they add up to. Lengths are in sides of the plane, speeds in sides per epoch."""

    epochs: np.ndarray  # (t,)
    ids: np.ndarray  # (n,)
    states: np.ndarray  # (t, n, 2)

    @cached_property
    def regions(self) -> np.ndarray:
        """(t, n) index into REGIONS: TPR and FPR below and above 1/2; vulnerable is high TPR at low FPR, over-exposed is both high."""
        fpr, tpr = self.states[..., 0] >= 0.5, self.states[..., 1] >= 0.5
        return np.where(fpr, np.where(tpr, 2, 1), np.where(tpr, 3, 0))

    @property
    def vulnerable(self) -> np.ndarray:
        """(n,) bool, at the end."""
        return self.regions[-1] == REGIONS.index("vulnerable")

    @property
    def vulnerability(self) -> np.ndarray:
        """(n,) TPR - FPR at the end."""
        return self.states[-1, :, 1] - self.states[-1, :, 0]

    @property
    def _span(self) -> float:
        return float(self.epochs[-1] - self.epochs[0])

    @property
    def path_speed(self) -> np.ndarray:
        """(n,) length of the path per epoch; noise of few models adds to it."""
        return np.linalg.norm(np.diff(self.states, axis=0), axis=-1).sum(0) / self._span

    @property
    def encoding_speed(self) -> np.ndarray:
        """(n,) change of TPR - FPR per epoch."""
        gap = self.states[..., 1] - self.states[..., 0]
        return (gap[-1] - gap[0]) / self._span

    def displacement(self) -> dict[str, Estimate]:
        """Of the centre of mass: from first to last checkpoint, and along the way."""

        def net(rows):
            centre = self.states[:, rows].mean(1)
            return np.linalg.norm(centre[-1] - centre[0])

        def cumulative(rows):
            return np.linalg.norm(np.diff(self.states[:, rows].mean(1), axis=0), axis=-1).sum()

        n = len(self.ids)
        return {"net": bootstrap(net, n, least=0.0), "cumulative": bootstrap(cumulative, n, least=0.0)}

    def entropy(self) -> np.ndarray:
        """(t,) nats: of the share of samples in each of 10 x 10 cells; log 100 at most."""
        shares = [np.histogram2d(*state.T, bins=CELLS, range=((0, 1), (0, 1)))[0].ravel() for state in self.states]
        return np.array([stats.entropy(share / share.sum()) for share in shares])

    def transitions(self) -> np.ndarray:
        """(4, 4) counts of moves from region to region between neighbouring checkpoints."""
        counts = np.zeros((4, 4), dtype=int)
        np.add.at(counts, (self.regions[:-1].ravel(), self.regions[1:].ravel()), 1)
        return counts


# --- difficulty, from the target's own training ------------------------------------------------


class Recording(Monitor):
    """What the model says of a fixed choice of training samples after every `every`-th epoch, as per-sample traces."""

    KEYS = ("loss", "margin", "correct", "el2n", "entropy", "entropy_of_mean")

    def __init__(self, data: Dataset, every: int = 1, most: int = 2000, seed: int = 0, workers: int = 0):
        self.data = some(data, most, "watched", seed)
        self.ids, self.watched = sample_ids(self.data), len(self.data)
        self.every, self.workers = every, workers
        self.epochs: list[int] = []
        self.traces: dict[str, list[torch.Tensor]] = {key: [] for key in self.KEYS}
        self.total: torch.Tensor | None = None  # sum of probabilities so far, (n, classes)

    def after_epoch(self, model, epoch):
        if (epoch + 1) % self.every:
            return {}
        said = collect(model, self.data, workers=self.workers)
        p = said.logits.float().softmax(1)
        self.total = p if self.total is None else self.total + p
        true = torch.nn.functional.one_hot(said.labels, p.shape[1])
        self.epochs.append(epoch + 1)
        found = {
            "loss": -said.log_true,
            "margin": logit_margin(said.logits, said.labels),
            "correct": said.logits.argmax(1) == said.labels,
            "el2n": (p - true).norm(dim=1),
            "entropy": torch.special.entr(p).sum(1),
            "entropy_of_mean": torch.special.entr(self.total / len(self.epochs)).sum(1),
        }
        for key, values in found.items():
            self.traces[key].append(values.float())
        return {"watched_loss": float(found["loss"].mean())}

    def arrays(self) -> dict[str, np.ndarray]:
        """For dynamics.npz."""
        traces = {key: torch.stack(rows).numpy() for key, rows in self.traces.items() if rows}
        return {"ids": self.ids, "epochs": np.array(self.epochs), **traces}

    def state_dict(self):
        return {
            "ids": self.ids.tolist(),
            "every": self.every,
            "epochs": self.epochs,
            "traces": self.traces,
            "total": self.total,
        }

    def load_state_dict(self, state):
        check_same(state["ids"], self.ids, "other samples")
        check_same(state["every"], self.every, "at other epochs")
        self.epochs, self.traces, self.total = list(state["epochs"]), dict(state["traces"]), state["total"]


def difficulty(traces: Mapping[str, np.ndarray], until: int | None = None) -> dict[str, np.ndarray]:
    """name -> (n,), higher = harder, from the traces up to epoch `until`.

    first_learned: the first epoch at which it was right (the last one + 1 if never); forgetting: times it went from right to wrong (as
    many as there are epochs if never right); epistemic: H[mean p] - mean H[p] over the epochs.
    """
    rows = traces["epochs"] <= (traces["epochs"][-1] if until is None else until)
    loss, margin, el2n, entropy = (traces[key][rows] for key in ("loss", "margin", "el2n", "entropy"))
    right, epochs = traces["correct"][rows].astype(bool), traces["epochs"][rows]
    ever = right.any(0)
    return {
        "cumulative_loss": loss.sum(0),
        "unconfidence": 1 - np.exp(-loss).mean(0),
        "negative_margin": -margin.mean(0),
        "forgetting": np.where(ever, (right[:-1] & ~right[1:]).sum(0), len(epochs)).astype(float),
        "first_learned": np.where(ever, epochs[right.argmax(0)], epochs[-1] + 1).astype(float),
        "el2n": el2n.mean(0),
        "loss_iqr": np.subtract(*np.quantile(loss, (0.75, 0.25), axis=0)),
        "epistemic": traces["entropy_of_mean"][rows][-1] - entropy.mean(0),
    }


def correlations(found: Dynamics, traces: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """Spearman's rho of each difficulty with the final vulnerability, over the samples that both know."""
    _, mine, theirs = np.intersect1d(found.ids, traces["ids"], return_indices=True)
    return {
        name: rank_correlation(hard[theirs], found.vulnerability[mine]) for name, hard in difficulty(traces).items()
    }


# --- early warning -------------------------------------------------------------------------------


def warned_by(flagged: np.ndarray, finally_vulnerable: np.ndarray) -> dict[str, Estimate]:
    """Recall and precision of a warning; both (n,) bool."""
    hits = int((flagged & finally_vulnerable).sum())

    def rate(total: int) -> Estimate:
        return proportion(hits, total) if total else Estimate(0.0, 0.0, 1.0, "nobody")

    return {"recall": rate(int(finally_vulnerable.sum())), "precision": rate(int(flagged.sum()))}


def early_warning(
    found: Dynamics,
    traces: Mapping[str, np.ndarray] | None,
    shares: Sequence[float] = (0.1, 0.2, 0.5),
    score: str = "cumulative_loss",
    flag: float = 0.1,
) -> list[dict]:
    """For each share of training: who was flagged by then, and how many of them end up vulnerable.

    By "plane": already vulnerable at the last checkpoint by then. By `score`: the share `flag` of the watched training samples that the
    target found hardest until then, which needs no reference models.
    """
    rows, last = [], found.epochs[-1]
    for share in shares:
        by = share * last
        seen = np.flatnonzero(found.epochs <= by)
        if len(seen):
            early = found.regions[seen[-1]] == REGIONS.index("vulnerable")
            rows.append(
                _row(share, "plane", int(found.epochs[seen[-1]]), found.ids[early], early, found.vulnerable, found.ids)
            )
        if traces is None or not (traces["epochs"] <= by).any():
            continue
        ids, mine, theirs = np.intersect1d(found.ids, traces["ids"], return_indices=True)
        hard = difficulty(traces, int(by))[score][theirs]
        early = np.zeros(len(ids), dtype=bool)
        early[np.argsort(-hard, kind="stable")[: max(1, int(flag * len(ids)))]] = True
        at = int(traces["epochs"][traces["epochs"] <= by][-1])
        rows.append(_row(share, score, at, ids[early], early, found.vulnerable[mine], ids))
    return rows


def _row(share, by, epoch, flagged_ids, flagged, truth, ids) -> dict:
    return {
        "share": share,
        "by": by,
        "epoch": epoch,
        "flagged": [int(i) for i in flagged_ids],
        "of": len(ids),
        "base_rate": float(truth.mean()),
        **{name: e.to_dict() for name, e in warned_by(flagged, truth).items()},
    }
