"""The command line: flags to settings, errors to one sentence. Heavy imports wait for the sub-command."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from dataclasses import fields

from . import studying
from .config import Experiment, Recipe, experiment, flat_fields
from .errors import UserError, own_file
from .settings import from_yaml, literals

HELP = {
    "model": "timm model name, hf-hub:ID or local-dir:PATH",
    "model_kwargs": "an option of the model, key=value; may be repeated",
    "norm": "gn, ln or none in place of BatchNorm; of some stages only as gn:layer3,layer4",
    "pretrained": "start from timm's pretrained weights",
    "data": "digits, a folder, a .tar, torch/NAME or hfds/NAME",
    "data_dir": "where the named data set lies",
    "train_split": "split that members come from",
    "val_split": "split for non-members and test; without it all parts are drawn at random from one split (recommended: then they differ in nothing but membership)",
    "download": "let torchvision download the data",
    "img_size": "side of the square input in pixels",
    "limit_classes": "use the first K classes only",
    "limit_per_class": "use K images of each class only",
    "pixel_noise": "digits only: noise fixed per image",
    "label_noise": "digits only: share of wrong labels",
    "members": "share or number of training members",
    "reference": "share or number of samples that a defense may use besides",
    "nonmembers": "share or number of non-members to attack",
    "test": "share or number of held-out test samples",
    "canaries": "odd samples besides, trained on or not by the toss of a coin, for pptp audit",
    "canary_kind": "mislabelled or noise",
    "opt": "optimizer, by timm's name",
    "sched": "cosine, step, multistep, poly, tanh or constant",
    "clip_grad": "largest gradient norm, 0 = no clipping",
    "augment": "random crop and flip while training",
    "device": "auto or cpu",
    "amp": "no, fp16 or bf16",
    "compile": "no, inductor, aot_eager or cudagraphs: run training steps through torch.compile (then without a trunk cache)",
    "channels_last": "train with the channels last in memory, which some processors prefer",
    "workers": "data loading processes",
    "full_checkpoint": "take M_all from this file",
    "half_checkpoint": "take M_h1 from this file",
    "sam_rho": "radius of sharpness-aware minimisation, 0 = off",
    "procedure": "train both models by this defense instead of plain cross-entropy, e.g. cskd",
    "splits_file": "take the parts from this .npz instead of drawing them: h1, h2, nonmembers, test, reference as file names, or as sample ids in the order of samples.csv of a run",
    "initial_checkpoint": "the weights that both started from",
    "keep_epochs": "epochs whose weights to keep for --rewind epoch=K, e.g. 1,5",
}
SHORT = {"batch_size": "-b", "workers": "-j"}


class Parser(argparse.ArgumentParser):
    """Says what was wrong in one sentence, without the usage before it."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help shows what it takes\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="pptp",
        description="Find where an image classifier memorises, retrain just those layers under a privacy defense, and measure what it bought.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: bool = True, fresh: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if run:
            sub.add_argument("run", metavar="RUN", help="the run directory")
        if fresh:
            sub.add_argument("--fresh", action="store_true", help="start over instead of resuming")
        return sub

    _train_flags(command("train", "train the full and the half model from the same initial weights"))
    _harden_flags(
        command("harden", "everything in one go: train, localize, choose a defense, retrain, attack", run=False)
    )
    _localize_flags(command("localize", "find the stages that memorise"))
    _retrain_flags(command("retrain", "freeze, rewind and retrain under a defense, with its control"))
    _frontier_flags(command("frontier", "retrain over a grid of settings and cuts, and choose", fresh=False))
    _ensemble_flags(command("ensemble", "train reference models, for the attacks that need them", fresh=False))
    _evaluate_flags(command("evaluate", "attack every model of the run, side by side"))
    studying.add_flags(command("monitor", "when and where a finished run memorised", run=False, fresh=False))
    _audit_flags(command("audit", "lower bounds on epsilon, beside what a defense claims", fresh=False))
    report = command("report", "write report.html", fresh=False)
    report.add_argument("--no-images", action="store_true", help="leave the most exposed images out of the page")
    _attack_flags(command("attack", "attack outputs of a model that was not trained here", run=False, fresh=False))
    stages = command("stages", "the stages of a timm model: where it can be cut", run=False, fresh=False)
    stages.add_argument("model", metavar="MODEL", help=HELP["model"])
    stages.add_argument(
        "--img-size", type=int, default=0, help="side of the square input (what the model was made for)"
    )
    stages.add_argument("--blocks", action="store_true", help="block by block")
    demo = command("demo", "the whole road on scikit-learn's digits, a few minutes, no download", run=False)
    demo.add_argument("run", nargs="?", default="runs/demo", metavar="RUN", help="the run directory (runs/demo)")
    return top


