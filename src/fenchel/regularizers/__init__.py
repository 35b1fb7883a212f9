"""Omega: the convex functions that shape a distribution, one file a family."""

from fenchel.regularizers.budget import Budget
from fenchel.regularizers.contract import Curvature, Dual, Maximum, Regularizer
from fenchel.regularizers.fused import Fused
from fenchel.regularizers.norm import Norm
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

__all__ = [
    "Budget",
    "Curvature",
    "Dual",
    "Fused",
    "Maximum",
    "Norm",
    "Regularizer",
    "Shannon",
    "Tsallis",
]
