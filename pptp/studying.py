"""`pptp monitor`: the flags of its studies, and what they ask for."""

from __future__ import annotations

import argparse

from .settings import one_setting


def add_flags(sub: argparse.ArgumentParser) -> None:
    kinds = sub.add_subparsers(dest="monitor_name", required=True, metavar="NAME")

    def kind(name: str, text: str) -> argparse.ArgumentParser:
        own = kinds.add_parser(name, help=text, description=text)
        own.add_argument("run", metavar="RUN", help="the run directory")
        return own

    plane = kind("dynamics", "samples on the FPR-TPR plane over training, difficulty, early warning")
    plane.add_argument("--procedure", default="undefended", help="of which models (undefended)")
    plane.add_argument("--fpr", type=float, default=0.1, help="false-positive rate of the threshold (0.1)")
    bend = kind("curvature", "input-loss curvature of every model, beside memorisation and epsilon")
    bend.add_argument("--estimator", default="fisher", help="fisher, hutchinson or fd_norm (fisher)")
    bend.add_argument("--samples", type=int, default=1000, help="members and non-members to look at, each (1000)")
    token = kind("tokens", "what gradients tell of their batch, and what can be rebuilt from them")
    token.add_argument("--extractor", default="transformer", help="transformer or autoencoder (transformer)")
    token.add_argument("--batches", type=int, default=200, help="batches at each checkpoint (200)")
    token.add_argument("--token-batch", type=int, default=8, help="samples of a batch (8)")
    token.add_argument("--critic-iterations", type=int, default=200, help="steps of training the critic (200)")
    token.add_argument("--images", type=int, default=1, help="images to rebuild from their gradients (1)")
    token.add_argument("--dlg-steps", type=int, default=30, help="steps of the rebuilding (30)")
    norm = kind("batchnorm", "train the model again with other norms and compare what they leak about outliers")
    norm.add_argument("--variants", default="bn,gn,ln,none", help="which norms (bn,gn,ln,none)")
    norm.add_argument(
        "--canaries", type=int, default=0, help="wrong labels among members and among non-members, each (a tenth)"
    )
    norm.add_argument("--epochs", type=int, default=0, help="of each training (as in training)")
    vary = kind("factors", "dynamics of variants of the run that differ in one setting")
    vary.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="SETTING=VALUE",
        help="a variant, e.g. sam_rho=0.05, model=resnet34, limit_classes=10; may be repeated",
    )
    vary.add_argument("--models", type=int, default=8, help="reference models of each variant (8)")
    vary.add_argument("--checkpoints", type=int, default=6, help="epochs to record, spread evenly in log scale (6)")
    vary.add_argument("--processes", type=int, default=1, help="models trained at once (1)")


def run(arguments: argparse.Namespace) -> None:
    from . import commands

    name, settings = arguments.monitor_name, {}
    if name == "dynamics":
        settings = {"procedure": arguments.procedure, "fpr": arguments.fpr}
    elif name == "curvature":
        settings = {"estimator": arguments.estimator, "samples": arguments.samples}
    elif name == "tokens":
        from .monitors.tokens import Settings

        chosen = Settings(
            arguments.extractor, arguments.batches, arguments.token_batch, iterations=arguments.critic_iterations
        )
        settings = {"settings": chosen, "images": arguments.images, "dlg_steps": arguments.dlg_steps}
    elif name == "batchnorm":
        variants = tuple(arguments.variants.split(","))
        settings = {"variants": variants, "canaries": arguments.canaries, "epochs": arguments.epochs}
    else:
        settings = {"changes": [one_setting(text) for text in arguments.vary], "models": arguments.models}
        settings |= {"checkpoints": arguments.checkpoints, "processes": arguments.processes}
    commands.monitor_run(arguments.run, name, **settings)
