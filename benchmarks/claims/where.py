"""The paper's claims about where a model memorises, each against whatever results there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from .claim import AUGMENTED, PLAIN, Claim, Results, counted, difference, listed, shown, test_accuracy
from .pooling import mean_of, pool, spread_of, spreads_of

INTERPOLATES = 0.99  # training accuracy of both models, before anything is said about where they memorise
HARDLY_GAIN = 0.02  # of a probe's accuracy from one stage to the next: a stall
METRICS = {"rms": "RMS", "cosine": "cosine"}
MAPS = (PLAIN, "resnet18-map2", "resnet18-map4")
CHANNELS = ("resnet18-wide256", PLAIN, "resnet18-wide1024")
TOKENS = "pvt-plain"
VGG = ("vgg11-plain", "vgg19-plain")
NOT_INTERPOLATING = "cannot be said: a model does not interpolate"


# --- the seeds that can tell -----------------------------------------------------------------------


def telling(results: Results, base: str) -> dict[int, Mapping]:
    """The seeds whose two models interpolate, else the first; {} if the base is not there."""
    seeds = dict(sorted(results.get(base, {}).items()))
    return {seed: found for seed, found in seeds.items() if interpolates(found)} or dict(list(seeds.items())[:1])


def pooled(results: Results, base: str) -> Mapping:
    """Those seeds as one; {} if the base is not there."""
    seeds = telling(results, base)
    if not seeds:
        return {}
    return pool(list(seeds.values()), spreads_of([list(telling(results, b).values()) for b in results]))


def interpolates(results: Mapping) -> bool:
    return bool(results) and all(a["value"] >= INTERPOLATES for a in results["risk"]["train_accuracy"].values())


def there(results: Results, names: Sequence[str]) -> dict[str, Mapping]:
    return {n: r for n in names if (r := pooled(results, n))}


def able(results: Results, names: Sequence[str]) -> dict[str, Mapping]:
    """Those that are there and interpolate."""
    return {n: r for n, r in there(results, names).items() if interpolates(r)}


# --- where it starts, and which way it goes ----------------------------------------------------------


def stages_of(results: Mapping) -> list[Mapping]:
    return results["risk"]["stages"]


def last_stage(results: Mapping) -> Mapping:
    """The one before the head."""
    return stages_of(results)[-2]


def start(results: Mapping) -> tuple[str, list[str]]:
    """The first stage with a sure disparity, and the undecided ones before it, in any of which it may have started."""
    stages = [(s["name"], s["verdict"]) for s in stages_of(results)]
    at = next(
        (i for i, (_, verdict) in enumerate(stages) if verdict == "risky"), len(stages) - 1
    )  # the head at the latest
    return stages[at][0], [name for name, verdict in stages[:at] if verdict == "undecided"]


def begins(results: Mapping) -> str:
    name, doubtful = start(results)
    return name + (f" ({', '.join(doubtful)} undecided)" if doubtful else "")


def begin(found: Mapping[str, Mapping]) -> str:
    return "starts at " + ", ".join(f"{begins(r)} in {n}" for n, r in found.items())


def doubts(found: Mapping[str, Mapping]) -> str:
    """Why it cannot be said where disparity starts; "" if it can."""
    unsure = {n: start(r)[1] for n, r in found.items() if start(r)[1]}
    return ", ".join(f"{', '.join(stages)} of {n}" for n, stages in unsure.items())


def place(results: Mapping) -> int:
    return [s["name"] for s in stages_of(results)].index(start(results)[0])


def stage_where_it_starts(results: Mapping) -> Mapping:
    return stages_of(results)[place(results)]


def distances(found: Mapping) -> str:
    return ", ".join(f"{word} {shown(found['distances'][metric]['auc'])}" for metric, word in METRICS.items())


AS_IN_PAPER, OPPOSITE = "unseen samples are the farther ones, as in the paper", "seen samples are the farther ones"


def direction(stage: Mapping) -> str:
    """Which samples the two models differ more on: those that only one has seen (AUC above 1/2), or those that both have."""
    aucs = [stage["distances"][metric]["auc"] for metric in METRICS]
    unseen, seen = any(e["low"] > 0.5 for e in aucs), any(e["high"] < 0.5 for e in aucs)
    return "distances disagree" if unseen and seen else OPPOSITE if seen else AS_IN_PAPER


def with_direction(found: Mapping[str, Mapping]) -> str:
    """Where disparity starts at the place that the paper says: whether it also goes its way."""
    others = {n: d for n, r in found.items() if (d := direction(stage_where_it_starts(r))) != AS_IN_PAPER}
    return f"partly: the place, not the direction ({listed(others)})" if others else "yes"


# --- judges ----------------------------------------------------------------------------------------


def _early_stages_safe(results: Results) -> tuple[str, str] | None:
    r = pooled(results, PLAIN)
    if not interpolates(r):
        return None
    early = stages_of(r)[:-2]
    leaking = [s["name"] for s in early if s["by_member_gap"] == "risky"]
    kinds = {s["verdict"] for s in early}
    ours = listed({s["name"]: s["verdict"] for s in early})
    if "risky" in kinds:
        return ours, "no"
    if kinds != {"safe"}:
        return ours, "cannot be said: some are undecided"
    return ours, f"partly: by distance; the member gap finds {', '.join(leaking)} leaking" if leaking else "yes"


def _last_stage_risky(results: Results) -> tuple[str, str] | None:
    r = pooled(results, PLAIN)
    if not interpolates(r):
        return None
    found = last_stage(r)
    ours = f"{found['verdict']}: {distances(found)}"
    if found["verdict"] != "risky":
        return ours, "no" if found["verdict"] == "safe" else "cannot be said: undecided"
    if start(r)[0] != found["name"]:
        return ours, f"no: it starts in {start(r)[0]} or before"
    if doubts({PLAIN: r}):
        return ours, f"cannot be said: undecided at {doubts({PLAIN: r})}"
    return ours, with_direction({PLAIN: r})


def _same_place(*names: str) -> Callable[[Results], tuple[str, str] | None]:
    """The first stage with a sure disparity is the same for all of these bases."""

    def judge(results: Results) -> tuple[str, str] | None:
        found = able(results, names)
        if len(there(results, names)) < 2:
            return None
        if len(found) < len(there(results, names)):
            return begin(found), NOT_INTERPOLATING
        if doubts(found):
            return begin(found), f"cannot be said: undecided at {doubts(found)}"
        same = len({start(r)[0] for r in found.values()}) == 1
        return begin(found), with_direction(found) if same else "no"

    return judge


def either_way(distance: Mapping) -> dict[str, float]:
    """How far an AUC is from 1/2, with its interval."""
    low, high = distance["effect"]
    return {"value": abs(distance["auc"]["value"] - 0.5), "low": low, "high": high}


def surely_moved(differences: Sequence[Mapping]) -> tuple[bool, bool]:
    """(any of them surely up, any of them surely down)."""
    return any(e["low"] > 0 for e in differences), any(e["high"] < 0 for e in differences)


def _moves(rises: str, falls: str, *names: str) -> Callable[[Results], tuple[str, str] | None]:
    """What unseen samples are farther apart by than seen ones, at the last stage of the last base less that of the first, by each distance.

    Where seen ones were the farther ones at first, this can grow while the disparity either way round falls: that answers nothing.
    """

    def judge(results: Results) -> tuple[str, str] | None:
        found = {n: last_stage(r)["distances"] for n, r in able(results, names).items()}
        if len(found) < 2:
            return None
        first, *_, last = found.values()
        up, down = surely_moved([difference(last[m]["auc"], first[m]["auc"]) for m in METRICS])
        larger, smaller = surely_moved([difference(either_way(last[m]), either_way(first[m])) for m in METRICS])
        aucs = (", ".join(f"{d[m]['auc']['value']:.3f}" for d in found.values()) for m in METRICS)
        ours = f"AUC by {', by '.join(f'{word} {a}' for word, a in zip(METRICS.values(), aucs))} ({', '.join(found)})"
        if up and down:
            return ours, "cannot be said: the two distances disagree"
        if (up and smaller) or (down and larger):
            grows, falls_ = ("grows", "falls") if up else ("falls", "grows")
            return ours, f"cannot be said: in the paper's direction it {grows}, by one distance it {falls_} either way round"
        return ours, rises if up else falls if down else "cannot be said: intervals overlap"

    return judge


def _grows_within_last_stage(results: Results) -> tuple[str, str] | None:
    """Over the blocks of the last stage before the head, by value: they are of the same samples."""
    answers = {}
    for name, r in able(results, list(results)).items():
        blocks = [[b["distances"][m]["auc"]["value"] for m in METRICS] for b in last_stage(r).get("blocks", ())]
        if len(blocks) > 1 and last_stage(r)["verdict"] == "risky":
            effects = [max(abs(value - 0.5) for value in block) for block in blocks]
            answers[name] = "yes" if effects == sorted(effects) else "no"
    return (f"by value: {listed(answers)}", counted(answers)) if answers else None


def _deeper_vgg_earlier(results: Results) -> tuple[str, str] | None:
    found = able(results, VGG)
    if len(found) < 2:
        return None
    if doubts(found):
        return begin(found), f"cannot be said: undecided at {doubts(found)}"
    gap = place(found[VGG[1]]) - place(found[VGG[0]])
    return begin(found), "yes" if gap < 0 else "no: at the same stage" if gap == 0 else "no: later"


def _token_mixers_early(results: Results) -> tuple[str, str] | None:
    found = there(results, [TOKENS])
    if not found:
        return None
    if not able(results, [TOKENS]):
        return begin(found), NOT_INTERPOLATING
    r = found[TOKENS]
    ours = f"{begin(found)}, of {', '.join(s['name'] for s in stages_of(r))}"
    if doubts(found):
        return ours, f"cannot be said: undecided at {doubts(found)}"
    return ours, with_direction(found) if start(r)[0] == "stages.2" else "no"


# --- probes ----------------------------------------------------------------------------------------


def gains(results: Mapping) -> dict[str, Mapping]:
    """What the probe gains from the stage before, of the stages that have one."""
    return {s["name"]: s["probe_gain"] for s in stages_of(results) if s.get("probe_gain")}


def rises(gain: Mapping) -> bool | None:
    """Whether it surely does; None if it may or may not."""
    return True if gain["low"] > 0 else False if gain["high"] < HARDLY_GAIN else None


def all_of(answers: Sequence[bool | None]) -> str:
    return "no" if False in answers else "undecided" if None in answers else "yes"


def _probes_rise_early(results: Results) -> tuple[str, str] | None:
    """Up to the last stage but one before the head."""
    answers = {n: all_of([rises(g) for g in list(gains(r).values())[:-1]]) for n, r in _probed(results).items()}
    return (listed(answers), counted(answers)) if answers else None


def _stall(results: Results) -> tuple[str, str] | None:
    """They rise up to the stage where disparity starts, and no more there."""
    answers = {}
    for name, r in _probed(results).items():
        names, at = list(gains(r)), start(r)[0]
        if start(r)[1] or at not in names:
            answers[name] = "undecided"
            continue
        before = [rises(g) for g in list(gains(r).values())[: names.index(at)]]
        there_too = rises(gains(r)[at])
        answers[name] = all_of([*before, None if there_too is None else not there_too])
    return (listed(answers), counted(answers)) if answers else None


def _vgg_probes(results: Results) -> tuple[str, str] | None:
    found = {n: list(gains(r).values())[-1] for n, r in _probed(results).items() if n in VGG}
    if len(found) < 2:
        return None
    ours = ", ".join(f"{n} gains {shown(gain)} at the last stage" for n, gain in found.items())
    keeps, stops = (rises(found[n]) for n in VGG)
    if keeps is None or stops is None:
        return ours, "cannot be said: intervals allow both"
    return ours, "yes" if keeps and not stops else "no"


def _probed(results: Results) -> dict[str, Mapping]:
    return {n: r for n, r in able(results, list(results)).items() if gains(r)}


# --- test accuracy of undefended models -------------------------------------------------------------


def accuracies(results: Results, *names: str) -> dict[str, Mapping]:
    """Test accuracies of the undefended models of these bases, in this order, over the seeds that all of them have."""
    found = [n for n in names if results.get(n)]
    shared = set.intersection(*(set(results[n]) for n in found)) if len(found) > 1 else set()
    if not shared:
        return {}
    seeds_of = {n: [test_accuracy(results[n][s]["models"]["undefended"]) for s in sorted(shared)] for n in found}
    spread = spread_of(
        [[[test_accuracy(r["models"]["undefended"]) for r in seeds.values()]] for seeds in results.values()]
    )
    return {n: mean_of(of_seeds, spread) for n, of_seeds in seeds_of.items()}


def _larger_maps_better(*names: str) -> Callable[[Results], tuple[str, str] | None]:
    def judge(results: Results) -> tuple[str, str] | None:
        found = accuracies(results, *names)
        if not found:
            return None
        ours, e = ", ".join(f"{n} {shown(a)}" for n, a in found.items()), list(found.values())
        values = [a["value"] for a in e]
        gain = difference(e[-1], e[0])
        agrees = "yes" if gain["low"] > 0 and values == sorted(values) else "no" if gain["high"] < 0 else ""
        return ours, agrees or "cannot be said: intervals overlap"

    return judge


def _channels_matter_less(results: Results) -> tuple[str, str] | None:
    """What the largest maps gain over the smallest, less what any two numbers of channels differ by."""
    maps, channels = (list(accuracies(results, *names).values()) for names in (MAPS, CHANNELS))
    if len(maps) < 2 or len(channels) < 2:
        return None
    by_maps = difference(maps[-1], maps[0])
    by_channels = [difference(a, b) for a, b in itertools.permutations(channels, 2)]
    most = max(by_channels, key=lambda e: e["value"])
    ours = f"channels {shown(most)} at the most, maps {shown(by_maps)}"
    left = [difference(by_maps, e) for e in by_channels]
    agrees = "yes" if all(e["low"] > 0 for e in left) else "no" if any(e["high"] < 0 for e in left) else ""
    return ours, agrees or "cannot be said: intervals overlap"


WHERE: list[Claim] = [
    Claim("ResNet18: no disparity in stages 1 to 3", "Figure 3", _early_stages_safe),
    Claim("ResNet18: disparity starts in stage 4", "Figure 3", _last_stage_risky),
    Claim("disparity grows from block to block within the last stage", "Figure 1", _grows_within_last_stage),
    Claim("augmentation does not move the disparity", "Figure 3", _same_place(PLAIN, AUGMENTED)),
    Claim("augmentation shrinks the disparity", "Figure 3", _moves("no: it grows", "yes", PLAIN, AUGMENTED)),
    Claim("depth does not move the disparity in ResNets", "Figure 10", _same_place(PLAIN, "resnet34-plain")),
    Claim("feature-map size does not move the disparity", "Figure 4", _same_place(*MAPS)),
    Claim("larger maps do not make the disparity at stage 4 larger", "Figure 4", _moves("no: it grows", "yes", *MAPS)),
    Claim("larger maps at stage 4 raise test accuracy", "Table 1", _larger_maps_better(*MAPS)),
    Claim("channels do not move the disparity", "Figure 6", _same_place(*CHANNELS)),
    Claim("disparity at stage 4 grows with its channels", "Figure 6", _moves("yes", "no: it falls", *CHANNELS)),
    Claim(
        "channels at stage 4 change test accuracy less than its maps do", "section 3.3, Table 3", _channels_matter_less
    ),
    Claim("in VGG19 disparity starts earlier than in VGG11", "Figure 9", _deeper_vgg_earlier),
    Claim(
        "token mixers: disparity starts in stage 3 of 4", "Figure 11; PVT-v2 for Active Token Mixer", _token_mixers_early
    ),
    Claim("depth does not move the disparity in token mixers", "Figure 11; PVT-v2", _same_place(TOKENS, "pvt-deep")),
    Claim(
        "channels do not move the disparity in token mixers", "Figure 5; PVT-v2", _same_place("pvt-narrow", TOKENS)
    ),
    Claim(
        "feature-map size does not move the disparity in token mixers", "Figure 7; PVT-v2", _same_place(TOKENS, "pvt-64px")
    ),
    Claim("larger maps raise test accuracy in token mixers", "Table 2; PVT-v2", _larger_maps_better(TOKENS, "pvt-64px")),
    Claim("probe accuracy rises through all but the last stage", "Figure 8", _probes_rise_early),
    Claim("probe accuracy stalls where disparity starts", "Figures 8 and 9", _stall),
    Claim("at the last stage VGG11's probes still gain, VGG19's do not", "Figure 8", _vgg_probes),
]
