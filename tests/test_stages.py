import copy

import pytest
import timm
import torch
from torch import nn

import pptp
from pptp.stages import freeze, rewind, snapshot, split_at, stages, train_mode, unfreeze, watch

# One of each family that the README promises; 64 px keeps them quick.
FAMILIES = {
    "resnet18": (["stem", "layer1", "layer2", "layer3", "layer4", "head"], 10),
    "vgg11_bn": (["stem", "features.4", "features.8", "features.15", "features.22", "head"], 9),
    "densenet121": (
        [
            "stem",
            "features.denseblock1",
            "features.denseblock2",
            "features.denseblock3",
            "features.denseblock4",
            "head",
        ],
        6,
    ),
    "convnext_atto": (["stem", "stages.0", "stages.1", "stages.2", "stages.3", "head"], 14),
    "efficientnet_b0": (["stem", *(f"blocks.{i}" for i in range(7)), "head"], 19),
    "mobilenetv3_small_100": (["stem", *(f"blocks.{i}" for i in range(6)), "head"], 14),
    "test_vit": (["stem", *(f"blocks.{i}" for i in range(6)), "head"], 8),
    "swin_tiny_patch4_window7_224": (["stem", "layers.0", "layers.1", "layers.2", "layers.3", "head"], 14),
    "pvt_v2_b0": (["stem", "stages.0", "stages.1", "stages.2", "stages.3", "head"], 13),
}


def build(name):
    size = 224 if "swin" in name else 160 if "vit" in name else 64
    return timm.create_model(name, num_classes=5), (3, size, size)


@pytest.mark.parametrize("name", FAMILIES)
def test_partition_of_each_family_is_complete_ordered_and_usable(name):
    model, size = build(name)
    found = stages(model, size)
    expected_names, expected_blocks = FAMILIES[name]
    assert [stage.name for stage in found] == expected_names
    blocks = [block for stage in found for block in stage.blocks]
    assert len(blocks) == expected_blocks
    assert len({block.name for block in blocks}) == len(blocks)
    everything = sorted([n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()])
    for parts in (found, blocks):
        assert sorted(n for part in parts for n in part.parameter_names + part.buffer_names) == everything

    seen = []
    with watch(blocks, lambda part, output: seen.append((part, output.shape))), torch.no_grad():
        model.eval()(torch.randn(2, *size))
    assert [part for part, _ in seen] == [block.name for block in blocks]
    assert all(shape[0] == 2 for _, shape in seen)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "test_vit"])
def test_training_step_moves_the_suffix_only_buffers_included(name):
    model, size = build(name)
    parts = stages(model, size)
    cut = parts[-2].name
    trunk, suffix = split_at(parts, cut)
    freeze(trunk)
    before = snapshot(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    train_mode(model)
    model(torch.randn(4, *size)).square().sum().backward()
    optimizer.step()
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved and moved <= {n for part in suffix for n in part.parameter_names + part.buffer_names}
    if name != "test_vit":
        assert any("running_mean" in n for n in moved)


def test_frozen_batchnorm_would_move_without_train_mode(model):
    """The reason for `train_mode`: requires_grad_(False) alone does not hold running statistics."""
    trunk, _ = split_at(stages(model), "head")
    freeze(trunk)
    before = snapshot(model)
    model.train()
    model(torch.randn(4, 3, 32, 32))
    assert not torch.equal(model.state_dict()["bn1.running_mean"], before["bn1.running_mean"])


def test_dropout_before_the_cut_is_switched_off_and_after_it_stays_on():
    model = timm.create_model("test_vit", num_classes=3, pos_drop_rate=0.5, drop_rate=0.5)
    trunk, _ = split_at(stages(model), "blocks.3")
    freeze(trunk)
    train_mode(model)
    assert not model.pos_drop.training and model.head_drop.training
    unfreeze(model, {})
    train_mode(model)
    assert model.pos_drop.training and all(p.requires_grad for p in model.parameters())


def test_rewind_restores_the_suffix_bit_by_bit_and_nothing_else(model):
    initial = snapshot(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    trained = snapshot(model)
    trunk, suffix = split_at(stages(model), "layer3")
    rewind(suffix, initial)
    in_suffix = {n for part in suffix for n in part.parameter_names + part.buffer_names}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, (initial if name in in_suffix else trained)[name]), name


def test_finding_stages_leaves_the_model_as_it_was(model):
    before, training = snapshot(model), model.training
    stages(model)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert model.training == training and all(p.requires_grad for p in model.parameters())


class Skipping(nn.Module):
    """conv2 is bypassed by a shortcut from the stem, so nothing may be cut between conv1 and conv2."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv1, self.conv2, self.fc = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Linear(4, 2),
        )
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.stem(x)
        return self.fc(self.act(self.conv2(self.conv1(x)) + x).mean((2, 3)))


def test_boundary_that_a_shortcut_crosses_is_joined_and_said_so():
    found = stages(Skipping(), (3, 8, 8))
    assert [stage.name for stage in found] == ["stem", "conv1", "head"]
    assert "conv2.weight" in found[1].parameter_names
    assert "more than one tensor" in found[1].note


class Declared(nn.Module):
    """Layers declared in another order than they run."""

    def __init__(self):
        super().__init__()
        self.last, self.second, self.first = nn.Linear(4, 2), nn.Conv2d(4, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x)).mean((2, 3)))


def test_order_is_that_of_execution_not_of_declaration():
    names = [stage.parameter_names[0] for stage in stages(Declared(), (3, 8, 8))]
    assert names == ["first.weight", "second.weight", "last.weight"]


class Overwriting(nn.Module):
    """The second layer changes the output of the first in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(3, 4, 3),
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)),
            nn.Linear(64, 2),
        )

    def forward(self, x):
        return self.last(self.second(self.first(x)).flatten(1))


def test_boundary_overwritten_in_place_is_known():
    found = stages(Overwriting(), (3, 8, 8))
    assert [stage.overwritten for stage in found] == [True, False, False]


def test_cut_names(model):
    parts = stages(model)
    assert split_at(parts, "scratch")[0] == []
    trunk, suffix = split_at(parts, "head")
    assert [b.name for b in suffix] == ["head"]
    with pytest.raises(pptp.UserError, match="layer4"):
        split_at(parts, "layer5")


def test_block_cut_inside_a_stage():
    model = timm.create_model("resnet18", num_classes=2)
    trunk, suffix = split_at(stages(model, (3, 32, 32)), "layer3.1")
    assert trunk[-1].name == "layer3.0" and suffix[0].name == "layer3.1"


def test_same_stages_serve_a_copy(model):
    twin = copy.deepcopy(model)
    on_twin = [stage.on(twin) for stage in stages(model)]
    assert next(on_twin[1].parameters()) is twin.get_parameter(on_twin[1].parameter_names[0])
