"""What each member looks like to a model that was not trained on it: the two halves of the members label each other."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import View, indexed, sample_ids
from .errors import UserError
from .signals import collect

VIEWS = 8  # augmented views that a label is the mean over, besides the image itself


class Teachers:
    """Models of the two halves of the members; each speaks of the half that it was not trained on."""

    def __init__(self, of_h1: nn.Module, of_h2: nn.Module, h1: Dataset, h2: Dataset, workers: int = 0):
        self.speaking = ((of_h2, indexed(h1)), (of_h1, indexed(h2)))
        self.workers = workers

    @cached_property
    def _by_id(self) -> dict[int, Tensor]:
        said = {}
        for model, part in self.speaking:
            said |= zip(sample_ids(part).tolist(), probabilities(model, part, workers=self.workers))
        return said

    def probabilities(self, members: Dataset) -> Tensor:
        """(n, classes): what is said of these members, the mean over the image and eight augmented views of it."""
        ids = sample_ids(members).tolist()
        strangers = [i for i in ids if i not in self._by_id]
        if strangers:
            raise UserError(f"sample {strangers[0]} is in neither half: teachers speak of their members only")
        return torch.stack([self._by_id[i] for i in ids])


def probabilities(model: nn.Module, data: Dataset, views: int = VIEWS, workers: int = 0) -> Tensor:
    """(n, classes), the mean over the image and augmented views of it."""
    seen = [data, *(View(data, number) for number in range(1, views + 1))]
    return torch.stack([collect(model, view, workers=workers).logits.softmax(1) for view in seen]).mean(0)
