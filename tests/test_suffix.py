"""The execution cut, the trunk cache, and retraining from it: the same result, at the speed of the suffix."""

import copy
import dataclasses
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pptp
from defenses import DEFENSES, RelaxLoss
from pptp.cache import Policy, TrunkCache
from pptp.cli import main
from pptp.describe import describe
from pptp.models import weights_digest
from pptp.stages import freeze, split_at, stages
from pptp.suffix import CannotCut, Suffix, run_until
from pptp.training import fit


def suffix_of(model, cut, shape=(3, 32, 32)):
    parts = stages(model, shape)
    freeze(split_at(parts, cut)[0])
    return Suffix(model.eval(), parts, cut, shape)


@pytest.mark.parametrize("cut", ["layer1", "layer3", "layer4", "layer4.0", "head"])
def test_the_suffix_equals_the_whole_model_outputs_and_gradients(model, cut):
    cut = cut if cut != "layer4.0" else stages(model, (3, 32, 32))[-2].blocks[0].name
    suffix = suffix_of(model, cut)
    x, y = torch.randn(5, 3, 32, 32), torch.tensor([0, 1, 2, 3, 0])

    def gradients(answer):
        model.zero_grad()
        F.cross_entropy(answer, y).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    whole, expected = model(x), gradients(model(x))
    activation = run_until(model, suffix.plan.boundary, x)
    assert torch.allclose(suffix(activation), whole, atol=1e-6)
    found = gradients(suffix(activation))
    assert found.keys() == expected.keys() and all(torch.allclose(found[n], expected[n], atol=1e-6) for n in found)
    assert torch.allclose(suffix(x), whole, atol=1e-6), "images are taken as well"


def test_the_trunk_is_not_run_and_everything_is_put_back(model):
    suffix = suffix_of(model, "layer4")
    ran = []
    for name in ("conv1", "layer1", "layer3", "layer4"):
        inner = next(m for m in getattr(model, name).modules() if isinstance(m, nn.Conv2d))
        inner.register_forward_hook(lambda *_, name=name: ran.append(name))
    activation = run_until(model, suffix.plan.boundary, torch.randn(2, 3, 32, 32))
    ran.clear()
    suffix(activation)
    assert set(ran) == {"layer4"}
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="neither an input"):
        suffix(torch.zeros(2, 7))
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_deep_copy_runs_its_own_weights(model):
    suffix = suffix_of(model, "layer4")
    twin = copy.deepcopy(suffix)
    with torch.no_grad():
        twin.fc.weight.zero_()
        twin.fc.bias.fill_(7.0)
    activation = run_until(model, suffix.plan.boundary, torch.randn(2, 3, 32, 32))
    assert (twin(activation) == 7).all() and not (suffix(activation) == 7).any()


def test_a_module_that_runs_before_and_after_the_cut_is_skipped_only_before():
    class Shared(nn.Module):
        num_classes = 3

        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            x = self.act(self.one(x))
            x += 1
            return self.head(self.act(self.two(x)).mean((2, 3)))

    model = Shared().eval()
    suffix = suffix_of(model, "two", (3, 8, 8))
    x = torch.randn(4, 3, 8, 8)
    activation = run_until(model, suffix.plan.boundary, x).clone()
    assert torch.allclose(suffix(activation), model(x), atol=1e-6)


def test_nothing_before_the_cut_is_refused(model):
    with pytest.raises(CannotCut, match="nothing before the cut"):
        Suffix(model, stages(model, (3, 32, 32)), "scratch", (3, 32, 32))


class Own(nn.Module):
    """A model of one's own, with a tensor that passes by a module."""

    num_classes = 4

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(a, 6, 3, padding=1) for a in (3, 6, 6))
        self.scale = nn.Parameter(torch.ones(6, 1, 1))
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(x).relu() * self.scale
        x = x + self.second(x).relu()
        return self.out(self.third(x).relu().mean((2, 3)))


def test_boundaries_can_be_named_and_are_verified(splits, quick):
    model = Own()
    parts = stages(model, (3, 32, 32), boundaries=["third"])
    assert [set(part.parameter_names) & {"scale", "out.weight", "first.weight"} for part in parts] == [
        {"scale", "first.weight"},
        {"out.weight"},
    ]
    before = pptp.snapshot(model)
    pptp.retrain(model, None, "head", DEFENSES["plain"](), splits, quick, parts=parts)
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == {"out.weight", "out.bias"}
    with pytest.raises(pptp.UserError, match="more passes by 'second'"):
        stages(model, (3, 32, 32), boundaries=["second"])
    with pytest.raises(pptp.UserError, match="no module called 'fourth'"):
        stages(model, (3, 32, 32), boundaries=["fourth"])


