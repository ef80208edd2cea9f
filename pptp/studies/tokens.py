"""`pptp monitor tokens`: what gradients tell of their batch at the kept checkpoints, of the whole model and of the retrained layers alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from .. import models
from ..data import some
from ..errors import UserError
from ..intervals import Estimate
from ..monitors.tokens import Settings, collect_pairs, default_layers, dependence, reconstruct
from ..runs import UNDEFENDED, Run, write_npz
from ..stages import SCRATCH, freeze, split_at, unfreeze
from . import Section, Table


def checkpoints(run: Run) -> Iterator[tuple[str, str, nn.Module]]:
    """(model, when, weights in it): the undefended one at its start, at kept epochs and at its end; retrained ones at their start and end."""
    kept = sorted(int(path.stem.split("_")[1]) for path in run.folder(UNDEFENDED).glob("epoch_*.safetensors"))
    states = [("start", run.initial_weights()), *((f"epoch {k}", run.early_weights(k)) for k in kept)]
    for when, state in states:
        model = run.fresh_model()
        models.load_weights(model, state, when)
        yield UNDEFENDED, when, model
    yield UNDEFENDED, "end", run.model(UNDEFENDED)
    for name in run.trained_names():
        if name != UNDEFENDED and run.cut_of(name) != SCRATCH:
            yield name, "end", run.model(name)


def study(run: Run, settings: Settings, images: int = 1, dlg_steps: int = 30) -> Section:
    """images: how many to rebuild at each checkpoint; 0 for none."""
    if images < 0 or dlg_steps < 1:
        raise UserError(f"images is {images} and dlg_steps {dlg_steps}: at least 0 and 1 are needed")
    members = run.splits.members
    chosen = some(members, images, "rebuilt", settings.seed)
    rows = []
    for name, when, model in checkpoints(run):
        for what in ("whole",) if name == UNDEFENDED else ("whole", "suffix"):
            with _shared(run, model, name if what == "suffix" else UNDEFENDED):
                layers = default_layers(model)
                found = dependence(collect_pairs(model, members, layers, settings), settings)
                made = [_rebuilt(run, model, chosen, k, dlg_steps) for k in range(len(chosen))]
            rows.append(
                {"model": name, "when": when, "shared": what, "layers": layers, **found.to_dict(), "rebuilt": made}
            )
            print(f"{name}, {when}, gradients of the {what}: MINE {found.mine}, AUC {found.auc}", flush=True)
    pictures = [[made.pop("image") for made in row["rebuilt"]] for row in rows]
    write_npz(run.path / "monitors" / "tokens.npz", {"rebuilt": np.array(pictures)})
    return Section(
        "tokens",
        "What gradients tell of the batch they come from",
        _lines(rows),
        [_table(rows), *_rebuilt_table(rows)],
        _caveats(rows, settings),
        {"rows": rows, "settings": vars(settings)},
        models=[row["model"] for row in rows],
    )


class _shared:
    """While open, only the layers from the cut of `name` on have gradients: what someone who freezes the rest would share."""

    def __init__(self, run: Run, model: nn.Module, name: str):
        self.run, self.model, self.cut = run, model, run.cut_of(name)

    def __enter__(self):
        self.wanted = {name: p.requires_grad for name, p in self.model.named_parameters()}
        if self.cut != SCRATCH:
            freeze(split_at(self.run.parts(self.model), self.cut)[0])

    def __exit__(self, *_):
        unfreeze(self.model, self.wanted)


def _rebuilt(run: Run, model: nn.Module, chosen, k: int, steps: int) -> dict:
    x, y, _ = chosen[k]
    device = next(model.parameters()).device
    mean, std = models.normalisation(model)
    made = reconstruct(model, x[None].to(device), torch.tensor([y], device=device), mean, std, steps)
    return {**made.numbers(), "image": made.image.cpu().numpy()}


def _table(rows: list[dict]) -> Table:
    cells = [
        [
            row["model"],
            row["when"],
            row["shared"],
            str(Estimate(**row["mine"])),
            str(Estimate(**row["control"])),
            str(Estimate(**row["nce"])),
            str(Estimate(**row["auc"])),
            f"[{row['null_auc'][0]:.3f}, {row['null_auc'][1]:.3f}]",
        ]
        for row in rows
    ]
    header = ["model", "when", "gradients of", "MINE", "control", "InfoNCE", "AUC", "AUC if shuffled"]
    return Table(
        "Matched-against-mismatched dependence of data and gradients, on held-out batches (nats; AUC)", header, cells
    )


def _rebuilt_table(rows: list[dict]) -> list[Table]:
    cells = [
        [
            row["model"],
            row["when"],
            row["shared"],
            str(k),
            *(f"{made[key]:.4g}" for key in ("mse", "psnr", "ssim", "gradient_distance")),
        ]
        for row in rows
        for k, made in enumerate(row["rebuilt"])
    ]
    header = ["model", "when", "gradients of", "image", "MSE", "PSNR (dB)", "SSIM", "gradient left"]
    return [Table("One image rebuilt from its own gradient (DLG)", header, cells)] if cells else []


def _lines(rows: list[dict]) -> list[str]:
    lines = []
    for row in rows:
        low, high = row["null_auc"]
        value = row["auc"]["value"]
        said = "tells its batch" if row["auc"]["low"] > high else "does not surely tell its batch"
        lines.append(
            f"{row['model']}, {row['when']}: a gradient of the {row['shared']} model {said} (AUC {value:.3f}, shuffled {low:.3f} to {high:.3f})."
        )
    return lines


def _caveats(rows: list[dict], settings: Settings) -> list[str]:
    lines = [
        f"{settings.batches} batches of {settings.batch_size}, {settings.extractor} tokens; held-out batches cannot support more than {rows[0]['ceiling']:.1f} nats. Intervals are over held-out batches, not over critics.",
        "Dependence is not a risk by itself: a gradient may tell its batch and rebuild nothing, or the other way round; that is why images are rebuilt beside it.",
        "DLG is one attack, with the label known, one image a gradient and the model in eval mode: what it cannot rebuild, another may.",
        "Layers whose gradients are compared: "
        + "; ".join(dict.fromkeys(", ".join(row["layers"]) for row in rows))
        + ".",
    ]
    loud = [
        f"{row['model']} {row['when']}" for row in rows if row["control"]["low"] > 0 and row["control"]["value"] > 0.1
    ]
    if loud:
        lines.append(f"The control is not near 0 for {', '.join(loud)}: those MINE values say nothing.")
    return lines
