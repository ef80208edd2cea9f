"""The paper's claims on real images.

    python -m benchmarks.claims work --data path/to/tiny-imagenet-40.tar                       # everything, one seed
    python -m benchmarks.claims work --data ... --base resnet18-augmented --seeds 42,43,44     # more seeds of one base
    python -m benchmarks.claims attack --data ... --base resnet18-augmented --seeds 43         # reference models by the whole procedure, after work
    python -m benchmarks.claims converge --data ... --seeds 43                                 # epochs until converged, PPTP and from scratch
    python -m benchmarks.claims cost                                                           # time and memory, PPTP over scratch; wants a quiet machine
    python -m benchmarks.claims status                                                         # what is there, what is missing
    python -m benchmarks.claims render                                                         # tables and figures from whatever is there

Work goes on where it was stopped. Results are in benchmarks/claims/results, one file a base and seed; `render` writes them into
benchmarks/RESULTS.md and benchmarks/claims/figures, and a few of its rows into README.md. A table half done is rendered as far as it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pptp.errors import UserError

from .work import Cell, attack, plan, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("work", "attack", "converge", "cost", "status", "render"))
    parser.add_argument("--data", help="the images, for work")
    parser.add_argument("--base", action="append", default=[], help="only this base; may be repeated")
    parser.add_argument("--seeds", default="42", help="e.g. 42,43,44 (42)")
    parser.add_argument("--only", default="", help="only retrainings whose names start so; several with commas")
    parser.add_argument("--runs", default="runs/claims", help="where models are kept (runs/claims)")
    arguments = parser.parse_args()
    if arguments.action == "render":
        from .render import render

        return render()
    if arguments.action == "cost":
        from .cost import measure

        return measure()
    unknown = [base for base in arguments.base if base not in plan()["bases"]]
    if unknown:
        sys.exit(f"there is no base called {', '.join(unknown)}: plan.yaml has {', '.join(plan()['bases'])}")
    if not all(seed.isdigit() for seed in arguments.seeds.split(",")):
        sys.exit(f"--seeds is {arguments.seeds}: whole numbers with commas, like 42,43")
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    only = tuple(arguments.only.split(","))
    cells = [Cell(base, seed) for seed in seeds for base in arguments.base or plan()["bases"]]
    strange = [o for o in only if not any(name.startswith(o) for cell in cells for name in ("", *cell.retrainings))]
    if strange:
        sys.exit(f"no retraining of these bases starts with {', '.join(strange)}: plan.yaml has their names")
    if arguments.action in ("work", "attack", "converge") and not (arguments.data and Path(arguments.data).exists()):
        sys.exit(f"{arguments.action} needs --data: the folder or .tar of TinyImageNet")
    if arguments.action == "converge":
        from .converge import measure

        return measure(arguments.data, Path(arguments.runs), seeds[0])
    for cell in cells:
        if arguments.action == "attack":
            if not cell.has_base:
                sys.exit(f"there are no results of {cell.name} to put beside the attacks: make them first, with work")
            attack(cell, arguments.data, Path(arguments.runs), only, log=sys.stderr)
            continue
        missing = cell.missing(only)
        where = "there" if cell.has_base else "missing"
        print(f"{cell.name}: base {where}, {len(missing)} of {len(cell.retrainings)} retrainings missing", flush=True)
        if arguments.action == "work":
            work(cell, arguments.data, Path(arguments.runs), only, log=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
