"""`pptp monitor batchnorm`: the model of a run trained again with other norms, with canaries, and what that says of swapping them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..canaries import Planted
from ..data import Part
from ..errors import UserError
from ..intervals import Estimate
from ..monitors.batchnorm import Samples, Watch, compared, influence_ratio, leaks, matched_epochs, verdict
from ..norms import KINDS, batch_norms, norms_of, swap_norms
from ..runs import UNDEFENDED, Run, write_npz
from ..training import fit
from . import Section, Table

SEED = 401


def study(
    run: Run, variants: tuple[str, ...] = ("bn", "gn", "ln", "none"), canaries: int = 0, epochs: int = 0
) -> Section:
    """canaries: how many of members and of non-members get a wrong label, each; by default a tenth. epochs: as in training."""
    _check(run, variants)
    pool, ids, samples = _planted(run, canaries)
    recipe = replace(run.experiment.recipe, **({"epochs": epochs} if epochs else {}))
    print(f"trains {len(variants)} models of {recipe.epochs} epochs, on {int(samples.members.sum())} samples each")
    traces = {kind: _trained(run, kind, pool, ids, samples, recipe) for kind in variants}
    level, at = matched_epochs({kind: trace["loss"] for kind, trace in traces.items()}, run.splits.classes)
    found = {kind: leaks(torch.from_numpy(traces[kind]["logits"][epoch]), samples) for kind, epoch in at.items()}
    others = [kind for kind in found if kind != "bn"]
    differences = {kind: compared(found["bn"], found[kind], samples) for kind in others} if "bn" in found else {}
    stages = _by_stage(run, pool, ids, samples)
    lines = [
        f"{verdict(KINDS[kind], gap)[0].upper()}{verdict(KINDS[kind], gap)[1:]}." for kind, gap in differences.items()
    ]
    if not at:
        lines = ["No variant learned anything in so few epochs: there is nothing to compare."]
    return Section(
        "batchnorm",
        "What BatchNorm adds",
        lines + _advice(run, differences, stages) + [_running(run)],
        [_table(traces, at, found), _stage_table(stages)],
        _caveats(traces, at, level, samples),
        {
            "level": level if at else None,
            "variants": {kind: _numbers(traces[kind], at[kind], found[kind]) for kind in found},
            "stages": {name: e.to_dict() for name, e in stages.items()},
        },
        models=(UNDEFENDED,),
    )


def _check(run: Run, variants) -> None:
    unknown = [kind for kind in variants if kind not in KINDS]
    if unknown or "bn" not in variants or len(variants) < 2:
        raise UserError(f"variants are {', '.join(variants)}: give bn and at least one other of {', '.join(KINDS)}")
    if not batch_norms(run.fresh_model()):
        raise UserError(f"{run.experiment.model} has no BatchNorm: there is nothing to audit")


def _planted(run: Run, count: int) -> tuple[Planted, np.ndarray, Samples]:
    """The pool with wrong labels on some members and as many non-members: the split was random, so who is trained on is too."""
    inside, outside = (part.indices for part in run.attacked())
    count = count or min(len(inside), len(outside)) // 10
    if not 5 <= count <= min(len(inside), len(outside)) // 2:
        raise UserError(
            f"canaries is {count}: it must lie between 5 and half of {min(len(inside), len(outside))}, the smaller of members and non-members"
        )
    rng = np.random.default_rng(SEED)
    odd = np.concatenate([rng.choice(ids, count, replace=False) for ids in (inside, outside)])
    pool = Planted(run.splits.pool, np.sort(odd), "mislabelled", SEED)
    ids = np.sort(np.concatenate([inside, outside]))
    return pool, ids, Samples(pool.labels[ids], np.isin(ids, inside), np.isin(ids, odd))


def _trained(run: Run, kind: str, pool, ids: np.ndarray, samples: Samples, recipe) -> dict[str, np.ndarray]:
    """Traces of one variant, from the same seed as the run; resumes, and done is done."""
    folder = run.path / "monitors" / "batchnorm"
    target = folder / f"{kind}-{len(ids)}-{int(samples.outliers.sum())}-{recipe.epochs}.npz"
    if not target.exists():
        model = run.fresh_model()
        swap_norms(model, kind)
        part = {name: Part(pool, ids[rows], name) for name, rows in _rows(samples).items()}
        watch = Watch(part["typical"], part["outliers"], Part(pool, ids, "asked"), samples.members, recipe.workers)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = folder / f"{kind}.pt"
        try:
            fit(model, part["members"], recipe, monitors=[watch], checkpoint=checkpoint, title=KINDS[kind])
        except UserError as error:
            if "the loss became" not in str(error):
                raise
            print(f"{KINDS[kind]}: {error}")  # a model without norms may blow up: that is a finding, not a failure
        checkpoint.unlink(missing_ok=True)
        write_npz(target, _arrays(watch, len(ids), run.splits.classes))
    with np.load(target) as saved:
        return dict(saved)


def _rows(samples: Samples) -> dict[str, np.ndarray]:
    inside, odd = samples.members, samples.outliers
    return {"members": inside, "typical": inside & ~odd, "outliers": inside & odd}


def _arrays(watch: Watch, n: int, classes: int) -> dict[str, np.ndarray]:
    if not watch.rows:
        return {
            "loss": np.array([np.inf]),
            "logits": np.zeros((1, n, classes), np.float32),
            "influence": np.full((1, 3), np.nan),
            "own": np.full((1, 3), np.nan),
        }
    arrays = watch.arrays()
    return {
        "loss": np.array([row["loss"] for row in watch.rows]),
        "logits": np.stack([row["logits"].numpy() for row in watch.rows]),
        "influence": arrays["influence"],
        "own": arrays["own"],
    }


def _by_stage(run: Run, pool, ids: np.ndarray, samples: Samples) -> dict[str, Estimate]:
    """Pull of outliers on the undefended model, as it is ("all"), and with the norms of one stage taken out of the batch's hands."""
    model = run.model(UNDEFENDED)
    part = {name: Part(pool, ids[rows], name) for name, rows in _rows(samples).items()}
    found = {"all": influence_ratio(model, part["typical"], part["outliers"])}
    for stage in run.parts(model):
        names = norms_of(model, stage)
        if names:
            apart = [model.get_submodule(name) for name in names]
            found[stage.name] = influence_ratio(model, part["typical"], part["outliers"], apart_from=apart)
    return found


