"""Attention as estimation: a preference over templates, evidence, and how reliable it is."""

from fenchel.dual.estimate import Deviation, Estimate, estimate, first_order, second_order
from fenchel.dual.gaussian import gaussian, gaussian_mixture
from fenchel.dual.readings import WithinRadius, reliability_of, within_radius

__all__ = [
    "Deviation",
    "Estimate",
    "WithinRadius",
    "estimate",
    "first_order",
    "gaussian",
    "gaussian_mixture",
    "reliability_of",
    "second_order",
    "within_radius",
]
