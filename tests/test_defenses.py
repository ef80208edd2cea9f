"""A contract that everything in DEFENSES keeps, and RelaxLoss against its formulae."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_training import KillAfter, Killed

import pptp
from defenses import DEFENSES
from defenses.relaxloss import VARIANTS, RelaxLoss, flattening
from pptp.data import Part
from pptp.models import weights_digest
from pptp.retrain import Defense, FrozenLayersMoved
from pptp.splits import EvaluationDataTouched, Splits
from pptp.stages import split_at, stages
from pptp.training import Step, fit

each_defense = pytest.mark.parametrize("name", DEFENSES)
SMALL = {
    "selena": {"k": 3, "l": 1},
    "advreg": {"k": 1},
    "early_stopping": {"share": 0.8},
    "mist": {"k": 2},
}  # settings that keep the tests quick


def small(name):
    return DEFENSES[name](**SMALL.get(name, {}))


def given(name, splits):
    """What the defense is trained on; with untrained teachers where it needs any."""
    data = splits.for_defense()
    if not DEFENSES[name].needs_outside:
        return data
    halves = [Part(data.members.pool, part.indices, part.name) for part in (splits.h1, splits.h2)]
    teachers = [pptp.create("test_resnet", classes=splits.classes, img_size=32, seed=seed) for seed in (1, 2)]
    return replace(data, outside=pptp.Teachers(*teachers, *halves))


@pytest.fixture
def trained(model, splits, quick):
    initial = pptp.snapshot(model)
    fit(model, splits.members, quick)
    return model, initial


@each_defense
@pytest.mark.parametrize("cut", ["layer3", "head"])
def test_moves_only_the_suffix_bit_by_bit(name, cut, trained, splits, quick):
    model, initial = trained
    before = pptp.snapshot(model)
    _, suffix = split_at(stages(model), cut)
    recipe = pptp.Recipe(
        **{**vars(quick), "epochs": 4}
    )  # other than before, so that BatchNorm's step counters differ too
    result = pptp.retrain(model, initial, cut, small(name), given(name, splits), recipe)
    inside = {n for part in suffix for n in part.parameter_names + part.buffer_names}
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == inside & {*model.state_dict()}  # a defense may have swapped BatchNorm, whose buffers are gone then
    assert 0 < result["retrained_share"] < 1 and "active" in result
    assert all(p.requires_grad for p in model.parameters()) and not model.training


@each_defense
def test_from_scratch_equals_training_a_fresh_model(name, trained, splits, quick):
    model, initial = trained
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(initial)
    pptp.retrain(model, initial, "scratch", small(name), given(name, splits), quick)
    small(name).adapt(fresh)
    small(name).train(fresh, given(name, splits), quick)
    assert weights_digest(model) == weights_digest(fresh)


@each_defense
def test_is_deterministic_and_resumes_after_a_kill(name, trained, splits, quick, tmp_path):
    model, initial = trained
    recipe = pptp.Recipe(**{**vars(quick), "epochs": 4})
    digests = []
    for kill in (False, False, True):
        twin, checkpoint = copy.deepcopy(model), tmp_path / "c.pt" if kill else None
        if kill:
            with pytest.raises(Killed):
                pptp.retrain(
                    copy.deepcopy(model),
                    initial,
                    "layer4",
                    small(name),
                    given(name, splits),
                    recipe,
                    [KillAfter(2)],
                    checkpoint=checkpoint,
                )
        pptp.retrain(twin, initial, "layer4", small(name), given(name, splits), recipe, checkpoint=checkpoint)
        digests.append(weights_digest(twin))
    assert digests[0] == digests[1] == digests[2]


@each_defense
def test_survives_a_last_batch_of_one(name, splits, quick):
    recipe = pptp.Recipe(**{**vars(quick), "batch_size": 79})
    pptp.retrain(pptp.create("resnet18", 4, 32), None, "layer4", small(name), given(name, splits), recipe)


def test_weights_that_the_user_froze_stay_frozen(model, splits, quick):
    model.layer4.requires_grad_(False)
    before = pptp.snapshot(model)
    pptp.retrain(model, None, "layer4", DEFENSES["plain"](), splits, quick)
    assert not any(p.requires_grad for p in model.layer4.parameters()) and model.fc.weight.requires_grad
    assert torch.equal(model.layer4[0].conv1.weight, before["layer4.0.conv1.weight"])


@each_defense
def test_never_touches_evaluation_samples(name, trained, splits, quick):
    class Tripwire(torch.utils.data.Dataset):
        labels = splits.pool.labels
        forbidden = {*splits.nonmembers.indices, *splits.test.indices}

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, i):
            assert i not in self.forbidden, "evaluation data was read"
            return splits.pool[i]

    model, initial = trained
    pptp.retrain(model, initial, "layer4", small(name), given(name, Splits(Tripwire(), splits.indices)), quick)


@each_defense
def test_has_a_docstring_and_prints_its_settings(name):
    assert DEFENSES[name].__doc__ and type(small(name)).__name__ in repr(small(name))


class Cheat(Defense):
    def train(self, model, data, recipe, **how):
        return {"n": len(data.nonmembers)}


class Vandal(Defense):
    def train(self, model, data, recipe, **how):
        with torch.no_grad():
            model.bn1.running_mean.add_(1e-6)
        return {}


def test_a_defense_that_reaches_for_evaluation_data_is_stopped(model, splits, quick):
    with pytest.raises(EvaluationDataTouched):
        pptp.retrain(model, None, "head", Cheat(), splits, quick)


def test_a_defense_that_moves_a_frozen_buffer_is_caught(model, splits, quick):
    with pytest.raises(FrozenLayersMoved):
        pptp.retrain(model, None, "head", Vandal(), splits, quick)


def test_fine_tuning_starts_from_the_trained_weights(trained, splits):
    model, initial = trained
    before = pptp.snapshot(model)
    still = pptp.Recipe(epochs=2, batch_size=40, opt="momentum", lr=1e-12, weight_decay=0, augment=False)
    pptp.retrain(model, None, "head", DEFENSES["plain"](), splits, still)
    assert torch.allclose(model.fc.weight, before["fc.weight"], atol=1e-6)
    pptp.retrain(model, initial, "head", DEFENSES["plain"](), splits, still)
    assert torch.allclose(model.fc.weight, initial["fc.weight"], atol=1e-6)


def test_more_classes_in_the_data_than_in_the_model_is_refused(splits, quick):
    with pytest.raises(pptp.UserError, match="the data has 4 classes, the model 3"):
        pptp.retrain(pptp.create("test_resnet", 3, 32), None, "head", DEFENSES["plain"](), splits, quick)


# --- RelaxLoss -----------------------------------------------------------------------------------------------


def test_flattening_gradient_of_each_variant():
    """On z_y of a correct sample with p_y = .6: 1 - p_y, -p_y (1 - p_y)(log p_y - mean of the others' log p), and 0."""
    p = torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64)
    expected = {"image": 0.40, "tabular": float(-0.24 * (p[0, 0].log() - p[0, 1:].log().mean())), "stopgrad": 0.0}
    assert expected["tabular"] == pytest.approx(-0.46, abs=0.01)
    for variant, gradient in expected.items():
        logits = p.log().requires_grad_()
        flattening(logits, torch.tensor([0]), 1.0, variant).backward()
        assert float(logits.grad[0, 0]) == pytest.approx(gradient, abs=1e-9), variant


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("upper", [1.0, 0.5])
def test_flattening_equals_a_loop_over_samples(variant, upper):
    torch.manual_seed(0)
    z, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    total = 0.0
    for row, label in zip(z, y):
        p = row.softmax(0)
        keep = min(float(p[label]), upper)
        soft = [(1 - keep) / 3] * 4
        soft[label] = keep
        cross = -sum(t * math.log(float(v)) for t, v in zip(soft, p))
        wrong = float(row.argmax() != label)
        total += wrong * cross + math.log(float(p[label])) if variant == "image" else cross
    assert float(flattening(z, y, upper, variant)) == pytest.approx(total / 6)


