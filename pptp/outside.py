"""What each member looks like to a model that was not trained on it: the two halves of the members label each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .data import Part, View, sample_ids
from .signals import collect

VIEWS = 8  # augmented views that a label is the mean over, besides the image itself


def outside_labels(of_h1: nn.Module, of_h2: nn.Module, h1: Part, h2: Part, workers: int = 0) -> Tensor:
    """(n, classes) probabilities of the members in the order of their ids: those of h2 by the model of h1, and the other way round."""
    said = [probabilities(model, part, workers) for model, part in ((of_h2, h1), (of_h1, h2))]
    order = torch.cat([torch.as_tensor(sample_ids(part)) for part in (h1, h2)]).argsort()
    return torch.cat(said)[order]


def probabilities(model: nn.Module, part: Part, workers: int = 0) -> Tensor:
    """(n, classes), the mean over the image and eight augmented views of it."""
    views = [part, *(View(part, number) for number in range(1, VIEWS + 1))]
    return torch.stack([collect(model, view, workers=workers).logits.softmax(1) for view in views]).mean(0)
