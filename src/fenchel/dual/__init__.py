"""Attention as estimation: a preference over templates, evidence, and how reliable it is."""

from fenchel.dual.estimate import estimate, first_order, second_order
from fenchel.dual.gaussian import gaussian, gaussian_mixture
from fenchel.dual.radius import WithinRadius, reliability_of, within_radius
from fenchel.dual.result import Deviation, Estimate
from fenchel.dual.transport import (
    TruePreference,
    dot_product_transport,
    transport,
    transport_first_order,
    true_preference,
)

__all__ = [
    "Deviation",
    "Estimate",
    "TruePreference",
    "WithinRadius",
    "dot_product_transport",
    "estimate",
    "first_order",
    "gaussian",
    "gaussian_mixture",
    "reliability_of",
    "second_order",
    "transport",
    "transport_first_order",
    "true_preference",
    "within_radius",
]