def step(logits, targets, epoch):
    return Step(lambda inputs: logits, None, targets, None, epoch)


def test_even_epochs_descend_on_the_distance_to_alpha():
    z, y = torch.tensor([[3.0, 0, 0], [0, 2.0, 0]]), torch.tensor([0, 1])
    loss = F.cross_entropy(z, y)
    for alpha in (0.05, 0.9):
        s = step(z, y, 0)
        assert torch.isclose(RelaxLoss(alpha=alpha).loss(s), (loss - alpha).abs())
        assert s.logs["active"] == float(loss <= alpha)


def test_odd_epochs_are_plain_above_alpha_and_flatten_below():
    z, y = torch.tensor([[3.0, 0, 0], [0, 2.0, 0]]), torch.tensor([0, 1])
    assert torch.isclose(RelaxLoss(alpha=0.05).loss(step(z, y, 1)), F.cross_entropy(z, y))
    assert torch.isclose(RelaxLoss(alpha=0.9).loss(step(z, y, 1)), flattening(z, y, 1.0, "image"))


def test_holds_the_training_loss_near_alpha(splits):
    """What it is for: plain training drives the loss to 0, RelaxLoss keeps it up."""

    def final_loss(defense):
        model = pptp.create("test_resnet", 4, 32)
        pptp.retrain(
            model,
            None,
            "scratch",
            defense,
            splits,
            pptp.Recipe(epochs=30, batch_size=20, opt="adamw", lr=2e-3, augment=False),
        )
        signals = pptp.collect(model, splits.members)
        return float(F.cross_entropy(signals.logits, signals.labels))

    assert final_loss(DEFENSES["plain"]()) < 0.1
    assert 0.3 < final_loss(RelaxLoss(alpha=0.7)) < 1.2


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"alpha": 1.5}, r"alpha is 1.5: it must lie between 0 and ln\(classes\) = 1.386"),
        ({"alpha": 0}, "alpha is 0"),
        ({"variant": "other"}, "variant is 'other'"),
        ({"upper": 1.2}, "upper is 1.2"),
    ],
)
def test_bad_hyper_parameters_are_refused_before_training(settings, says, model, splits, quick):
    before = weights_digest(model)
    with pytest.raises(pptp.UserError, match=says):
        pptp.retrain(model, None, "head", RelaxLoss(**settings), splits, quick)
    assert weights_digest(model) == before


def test_odd_number_of_epochs_is_refused(model, splits, quick):
    with pytest.raises(pptp.UserError, match="make it even"):
        pptp.retrain(model, None, "head", RelaxLoss(), splits, pptp.Recipe(**{**vars(quick), "epochs": 3}))