def _advice(run: Run, differences: dict, stages: dict[str, Estimate]) -> list[str]:
    """What to do with the user's own model."""
    better = [kind for kind in ("gn", "ln") if kind in differences and differences[kind]["outliers"].low > 0]
    if not better:
        return ["Nothing here says that the norms should be swapped."]
    calmest = min((name for name in stages if name != "all"), key=lambda name: stages[name].value)
    where = (
        f"; if not all, start with {calmest}, without whose batch statistics outliers pull least ({stages[calmest]}, otherwise {stages['all']})"
        if stages[calmest].high < stages["all"].low
        else "; no single stage stands out"
    )
    return [f"Swap the norms: pptp train ... --norm {better[0]}{where}."]


def _running(run: Run) -> str:
    model = run.model(UNDEFENDED)
    kept = sum(norm.running_mean.numel() * 2 for norm in batch_norms(model).values() if norm.running_mean is not None)
    return f"Running statistics are a release too: {kept} numbers of this model are means and variances of its training samples, frozen layers included."


def _shown(row) -> str:
    return "-" if not np.isfinite(row).all() else "{:.2f} [{:.2f}, {:.2f}]".format(*row)


def _table(traces: dict, at: dict[str, int], found: dict) -> Table:
    rows = []
    for kind, trace in traces.items():
        if kind not in at:
            rows.append([KINDS[kind], "did not learn", *["-"] * 9])
            continue
        epoch, f = at[kind], found[kind]
        numbers = [
            f[key] for key in ("test_accuracy", "canaries_learned", "canaries_not_seen", "auc_outliers", "auc_typical")
        ]
        rows.append(
            [
                KINDS[kind],
                str(epoch + 1),
                f"{trace['loss'][epoch]:.3f}",
                *map(str, numbers),
                _shown(trace["influence"][0]),
                _shown(trace["influence"][epoch]),
                _shown(trace["own"][epoch]),
            ]
        )
    header = [
        "norm",
        "epoch",
        "train loss",
        "test accuracy",
        "canaries learned",
        "canaries not seen",
        "AUC, outliers",
        "AUC, typical",
        "pull after epoch 1",
        "pull, matched",
        "own gradient, matched",
    ]
    return Table(
        "Variants at matched training loss (pull: influence of an outlier over that of an ordinary sample)",
        header,
        rows,
    )


def _stage_table(stages: dict[str, Estimate]) -> Table:
    rows = [["none" if name == "all" else name, str(e)] for name, e in stages.items()]
    return Table(
        "Pull of outliers on the undefended model, with the norms of one stage going by their running statistics",
        ["stage taken out", "pull"],
        rows,
    )


def _numbers(trace: dict, epoch: int, found: dict) -> dict:
    kept = {
        key: found[key].to_dict()
        for key in ("test_accuracy", "canaries_learned", "canaries_not_seen", "auc_outliers", "auc_typical")
    }
    pull = dict(zip(("value", "low", "high"), map(float, trace["influence"][epoch])))
    return {**kept, "epoch": epoch + 1, "loss": float(trace["loss"][epoch]), "influence": pull}


def _caveats(traces: dict, at: dict[str, int], level: float, samples: Samples) -> list[str]:
    matched = f"Every variant is judged at the first epoch whose training loss is at most {level:.3f}; learning rate and all else are the run's, which may suit one norm better than another."
    lines = [
        *([matched] if at else []),
        f"Outliers are {int(samples.outliers.sum())} samples with a wrong label, half of them trained on. One training of each variant: intervals are over samples, not over seeds.",
    ]
    missing = [KINDS[kind] for kind in traces if kind not in at]
    if missing:
        lines.append(f"{', '.join(missing)} did not learn with this recipe: left out.")
    return lines
