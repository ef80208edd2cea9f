"""Bounds on epsilon, canaries, the gate, exposure, and what is honest about them when nothing leaks."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import pptp
from attacks import ATTACKS
from pptp.audit import _epsilons, canary_bound, guess_p_value, one_run_bound, threshold_bound
from pptp.canaries import Planted, draw
from pptp.cli import main
from pptp.evaluate import Evaluation, MembershipScores, leak_difference, run_attacks
from pptp.exposure import most_exposed, per_class, per_slice
from pptp.gate import Rule, judge, junit
from pptp.intervals import Estimate, auc, auc_difference, proportion
from pptp.outputs import read_outputs

DRAWS = 200
half = np.arange(200) < 100


# --- epsilon -------------------------------------------------------------------------------------


def test_golden_values():
    ratios = []
    for hits, alarms in ((100, 10), (90, 5)):
        scores = np.repeat([1.0, 0.0, 1.0, 0.0], [hits, 110 - hits, alarms, 80 - alarms])
        (epsilon,) = _epsilons(scores, np.arange(190) < 110, np.array([1.0]), False, 0.0, 0.95)
        ratios.append(np.exp(epsilon))
    assert ratios == pytest.approx([3.851340, 5.242922], abs=1e-6)
    assert one_run_bound(1000, 1000, 700) == pytest.approx(0.7320, abs=1e-4)
    assert one_run_bound(1000, 100, 95) == pytest.approx(2.1724, abs=1e-4)


def test_one_run_p_value_equals_its_definition_by_loops():
    from math import comb, exp

    epsilon, m, r, v, delta = 0.7, 40, 30, 25, 1e-3
    q = exp(epsilon) / (1 + exp(epsilon))
    pmf = [comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    extra = max(sum(pmf[v - i : v]) / i for i in range(1, v + 1))
    assert guess_p_value(epsilon, m, r, v, delta) == pytest.approx(sum(pmf[v:]) + 2 * m * delta * extra)
    assert one_run_bound(m, r, v, 1e-3) < one_run_bound(m, r, v, 0.0)


def test_bounds_find_nothing_where_there_is_nothing():
    rng = np.random.default_rng(0)
    by_threshold = sum(threshold_bound(rng.normal(size=200), half, seed=i).epsilon > 0 for i in range(DRAWS))
    by_canaries = sum(canary_bound(rng.normal(size=100), rng.random(100) < 0.5).epsilon > 0 for _ in range(DRAWS))
    assert by_threshold <= 0.05 * DRAWS and by_canaries <= 0.05 * DRAWS


def test_bounds_find_what_was_planted_and_no_more():
    """Randomised response with epsilon 2: the best bound there can be is 2."""
    rng = np.random.default_rng(1)
    members = np.arange(20_000) < 10_000
    tells = rng.random(20_000) < np.exp(2) / (1 + np.exp(2))
    scores = np.where(tells, members, ~members).astype(float)
    assert 1.8 < threshold_bound(scores, members).epsilon <= 2
    assert 1.8 < threshold_bound(-scores, ~members).epsilon <= 2
    noisy = scores + 1e-3 * rng.random(20_000)
    assert 1.8 < canary_bound(noisy, members, share=0.5).epsilon <= 2


def test_too_few_samples_are_refused():
    with pytest.raises(pptp.UserError, match="at least 4 members"):
        threshold_bound(np.arange(6), np.arange(6) < 3)
    with pytest.raises(pptp.UserError, match="share of 0.7"):
        canary_bound(np.arange(10), np.arange(10) < 5, share=0.7)


# --- honest numbers ------------------------------------------------------------------------------


def test_every_interval_covers_when_nothing_leaks():
    rng = np.random.default_rng(2)
    misses = {"auc": 0, "advantage": 0, "tpr": 0, "difference": 0, "class": 0}
    for i in range(DRAWS):
        scores = MembershipScores(rng.normal(size=200), half, np.arange(200) % 4, seed=i)
        other = scores.scores + rng.normal(size=200)
        classes = [row["auc"] for row in per_class(scores)]
        misses["auc"] += not scores.auc.low <= 0.5 <= scores.auc.high
        misses["advantage"] += not scores.advantage.low <= 0 <= scores.advantage.high
        misses["tpr"] += not scores.tpr_at(0.1).low <= 0.1 <= scores.tpr_at(0.1).high
        difference = auc_difference(scores.scores, other, half)
        misses["difference"] += not difference.low <= 0 <= difference.high
        misses["class"] += any(not e["low"] <= 0.5 <= e["high"] for e in classes)
    assert all(count <= 0.085 * DRAWS for count in misses.values()), misses  # 5 % and three standard errors


@pytest.mark.parametrize("name", ["network", "attack_p", "confidence"])
def test_fitted_attacks_find_nothing_when_there_is_nothing(name):
    """Anything that learns from what it scores would be above 1/2."""
    found = []
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        signals = pptp.Signals(torch.randn(160, 5, generator=g), torch.arange(160) % 5)
        (scores,) = run_attacks({name: ATTACKS[name]}, signals, np.arange(160) % 2 == 0).values()
        found.append(scores.auc.value)
    assert abs(np.mean(found) - 0.5) < 3 * 0.046 / 12**0.5


@pytest.mark.parametrize("name", ["network", "feature_probe"])
def test_balanced_classes_do_not_look_like_a_leak(name):
    """Holding a sample out must not make its class rarer among what the attack learns from."""
    rng, found = np.random.default_rng(0), []
    labels = torch.from_numpy(np.repeat(np.arange(100), 10))
    members = np.tile([True, False], 500)
    for _ in range(3):
        features = {"feature/a": torch.from_numpy(rng.normal(size=(1000, 6))).float()}
        signals = pptp.Signals(torch.from_numpy(rng.normal(size=(1000, 100))), labels, measured=features)
        (scores,) = run_attacks({name: ATTACKS[name]}, signals, members).values()
        found.append(scores.auc.value)
    assert abs(np.mean(found) - 0.5) < 0.03, found


def test_the_order_of_a_query_tells_nothing():
    signals = pptp.Signals(torch.zeros(200, 2), torch.zeros(200, dtype=torch.long))
    (scores,) = run_attacks({"order": lambda known, query: -torch.arange(len(query))}, signals, half).values()
    assert scores.auc.low < 0.5 < scores.auc.high


def test_right_or_wrong_scores_have_intervals_that_cover():
    rng = np.random.default_rng(0)
    inside, outside = rng.random((300, 1000)) < 0.98, rng.random((300, 60)) < 0.98
    found = [auc(a, b) for a, b in zip(inside, outside)]
    assert np.mean([not e.low <= 0.5 <= e.high for e in found]) < 0.08


def test_ties_do_not_fall_in_the_members_favour():
    scores = MembershipScores(np.zeros(200), half, np.zeros(200, int))
    assert most_exposed(scores, np.arange(200), 40)["precision"]["value"] < 0.8


def test_paired_difference_equals_that_of_the_aucs_and_is_narrower_than_theirs():
    rng = np.random.default_rng(3)
    common = rng.normal(size=400) + 0.5 * (np.arange(400) < 200)
    a, b, members = common + 0.1 * rng.normal(size=400), common + 0.3 * rng.normal(size=400), np.arange(400) < 200
    found = auc_difference(a, b, members)
    one, two = (auc(s[members], s[~members]) for s in (a, b))
    assert found.value == pytest.approx(one.value - two.value)
    assert found.high - found.low < 0.5 * ((one.high - one.low) + (two.high - two.low))
    assert auc_difference(a, a, members) == Estimate(0.0, 0.0, 0.0)


def test_two_models_are_compared_on_the_samples_that_both_attacks_scored():
    rng = np.random.default_rng(4)
    members = np.arange(100) < 50
    strong = MembershipScores(members + rng.normal(size=100), members)
    rows = np.arange(0, 100, 2)
    weak = MembershipScores(rng.normal(size=50), members[rows], rows=rows)
    of = Estimate(1, 1, 1)
    found = leak_difference(Evaluation(of, of, {"a": strong}), Evaluation(of, of, {"b": weak}))
    x, y = strong.scores[rows], weak.scores * (1 if weak.auc.value >= 0.5 else -1)
    assert found.value == pytest.approx(auc_difference(x, y, members[rows]).value)


def test_exposure_by_class_slice_and_sample():
    rng = np.random.default_rng(5)
    labels, members = np.arange(300) % 3, rng.random(300) < 0.5
    scores = MembershipScores(rng.normal(size=300) + 3 * members * (labels == 1), members, labels)
    assert per_class(scores)[0]["name"] == "1" and per_class(scores)[0]["auc"]["low"] > 0.9
    ids = 1000 + np.arange(300)
    sliced = per_slice(scores, ids, {"mine": ids[labels == 1], "rest": ids[labels != 1]})
    assert [row["name"] for row in sliced] == ["mine", "rest"] and sliced[0]["members"] == int(
        (members & (labels == 1)).sum()
    )
    top = most_exposed(scores, ids, 10)
    first = top["samples"][0]
    best = int(np.flatnonzero(members)[scores.scores[members].argmax()])
    assert first["id"] == 1000 + best and first["label"] == labels[best]
    higher = (scores.scores[~members] >= scores.scores[best]).sum()
    assert first["fpr"] == pytest.approx((1 + higher) / (1 + (~members).sum()))
    assert top["precision"]["value"] >= 0.8
    with pytest.raises(pptp.UserError, match="slice 'none'"):
        per_slice(scores, ids, {"none": np.array([5])})


# --- the gate ------------------------------------------------------------------------------------


def leaky(shift, n=400):
    members = np.arange(n) < n // 2
    return MembershipScores(np.random.default_rng(0).normal(size=n) + shift * members, members, np.arange(n) % 2)


def statuses(rule, scores, **utility):
    return [v.status for v in judge([Rule.parse(rule)], scores, utility)]


def test_a_bound_is_violated_only_when_the_interval_says_so():
    value = leaky(1.0).auc
    scores = {"m": {"confidence": leaky(1.0)}}
    assert statuses(f"auc>{value.low - 0.01}", scores) == ["violated"]
    assert statuses(f"auc>{value.value - 0.01}", scores) == ["undecided"]
    assert statuses(f"auc>{value.high + 0.01}", scores) == ["kept"]
    assert statuses("advantage>0.1", scores) == ["violated"] and statuses("balanced_accuracy>0.9", scores) == ["kept"]
    assert statuses("tpr@0.1>0.01", scores) == ["violated"] and statuses("tpr@0.001>0.02", scores) == ["undecided"]
    assert statuses("test_accuracy<0.7", scores, m={"test_accuracy": proportion(50, 100)}) == ["violated"]
    assert statuses("test_accuracy<0.3", scores, m={"test_accuracy": proportion(50, 100)}) == ["kept"]


def test_an_inverted_attack_counts_and_one_attack_of_many_is_enough():
    inverted = MembershipScores(-leaky(1.0).scores, leaky(1.0).members)
    calm = leaky(0.0, 4000)
    scores = {"m": {"calm": calm, "inverted": inverted}, "n": {"calm": calm, "inverted": calm}}
    (m, n) = judge([Rule.parse("auc>0.6")], scores, {})
    assert (m.status, m.attack, n.status) == ("violated", "inverted", "kept")
    assert statuses("n:auc>0.6", scores) == ["kept"] and statuses("m:calm.auc>0.6", scores) == ["kept"]
    assert statuses("m:tpr@0.1>0.15", scores) == ["violated"], "an inverted leak has a true-positive rate too"


def test_names_with_dots_and_colons_are_told_apart_by_what_exists():
    scores = {"m": {"my.mod:margin": leaky(2.0), "gradient_norm/features.block2": leaky(0.0, 4000)}}
    assert statuses("my.mod:margin.auc>0.6", scores) == statuses("m:my.mod:margin.auc>0.6", scores) == ["violated"]
    assert statuses("gradient_norm/features.block2.auc>0.6", scores) == ["kept"]


def test_looking_at_more_attacks_widens_the_interval():
    one = judge([Rule.parse("auc>0.5")], {"m": {"a": leaky(0.5)}}, {})[0].estimate
    many = judge([Rule.parse("auc>0.5")], {"m": {f"a{i}": leaky(0.5) for i in range(20)}}, {})[0].estimate
    assert many.low < one.low and many.high > one.high


@pytest.mark.parametrize(
    "text, says",
    [
        ("auc=0.6", "not a rule"), ("m-auc>0.6", "not a rule"), ("aux>0.6", "not a rule"), ("auc>x", "not a rule"), ("tpr@2>0.1", "false-positive rate of 2"),
        ("other:auc>0.6", "'other', which is not among m"), ("lira.auc>0.6", "'lira', which is not among confidence"),
        ("a.test_accuracy<0.5", "nothing to do with attacks"), ("auc>60", "between 0 and 1"), ("test_accuracy<0.5", "not known of m"),
    ],
)  # fmt: skip
def test_bad_rules_are_refused(text, says):
    with pytest.raises(pptp.UserError, match=says):
        judge([Rule.parse(text)], {"m": {"confidence": leaky(1.0)}}, {})


def test_junit_counts_failures():
    verdicts = judge([Rule.parse("auc>0.6"), Rule.parse("auc>0.99")], {"m": {"confidence": leaky(2.0)}}, {})
    suite = ElementTree.fromstring(junit(verdicts))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "violated" in suite.find("testcase/failure").get("message")


# --- outputs from elsewhere ----------------------------------------------------------------------


@pytest.fixture
def outputs(tmp_path):
    rng = np.random.default_rng(0)
    members, labels = np.arange(300) < 150, np.arange(300) % 4
    logits = rng.normal(size=(300, 4))
    logits[np.arange(300), labels] += 1 + 2 * members
    masks = rng.random((4, 300)) < 0.5
    references = rng.normal(size=(4, 300, 4))
    references[:, np.arange(300), labels] += 1 + 2 * masks
    arrays = {
        "logits": logits,
        "labels": labels,
        "members": members,
        "reference_logits": references,
        "reference_members": masks,
    }

    def write(**changes):
        kept = {k: v for k, v in {**arrays, **changes}.items() if v is not None}
        np.savez(tmp_path / "a.npz", **kept)
        return str(tmp_path / "a.npz")

    return write


def test_outputs_of_another_framework_are_attacked_and_gated(outputs, tmp_path, capsys):
    found = tmp_path / "found.json"
    assert main(["attack", "--logits", outputs(), "--fail-if", "auc>0.6", "--json", str(found)]) == 1
    shown = capsys.readouterr().out
    assert "violated" in shown and "4 reference models from the file" in shown
    model = json.loads(found.read_text())["models"]["a"]
    assert model["strongest"]["auc"]["low"] > 0.6 and model["attacks"]["rmia_offline"]["auc"]["low"] > 0.6
    assert main(["attack", "--logits", outputs(), "--attack", "confidence", "--fail-if", "auc>0.99"]) == 0


def test_probabilities_give_the_same_scores_as_logits(outputs):
    signals, members = read_outputs(outputs())
    p = signals.logits.softmax(1).numpy()
    again, _ = read_outputs(outputs(logits=None, probabilities=p, reference_logits=None, reference_members=None))
    assert torch.allclose(again.log_true, signals.log_true, atol=1e-9) and again.reference_logits is None
    hard, _ = read_outputs(
        outputs(logits=None, probabilities=np.eye(4)[np.arange(300) % 4], reference_logits=None, reference_members=None)
    )
    assert torch.isfinite(hard.logits).all()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"labels": None}, "has no labels"), ({"logits": None}, "neither logits nor probabilities"),
        ({"members": np.ones(300, bool)}, "name some of both"), ({"members": np.arange(300)}, "true or false"),
        ({"labels": np.arange(299)}, "300 class numbers"), ({"labels": np.full(300, 9)}, "there are 4 logits"),
        ({"logits": np.full((300, 4), np.nan)}, "not finite"), ({"reference_members": None}, "go together"),
        ({"reference_members": np.ones((3, 300), bool)}, "reference_members"), ({"logits": np.array("x")}, "must be numbers"),
        ({"logits": np.full((300, 4), 0.25)}, "look like probabilities"),
        ({"logits": None, "probabilities": np.ones((300, 4))}, "sum to 1"),
    ],
)  # fmt: skip
def test_bad_outputs_are_refused_in_one_sentence(outputs, changes, says, capsys):
    assert main(["attack", "--logits", outputs(**changes)]) == 2
    assert says in capsys.readouterr().err


def test_a_handful_of_samples_is_refused_and_a_few_are_attacked(outputs, capsys):
    rng = np.random.default_rng(0)
    few = {"reference_logits": None, "reference_members": None}
    for n, code in ((6, 2), (14, 0)):
        small = {"logits": rng.normal(size=(n, 4)), "labels": np.arange(n) % 4, "members": np.arange(n) < n // 2}
        assert main(["attack", "--logits", outputs(**few, **small)]) == code
    assert "at least 5 members and 5 non-members" in capsys.readouterr().err


def test_an_own_attack_that_fails_is_named_and_does_not_look_like_a_leak(outputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_attack.py").write_text("def mine(known, query):\n    return query.nothing\n")
    monkeypatch.chdir(tmp_path)
    assert main(["attack", "--logits", outputs(), "--attack", "broken_attack:mine"]) == 2
    assert "'broken_attack:mine' failed (AttributeError" in capsys.readouterr().err


def test_files_that_are_no_npz_are_refused(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("a.npy", "empty.npz"):
        assert main(["attack", "--logits", str(tmp_path / name)]) == 2
        assert "cannot read" in capsys.readouterr().err


def test_a_missing_file_and_missing_references_are_refused(outputs, tmp_path, capsys):
    assert main(["attack", "--logits", str(tmp_path / "none.npz")]) == 2
    bare = outputs(reference_logits=None, reference_members=None)
    assert main(["attack", "--logits", bare, "--attack", "lira"]) == 2
    assert "needs 2 reference models" in capsys.readouterr().err


# --- canaries ------------------------------------------------------------------------------------


def test_canaries_are_odd_in_or_out_and_a_fair_coin_decides(pool):
    canaries = draw(np.ones(240, bool), 60, seed=0)
    assert len(np.unique(canaries.ids)) == 60 and 15 < canaries.included.sum() < 45
    wrong = Planted(pool, canaries.ids, "mislabelled", 0)
    assert (wrong.labels[canaries.ids] != pool.labels[canaries.ids]).all()
    rest = np.setdiff1d(np.arange(240), canaries.ids)
    assert (wrong.labels[rest] == pool.labels[rest]).all() and torch.equal(
        wrong[int(rest[0])][0], pool[int(rest[0])][0]
    )
    noise = Planted(pool, canaries.ids, "noise", 0)
    assert torch.equal(noise[int(canaries.ids[0])][0], noise[int(canaries.ids[0])][0])
    assert not torch.equal(noise[int(canaries.ids[0])][0], pool[int(canaries.ids[0])][0])
    with pytest.raises(pptp.UserError, match="canary_kind is 'odd'"):
        Planted(pool, canaries.ids, "odd", 0)
    with pytest.raises(pptp.UserError, match="at most a quarter"):
        draw(np.ones(240, bool), 61, seed=0)


SMALL = [
    "--model", "test_resnet", "--data", "digits", "--limit-per-class", "60", "--members", "160", "--reference", "20", "--nonmembers", "160",
    "--test", "60", "-b", "20", "--opt", "adamw", "--lr", "0.003", "--no-augment",
]  # fmt: skip


def test_an_audit_finds_the_leak_of_a_plain_model_and_stays_below_the_claim_of_a_private_one(tmp_path, capsys):
    run = tmp_path / "r"
    assert main(["train", str(run), *SMALL, "--canaries", "120", "--epochs", "24"]) == 0
    private = ["--defense", "dpsgd", "--set", "epsilon=3", "--cut", "scratch", "--no-control", "--epochs", "2"]
    assert main(["retrain", str(run), *private]) == 0
    capsys.readouterr()
    assert main(["audit", str(run)]) == 0
    shown = capsys.readouterr().out
    found = json.loads((run / "audit.json").read_text())
    assert [len(found[name]["bounds"]) for name in ("undefended", "dpsgd-scratch")] == [2, 2]
    assert found["undefended"]["bounds"][1]["epsilon"] > 0.5, shown  # mislabelled canaries are memorised
    claim = found["dpsgd-scratch"]["claim"]["epsilon"]
    assert claim <= 3 and all(bound["epsilon"] <= claim for bound in found["dpsgd-scratch"]["bounds"])
    assert "which proves nothing" in shown and "ABOVE" not in shown
    assert (
        main(["audit", str(run), "--delta", "-0.5"]) == 2
        and main(["audit", str(run), "--attack", "gradient_norm"]) == 2
    )
    run_object = pptp.runs.Run.open(run)
    canaries = run_object.canaries()
    members = set(run_object.splits.members.indices)
    assert {*canaries.ids[canaries.included]} <= members and not {*canaries.ids[~canaries.included]} & members
    assert main(["evaluate", str(run), "--attack", "confidence"]) == 0
    with np.load(run / "evaluate/undefended/scores.npz") as scores:
        assert not set(scores["ids"]) & set(canaries.ids), "canaries are odd on purpose: they are not evaluated on"
