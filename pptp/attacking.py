"""What `pptp evaluate`, `ensemble`, `audit`, `attack` and `frontier` do: load, call the library, save. No logic of its own."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from . import plots
from .audit import canary_bound, threshold_bound
from .cache import Policy, TrunkCache
from .commands import resolve_cut, retrain_recipe, training_data
from .data import Part
from .ensemble import Job, record_ensemble, references_for, train_all, train_reference
from .errors import UserError
from .evaluate import Evaluation, applicable, default_attacks, evaluate, run_attacks
from .frontier import Point, Sweep, check_rounds, choose, grid, nearest, pareto, refined
from .frontier import table as frontier_table
from .gate import Rule, fails, judge, junit
from .intervals import TURNED, Estimate, proportion
from .measures import Effort, References
from .models import atomically
from .outputs import read_outputs
from .plugins import code_of, find, registry
from .procedures import Setting
from .results import against, exposure, in_words, load_evaluation, read_slices, save_evaluation
from .runs import UNDEFENDED, Run, measured, read_json, write_json
from .signals import Needs, collect, needs_of
from .splits import digest
from .stages import SCRATCH

ATTACK_CAVEAT = "Score attacks on one model understate what an attacker with reference models can do: see pptp ensemble."
NO_REFERENCES = (
    "Score attacks on one model understate what an attacker with reference models can do: give outputs of such models on the same samples as "
    "reference_logits, and who they were trained on as reference_members."
)
GROUPS = {
    "scores": lambda need: not (need.outside or need.augmented or need.measured),
    "references": lambda need: bool(need.outside),
    "label_only": lambda need: need.augmented or need.measured == "boundary",
    "white_box": lambda need: need.measured in ("gradient", "feature", "curvature"),
    "all": lambda need: True,
}


@dataclass(frozen=True)
class Gate:
    """What to do with the results besides printing them."""

    fail_if: Sequence[str] = ()
    fail_undecided: bool = False
    json: str = ""
    junit: str = ""


OPEN, USUAL = Gate(), Effort()


def chosen_attacks(names: Sequence[str]) -> dict:
    """Attacks by name, by group (scores, references, label_only, white_box, all) or as module:function; all that are cheap by default."""
    if not names:
        return default_attacks()
    found = {}
    for name in names:
        if name in GROUPS:
            found |= {n: a for n, a in registry("attacks").items() if GROUPS[name](needs_of(a))}
        else:
            found[name] = find("attacks", name)
    return found


def evaluate_run(
    path: str,
    attack_names: Sequence[str] = (),
    fresh: bool = False,
    gate: Gate = OPEN,
    effort: Effort = USUAL,
    slices: str = "",
) -> bool:
    """`pptp evaluate`: every model of the run, side by side on the same samples. False if the gate is shut."""
    run = Run.open(path)
    attacks, rules = chosen_attacks(attack_names), [Rule.parse(text) for text in gate.fail_if]
    for rule in rules:
        rule.check(run.trained_names(), attacks)
    groups = read_slices(slices) if slices else {}
    asked = {
        "attacks": {name: code_of(attack) for name, attack in attacks.items()},
        "effort": {"queries": effort.queries, "budget": effort.budget},
        "slices": {name: digest({name: ids}) for name, ids in groups.items()},
    }
    cache = TrunkCache(folder=run.path)
    values = {
        name: _evaluate_one(run, name, attacks, asked, effort, groups, fresh, cache) for name in run.trained_names()
    }
    evaluations = {name: load_evaluation(run, name) for name in values}
    print(table(evaluations))
    for name, value in values.items():
        for row in value["exposure"]["slices"]:
            sizes = f"{row['members']} members, {row['nonmembers']} non-members"
            print(
                f"{name}, slice {row['name']}: AUC {Estimate(**row['auc'])} by {value['exposure']['attack']}, {sizes}"
            )
    return _gated(rules, evaluations, gate, values)


def _evaluate_one(
    run: Run, name: str, attacks, asked: dict, effort: Effort, slices: dict, fresh: bool, cache: TrunkCache
) -> dict:
    target = run.path / "evaluate" / name / "evaluation.json"
    wants_references = any(needs_of(attack).outside or needs_of(attack).inside for attack in attacks.values())
    references = references_for(run, name) if wants_references else None
    key = {
        "weights": run.model_digest(name),
        "splits": run.splits_digest(),
        **asked,
        "references": references.digest() if references else "",
    }
    if target.exists() and not fresh:
        there = read_json(target, "")
        if there.get("key") == key:
            return there
    cost: dict[str, float] = {}
    members, nonmembers = run.attacked()
    with measured(cost):
        model = run.model(name)
        asked_of, (inside, outside, test) = model, (members, nonmembers, run.splits.test)
        if _outputs_only(attacks, references) and _cut_is_shared(run, name):
            data = [inside, outside, test]
            asked_of, (inside, outside, test) = cache.for_queries(model, run.parts(model), run.cut_of(name), data)
        found = evaluate(
            {name: asked_of},
            inside,
            outside,
            test,
            attacks,
            references=references,
            effort=effort,
            parts=run.parts(model),
        )[name]
    ids = np.concatenate([members.indices, nonmembers.indices])
    more = {"key": key, "cost": cost, "exposure": exposure(found, ids, slices)}
    truth = np.repeat([True, False], [len(members), len(nonmembers)])
    return save_evaluation(run, name, found, ids, truth, more)


def _outputs_only(attacks: dict, references: References | None) -> bool:
    """Whether nothing but outputs on the images as they are is looked at, so that the trunk's cached outputs serve."""
    augmented = references is not None and references.augmented is not None
    return not augmented and not any(needs_of(a).measured or needs_of(a).augmented for a in attacks.values())


