"""Attention as estimation: a preference over templates, evidence, and how reliable it is."""

from fenchel.dual.estimate import Deviation, Estimate, estimate, first_order, second_order

__all__ = ["Deviation", "Estimate", "estimate", "first_order", "second_order"]
