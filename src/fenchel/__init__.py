"""fenchel: attention as the expectation of values under the distribution that solves

    p* = argmax_p <scores, p> - Omega(p).

Choose Omega and the base measure, get weights, exact derivatives and a certificate.
"""

from typing import TYPE_CHECKING, Any

from fenchel import priors, scores
from fenchel._attention.front import attention, explain
from fenchel._kernels.route import Route, use
from fenchel._maps import entmax, softmax, sparsemax
from fenchel._numerics import NonFiniteError
from fenchel._solution import Solution, SolveError, Status
from fenchel._solve import solve
from fenchel._version import __version__
from fenchel.regularizers import Budget, Norm, Regularizer, Shannon, Tsallis

if TYPE_CHECKING:
    from fenchel import bounds, continuous, dual, hf, lens, measures, nn, testing
    from fenchel._attention.cache import KeyValueCache
    from fenchel._attention.decode import decode
    from fenchel._attention.eviction import QueryBall, QueryBox
    from fenchel._attention.packed import varlen_attention
    from fenchel._attention.proof import DecodeProof
    from fenchel._attention.replace import replace_sdpa
    from fenchel._attention.solution import AttentionSolution, attention_solution
    from fenchel._info import info
    from fenchel._losses import fenchel_young_loss
    from fenchel.lens.inspection import Inspection, inspect
    from fenchel.regularizers import Fused

# Functions and rooms that load when they are first touched: `fl.nn` is enough.
_LATER = {
    "AttentionSolution": "fenchel._attention.solution",
    "DecodeProof": "fenchel._attention.proof",
    "Fused": "fenchel.regularizers.fused",
    "Inspection": "fenchel.lens.inspection",
    "KeyValueCache": "fenchel._attention.cache",
    "QueryBall": "fenchel._attention.eviction",
    "QueryBox": "fenchel._attention.eviction",
    "attention_solution": "fenchel._attention.solution",
    "decode": "fenchel._attention.decode",
    "fenchel_young_loss": "fenchel._losses",
    "info": "fenchel._info",
    "inspect": "fenchel.lens.inspection",
    "replace_sdpa": "fenchel._attention.replace",
    "varlen_attention": "fenchel._attention.packed",
}
_ROOMS = ("bounds", "continuous", "dual", "hf", "lens", "measures", "nn", "testing")

__all__ = [
    "AttentionSolution",
    "Budget",
    "DecodeProof",
    "Fused",
    "Inspection",
    "KeyValueCache",
    "NonFiniteError",
    "Norm",
    "QueryBall",
    "QueryBox",
    "Regularizer",
    "Route",
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
    "decode",
    "dual",
    "entmax",
    "explain",
    "fenchel_young_loss",
    "hf",
    "info",
    "inspect",
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
    "use",
    "varlen_attention",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name in _ROOMS:
        return import_module(f"fenchel.{name}")
    raise AttributeError(f"module 'fenchel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
