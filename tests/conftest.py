"""Small real models and made data; nothing here downloads anything."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy as np
import pytest
import torch

import pptp
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
