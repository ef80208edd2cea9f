"""Tables and figures from whatever results there are, written into benchmarks/RESULTS.md between its markers."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from pptp.plots import GREY, INK, MODEL_COLOURS, RISK, SEEN, as_svg, canvas, error_bars

from . import cost
from .verdicts import having, judge_all, kept, leak, spread, turned
from .where import INTERPOLATES, STANDINGS, Verdict, interpolates, pooled, shown, telling
from .work import HERE, RESULTS, plan

PAGE = HERE.parent / "RESULTS.md"
FIGURES = HERE / "figures"


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
    results, costs = load(), cost.load()
    one = {base: pooled(results, base) for base in results}
    seeds_of = {base: list(telling(results, base)) for base in results}
    FIGURES.mkdir(exist_ok=True)
    draw("where", where_figure(one))
    verdicts = judge_all(results) + cost.verdicts(costs, results)
    parts = [
        in_short(verdicts),
        "Paper against ours (where: the seeds whose two models interpolate, together; what it buys: all seeds, mean and standard deviation):\n\n"
        + table(
            ["claim", "paper", "ours", "agrees"],
            [[v.claim, v.paper, v.ours, v.agrees] for v in verdicts],
        ),
        "![Disparity per stage](claims/figures/where.svg)\n\n" + where_table(one, seeds_of),
        f"<details><summary>Block by block</summary>\n\n{block_table(one)}\n\n</details>",
    ]
    for base, seeds in results.items():
        if any(len(found["models"]) > 1 for found in seeds.values()):
            draw(f"buys-{base}", frontier_figure(seeds))
            parts.append(
                f"#### What retraining {base} buys\n\n![Accuracy against leakage](claims/figures/buys-{base}.svg)\n\n{buys_table(seeds)}{not_run(base, seeds)}"
            )
        for seed, found in seeds.items():
            if "adaptive" in found:
                parts.append(
                    f"##### {base}, seed {seed}: attacked with reference models of the attacker's own\n\n{adaptive_table(found)}"
                )
    if costs:
        parts.append(f"#### What retraining costs over the same defense from scratch\n\n{cost_table(costs)}")
    replace_between("claims", "\n\n".join(parts))
    print(f"wrote {PAGE} from {sum(map(len, results.values()))} result files")


def in_short(verdicts: Sequence[Verdict]) -> str:
    """How many claims of the paper, and goals and claims of our own, stand how, by name."""
    paragraphs = []
    for whose, mine in (("claims of the paper", True), ("goals and claims of our own", False)):
        asked = [v for v in verdicts if v.of_the_paper is mine]
        by_standing = {standing: [v.claim for v in asked if v.standing == standing] for standing in STANDINGS}
        lines = [f"- {len(names)} {standing}: {'; '.join(names)}." for standing, names in by_standing.items() if names]
        paragraphs.append(f"Of {len(asked)} {whose}:\n\n" + "\n".join(lines))
    return "\n\n".join(paragraphs)


def not_run(base: str, seeds: Mapping[int, Mapping]) -> str:
    """Rows of the plan that no seed has, since a table does not show what is not in it."""
    names = [
        n for n in plan()["retrainings"].get(base, {}) if not any(n in found["models"] for found in seeds.values())
    ]
    return f"\n\nIn the plan and not run: {', '.join(names)}." if names else ""


def draw(name: str, svg: str) -> None:
    (FIGURES / f"{name}.svg").write_text(svg)


def replace_between(name: str, text: str) -> None:
    page = PAGE.read_text()
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.split(start)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


# --- where ---------------------------------------------------------------------------------------


def where_table(one: Mapping[str, Mapping], seeds_of: Mapping[str, Sequence[int]]) -> str:
    rows = []
    for base, found in one.items():
        accuracy = found["risk"]["train_accuracy"]
        power = f"{accuracy['full']['value']:.3f} / {accuracy['half']['value']:.3f}" + (
            "" if interpolates(found) else " (does not interpolate)"
        )
        for i, s in enumerate(found["risk"]["stages"]):
            rms, cosine = (shown(s["distances"][m]["auc"]) for m in ("rms", "cosine"))
            probe, gap = (shown(s[k]) if s.get(k) else "" for k in ("probe", "member_gap"))
            rows.append(
                [
                    f"{base}, seed {', '.join(map(str, seeds_of[base]))}" if not i else "",
                    power if not i else "",
                    s["name"],
                    rms,
                    cosine,
                    s["verdict"],
                    probe,
                    gap,
                    s["by_member_gap"],
                ]
            )
    header = [
        "base",
        "train accuracy, full / half",
        "stage",
        "AUC, RMS",
        "AUC, cosine",
        "by distance",
        "probe accuracy",
        "member gap",
        "by member gap",
    ]
    return table(header, rows)


def block_table(one: Mapping[str, Mapping]) -> str:
    """Distances after every block, of the bases whose two models interpolate."""
    rows = [
        [base, block["name"], *(shown(block["distances"][m]["auc"]) for m in ("rms", "cosine")), block["verdict"]]
        for base, found in one.items()
        if interpolates(found)
        for s in found["risk"]["stages"]
        for block in s.get("blocks", ())
    ]
    return table(["base", "block", "AUC, RMS", "AUC, cosine", "by distance"], rows)


def where_figure(one: Mapping[str, Mapping]) -> str:
    columns = min(3, len(one))
    rows = -(-len(one) // columns)
    figure, axes = canvas(3.4 * columns, 2.4 * rows, rows, columns, sharey=True)
    for axis in axes.flat[len(one) :]:
        axis.set_visible(False)
    for axis, (base, found) in zip(axes.flat, one.items()):
        stages = found["risk"]["stages"]
        at = np.arange(len(stages))
        for metric, colour, shift in (("rms", SEEN, -0.1), ("cosine", RISK, 0.1)):
            e = [s["distances"][metric]["auc"] for s in stages]
            axis.errorbar(
                at + shift,
                [x["value"] for x in e],
                yerr=error_bars(e),
                fmt="o-",
                color=colour,
                markersize=3,
                linewidth=1,
                label=metric,
            )
        axis.axhspan(0.45, 0.55, color=GREY, alpha=0.25, linewidth=0)
        axis.set_xticks(
            at, [s["name"].replace("features.", "f").replace("stages.", "s") for s in stages], rotation=40, fontsize=7
        )
        axis.set_title(base if interpolates(found) else f"{base} (train < {INTERPOLATES:.0%})", fontsize=9)
    axes[0, 0].set_ylabel("AUC, unseen over seen")
    axes[0, 0].legend(fontsize=7)
    return as_svg(figure, "where")


# --- what it buys --------------------------------------------------------------------------------


def over_seeds(seeds: Mapping[int, Mapping], name: str, of) -> str:
    """Value with its interval for one seed, mean and standard deviation for several."""
    return spread([of(r["models"][name]) for r in seeds.values() if name in r["models"]])


def mean_over(seeds: Mapping[int, Mapping], name: str, of) -> float:
    return statistics.mean(of(r["models"][name]) for r in seeds.values() if name in r["models"])


def of_undefended(seeds: Mapping[int, Mapping], name: str) -> float:
    """Test accuracy as a share of the undefended model's, mean over the seeds that have it."""
    return kept(having({seed: r["models"] for seed, r in seeds.items()}, name), name)


