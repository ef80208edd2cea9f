"""AdvReg, SELENA, MIST and the short ones against their formulae, one sample at a time."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_defenses import step
from torch import nn

import defenses.selena
import pptp
from defenses import (
    CCL,
    CSKD,
    DEFENSES,
    HAMP,
    MIST,
    AdvReg,
    ConfidencePenalty,
    EarlyStopping,
    LabelSmoothing,
    Mixup,
    Selena,
)
from defenses.advreg import Adversary, InferenceNetwork
from defenses.cskd import Partners, distillation
from defenses.hamp import soft_labels
from defenses.mist import Dealt, average, cross_difference
from defenses.selena import Lookup, _mean_over, leave_out, soft_cross_entropy, tempered
from pptp.outside import probabilities
from pptp.training import sharpness_aware

BAD = [
    ("advreg", {"alpha": 0}, "alpha is 0"), ("advreg", {"k": 0}, "k is 0"), ("advreg", {"warmup": 2}, "warmup is 2"),
    ("selena", {"k": 3, "l": 3}, "1 <= l < k"), ("selena", {"clip_grad": 0}, "clip_grad is 0"), ("selena", {"processes": 0}, "processes is 0"), ("selena", {"views": -1}, "views is -1"),
    ("selena", {"sub_epochs": -1}, "sub_epochs is -1"), ("selena", {"temperature": 0}, "temperature is 0"),
    ("mist", {"k": 1}, "k is 1"), ("mist", {"lam": 0}, "lam is 0"),
    ("dpsgd", {"epsilon": 0}, "epsilon is 0"), ("dpsgd", {"delta": 1.0}, "delta is 1.0"), ("dpsgd", {"max_grad_norm": 0}, "max_grad_norm is 0"),
    ("dpsgd", {"accountant": "gdp"}, "rdp or prv"), ("dpsgd", {"trunk_data": "mine"}, "same, disjoint, public"),
    ("dpsgd", {"clipping": "flat"}, "hooks or ghost"), ("ccl", {"alpha": 1.0}, "alpha is 1.0"), ("early_stopping", {"share": 1.0}, "share is 1.0"),
    ("hamp", {"gamma": 1.0}, "gamma is 1.0"), ("hamp", {"alpha": -1}, "alpha is -1"), ("cskd", {"temperature": 0}, "temperature is 0"),
    ("label_smoothing", {"smoothing": 1.0}, "smoothing is 1.0"), ("confidence_penalty", {"beta": 0}, "beta is 0"), ("mixup", {"alpha": 0}, "alpha is 0"),
]  # fmt: skip


@pytest.mark.parametrize("name, settings, says", BAD)
def test_bad_hyper_parameters_are_refused(name, settings, says, model, splits, quick):
    with pytest.raises(pptp.UserError, match=says):
        pptp.retrain(model, None, "head", DEFENSES[name](**settings), splits, quick)


# --- AdvReg --------------------------------------------------------------------------------------------------


def test_inference_network_is_the_published_one():
    sizes = [tuple(p.shape) for n, p in InferenceNetwork(7).named_parameters() if n.endswith("weight")]
    assert sizes == [(1024, 7), (512, 1024), (64, 512), (128, 7), (64, 128), (256, 128), (128, 256), (64, 128), (1, 64)]
    weights = torch.cat([p.flatten() for n, p in InferenceNetwork(7).named_parameters() if n.endswith("weight")])
    assert float(weights.detach().std()) == pytest.approx(0.01, rel=0.02)


def test_advreg_loss_is_cross_entropy_plus_alpha_times_the_adversary(model, splits, quick):
    adversary = Adversary(AdvReg(alpha=2.0, warmup=1), model, splits.for_defense(), quick)
    logits, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    s = step(logits, y, 0)
    assert torch.equal(adversary.loss(s), F.cross_entropy(logits, y)) and s.logs["active"] == 0  # warming up
    s = pptp.Step(lambda inputs: logits, torch.zeros(6, 3, 32, 32), y, None, 1)
    found = adversary.loss(s)
    h = [float(adversary.network(row.softmax(0)[None], label[None]).sigmoid()) for row, label in zip(logits, y)]
    assert float(found) == pytest.approx(float(F.cross_entropy(logits, y)) + 2.0 * (np.mean(h) - 0.5), abs=1e-5)
    assert s.logs["active"] == 0 and s.logs["gain"] == pytest.approx(math.log(0.5), abs=0.01)  # it cannot tell yet


def test_adversary_learns_to_tell_members_from_reference(splits, quick):
    """A model that is sure of members only: the gain must rise from its start at log(1/2)."""
    known = {int(i) for i in splits.members.indices}

    class Sure(nn.Module):
        num_classes = 4

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return torch.stack([6.0 * (row[0, 0, 0] > 0) * F.one_hot(torch.tensor(0), 4) for row in x])

    class Marked(torch.utils.data.Dataset):
        labels = splits.pool.labels

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, i):
            return torch.full((3, 2, 2), 1.0 if i in known else -1.0), int(self.labels[i]), i

    data = pptp.from_indices(Marked(), **splits.indices).for_defense()
    adversary = Adversary(AdvReg(attack_lr=3e-3), Sure(), data, quick)
    s = pptp.Step(None, torch.zeros(1), None, None, 1)
    gains = [adversary._attack_step(s) for _ in range(60)]
    assert gains[0] == pytest.approx(math.log(0.5), abs=0.01) and gains[-1] > -0.1


def test_adversary_does_not_feed_batchnorm(model, splits, quick):
    """Four classifier steps an epoch, two epochs: BatchNorm counts eight batches, however often the adversary asked."""
    pptp.retrain(model, None, "scratch", AdvReg(warmup=0), splits, quick)
    assert int(model.bn1.num_batches_tracked) == 8


def test_advreg_needs_reference_samples(model, splits, quick):
    with pytest.raises(pptp.UserError, match="needs reference samples"):
        pptp.retrain(model, None, "head", AdvReg(), pptp.TrainingData(splits.members), quick)


# --- SELENA --------------------------------------------------------------------------------------------------


def test_every_sample_is_left_out_of_exactly_l_sub_models():
    out = leave_out(500, 25, 10, seed=3)
    assert (out.sum(1) == 10).all() and abs(out.mean(0) - 0.4).max() < 0.1


def test_teacher_is_the_mean_of_those_that_did_not_train_on_the_sample():
    said, out = torch.rand(4, 6, 3), leave_out(6, 4, 2, seed=0)
    found = _mean_over(said, out)
    for i in range(6):
        assert torch.allclose(found[i], torch.stack([said[k, i] for k in range(4) if out[i, k]]).mean(0))


def test_tempered_labels_are_powers_of_probabilities():
    label = torch.tensor([[0.6, 0.3, 0.1], [1.0, 0.0, 0.0]])
    assert torch.allclose(tempered(label, 1.0), label)
    assert torch.allclose(tempered(label, 0.5)[0], torch.tensor([36.0, 9.0, 1.0]) / 46)
    assert torch.allclose(tempered(label, 0.5)[1], label[1]), "no logarithm of 0"


def test_published_loss_overflows_where_ours_does_not():
    target = torch.tensor([[0.5, 0.5]])
    z = torch.tensor([[120.0, 0.0]], requires_grad=True)
    published = -(target * torch.log(torch.softmax(z, 1))).sum()
    published.backward()
    assert not torch.isfinite(published) or not torch.isfinite(z.grad).all()
    z.grad = None
    ours = soft_cross_entropy(z, target)
    ours.backward()
    assert float(ours) == pytest.approx(60.0) and z.grad.tolist() == [[0.5, -0.5]]


def test_teacher_labels_follow_sample_ids(splits):
    members = splits.members
    teacher = torch.rand(len(members), 4)
    s = pptp.Step(lambda _: torch.zeros(3, 4), None, None, torch.tensor(members.indices[[5, 0, 7]]), 0)
    expected = soft_cross_entropy(torch.zeros(3, 4), teacher[[5, 0, 7]])
    assert torch.isclose(Lookup(members, teacher).loss(s), expected)


def test_selena_keeps_finished_sub_models_and_says_how_sure_they_are(
    model, splits, quick, tmp_path, capsys, monkeypatch
):
    start = copy.deepcopy(model)
    first = pptp.retrain(model, None, "layer4", Selena(k=3, l=1), splits, quick, checkpoint=tmp_path / "c.pt")
    assert [p.name[:5] for p in (tmp_path / "c.selena").iterdir()] == ["said_"] * 3
    assert "no teacher is a true non-member" in capsys.readouterr().out
    assert 0 <= first["out_confidence"] <= 1 and 0 <= first["in_confidence"] <= 1
    monkeypatch.setattr("defenses.selena.probabilities", None)  # a sub-model trained again would need it
    again = pptp.retrain(start, None, "layer4", Selena(k=3, l=1), splits, quick, checkpoint=tmp_path / "c.pt")
    assert again["in_confidence"] == first["in_confidence"]


def test_selena_asks_about_views_of_the_image_and_then_needs_images(model, splits, quick, tmp_path, monkeypatch):
    """The cached activations of a trunk cannot be cropped; what a sub-model said is a mean over the image and its views."""
    asked = []
    monkeypatch.setattr("defenses.selena.probabilities", lambda *a: asked.append(a[2]) or probabilities(*a))
    result = pptp.retrain(model, None, "head", Selena(k=2, l=1, views=2), splits, quick, checkpoint=tmp_path / "c.pt")
    assert result["cache"] == "Selena changes images itself"
    assert pptp.retrain(model, None, "head", Selena(k=2, l=1), splits, quick)["cache"] != result["cache"]
    assert asked == [2, 2, 0, 0]


def test_selena_does_not_reuse_sub_models_of_another_split(model, splits, quick, tmp_path, monkeypatch):
    trained, real = [], defenses.selena.fit
    monkeypatch.setattr("defenses.selena.fit", lambda *a, **k: trained.append(k["title"]) or real(*a, **k))
    for l in (1, 2):  # noqa: E741
        pptp.retrain(model, None, "head", Selena(k=3, l=l), splits, quick, checkpoint=tmp_path / f"{l}.pt")
        (tmp_path / f"{l}.pt").unlink()
        (tmp_path / f"{l}.selena").rename(tmp_path / f"{l + 1}.selena")  # as if it had been killed with other settings
    assert len(trained) == 8, "three sub-models and a student, twice"


def test_selena_sub_models_on_a_shelf_serve_students_of_another_length_or_temperature(
    model, splits, quick, tmp_path, monkeypatch
):
    """And no one else: sub-models of other samples, lengths, views or starting weights are others."""
    trained, real = [], defenses.selena.fit
    monkeypatch.setattr("defenses.selena.fit", lambda *a, **k: trained.append(k["title"]) or real(*a, **k))
    data, first = replace(splits.for_defense(), shelf=tmp_path / "shelf"), Selena(k=2, l=1, sub_epochs=1)

    def sub_models(defense, recipe=quick):
        trained.clear()
        pptp.retrain(copy.deepcopy(model), None, "head", defense, data, recipe)
        return len(trained) - 1

    assert sub_models(first) == 2
    assert sub_models(first, replace(quick, epochs=3)) == 0
    assert sub_models(replace(first, temperature=0.5)) == 0
    for other in (replace(first, k=3), replace(first, sub_epochs=2), replace(first, views=1)):
        assert sub_models(other) == other.k
    with torch.no_grad():
        model.fc.weight.add_(0.1)
    assert sub_models(first) == 2


def test_selena_sub_models_may_have_epochs_of_their_own(model, splits, quick, monkeypatch):
    epochs, real = [], defenses.selena.fit
    monkeypatch.setattr("defenses.selena.fit", lambda *a, **k: epochs.append(a[2].epochs) or real(*a, **k))
    recipe = replace(quick, epochs=2)
    pptp.retrain(model, None, "head", Selena(k=2, l=1, sub_epochs=1), splits, recipe)
    pptp.retrain(model, None, "head", Selena(k=2, l=1), splits, recipe)
    assert epochs == [1, 1, 2, 2, 2, 2]


def test_selena_in_two_processes_is_selena_in_one(model, splits, quick):
    twin = copy.deepcopy(model)
    a = pptp.retrain(model, None, "head", Selena(k=2, l=1), splits, quick)
    b = pptp.retrain(twin, None, "head", Selena(k=2, l=1, processes=2), splits, quick)
    assert a["out_confidence"] == pytest.approx(b["out_confidence"], abs=1e-5)
    assert torch.allclose(model.fc.weight, twin.fc.weight, atol=1e-4)


# --- the short ones ------------------------------------------------------------------------------------------


def test_short_losses_equal_loops_over_samples():
    torch.manual_seed(0)
    z, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    smooth, penalised = 0.0, 0.0
    for row, label in zip(z, y):
        p = row.softmax(0).tolist()
        target = [0.1 / 4 + (0.9 if c == label else 0) for c in range(4)]
        smooth -= sum(t * math.log(v) for t, v in zip(target, p)) / 5
        penalised += (-math.log(p[label]) + 0.3 * sum(v * math.log(v) for v in p)) / 5
    assert float(LabelSmoothing(smoothing=0.1).loss(step(z, y, 0))) == pytest.approx(smooth)
    assert float(ConfidencePenalty(beta=0.3).loss(step(z, y, 0))) == pytest.approx(penalised)


def test_ccl_equals_a_loop_and_is_concave_in_the_probability():
    torch.manual_seed(0)
    z, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    p = [float(row.softmax(0)[label]) for row, label in zip(z, y)]
    expected = np.mean([-0.3 * math.log(v) - 0.7 * math.exp(v) for v in p])
    assert float(CCL(alpha=0.3).loss(step(z, y, 0))) == pytest.approx(expected)


def test_hamp_labels_have_the_entropy_asked_for():
    soft = soft_labels(torch.tensor([2, 0]), 10, 0.8)
    assert torch.allclose(soft.sum(1), torch.ones(2, dtype=torch.float64)) and soft.argmax(1).tolist() == [2, 0]
    assert (-(soft * soft.log()).sum(1)).tolist() == pytest.approx([0.8 * math.log(10)] * 2)


def test_hamp_loss_equals_a_loop():
    torch.manual_seed(0)
    z, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    total = 0.0
    for row, target in zip(z, soft_labels(y, 4, 0.7)):
        p = row.softmax(0).tolist()
        total += sum(float(t) * (math.log(t) - math.log(v)) for t, v in zip(target, p)) + 0.2 * sum(
            v * math.log(v) for v in p
        )
    assert float(HAMP(gamma=0.7, alpha=0.2).loss(step(z, y, 0))) == pytest.approx(total / 5)


def test_hamp_outputs_keep_the_order_and_say_nothing_else(model, splits):
    x = torch.stack([splits.test[i][0] for i in range(12)])
    with torch.no_grad():
        plain = model.eval()(x)
        HAMP().adapt(model)
        modified, one_by_one = model(x), torch.cat([model(row[None]) for row in x])
    assert torch.equal(plain.argsort(1), modified.argsort(1)) and not torch.allclose(plain, modified)
    assert torch.equal(modified, one_by_one)  # not a matter of the batch
    lent = {tuple(row) for row in model._forward_hooks[next(iter(model._forward_hooks))].lent.tolist()}
    assert all(tuple(row) in lent for row in modified.sort(1).values.tolist())


def test_hamp_does_not_touch_training_and_forgets_what_it_borrowed(model):
    HAMP().adapt(model)
    hook = next(iter(model._forward_hooks.values()))
    model.eval()(torch.randn(2, 3, 32, 32))
    assert hook.lent is not None
    model.train()(torch.randn(2, 3, 32, 32))
    assert hook.lent is None


def test_cskd_distillation_equals_the_formula():
    torch.manual_seed(0)
    z, other = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
    )
    found = distillation(z, other, 4.0)
    expected = np.mean(
        [
            sum(q * math.log(q / p) for p, q in zip((a / 4).softmax(0).tolist(), (b / 4).softmax(0).tolist()))
            for a, b in zip(z, other)
        ]
    )
    assert float(found) == pytest.approx(16 * expected)
    found.backward()
    assert other.grad is None and z.grad.abs().sum() > 0


def test_cskd_partners_are_of_the_same_class(model, splits, quick):
    asked = []

    class Watching(nn.Module):
        def forward(self, x):
            asked.append(x)
            return torch.zeros(len(x), 4)

    targets = torch.tensor([0, 3, 1])
    Partners(CSKD(), splits.members, 0).loss(pptp.Step(Watching(), torch.zeros(3, 3, 32, 32), targets, None, 0))
    by_pixels = {
        tuple(splits.members[i][0].flatten()[:5].tolist()): int(splits.members.labels[i])
        for i in range(len(splits.members))
    }
    assert [by_pixels[tuple(x.flatten()[:5].tolist())] for x in asked[0]] == targets.tolist()


def test_early_stopping_is_the_start_of_plain_training(model, splits, quick):
    recipe = pptp.Recipe(**{**vars(quick), "epochs": 10})
    twin = copy.deepcopy(model)
    result = pptp.retrain(model, None, "scratch", EarlyStopping(share=0.3), splits, recipe)
    history = pptp.fit(twin, splits.members, recipe)
    assert result["epochs"] == 3 and result["loss"] == history.rows[2]["loss"]


def test_sharpness_aware_gradient_is_the_one_at_the_worst_point_nearby():
    """f(w) = w^4 / 4 at w = 2: the gradient is taken at w + rho, and the weight comes back."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(2.0)

    def backward():
        (net.weight**4 / 4).sum().backward()

    backward()
    sharpness_aware(net, backward, rho=0.5)
    assert float(net.weight) == pytest.approx(2.0) and float(net.weight.grad) == pytest.approx(2.5**3)


