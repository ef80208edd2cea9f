"""Early stopping: the oldest defense, stop before the model has memorised."""

from dataclasses import dataclass

from pptp.errors import UserError
from pptp.retrain import Defense
from pptp.training import fit


@dataclass(frozen=True)
class EarlyStopping(Defense):
    """Plain cross-entropy for the first `share` of the epochs, on the schedule of the whole."""

    share: float = 0.3

    def check(self, classes, recipe):
        if not 0 < self.share < 1:
            raise UserError(f"early_stopping share is {self.share}: it must lie between 0 and 1")

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        stop = max(1, round(self.share * recipe.epochs))
        history = fit(
            model,
            data.members,
            recipe,
            monitors=monitors,
            checkpoint=checkpoint,
            stop_after=stop,
            title="early stopping",
        )
        return {**history.summary(), "active": 1 - stop / recipe.epochs}
