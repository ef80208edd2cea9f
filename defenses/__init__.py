"""The defenses: name -> class. Each is a `Defense`, usable on the whole model or from a cut on."""

from .advreg import AdvReg
from .ccl import CCL
from .confidence_penalty import ConfidencePenalty
from .crossfit import CrossFit
from .cskd import CSKD
from .dpsgd import DPSGD
from .early_stopping import EarlyStopping
from .hamp import HAMP
from .label_smoothing import LabelSmoothing
from .mist import MIST
from .mixup import Mixup
from .plain import Plain
from .relaxloss import RelaxLoss
from .selena import Selena

DEFENSES = {
    "plain": Plain,
    "relaxloss": RelaxLoss,
    "advreg": AdvReg,
    "selena": Selena,
    "crossfit": CrossFit,
    "dpsgd": DPSGD,
    "label_smoothing": LabelSmoothing,
    "confidence_penalty": ConfidencePenalty,
    "mixup": Mixup,
    "early_stopping": EarlyStopping,
    "ccl": CCL,
    "hamp": HAMP,
    "cskd": CSKD,
    "mist": MIST,
}