# --- the cache -----------------------------------------------------------------------------------


def retrained(model, initial, splits, recipe, policy, defense="relaxloss", cut="layer4"):
    twin = copy.deepcopy(model)
    made = DEFENSES[defense](**({"alpha": 0.5} if defense == "relaxloss" else {}))
    result = pptp.retrain(twin, initial, cut, made, splits, recipe, cache=TrunkCache(policy))
    return twin, result


@pytest.fixture
def trained(model, splits, quick):
    initial = pptp.snapshot(model)
    fit(model, splits.members, quick)
    return model, initial


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_caching_images_as_they_are_changes_nothing(kind, trained, splits, quick):
    (plain, without), (cached, with_it) = (
        retrained(*trained, splits, quick, Policy(which)) for which in ("none", kind)
    )
    assert "no cache" in without["cache"] and kind in with_it["cache"]
    for (name, a), b in zip(plain.state_dict().items(), cached.state_dict().values()):
        assert torch.allclose(a.float(), b.float(), atol=2e-5), name
    assert with_it["loss"] == pytest.approx(without["loss"], abs=1e-4)


def test_half_precision_rounds_a_little(trained, splits, quick):
    (exact, _), (rounded, _) = (
        retrained(*trained, splits, quick, Policy("memory", dtype=d)) for d in ("float32", "float16")
    )
    gap = max(
        float((a.float() - b.float()).abs().max())
        for a, b in zip(exact.state_dict().values(), rounded.state_dict().values())
    )
    assert 0 < gap < 0.05


def test_views_are_kept_in_turn_and_the_image_itself_is_the_first(trained, splits, quick):
    model, _ = trained
    suffix = suffix_of(model, "layer4")
    cache = TrunkCache(Policy("memory", views=2))
    _, data, _ = cache.prepare(model, stages(model, (3, 32, 32)), "layer4", splits.for_defense(), augment=True)
    members = data.members
    clean = members[0][0]
    assert torch.allclose(clean, run_until(model, suffix.plan.boundary, splits.members[0][0][None])[0], atol=1e-5)
    seen = []
    for epoch in range(4):
        members.set_epoch(epoch)
        seen.append(members[0][0])
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3]) and not torch.equal(seen[0], seen[1])
    members.set_epoch(None)
    assert torch.equal(members[0][0], clean)
    recipe = pptp.Recipe(**{**vars(quick), "augment": True})
    _, fresh = retrained(*trained, splits, recipe, Policy())
    assert "augmentation is on" in fresh["cache"]
    _, kept = retrained(*trained, splits, recipe, Policy(views=2))
    assert "MB in memory" in kept["cache"]


def test_one_trunk_is_run_once_for_all_that_share_it(trained, splits, quick, monkeypatch):
    model, initial = trained
    filled = []
    real = pptp.cache.fill
    monkeypatch.setattr(pptp.cache, "fill", lambda store, *rest: filled.append(len(store)) or real(store, *rest))
    cache = TrunkCache()
    for defense in (RelaxLoss(alpha=0.5), RelaxLoss(alpha=0.7), DEFENSES["selena"](k=2, l=1)):
        pptp.retrain(copy.deepcopy(model), initial, "layer4", defense, splits, quick, cache=cache)
    assert len(filled) == 2  # members and reference
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.conv1.parameters()).mul_(1.01)
    pptp.retrain(other, initial, "layer4", RelaxLoss(alpha=0.5), splits, quick, cache=cache)
    assert len(filled) == 4, "another trunk says other things"


def test_blends_of_images_are_not_made_of_activations(trained, splits, quick):
    _, result = retrained(*trained, splits, quick, Policy("memory"), "mixup")
    assert "changes images itself" in result["cache"]


