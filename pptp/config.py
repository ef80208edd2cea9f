"""What a run is made of, as plain data; light to import, so that the command line answers at once."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from .errors import UserError

DIGITS = "digits"


@dataclass(frozen=True)
class Source:
    """Where images come from and how they are prepared; everything that decides what a sample id means."""

    data: str = DIGITS  # "digits", a folder, a .tar, "torch/cifar100", "hfds/..."
    data_dir: str = ""  # root for named data sets
    train_split: str = "train"
    val_split: str = ""  # if given, non-members and test come from it
    download: bool = False
    img_size: int = 32
    limit_classes: int = 0  # keep the first k classes only; 0 = all
    limit_per_class: int = 0  # keep k images of each class only; 0 = all
    pixel_noise: float = 0.0  # digits only: noise fixed per image, in units of the pixel range
    label_noise: float = 0.0  # digits only: share of labels replaced at random, in every part alike

    def __post_init__(self):
        if self.img_size < 8:
            raise UserError(f"img_size is {self.img_size}: it must be at least 8")
        for name in ("limit_classes", "limit_per_class", "pixel_noise", "label_noise"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 0 or above")
        if self.data != DIGITS and (self.pixel_noise or self.label_noise):
            raise UserError("pixel_noise and label_noise are for the digits only: they would be ignored here")


@dataclass(frozen=True)
class Parts:
    """How large each part is: up to 1 a share, above 1 a number of samples."""

    members: float = 0.5
    reference: float = 0.1
    nonmembers: float = 0.25
    test: float = 0.15
    canaries: int = 0  # odd samples besides, trained on or not by the toss of a coin, for `pptp audit`
    canary_kind: str = "mislabelled"  # or "noise"

    def __post_init__(self):
        if self.canaries < 0:
            raise UserError(f"canaries is {self.canaries}: it must be 0 or above")


COMPILERS = ("no", "inductor", "aot_eager", "cudagraphs")
SCHEDULES = ("cosine", "step", "multistep", "poly", "tanh", "constant")


@dataclass(frozen=True)
class Recipe:
    """How to train. Names of optimizers and schedules are timm's."""

    epochs: int = 30
    batch_size: int = 128
    opt: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    sched: str = "cosine"
    warmup_epochs: int = 0
    clip_grad: float = 0.0  # largest gradient norm; 0 = no clipping
    sam_rho: float = 0.0  # radius of sharpness-aware minimisation around any optimizer; 0 = off
    augment: bool = True  # random crop and flip
    seed: int = 42
    device: str = "auto"  # "auto", "cpu"; several processes: torchrun
    amp: str = "no"  # "no", "fp16", "bf16"
    compile: str = "no"  # "no", or a backend of torch.compile
    channels_last: bool = False  # convolutions in the memory order that some processors prefer
    workers: int = 0

    def __post_init__(self):
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("weight_decay", "clip_grad", "workers", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 0 or above, and finite")
        if not 0 <= self.warmup_epochs < max(1, self.epochs):
            raise UserError(
                f"warmup_epochs is {self.warmup_epochs}: it must lie between 0 and the {self.epochs} epochs"
            )
        if not 0 <= self.sam_rho < math.inf or (self.sam_rho and self.amp == "fp16"):
            raise UserError(f"sam_rho is {self.sam_rho}: it must be 0 or above, and goes without fp16")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}: it must be between 0 and {2**32 - 1}")
        if not 0 < self.lr < math.inf:
            raise UserError(f"lr is {self.lr}: it must be above 0, and finite")
        if self.device not in ("auto", "cpu"):
            raise UserError(
                f"device is {self.device!r}: 'auto' takes the accelerator there is, 'cpu' the processor (CUDA_VISIBLE_DEVICES picks one)"
            )
        if self.sched not in SCHEDULES:
            raise UserError(f"sched is {self.sched!r}: it must be one of {', '.join(SCHEDULES)}")
        if self.amp not in ("no", "fp16", "bf16"):
            raise UserError(f"amp is {self.amp!r}: it must be no, fp16 or bf16")
        if self.compile not in COMPILERS:
            raise UserError(f"compile is {self.compile!r}: it must be one of {', '.join(COMPILERS)}")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what `pptp train` makes."""

    model: str = "resnet18"
    model_kwargs: dict = field(default_factory=dict)
    norm: str = ""  # "gn", "ln" or "none" in place of BatchNorm; of some stages only as "gn:layer3,layer4"
    pretrained: bool = False  # start from timm's weights instead of random ones
    full_checkpoint: str = ""  # take M_all, M_h1 and the initial weights from files instead of training
    half_checkpoint: str = ""
    initial_checkpoint: str = ""
    procedure: str = "plain"  # how both models are trained: any defense, e.g. cskd
    splits_file: str = (
        ""  # .npz with the sample ids of h1, h2, nonmembers, test (and reference) instead of drawing them
    )
    keep_epochs: str = ""  # early weights to keep for `--rewind epoch=k`, e.g. "1,5"
    source: Source = Source()
    parts: Parts = Parts()
    recipe: Recipe = Recipe()

    def __post_init__(self):
        if bool(self.full_checkpoint) != bool(self.half_checkpoint):
            raise UserError("give both --full-checkpoint and --half-checkpoint, or neither")
        if self.full_checkpoint and not self.splits_file:
            raise UserError(
                "models trained elsewhere need --splits-file, the sample ids they were trained on: else membership would be invented"
            )
        if self.splits_file and self.parts.canaries:
            raise UserError("canaries are drawn before the parts are: they do not go with --splits-file")
        if not all(k.strip().isdigit() and 1 <= int(k) <= self.recipe.epochs for k in self.keep_epochs.split(",") if k):
            raise UserError(
                f"keep_epochs is {self.keep_epochs!r}: give epochs between 1 and {self.recipe.epochs}, e.g. 1,5"
            )

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping) -> Experiment:
        nested = {"source": Source, "parts": Parts, "recipe": Recipe}
        return cls(**{key: nested[key](**value) if key in nested else value for key, value in values.items()})


NESTED = ("source", "parts", "recipe")


def flat_fields() -> dict[str, tuple[type, object]]:
    """name -> (type, default) of every setting of an experiment; the names are the flags."""
    found = {}
    for owner in (Experiment, Source, Parts, Recipe):
        hints = typing.get_type_hints(owner)
        example = owner()
        for f in fields(owner):
            if f.name not in NESTED:
                found[f.name] = (hints[f.name], getattr(example, f.name))
    return found


def check_names(settings: Mapping[str, object]) -> None:
    """Refuse a setting that does not exist, with the nearest ones that do."""
    known = flat_fields()
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=2)
            hint = f"did you mean {', '.join(near)}?" if near else "see pptp train --help"
            raise UserError(f"there is no setting called {key!r}: {hint}")


def experiment(settings: Mapping[str, object]) -> Experiment:
    """An experiment from flat settings."""
    check_names(settings)

    def pick(owner):
        return owner(**{f.name: settings[f.name] for f in fields(owner) if f.name in settings})

    own = {f.name: settings[f.name] for f in fields(Experiment) if f.name in settings}
    return Experiment(**own, source=pick(Source), parts=pick(Parts), recipe=pick(Recipe))
