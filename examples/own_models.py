"""You already have two trained timm models and your own Dataset: localize, retrain, evaluate, no run directory.

python examples/own_models.py --quick
"""

import argparse
import copy

import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset

import pptp
from defenses import RelaxLoss


def my_dataset() -> TensorDataset:
    """Any Dataset of (image tensor, label) will do."""
    bundle = load_digits()
    images = torch.tensor(bundle.images / 8 - 1, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
    images = torch.nn.functional.interpolate(images, size=32) + 0.3 * torch.randn(len(images), 3, 32, 32)
    return TensorDataset(images, torch.tensor(bundle.target))


def main(quick: bool = False) -> dict[str, pptp.Evaluation]:
    torch.manual_seed(0)
    data = my_dataset()
    order = torch.randperm(len(data)).tolist()
    h1, h2 = Subset(data, order[:250]), Subset(data, order[250:500])
    members, nonmembers, test = Subset(data, order[:500]), Subset(data, order[500:1100]), Subset(data, order[1100:])

    # Stand-ins for your own training: both models must start from the same initial weights.
    full = timm.create_model("test_resnet", num_classes=10)
    half, initial = copy.deepcopy(full), pptp.snapshot(full)
    recipe = pptp.Recipe(epochs=4 if quick else 20, batch_size=32, opt="adamw", lr=2e-3, augment=False)
    pptp.fit(full, members, recipe)
    pptp.fit(half, h1, recipe)

    risk = pptp.localize(full, half, seen=h1, unseen=h2, held_out=test, delta=0.1)
    print(risk)

    defended = copy.deepcopy(full)
    result = pptp.retrain(defended, initial, "layer3", RelaxLoss(alpha=0.6), pptp.TrainingData(members), recipe)
    print(f"the defense was active in {result['active']:.0%} of steps")

    found = pptp.evaluate({"undefended": full, "defended": defended}, members, nonmembers, test)
    for name, evaluation in found.items():
        attack, auc = evaluation.strongest
        print(f"{name}: test accuracy {evaluation.test_accuracy}, {attack} attack AUC {auc}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    main(parser.parse_args().quick)
