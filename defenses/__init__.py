"""The defenses: name -> class. Each is a `Defense`, usable on the whole model or from a cut on."""

from .plain import Plain
from .relaxloss import RelaxLoss

DEFENSES = {
    "plain": Plain,
    "relaxloss": RelaxLoss,
}
