"""Samples on the FPR-TPR plane: planted groups land where they belong, sums equal loops, and early warning finds flipped labels."""

import numpy as np
import pytest
import torch
from scipy import stats
from test_curvature import enrichment

import pptp
from pptp.data import Pool
from pptp.models import weights_digest
from pptp.monitors.dynamics import (
    REGIONS,
    Dynamics,
    Recording,
    correlations,
    difficulty,
    early_warning,
    plane,
    warned_by,
)
from pptp.sources import digits
from pptp.training import fit


def world(models=40, typical=200, easy=40, wrong=40, steps=3, seed=0):
    """phi (t, m, n) and masks: easy samples are as sure with as without, mislabelled ones become sure only where trained on."""
    rng = np.random.default_rng(seed)
    n = typical + easy + wrong
    masks = np.stack([rng.permutation(models) < models // 2 for _ in range(n)], 1)  # (m, n), half of the models each
    kind = np.repeat(["typical", "easy", "wrong"], [typical, easy, wrong])
    phi = []
    for step in range(steps):
        grown = step / (steps - 1)
        base = np.where(kind == "easy", 6.0, np.where(kind == "wrong", -3.0, 1.0))
        gain = np.where(kind == "wrong", 8.0, np.where(kind == "easy", 0.0, 0.5)) * grown
        phi.append(base + gain * masks + rng.normal(size=(models, n)))
    return np.stack(phi), masks, kind


@pytest.mark.parametrize("counted", [True, False])
def test_planted_groups_land_in_their_regions(counted):
    phi, masks, kind = world()
    found = Dynamics(np.array([1, 5, 9]), np.arange(masks.shape[1]), plane(phi, masks, counted=counted))
    regions = np.array(REGIONS)[found.regions]
    assert (regions[-1][kind == "wrong"] == "vulnerable").mean() > 0.95
    assert (regions[-1][kind == "easy"] == "secure").mean() > 0.9
    assert (regions[0] == "secure").mean() > 0.9  # nothing is memorised yet
    assert found.vulnerability[kind == "wrong"].min() > found.vulnerability[kind == "easy"].max() - 0.2
    assert found.encoding_speed[kind == "wrong"].mean() > 3 * found.encoding_speed[kind == "typical"].mean() > 0


def test_counted_rates_equal_a_loop_over_models():
    phi, masks, _ = world(models=12, typical=10, easy=3, wrong=3, steps=2)
    found = plane(phi, masks, fpr=0.2, counted=True)
    for t, at_epoch in enumerate(phi):
        score = np.empty_like(at_epoch)
        for k in range(len(masks)):
            others = [m for m in range(len(masks)) if m != k]
            centres, spreads = [], []
            for inside in (True, False):
                rows = [[at_epoch[m, i] for m in others if masks[m, i] == inside] for i in range(masks.shape[1])]
                centre = np.array([np.median(row) for row in rows])
                centres.append(centre)
                spreads.append(
                    np.std(np.concatenate([row - c for row, c in zip(rows, centre)]))
                )  # about the medians' residuals
            logs = [stats.norm.logpdf(at_epoch[k], c, s) for c, s in zip(centres, spreads)]
            score[k] = logs[0] - logs[1]
        tau = np.quantile(score[~masks], 0.8)
        for i in range(masks.shape[1]):
            called = score[:, i] > tau
            assert found[t, i, 1] == pytest.approx(called[masks[:, i]].mean())
            assert found[t, i, 0] == pytest.approx(called[~masks[:, i]].mean())


def test_displacement_speed_entropy_and_transitions_of_a_known_path():
    states = np.array([[[0.1, 0.1], [0.1, 0.1]], [[0.1, 0.5], [0.1, 0.9]], [[0.1, 0.7], [0.1, 0.9]]])  # (t, n, 2)
    found = Dynamics(np.array([2, 4, 12]), np.array([7, 9]), states)
    assert found.displacement()["net"].value == pytest.approx(0.7)  # (.1, .1) -> (.1, .8)
    assert found.displacement()["cumulative"].value == pytest.approx(0.7)
    assert found.encoding_speed.tolist() == pytest.approx([0.06, 0.08]) and found.path_speed.tolist() == pytest.approx(
        [0.06, 0.08]
    )
    assert found.entropy().tolist() == pytest.approx([0.0, np.log(2), np.log(2)])
    moves = found.transitions()
    assert moves[REGIONS.index("secure"), REGIONS.index("vulnerable")] == 2 and moves.sum() == 4


def test_difficulty_of_known_traces():
    correct = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1]], bool)  # always, forgotten once, never, at the end
    loss = np.array([[0.1, 2, 3, 3], [0.1, 0.5, 3, 2], [0.1, 2, 3, 0.1]])
    traces = {
        "epochs": np.array([1, 2, 4]), "correct": correct, "loss": loss, "margin": -loss, "el2n": loss, "entropy": np.zeros((3, 4)),
        "entropy_of_mean": np.tile([0.0, 0.5, 0.0, 0.6], (3, 1)),
    }  # fmt: skip
    found = difficulty(traces)
    assert found["first_learned"].tolist() == [1, 2, 5, 4] and found["forgetting"].tolist() == [0, 1, 3, 0]
    assert found["cumulative_loss"].tolist() == pytest.approx([0.3, 4.5, 9, 5.1])
    assert found["epistemic"].tolist() == [0, 0.5, 0, 0.6]
    assert difficulty(traces, until=2)["cumulative_loss"].tolist() == pytest.approx([0.2, 2.5, 6, 5])


