"""Labels from outside: each half labels the other, in the order of the members, and a retraining or a reference model makes its own."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import pptp
from defenses import DEFENSES, CrossFit
from defenses.crossfit import mixed
from defenses.selena import Lookup
from pptp.cli import main
from pptp.outside import VIEWS, Teachers, probabilities
from pptp.runs import Run

SMALL = [
    "--model", "test_resnet", "--data", "digits", "--limit-classes", "4", "--limit-per-class", "60", "--members", "80", "--reference", "20",
    "--nonmembers", "80", "--test", "40", "--epochs", "4", "-b", "20", "--opt", "adamw", "--lr", "0.003", "--no-augment",
]  # fmt: skip


class Says(torch.nn.Module):
    """Always the same class."""

    def __init__(self, c):
        super().__init__()
        self.logits = torch.nn.Parameter(10.0 * torch.nn.functional.one_hot(torch.tensor(c), 4).float())

    def forward(self, x):
        return self.logits.expand(len(x), -1)


def teachers(splits, of_h1=0, of_h2=0):
    return Teachers(Says(of_h1), Says(of_h2), splits.h1, splits.h2)


def test_each_half_is_labelled_by_the_model_of_the_other(splits):
    found, ids = teachers(splits, 1, 2), splits.members.indices
    order = np.random.default_rng(0).permutation(ids)
    said = found.probabilities(pptp.data.Part(splits.pool, order, "in any order")).argmax(1).numpy()
    assert (said == np.where(np.isin(order, splits.h1.indices), 2, 1)).all()
    with pytest.raises(pptp.UserError, match="in neither half"):
        found.probabilities(splits.test)


def test_labels_are_means_over_the_image_and_its_views(model, splits):
    from pptp.data import View
    from pptp.signals import collect

    part = splits.h1
    each = [collect(model, data).logits.softmax(1) for data in (part, *(View(part, k + 1) for k in range(VIEWS)))]
    assert torch.allclose(probabilities(model, part), sum(each) / len(each), atol=1e-6)


def test_mixed_labels_of_known_probabilities():
    p = torch.tensor([[0.64, 0.36], [0.5, 0.5]])
    soft = mixed(p, np.array([1, 0]), 1.0, 2.0)
    assert soft[0].tolist() == pytest.approx([0.8 / 1.4, 0.6 / 1.4])
    half = mixed(p, np.array([1, 0]), 0.5, 1.0)
    assert half.tolist() == [pytest.approx([0.32, 0.68]), pytest.approx([0.75, 0.25])]
    assert mixed(p, np.array([1, 0]), 0.0, 1.0).tolist() == [[0, 1], [1, 0]]


def test_without_weight_it_is_plain_training(model, splits, quick):
    initial, plain = pptp.snapshot(model), pptp.create("test_resnet", classes=4, img_size=32, seed=3)
    pptp.retrain(model, initial, "layer4", CrossFit(weight=0.0), splits.for_defense(teachers(splits)), quick)
    pptp.retrain(plain, initial, "layer4", DEFENSES["plain"](), splits, quick)
    assert torch.allclose(model.fc.weight, plain.fc.weight, atol=1e-5)


def test_members_are_taught_what_is_said_outside_and_not_their_labels(model, splits):
    """With teachers that always say class 0, members of every class come to look like class 0."""
    recipe = pptp.Recipe(epochs=8, batch_size=20, opt="adamw", lr=3e-3, augment=False)
    data = splits.for_defense(teachers(splits))
    pptp.retrain(model, None, "layer3", CrossFit(temperature=1.0), data, recipe)
    assert (pptp.collect(model, splits.members).logits.argmax(1) == 0).float().mean() > 0.9


def test_subsets_of_your_own_data_are_labelled_by_their_ids(pool):
    """Members in any order, as torch Subsets: every sample of a batch meets what was said of it."""
    images = [(pool[i][0], pool[i][1]) for i in range(40)]
    order = np.random.default_rng(0).permutation(40)
    members, h1, h2 = (Subset(images, ids) for ids in (order[:20], sorted(order[:10]), sorted(order[10:20])))
    data = pptp.TrainingData(members, outside=Teachers(Says(1), Says(2), h1, h2))
    labels = Lookup(data.members, data.outside.probabilities(data.members))
    for x, y, i in (data.members[k] for k in range(20)):
        assert torch.equal(x, images[i][0]) and y == images[i][1]
        assert labels.teacher[labels.row[i]].argmax() == (2 if i in order[:10] else 1)


def test_bad_settings_and_missing_labels_are_refused(model, splits, quick):
    for settings, sentence in (
        ({"weight": 2}, "weight is 2"),
        ({"temperature": 0}, "temperature is 0"),
    ):
        with pytest.raises(pptp.UserError, match=sentence):
            CrossFit(**settings).check(4, quick)
    with pytest.raises(pptp.UserError, match="outside=..."):
        pptp.retrain(model, None, "head", CrossFit(), splits, quick)


def test_commands_train_the_other_half_once_and_references_have_halves_of_their_own(tmp_path):
    path = str(tmp_path / "r")
    assert main(["train", path, *SMALL]) == 0
    assert main(["retrain", path, "--defense", "crossfit", "--cut", "layer3", "--no-control"]) == 0
    run = Run.open(path)
    trained = (run.folder("other") / "last.safetensors").stat().st_mtime_ns
    assert main(["frontier", path, "--defense", "crossfit", "--set", "weight=0.5,1", "--cut", "layer4"]) == 0
    assert (run.folder("other") / "last.safetensors").stat().st_mtime_ns == trained
    record = json.loads((run.folder("crossfit-layer3") / "defense.json").read_text())
    assert 0 <= record["result"]["outside_accuracy"] <= 1
    assert main(["ensemble", path, "--models", "2", "--procedure", "crossfit-layer3"]) == 0
    assert main(["evaluate", path]) == 0
