"""The tables of RESULTS.md, from whatever results there are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from . import converge
from .claim import STANDINGS, Results, Verdict, shown, test_accuracy
from .compare import active, by_confidence, by_strongest, having, kept, leak, mean_leak, spread, turned
from .verdicts import UNDEFENDED, nearest_rival
from .where import begins, direction, interpolates, last_stage, stage_where_it_starts, stages_of
from .work import plan


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


# --- claims ----------------------------------------------------------------------------------------


def claims_table(verdicts: Sequence[Verdict]) -> str:
    rows = [[f"**{v.standing}**", v.claim, v.paper, v.agrees, v.ours] for v in verdicts]
    return table(["", "claim", "where", "verdict", "what it rests on"], rows)


def counts(verdicts: Sequence[Verdict]) -> str:
    standing = {name: sum(v.standing == name for v in verdicts) for name in STANDINGS}
    words = {"holds": "hold", "in part": "hold in part", "open": "are open", "fails": "fail"}
    return f"{len(verdicts)}: " + ", ".join(f"{n} {words[name]}" for name, n in standing.items() if n)


# --- where -----------------------------------------------------------------------------------------


def where_summary(one: Mapping[str, Mapping], seeds_of: Mapping[str, Sequence[int]]) -> str:
    """A line a base."""
    rows = []
    for base, found in one.items():
        stages = stages_of(found)
        leaking = next((s["name"] for s in stages if s["by_member_gap"] == "risky"), "nowhere")
        rows.append(
            [
                base,
                ", ".join(map(str, seeds_of[base])),
                begins(found) if interpolates(found) else "(does not interpolate)",
                direction(stage_where_it_starts(found)) if interpolates(found) else "",
                *(shown(last_stage(found)["distances"][m]["auc"]) for m in ("rms", "cosine")),
                leaking,
                found["risk"]["stall"] or "nowhere",
            ]
        )
    header = [
        "base",
        "seeds",
        "disparity surely from",
        "direction there",
        "RMS AUC, last stage",
        "cosine AUC, last stage",
        "member gap surely from",
        "probes stall at",
    ]
    return table(header, rows)


def where_table(one: Mapping[str, Mapping], seeds_of: Mapping[str, Sequence[int]]) -> str:
    rows = []
    for base, found in one.items():
        accuracy = found["risk"]["train_accuracy"]
        power = f"{accuracy['full']['value']:.3f} / {accuracy['half']['value']:.3f}" + (
            "" if interpolates(found) else " (does not interpolate)"
        )
        for i, s in enumerate(stages_of(found)):
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
        for s in stages_of(found)
        for block in s.get("blocks", ())
    ]
    return table(["base", "block", "AUC, RMS", "AUC, cosine", "by distance"], rows)


# --- what it buys ----------------------------------------------------------------------------------


def models_of(seeds: Mapping[int, Mapping]) -> dict[int, Mapping]:
    return {seed: found["models"] for seed, found in seeds.items()}


def over_seeds(seeds: Mapping[int, Mapping], name: str, of: Callable[[Mapping], Mapping]) -> str:
    """Value with its interval for one seed, mean and standard deviation for several; `seeds` has the models of each."""
    return spread([of(m[name]) for m in having(seeds, name).values()])


def of_base_time(seeds: Mapping[int, Mapping], name: str) -> float:
    """Mean over seeds of the time it took over that of training the base, on the same machine as far as rows say."""
    return statistics.mean(
        m[name]["cost"]["seconds"] / m[name].get("base", {}).get("seconds", m[UNDEFENDED]["cost"]["seconds"])
        for m in having(seeds, name).values()
    )


def strongest(seeds: Mapping[int, Mapping], name: str) -> str:
    """The attacks that were strongest in any seed."""
    return " or ".join(dict.fromkeys(m[name]["strongest"]["attack"] for m in having(seeds, name).values()))


def buys_table(seeds: Mapping[int, Mapping]) -> str:
    """Every model of a base, by leakage; `seeds` has the models of each."""
    names = list(dict.fromkeys(name for models in seeds.values() for name in models))
    names.sort(key=lambda n: (n != UNDEFENDED, mean_leak(having(seeds, n), n)))
    rows = []
    for name in names:
        mine = having(seeds, name)
        rows.append(
            [
                name,
                str(len(mine)),
                str(next(iter(mine.values()))[name].get("epochs", "")),
                active(mine, name),
                over_seeds(seeds, name, lambda m: m["train_accuracy"]),
                over_seeds(seeds, name, test_accuracy),
                f"{kept(mine, name):.2f}",
                over_seeds(seeds, name, leak),
                f"{over_seeds(seeds, name, by_strongest)} {strongest(seeds, name)}",
                over_seeds(seeds, name, lambda m: m["strongest"]["tpr@0.01"]),
                f"{of_base_time(seeds, name):.2f}",
            ]
        )
    header = [
        "model",
        "seeds",
        "epochs",
        "defense active",
        "train accuracy",
        "test accuracy",
        "of undefended",
        "AUC, confidence",
        "AUC, strongest",
        "its TPR at 1 % FPR",
        "time, of base training",
    ]
    return table(header, rows)


def not_run(base: str, seeds: Mapping[int, Mapping]) -> str:
    """Rows of the plan that no seed has, since a table does not show what is not in it; `seeds` has the models of each."""
    names = [n for n in plan()["retrainings"].get(base, {}) if not having(seeds, n)]
    return f"\n\nIn the plan and not run: {', '.join(names)}." if names else ""


def bases_trained_again(results: Results) -> list[str]:
    """Rows whose base is not the undefended model of the table but one of the same seed trained again, with its test accuracy."""
    found = []
    for base, seeds in results.items():
        for seed, models in models_of(seeds).items():
            of_table = models[UNDEFENDED]["test_accuracy"]["value"]
            others: dict[float, list[str]] = {}
            for name, m in models.items():
                own = m.get("base", models[UNDEFENDED])["test_accuracy"]["value"]
                if own != of_table:
                    others.setdefault(own, []).append(name)
            found += [
                f"`{base}`, seed {seed} (the table's base {of_table:.3f}): {', '.join(names)} from one of {own:.3f}"
                for own, names in others.items()
            ]
    return found


def goal_table(results: Results, rows: Sequence[str], bases: Sequence[str]) -> str:
    """Rows that go for the goal, and the RelaxLoss from scratch that is nearest in leakage to the first of them, seed by seed."""
    lines = []
    for base in bases:
        seeds = models_of(results.get(base, {}))
        for name in (*rows, *nearest_rival(seeds, rows[0])):
            mine = having(seeds, name)
            lines += [[base, name, str(seed), *_goal_cells({seed: models}, name)] for seed, models in mine.items()]
            if len(mine) > 1:
                lines.append([base, name, "mean", *_goal_cells(mine, name)])
    header = ["base", "model", "seed", "test accuracy", "of undefended", "AUC, confidence", "AUC, strongest"]
    return table(header, lines)


def _goal_cells(seeds: Mapping[int, Mapping], name: str) -> list[str]:
    accuracy = over_seeds(seeds, name, test_accuracy)
    leaks = (over_seeds(seeds, name, lambda m, by=by: turned(by(m))) for by in (by_confidence, by_strongest))
    return [accuracy, f"{kept(seeds, name):.3f}", *leaks]


ADAPTIVE = {"lira": "LiRA", "rmia_offline": "RMIA, offline", "rmia": "RMIA"}


def adaptive_table(found: Mapping) -> str:
    """The same models with the half model as the one reference, and with an ensemble that repeats their whole procedure."""
    attacks = {a: word for a, word in ADAPTIVE.items() if any(a in m["attacks"] for m in found["adaptive"].values())}
    rows = []
    for name, model in found["adaptive"].items():
        before, strongest = found["models"][name]["strongest"], model["strongest"]
        rows.append(
            [
                name,
                shown(test_accuracy(found["models"][name])),
                shown(leak(model)),
                f"{shown(turned(before['auc']))} {before['attack']}",
                *(shown(turned(model["attacks"][a]["auc"])) if a in model["attacks"] else "" for a in attacks),
                f"{shown(turned(strongest['auc']))} {strongest['attack']}",
                shown(strongest["tpr@0.01"]),
                model["references"].split()[0],
            ]
        )
    header = [
        "model",
        "test accuracy",
        "AUC, confidence",
        "strongest with the half model",
        *attacks.values(),
        "strongest with reference models",
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
    return table(["pair", "epochs", "time of an epoch", "time of all", "peak memory"], rows)


def converge_table(trainings: Mapping[str, Mapping]) -> str:
    cut = converge.CUT
    header = [
        "defense",
        f"epochs, from {cut} on",
        "epochs, from scratch",
        f"best test accuracy, from {cut} on",
        "from scratch",
    ]
    rows = [
        [r["defense"], *map(str, r["epochs"]), *(f"{best:.3f}" for best in r["best"])]
        for r in converge.compared(trainings)
    ]
    return table(header, rows)
