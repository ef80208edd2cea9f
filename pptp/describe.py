"""What the stages of a model are: parameters, output shape, share of the compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .stages import Stage, eval_mode, stages, watch


@dataclass(frozen=True)
class Row:
    """One stage or block."""

    name: str
    parameters: int
    shape: tuple[int, ...]  # of its output, without the batch
    compute: float  # share of the multiplications of one forward pass
    note: str = ""


def describe(
    model: nn.Module, input_size: Sequence[int], blocks: bool = False, parts: Sequence[Stage] | None = None
) -> list[Row]:
    """A row for each stage, or each block, in forward order."""
    parts = list(parts or stages(model, input_size))
    shown = [block for stage in parts for block in stage.blocks] if blocks else parts
    marks: list[tuple[int, tuple[int, ...]]] = []
    counter = FlopCounterMode(display=False)

    def see(name: str, output: Tensor) -> None:
        marks.append((counter.get_total_flops(), tuple(output.shape[1:])))

    device = next(model.parameters()).device
    with eval_mode(model), torch.no_grad(), watch([part.on(model) for part in shown], see), counter:
        model(torch.zeros(1, *input_size, device=device))
    total = max(1, counter.get_total_flops())
    before = [0, *(flops for flops, _ in marks)]
    ends = [flops for flops, _ in marks[:-1]] + [total]  # what comes after the last boundary belongs to it
    return [
        Row(
            part.name,
            sum(p.numel() for p in part.on(model).parameters()),
            shape,
            (end - start) / total,
            part.note,
        )
        for part, (_, shape), start, end in zip(shown, marks, before, ends)
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with what retraining from each one on would train and compute."""
    width = max(len(row.name) for row in rows) + 2
    total = max(1, sum(row.parameters for row in rows))
    lines = [
        f"{'stage':<{width}}{'parameters':>12}{'share':>8}  {'output':<18}{'compute':>8}   {'from here on: weights, compute'}"
    ]
    for i, row in enumerate(rows):
        rest = rows[i:]
        shape = "x".join(map(str, row.shape))
        lines.append(
            f"{row.name:<{width}}{row.parameters:>12,}{row.parameters / total:>8.1%}  {shape:<18}{row.compute:>8.1%}   "
            f"{sum(r.parameters for r in rest) / total:.1%}, {sum(r.compute for r in rest):.1%}"
            + (f"   ({row.note})" if row.note else "")
        )
    return "\n".join(lines)
