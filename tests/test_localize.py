import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pptp
from pptp.data import indexed
from pptp.intervals import Estimate
from pptp.localize import (
    RISKY,
    SAFE,
    UNDECIDED,
    Disparity,
    StageRisk,
    _cut,
    _disparity,
    _stall,
    distances,
    feature_distances,
    judge,
    weight_similarity,
)
from pptp.probes import Probe, _paired_gain, pooled_features, probe
from pptp.stages import stages


def test_distances_equal_the_definition_one_sample_at_a_time():
    p, q = torch.randn(5, 3, 4, 4), torch.randn(5, 3, 4, 4)
    rms, cosine = feature_distances(p, q)
    for i in range(5):
        a, b = p[i].flatten().double(), q[i].flatten().double()
        assert float(rms[i]) == pytest.approx(float(((a - b) ** 2).sum() / 48) ** 0.5, rel=1e-5)
        assert float(cosine[i]) == pytest.approx(1 - float(a @ b / (a.norm() * b.norm())), rel=1e-4)


def test_cosine_does_not_cancel_between_nearly_equal_features():
    """1 - cos computed naively in float32 is quantised to 6e-8; ours keeps its digits."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 1000, generator=generator)
    q = p + 1e-5 * torch.randn(4, 1000, generator=generator)
    a, b = p.double(), q.double()
    exact = 0.5 * (a / a.norm(dim=1, keepdim=True) - b / b.norm(dim=1, keepdim=True)).square().sum(1)
    assert feature_distances(p, q)[1].tolist() == pytest.approx(exact.tolist(), rel=0.01)


def test_streamed_distances_equal_those_of_whole_features(model, splits):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    parts = [block for stage in stages(model) for block in stage.blocks]
    found, right = distances(model, twin, parts, splits.h1, batch_size=7)
    x = torch.stack([splits.h1[i][0] for i in range(len(splits.h1))])
    with torch.no_grad():
        model.eval(), twin.eval()
        deep = feature_distances(model.forward_features(x), twin.forward_features(x))
    assert found["layer4"]["rms"] == pytest.approx(deep[0].numpy(), rel=1e-4)
    assert found["layer4"]["cosine"] == pytest.approx(deep[1].numpy(), rel=1e-3, abs=1e-6)
    assert len(right["full"]) == len(splits.h1)
    assert not any(module._forward_hooks for module in [*model.modules(), *twin.modules()])


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(3, 4, 3),
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)),
            nn.Linear(16, 2),
        )

    def forward(self, x):
        return self.last(self.second(self.first(x)).flatten(1))


def test_in_place_operations_do_not_corrupt_distances():
    a, b = Overwriting(), Overwriting()
    x = torch.randn(6, 3, 6, 6)
    found, _ = distances(
        a, b, [s.blocks[-1] for s in stages(a, (3, 6, 6))], [(row, 0, i) for i, row in enumerate(x)], batch_size=6
    )
    with torch.no_grad():
        expected, _ = feature_distances(a.first(x), b.first(x))
    assert found["stem"]["rms"] == pytest.approx(expected.numpy(), rel=1e-5)


# --- the whole, on models with a known answer --------------------------------------------------------------


class Remembering(nn.Module):
    """A layer that shifts the features of the samples it memorised; channel 2 carries the sample's id."""

    def __init__(self, ids):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 1, bias=False)
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, x):
        marked = (x[:, 2, 0, 0][:, None] == self.ids[None]).any(1)
        shift = torch.tensor([0.0, 0, 0, 2, -3, 1])[None, :, None, None]
        return self.conv(x) + marked[:, None, None, None] * shift


class Staged(nn.Module):
    """Channels 0 to 2 (noise, label, id) pass through unchanged; 3 to 5 are features that training shapes."""

    def __init__(self, ids, generator):
        super().__init__()
        self.one, self.two, self.three = (
            nn.Conv2d(3, 6, 1, bias=False),
            nn.Conv2d(6, 6, 1, bias=False),
            Remembering(ids),
        )
        self.fc = nn.Linear(6, 2, bias=False)
        with torch.no_grad():
            for conv in (self.one, self.two, self.three.conv):
                conv.weight.zero_()
                conv.weight[[0, 1, 2], [0, 1, 2]] = 1
                conv.weight[3:] = torch.linspace(-1, 1, conv.weight[3:].numel()).reshape(conv.weight[3:].shape)
                conv.weight[3:] += 0.1 * torch.randn(
                    conv.weight[3:].shape, generator=generator
                )  # two trainings never agree
            self.fc.weight.zero_()
            self.fc.weight[:, 1] = torch.tensor([-5.0, 5.0])
            self.fc.weight[:, 3:] = 1e-3

    def forward(self, x):
        return self.fc(self.three(self.two(self.one(x))).mean((2, 3)))