def of_base_time(seeds: Mapping[int, Mapping], name: str) -> float:
    """Mean over seeds of the time it took over that of training the base."""
    return statistics.mean(
        r["models"][name]["cost"]["seconds"] / r["models"]["undefended"]["cost"]["seconds"]
        for r in seeds.values()
        if name in r["models"]
    )


def strongest(seeds: Mapping[int, Mapping], name: str) -> str:
    """The attacks that were strongest in any seed."""
    return " or ".join(
        dict.fromkeys(r["models"][name]["strongest"]["attack"] for r in seeds.values() if name in r["models"])
    )


def buys_table(seeds: Mapping[int, Mapping]) -> str:
    names = list(dict.fromkeys(name for r in seeds.values() for name in r["models"]))
    names.sort(key=lambda n: (n != "undefended", mean_over(seeds, n, lambda m: leak(m)["value"])))
    rows = []
    for name in names:
        count = sum(name in r["models"] for r in seeds.values())
        example = next(r["models"][name] for r in seeds.values() if name in r["models"])
        rows.append(
            [
                name,
                str(count),
                str(example.get("epochs", "")),
                over_seeds(seeds, name, lambda m: m["train_accuracy"]),
                over_seeds(seeds, name, lambda m: m["test_accuracy"]),
                f"{of_undefended(seeds, name):.2f}",
                over_seeds(seeds, name, leak),
                over_seeds(seeds, name, lambda m: turned(m["strongest"]["auc"])) + f" {strongest(seeds, name)}",
                over_seeds(seeds, name, lambda m: m["strongest"]["tpr@0.01"]),
                f"{of_base_time(seeds, name):.2f}",
            ]
        )
    header = [
        "model",
        "seeds",
        "epochs",
        "train accuracy",
        "test accuracy",
        "of undefended",
        "AUC, confidence",
        "AUC, strongest",
        "its TPR at 1 % FPR",
        "time, of base training",
    ]
    return table(header, rows)


