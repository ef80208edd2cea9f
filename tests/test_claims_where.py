"""Verdicts on where a model memorises."""

from made_results import estimate, found, model, said, stage

PLAIN, DEEPER = "resnet18-plain", "resnet34-plain"
DEPTH = "depth does not move the disparity in ResNets"


def test_the_same_place_needs_the_same_stage_and_models_that_interpolate():
    same = {PLAIN: {42: found()}, DEEPER: {42: found()}}
    assert said(same, DEPTH) == "yes"
    assert said({**same, DEEPER: {42: found("layer3")}}, DEPTH) == "no"
    assert "does not interpolate" in said({**same, DEEPER: {42: found(train=0.98)}}, DEPTH)
    assert said({PLAIN: {42: found()}}, DEPTH) is None, "one base says nothing"
    seeds = {42: found("layer3", train=0.9), 43: found()}
    assert said({**same, DEEPER: seeds}, DEPTH) == "yes", "by the seed that can tell"


def test_where_an_earlier_stage_is_undecided_nothing_is_said():
    doubtful = found()
    doubtful["risk"]["stages"][0]["verdict"] = "undecided"
    results = {PLAIN: {42: found()}, DEEPER: {42: doubtful}}
    assert said(results, DEPTH) == f"cannot be said: undecided at layer3 of {DEEPER}"
    assert said({PLAIN: {42: doubtful}}, "ResNet18: disparity starts").startswith("cannot be said")


def test_an_inverted_distance_is_only_part_of_the_claim():
    assert said({PLAIN: {42: found(last=0.7)}}, "ResNet18: disparity starts") == "yes"
    assert said({PLAIN: {42: found(last=0.3)}}, "ResNet18: disparity starts").startswith("partly: the place, not")
    same = {PLAIN: {42: found(last=0.7)}, DEEPER: {42: found(last=0.3)}}
    assert said(same, DEPTH) == f"partly: the place, not the direction ({DEEPER}: seen samples are the farther ones)"


def test_early_stages_are_safe_in_part_where_the_member_gap_says_otherwise():
    assert said({PLAIN: {42: found()}}, "ResNet18: no disparity") == "yes"
    leaking = found()
    leaking["risk"]["stages"][0]["by_member_gap"] = "risky"
    assert said({PLAIN: {42: leaking}}, "ResNet18: no disparity").startswith("partly")
    assert said({PLAIN: {42: found("layer3")}}, "ResNet18: no disparity") == "no"


def test_what_grows_grows_in_the_direction_of_the_paper_by_both_distances():
    """Of unseen over seen; overlapping intervals decide nothing."""

    def channels(narrow, wide):
        cells = {}
        for name, (rms, cosine) in (("resnet18-wide256", narrow), ("resnet18-wide1024", wide)):
            cells[name] = {42: found()}
            cells[name][42]["risk"]["stages"][1] = stage("layer4", rms, "risky", cosine)
        return said(cells, "disparity at stage 4 grows")

    assert channels((0.60, 0.60), (0.605, 0.605)) == "cannot be said: intervals overlap"
    assert channels((0.60, 0.60), (0.70, 0.605)) == "yes"
    assert channels((0.60, 0.60), (0.60, 0.50)) == "no: it falls"
    assert channels((0.40, 0.60), (0.30, 0.70)) == "cannot be said: the two distances disagree", "an inverted one too"
    less_inverted = "cannot be said: in the paper's direction it grows, by one distance it falls either way round"
    assert channels((0.30, 0.50), (0.45, 0.50)) == channels((0.30, 0.50), (0.45, 0.55)) == less_inverted


def test_blocks_of_the_last_stage_are_compared_in_order():
    def grows(*values):
        results = found()
        results["risk"]["stages"][1]["blocks"] = [stage(f"layer4.{i}", v, "risky") for i, v in enumerate(values)]
        return said({PLAIN: {42: results}}, "disparity grows from block to block")

    assert grows(0.6, 0.7) == "yes" and grows(0.4, 0.3) == "yes", "away from 1/2"
    assert grows(0.7, 0.6) == "no" and grows(0.7) is None


def probing(*gains, where="layer4"):
    """layer3 and layer4, with what the probe gains there."""
    results = found(where)
    for part, gain in zip(results["risk"]["stages"], gains):
        part["probe_gain"] = estimate(gain)
    return results


def test_probes_stall_where_they_surely_gain_no_more():
    def stall(*gains, where="layer4"):
        return said({PLAIN: {42: probing(*gains, where=where)}}, "probe accuracy stalls")

    assert stall(0.05, -0.05) == "yes"
    assert stall(0.05, 0.05) == "no", "no stall"
    assert stall(-0.05, -0.05) == "no", "before disparity starts"
    assert stall(0.05, 0.01) == stall(0.01, -0.05) == "undecided", "a gain of 0 to 0.02"
    assert stall(0.05, -0.05, where="layer5") == "undecided", "it starts at the head, which has no probe"


def test_probes_rise_through_all_but_the_last_stage():
    def rise(*gains):
        return said({PLAIN: {42: probing(*gains)}}, "probe accuracy rises")

    assert [rise(0.05, -0.05), rise(-0.05, 0.05), rise(0.0, 0.05)] == ["yes", "no", "no"]
    both = {PLAIN: {42: probing(0.05, 0)}, DEEPER: {42: probing(-0.05, 0)}}
    assert said(both, "probe accuracy rises") == "in 1 of 2; not in 1"


def test_channels_must_matter_less_than_maps_for_sure():
    def judged(channels, maps):
        bases = {"resnet18-wide256": 0.3, PLAIN: 0.3, "resnet18-wide1024": channels, "resnet18-map4": maps}
        cells = {n: {42: found(models={"undefended": model(accuracy, 0.9)})} for n, accuracy in bases.items()}
        return said(cells, "channels at stage 4 change test accuracy less")

    assert judged(0.31, 0.4) == "yes"
    assert judged(0.39, 0.4) == "cannot be said: intervals overlap"
    assert judged(0.2, 0.31) == "no", "fewer or more"
