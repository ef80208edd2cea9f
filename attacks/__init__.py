"""The attack suite: name -> attack. Each is a function (known, query) -> scores, higher = member."""

from .attack_p import attack_p
from .attack_r import attack_r
from .calibration import calibration
from .curvature import curvature
from .feature_probe import feature_probe
from .gradient_norm import gradient_norm
from .label_only import agreement, boundary_distance
from .lira import lira, lira_offline
from .metric import confidence, correctness, entropy, modified_entropy
from .neural import network, shadow_network
from .rmia import rmia, rmia_offline

ATTACKS = {
    "correctness": correctness,
    "confidence": confidence,
    "entropy": entropy,
    "modified_entropy": modified_entropy,
    "attack_p": attack_p,
    "network": network,
    "calibration": calibration,
    "attack_r": attack_r,
    "shadow_network": shadow_network,
    "rmia": rmia,
    "rmia_offline": rmia_offline,
    "lira": lira,
    "lira_offline": lira_offline,
    "agreement": agreement,
    "boundary_distance": boundary_distance,
    "gradient_norm": gradient_norm,
    "curvature": curvature,
    "feature_probe": feature_probe,
}