def adaptive_table(found: Mapping) -> str:
    """The same models with the half model as the one reference, and with an ensemble that repeats their whole procedure."""
    rows = []
    for name, model in found["adaptive"].items():
        before, strongest = found["models"][name]["strongest"], model["strongest"]
        named = [
            shown(turned(model["attacks"][a]["auc"])) if a in model["attacks"] else ""
            for a in ("lira", "rmia_offline", "rmia")
        ]
        rows.append(
            [
                name,
                shown(leak(model)),
                f"{shown(turned(before['auc']))} {before['attack']}",
                *named,
                f"{shown(turned(strongest['auc']))} {strongest['attack']}",
                shown(strongest["tpr@0.01"]),
                model["references"],
            ]
        )
    header = [
        "model",
        "AUC, confidence",
        "strongest with the half model",
        "LiRA",
        "RMIA, offline",
        "RMIA",
        "strongest with the ensemble",
        "its TPR at 1 % FPR",
        "reference models",
    ]
    return table(header, rows)


def cost_table(costs: Mapping[str, Mapping]) -> str:
    rows = [
        [
            name,
            " / ".join(map(str, row["epochs"])),
            *(f"{row[k]:.2f}" for k in ("time_of_an_epoch", "time", "memory")),
        ]
        for name, row in costs.items()
    ]
    return table(
        ["pair", "epochs", "time of an epoch", "time of all", "peak memory"],
        rows,
    )


def kind_of(name: str) -> str:
    if name == "undefended":
        return name
    place = "from scratch" if name.endswith("scratch") else "from a cut on"
    return f"{re.split(r'[-0-9]', name)[0].replace('control', 'plain')}, {place}"


def frontier_figure(seeds: Mapping[int, Mapping]) -> str:
    figure, axes = canvas(7.2, 4.6)
    axis = axes[0, 0]
    names = list(dict.fromkeys(name for r in seeds.values() for name in r["models"]))
    kinds = list(dict.fromkeys(map(kind_of, names)))
    defenses = list(dict.fromkeys(kind.partition(",")[0] for kind in kinds))
    for kind in kinds:
        points = [
            (
                mean_over(seeds, n, lambda m: leak(m)["value"]),
                of_undefended(seeds, n),  # models have different seeds
            )
            for n in names
            if kind_of(n) == kind
        ]
        colour = MODEL_COLOURS[defenses.index(kind.partition(",")[0]) % len(MODEL_COLOURS)]
        axis.plot(
            *zip(*sorted(points)),
            "s--" if "scratch" in kind else "o",
            color=colour,
            label=kind,
            markersize=5,
            linewidth=0.8,
        )
    axis.set_xlim(left=0.5)
    axis.axvline(0.55, color=INK, linestyle=":", linewidth=1)
    axis.axhline(0.95, color=INK, linestyle=":", linewidth=1)
    axis.set(xlabel="AUC of the confidence attack (0.5 = no leak)", ylabel="test accuracy, of the undefended model's")
    axis.legend(fontsize=7)
    return as_svg(figure, "buys")