def _train_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--config", help="YAML file with settings; flags win over it")
    sub.add_argument(
        "--monitor",
        action="append",
        default=[],
        choices=("curvature", "dynamics", "tokens", "batchnorm"),
        help="look on while the full model is trained; may be repeated",
    )
    sub.add_argument("--monitor-every", type=int, default=1, help="epochs between looks (1)")
    sub.add_argument("--monitor-samples", type=int, default=2000, help="most training samples that are watched (2000)")
    _add_settings(sub, flat_fields())


def _harden_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help=HELP["model"])
    sub.add_argument("data", metavar="DATA", help=HELP["data"])
    sub.add_argument("--target-auc", type=float, default=0.55, help="AUC that the strongest attack may reach (0.55)")
    sub.add_argument("--run", default="", help="the run directory (runs/harden-MODEL)")
    sub.add_argument("--rounds", type=int, default=2, help="refinements around the best setting (2)")
    sub.add_argument("--config", help="YAML file with settings; flags win over it")
    _add_settings(sub, {name: kind for name, kind in flat_fields().items() if name not in ("model", "data")})


def _localize_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--delta", type=float, default=0.05, help="smallest |AUC - 1/2| that counts as risky (0.05)")
    sub.add_argument(
        "--probe-samples", type=int, default=2000, help="most samples of each kind for the linear probes (2000)"
    )
    sub.add_argument("--no-probes", action="store_true", help="distances only")


def _retrain_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--defense", action="append", required=True, help="a name such as relaxloss, or module:Class; may be repeated"
    )
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a setting of the defense, of several ones as DEFENSE.FIELD=VALUE; may be repeated",
    )
    sub.add_argument(
        "--trunk-data",
        choices=("same", "disjoint", "public"),
        help="dpsgd: what the frozen layers were trained on, for what epsilon covers (same)",
    )
    sub.add_argument(
        "--cut", default="auto", help="first stage or block to retrain; auto, strict, block, head or scratch"
    )
    sub.add_argument("--rewind", default="init", help="what the retrained layers start from: init, epoch=K or none")
    sub.add_argument("--name", default="", help="folder below RUN/retrain")
    sub.add_argument("--no-control", action="store_true", help="do not also retrain with plain cross-entropy")
    _cache_flags(sub)
    _add_settings(sub, {f.name: flat_fields()[f.name] for f in fields(Recipe)}, as_trained=True)


def _cache_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--cache",
        choices=("auto", "memory", "disk", "none"),
        default="auto",
        help="where to keep what the frozen layers say (auto: memory, a file or nowhere, by the budget)",
    )
    sub.add_argument("--cache-gb", type=float, default=2.0, help="memory budget of the cache (2)")
    sub.add_argument(
        "--views",
        type=int,
        default=0,
        help="with augmentation, keep this many views of each image (0: fresh ones, no cache)",
    )
    sub.add_argument("--cache-dtype", choices=("float32", "float16"), default="float32", help="float16: half the room")


def _frontier_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--defense", action="append", required=True, help="a name such as relaxloss, or module:Class; one at a time"
    )
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=V1,V2,...",
        help="values of a setting to try, e.g. alpha=0.25,0.5,1; may be repeated",
    )
    sub.add_argument("--cut", default="auto", help="cuts to try, e.g. layer3,layer4 (auto)")
    sub.add_argument("--rewind", default="init", choices=("init", "none"), help="what the retrained layers start from")
    sub.add_argument("--target-auc", type=float, help="choose the most accurate point that leaks no more")
    sub.add_argument("--min-accuracy", type=float, help="choose the least leaky point that is this accurate")
    sub.add_argument("--rounds", type=int, default=2, help="how often to refine around the chosen point (2)")
    _cache_flags(sub)
    _add_settings(sub, {f.name: flat_fields()[f.name] for f in fields(Recipe)}, as_trained=True)


