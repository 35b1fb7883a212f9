"""Omega: the convex functions that shape a distribution, one file per family."""

from typing import TYPE_CHECKING, Any

from fenchel.regularizers.budget import Budget
from fenchel.regularizers.contract import Curvature, Dual, Maximum, Regularizer
from fenchel.regularizers.norm import Norm
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

if TYPE_CHECKING:
    from fenchel.regularizers.fused import Fused

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


def __getattr__(name: str) -> Any:
    """Total variation loads when it is asked for."""
    if name == "Fused":
        from fenchel.regularizers.fused import Fused

        return Fused
    raise AttributeError(f"module 'fenchel.regularizers' has no attribute {name!r}")
