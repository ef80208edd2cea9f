"""report.html: one self-contained page a person can read and sign; report.json: the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import numpy as np
import torch
from markupsafe import Markup

from . import charts, plots, studies
from .evaluate import Evaluation, leak_difference
from .intervals import Estimate
from .models import atomically
from .procedures import what_recipe
from .results import in_words, load_evaluation
from .runs import HARDENED, UNDEFENDED, Run, read_json, write_json
from .stages import SCRATCH

ROC_ATTACK = "confidence"
SHOWN = 8  # images of exposed samples


def write_report(run: Run, images: bool = True) -> Path:
    """images: show the most exposed members as they are, which puts training data into the page."""
    facts = gather(run)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    html = environment.get_template("report.html").render(
        **facts,
        figures={name: Markup(svg) for name, svg in _figures(run, facts).items()},
        pictures={name: _pictures(run, found) for name, found in facts["evaluations"].items()} if images else {},
        section_figures=_section_figures(run, facts["sections"]),
        montages=_montages(run, facts["sections"]) if images else {},
    )
    target = run.path / "report.html"
    write_json(run.path / "report.json", facts)
    atomically(target, lambda temporary: temporary.write_text(html))
    return target


def gather(run: Run) -> dict:
    """Everything the page shows, as plain data."""
    record = read_json(run.path / "run.json", f"pptp train {run.path}")
    with np.load(run.path / "splits.npz") as splits:
        sizes = {name: len(splits[name]) for name in splits.files}
    risk = run.risk() if (run.path / "risk.json").exists() else None
    retrained = {p.parent.name: read_json(p, "") for p in sorted((run.path / "retrain").glob("*/defense.json"))}
    retrained = {name: plan for name, plan in retrained.items() if "result" in plan}
    evaluations, missing = run.evaluations()
    loaded = {name: load_evaluation(run, name) for name in evaluations}
    sections, stale = studies.load(run)
    hardened = _hardened(run, retrained)
    return {
        "experiment": run.experiment.to_dict(),
        "data_name": _data_name(run),
        "sizes": sizes,
        "classes": record["classes"],
        "risk": risk,
        "controls": [name for name, plan in retrained.items() if plan["defense"] == "plain"],
        "blocks": [block for stage in risk["stages"] for block in stage["blocks"]] if risk else [],
        "retrained": retrained,
        "evaluations": evaluations,
        "attack_count": max((len(e["attacks"]) for e in evaluations.values()), default=0),
        "headline": _headline(risk, retrained, evaluations, loaded) + _chosen_by_half(hardened),
        "steps": _steps(run, sizes, risk, retrained),
        "costs": _costs(run, risk, retrained, evaluations, hardened),
        "caveats": _caveats(run, retrained, missing, loaded, hardened) + _stale(stale),
        "audit": _audit(run),
        "hardened": hardened,
        "sections": sections,
        "versions": record["versions"],
    }


def _audit(run: Run) -> dict:
    """Bounds of the models as they are now."""
    path = run.path / "audit.json"
    found = read_json(path, "") if path.exists() else {}
    names = run.trained_names()
    return {name: row for name, row in found.items() if name in names and row["weights"] == run.model_digest(name)}


def _hardened(run: Run, retrained: dict) -> dict | None:
    """How the hardened model was chosen, and what the half of the samples that it was not chosen by says of it."""
    path = run.path / "harden.json"
    if HARDENED not in retrained or not path.exists():
        return None
    found = read_json(path, "")
    return {
        "target_auc": found["target_auc"],
        "references": found["references"],
        "tried": len(found["points"]),
        "seconds": sum(point["seconds"] for point in found["points"]),
        "chosen": next(point for point in found["points"] if point["chosen"]),
        "front": sorted((p for p in found["points"] if p.get("pareto", p["chosen"])), key=lambda p: p["leak"]["value"]),
    }


def _stale(names: list[str]) -> list[str]:
    return [f"Of models that have changed since, and so not shown: pptp monitor {name}." for name in names]


def _section_figures(run: Run, sections: dict[str, dict]) -> dict[str, list]:
    """name -> [(caption, figure)]; "" for what was seen while training."""
    found = {name: charts.FIGURES[name](section["data"]) for name, section in sections.items()}
    history = run.folder(UNDEFENDED) / "history.jsonl"
    found[""] = (
        charts.while_training([json.loads(line) for line in history.read_text().splitlines()])
        if history.exists()
        else []
    )
    return {name: [(caption, Markup(svg)) for caption, svg in figures] for name, figures in found.items()}


def _montages(run: Run, sections: dict[str, dict]) -> dict[str, list]:
    """name -> [(caption, images as data URIs)]: training samples by id, or made ones that the section holds."""
    found = {
        name: [(row["caption"], [plots.png(run.splits.pool[k][0]) for k in row["ids"]]) for row in section["images"]]
        for name, section in sections.items()
    }
    rows = sections["tokens"]["data"]["rows"] if "tokens" in sections else []
    if any(row["rebuilt"] for row in rows):
        with np.load(run.path / "monitors" / "tokens.npz") as saved:
            made = torch.from_numpy(saved["rebuilt"])
        names = [f"{row['model']}, {row['when']}, rebuilt from gradients of the {row['shared']} model" for row in rows]
        found["tokens"] += [(name, [plots.png(image) for image in images]) for name, images in zip(names, made)]
    return found


def _data_name(run: Run) -> str:
    source = run.experiment.source
    if source.data != "digits":
        return Path(source.data).name if Path(source.data).exists() else source.data
    noise = [f"noise of {source.pixel_noise:g} on the pixels"] * bool(source.pixel_noise)
    noise += [f"{source.label_noise:.0%} of the labels replaced"] * bool(source.label_noise)
    return "scikit-learn's digits" + (f", {' and '.join(noise)}" if noise else "")


def _show(e: dict) -> str:
    return str(Estimate(**e))


def activity(result: dict) -> str:
    """In how many steps a defense did anything, in words."""
    if "active" not in result:
        return "the defense does not say in how many steps it was active"
    if result["active"] == 0:
        return "the defense was never active, so this equals its control: change its strength or train longer"
    return f"the defense was active in {result['active']:.1%} of steps"


def _headline(risk, retrained, evaluations, loaded) -> list[str]:
    lines = []
    if risk:
        lines.append(_where(risk))
    if UNDEFENDED in evaluations:
        base = evaluations[UNDEFENDED]
        lines.append(
            f"Undefended: test accuracy {_show(base['test_accuracy'])}, strongest attack AUC {_show(base['strongest']['auc'])}."
        )
        for name, found in evaluations.items():
            if name != UNDEFENDED:
                lines.append(f"{name}: {_compared_with_all(name, found, retrained, loaded)}.")
    return lines or ["Nothing was evaluated yet: run pptp localize, retrain and evaluate."]


def _chosen_by_half(hardened: dict | None) -> list[str]:
    if hardened is None:
        return []
    best = hardened["chosen"]
    return [
        f"{HARDENED} was chosen from {hardened['tried']} settings by half of the samples that its figures above are of. On the other half alone: test accuracy "
        f"{_show(best['reported_accuracy'])}, AUC {_show(best['reported_leak'])} by {best['reported_attack']}, the strongest there; the target was {hardened['target_auc']:g}."
    ]


def _compared_with_all(name: str, found: dict, retrained: dict, loaded: dict[str, Evaluation]) -> str:
    """Against the undefended model, and against the control of the same cut: only that tells what the defense did."""
    text = f"test accuracy {_show(found['test_accuracy'])}, strongest attack AUC {_show(found['strongest']['auc'])}; "
    text += f"against undefended {in_words(leak_difference(loaded[name], loaded[UNDEFENDED]))}"
    plan = retrained.get(name, {})
    if plan.get("defense") in (None, "plain"):
        return text
    controls = [
        other
        for other, its in retrained.items()
        if its["defense"] == "plain" and other in loaded and _made_alike(its, plan)
    ]
    if controls:  # several may be alike: its own, or the first
        own = f"{name}-control" if f"{name}-control" in controls else controls[0]
        text += f"; against the control {own} {in_words(leak_difference(loaded[name], loaded[own]))}"
    return text + ("; the defense was never active" if plan["result"].get("active") == 0 else "")


def _made_alike(a: dict, b: dict) -> bool:
    """From the same cut and start by the same recipe, wherever it was trained."""
    return all(a[k] == b[k] for k in ("cut", "rewind")) and what_recipe(a["recipe"]) == what_recipe(b["recipe"])


def _pictures(run: Run, found: dict) -> list[tuple[str, dict]]:
    """(PNG as a data URI, what is known of it) of the most exposed members."""
    samples = found["exposure"]["samples"][:SHOWN]
    return [(plots.png(run.splits.pool[sample["id"]][0]), sample) for sample in samples]


def _where(risk: dict) -> str:
    verdict = {stage["name"]: stage["verdict"] for stage in risk["stages"]}
    if risk["cut"] == SCRATCH:
        return "Localisation: no stage could be called safe by feature distance, so the cut is before all of them."
    stricter = {risk["cut"]: "agrees", SCRATCH: "calls no stage safe"}.get(
        risk["strict_cut"], f"says {risk['strict_cut']}"
    )
    return (
        f"Localisation: by feature distance the cut is {risk['cut']} ({verdict[risk['cut']]}), from which on no stage is safe; "
        f"the stricter gate {stricter}."
    )


def _steps(run: Run, sizes, risk, retrained) -> list[str]:
    e = run.experiment
    r = e.recipe
    lines = [
        f"Trained {e.model} on {sizes['h1'] + sizes['h2']} members and again, from the same initial weights, on half of them: "
        f"{r.epochs} epochs, {r.opt}, lr {r.lr:g}, batch {r.batch_size}, {'with' if r.augment else 'without'} augmentation."
        if not e.full_checkpoint
        else "Took the full and the half model from checkpoints."
    ]
    if risk:
        accuracy = risk["train_accuracy"]
        lines.append(
            f"Compared their features on seen and unseen members. Train accuracy: full {_show(accuracy['full'])}, half {_show(accuracy['half'])}."
        )
    for name, plan in retrained.items():
        result = plan["result"]
        frozen = (
            "nothing frozen"
            if plan["cut"] == SCRATCH
            else f"everything before {plan['cut']} frozen (weights and buffers checked unchanged)"
        )
        active = "" if plan["defense"] == "plain" else f"; {activity(result)}"
        active += f". Differential privacy: {result['scope']}" if "scope" in result else ""
        rest = "everything" if plan["cut"] == SCRATCH else f"the rest ({result['retrained_share']:.1%} of the weights)"
        lines.append(
            f"{name}: {frozen}, {rest} rewound to {plan['rewind']} and retrained for "
            f"{plan['recipe']['epochs']} epochs with {plan['repr']}{active}."
        )
    return lines


def _costs(run: Run, risk, retrained, evaluations, hardened) -> list[tuple[str, dict]]:
    rows = [
        (f"train {name}", read_json(run.folder(name) / "cost.json", ""))
        for name in (UNDEFENDED, "half", "other")
        if (run.folder(name) / "cost.json").exists()
    ]
    rows += [("localize", risk["cost"])] if risk else []
    rows += [(f"retrain {name}", plan["cost"]) for name, plan in retrained.items()]
    if hardened:
        rows.append((f"try {hardened['tried']} settings, that of {HARDENED} among them", {"seconds": hardened["seconds"]}))
    return rows + [(f"evaluate {name}", found["cost"]) for name, found in evaluations.items()]


def _caveats(run: Run, retrained, missing, loaded: dict[str, Evaluation], hardened) -> list[str]:
    lines = [
        *_about_references(loaded),
        "Intervals cover the choice of images, not of seeds, splits or training runs: one run of each model was made.",
        "Frozen layers were trained on the same members without protection: a white-box attacker who reads weights or features may find what the outputs hide.",
    ]
    private = [name for name, plan in retrained.items() if "scope" in plan["result"]]
    lines.append(
        f"Only {', '.join(private)} carry a differential-privacy statement, and only as far as it says above."
        if private
        else "No model here carries a differential-privacy guarantee."
    )
    canaries = run.canaries()
    if canaries is not None:
        lines.append(
            f"{int(canaries.included.sum())} canaries were trained on besides the members: they are counted with them above, but attacks are not asked about them."
        )
    if missing:
        lines.insert(
            0,
            f"Not evaluated since they were last trained, and so not shown: {', '.join(missing)} (run pptp evaluate).",
        )
    if run.experiment.source.val_split:
        lines.append(
            "Non-members come from another split than members: what attacks find includes any difference between the two splits."
        )
    if run.experiment.source.data == "digits":
        lines.append("The data is a small demonstration set made hard on purpose; its numbers say nothing about yours.")
    if hardened:
        lines.append(
            f"{HARDENED} was chosen by half of the samples that it is attacked with above, which flatters it there; a gate on it judges the same samples."
        )
    others = {name: plan for name, plan in retrained.items() if name != HARDENED}  # its settings were tried beside plain ones
    if others and not any(plan["defense"] == "plain" for plan in others.values()):
        lines.append(
            "There is no control (freeze, rewind, plain cross-entropy), so what the defense itself bought is not known."
        )
    if retrained and not any(plan["cut"] == SCRATCH and plan["defense"] != "plain" for plan in retrained.values()):
        lines.append("The defense was not trained from scratch for comparison (retrain with --cut scratch).")
    if any(plan["defense"] != "plain" and plan["result"].get("active") == 0 for plan in retrained.values()):
        lines.append("A defense was never active: its model equals its control.")
    return lines


def _about_references(loaded: dict[str, Evaluation]) -> list[str]:
    with_many = {name: found.references for name, found in loaded.items() if "reference models" in found.references}
    lines = [f"{name} was attacked with {source}." for name, source in with_many.items()]
    weak = [name for name in loaded if name not in with_many]
    if weak or not loaded:
        lines.append(
            f"{', '.join(weak) or 'No model'}: attacked without an ensemble. Score attacks on a single model are the weakest kind: an attacker who trains "
            "reference models finds more (pptp ensemble). Low numbers here are no proof of privacy."
        )
    return lines


def _figures(run: Run, facts: dict) -> dict[str, str]:
    figures = {}
    if facts["risk"]:
        risk = facts["risk"]
        figures["stage_auc"] = plots.stage_auc(risk)
        figures["probe"] = plots.probe_curve(risk) if any(stage["probe"] for stage in risk["stages"]) else ""
        last_block = {s["name"]: s["blocks"][-1]["name"] if s["blocks"] else s["name"] for s in risk["stages"]}
        with np.load(run.path / "distances.npz") as distances:
            for metric in ("rms", "cosine"):
                figures[f"histograms_{metric}"] = plots.distance_histograms(risk, distances, last_block, metric)
    for path in sorted((run.path / "frontier").glob("*.json")):
        sweep = read_json(path, "")
        figures[f"frontier/{path.stem}"] = plots.frontier(sweep["points"], sweep["target_auc"])
    if facts["evaluations"]:
        figures["trade_off"] = plots.trade_off(facts["evaluations"])
        figures["roc"] = _roc(run, facts)
    return figures


def _roc(run: Run, facts: dict) -> str:
    curves = {}
    common = set.intersection(*(set(found["attacks"]) for found in facts["evaluations"].values()))
    if not common:
        return ""
    preferred = [attack for attack in ("lira", "rmia", ROC_ATTACK) if attack in common]
    shown = preferred[0] if preferred else sorted(common)[0]
    for name in facts["evaluations"]:
        curves[name] = load_evaluation(run, name).attacks[shown].roc()
    return plots.roc(curves, shown, 1 / facts["sizes"]["nonmembers"])