def _ensemble_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--models", type=int, default=16, help="how many, an even number; more can be added later (16)")
    sub.add_argument(
        "--procedure",
        default="undefended",
        help="how: undefended, or as a retraining of this run by its name, trunk and all: the adaptive attacker",
    )
    sub.add_argument("--own-cut", action="store_true", help="each localises for itself, at twice the price")
    sub.add_argument("--queries", type=int, default=0, help="augmented queries of every sample to record (0)")
    sub.add_argument("--record-epochs", default="", help="epochs after which to record outputs too, e.g. 1,5,10")
    sub.add_argument("--processes", type=int, default=1, help="models trained at once (1)")
    sub.add_argument("--only", type=int, help="train model number K alone, for one job of a cluster's array")
    sub.add_argument("--ensemble-seed", type=int, default=0, help="of the halves (0)")


def _gate_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--attack",
        action="append",
        default=[],
        help="a name, a group (scores, references, label_only, white_box, all) or module:function; may be repeated",
    )
    sub.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="RULE",
        help='exit with 1 if this surely holds: "auc>0.6", "tpr@0.01>0.03", "MODEL:ATTACK.auc>0.6"; may be repeated',
    )
    sub.add_argument("--fail-undecided", action="store_true", help="fail also where the interval includes the bound")
    sub.add_argument("--json", default="", metavar="FILE", help="write results and verdicts")
    sub.add_argument("--junit", default="", metavar="FILE", help="write the verdicts as JUnit XML")


def _evaluate_flags(sub: argparse.ArgumentParser) -> None:
    _gate_flags(sub)
    sub.add_argument("--slices", default="", metavar="FILE", help=".npz of named arrays of sample ids to judge apart")
    sub.add_argument(
        "--queries", type=int, default=8, help="augmented queries of a sample, for the attacks on them (8)"
    )
    sub.add_argument("--query-budget", type=int, default=100, help="label-only queries of a sample (100)")


def _audit_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--delta", type=float, help="delta of the bounds (as claimed, or 0)")
    sub.add_argument("--attack", default="confidence", help="whose score is thresholded (confidence)")


def _attack_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--logits",
        required=True,
        metavar="FILE",
        help=".npz with logits or probabilities, labels, members, and optionally reference_logits and reference_members",
    )
    _gate_flags(sub)


def _add_settings(sub: argparse.ArgumentParser, settings: dict, as_trained: bool = False) -> None:
    """One flag per setting; absent ones stay absent, so that config files and defaults show through."""
    for name, (kind, default) in settings.items():
        flags = [f"--{name.replace('_', '-')}"] + ([SHORT[name]] if name in SHORT else [])
        if as_trained:
            default = "half of training's, made even" if name == "epochs" else "as in training"
        shown = f"{HELP.get(name, '')} ({default})" if default not in ("", {}, False) else HELP.get(name, "")
        if kind is bool:
            sub.add_argument(*flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=shown)
        elif kind is dict:
            sub.add_argument(*flags, action="append", metavar="KEY=VALUE", default=argparse.SUPPRESS, help=shown)
        else:
            sub.add_argument(*flags, type=kind, metavar=kind.__name__.upper(), default=argparse.SUPPRESS, help=shown)


def settings_of(arguments: argparse.Namespace) -> dict:
    """Flags over the config file, over defaults."""
    given = {name: getattr(arguments, name) for name in flat_fields() if hasattr(arguments, name)}
    if isinstance(given.get("model_kwargs"), list):
        given["model_kwargs"] = literals(given["model_kwargs"])
    return {**from_yaml(getattr(arguments, "config", None)), **given}