def test_the_budget_decides_where_it_goes():
    policy = Policy(gigabytes=1)
    assert [policy.place(n * 2**30) for n in (1, 5, 11)] == ["memory", "disk", "none"]
    assert Policy("disk").place(1) == "disk"
    for bad in ({"kind": "tape"}, {"gigabytes": -1}, {"views": -1}, {"dtype": "int8"}):
        with pytest.raises(pptp.UserError, match="cache"):
            Policy(**bad)


# --- stages, frontier ----------------------------------------------------------------------------


def test_stages_are_described_with_their_share_of_the_compute(model, capsys):
    rows = describe(model, (3, 32, 32))
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
    assert sum(row.compute for row in rows) == pytest.approx(1) and all(0 <= row.compute < 1 for row in rows)
    assert rows[-1].shape == (4,)
    assert main(["stages", "test_resnet", "--img-size", "32"]) == 0
    assert "layer4" in capsys.readouterr().out
    assert main(["stages", "test_resnet", "--blocks"]) == 0
    assert main(["stages", "no_such_model"]) == 2
    assert main(["stages", "test_vit", "--img-size", "7"]) == 2 and "7 px" in capsys.readouterr().err


SMALL = [
    "--model", "test_resnet", "--data", "digits", "--limit-classes", "4", "--limit-per-class", "60", "--members", "80", "--reference", "20",
    "--nonmembers", "80", "--test", "60", "--epochs", "8", "-b", "20", "--opt", "adamw", "--lr", "0.003", "--no-augment",
]  # fmt: skip


