"""A checkpoint is continued where the training is the same one, and nowhere else; nothing that a plug-in logs can lose a training."""

import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Subset, random_split

import pptp
from defenses import AdvReg, Selena
from defenses.advreg import Adversary
from pptp.cache import Activations, Policy, TrunkCache
from pptp.data import Indexed, Part, Pool, indexed, sample_ids
from pptp.fingerprint import fingerprint_of
from pptp.monitors.curvature import Curvature
from pptp.monitors.dynamics import Recording
from pptp.training import Monitor, cross_entropy, fit


class Dies(Monitor):
    """In the middle of a training."""

    def __init__(self, after):
        self.after = after

    def after_epoch(self, model, epoch):
        if epoch == self.after:
            raise KeyboardInterrupt
        return {}


def killed(model, data, recipe, monitors=(), after=1, **more):
    with pytest.raises(KeyboardInterrupt):
        fit(copy.deepcopy(model), data, recipe, monitors=[*monitors, Dies(after)], **more)


# --- what a training is told apart by ----------------------------------------------------------------


def smoothed(step, epsilon):
    return F.cross_entropy(step.logits, step.targets, label_smoothing=epsilon)


class Smoothing:
    def __init__(self, epsilon):
        self.epsilon = epsilon

    def loss(self, step):
        return smoothed(step, self.epsilon)

    def __call__(self, step):
        return smoothed(step, self.epsilon)


def closure(epsilon):
    return lambda step: smoothed(step, epsilon)


def by_default(epsilon):
    def loss(step, epsilon=epsilon):
        return smoothed(step, epsilon)

    return loss


class Weighted(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, weight]))


