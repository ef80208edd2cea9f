"""The command line: flags to settings, errors to one sentence. Heavy imports wait for the sub-command."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from dataclasses import fields
from pathlib import Path

from .config import Experiment, Recipe, check_names, experiment, flat_fields
from .errors import UserError

HELP = {
    "model": "timm model name, hf-hub:ID or local-dir:PATH",
    "model_kwargs": "options of the model, key=value",
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
    "opt": "optimizer, by timm's name",
    "sched": "cosine, step, multistep, poly, tanh or constant",
    "clip_grad": "largest gradient norm, 0 = no clipping",
    "augment": "random crop and flip while training",
    "device": "auto or cpu",
    "amp": "no, fp16 or bf16",
    "workers": "data loading processes",
    "full_checkpoint": "take M_all from this file",
    "half_checkpoint": "take M_h1 from this file",
    "sam_rho": "radius of sharpness-aware minimisation, 0 = off",
    "procedure": "train both models by this defense instead of plain cross-entropy, e.g. cskd",
    "splits_file": "take the parts from this .npz of sample ids (h1, h2, nonmembers, test, reference) instead of drawing them",
    "initial_checkpoint": "the weights that both started from",
    "keep_epochs": "epochs whose weights to keep for --rewind epoch=K, e.g. 1,5",
}
SHORT = {"batch_size": "-b", "workers": "-j"}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pptp",
        description="Find where an image classifier memorises, retrain just those layers under a privacy defense, and measure what it bought.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: str | None = "RUN") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if run:
            sub.add_argument("run", metavar=run, help="the run directory")
        sub.add_argument("--fresh", action="store_true", help="start over instead of resuming")
        return sub

    train = command("train", "train the full and the half model from the same initial weights")
    train.add_argument("--config", help="YAML file with settings; flags win over it")
    _add_settings(train, flat_fields())

    localize = command("localize", "find the stages that memorise")
    localize.add_argument("--delta", type=float, default=0.05, help="smallest |AUC - 1/2| that counts as risky (0.05)")
    localize.add_argument(
        "--probe-samples", type=int, default=2000, help="most samples of each kind for the linear probes (2000)"
    )
    localize.add_argument("--no-probes", action="store_true", help="distances only")

    retrain = command("retrain", "freeze, rewind and retrain under a defense, with its control")
    retrain.add_argument(
        "--defense", action="append", required=True, help="a name such as relaxloss, or module:Class; may be repeated"
    )
    retrain.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a setting of the defense, of several ones as DEFENSE.FIELD=VALUE; may be repeated",
    )
    retrain.add_argument(
        "--trunk-data",
        choices=("same", "disjoint", "public"),
        help="dpsgd: what the frozen layers were trained on, for what epsilon covers (same)",
    )
    retrain.add_argument(
        "--cut", default="auto", help="first stage or block to retrain; auto, strict, block, head or scratch"
    )
    retrain.add_argument("--rewind", default="init", help="what the retrained layers start from: init, epoch=K or none")
    retrain.add_argument("--name", default="", help="folder below RUN/retrain")
    retrain.add_argument("--no-control", action="store_true", help="do not also retrain with plain cross-entropy")
    _add_settings(retrain, {f.name: flat_fields()[f.name] for f in fields(Recipe)}, as_trained=True)

    evaluate = command("evaluate", "attack every model of the run, side by side")
    evaluate.add_argument(
        "--attack", action="append", default=[], help="a name, or module:function; may be repeated (all)"
    )
    command("report", "write report.html")
    demo = command("demo", "the whole road on scikit-learn's digits, a few minutes, no download", run=None)
    demo.add_argument("run", nargs="?", default="runs/demo", metavar="RUN", help="the run directory (runs/demo)")
    return top


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
            sub.add_argument(*flags, nargs="+", metavar="KEY=VALUE", default=argparse.SUPPRESS, help=shown)
        else:
            sub.add_argument(*flags, type=kind, metavar=kind.__name__.upper(), default=argparse.SUPPRESS, help=shown)


def settings_of(arguments: argparse.Namespace) -> dict:
    """Flags over the config file, over defaults."""
    given = {name: getattr(arguments, name) for name in flat_fields() if hasattr(arguments, name)}
    if isinstance(given.get("model_kwargs"), list):
        given["model_kwargs"] = _literals(given["model_kwargs"])
    return {**_from_yaml(getattr(arguments, "config", None)), **given}


def _literals(pairs: list[str]) -> dict:
    import ast

    from .plugins import parse_settings

    def value(text: str):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text  # a plain word

    return {key: value(text) for key, text in parse_settings(pairs).items()}


def _from_yaml(path: str | None) -> dict:
    if not path:
        return {}
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"the config {path} is not YAML{where}: {getattr(error, 'problem', error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"the config {path} must be a list of setting: value lines")
    loaded = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    check_names(loaded)
    return {key: _typed(key, value) for key, value in loaded.items()}


def _typed(key: str, value):
    """YAML reads 1e-3 as text: give every value the type of its setting."""
    kind, _ = flat_fields()[key]
    if kind is str and isinstance(value, bool):  # YAML's no and yes: `amp: no`
        return "yes" if value else "no"
    try:
        typed = value if kind in (dict, bool) else kind(value)
        fits = isinstance(typed, kind) and not (kind is int and float(value) != typed)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise UserError(f"{key} is {value!r} in the config: it must be of type {kind.__name__}")
    return typed


def run_command(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    plan: Experiment | None = experiment(settings) if arguments.command == "train" else None
    from . import commands

    if arguments.command == "train":
        commands.train_run(arguments.run, plan, arguments.fresh)
    elif arguments.command == "localize":
        commands.localize_run(
            arguments.run, arguments.delta, not arguments.no_probes, arguments.probe_samples, arguments.fresh
        )
    elif arguments.command == "retrain":
        changes = {f.name: settings[f.name] for f in fields(Recipe) if f.name in settings}
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
        )
    elif arguments.command == "evaluate":
        commands.evaluate_run(arguments.run, arguments.attack, arguments.fresh)
    elif arguments.command == "report":
        commands.report_run(arguments.run)
    else:
        from .demo import demo

        demo(arguments.run, arguments.fresh)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        run_command(arguments)
    except UserError as error:
        print(f"pptp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pptp: stopped; the same command goes on from the last finished epoch", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            print(f"pptp: {error.strerror or error} ({error.filename})", file=sys.stderr)
            return 2
        print(
            f"pptp: the disk is full ({error.filename or os.getcwd()}): free some space and run the same command again; what was finished is kept",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