def test_a_frontier_retrains_every_point_once_chooses_and_refines(tmp_path, capsys):
    run = tmp_path / "r"
    assert main(["train", str(run), *SMALL]) == 0
    sweep = [
        "frontier",
        str(run),
        "--defense",
        "relaxloss",
        "--set",
        "alpha=0.2,0.8",
        "--cut",
        "layer3,layer4",
        "--epochs",
        "2",
    ]
    capsys.readouterr()
    assert main([*sweep, "--min-accuracy", "0.1", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "best:" in shown and "alpha=0.4" in shown and "which it was not chosen by" in shown
    (table,) = run.glob("frontier/relaxloss-layer3-layer4-*.json")
    found = pptp.runs.read_json(table, "")
    assert (
        len(found["points"]) == 5
        and sum(p["best"] for p in found["points"]) == 1
        and any(p["pareto"] for p in found["points"])
    )
    assert table.with_suffix(".svg").read_text().startswith("<svg")
    stamps = {p: p.stat().st_mtime_ns for p in run.glob("frontier/*/point.json")}
    assert main([*sweep, "--target-auc", "0.5", "--rounds", "0"]) == 1
    assert "No point fulfils" in capsys.readouterr().out
    assert stamps == {p: p.stat().st_mtime_ns for p in run.glob("frontier/*/point.json")}
    assert main(["report", str(run)]) == 0 and "Settings that were tried" in (run / "report.html").read_text()
    trained = {p: p.stat().st_mtime_ns for p in run.glob("frontier/*/trained.json")}
    assert main(["ensemble", str(run), "--models", "2"]) == 0
    assert main([*sweep, "--rounds", "0"]) == 0
    assert "not by the target's procedure, so an attacker who knows it may find more" in capsys.readouterr().out
    again = [pptp.runs.read_json(p, "")["attacks"] for p in stamps if p.stat().st_mtime_ns != stamps[p]]
    assert len(again) == 4 and all("rmia" in attacks for attacks in again), "by the reference models that are there now"
    assert trained == {p: p.stat().st_mtime_ns for p in run.glob("frontier/*/trained.json")}, "but not trained again"
    for more, says in (
        (["--set", "upper=9"], "upper is 9"),
        (["--target-auc", "60"], "target_auc is 60"),
        (["--min-accuracy", "2"], "min_accuracy is 2"),
        (["--rounds", "-1"], "rounds is -1"),
        (["--defense", "ccl"], "one defense"),
    ):
        assert main([*sweep, *more]) == 2 and says in capsys.readouterr().err


def test_a_point_that_was_interrupted_goes_on_where_it_was(tmp_path, monkeypatch):
    run, whole = tmp_path / "r", tmp_path / "whole"
    assert main(["train", str(run), *SMALL, "--epochs", "4"]) == 0
    shutil.copytree(run, whole)
    sweep = ["--defense", "selena", "--set", "k=3", "--set", "l=1", "--cut", "layer4", "--epochs", "2"]
    assert main(["frontier", str(whole), *sweep]) == 0
    trained, write = [], pptp.checkpoint.Checkpoint.write

    def dies(self, rows):
        write(self, rows)
        trained.append(len(rows))
        if len(trained) == 7:  # after the three sub-models, in the student
            raise KeyboardInterrupt

    monkeypatch.setattr(pptp.checkpoint.Checkpoint, "write", dies)
    assert main(["frontier", str(run), *sweep]) == 130
    assert main(["frontier", str(run), *sweep]) == 0
    assert trained[7:] == [2], "the student's second epoch alone"
    one, two = (pptp.models.read_weights(next(r.glob("frontier/*/last.safetensors"))) for r in (run, whole))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_models_with_the_same_trunk_are_evaluated_from_one_cache_with_the_same_result(tmp_path, monkeypatch):
    run = tmp_path / "r"
    assert main(["train", str(run), *SMALL, "--epochs", "2"]) == 0
    assert (
        main(["retrain", str(run), "--defense", "relaxloss", "--set", "alpha=0.5", "--cut", "layer4", "--epochs", "2"])
        == 0
    )
    filled, real = [], pptp.cache.fill
    monkeypatch.setattr(pptp.cache, "fill", lambda store, *rest: filled.append(len(store)) or real(store, *rest))

    def scores():
        assert main(["evaluate", str(run), "--attack", "confidence", "--fresh"]) == 0
        with np.load(run / "evaluate/relaxloss-layer4/scores.npz") as saved:
            return saved["score/confidence"], saved["ids"]

    cached, ids = scores()
    assert len(filled) == 3  # members, non-members and test, once for both models
    monkeypatch.setattr(pptp.attacking, "_cut_is_shared", lambda *_: False)
    plain, same = scores()
    assert len(filled) == 3 and np.array_equal(ids, same) and np.allclose(cached, plain, atol=1e-4)


def test_a_control_of_other_settings_gets_a_place_of_its_own(tmp_path):
    run = tmp_path / "r"
    assert main(["train", str(run), *SMALL, "--epochs", "2"]) == 0
    for defense, epochs in (("ccl", "2"), ("relaxloss", "4")):
        assert (
            main(
                ["retrain", str(run), "--defense", defense, "--set", "alpha=0.5", "--cut", "layer4", "--epochs", epochs]
            )
            == 0
        )
    names = sorted(path.name for path in (run / "retrain").iterdir())
    assert len(names) == 4 and sum(name.startswith("plain-layer4") for name in names) == 2


def test_pareto_and_choice():
    from pptp.frontier import Point, choose, nearest, pareto, refined
    from pptp.intervals import Estimate
    from pptp.procedures import Setting

    def point(accuracy, leak, alpha):
        setting = Setting("relaxloss", (f"alpha={alpha}",), "layer4", "init", pptp.Recipe())
        of = [Estimate(v, v, v) for v in (accuracy, leak)]
        return Point(setting, *of, "confidence", *of, "confidence", leak, 1.0, 1.0)

    a, b, c, d = point(0.7, 0.8, 0.25), point(0.65, 0.6, 0.5), point(0.6, 0.65, 1.0), point(0.5, 0.52, 2.0)
    assert pareto([a, b, c, d]) == [a, b, d]
    assert (
        choose([a, b, c, d], 0.66, None) is b
        and choose([a, b, c, d], None, 0.55) is b
        and choose([a, b, c, d], 0.5, None) is None
    )
    assert nearest([a, b, c, d], 0.51) is d and nearest([a, b, c, d], None) is a, (
        "of an accuracy that none has, the highest"
    )
    values = sorted(float(s.settings[0][6:]) for s in refined(b.setting, [p.setting for p in (a, b, c, d)]))
    assert values == pytest.approx([0.3536, 0.7071], abs=1e-3)


def test_a_point_is_reported_by_the_attack_that_is_strongest_where_it_was_not_chosen():
    from pptp.frontier import point_of
    from pptp.procedures import Setting

    def e(value):
        return {"value": value, "low": value - 0.03, "high": value + 0.03, "note": ""}

    attacks = {"a": [e(0.6), e(0.52)], "b": [e(0.55), e(0.58)], "turned": [e(0.5), e(0.38)]}
    found = {"attacks": attacks, "accuracy": [e(0.5), e(0.4)], "result": {}, "cost": {"seconds": 1.0}}
    point = point_of(found, Setting("plain", (), "layer4", "init", pptp.Recipe()), "key")
    assert point.active is None, "nothing was said of it"
    assert (point.attack, point.leak.value) == ("a", 0.6)
    assert (point.reported_attack, round(point.reported_leak.value, 3)) == ("turned", 0.62)


def test_halves_of_a_point_share_no_sample_and_a_corrected_interval_is_wider():
    from pptp.evaluate import MembershipScores, fold_of
    from pptp.frontier import auc_of_half

    members = np.arange(400) % 2 == 0
    halves = fold_of(members, 2, 0)
    scores = MembershipScores(np.random.default_rng(0).normal(size=400) + members, members)
    one, other = (auc_of_half(scores, halves == half, 0.95) for half in (0, 1))
    corrected = auc_of_half(scores, halves == 1, 1 - 0.05 / 8)
    assert one.value != other.value == corrected.value and corrected.low < other.low and corrected.high > other.high
    assert scores.auc.value == pytest.approx((one.value + other.value) / 2, abs=0.03)


def test_a_sample_is_in_the_same_half_for_an_attack_that_scores_some_only():
    """The half model as reference leaves out the members that it was trained on."""
    from pptp.evaluate import MembershipScores, fold_of
    from pptp.frontier import auc_of_half

    members = np.repeat([True, False], 200)
    first = fold_of(members, 2, 0) == 0
    values = np.where(
        first, np.random.default_rng(0).normal(size=400), 9.0 * members
    )  # the other half tells everything
    rows = np.flatnonzero(~members | (np.arange(400) % 2 == 0))
    for scored in (np.arange(400), rows):
        scores = MembershipScores(values[scored], members[scored], rows=scored)
        assert auc_of_half(scores, ~first, 0.95).value == 1.0
        assert auc_of_half(scores, first, 0.95).value == pytest.approx(0.5, abs=0.1)


def test_a_point_is_another_one_if_it_was_trained_on_kept_views_or_by_other_code(tmp_path, monkeypatch):
    from pptp.procedures import Setting

    (tmp_path / "mine.py").write_text("from defenses import Plain\n\n\nclass Own(Plain):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = Setting("mine:Own", (), "layer4", "init", pptp.Recipe(augment=True))
    assert one.key("base") == one.key("base") != one.key("another base")
    assert one.key("base") == dataclasses.replace(one, recipe=pptp.Recipe(augment=True, workers=3)).key("base")
    views = dataclasses.replace(one, views=4)
    assert views.key("base") != one.key("base")
    bare = [dataclasses.replace(s, recipe=pptp.Recipe(augment=False)).key("base") for s in (one, views)]
    assert bare[0] == bare[1], "without augmentation there are no views"
    before = one.key("base")
    monkeypatch.setattr("pptp.procedures.code_of", lambda owner: "edited")
    assert one.key("base") != before


def test_the_budget_is_for_all_that_is_kept(model, splits):
    """Cuts that a cache has seen before count, and what is kept already is not asked for again."""
    parts = stages(model, (3, 32, 32))

    def placed(cache, cut):
        freeze(split_at(parts, cut)[0])
        return cache.prepare(model, parts, cut, splits.for_defense(), augment=False)[2].rpartition(" ")[2]

    def bytes_of(cut):
        placed(one := TrunkCache(), cut)
        return sum(there.store.nbytes for there in one.kept.values())

    room = max(bytes_of("layer3"), bytes_of("layer4")) / 2**30
    cache = TrunkCache(Policy(gigabytes=room))
    assert [placed(cache, cut) for cut in ("layer3", "layer4", "layer4", "layer3")] == [
        "memory",
        "disk",
        "disk",
        "memory",
    ]


def test_weights_do_not_depend_on_who_else_used_the_cache(trained, splits, quick):
    model, initial = trained
    alone, shared = TrunkCache(), TrunkCache()
    pptp.retrain(copy.deepcopy(model), initial, "layer4", RelaxLoss(alpha=0.9), splits, quick, cache=shared)
    digests = []
    for cache in (alone, shared):
        twin = copy.deepcopy(model)
        pptp.retrain(twin, initial, "layer4", RelaxLoss(alpha=0.5), splits, quick, cache=cache)
        digests.append(weights_digest(twin))
    assert digests[0] == digests[1]
