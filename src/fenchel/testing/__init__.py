"""Checks for answers and for regularisers: `assert_optimal`, and the contract suite."""

from fenchel.testing.contract import RegularizerContract
from fenchel.testing.optimality import assert_optimal, gap_tolerance, perturbed

__all__ = ["RegularizerContract", "assert_optimal", "gap_tolerance", "perturbed"]
