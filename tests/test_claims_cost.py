"""What a retraining costs over the same defense from scratch, and what is said of it."""

import pytest
from made_results import found, model

from benchmarks.claims import cost
from benchmarks.claims.work import Cell


def test_costs_are_judged_pair_by_pair():
    def judged(times, claim):
        pairs = {f"pair {i}": {"time": t, "memory": t + 0.5} for i, t in enumerate(times)}
        return next(v.agrees for v in cost.verdicts(pairs, {}) if v.claim.startswith(claim))

    assert judged([0.1, 0.2], "retraining takes at most 0.2") == "met"
    assert judged([0.1, 0.21], "retraining takes at most 0.2") == "met in 1 of 2"
    assert judged([0.1, 0.49], "retraining takes less than half") == "yes"
    assert judged([0.1, 0.51], "retraining takes less than half") == "in 1 of 2"
    assert judged([0.1, 0.51], "retraining needs less memory") == "in 1 of 2"
    assert cost.verdicts({}, {}) == []


@pytest.mark.parametrize(
    ("auc", "time", "answer"),
    [
        (0.6, 0.1, "yes"),
        (0.7, 0.1, "cannot be said: neither is surely better"),
        (0.75, 0.1, "no: the other way round"),
        (0.6, 0.3, "no: it takes 0.30"),
    ],
)
def test_a_short_retraining_must_be_better_and_quick(auc, time, answer):
    mine, theirs = cost.SHORT[0]
    results = {"resnet18-augmented": {42: found(models={mine: model(0.4, auc), theirs: model(0.4, 0.7)})}}
    costs = {cost.named("resnet18-augmented", mine, theirs): {"time": time, "memory": 1.0}}
    assert [v.agrees for v in cost.verdicts(costs, results)] == [answer]
    assert cost.verdicts({}, results) == cost.verdicts(costs, {}) == [], "accuracy or time is not there"


def test_costs_that_are_there_are_not_measured_again(monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(cost, "PATH", tmp_path / "cost.json")
    monkeypatch.setattr(cost, "_pair", lambda cell, mine, theirs, rounds: measured.append(mine) or {"time": 0.1})
    cost.measure()
    first = list(measured)
    assert {"relaxloss-2-layer3", "plain-6ep-layer2"} <= set(first)
    cost.measure()
    assert measured == first


def test_what_a_pair_costs(monkeypatch):
    """Time of an epoch times epochs."""
    cell = Cell("resnet18-augmented", 42)
    took = {"layer3": 1.0, "scratch": 4.0}
    monkeypatch.setattr(cost, "seconds", lambda cell, row: took[row["cut"]])
    monkeypatch.setattr(cost, "peak_mb", lambda base, name: 50.0 if "layer3" in name else 100.0)
    row = cost._pair(cell, "relaxloss-2-layer3", "relaxloss-2-scratch", 3)
    assert row["epochs"] == [20, 60] and row["time_of_an_epoch"] == 0.25 and row["memory"] == 0.5
    assert row["time"] == pytest.approx(0.25 * 20 / 60)


def test_selena_is_timed_whole_with_its_sub_models_and_labels(monkeypatch):
    cell = Cell("resnet18-augmented", 42)
    monkeypatch.setattr(cost, "whole_seconds", lambda cell, row: {"layer2": 30.0, "scratch": 120.0}[row["cut"]])
    monkeypatch.setattr(cost, "peak_mb", lambda base, name: 1.0)
    row = cost._pair(cell, "selena-10-t0.5-layer2", "selena-10-t0.5-scratch", 3)
    assert row["epochs"] == [20 + 7 * 7, 60 + 7 * 60], "each of ten sub-models trains on seven tenths of the members"
    assert row["time"] == 0.25 and row["time_of_an_epoch"] == pytest.approx(0.25 * 480 / 69)


@pytest.mark.parametrize("defense", ["relaxloss", "selena"])
def test_a_retraining_is_timed_for_real(defense, monkeypatch):
    monkeypatch.setattr(cost, "MEMBERS", 60)
    monkeypatch.setattr(
        Cell,
        "settings",
        {
            "model": "test_resnet",
            "img_size": 32,
            "limit_classes": 4,
            "batch_size": 20,
            "epochs": 2,
            "data": "digits",
        },
    )
    cell, row = Cell("any", 42), {"defense": defense, "cut": "scratch"}
    assert cost.seconds(cell, row) > 0
    assert cost.whole_seconds(cell, {**row, "set": ["k=2", "l=1"] if defense == "selena" else []}) > 0