def planted(n=400, memorised=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, 2, 2, generator=generator)
    y = torch.arange(n) % 2
    x[:, 1] = (y * 2.0 - 1)[:, None, None]
    x[:, 2] = torch.randperm(n, generator=generator)[:, None, None] / n
    ids = x[:, 2, 0, 0]
    nobody = torch.tensor([-1.0])
    full, half = (
        Staged(ids if memorised else nobody, generator),
        Staged(ids[: n // 2] if memorised else nobody, generator),
    )
    data = TensorDataset(x, y)
    return full, half, torch.utils.data.Subset(data, range(n // 2)), torch.utils.data.Subset(data, range(n // 2, n))


def test_planted_memorisation_is_found_where_it_is():
    full, half, seen, unseen = planted(2000)
    report = pptp.localize(full, half, seen, unseen, delta=0.05)
    verdicts = {stage.name: stage.verdict for stage in report.stages}
    assert list(verdicts) == ["stem", "two", "three", "head"]
    assert verdicts["stem"] == verdicts["two"] == SAFE and verdicts["three"] == RISKY
    assert report.cut == "three" and report.risky == ["three", "head"] and report.powered
    assert report.stages[2].distances["rms"].auc.low > 0.9


def test_finds_nothing_where_there_is_nothing():
    full, half, seen, unseen = planted(2000, memorised=False)
    report = pptp.localize(full, half, seen, unseen, delta=0.05)
    assert all(stage.verdict == SAFE for stage in report.stages[:-1])
    assert report.cut == "head"


def test_nothing_is_called_safe_below_the_accuracy_that_memorisation_needs():
    full, half, seen, unseen = planted(2000, memorised=False)
    with torch.no_grad():
        half.fc.weight.neg_()
    report = pptp.localize(full, half, seen, unseen, check_initial_weights=False)
    assert not report.powered and report.cut == "scratch"
    assert {stage.verdict for stage in report.stages[:-1]} == {UNDECIDED}
    assert any("below 95%" in note for note in report.notes)


def test_few_samples_leave_it_undecided_rather_than_safe():
    full, half, seen, unseen = planted(60, memorised=False)
    report = pptp.localize(full, half, seen, unseen)
    assert UNDECIDED in {stage.verdict for stage in report.stages}


def test_member_gap_is_found_where_members_are_read_better_and_only_there():
    """Stage two writes the label into the features of the samples that the half model saw; stage one does not."""
    generator = torch.Generator().manual_seed(0)

    class Told(nn.Module):
        def __init__(self, ids):
            super().__init__()
            self.one, self.two, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.Linear(6, 2)
            self.act = nn.Identity()
            self.register_buffer("ids", ids, persistent=False)
            with torch.no_grad():  # features are the first channel, which tells the label a little
                for conv in (self.one, self.two):
                    conv.weight.zero_(), conv.bias.zero_()
                    conv.weight[range(3), range(3)] = 1

        def forward(self, x):
            told = torch.isin(x[:, 2, 0, 0], self.ids)[:, None, None, None]
            y = self.two(self.one(x * torch.tensor([1.0, 0, 0])[None, :, None, None]))
            hint = x[:, 1:2] * 3 * told * torch.eye(6)[0][None, :, None, None]
            return self.fc(self.act(y + hint).mean((2, 3)))

    n = 900
    x = torch.randn(n, 3, 2, 2, generator=generator)
    y = torch.randint(2, (n,), generator=generator)
    x[:, 1], x[:, 2] = (y * 2.0 - 1)[:, None, None], torch.arange(n)[:, None, None] / n
    x[:, 0] += (0.5 * (y * 2.0 - 1))[:, None, None]  # so that a probe learns something from everyone
    half = Told(x[:300, 2, 0, 0])
    data = [torch.utils.data.Subset(TensorDataset(x, y), range(a, a + 300)) for a in (0, 300, 600)]
    parts = [s for s in stages(half, (3, 2, 2)) if s.name != "head"]
    found = probe(half, half, parts, indexed(data[0]), indexed(data[1]), data[2])
    first, second = (found[part.name] for part in (parts[0], parts[-1]))
    assert first.member_gap.low < 0 < first.member_gap.high
    assert second.member_gap.low > 0.05
    assert 0.6 < first.accuracy.value < 0.9


def test_probe_gain_is_the_difference_on_the_same_samples():
    before, after = np.array([1, 1, 0, 0, 0] * 40, bool), np.array([1, 1, 1, 0, 0] * 40, bool)
    gain = _paired_gain(after, before)
    assert gain.value == pytest.approx(0.2) and gain.low == pytest.approx(0.2 - 1.96 * 0.4 / 200**0.5, abs=1e-3)
    assert _paired_gain(before, before).value == 0


def test_null_is_one_half_and_verdicts_hold_it():
    """Halves of one population: the interval covers 1/2 in 95 % of draws, and nothing is called risky."""
    rng = np.random.default_rng(0)
    found = [_disparity(rng.normal(size=500), rng.normal(size=500)) for _ in range(200)]
    assert 0.90 <= np.mean([d.auc.low <= 0.5 <= d.auc.high for d in found]) <= 0.99
    assert np.mean([d.ks_p < 0.05 for d in found]) <= 0.08
    assert not any(judge([d.auc.effect], 0.05, True) == RISKY for d in found)


def test_different_initial_weights_are_refused(splits):
    a, b = pptp.create("test_resnet", 4, 32, seed=1), pptp.create("test_resnet", 4, 32, seed=2)
    assert abs(weight_similarity(a, b)) < 0.02 < weight_similarity(a, copy.deepcopy(a))
    with pytest.raises(pptp.UserError, match="same initial weights"):
        pptp.localize(a, b, splits.h1, splits.h2)


def test_different_architectures_are_refused(model, splits):
    with pytest.raises(pptp.UserError, match="differ in architecture, first at"):
        pptp.localize(model, pptp.create("test_vit", 4, 32), splits.h1, splits.h2)


def test_bad_delta_is_refused(model, splits):
    with pytest.raises(pptp.UserError, match="delta is 0.7"):
        pptp.localize(model, model, splits.h1, splits.h2, delta=0.7)


def test_probes_read_what_a_stage_holds(splits, quick):
    model = pptp.create("test_resnet", 4, 32)
    half = copy.deepcopy(model)
    pptp.fit(model, splits.members, quick)
    pptp.fit(half, splits.h1, quick)
    report = pptp.localize(model, half, splits.h1, splits.h2, splits.test, probe_samples=30)
    for stage in report.stages[:-1]:
        found = stage.probe
        assert 0 <= found.accuracy.low <= found.accuracy.value <= found.accuracy.high <= 1
        assert -1 <= found.member_gap.low <= found.member_gap.high <= 1
        assert stage.by_member_gap in (RISKY, SAFE, UNDECIDED)
    assert report.stages[-1].probe is None
    assert (
        "probe" in str(report)
        and report.to_dict()["stages"][0]["probe"]["value"] == report.stages[0].probe.accuracy.value
    )


@pytest.mark.parametrize(
    "name, channels", [("test_resnet", 48), ("test_vit", 64), ("swin_tiny_patch4_window7_224", 192)]
)
def test_probe_features_are_averaged_over_positions_whatever_the_layout(name, channels, splits):
    model = pptp.create(name, 4, 32, **({"window_size": 2} if "swin" in name else {}))
    parts = [s for s in stages(model, (3, 32, 32)) if s.name in ("layer2", "blocks.1", "layers.1")]
    features, labels = pooled_features(model, parts, splits.test, 20)
    assert features[parts[0].name].shape == (40, channels) and list(labels) == list(splits.test.labels)


# --- rules ---------------------------------------------------------------------------------------------------


def test_verdict_rules():
    assert judge([(0.06, 0.10), (0.00, 0.02)], 0.05, True) == RISKY
    assert judge([(0.00, 0.04), (0.00, 0.02)], 0.05, True) == SAFE
    assert judge([(0.00, 0.04), (0.00, 0.06)], 0.05, True) == UNDECIDED
    assert judge([(0.00, 0.04)], 0.05, False) == UNDECIDED


@pytest.mark.parametrize(
    "verdicts, cut",
    [
        ("safe safe risky risky", "c"),
        ("safe safe safe risky", "d"),
        ("safe undecided risky risky", "b"),
        ("risky safe safe risky", "d"),
        ("undecided risky risky risky", "scratch"),
        ("safe safe safe safe", "d"),
    ],
)
def test_cut_is_the_first_of_the_last_run_without_a_safe_stage(verdicts, cut):
    assert _cut(list(zip("abcd", verdicts.split()))) == cut


def risk(name, gain):
    d, any_estimate = Disparity(Estimate(0.5, 0.49, 0.51), 0, 0), Estimate(0.5, 0.4, 0.6)
    gained = None if gain is None else Estimate(gain, gain - 0.02, gain + 0.02)
    return StageRisk(name, {"rms": d, "cosine": d}, SAFE, Probe(any_estimate, gained, any_estimate))


@pytest.mark.parametrize(
    "gains, stall",
    [
        ((None, 0.2, 0.1, 0.01), "d"),
        ((None, 0.01, 0.1, 0.1), ""),
        ((None, 0.2, 0.0, -0.1), "c"),
        ((None, 0.0, 0.0, 0.0), "a"),
    ],
)
def test_probe_stalls_after_its_last_significant_gain(gains, stall):
    assert _stall([risk(n, g) for n, g in zip("abcd", gains)]) == stall
