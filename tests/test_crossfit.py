"""Labels from outside: each half labels the other, in the order of the members, and a retraining or a reference model makes its own."""

import json

import numpy as np
import pytest
import torch

import pptp
from defenses import DEFENSES, CrossFit
from defenses.crossfit import Blends, mixed, partners, softened
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
    expected = np.where(np.isin(ids, splits.h1.indices), 2, 1)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    asked = torch.as_tensor(ids)[order]
    assert (found.probabilities(asked).argmax(1).numpy() == expected[order]).all()
    assert (found.say(torch.zeros(len(ids), 3, 8, 8), asked).argmax(1).numpy() == expected[order]).all()
    with pytest.raises(pptp.UserError, match="in neither half"):
        found.say(torch.zeros(1, 3, 8, 8), torch.as_tensor(splits.test.indices[:1]))


def test_labels_are_means_over_the_image_and_its_views(model, splits):
    from pptp.data import View
    from pptp.signals import collect

    part = splits.h1
    each = [collect(model, data).logits.softmax(1) for data in (part, *(View(part, k + 1) for k in range(VIEWS)))]
    assert torch.allclose(probabilities(model, part), sum(each) / len(each), atol=1e-6)


def test_mixed_labels_of_known_probabilities():
    p, hot = torch.tensor([[0.64, 0.36], [0.5, 0.5]]), torch.tensor([[0, 1], [1, 0]])
    assert softened(p.log(), 2.0)[0].tolist() == pytest.approx([0.8 / 1.4, 0.6 / 1.4])
    assert mixed(p, hot, 0.5).tolist() == [pytest.approx([0.32, 0.68]), pytest.approx([0.75, 0.25])]
    assert mixed(p, hot, 0.0).tolist() == [[0, 1], [1, 0]]


def test_blends_are_made_within_a_half():
    halves = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    for _ in range(20):
        found = partners(halves)
        assert (halves[found] == halves).all() and sorted(found.tolist()) == list(range(7))


def test_a_blend_is_taught_what_its_teacher_says_of_that_blend(splits):
    """Against the definition, one sample at a time, with a teacher that answers by the pixels it is shown."""

    class Bright(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(scale))

        def forward(self, x):
            return self.scale * x.mean((1, 2, 3))[:, None] * torch.arange(4.0)

    taught = Teachers(Bright(2.0), Bright(-3.0), splits.h1, splits.h2)
    ids = torch.cat([torch.as_tensor(splits.h1.indices[:3]), torch.as_tensor(splits.h2.indices[:3])])
    x, y = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    student = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    defense = CrossFit(weight=0.7, temperature=3.0, mix=0.4)
    torch.manual_seed(5)
    found = Blends(defense, taught).loss(pptp.Step(student, x, y, ids, 0))
    torch.manual_seed(5)
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    other = partners(torch.tensor([0, 0, 0, 1, 1, 1]))
    losses = []
    for i, j in enumerate(other.tolist()):
        blend = share * x[i] + (1 - share) * x[j]
        scale = -3.0 if i < 3 else 2.0
        label = 0.7 * (scale * blend.mean() * torch.arange(4.0) / 3.0).softmax(0)
        label[y[i]] += 0.3 * share
        label[y[j]] += 0.3 * (1 - share)
        losses.append(-(label * student(blend[None])[0].log_softmax(0)).sum())
    assert found.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_without_weight_it_is_plain_training(model, splits, quick):
    initial, plain = pptp.snapshot(model), pptp.create("test_resnet", classes=4, img_size=32, seed=3)
    pptp.retrain(model, initial, "layer4", CrossFit(weight=0.0), splits.for_defense(teachers(splits)), quick)
    pptp.retrain(plain, initial, "layer4", DEFENSES["plain"](), splits, quick)
    assert torch.allclose(model.fc.weight, plain.fc.weight, atol=1e-5)


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_members_are_taught_what_is_said_outside_and_not_their_labels(model, splits, mix):
    """With teachers that always say class 0, members of every class come to look like class 0."""
    recipe = pptp.Recipe(epochs=8, batch_size=20, opt="adamw", lr=3e-3, augment=False)
    defense = CrossFit(temperature=1.0, mix=mix)
    pptp.retrain(model, None, "layer3", defense, splits.for_defense(teachers(splits)), recipe)
    assert (pptp.collect(model, splits.members).logits.argmax(1) == 0).float().mean() > 0.9


def test_subsets_of_your_own_data_are_labelled_by_their_ids(pool):
    """Members in any order, as torch Subsets: every sample of a batch meets what was said of it."""
    from torch.utils.data import Subset

    images = [(pool[i][0], pool[i][1]) for i in range(40)]
    order = np.random.default_rng(0).permutation(40)
    members, h1, h2 = (Subset(images, ids) for ids in (order[:20], sorted(order[:10]), sorted(order[10:20])))
    taught = Teachers(Says(1), Says(2), h1, h2)
    data = pptp.TrainingData(members, outside=taught)
    labels = CrossFit(temperature=1.0).fixed(data)
    for x, y, i in (data.members[k] for k in range(20)):
        assert torch.equal(x, images[i][0]) and y == images[i][1]
        assert labels.teacher[labels.row[i]].argmax() == (2 if i in order[:10] else 1)


def test_bad_settings_and_missing_labels_are_refused(model, splits, quick):
    for settings, sentence in (
        ({"weight": 2}, "weight is 2"),
        ({"temperature": 0}, "temperature is 0"),
        ({"mix": -1}, "mix is -1"),
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
