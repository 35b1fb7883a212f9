"""fenchel: attention as the expectation of values under the distribution that solves

    p* = argmax_p <scores, p> - Omega(p).

Choose Omega and the base measure, get weights, exact derivatives and a certificate.
"""

from fenchel import certificates, continuous, dual, measures, nn, priors, scores
from fenchel._version import __version__
from fenchel.attention import (
    AttentionSolution,
    attention,
    attention_solution,
    replace_sdpa,
)
from fenchel.losses import fenchel_young_loss
from fenchel.maps import entmax, softmax, sparsemax
from fenchel.regularizers import Budget, Fused, Norm, Regularizer, Shannon, Tsallis
from fenchel.solution import Solution, SolveError, Status
from fenchel.solve import solve

__all__ = [
    "AttentionSolution",
    "Budget",
    "Fused",
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
    "certificates",
    "continuous",
    "dual",
    "entmax",
    "fenchel_young_loss",
    "measures",
    "nn",
    "priors",
    "replace_sdpa",
    "scores",
    "softmax",
    "solve",
    "sparsemax",
]
