"""Plain cross-entropy: the control that shows what freezing and rewinding alone buy."""

from dataclasses import dataclass

from pptp.retrain import Defense
from pptp.training import fit


@dataclass(frozen=True)
class Plain(Defense):
    """No defense: the retrained layers minimise cross-entropy as before."""

    def train(self, model, data, recipe, *, monitors=(), checkpoint=None):
        history = fit(model, data.members, recipe, monitors=monitors, checkpoint=checkpoint, title="plain")
        return {**history.summary(), "active": 0.0}
