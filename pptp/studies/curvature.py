"""`pptp monitor curvature`: curvature of every model of a run, beside memorisation, epsilon and membership."""

from __future__ import annotations

import numpy as np

from ..data import Part, sample_ids, some
from ..ensemble import load_references
from ..errors import UserError
from ..intervals import Estimate, auc, bootstrap, rank_correlation
from ..monitors.curvature import ESTIMATORS, curvature, is_piecewise_linear, memorization
from ..runs import UNDEFENDED, Run, read_json, write_npz
from . import Section, Table

SHOWN_CLASSES, SHOWN_IMAGES, SHOWN_POINTS = 4, 6, 400
FEW = 16


def study(run: Run, estimator: str = "fisher", samples: int = 1000) -> Section:
    """samples: of members and of non-members each, at most."""
    if estimator not in ESTIMATORS or samples < 20:
        raise UserError(
            f"estimator is {estimator!r} and samples {samples}: it must be one of {', '.join(ESTIMATORS)}, on at least 20 samples"
        )
    inside, outside = (some(part, samples, part.name) for part in run.attacked())
    ids = [sample_ids(part) for part in (inside, outside)]
    names = run.trained_names()
    rows = {name: _of_model(run, name, estimator, inside, outside, ids) for name in names}
    watched = _watched(run, UNDEFENDED, estimator)
    write_npz(
        run.path / "monitors" / "curvature.npz",
        {"members": ids[0], "nonmembers": ids[1], **{f"{n}/members": r["values"][0] for n, r in rows.items()}}
        | {f"{n}/nonmembers": r["values"][1] for n, r in rows.items()},
    )
    ranked = watched if watched is not None else (ids[0], rows[UNDEFENDED]["values"][0])
    return Section(
        "curvature",
        "How sharply it bends around its training samples",
        _lines(run, rows, estimator, watched),
        [_table(rows)],
        _caveats(run, rows, estimator, watched),
        {
            "estimator": estimator,
            "models": {name: _numbers(row) for name, row in rows.items()},
            "scatter": rows[UNDEFENDED]["scatter"],
        },
        _montage(run, *ranked),
        models=names,
    )


def _of_model(run: Run, name: str, estimator: str, inside: Part, outside: Part, ids) -> dict:
    model = run.model(name)
    values = [
        curvature(model, part, estimator, workers=run.experiment.recipe.workers).numpy() for part in (inside, outside)
    ]
    record = run.folder(name) / "defense.json"
    claimed = read_json(record, "").get("result", {}).get("epsilon") if record.exists() else None
    row = {
        "values": values,
        "members": _mean(values[0]),
        "nonmembers": _mean(values[1]),
        "auc": auc(-values[0], -values[1]),
        "epsilon": claimed,
        "linear": is_piecewise_linear(model),
    }
    return row | _memorised(run, name, ids[0], values[0], estimator)


def _mean(values: np.ndarray) -> Estimate:
    return bootstrap(lambda rows: values[rows].mean(), len(values))


def _memorised(run: Run, name: str, ids: np.ndarray, bent: np.ndarray, estimator: str) -> dict:
    """Memorisation by this model's own reference models, and its correlation with curvature; nothing without them."""
    references = load_references(run, name)
    if references is None:
        return {"memorization": None, "rho": None, "scatter": [], "references": 0}
    at = references.of(ids)
    right = references.logits[:, at].argmax(-1).numpy() == run.splits.pool.labels[ids]
    score = memorization(right, references.members[:, at].numpy())
    watched = _watched(run, name, estimator)
    if watched is not None:  # the mean over epochs, which does not collapse
        _, mine, theirs = np.intersect1d(ids, watched[0], return_indices=True)
        score, bent = score[mine], watched[1][theirs]
    known = np.isfinite(score)
    score, bent = score[known], bent[known]
    points = np.stack([bent, score], 1)[:SHOWN_POINTS].tolist()
    count = len(references.logits)
    return {"memorization": _mean(score), "rho": rank_correlation(bent, score), "scatter": points, "references": count}


