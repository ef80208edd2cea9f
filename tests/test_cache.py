"""The trunk cache: what looks like an image, room on the disk, and which views are kept."""

import os
from dataclasses import dataclass, replace

import pytest
import torch

import pptp
from defenses import AdvReg
from pptp.cache import Policy, TrunkCache
from pptp.data import Samples, View
from pptp.suffix import CannotCut, Suffix, run_until
from pptp.training import cross_entropy


@dataclass(frozen=True)
class Plain(pptp.LossDefense):
    def loss(self, step):
        return cross_entropy(step)


@pytest.fixture
def trained(model, splits, quick):
    pptp.fit(model, splits.members, quick)
    return model


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise, self.body = torch.nn.BatchNorm2d(3), pptp.create("test_resnet", classes=4, img_size=32, seed=3)

    def forward(self, x):
        return self.body(self.normalise(x))


def test_an_activation_of_the_shape_of_an_image_is_not_taken_for_one(splits, quick):
    """Else the whole model would run on it, and normalise twice."""
    model = Normalised()
    parts = pptp.stages(model, (3, 32, 32), boundaries=["normalise", "body.layer2"])
    cut = parts[1].name
    with pytest.raises(CannotCut, match="has the shape of an image"):
        Suffix(model, parts, cut, (3, 32, 32))
    found = pptp.retrain(model, None, cut, Plain(), splits, quick, parts=parts)
    assert "has the shape of an image" in found["cache"], "trained all the same, without the cache"


def test_a_file_is_taken_only_where_there_is_room_for_it(trained, splits, monkeypatch, tmp_path):
    assert Policy("auto", gigabytes=1).place(5 * 2**30, free=6 * 2**30) == "disk"
    assert Policy("auto", gigabytes=1).place(5 * 2**30, free=5 * 2**30) == "none"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    parts = pptp.stages(trained, (3, 32, 32))
    with pytest.raises(pptp.UserError, match="there is no room for .* GB of the trunk's outputs in .*No space left"):
        TrunkCache(Policy("disk"), tmp_path).prepare(trained, parts, "layer4", splits.for_defense(), augment=False)


def test_files_of_activations_leave_nothing_behind(trained, splits, tmp_path):
    cache = TrunkCache(Policy("disk"), tmp_path)
    _, data, _ = cache.prepare(trained, pptp.stages(trained, (3, 32, 32)), "layer4", splits.for_defense(), augment=False)
    assert data.members[0][0].isfinite().all() and list(tmp_path.iterdir()) == [], "also while they are in use"


def test_kept_views_are_not_those_that_attacks_ask_about(trained, splits, quick):
    cache = TrunkCache(Policy("memory", views=2))
    parts = pptp.stages(trained, (3, 32, 32))
    suffix, data, _ = cache.prepare(trained, parts, "layer4", splits.for_defense(), augment=True)
    asked = run_until(trained, suffix.plan.boundary, torch.stack([View(splits.members, 1)[i][0] for i in range(8)]))
    assert not torch.allclose(data.members.store[1, :8], asked)


def test_the_adversary_sees_the_same_views_of_members_and_reference(trained, splits, quick):
    """A network that told kept views from the images themselves would look like one that tells members."""
    views = []

    class Looking(Samples):
        def __init__(self, part, name):
            self.part, self.name, self.labels, self.ids = part, name, part.labels, part.ids

        def __len__(self):
            return len(self.part)

        def set_epoch(self, epoch):
            self.part.set_epoch(epoch)

        def __getitem__(self, i):
            views.append((self.name, self.part.view))
            return self.part[i]

    cache = TrunkCache(Policy("memory", views=3))
    parts = pptp.stages(trained, (3, 32, 32))
    suffix, data, _ = cache.prepare(trained, parts, "layer4", splits.for_defense(), augment=True)
    data = replace(data, members=Looking(data.members, "members"), reference=Looking(data.reference, "reference"))
    AdvReg(k=1).train(suffix, data, replace(quick, epochs=3))
    assert set(views) == {("members", v) for v in (1, 2, 3)} | {("reference", v) for v in (2, 3)}, "but for the warm-up"
    assert data.reference.part.view == 0, "as it was"
