"""`pptp monitor batchnorm`: the model of a run trained again with other norms, with canaries, and what that says of swapping them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..canaries import Planted
from ..data import Part
from ..errors import UserError
from ..intervals import Estimate
from ..monitors.batchnorm import Samples, Watch, compared, influence_ratio, leaks, learned, matched_epochs, verdict
from ..norms import KINDS, batch_norms, norms_of, swap_norms
from ..runs import UNDEFENDED, Run, write_npz
from ..training import fit
from . import Section, Table

SEED = 401
NUMBERS = ("test_accuracy", "canaries_learned", "canaries_not_seen", "auc_outliers", "auc_typical")


def study(
    run: Run, variants: tuple[str, ...] = ("bn", "gn", "ln", "none"), canaries: int = 0, epochs: int = 0
) -> Section:
    """canaries: how many of members and of non-members get a wrong label, each; by default a tenth. epochs: as in training."""
    _check(run, variants)
    pool, ids, samples = _planted(run, canaries)
    recipe = replace(run.experiment.recipe, **({"epochs": epochs} if epochs else {}))
    print(f"trains {len(variants)} models of {recipe.epochs} epochs, on {int(samples.members.sum())} samples each")
    traces = {kind: _trained(run, kind, pool, ids, samples, recipe) for kind in variants}
    pairs = _compared(traces, samples, run.splits.classes)
    differences = {kind: pair["gap"] for kind, pair in pairs.items() if pair["matched"]}
    stages = _by_stage(run, pool, ids, samples)
    return Section(
        "batchnorm",
        "What BatchNorm adds",
        _lines(traces, pairs) + _advice(run, differences, stages) + [_running(run)],
        [_table(traces, pairs), _stage_table(stages)],
        _caveats(samples),
        {
            "variants": {name: _numbers(*row) for pair in pairs.values() for name, row in pair["rows"].items()},
            "stages": {name: e.to_dict() for name, e in stages.items()},
        },
        models=(UNDEFENDED,),
    )


def _compared(traces: dict, samples: Samples, classes: int) -> dict[str, dict]:
    """For every other norm that learned: it and BatchNorm where their training losses are nearest."""
    able = {kind: trace for kind, trace in traces.items() if learned(trace["loss"], classes)}
    found = {}
    for kind in [kind for kind in able if kind != "bn" and "bn" in able]:
        at, matched = matched_epochs(able["bn"]["loss"], able[kind]["loss"])
        both = [
            leaks(torch.from_numpy(able[k]["logits"][epoch]), samples)
            for k, epoch in zip(("bn", kind), at, strict=True)
        ]
        rows = {f"bn, as {kind}": (able["bn"], at[0], both[0]), kind: (able[kind], at[1], both[1])}
        found[kind] = {"rows": rows, "matched": matched, "gap": compared(*both, samples)}
    return found


def _lines(traces: dict, pairs: dict) -> list[str]:
    lines = []
    for kind in [kind for kind in traces if kind != "bn"]:
        if kind not in pairs:
            lines.append(f"BatchNorm or {KINDS[kind]} did not learn with this recipe: they are not compared.")
        elif not pairs[kind]["matched"]:
            losses = " and ".join(f"{trace['loss'][at]:.3f}" for trace, at, _ in pairs[kind]["rows"].values())
            lines.append(
                f"BatchNorm and {KINDS[kind]} have no epochs of nearly equal training loss ({losses}): no verdict."
            )
        else:
            said = verdict(KINDS[kind], pairs[kind]["gap"])
            lines.append(f"{said[0].upper()}{said[1:]}.")
    return lines


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
        checkpoint = target.with_suffix(".pt")
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


def _table(traces: dict, pairs: dict) -> Table:
    rows = []
    for name, (trace, epoch, found) in [item for pair in pairs.values() for item in pair["rows"].items()]:
        rows.append(
            [
                KINDS[name] if name in KINDS else f"BatchNorm, against {KINDS[name.rpartition(' ')[2]]}",
                str(epoch + 1),
                f"{trace['loss'][epoch]:.3f}",
                *(str(found[key]) for key in NUMBERS),
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
    kept = {key: found[key].to_dict() for key in NUMBERS}
    pull = dict(zip(("value", "low", "high"), map(float, trace["influence"][epoch])))
    return {**kept, "epoch": epoch + 1, "loss": float(trace["loss"][epoch]), "influence": pull}


def _caveats(samples: Samples) -> list[str]:
    return [
        "Each norm is judged at the epoch whose training loss is nearest to the lowest that both reach; learning rate and all else are the run's, which may suit one norm better than another.",
        f"Outliers are {int(samples.outliers.sum())} samples with a wrong label, half of them trained on. One training of each norm: intervals are over samples, not over seeds.",
    ]