def run_command(arguments: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    settings = settings_of(arguments)
    plan: Experiment | None = experiment(settings) if arguments.command in ("train", "harden") else None
    changes = {f.name: settings[f.name] for f in fields(Recipe) if f.name in settings}
    if arguments.command in ("ensemble", "evaluate", "audit", "attack"):
        return _attacking(arguments)
    if arguments.command == "frontier":
        return _frontier(arguments, changes)
    if arguments.command == "harden":
        from .harden import harden_run

        path = arguments.run or f"runs/harden-{arguments.model.replace('/', '_').replace(':', '_')}"
        return 0 if harden_run(path, plan, arguments.target_auc, arguments.rounds, arguments.fresh) else 1
    from . import commands

    if arguments.command == "train":
        from .watching import Watching

        watching = Watching(tuple(arguments.monitor), arguments.monitor_every, arguments.monitor_samples)
        commands.train_run(arguments.run, plan, arguments.fresh, watching)
    elif arguments.command == "monitor":
        studying.run(arguments)
    elif arguments.command == "localize":
        commands.localize_run(
            arguments.run, arguments.delta, not arguments.no_probes, arguments.probe_samples, arguments.fresh
        )
    elif arguments.command == "retrain":
        _retrain(arguments, changes)
    elif arguments.command == "stages":
        commands.stages_of(arguments.model, arguments.img_size, arguments.blocks)
    elif arguments.command == "report":
        commands.report_run(arguments.run, not arguments.no_images)
    else:
        from .demo import demo

        demo(arguments.run, arguments.fresh)
    return 0


def _retrain(arguments: argparse.Namespace, changes: dict) -> None:
    from . import commands
    from .plugins import share_out

    wanted = arguments.set + ([f"trunk_data={arguments.trunk_data}"] if arguments.trunk_data else [])
    commands.retrain_run(
        arguments.run,
        share_out("defenses", arguments.defense, wanted),
        changes,
        arguments.cut,
        arguments.rewind,
        arguments.name,
        not arguments.no_control,
        arguments.fresh,
        _policy(arguments),
    )


def _policy(arguments: argparse.Namespace):
    from .cache import Policy

    return Policy(arguments.cache, arguments.cache_gb, arguments.views, arguments.cache_dtype)


def _frontier(arguments: argparse.Namespace, changes: dict) -> int:
    from .attacking import frontier_run
    from .plugins import parse_settings

    if len(arguments.defense) > 1:
        raise UserError(f"a frontier is of one defense: run it once for each of {', '.join(arguments.defense)}")
    sweeps = {name: values.split(",") for name, values in parse_settings(arguments.set).items()}
    from .frontier import choose

    points = frontier_run(
        arguments.run,
        arguments.defense[0],
        sweeps,
        arguments.cut.split(","),
        changes,
        arguments.rewind,
        arguments.target_auc,
        arguments.min_accuracy,
        arguments.rounds,
        _policy(arguments),
    )
    asked = arguments.target_auc is not None or arguments.min_accuracy is not None
    return 1 if asked and choose(points, arguments.target_auc, arguments.min_accuracy) is None else 0


def _attacking(arguments: argparse.Namespace) -> int:
    """The commands that attack; 1 where a bound is broken."""
    from . import attacking
    from .measures import Effort

    if arguments.command == "ensemble":
        attacking.ensemble_run(
            arguments.run,
            arguments.models,
            arguments.procedure,
            arguments.queries,
            _epochs(arguments.record_epochs),
            arguments.own_cut,
            arguments.processes,
            arguments.only,
            arguments.ensemble_seed,
        )
        return 0
    if arguments.command == "audit":
        attacking.audit_run(arguments.run, arguments.delta, arguments.attack)
        return 0
    gate = attacking.Gate(arguments.fail_if, arguments.fail_undecided, arguments.json, arguments.junit)
    if arguments.command == "attack":
        return 0 if attacking.attack_outputs(arguments.logits, arguments.attack, gate) else 1
    effort = Effort(arguments.queries, arguments.query_budget)
    passed = attacking.evaluate_run(arguments.run, arguments.attack, arguments.fresh, gate, effort, arguments.slices)
    return 0 if passed else 1


def _epochs(text: str) -> list[int]:
    if not all(part.strip().isdigit() for part in text.split(",") if part):
        raise UserError(f"record_epochs is {text!r}: give epochs such as 1,5,10")
    return [int(part) for part in text.split(",") if part]


def main(argv: list[str] | None = None) -> int:
    arguments, strange = parser().parse_known_args(argv)
    if strange:
        print(f"pptp {arguments.command}: there is no {strange[0]} here; pptp {arguments.command} --help shows what it takes", file=sys.stderr)
        return 2
    try:
        return run_command(arguments)
    except UserError as error:
        print(f"pptp: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"pptp: {error}: is the installation complete?", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pptp: stopped; the same command goes on from the last finished epoch", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has closed it; the work is not done, and no gate was passed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            print(f"pptp: {error.strerror or error} ({error.filename})", file=sys.stderr)
            return 2
        print(
            f"pptp: the disk is full ({error.filename or os.getcwd()}): free some space and run the same command again; what was finished is kept",
            file=sys.stderr,
        )
        return 2
    except Exception as error:  # 1 means that a bound was broken: a crash must not look like that
        traceback.print_exc()
        own = own_file(error)
        whose = f"{own} raised {type(error).__name__}: {error}" if own else "this is a bug of pptp"
        print(f"pptp: {whose}; what was finished is kept", file=sys.stderr)
        return 2 if own else 3


if __name__ == "__main__":
    raise SystemExit(main())
