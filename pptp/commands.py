"""What each sub-command does: load from the run directory, call the library, save. No logic of its own."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from . import models
from .config import Experiment, Recipe
from .errors import UserError
from .evaluate import Evaluation, default_attacks, evaluate
from .localize import localize
from .plugins import build, find
from .report import write_report
from .retrain import retrain
from .runs import UNDEFENDED, Run, measured, read_json, write_json, write_jsonl, write_npz
from .stages import SCRATCH, split_at
from .training import Monitor, fit, make_optimizer

ATTACK_CAVEAT = "Score attacks on one model understate what an attacker with reference models can do."


def train_run(path: str, experiment: Experiment, fresh: bool = False) -> Run:
    """M_all on the members and M_h1 on their first half, from the same initial weights."""
    run = Run.create(path, experiment, fresh)
    run.save_splits()
    for name, part, given in (
        (UNDEFENDED, run.splits.members, experiment.full_checkpoint),
        ("half", run.splits.h1, experiment.half_checkpoint),
    ):
        if (run.folder(name) / "last.safetensors").exists():
            print(f"{run.folder(name)}: already there")
        elif given:
            _adopt(run, name, given)
        else:
            _train_one(run, name, part)
    return run


def _initial_model(run: Run, folder: Path):
    """The model at its initial weights, which are saved beside it before anything else happens."""
    model = run.fresh_model()
    if run.experiment.initial_checkpoint:
        path = run.experiment.initial_checkpoint
        models.load_weights(model, models.read_weights(path), path)
    if not (folder / "init.safetensors").exists():
        models.write_weights(model, folder / "init.safetensors")
    return model


class _KeepWeights(Monitor):
    """Save the weights after the listed epochs ("1,5"), for `--rewind epoch=K`."""

    def __init__(self, folder: Path, epochs: str):
        self.folder, self.epochs = folder, [int(k) for k in epochs.split(",") if k]

    def after_epoch(self, model, epoch):
        if epoch + 1 in self.epochs:
            models.write_weights(model, self.folder / f"epoch_{epoch + 1}.safetensors")
        return {}


def _train_one(run: Run, name: str, part) -> None:
    folder, recipe = run.folder(name), run.experiment.recipe
    model = _initial_model(run, folder)
    keep = [_KeepWeights(folder, run.experiment.keep_epochs)] if name == UNDEFENDED else []
    cost: dict[str, float] = {}
    with measured(cost):
        history = fit(
            model,
            part,
            recipe,
            checkpoint=folder / "checkpoint.pt",
            title=f"{name} ({len(part)} images)",
            monitors=keep,
        )
    write_jsonl(folder / "history.jsonl", history.rows)
    write_json(folder / "cost.json", {**cost, "training_seconds": history.summary()["seconds"]})
    run.save_model(
        name,
        model,
        f"# {run.experiment.model}, {name}\n\nTrained by pptp without a privacy defense. It memorises; do not publish it.\n",
    )
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    print(f"{name}: {_sentence(history.summary())}")


def _adopt(run: Run, name: str, checkpoint: str) -> None:
    """Take over a model that was trained elsewhere."""
    folder = run.folder(name)
    state = models.read_weights(checkpoint)
    model = run.fresh_model()
    models.load_weights(model, state, checkpoint)
    _initial_model(run, folder)
    run.save_model(
        name, model, f"# {run.experiment.model}, {name}\n\nTrained elsewhere, taken over by pptp from a checkpoint.\n"
    )
    print(
        f"{name}: taken from {checkpoint}"
        + (
            ""
            if run.experiment.initial_checkpoint
            else "; its initial weights are unknown, so a rewind goes to fresh weights of this seed"
        )
    )


def _sentence(summary: dict) -> str:
    accuracy = "" if summary["accuracy"] is None else f", accuracy while training {summary['accuracy']:.3f}"
    return f"{summary['epochs']} epochs, loss {summary['loss']:.4f}{accuracy}, {summary['seconds']:.0f} s"


def localize_run(
    path: str, delta: float = 0.05, probes: bool = True, probe_samples: int = 2000, fresh: bool = False
) -> dict:
    """`pptp localize`: compare the two models, write risk.json and distances.npz."""
    run = Run.open(path)
    settings = {"delta": delta, "probes": probes, "probe_samples": probe_samples}
    target = run.path / "risk.json"
    if target.exists() and not fresh:
        risk = run.risk()
        if risk["settings"] == settings:
            print(risk["text"])
            return risk
    full, half = run.model(UNDEFENDED), run.model("half")
    _check_same_start(run)
    cost: dict[str, float] = {}
    with measured(cost):
        report = localize(
            full,
            half,
            run.splits.h1,
            run.splits.h2,
            run.splits.test,
            delta=delta,
            probes=probes,
            probe_samples=probe_samples,
            batch_size=run.experiment.recipe.batch_size,
            workers=run.experiment.recipe.workers,
            seed=run.experiment.recipe.seed,
            parts=run.parts(full),
            check_initial_weights=bool(run.experiment.full_checkpoint),
        )
    write_npz(
        run.path / "distances.npz",
        {
            f"{name}/{metric}": values.astype(np.float32)
            for name, metrics in report.raw.items()
            for metric, values in metrics.items()
        },
    )
    risk = {**report.to_dict(), "settings": settings, "cost": cost, "text": str(report)}
    write_json(target, risk)
    print(report)
    return risk


def _check_same_start(run: Run) -> None:
    first, second = (models.read_weights(run.folder(name) / "init.safetensors") for name in (UNDEFENDED, "half"))
    if models.weights_digest(first) != models.weights_digest(second):
        raise UserError(
            f"the full and the half model of {run.path} do not start from the same initial weights: distances between them would mean nothing; train again with --fresh"
        )


def resolve_cut(run: Run, cut: str) -> str:
    """ "auto", "strict" and "block" ask risk.json; anything else is the name itself."""
    if cut not in ("auto", "strict", "block"):
        return cut
    return run.risk()[{"auto": "cut", "strict": "strict_cut", "block": "block_cut"}[cut]]


def retrain_run(
    path: str,
    defense: str,
    settings: list[str],
    recipe_changes: dict,
    cut: str = "auto",
    rewind: str = "init",
    name: str = "",
    control: bool = True,
    fresh: bool = False,
) -> None:
    """`pptp retrain`: Algorithm 1 with a defense, and the same with plain cross-entropy as its control."""
    run = Run.open(path)
    recipe = retrain_recipe(run.experiment.recipe, recipe_changes)
    jobs = [(name or _job_name(defense, cut, rewind), defense, settings)]
    if control and defense != "plain":
        jobs.append((f"{name}-control" if name else _job_name("plain", cut, rewind), "plain", []))
    first_stage = resolve_cut(run, cut)
    for job, job_defense, job_settings in jobs:
        _retrain_one(run, job, job_defense, job_settings, recipe, first_stage, rewind, fresh)


def _job_name(defense: str, cut: str, rewind: str) -> str:
    """The folder of a retraining: its defense, and what differs from the defaults."""
    short = defense.rpartition(":")[2].lower()
    return short + ("" if cut == "auto" else f"-{cut}") + ("" if rewind == "init" else f"-{rewind.replace('=', '')}")


def retrain_recipe(trained: Recipe, changes: dict) -> Recipe:
    """The recipe of training with half of its epochs (made even), unless told otherwise."""
    return replace(trained, **{"epochs": max(2, trained.epochs // 4 * 2), **changes})


def _rewind_state(run: Run, rewind: str):
    if rewind == "init":
        return run.initial_weights()
    if rewind == "none":
        return None
    if rewind.startswith("epoch=") and rewind[6:].isdigit():
        return run.early_weights(int(rewind[6:]))
    raise UserError(f"rewind is {rewind!r}: it must be init, none or epoch=K")


def _retrain_one(
    run: Run, name: str, defense: str, settings: list[str], recipe: Recipe, cut: str, rewind: str, fresh: bool
) -> None:
    folder = run.folder(name)
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    plan = {"defense": defense, "set": list(settings), "cut": cut, "rewind": rewind, "recipe": asdict(recipe)}
    record = folder / "defense.json"
    if record.exists():
        there = read_json(record, "")
        if {key: there[key] for key in plan} != plan:
            raise UserError(
                f"{folder} was retrained with other settings: pass --name for another folder, or --fresh to replace it"
            )
        if (folder / "last.safetensors").exists():
            print(f"{folder}: already there")
            return
    chosen = build("defenses", defense, settings)
    model, state = run.model(UNDEFENDED), _rewind_state(run, rewind)
    parts = run.parts(model)
    chosen.check(run.splits.classes, recipe), split_at(parts, cut), make_optimizer(model, recipe)  # or refuse, before
    write_json(record, plan)
    cost: dict[str, float] = {}
    with measured(cost):
        result = retrain(
            model, state, cut, chosen, run.splits, recipe, parts=parts, checkpoint=folder / "checkpoint.pt"
        )
    _keep_history(folder)
    run.save_model(name, model, _card(run, name, plan, chosen))
    write_json(record, {**plan, "repr": repr(chosen), "result": result, "cost": cost, "splits": run.splits.digest()})
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    print(f"{name}: cut {cut}, {result['retrained_share']:.1%} of the weights retrained, {_sentence(result)}")
    if defense != "plain":
        print(f"{name}: {_activity(result)}")


def _activity(result: dict) -> str:
    if "active" not in result:
        return "the defense does not say in how many steps it was active"
    if result["active"] == 0:
        return "the defense was never active, so this equals its control: change its strength or train longer"
    return f"the defense was active in {result['active']:.1%} of steps"


def _keep_history(folder: Path) -> None:
    """The rows of every epoch, from the last checkpoint."""
    import torch

    if (folder / "checkpoint.pt").exists():
        write_jsonl(folder / "history.jsonl", torch.load(folder / "checkpoint.pt", weights_only=True)["history"])


def _card(run: Run, name: str, plan: dict, defense) -> str:
    what = "retrained whole" if plan["cut"] == SCRATCH else f"frozen before {plan['cut']}, retrained from there on"
    return (
        f"---\nlibrary_name: timm\n---\n# {run.experiment.model}, {name}\n\nMade by pptp: {what}, rewound to {plan['rewind']}, under {defense!r}.\n\n"
        "It carries no differential-privacy guarantee. What attacks find is in evaluate/ of the run it comes from.\n\n"
        'Load it with `timm.create_model("local-dir:<this folder>", pretrained=True)`.\n'
    )


def evaluate_run(path: str, attack_names: list[str], fresh: bool = False) -> dict[str, dict]:
    """`pptp evaluate`: every model of the run, side by side on the same samples."""
    run = Run.open(path)
    attacks = {name: find("attacks", name) for name in attack_names} if attack_names else default_attacks()
    results = {}
    for name in run.trained_names():
        target = run.path / "evaluate" / name / "evaluation.json"
        weights = models.weights_digest(models.read_weights(run.folder(name) / "last.safetensors"))
        key = {"weights": weights, "splits": run.splits.digest(), "attacks": sorted(attacks)}
        if target.exists() and not fresh and read_json(target, "").get("key") == key:
            results[name] = read_json(target, "")
            continue
        cost: dict[str, float] = {}
        with measured(cost):
            model, s = run.model(name), run.splits
            found = evaluate(
                {name: model}, s.members, s.nonmembers, s.test, attacks, workers=run.experiment.recipe.workers
            )[name]
        results[name] = {**found.to_dict(), "key": key, "cost": cost}
        _save_scores(run, name, found)
        write_json(target, results[name])
    print(table(results))
    return results


def _save_scores(run: Run, name: str, found: Evaluation) -> None:
    ids = np.concatenate([run.splits.members.indices, run.splits.nonmembers.indices])
    any_scores = next(iter(found.attacks.values()))
    write_npz(
        run.path / "evaluate" / name / "scores.npz",
        {
            "ids": ids,
            "members": any_scores.members,
            "labels": any_scores.labels,
            **{f"score/{a}": s.scores for a, s in found.attacks.items()},
        },
    )


def table(results: dict[str, dict]) -> str:
    """Utility and leakage of every model, one line each."""

    def show(e: dict) -> str:
        return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"

    width = max(len(name) for name in results) + 2
    lines = [
        f"{'model':<{width}}{'train accuracy':<22}{'test accuracy':<22}{'AUC of strongest attack':<42}{'TPR at 1 % FPR':<30}"
    ]
    for name, r in results.items():
        top = r["strongest"]
        tpr = r["attacks"][top["attack"]]["tpr@0.01"]
        lines.append(
            f"{name:<{width}}{show(r['train_accuracy']):<22}{show(r['test_accuracy']):<22}"
            f"{show(top['auc']) + ' ' + top['attack']:<42}{show(tpr)}{' (' + tpr['note'] + ')' if tpr['note'] else ''}"
        )
    first = next(iter(results.values()))
    lines.append(
        f"{first['members']} members, {first['nonmembers']} non-members; 95 % intervals, AUC corrected for taking the strongest of "
        f"{first['strongest']['corrected_for']} attacks. {ATTACK_CAVEAT}"
    )
    return "\n".join(lines)


def report_run(path: str) -> Path:
    run = Run.open(path)
    target = write_report(run)
    print(f"wrote {target}")
    return target
