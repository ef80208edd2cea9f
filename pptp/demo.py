"""`pptp demo`: the whole road on scikit-learn's digits, with settings that were chosen once and recorded."""

from __future__ import annotations

from . import commands
from .config import experiment

SETTINGS = {
    "model": "test_resnet",
    "data": "digits",
    "img_size": 32,
    "pixel_noise": 0.15,
    "members": 600,
    "reference": 100,
    "nonmembers": 700,
    "test": 397,
    "epochs": 20,
    "batch_size": 32,
    "opt": "adamw",
    "lr": 1e-3,
    "weight_decay": 0.01,
    "augment": False,
}
DELTA = 0.1  # 300 + 300 images give intervals of about +-0.045, so a finer question has no answer here
ALPHA = 0.6


def demo(path: str, fresh: bool = False) -> None:
    print(
        "Data: scikit-learn's 8x8 digits at 32 px, few of them, with noise fixed per image, so that the model memorises.\n"
    )
    commands.train(path, experiment(SETTINGS), fresh)
    commands.locate(path, delta=DELTA, fresh=fresh)
    commands.harden(path, "relaxloss", [f"alpha={ALPHA}"], {}, fresh=fresh)
    commands.harden(
        path, "relaxloss", [f"alpha={ALPHA}"], {"epochs": SETTINGS["epochs"]}, cut="scratch", control=False, fresh=fresh
    )
    print()
    commands.attack(path, [], fresh)
    commands.show_report(path)
