"""fenchel: attention as the expectation of values under the distribution that solves

    p* = argmax_p <scores, p> - Omega(p).

Choose Omega and the base measure, get weights, exact derivatives and a certificate.
"""

from typing import TYPE_CHECKING, Any

from fenchel import priors, scores
from fenchel._attention import (
    AttentionSolution,
    attention,
    attention_solution,
    replace_sdpa,
)
from fenchel._info import info
from fenchel._losses import fenchel_young_loss
from fenchel._maps import entmax, softmax, sparsemax
from fenchel._numerics import NonFiniteError
from fenchel._solution import Solution, SolveError, Status
from fenchel._solve import solve
from fenchel._version import __version__
from fenchel.regularizers import Budget, Fused, Norm, Regularizer, Shannon, Tsallis

if TYPE_CHECKING:
    from fenchel import bounds, continuous, dual, hf, lens, measures, nn, testing

# Rooms that load when they are first touched: `fl.nn` is enough.
_ROOMS = ("bounds", "continuous", "dual", "hf", "lens", "measures", "nn", "testing")

__all__ = [
    "AttentionSolution",
    "Budget",
    "Fused",
    "NonFiniteError",
    "Norm",
    "Regularizer",
    "Shannon",
    "Solution",
    "SolveError",
    "Status",
    "Tsallis",
    "__version__",
    "attention",
    "attention_solution",
    "bounds",
    "continuous",
    "dual",
    "entmax",
    "fenchel_young_loss",
    "hf",
    "info",
    "lens",
    "measures",
    "nn",
    "priors",
    "replace_sdpa",
    "scores",
    "softmax",
    "solve",
    "sparsemax",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        from importlib import import_module

        return import_module(f"fenchel.{name}")
    raise AttributeError(f"module 'fenchel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
