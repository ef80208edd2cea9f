"""Trains and attacks what plan.yaml lists. Every finished model is a row in results/BASE-SEED.json: what is there is not made again."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from pptp.attacking import ensemble_run, evaluate_run
from pptp.commands import localize_run, retrain_run, train_run
from pptp.config import experiment
from pptp.intervals import proportion
from pptp.localize import distances
from pptp.results import load_evaluation
from pptp.runs import UNDEFENDED, Run, read_json, versions, write_json
from pptp.signals import collect

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def plan() -> dict:
    return yaml.safe_load((HERE / "plan.yaml").read_text())


@dataclass(frozen=True)
class Cell:
    """One base model of one seed, with everything that is made of it."""

    base: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.base}-{self.seed}"

    @property
    def settings(self) -> dict:
        made = plan()
        return {**made["common"], **made["bases"][self.base], "seed": self.seed}

    @property
    def retrainings(self) -> dict[str, dict]:
        return plan()["retrainings"].get(self.base, {})

    def results(self) -> dict:
        path = RESULTS / f"{self.name}.json"
        return read_json(path, "") if path.exists() else {}

    def keep(self, **more) -> None:
        write_json(RESULTS / f"{self.name}.json", {**self.results(), **more})

    @property
    def has_base(self) -> bool:
        return UNDEFENDED in self.results().get("models", {})

    def missing(self, only: tuple[str, ...] = ("",)) -> list[str]:
        done = self.results().get("models", {})
        return [name for name in self.retrainings if name not in done and name.startswith(only)]


def work(cell: Cell, data: str, runs: Path, only: tuple[str, ...] = ("",), log=None) -> None:
    """Whatever of the cell is not there yet."""
    if cell.has_base and not cell.missing(only):
        return
    with contextlib.redirect_stdout(log):
        run = trained(cell, data, runs)
        if "half" not in cell.results():
            keep_half(cell, run)
        if not cell.has_base:
            keep_risk(cell, localize_run(str(run.path)))
            keep_model(cell, run, UNDEFENDED)
        for name in cell.missing(only):
            retrained(cell, run, name)
            keep_model(cell, run, name)


def trained(cell: Cell, data: str, runs: Path) -> Run:
    """The run of the cell, with base and half; what of it is there is not trained again."""
    return train_run(str(runs / cell.name), experiment({**cell.settings, "data": data}))


def retrained(cell: Cell, run: Run, name: str) -> None:
    """One retraining of the plan as a model of the run, unless it is there."""
    row = cell.retrainings[name]
    recipe = {"epochs": epochs_of(cell, row), **row.get("recipe", {})}
    start = row.get("rewind", "init")
    defenses = {row["defense"]: row.get("set", [])}
    shelf = run.path / "shelf"  # rows that differ in their students alone train SELENA's sub-models once
    retrain_run(str(run.path), defenses, recipe, row["cut"], start, name, control=False, shelf=shelf)


def epochs_of(cell: Cell, row: dict) -> int:
    base = cell.settings["epochs"]
    return row.get("epochs", base if row["cut"] == "scratch" else max(2, base // 6 * 2))


def keep_risk(cell: Cell, risk: dict) -> None:
    kept = {
        key: risk[key] for key in ("stages", "cut", "strict_cut", "block_cut", "stall", "train_accuracy", "powered")
    }
    made = {key: value for key, value in cell.settings.items() if key != "data"}
    cell.keep(settings=made, versions=versions(), risk=kept)


def keep_half(cell: Cell, run: Run) -> None:
    """How accurate the model of half the data is."""
    said = collect(run.model("half"), run.splits.test)
    right = int((said.logits.argmax(1) == said.labels).sum())
    cell.keep(half={"test_accuracy": proportion(right, len(said)).to_dict()})


def keep_model(cell: Cell, run: Run, name: str) -> None:
    """Attack it, and keep the numbers that tables need."""
    if (run.path / "ensembles").exists():
        sys.exit(f"{run.path} has reference models: rows are made before them, or with that ensembles folder elsewhere")
    record = read_json(run.folder(name) / ("cost.json" if name == UNDEFENDED else "defense.json"), "")
    row = {**attacked(run, name), "cost": record.get("cost", record), "from_base": from_base(run, name)}
    row["processor"] = (
        torch.backends.cpu.get_cpu_capability()
    )  # another one rounds otherwise, and is another training run
    if name != UNDEFENDED:  # the base is this folder's, if it was trained again
        seconds = read_json(run.folder(UNDEFENDED) / "cost.json", "")["seconds"]
        row["base"] = {"test_accuracy": evaluated(run, UNDEFENDED)["test_accuracy"], "seconds": seconds}
        row |= {key: record[key] for key in ("defense", "set", "cut", "rewind")}
        row["epochs"] = record["recipe"]["epochs"]
        row["result"] = {k: v for k, v in record["result"].items() if isinstance(v, int | float | str)}
    cell.keep(models={**cell.results().get("models", {}), name: row})


def attacked(run: Run, name: str) -> dict:
    """Accuracy, every attack, and the strongest with its rate at 1 % false positives."""
    evaluate_run(str(run.path))
    found = evaluated(run, name)
    strongest = found["strongest"]
    scores = load_evaluation(run, name).attacks[strongest["attack"]].turned
    return {
        "train_accuracy": found["train_accuracy"],
        "test_accuracy": found["test_accuracy"],
        "strongest": {**strongest, "tpr@0.01": scores.tpr_at(0.01).to_dict()},
        "attacks": {a: {"auc": f["auc"], "tpr@0.01": f["tpr@0.01"]} for a, f in found["attacks"].items()},
        "references": found["references"],
    }


def evaluated(run: Run, name: str) -> dict:
    return read_json(run.path / "evaluate" / name / "evaluation.json", "")


def from_base(run: Run, name: str) -> dict[str, float]:
    """Mean RMS distance of its features from the undefended model's, stage by stage, over the members; of the half model's, for the base itself."""
    base, other = run.model(UNDEFENDED), run.model("half" if name == UNDEFENDED else name)
    found, _ = distances(base, other, run.parts(base), run.splits.members)
    return {stage: float(metrics["rms"].mean()) for stage, metrics in found.items()}


def attack(cell: Cell, data: str, runs: Path, only: tuple[str, ...] = ("",), log=None) -> None:
    """Train the reference models that the plan asks for, by the whole procedure of each model, and attack those with them."""
    wanted = plan()["ensembles"].get(cell.base, {"procedures": []})
    names = [name for name in wanted["procedures"] if name.startswith(only)]
    if not names:
        return
    with contextlib.redirect_stdout(log):
        run = trained(cell, data, runs)
        for name in names:
            if name != UNDEFENDED:
                retrained(cell, run, name)
            ensemble_run(str(run.path), wanted["models"], name)
            cell.keep(adaptive={**cell.results().get("adaptive", {}), name: attacked(run, name)})
