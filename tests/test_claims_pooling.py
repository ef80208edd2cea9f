"""Seeds of a base taken together."""

import numpy as np
import pytest
from made_results import distance, estimate, found, said, stage
from scipy.stats import norm

from benchmarks.claims.pooling import DELTA, Spread, _stall, mean_of, spread_of
from benchmarks.claims.render import load
from benchmarks.claims.where import pooled, stages_of
from pptp.intervals import Estimate
from pptp.localize import judge


def test_seeds_together_decide_what_one_alone_cannot():
    """0.47 ± 0.022 is undecided; two such seeds, independent, have an interval narrower by the root of two, within 0.05 of 1/2."""

    def seed(value, verdict="undecided"):
        results = found()
        wide = {metric: distance(value, 0.022) for metric in ("rms", "cosine")}
        results["risk"]["stages"][0] = {**stage("layer3", value, verdict), "distances": wide}
        return results

    one, two = {43: seed(0.470)}, {43: seed(0.470), 44: seed(0.480)}
    plain = {"resnet18-plain": {42: found()}}
    claim = "augmentation does not move the disparity"
    assert said({**plain, "resnet18-augmented": one}, claim).startswith("cannot be said: undecided at layer3")
    assert said({**plain, "resnet18-augmented": two}, claim) == "yes"
    apart = {43: seed(0.40), 44: seed(0.55)}
    assert said({**plain, "resnet18-augmented": apart}, claim).startswith("cannot be said"), (
        "seeds that differ by more than chance"
    )


def test_one_seed_is_no_surer_of_others_than_two():
    """Where two of another base differ by far more than their images explain."""

    def seed(gap):
        results = found()
        results["risk"]["stages"][0] |= {"member_gap": estimate(gap, 0.02), "by_member_gap": "safe"}
        return results

    alone = pooled({"resnet18-plain": {42: seed(0.0)}}, "resnet18-plain")
    beside = pooled({"resnet18-plain": {42: seed(0.0)}, "resnet34-plain": {42: seed(0.0), 43: seed(0.2)}}, "resnet18-plain")
    first, second = (stages_of(r)[0] for r in (alone, beside))
    assert first["by_member_gap"] == "safe" and first["member_gap"] == estimate(0.0, 0.02)
    assert second["by_member_gap"] == "undecided" and second["member_gap"]["high"] > 0.05
    assert first["distances"]["rms"]["auc"]["high"] == second["distances"]["rms"]["auc"]["high"], "where none were seen to differ"


def test_nothing_is_safe_before_both_models_know_the_members():
    weak, others = found(train=0.9), {42: found(), 43: found()}
    others[43]["risk"]["stages"][0] = stage("layer3", 0.6, "risky")
    together = pooled({"resnet18-search": {42: weak}, "resnet34-plain": others}, "resnet18-search")
    assert stages_of(together)[0]["verdict"] == "undecided"


def test_the_mean_of_seeds_has_the_interval_of_a_mean():
    same = [estimate(0.6, 0.02)] * 4
    assert mean_of(same)["high"] == pytest.approx(0.61) and mean_of(same)["low"] == pytest.approx(0.59)
    assert mean_of(same[:1]) == same[0]
    wider = mean_of(same, Spread(ratio=4, df=1000))
    assert wider["high"] == pytest.approx(0.62, abs=1e-4), "what differs between seeds counts"
    assert mean_of(same, Spread(ratio=4, df=2))["high"] > 0.64, "and more, if few seeds tell"
    assert mean_of(same, Spread(ratio=0.1, df=2)) == mean_of(same), "but never less than the choice of images"


def test_how_much_seeds_vary_is_learned_from_all_bases():
    sd = 0.02 / norm.ppf(0.975)
    pair = [estimate(0.6 - sd, 0.02), estimate(0.6 + sd, 0.02)]  # variance between them: twice their own
    assert spread_of([[pair]]) == Spread(pytest.approx(2), 1)
    assert spread_of([[pair, pair]]) == Spread(pytest.approx(2), 1), (
        "two quantities of the same seeds tell hardly more than one"
    )
    assert spread_of([[pair], [pair[:1] * 3]]) == Spread(pytest.approx(2 / 3), 3)
    assert spread_of([[pair[:1]]]) == Spread()


@pytest.mark.parametrize("extra", [0.0, 1.0, 8.0])
def test_intervals_of_a_mean_over_seeds_cover_what_they_say(extra):
    """Four bases of two or three seeds, whose true values vary by `extra` times the variance that images explain."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        bases = [[estimate(v, 1.96) for v in rng.normal(0, (1 + extra) ** 0.5, n)] for n in (3, 3, 2, 2)]
        mean = mean_of(bases[0], spread_of([[found] for found in bases]))
        hits += mean["low"] <= 0 <= mean["high"]
    assert hits >= 0.93 * 400


@pytest.mark.parametrize(
    "risk",
    [
        pytest.param(found["risk"], id=f"{base}-{seed}")
        for base, seeds in load().items()
        for seed, found in seeds.items()
    ],
)
def test_recorded_verdicts_are_those_of_localize(risk):
    """Pooled seeds are judged by the same rule, with the same delta, as the single ones were."""
    blocks = [block for part in risk["stages"] for block in part["blocks"]]
    for part in (*risk["stages"], *blocks):
        effects = [Estimate(**d["auc"]).effect for d in part["distances"].values()]
        assert part["verdict"] == judge(effects, DELTA, risk["powered"])
    assert risk["stall"] == _stall(risk["stages"])
