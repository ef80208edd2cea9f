"""`pptp harden`: train, localize, try defenses from a ladder, keep the best one that leaks no more than asked, and say why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .attacking import evaluate_run
from .cache import TrunkCache
from .commands import adopt, localize_run, report_run, train_run, training_data
from .config import Experiment, Recipe
from .ensemble import HALF_AS_REFERENCE
from .errors import UserError
from .frontier import Point, Sweep, check_rounds, choose, nearest, pareto, refined
from .procedures import Setting
from .runs import HARDENED, UNDEFENDED, Run, write_json
from .stages import SCRATCH

SUB_MODELS = 10  # of SELENA, at first


def harden_run(path: str, experiment: Experiment, target_auc: float, rounds: int = 2, fresh: bool = False) -> bool:
    """True if the chosen model leaks no more than the target, on samples that it was not chosen by."""
    if not 0.5 < target_auc < 1:
        raise UserError(f"target_auc is {target_auc}: it must lie between 0.5, no leak, and 1")
    check_rounds(rounds)
    run = train_run(path, experiment, fresh)
    risk = localize_run(path, fresh=fresh)
    cuts = cuts_to_try(risk)
    settings = ladder(cuts, run.experiment.recipe, run.splits.classes, len(run.splits.members))
    print(f"\ncuts to try: {', '.join(cuts)} ({why_these(risk)}); {len(settings)} settings")
    sweep = Sweep(run, TrunkCache(folder=run.path))
    sweep.check(settings)
    undefended = sweep.undefended()
    if undefended.worst <= target_auc:
        return _nothing_to_do(run, undefended, target_auc)
    sweep.data = training_data(run, [setting.defense for setting in settings])
    points = [_said(sweep.point(setting)) for setting in settings]
    for _ in range(rounds):
        near = choose(points, target_auc, None) or nearest(points, target_auc)
        points += [_said(sweep.point(setting)) for setting in around(near.setting, points)]
    sweep.clear_shelf()
    best = choose(points, target_auc, None) or nearest(points, target_auc)
    _keep(sweep, best, points, target_auc)
    evaluate_run(path)
    print("\n" + "\n".join(explanation(best, points, target_auc, sweep.references.source)))
    report_run(path)
    return best.reported_leak.value <= target_auc


def _nothing_to_do(run: Run, undefended: Point, target_auc: float) -> bool:
    """The undefended model is what was asked for."""
    evaluate_run(str(run.path))
    print(
        f"\nThe undefended model leaks surely no more than {target_auc:g} already: the intervals of all attacks, on either half of the samples, end at "
        f"{undefended.worst:.3f} at the most. Nothing was retrained. "
        "An attacker with reference models finds more: run pptp ensemble before signing off."
    )
    report_run(str(run.path))
    return True


def cuts_to_try(risk: dict) -> list[str]:
    """From one stage before the stricter gate's cut to the cut of the paper's gate; the last stages where nothing could be called safe."""
    names = [stage["name"] for stage in risk["stages"]]
    body = names[1:-1] or names[-1:]  # neither everything nor the head alone
    if SCRATCH in (risk["cut"], risk["strict_cut"]):
        return body[-3:]
    first = max(1, names.index(risk["strict_cut"]) - 1)
    last = max(first, names.index(risk["cut"]))
    between = [name for name in names[first : last + 1] if name in body] or body[-1:]
    return list(dict.fromkeys([between[0], between[len(between) // 2], between[-1]]))


def why_these(risk: dict) -> str:
    if SCRATCH in (risk["cut"], risk["strict_cut"]):
        gate = "" if risk["cut"] == SCRATCH else " by the stricter gate"
        return f"no stage could be called safe{gate}, so the last ones are tried"
    return f"localisation says {risk['cut']}, its stricter gate {risk['strict_cut']}; from a stage before that to there"


def ladder(cuts: Sequence[str], trained: Recipe, classes: int, members: int) -> list[Setting]:
    """A few settings for every cut, from hardly any defense to a strong one; SELENA from the first two, but not from the last:
    its sub-models share what lies before the cut, and the less of that there is, the less it can know of a sample that they were not trained on.

    All short: on a good trunk a suffix learns in few epochs what is general, and in many what is not (benchmarks/RESULTS.md).
    """
    steps_an_epoch = math.ceil(members / trained.batch_size)

    def epochs(share: float, least_steps: int) -> int:
        wanted = max(share * trained.epochs, least_steps / steps_an_epoch)
        return max(2, round(min(wanted, trained.epochs) / 2) * 2)  # even, as RelaxLoss asks

    shorter, short, longer = epochs(1 / 15, 200), epochs(1 / 10, 300), epochs(1 / 3, 1000)
    steps = [
        ("plain", (), shorter),
        ("crossfit", ("weight=0.5",), short),
        ("crossfit", ("weight=1.0",), short),
        ("relaxloss", (f"alpha={0.5 * math.log(classes):.3g}",), short),
    ]
    selena = (
        "selena",
        (f"k={SUB_MODELS}", "l=3", "views=8", f"sub_epochs={round(0.35 * longer)}", "temperature=0.5"),
        longer,
    )
    early = cuts[:-1][:2] or cuts
    return [
        Setting(defense, settings, cut, "init", replace(trained, epochs=count, warmup_epochs=0))
        for cut in cuts
        for defense, settings, count in [*steps, *([selena] if cut in early else [])]
    ]


def around(best: Setting, points: Sequence[Point]) -> list[Setting]:
    """Values between the best one's and its neighbours', a shorter and a longer training (even lengths); of SELENA softer and sharper labels, whose
    sub-models all of these share, and labels from twice as many sub-models."""
    tried = [p.setting for p in points]
    alike = [s for s in tried if (s.defense, s.recipe) == (best.defense, best.recipe) and _in_one_field(s, best)]
    now = best.recipe.epochs
    epochs = {max(2, now * 2 // 3 // 2 * 2), max(now + 2, now * 4 // 3 // 2 * 2)}
    lengths = [replace(best, recipe=replace(best.recipe, epochs=count)) for count in sorted(epochs)]
    labels = _other_labels(best) if best.defense == "selena" else []
    return [s for s in dict.fromkeys([*refined(best, alike), *lengths, *labels]) if s not in tried]


def _in_one_field(a: Setting, b: Setting) -> bool:
    """Whether they differ in one at the most: twice as many sub-models are two, and there is no number of them halfway."""
    return len(set(a.settings) - set(b.settings)) <= 1


def _other_labels(best: Setting) -> list[Setting]:
    """A step sharper, a step softer, and, once, from twice as many sub-models: more accurate at equal leakage (benchmarks/RESULTS.md)."""
    now = {name: float(value) for name, value in (text.split("=") for text in best.settings)}
    steps = [
        {"temperature": now["temperature"] * by} for by in (0.7, 1 / 0.7)
    ]  # there and back is the same at three digits
    if now["k"] == SUB_MODELS:
        steps.append({"k": 2 * now["k"], "l": 2 * now["l"]})
    return [replace(best, settings=tuple(f"{n}={step.get(n, v):.3g}" for n, v in now.items())) for step in steps]


def label(setting: Setting) -> str:
    return (
        f"{setting.defense} {' '.join(setting.settings)} from {setting.cut} on, {setting.recipe.epochs} epochs".replace(
            "  ", " "
        )
    )


def _said(point: Point) -> Point:
    print(
        f"{label(point.setting)}: test accuracy {point.accuracy}, AUC {point.leak} by {point.attack}, trained in {point.seconds:.0f} s",
        flush=True,
    )
    return point


def _keep(sweep: Sweep, best: Point, points: Sequence[Point], target_auc: float) -> None:
    """The chosen point as a model of the run, and all that were tried."""
    folder = sweep.folder / best.key
    adopt(sweep.run, HARDENED, sweep.model(best.setting, folder), best.setting, folder)
    front = pareto(points)
    rows = [{"setting": label(p.setting), **p.to_dict(), "pareto": p in front, "chosen": p is best} for p in points]
    kept = {"target_auc": target_auc, "references": sweep.references.source, "points": rows}
    write_json(sweep.run.path / "harden.json", kept)


def explanation(best: Point, points: Sequence[Point], target_auc: float, references: str) -> list[str]:
    """What was chosen and why, from the half of the samples that it was not chosen by; `references` says by which reference models."""
    leak, front = best.reported_leak, pareto(points)
    fulfilled = sum(p.leak.value <= target_auc for p in points)
    reached = (
        "surely reached: the whole interval lies below it"
        if leak.high <= target_auc
        else "reached by its value, but the interval goes beyond it"
        if leak.value <= target_auc
        else "not reached"
    )
    why = (
        f"the most accurate that leaks no more than {target_auc:g} on the half to choose by, where {fulfilled} do"
        if fulfilled
        else f"the least leaky: none of them leaks as little as {target_auc:g} on the half to choose by"
    )
    return [
        f"Tried {len(points)} settings, {len(front)} of which no other beats in both accuracy and leakage.",
        f"Chosen: {label(best.setting)}: {why}.",
        f"On the other half: test accuracy {best.reported_accuracy}, AUC {leak} by {best.reported_attack}, the strongest there (interval corrected for taking the strongest). The target of {target_auc:g} is {reached}.",
        f"{UNDEFENDED} and {HARDENED} are compared on all samples above; {HARDENED} was chosen by half of them, so trust the other half's figures for it.",
        f"All settings were attacked with {references}.",
        *_teacher(best, references),
        f"The frozen layers were trained on the members without protection, and attacks with reference models of its own procedure find more: run pptp ensemble with --procedure {HARDENED} before signing off.",
    ]


def _teacher(best: Point, references: str) -> list[str]:
    """What an attack with the half model as reference means where that model was a teacher."""
    by_reference = best.reported_attack in ("rmia_offline", "calibration") and references == HALF_AS_REFERENCE
    if best.setting.defense != "crossfit" or not by_reference:
        return []
    return [
        "Its strongest attack compares it with the half model, which was one of its teachers: reference models of an attacker's own may find more or less."
    ]
