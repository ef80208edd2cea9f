"""Who is exposed: by class, by slice, and sample by sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .errors import UserError
from .evaluate import MembershipScores
from .intervals import Estimate, auc, proportion


def per_class(scores: MembershipScores) -> list[dict]:
    """AUC within each class, the most exposed first; intervals corrected for the number of classes."""
    groups = {str(c): scores.labels == c for c in np.unique(scores.labels)}
    return _per_group(scores, groups)


def per_slice(scores: MembershipScores, ids: np.ndarray, slices: Mapping[str, np.ndarray]) -> list[dict]:
    """AUC within each slice, given as sample ids; slices may overlap."""
    for name, wanted in slices.items():
        if not np.isin(ids, wanted).any():
            raise UserError(
                f"slice {name!r} has none of the attacked samples: give sample ids of members and non-members"
            )
    return _per_group(scores, {name: np.isin(ids[scores.rows], wanted) for name, wanted in slices.items()})


def _per_group(scores: MembershipScores, groups: Mapping[str, np.ndarray]) -> list[dict]:
    rows = []
    for name, mine in groups.items():
        inside, outside = scores.scores[mine & scores.members], scores.scores[mine & ~scores.members]
        enough = len(inside) and len(outside)
        found = (
            auc(inside, outside, 1 - 0.05 / len(groups))
            if enough
            else Estimate(0.5, 0.0, 1.0, "members or non-members are missing")
        )
        rows.append({"name": name, "members": len(inside), "nonmembers": len(outside), "auc": found.to_dict()})
    return sorted(rows, key=lambda row: (not row["members"] or not row["nonmembers"], -row["auc"]["low"]))


def most_exposed(scores: MembershipScores, ids: np.ndarray, k: int = 20) -> dict:
    """The members that the attack is surest of, each with the false-positive rate at which it would be called one.

    fpr = (1 + non-members that score as high) / (1 + non-members). "precision" says how many of the k highest scores of all are
    members at all: what a list like this is worth.
    """
    shuffled = np.random.default_rng(0).permutation(len(scores.scores))  # ties must not fall in the members' favour
    order = shuffled[np.argsort(-scores.scores[shuffled], kind="stable")]
    members = [row for row in order if scores.members[row]][:k]
    outsiders = np.sort(scores.scores[~scores.members])
    higher = len(outsiders) - np.searchsorted(outsiders, scores.scores[members], side="left")
    top = scores.members[order[:k]]
    return {
        "samples": [
            {
                "id": int(ids[scores.rows[row]]),
                "label": int(scores.labels[row]),
                "score": float(scores.scores[row]),
                "fpr": float((1 + count) / (1 + len(outsiders))),
            }
            for row, count in zip(members, higher)
        ],
        "precision": proportion(int(top.sum()), len(top)).to_dict(),
        "share_of_members": float(scores.members.mean()),
    }