def _watched(run: Run, name: str, estimator: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(ids, mean over epochs) of what was watched while training, if it was by this estimator: they are different quantities."""
    path = run.folder(name) / "curvature.npz"
    if not path.exists():
        return None
    with np.load(path) as saved:
        return (saved["ids"], saved["mean"]) if str(saved["estimator"]) == estimator else None


def _numbers(row: dict) -> dict:
    kept = {
        key: row[key].to_dict() if row[key] is not None else None
        for key in ("members", "nonmembers", "auc", "memorization", "rho")
    }
    return {**kept, "epsilon": row["epsilon"]}


def _table(rows: dict) -> Table:
    def shown(e: Estimate | None, form: str = "{:.3f} [{:.3f}, {:.3f}]") -> str:
        return "-" if e is None else form.format(e.value, e.low, e.high)

    small = "{:.3g} [{:.3g}, {:.3g}]"
    cells = [
        [
            name,
            shown(row["members"], small),
            shown(row["nonmembers"], small),
            shown(row["auc"]),
            shown(row["memorization"]),
            shown(row["rho"]),
            "-" if row["epsilon"] is None else f"{row['epsilon']:.3g}",
            "-" if row["epsilon"] is None else f"{1 - np.exp(-row['epsilon']):.3f}",
        ]
        for name, row in rows.items()
    ]
    header = [
        "model",
        "members",
        "non-members",
        "AUC as an attack",
        "memorization",
        "rho with curvature",
        "epsilon",
        "1 - e^-epsilon",
    ]
    return Table("Mean curvature of each model; memorization where it has reference models of its own", header, cells)


def _lines(run: Run, rows: dict, estimator: str, watched) -> list[str]:
    base = rows[UNDEFENDED]
    lines = [
        f"Curvature by {estimator}: {len(base['values'][0])} members, {len(base['values'][1])} non-members; as an attack on the undefended model AUC {base['auc']}."
    ]
    if base["rho"] is not None:
        over = "the mean over the epochs of training" if watched is not None else "the finished model"
        lines.append(
            f"Spearman correlation of curvature ({over}) with memorization by {base['references']} reference models: {base['rho']}."
        )
    private = {name: row for name, row in rows.items() if row["epsilon"] is not None}
    for name, row in private.items():
        lines.append(
            f"{name} (epsilon {row['epsilon']:.3g}): mean curvature {row['members'].value:.3g}, undefended {base['members'].value:.3g}."
        )
    return lines


def _caveats(run: Run, rows: dict, estimator: str, watched) -> list[str]:
    mean, std = run._normalisation
    unit = " x ".join(f"{s:.3g}" for s in std)
    lines = [
        f"Units: loss per squared unit of the normalised input, whose channels are pixels in [0, 1] divided by {unit}; to compare with another normalisation, rescale."
        if estimator != "fd_norm"
        else "Units: a difference of gradients for a step of 0.001 of the normalised input, not a trace.",
        "The bound 1 - e^-epsilon holds for a model that is differentially private as a whole; see what its epsilon covers.",
    ]
    if estimator == "fisher" and not is_piecewise_linear(run.fresh_model()):
        lines.append("This model has smooth activations: fisher is not the trace here (take --estimator hutchinson).")
    if any(0 < row["references"] < FEW for row in rows.values()):
        lines.append(
            f"Memorization from fewer than {FEW} reference models takes few values only, and weakens correlations."
        )
    if watched is None:
        lines.append(
            "Of the finished model: where the training loss is near 0, curvature is too. Train with --monitor curvature to average over epochs."
        )
    return lines


def _montage(run: Run, ids: np.ndarray, bent: np.ndarray) -> list[dict]:
    """Members of the highest and the lowest curvature, class by class."""
    labels, found = run.splits.pool.labels[ids], []
    for c in np.unique(labels)[:SHOWN_CLASSES]:
        mine = np.flatnonzero(labels == c)
        order = mine[np.argsort(bent[mine], kind="stable")]
        for which, rows in (("highest", order[::-1][:SHOWN_IMAGES]), ("lowest", order[:SHOWN_IMAGES])):
            found.append({"caption": f"class {c}, {which} curvature", "ids": ids[rows].tolist()})
    return found
