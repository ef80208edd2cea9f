"""Find where an image classifier memorises, rewind just those layers, retrain them under a defense, and attack the result.

Public names are imported when first used, so that `pptp --help` does not wait for torch.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Recipe, Source
    from .errors import UserError
    from .evaluate import Attack, Evaluation, MembershipScores, evaluate
    from .intervals import Estimate
    from .localize import RiskReport, StageRisk, localize
    from .measures import Effort, References
    from .models import create
    from .outside import Teachers
    from .retrain import Defense, LossDefense, retrain
    from .signals import Known, Needs, Signals, collect, needs
    from .sources import load
    from .splits import Splits, TrainingData, from_indices, split
    from .stages import Stage, snapshot, stages
    from .training import History, Monitor, Step, fit

_HOME = {
    "config": ("Recipe", "Source"),
    "errors": ("UserError",),
    "evaluate": ("Attack", "Evaluation", "MembershipScores", "evaluate"),
    "intervals": ("Estimate",),
    "localize": ("RiskReport", "StageRisk", "localize"),
    "measures": ("Effort", "References"),
    "models": ("create",),
    "outside": ("Teachers",),
    "retrain": ("Defense", "LossDefense", "retrain"),
    "signals": ("Known", "Needs", "Signals", "collect", "needs"),
    "sources": ("load",),
    "splits": ("Splits", "TrainingData", "from_indices", "split"),
    "stages": ("Stage", "snapshot", "stages"),
    "training": ("History", "Monitor", "Step", "fit"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


class _Package(types.ModuleType):
    """`pptp.localize` is the function, also after something imported the module `pptp.localize`."""

    def __setattr__(self, name, value):
        if not (isinstance(value, types.ModuleType) and name in _MODULE_OF):
            super().__setattr__(name, value)

    def __getattr__(self, name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self):
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