def _cut_is_shared(run: Run, name: str) -> bool:
    """Whether another model has the same frozen layers: for one alone there is nothing to save."""
    cut = run.cut_of(name)
    return cut != SCRATCH and sum(run.cut_of(other) == cut for other in run.trained_names()) > 1


def table(evaluations: dict[str, Evaluation], caveat: str = ATTACK_CAVEAT) -> str:
    """Utility and leakage of every model, one line each, and how each compares with the undefended one."""
    width = max(len(name) for name in (*evaluations, "model")) + 2
    lines = [
        f"{'model':<{width}}{'train accuracy':<22}{'test accuracy':<22}{'AUC of strongest attack':<42}{'its TPR at 1 % FPR':<30}"
    ]
    for name, found in evaluations.items():
        attack, auc = found.strongest
        shown = f"{replace(auc, note='')} {attack}{' turned' if TURNED in auc.note else ''}"
        lines.append(f"{name:<{width}}{found.train_accuracy!s:<22}{found.test_accuracy!s:<22}{shown:<42}{found.tpr_of_strongest(0.01)}")
    lines += [f"{name} against {UNDEFENDED}: {in_words(d)}" for name, d in against(evaluations).items()]
    return "\n".join(lines + _footnotes(evaluations, caveat))


def _footnotes(evaluations: dict[str, Evaluation], caveat: str) -> list[str]:
    first = next(iter(evaluations.values()))
    widest = max(first.attacks.values(), key=lambda scores: len(scores.rows))
    members = int(widest.members.sum())
    lines = [
        f"{members} members, {len(widest.members) - members} non-members; 95 % intervals over samples, corrected for taking the "
        f"strongest of {_attack_counts(evaluations)} attacks."
    ]
    for source in dict.fromkeys(found.references for found in evaluations.values() if found.references):
        names = ", ".join(name for name, found in evaluations.items() if found.references == source)
        lines.append(f"{names}: attacked with {source}.")
    if len({found.references for found in evaluations.values()}) > 1:
        lines.append(
            "Where two models were attacked with different reference models, the comparison is of what each one's attacker finds."
        )
    skipped: dict[str, dict[str, list[str]]] = {}
    for name, found in evaluations.items():
        for attack, why in found.skipped.items():
            skipped.setdefault(why, {}).setdefault(attack, []).append(name)
    for why, attacks in skipped.items():
        on = {tuple(names) for names in attacks.values()}
        where = (
            "" if on == {tuple(evaluations)} else f" on {', '.join(dict.fromkeys(n for names in on for n in names))}"
        )
        lines.append(f"Not run{where}: {', '.join(attacks)} ({why}).")
    if not any("reference models" in found.references for found in evaluations.values()):
        lines.append(caveat)
    return lines


