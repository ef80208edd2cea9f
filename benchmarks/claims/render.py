"""Whatever results there are, written into benchmarks/RESULTS.md and README.md between their markers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from . import converge, cost
from .claim import AUGMENTED, Results, Verdict
from .figures import frontier_figure, where_figure
from .headline import HEADER, headline_rows
from .pairs import BASES, BOLD, pair_rows
from .pairs import HEADER as PAIRS
from .tables import (
    adaptive_table,
    bases_trained_again,
    block_table,
    buys_table,
    claims_table,
    converge_table,
    cost_table,
    counts,
    folded,
    goal_table,
    models_of,
    not_run,
    table,
    where_summary,
    where_table,
)
from .verdicts import MORE_CLASSES, judged
from .where import pooled, telling
from .work import HERE, RESULTS, plan

PAGE = HERE.parent / "RESULTS.md"
README = HERE.parent.parent / "README.md"
FIGURES = HERE / "figures"
TOWARDS_GOAL = (BOLD, "selena-20-t0.5-layer2")


def load() -> dict[str, dict[int, dict]]:
    """base -> seed -> results, in the order of the plan."""
    found: dict[str, dict[int, dict]] = {base: {} for base in plan()["bases"]}
    for path in sorted(RESULTS.glob("*.json")):
        base, _, seed = path.stem.rpartition("-")
        found.setdefault(base, {})[int(seed)] = json.loads(path.read_text())
    done = {
        base: {seed: r for seed, r in seeds.items() if "undefended" in r.get("models", {})}
        for base, seeds in found.items()
    }
    return {base: seeds for base, seeds in done.items() if seeds}


def render() -> None:
    results, costs, trainings = load(), cost.load(), converge.load()
    FIGURES.mkdir(exist_ok=True)
    verdicts, unjudged = judged(results)
    verdicts += cost.verdicts(costs, results) + converge.verdicts(trainings)
    replace_between(PAGE, "claims", claims_text(verdicts, unjudged))
    replace_between(PAGE, "where", where_text(results))
    replace_between(PAGE, "pairs", pairs_text(results))
    replace_between(PAGE, "goal", goal_table(results, TOWARDS_GOAL, (AUGMENTED, MORE_CLASSES)))
    replace_between(PAGE, "attackers", attackers_text(results))
    replace_between(PAGE, "cost", costs_text(costs, trainings))
    replace_between(PAGE, "rows", rows_text(results))
    replace_between(PAGE, "bases trained again", "\n".join(f"- {line}." for line in bases_trained_again(results)))
    replace_between(README, "what it buys", table(HEADER, headline_rows(results)))
    print(f"wrote {PAGE} and {README} from {sum(map(len, results.values()))} result files")


def claims_text(verdicts: list[Verdict], unjudged: list[str]) -> str:
    papers, ours = ([v for v in verdicts if v.of_the_paper is mine] for mine in (True, False))
    missing = f"\n\nNot run: {'; '.join(unjudged)}." if unjudged else ""
    return (
        f"Of the paper {counts(papers)}. Of our own {counts(ours)}.{missing}\n\n{claims_table(papers)}\n\n"
        + folded("Our own claims and goals", claims_table(ours))
    )


def where_text(results: Results) -> str:
    one = {base: pooled(results, base) for base in results}
    seeds_of = {base: list(telling(results, base)) for base in results}
    draw("where", where_figure(one))
    parts = [
        where_summary(one, seeds_of),
        "![Disparity per stage](claims/figures/where.svg)",
        folded("Stage by stage", where_table(one, seeds_of)),
        folded("Block by block", block_table(one)),
    ]
    return "\n\n".join(parts)


def pairs_text(results: Results) -> str:
    return "\n\n".join(f"`{base}`\n\n{table(PAIRS, rows)}" for base in BASES if (rows := pair_rows(results, base)))


def attackers_text(results: Results) -> str:
    found = [(base, seed, r) for base, seeds in results.items() for seed, r in seeds.items() if "adaptive" in r]
    return "\n\n".join(f"`{base}`, seed {seed}\n\n{adaptive_table(r)}" for base, seed, r in found)


def costs_text(costs: Mapping[str, Mapping], trainings: Mapping[str, Mapping]) -> str:
    parts = [cost_table(costs)] if costs else []
    if converge.compared(trainings):
        parts.append(f"Epochs until a training has converged, at a constant learning rate:\n\n{converge_table(trainings)}")
    return "\n\n".join(parts)


def rows_text(results: Results) -> str:
    """Every model that was retrained, base by base, with its figure."""
    parts = []
    for base, seeds in results.items():
        models = models_of(seeds)
        if any(len(m) > 1 for m in models.values()):
            draw(f"buys-{base}", frontier_figure(models))
            figure = f"![Accuracy against leakage](claims/figures/buys-{base}.svg)"
            parts.append(folded(base, f"{figure}\n\n{buys_table(models)}{not_run(base, models)}"))
    return "\n\n".join(parts)


def draw(name: str, svg: str) -> None:
    (FIGURES / f"{name}.svg").write_text(svg)


def replace_between(page: Path, name: str, text: str) -> None:
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
