"""What each member looks like to a model that was not trained on it: the two halves of the members label each other."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .data import Part, View, sample_ids
from .errors import UserError
from .signals import collect

VIEWS = 8  # augmented views that a label is the mean over, besides the image itself


class Teachers:
    """Models of the two halves of the members; each speaks of the half that it was not trained on."""

    def __init__(self, of_h1: nn.Module, of_h2: nn.Module, h1: Part, h2: Part, workers: int = 0):
        self.speaking = ((of_h2, h1), (of_h1, h2))
        self.workers = workers
        ids = [torch.as_tensor(sample_ids(part)) for part in (h1, h2)]
        self.half = torch.full((int(torch.cat(ids).max()) + 1,), -1)  # by sample id; -1: not a member
        for number, mine in enumerate(ids):
            self.half[mine] = number

    @cached_property
    def _said(self) -> Tensor:
        """(ids, classes): what is said of every member, by sample id."""
        found = [probabilities(model, part, workers=self.workers) for model, part in self.speaking]
        by_id = torch.full((len(self.half), found[0].shape[1]), float("nan"))
        for said, (_, part) in zip(found, self.speaking):
            by_id[torch.as_tensor(sample_ids(part))] = said
        return by_id

    def probabilities(self, ids: Tensor) -> Tensor:
        """(n, classes) of the members of these ids: the mean over the image and eight augmented views of it."""
        self.halves(ids)
        return self._said[ids]

    def halves(self, ids: Tensor) -> Tensor:
        """(n,): 0 for members in h1, 1 for those in h2."""
        known = (ids >= 0) & (ids < len(self.half))
        found = torch.where(known, self.half.to(ids.device)[ids.clamp(0, len(self.half) - 1)], -1)
        if (found < 0).any():
            raise UserError(f"sample {int(ids[found < 0][0])} is in neither half: teachers speak of their members only")
        return found

    @torch.no_grad()
    def say(self, inputs: Tensor, ids: Tensor) -> Tensor:
        """(n, classes) logits for inputs that were made of the members of these ids, each only of its own half's."""
        halves, said = self.halves(ids), None
        for number, (model, _) in enumerate(self.speaking):
            mine = halves == number
            if mine.any():
                spoken = model.to(inputs.device).eval()(inputs[mine])
                said = spoken.new_zeros(len(inputs), spoken.shape[1]) if said is None else said
                said[mine] = spoken
        return said


def probabilities(model: nn.Module, data: Dataset, views: int = VIEWS, workers: int = 0) -> Tensor:
    """(n, classes), the mean over the image and augmented views of it."""
    seen = [data, *(View(data, number) for number in range(1, views + 1))]
    return torch.stack([collect(model, view, workers=workers).logits.softmax(1) for view in seen]).mean(0)