def test_sam_is_an_option_of_every_training_and_holds_batchnorm(model, splits, quick):
    twin = copy.deepcopy(model)
    pptp.fit(model, splits.members, pptp.Recipe(**{**vars(quick), "epochs": 1, "batch_size": 80}))
    pptp.fit(twin, splits.members, pptp.Recipe(**{**vars(quick), "epochs": 1, "batch_size": 80, "sam_rho": 0.1}))
    assert torch.equal(model.bn1.running_mean, twin.bn1.running_mean)  # one pass counts, not two
    assert not torch.equal(model.fc.weight, twin.fc.weight)


def test_mixup_trains_on_blends_and_blended_losses():
    seen = []

    def linear(x):
        seen.append(x)
        return x.flatten(1)[:, :3]

    x, y = torch.randn(4, 3, 1, 1), torch.tensor([0, 1, 2, 0])
    torch.manual_seed(1)
    found = Mixup(alpha=0.7).loss(pptp.Step(linear, x, y, None, 0))
    torch.manual_seed(1)
    weight = float(torch.distributions.Beta(0.7, 0.7).sample())
    other = torch.randperm(4)
    blend = weight * x + (1 - weight) * x[other]
    expected = weight * F.cross_entropy(blend.flatten(1), y) + (1 - weight) * F.cross_entropy(
        blend.flatten(1), y[other]
    )
    assert len(seen) == 1 and torch.allclose(seen[0], blend) and torch.isclose(found, expected)


