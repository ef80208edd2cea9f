"""One small model of every timm family: can it be cut, and is the suffix the model?

python tests/test_families.py          # all families, prints "N of M families"; some minutes
pytest tests/test_families.py          # a fixed sample of twelve
"""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

from pptp.stages import Stage, freeze, rewind, snapshot, split_at, stages, train_mode, unfreeze, watch
from pptp.suffix import Suffix, run_until

FAMILIES = json.loads(Path(__file__).with_name("families.json").read_text())
SAMPLE = [
    "resnet", "vision_transformer", "convnext", "mobilenetv3", "visformer", "swin_transformer", "levit", "mvitv2", "crossvit", "hrnet", "pit", "rdnet",
]  # fmt: skip


def build(family: str, seed: int = 0):
    wanted = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return timm.create_model(wanted["model"], num_classes=5, **wanted["kwargs"]), (3, wanted["px"], wanted["px"])


def hooked(model) -> list[str]:
    """Modules with hooks, or a forward of their own, in a form that can be compared."""
    return [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)]


def check_family(family: str) -> list[Stage]:
    """Everything that a retraining relies on; raises where it does not hold."""
    model, size = build(family)
    initial, hooks = snapshot(model), hooked(model)
    parts = stages(model, size)
    blocks = [block for stage in parts for block in stage.blocks]
    everything = sorted([n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()])
    for of in (parts, blocks):
        assert sorted(n for p in of for n in p.parameter_names + p.buffer_names) == everything, "not a partition"
    assert len(parts) >= 2, "there is nowhere to cut"
    seen = []
    x, y = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2])
    with watch(blocks, lambda part, output: seen.append(part)), torch.no_grad():
        answer = model.eval()(x)
    assert answer.shape == (3, 5), f"not a classifier: it answers {tuple(answer.shape)}"
    assert seen == [block.name for block in blocks], "boundaries out of order"
    cut = parts[len(parts) // 2].name
    _, suffix = split_at(parts, cut)
    freeze(split_at(parts, cut)[0])
    check_suffix(model, parts, cut, x, y)
    check_step(model, suffix, x, y)
    rewind(suffix, initial)
    unfreeze(model, {})
    assert all(torch.equal(t, initial[n]) for n, t in model.state_dict().items()), "the rewind is not exact"
    assert hooked(model) == hooks, "hooks were left behind"
    return parts


def check_suffix(model, parts, cut, x, y) -> None:
    """Fed with what leaves the trunk, the suffix answers as the whole model does, and has its gradients."""

    def answer_and_gradients(of, fed):
        model.zero_grad()
        answer = of(fed)
        F.cross_entropy(answer, y).backward()
        return answer.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    suffix = Suffix(model.eval(), parts, cut, x.shape[1:])
    whole, expected = answer_and_gradients(model, x)
    alone, found = answer_and_gradients(suffix, run_until(model, suffix.plan.boundary, x).clone())
    assert torch.allclose(alone, whole, rtol=1e-4, atol=1e-5), "the suffix answers otherwise"
    assert found.keys() == expected.keys(), f"gradients differ: {sorted(found.keys() ^ expected.keys())[:3]}"
    for name in found:
        assert torch.allclose(
            found[name], expected[name], rtol=1e-3, atol=1e-5 * float(expected[name].abs().max() + 1e-6)
        ), name


def check_step(model, suffix, x, y) -> None:
    """One step of training moves the suffix only, running statistics included."""
    before = snapshot(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    train_mode(model)
    model.zero_grad()
    F.cross_entropy(model(torch.cat([x, x.flip(0)])), torch.cat([y, y.flip(0)])).backward()
    with torch.no_grad():
        for parameter in trained:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.clamp(-1, 1) + 1e-3)
    model.eval()
    places = {t.data_ptr() for part in suffix for t in (*part.parameters(), *part.buffers())}
    inside = {n for n, t in model.state_dict().items() if t.data_ptr() in places}  # tied weights have several names
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved and moved <= inside, f"moved outside of the suffix: {sorted(moved - inside)[:3]}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(FAMILIES) if os.environ.get("PPTP_ALL_FAMILIES") else SAMPLE)
def test_family_can_be_cut_and_retrained(family):
    check_family(family)


def test_every_family_of_timm_is_listed():
    missing = set(timm.list_modules()) - set(FAMILIES)
    assert len(missing) <= 3, f"timm has families that are not in families.json: {sorted(missing)}"


def main() -> None:
    warnings.filterwarnings("ignore")
    done, joined = 0, []
    chosen = sys.argv[1:] or sorted(FAMILIES)
    for family in chosen:
        try:
            parts = check_family(family)
            done += 1
            notes = sorted({part.note for part in parts if part.note})
            joined += [family] if notes else []
            print(f"{family:<28}{FAMILIES[family]['model']:<34}{len(parts):>3} stages  {'; '.join(notes)}", flush=True)
        except Exception as error:
            print(
                f"{family:<28}{FAMILIES[family]['model']:<34}FAILS: {str(error)[:150] or type(error).__name__}",
                flush=True,
            )
    print(f"{done} of {len(chosen)} families; in {len(joined)} some neighbours were joined: {', '.join(joined)}")
    print(f"timm {timm.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