def _attack_counts(evaluations: dict[str, Evaluation]) -> str:
    """How many each model was attacked with; models with reference models of their own meet more."""
    counts = {name: len(found.attacks) for name, found in evaluations.items()}
    if len(set(counts.values())) == 1:
        return str(next(iter(counts.values())))
    return ", ".join(f"{count} ({name})" for name, count in counts.items())


def _gated(rules: Sequence[Rule], evaluations: dict[str, Evaluation], gate: Gate, values: dict) -> bool:
    """Judge, print, write; whether everything may pass."""
    scores = {name: found.attacks for name, found in evaluations.items()}
    utility = {
        name: {"test_accuracy": found.test_accuracy, "train_accuracy": found.train_accuracy}
        for name, found in evaluations.items()
    }
    verdicts = judge(rules, scores, utility)
    for verdict in verdicts:
        print(verdict)
    if gate.json:
        write_json(Path(gate.json), {"models": values, "verdicts": [verdict.to_dict() for verdict in verdicts]})
    if gate.junit:
        text = junit(verdicts, gate.fail_undecided)
        atomically(gate.junit, lambda temporary: temporary.write_text(text))
    return not any(fails(verdict, gate.fail_undecided) for verdict in verdicts)


# --- reference models ----------------------------------------------------------------------------


def ensemble_run(
    path: str,
    models: int = 16,
    procedure: str = UNDEFENDED,
    queries: int = 0,
    epochs: Sequence[int] = (),
    own_cut: bool = False,
    processes: int = 1,
    only: int | None = None,
    seed: int = 0,
) -> None:
    """`pptp ensemble`: train reference models by the procedure of the target; `only` trains one, for a cluster's array job."""
    run = Run.open(path)
    if procedure == "plain" and procedure not in run.trained_names():  # that of the undefended model, in other words
        procedure = UNDEFENDED
    if procedure not in run.trained_names():
        raise UserError(f"no model called {procedure!r} in {path}: it has {', '.join(run.trained_names())}")
    for what, value, holds, rule in (
        ("models", models, models >= 2 and models % 2 == 0, "even, and at least 2"),
        ("queries", queries, queries >= 0, "0 or above"),
        ("processes", processes, processes >= 1, "at least 1"),
    ):
        if not holds:
            raise UserError(f"{what} is {value}: it must be {rule}")
    if only is not None and not 0 <= only < models:
        raise UserError(f"only is {only}: it must be one of 0 to {models - 1}")
    jobs = [Job(str(path), procedure, index, seed, queries, tuple(epochs), own_cut) for index in range(models)]
    last = (jobs[0].plan(run) or {"recipe": asdict(run.experiment.recipe)})["recipe"]["epochs"]
    if not all(1 <= epoch <= last for epoch in epochs):
        raise UserError(
            f"record_epochs is {','.join(map(str, epochs))}: the training that is recorded has epochs 1 to {last}"
        )
    if run.experiment.full_checkpoint:
        print(
            "the target was trained elsewhere: reference models follow this run's recipe, which may not be its procedure"
        )
    record_ensemble(jobs, run)
    if only is not None:
        train_reference(asdict(jobs[only]), jobs[only].folder(run))
        print(f"reference {only}: done")
    else:
        train_all(jobs, processes)


# --- audit ---------------------------------------------------------------------------------------