# --- MIST ----------------------------------------------------------------------------------------------------


def test_cross_difference_equals_a_loop_over_samples():
    torch.manual_seed(0)
    z, others = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64).softmax(1)
    total = sum(sum(abs(float(p) - float(q)) for p, q in zip(row.softmax(0), other)) for row, other in zip(z, others))
    assert float(cross_difference(z, others)) == pytest.approx(total / 5)


def test_mist_deals_every_member_to_one_local_model_in_both_phases():
    dealt = Dealt(21, 4, 5, seed=0)
    batches = list(dealt)
    assert len(batches) == len(dealt) and batches[: len(batches) // 2] == batches[len(batches) // 2 :]
    assert sorted(i for batch in batches for i in batch) == sorted([*range(21)] * 2)
    assert all(len(batch) > 1 for batch in batches)  # 6 = 5 + 1 would be a batch of one
    dealt.epoch = 1
    assert list(dealt) != batches


def test_mist_equals_local_models_trained_one_by_one(model, splits):
    """Two rounds by hand: copies, plain SGD, cross-difference, averaging."""
    recipe = pptp.Recipe(
        epochs=2,
        batch_size=20,
        opt="momentum",
        momentum=0.0,
        lr=0.05,
        weight_decay=0,
        sched="constant",
        augment=False,
        seed=5,
    )
    by_hand = copy.deepcopy(model)
    dealt = Dealt(80, 2, 20, seed=5)
    for epoch in range(2):
        dealt.epoch = epoch
        local = [copy.deepcopy(by_hand) for _ in range(2)]

        def descend(i, loss, local=local):
            optimizer = torch.optim.SGD(local[i].parameters(), lr=0.05)
            for rows in dealt.groups()[i]:
                x, y = (
                    torch.stack(t) if torch.is_tensor(t[0]) else torch.tensor(t)
                    for t in zip(*[splits.members[r][:2] for r in rows])
                )
                optimizer.zero_grad()
                loss(local[i].train(), x, y).backward()
                optimizer.step()

        for i in range(2):
            descend(i, lambda m, x, y: F.cross_entropy(m(x), y))
        before = [copy.deepcopy(m).eval() for m in local]
        for i in range(2):
            descend(
                i,
                lambda m, x, y, i=i, before=before: (
                    0.7 * (m(x).softmax(1) - before[1 - i](x).softmax(1).detach()).abs().sum(1).mean()
                ),
            )
        by_hand.load_state_dict(average([m.state_dict() for m in local]))
    pptp.retrain(model, None, "scratch", MIST(k=2, lam=0.7), splits, recipe)
    for (name, ours), theirs in zip(model.state_dict().items(), by_hand.state_dict().values()):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-5), name
