"""A defense and an attack of your own, each a few lines, used beside ours.

python examples/own_plugins.py --quick
pptp retrain RUN --defense own_plugins:ConfidencePenalty --set beta=0.5     # from the folder of this file
pptp evaluate RUN --attack own_plugins:margin --attack confidence
"""

import argparse
import copy
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

import pptp
from attacks import ATTACKS
from pptp import Known, Signals


@dataclass(frozen=True)
class ConfidencePenalty(pptp.LossDefense):
    """Cross-entropy minus `beta` times the entropy of the prediction (Pereyra et al. 2017, arXiv 1701.06548)."""

    beta: float = 0.1

    def loss(self, step: pptp.Step) -> Tensor:
        log_p = step.logits.log_softmax(1)  # (n, classes)
        return F.nll_loss(log_p, step.targets) + self.beta * (log_p.exp() * log_p).sum(1).mean()


def margin(known: Known, query: Signals) -> Tensor:
    """Members are far from the decision boundary: true-class logit minus the best of the others."""
    true = query.labels[:, None]
    others = query.logits.scatter(1, true, -float("inf"))
    return query.logits.gather(1, true).squeeze(1) - others.amax(1)


def main(quick: bool = False) -> dict[str, pptp.Evaluation]:
    pool, _ = pptp.load(pptp.Source(data="digits", pixel_noise=0.15))
    splits = pptp.split(pool, members=400, reference=100, nonmembers=700, test=400)
    recipe = pptp.Recipe(epochs=2 if quick else 16, batch_size=32, opt="adamw", lr=2e-3, augment=False)
    model = pptp.create("test_resnet", classes=10, img_size=32)
    initial = pptp.snapshot(model)
    pptp.fit(model, splits.members, recipe)
    penalised = copy.deepcopy(model)
    pptp.retrain(penalised, initial, "layer4", ConfidencePenalty(beta=1.0), splits, recipe)
    found = pptp.evaluate(
        {"undefended": model, "penalised": penalised},
        splits.members,
        splits.nonmembers,
        splits.test,
        attacks={"margin": margin, "confidence": ATTACKS["confidence"]},
    )
    for name, evaluation in found.items():
        print(name, {attack: str(scores.auc) for attack, scores in evaluation.attacks.items()})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    main(parser.parse_args().quick)
