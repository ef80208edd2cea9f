"""Small real models and made data; nothing here downloads anything."""

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy as np
import pytest
import torch

import pptp
from pptp.cli import main
from pptp.data import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Pool:
    """240 noise images of 4 classes whose mean colour tells the class a little."""
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 4
    pixels = rng.normal(110 + 10 * labels[:, None, None, None], 60, (240, 3, 32, 32)).clip(0, 255)
    return Pool(torch.tensor(pixels, dtype=torch.uint8), labels, (0.5,) * 3, (0.25,) * 3)


@pytest.fixture(scope="session")
def splits(pool):
    return pptp.split(pool, 80, 40, 80, 40, seed=1)


@pytest.fixture
def model():
    return pptp.create("test_resnet", classes=4, img_size=32, seed=3)


@pytest.fixture(scope="session")
def quick() -> pptp.Recipe:
    return pptp.Recipe(epochs=2, batch_size=20, opt="adamw", lr=3e-3, augment=False, seed=5)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time():
    torch.manual_seed(0)


# --- a small run, for the tests of commands ---

SMALL = [
    "--model",
    "test_resnet",
    "--data",
    "digits",
    "--members",
    "120",
    "--reference",
    "40",
    "--nonmembers",
    "120",
    "--test",
    "80",
    "--epochs",
    "12",
    "-b",
    "20",
    "--opt",
    "adamw",
    "--lr",
    "3e-3",
    "--no-augment",
    "--pixel-noise",
    "0.1",
]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """One run taken through every command."""
    path = tmp_path_factory.mktemp("runs") / "a"
    for command in (
        ["train", path, *SMALL, "--keep-epochs", "1,3"],
        ["localize", path, "--delta", "0.2"],
        ["retrain", path, "--defense", "relaxloss", "--set", "alpha=1.0", "--cut", "layer3", "--epochs", "4"],
        ["evaluate", path],
        ["report", path],
    ):
        assert main([str(word) for word in command]) == 0
    return path


@pytest.fixture
def copy_of_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def fails(capsys, *words) -> str:
    """The one sentence that a failing command prints."""
    assert main([str(word) for word in words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("pptp: "), lines
    return lines[-1]