class Focal(torch.nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma


class Slots:
    __slots__ = ("epsilon",)

    def __init__(self, epsilon):
        self.epsilon = epsilon


class Holding:
    def __init__(self, held):
        self.held = held

    def loss(self, step):
        return 0


def typed_in(text):
    """As in a notebook: there is no file with its text."""
    names = {"__name__": "typed_in"}
    exec(text, names)
    return names


@pytest.mark.parametrize(
    "make",
    [
        lambda e: partial(smoothed, epsilon=e),
        lambda e: Smoothing(e).loss,
        Smoothing,
        closure,
        by_default,
        lambda e: closure(by_default(e)),
        lambda e: partial(smoothed, epsilon=by_default(e)),
        Weighted,
        lambda e: Holding([1, e]).loss,
        lambda e: Holding({"a": torch.tensor(e)}).loss,
        lambda e: Holding(np.array([e])).loss,
        lambda e: Holding(Smoothing(e)).loss,
        Focal,
        lambda e: Holding(torch.nn.CrossEntropyLoss(label_smoothing=e)).loss,
        lambda e: Holding({e}).loss,
        lambda e: Holding(Slots(e)).loss,
        lambda e: typed_in(f"def loss(step): return {e} in {{'a', 'b', 'c'}}")["loss"],
        lambda e: typed_in(f"class L:\n    def loss(self, step): return {e}")["L"]().loss,
        lambda e: Holding(torch.nn.Linear(2, 1).requires_grad_(False).apply(lambda m: m.weight.fill_(e))).loss,
    ],
)
def test_losses_of_other_settings_are_other_trainings(make, model, splits, quick):
    prints = []
    for epsilon in (0.1, 0.1, 0.2):
        torch.manual_seed(0)
        prints.append(fingerprint_of(model, splits.members, quick, make(epsilon)))
    assert prints[0] == prints[1] != prints[2]


def test_the_loss_of_an_adversary_says_the_same_twice(model, splits, quick):
    """It holds models, an optimizer and data sets, whose addresses differ from process to process."""
    data = splits.for_defense()
    twice = [fingerprint_of(model, splits.members, quick, Adversary(AdvReg(), model, data, quick).loss) for _ in "ab"]
    other = fingerprint_of(model, splits.members, quick, Adversary(AdvReg(alpha=2.0), model, data, quick).loss)
    assert twice[0] == twice[1] != other


def test_an_adversary_is_told_apart_by_its_reference_and_not_by_where_it_runs(model, splits, quick):
    data = splits.for_defense()

    def of(data=data, recipe=quick):
        return fingerprint_of(model, data.members, recipe, Adversary(AdvReg(), model, data, recipe).loss)

    fewer = pptp.TrainingData(data.members, Part(data.reference, range(8), "fewer"))
    assert of() == of(recipe=replace(quick, workers=2, device="cpu")) == of(replace(data, outside=object())) != of(fewer)


@pytest.mark.parametrize(("views", "dtype"), [(2, torch.float32), (0, torch.float16)])
def test_how_inputs_are_kept_tells_trainings_apart_where_it_matters(views, dtype, model, quick):
    def of(views, dtype):
        store, labels = torch.zeros(1 + views, 8, 2, dtype=dtype), np.arange(8) % 4
        part = Part(Activations(store, labels, np.arange(8), "members"), range(6), "of a sub-model")
        return fingerprint_of(model, part, quick, cross_entropy)

    assert of(0, torch.float32) != of(views, dtype)


def test_losses_that_lead_back_to_themselves_come_to_an_end(model, splits, quick):
    def wrapper(step):
        wrapper.calls += 1
        return smoothed(step, 0.1)

    circle = Smoothing(0.1)
    circle.held, circle.later = circle.loss, lambda: circle
    for loss in (wrapper, circle.loss):
        assert fingerprint_of(model, splits.members, quick, loss) == fingerprint_of(model, splits.members, quick, loss)


def test_a_loss_may_use_what_is_defined_after_it(model, splits, quick):
    def loss(step):
        return later * smoothed(step, 0.1)

    fingerprint_of(model, splits.members, quick, loss)
    later = 1.0
    assert loss


def test_labels_of_images_that_are_read_one_by_one_are_not_read_for_nothing(model, quick):
    """A pass over the data for labels that nobody asked for takes as long as an epoch."""
    reads = []

    class Counting(Pairs):
        targets = None

        def __getitem__(self, i):
            reads.append(i)
            return torch.randn(3, 32, 32), i % 4

        def __init__(self):
            pass

        def __len__(self):
            return 40

    fit(model, Counting(), replace(quick, epochs=1, augment=True))
    assert len(reads) <= 41, "each once, and the first to see what kind it is of"


def test_other_labels_recipes_and_weights_are_other_trainings_and_another_device_is_not(model, splits, quick, pool):
    def of(model=model, data=splits.members, recipe=quick):
        return fingerprint_of(model, data, recipe, cross_entropy)

    swapped = Pool(pool.pixels, (pool.labels + 1) % 4, (0.5,) * 3, (0.25,) * 3)
    assert of(data=Part(swapped, splits.members.indices, "members")) != of()
    assert of(recipe=replace(quick, lr=0.1)) != of() == of(recipe=replace(quick, device="cpu", workers=2))
    assert of(model=pptp.create("test_resnet", classes=4, img_size=32, seed=4)) != of()


@pytest.mark.parametrize("defense", ["plain", "advreg"])
def test_the_cached_suffix_goes_on_from_a_checkpoint_of_the_whole_model_and_back(defense, model, splits, quick, tmp_path):
    """How much memory there is may decide otherwise after a kill; without augmentation both give the same bits."""
    made = Plain() if defense == "plain" else AdvReg()

    def retrained(kind, path=None, monitors=()):
        cache = TrunkCache(Policy(kind))
        trained = copy.deepcopy(model)
        pptp.retrain(
            trained, None, "layer4", made, splits, replace(quick, epochs=3), monitors, checkpoint=path, cache=cache
        )
        return trained.state_dict()

    whole = retrained("none")
    for first, second in (("memory", "none"), ("none", "memory")):
        path = tmp_path / f"{first}.pt"
        with pytest.raises(KeyboardInterrupt):
            retrained(first, path, [Dies(1)])
        again = retrained(second, path)
        assert all(torch.equal(whole[key], again[key]) for key in whole)


@dataclass(frozen=True)
class Plain(pptp.LossDefense):
    def loss(self, step):
        return cross_entropy(step)


# --- monitors ----------------------------------------------------------------------------------------


def test_two_monitors_of_a_kind_go_on_each_with_its_own(model, splits, quick, tmp_path):
    recipe = replace(quick, epochs=3)

    def pair():
        return [Curvature(splits.members, most=20), Curvature(splits.nonmembers, most=20)]

    undisturbed, resumed = pair(), pair()
    fit(copy.deepcopy(model), splits.members, recipe, monitors=undisturbed)
    killed(model, splits.members, recipe, pair(), checkpoint=tmp_path / "c.pt")
    fit(copy.deepcopy(model), splits.members, recipe, monitors=resumed, checkpoint=tmp_path / "c.pt")
    for a, b in zip(undisturbed, resumed):
        assert list(a.found) == list(b.found) == [1, 2, 3] and np.array_equal(a.mean, b.mean)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (lambda d: Curvature(d, most=20), lambda d: Curvature(d, most=20, every=2), "another estimator, or at other epochs"),
        (lambda d: Curvature(d, most=20), lambda d: Curvature(d, most=10), "the curvature of other samples"),
        (lambda d: Recording(d, most=20), lambda d: Recording(d, every=2, most=20), "at other epochs"),
    ],
)  # fmt: skip
def test_traces_made_otherwise_are_not_continued(before, after, says, model, splits, quick, tmp_path):
    recipe = replace(quick, epochs=3)
    killed(model, splits.members, recipe, [before(splits.members)], checkpoint=tmp_path / "c.pt")
    with pytest.raises(pptp.UserError, match=says):
        fit(model, splits.members, recipe, monitors=[after(splits.members)], checkpoint=tmp_path / "c.pt")


