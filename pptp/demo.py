"""`pptp demo`: the whole road on scikit-learn's digits, with settings that were chosen once and recorded."""

from __future__ import annotations

from . import attacking, commands
from .config import experiment

SETTINGS = {
    "model": "test_resnet",
    "data": "digits",
    "img_size": 32,
    "pixel_noise": 0.0,
    "label_noise": 0.2,
    "members": 600,
    "reference": 100,
    "nonmembers": 700,
    "test": 397,
    "epochs": 20,
    "batch_size": 32,
    "opt": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.01,
    "augment": False,
}
DELTA = 0.1  # 300 + 300 images give intervals of about +-0.045, so a finer question has no answer here
ALPHA = "alpha=1.0"

INTRODUCTION = """\
Data: scikit-learn's 8x8 digits at 32 px, 600 of them to train on, with 20 % of all labels replaced at random, so that
there is something to memorise. Accuracy is against these noisy labels: a perfect classifier would reach about 0.80.
"""


def demo(path: str, fresh: bool = False) -> None:
    """Train, localize, retrain under RelaxLoss with its control and from scratch, evaluate, report."""
    print(INTRODUCTION)
    commands.train_run(path, experiment(SETTINGS), fresh)
    commands.localize_run(path, delta=DELTA, fresh=fresh)
    commands.retrain_run(path, {"relaxloss": [ALPHA]}, {}, fresh=fresh)
    whole = {"epochs": SETTINGS["epochs"]}  # what the defense does without PPTP, at its full price
    commands.retrain_run(path, {"relaxloss": [ALPHA]}, whole, cut="scratch", control=False, fresh=fresh)
    print()
    attacking.evaluate_run(path, [], fresh)
    commands.report_run(path)