def audit_run(path: str, delta: float | None = None, attack: str = "confidence") -> dict[str, dict]:
    """`pptp audit`: lower bounds on epsilon for every model, beside what its defense claims."""
    run = Run.open(path)
    if delta is not None and not 0 <= delta < 1:
        raise UserError(f"delta is {delta}: it must be at least 0 and below 1")
    if needs_of(find("attacks", attack)) != Needs():
        raise UserError(
            f"an audit thresholds scores of the model's outputs alone: {attack} needs {needs_of(find('attacks', attack))}"
        )
    results = {}
    for name in run.trained_names():
        claim = _claim(run, name)
        at = delta if delta is not None else claim.get("delta", 0.0)
        members, nonmembers = run.attacked()
        found = evaluate({name: run.model(name)}, members, nonmembers, None, {attack: find("attacks", attack)})[name]
        scores = found.attacks[attack]
        bounds = [threshold_bound(scores.scores, scores.members, at)]
        canaries = run.canaries()
        if canaries is not None:
            said = collect(run.model(name), Part(run.splits.pool, canaries.ids, "canaries")).log_true.numpy()
            bounds.append(canary_bound(said, canaries.included, at))
        results[name] = {
            "weights": run.model_digest(name),
            "claim": claim,
            "bounds": [bound.to_dict() for bound in bounds],
        }
        print(f"{name}: {claim.get('scope', 'claims no differential privacy')}")
        for bound in bounds:
            print(f"{name}: {bound}{_refuted(bound.epsilon, claim)}")
    write_json(run.path / "audit.json", results)
    if run.canaries() is None:
        print(
            "Bounds from ordinary samples take them as independent; train with --canaries N for the one-run audit, which need not."
        )
    return results


def _claim(run: Run, name: str) -> dict:
    record = run.folder(name) / "defense.json"
    result = read_json(record, "").get("result", {}) if record.exists() else {}
    return {key: result[key] for key in ("epsilon", "delta", "scope") if key in result}


def _refuted(found: float, claim: dict) -> str:
    if "epsilon" not in claim:
        return ""
    if found > claim["epsilon"]:
        return f": ABOVE the stated {claim['epsilon']:.3g}, which it refutes for the model as a whole"
    return f": not above the stated {claim['epsilon']:.3g}, which proves nothing"


# --- outputs from elsewhere ----------------------------------------------------------------------


def attack_outputs(path: str, attack_names: Sequence[str] = (), gate: Gate = OPEN) -> bool:
    """`pptp attack`: attack arrays of outputs. False if the gate is shut."""
    rules = [Rule.parse(text) for text in gate.fail_if]
    signals, members = read_outputs(path)
    attacks = chosen_attacks(attack_names)
    asking = [name for name in attack_names if name in attacks and (needs_of(attacks[name]).measured or needs_of(attacks[name]).augmented)]
    if asking:
        raise UserError(f"{', '.join(asking)} needs the model itself, not its outputs: use pptp evaluate RUN --attack {asking[0]}")
    usable, skipped = applicable(attacks, signals, members)
    if (attack_names and skipped) or not usable:
        raise UserError(f"{path} lacks what was asked for: " + "; ".join(f"{a} {why}" for a, why in skipped.items()))
    right = (signals.logits.argmax(1) == signals.labels).numpy()
    accuracy = [proportion(int(right[rows].sum()), int(rows.sum())) for rows in (members, ~members)]
    source = (
        f"{len(signals.reference_logits)} reference models from the file"
        if signals.reference_logits is not None
        else ""
    )
    name = Path(path).stem
    found = Evaluation(*accuracy, run_attacks(usable, signals, members, skipped=skipped), skipped, source)
    print(table({name: found}, NO_REFERENCES))
    print("Test accuracy is that on the non-members.")
    value = {**found.to_dict(), "exposure": exposure(found, np.arange(len(members)), {})}
    return _gated(rules, {name: found}, gate, {name: value})


# --- frontier ------------------------------------------------------------------------------------


