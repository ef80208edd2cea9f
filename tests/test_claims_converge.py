"""Epochs until a retraining has converged, and what is said of them."""


from benchmarks.claims import converge
from benchmarks.claims.converge import CUT, compared, converged
from pptp.runs import Run
from pptp.stages import SCRATCH


def training(accuracy, seconds=10.0):
    return {"accuracy": accuracy, "seconds": seconds}


def said(*pairs):
    found = {str(i): {CUT: training(a), SCRATCH: training(b)} for i, (a, b) in enumerate(pairs)}
    return [v.agrees for v in converge.verdicts(found)]


def test_converged_is_the_first_epoch_within_a_point_of_the_best():
    assert converged([0.2, 0.395, 0.38, 0.40]) == 2
    assert converged([0.2, 0.389, 0.38, 0.40]) == 4
    assert converged([0.4]) == 1


def test_fewer_than_half_of_the_epochs():
    quick, slow = [0.3, 0.4, 0.4, 0.4, 0.4], [0.1, 0.2, 0.2, 0.2, 0.4]
    assert said((quick, slow)) == ["yes"]
    assert said((quick, slow), (slow, slow)) == ["in 1 of 2"]
    assert said(([0.3, 0.4, 0.4, 0.4], [0.1, 0.2, 0.2, 0.4])) == ["in 0 of 1"], "half is not less than half"
    assert converge.verdicts({}) == converge.verdicts({"plain": {CUT: training([0.1])}}) == []


def test_epochs_and_best_accuracies_are_compared():
    mine, theirs = training([0.3, 0.4, 0.4, 0.4]), training([0.1, 0.2, 0.3, 0.4])
    row = compared({"plain": {CUT: mine, SCRATCH: theirs}})[0]
    assert row["epochs"] == [2, 4] and row["best"] == [0.4, 0.4]


def test_trainings_are_watched_kept_and_not_repeated(tmp_path, monkeypatch, run):
    monkeypatch.setattr(converge, "PATH", tmp_path / "converge.json")
    monkeypatch.setattr(converge, "DEFENSES", {"plain": []})
    monkeypatch.setattr(converge, "trained", lambda *a: Run.open(str(run)))
    converge.measure("data", tmp_path, 42)
    kept = converge.load()
    epochs = Run.open(str(run)).experiment.recipe.epochs
    assert all(len(kept["plain"][cut]["accuracy"]) == epochs for cut in (CUT, SCRATCH))
    monkeypatch.setattr(converge, "watched", None)
    converge.measure("data", tmp_path, 42)
    assert converge.load() == kept