def test_warnings_are_counted():
    flagged, truth = np.array([1, 1, 0, 0, 0], bool), np.array([1, 0, 1, 1, 0], bool)
    found = warned_by(flagged, truth)
    assert found["recall"].value == pytest.approx(1 / 3) and found["precision"].value == pytest.approx(1 / 2)
    assert warned_by(np.zeros(5, bool), truth)["precision"].note == "nobody"


def test_early_warning_uses_only_what_was_known_by_then():
    phi, masks, kind = world(steps=11)
    ids = np.arange(masks.shape[1]) + 1000
    found = Dynamics(np.arange(1, 12), ids, plane(phi, masks))
    hard = np.where(kind == "wrong", 5.0, 1.0)
    traces = {
        "ids": ids, "epochs": np.arange(1, 12), "loss": np.tile(hard, (11, 1)), "margin": np.tile(-hard, (11, 1)),
        "correct": np.ones((11, len(ids)), bool), "el2n": np.tile(hard, (11, 1)), "entropy": np.zeros((11, len(ids))),
        "entropy_of_mean": np.zeros((11, len(ids))),
    }  # fmt: skip
    rows = {(row["by"], row["share"]): row for row in early_warning(found, traces)}
    assert rows["plane", 0.5]["epoch"] == 5 and rows["cumulative_loss", 0.1]["epoch"] == 1
    assert set(rows["cumulative_loss", 0.1]["flagged"]) <= set(ids[kind == "wrong"])
    assert rows["cumulative_loss", 0.1]["precision"]["value"] > 0.95
    assert rows["plane", 0.1]["recall"]["value"] <= rows["plane", 0.5]["recall"]["value"]
    assert correlations(found, traces)["cumulative_loss"].low > 0.3


def test_flipped_labels_are_enriched_among_those_warned_of_early():
    pool = digits(32, pixel_noise=0.0)
    rows = np.random.default_rng(0).permutation(len(pool))[:400]
    labels, flipped = pool.labels[rows].copy(), np.random.default_rng(1).random(400) < 0.1
    labels[flipped] = (labels[flipped] + 1 + np.random.default_rng(2).integers(0, 9, flipped.sum())) % 10
    noisy = Pool(pool.pixels[rows], labels, (0.5,) * 3, (0.5,) * 3)
    watch = Recording(noisy)
    recipe = pptp.Recipe(epochs=12, batch_size=32, opt="adamw", lr=2e-3, augment=False)
    fit(pptp.create("test_resnet", 10, 32), noisy, recipe, monitors=[watch], stop_after=6)
    hard = difficulty(watch.arrays(), until=6)["cumulative_loss"]
    top, everywhere = enrichment(hard, flipped[watch.ids])
    assert top > 4 * everywhere, (top, everywhere)


def test_looking_draws_no_random_number_of_the_training(pool, quick):
    digests = []
    for monitors in ([], [Recording(pool)]):
        model = pptp.create("test_resnet", 4, 32, drop_rate=0.3)
        fit(model, pool, quick, monitors=monitors)
        digests.append(weights_digest(model))
    assert digests[0] == digests[1]


def test_a_training_is_watched_from_its_start_or_not_at_all(pool, quick, tmp_path):
    fit(pptp.create("test_resnet", 4, 32), pool, quick, checkpoint=tmp_path / "c.pt", stop_after=1)
    with pytest.raises(pptp.UserError, match="did not watch from its start"):
        fit(pptp.create("test_resnet", 4, 32), pool, quick, monitors=[Recording(pool)], checkpoint=tmp_path / "c.pt")
    first, other = Recording(pool, most=20), Recording(pool, most=30)
    with pytest.raises(pptp.UserError, match="watched other samples"):
        other.load_state_dict(first.state_dict())


def test_recording_goes_on_after_a_kill(pool, tmp_path, quick):
    def trained(stops, checkpoint):
        for stop in stops:
            watch = Recording(pool)
            fit(
                pptp.create("test_resnet", 4, 32), pool, quick, monitors=[watch], checkpoint=checkpoint, stop_after=stop
            )
        return watch.arrays()

    straight, killed = trained([2], tmp_path / "a.pt"), trained([1, 2], tmp_path / "b.pt")
    assert straight["loss"].shape == (2, len(pool))
    assert all(np.allclose(straight[key], killed[key]) for key in straight)
    assert torch.isfinite(torch.from_numpy(straight["margin"])).all()