def frontier_run(
    path: str,
    defense: str,
    sweeps: dict[str, list[str]],
    cuts: Sequence[str],
    recipe_changes: dict,
    rewind: str = "init",
    target_auc: float | None = None,
    min_accuracy: float | None = None,
    rounds: int = 2,
    policy: Policy | None = None,
) -> list[Point]:
    """`pptp frontier`: retrain and evaluate every combination from the shared cache, draw it, choose and refine."""
    run = Run.open(path)
    if target_auc is not None and not 0.5 <= target_auc <= 1:
        raise UserError(f"target_auc is {target_auc}: it must lie between 0.5, no leak, and 1")
    if min_accuracy is not None and not 0 <= min_accuracy <= 1:
        raise UserError(f"min_accuracy is {min_accuracy}: it must lie between 0 and 1")
    check_rounds(rounds)
    recipe = retrain_recipe(run.experiment.recipe, recipe_changes)
    cuts = [resolve_cut(run, cut) for cut in cuts]
    policy = policy or Policy()
    settings = grid(defense, sweeps, list(dict.fromkeys(cuts)), rewind, recipe, policy)
    sweep = Sweep(run, TrunkCache(policy, run.path))
    sweep.check(settings)
    sweep.data = training_data(run, [defense])
    points = [_said(sweep.point(setting)) for setting in settings]
    for _ in range(rounds if target_auc is not None or min_accuracy is not None else 0):
        near = choose(points, target_auc, min_accuracy) or nearest(points, target_auc)
        more = _possible(sweep, refined(near.setting, [p.setting for p in points]))
        points += [_said(sweep.point(setting)) for setting in more]
    sweep.clear_shelf()
    best = choose(points, target_auc, min_accuracy)
    print(frontier_table(points, best))
    print(f"Attacked with {sweep.references.source}.")
    if best is None and (target_auc is not None or min_accuracy is not None):
        print("No point fulfils what was asked: widen the sweep, cut earlier, or ask for less.")
    _save_frontier(run, defense, settings, points, best, target_auc)
    if best is not None:
        print(
            f"its weights: {sweep.folder / best.key / 'last.safetensors'}; to keep it among the models of the run: {_command(run, best, recipe_changes)}"
        )
    return points


def _possible(sweep: Sweep, settings: Sequence[Setting]) -> list[Setting]:
    """Without those that the defense refuses: a value between two good ones may still be a bad one (whole numbers)."""
    found = []
    for setting in settings:
        try:
            sweep.check([setting])
            found.append(setting)
        except UserError:
            continue
    return found


def _said(point: Point) -> Point:
    print(
        f"{point.setting}: test accuracy {point.accuracy}, AUC {point.leak} by {point.attack}, trained in {point.seconds:.1f} s"
    )
    return point


def _command(run: Run, best: Point, changes: dict) -> str:
    setting = best.setting
    given = [f"--set {shlex.quote(text)}" for text in setting.settings] + [f"--cut {setting.cut}"]
    flags = {**changes, "epochs": setting.recipe.epochs}
    given += [
        f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        + ("" if isinstance(value, bool) else f" {value}")
        for name, value in flags.items()
    ]
    given += [f"--rewind {setting.rewind}"] if setting.rewind != "init" else []
    given += [f"--views {setting.views}"] if setting.views else []
    given += [f"--cache-dtype {setting.cache_dtype}"] if setting.cache_dtype != "float32" else []
    name = f"{setting.defense.rpartition(':')[2].lower()}-{best.key[:6]}"
    return f"pptp retrain {shlex.quote(str(run.path))} --defense {setting.defense} {' '.join(given)} --name {name}"


def _save_frontier(
    run: Run,
    defense: str,
    settings: Sequence[Setting],
    points: Sequence[Point],
    best: Point | None,
    target_auc: float | None,
) -> None:
    """Under a name of its own for every grid that was asked for."""
    front = pareto(points)
    rows = [
        {
            "settings": list(p.setting.settings),
            "cut": p.setting.cut,
            **p.to_dict(),
            "pareto": p in front,
            "best": p is best,
        }
        for p in points
    ]
    asked = hashlib.sha256("".join(sorted(s.key(run.model_digest(UNDEFENDED)) for s in settings)).encode()).hexdigest()
    name = "-".join([defense.replace(":", "."), *dict.fromkeys(p.setting.cut for p in points), asked[:6]])
    write_json(
        run.path / "frontier" / f"{name}.json",
        {"points": rows, "target_auc": target_auc, "recipe": asdict(points[0].setting.recipe)},
    )
    drawing = plots.frontier(rows, target_auc)
    atomically(run.path / "frontier" / f"{name}.svg", lambda temporary: temporary.write_text(drawing))
    print(f"wrote {run.path / 'frontier' / name}.svg")
