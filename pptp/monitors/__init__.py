"""Look at memorisation while it happens: name -> monitor. Each is a `Monitor` during training and functions after it."""

from .curvature import Curvature

MONITORS = {"curvature": Curvature}
