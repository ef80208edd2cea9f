"""The attack suite: name -> attack. Each is a function (known, query) -> scores, higher = member."""

from .metric import confidence, correctness, entropy, modified_entropy

ATTACKS = {
    "correctness": correctness,
    "confidence": confidence,
    "entropy": entropy,
    "modified_entropy": modified_entropy,
}