class Careless(Monitor):
    """Numbers as they come out of numpy, and one that is none."""

    def __init__(self):
        self.seen = []

    def after_epoch(self, model, epoch):
        self.seen.append(np.float64(epoch))
        return {"mean": np.mean([1.0, 2.0]), "of nobody": float("nan") if epoch else 3.0}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_numbers_of_numpy_can_be_read_back_and_what_is_no_number_is_left_out(model, splits, quick, tmp_path):
    recipe, path, monitor = replace(quick, epochs=3), tmp_path / "c.pt", Careless()
    killed(model, splits.members, recipe, [Careless()], checkpoint=path)
    history = fit(model, splits.members, recipe, monitors=[monitor], checkpoint=path)
    assert monitor.seen == [0, 1, 2] and [row["mean"] for row in history.rows] == [1.5] * 3
    assert [row["of nobody"] for row in history.rows] == [3.0, None, None]
    assert history.summary()["of nobody"] == 3.0, "the mean over the epochs that had one"


def test_an_array_that_no_checkpoint_can_be_read_back_with_is_refused_at_once(model, splits, quick, tmp_path):
    class Holding(Careless):
        def state_dict(self):
            return {"seen": np.array(self.seen)}

    with pytest.raises(pptp.UserError, match="Holding.state_dict.. holds a numpy array"):
        fit(model, splits.members, quick, monitors=[Holding()], checkpoint=tmp_path / "c.pt")


# --- sample ids --------------------------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset):
    """(x, y), without an index; the label is in the picture, so that labels of other samples do harm."""

    def __init__(self, n=400):
        g = torch.Generator().manual_seed(0)
        self.targets = np.arange(n) % 4
        self.x = torch.randn(n, 3, 32, 32, generator=g) + torch.as_tensor(self.targets)[:, None, None, None]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return self.x[i], int(self.targets[i])


def test_ids_are_places_in_the_data_set_however_deep_the_subset():
    data = Pairs(40)
    inner = Subset(data, list(range(39, -1, -1)))
    outer = Subset(inner, [5, 3, 1])
    for subset in (inner, outer):
        wrapped = indexed(subset)
        assert [wrapped[i][2] for i in range(len(wrapped))] == sample_ids(subset).tolist()
    assert sample_ids(outer).tolist() == [34, 36, 38]
    part = Part(Indexed(inner), [7, 2], "part")
    assert sample_ids(part).tolist() == [32, 37] == [part[i][2] for i in range(2)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_teachers_labels_meet_their_samples_in_a_shuffled_subset(shuffled, quick):
    """A label of another sample is right in one of four cases."""
    data = Pairs()
    pool = random_split(data, [300, 100], torch.Generator().manual_seed(1))[0] if shuffled else Subset(data, range(300))
    splits = pptp.split(pool, 120, 20, 60, 80, seed=1)
    model = pptp.create("test_resnet", classes=4, img_size=32, seed=3)
    recipe = replace(quick, epochs=6, lr=5e-3)
    pptp.retrain(model, None, "scratch", Selena(k=3, l=1, temperature=0.3), splits, recipe)
    said = pptp.collect(model, splits.members)
    assert (said.logits.argmax(1) == said.labels).float().mean() > 0.8


def test_references_find_the_samples_of_a_shuffled_subset(model):
    data = Pairs(120)
    members, others = random_split(data, [60, 60], torch.Generator().manual_seed(1))
    references = pptp.References(np.arange(120), torch.randn(1, 120, 4), torch.zeros(1, 120, dtype=torch.bool))
    found = pptp.evaluate({"m": model}, members, others, None, references=references)["m"]
    assert len(found.attacks["calibration"].scores) == 120
