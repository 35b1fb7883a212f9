"""What continuous attention has in native code: expectations under paraboloids, and EM.

Numbers in, numbers out, float64 on the CPU. The derivative of an expectation comes with it; that of
EM is left to plain operations.
"""

from __future__ import annotations

from functools import lru_cache

import numpy
import torch
from torch import Tensor

from fenchel._kernels.library import BallProblem, MixtureProblem, run
from fenchel._kernels.operands import DOUBLE, REAL, Axis, check, register_native

_LIBRARY = torch.library.Library("fenchel", "FRAGMENT")
_LIBRARY.define(
    "paraboloid_expectation(Tensor mean, Tensor scale, Tensor centre, Tensor covariance, "
    "float reach, float digits, bool derivatives) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "mixture_iterations(Tensor weights, Tensor positions, Tensor least, Tensor mixing, "
    "Tensor mean, Tensor covariance, int iterations) -> (Tensor, Tensor, Tensor)"
)

_STEP, _MOST = 4, 96  # kNodeStep and kMostNodes of native/problem.h
MOST_AXES = 3  # of an expectation
MOST_MIXTURE_AXES = 2
_COMPONENT, _POSITION, _MODE = Axis("component"), Axis("position"), Axis("mode")


@lru_cache(maxsize=1)
def _rules() -> tuple[Tensor, Tensor]:
    """Gauss and Legendre's nodes and weights for 4, 8, ..., 96 of them, a row each."""
    nodes, weights = (torch.zeros(_MOST // _STEP, _MOST, dtype=torch.float64) for _ in range(2))
    for row, count in enumerate(range(_STEP, _MOST + 1, _STEP)):
        x, w = numpy.polynomial.legendre.leggauss(count)
        nodes[row, :count], weights[row, :count] = torch.from_numpy(x), torch.from_numpy(w)
    return nodes, weights


def _check_pairs(mean: Tensor, scale: Tensor, centre: Tensor, covariance: Tensor) -> None:
    check(mean, "mean", (*mean.shape[:-1], _COMPONENT), DOUBLE)
    vectors, matrices = mean.shape, (*mean.shape, mean.shape[-1])
    check(scale, "scale", matrices, DOUBLE)
    check(centre, "centre", vectors, DOUBLE)
    check(covariance, "covariance", matrices, DOUBLE)
    _check_axes("mean", mean.shape[-1], MOST_AXES)


def _check_axes(name: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"{name} must have 1 to {most} components, got {count}")


def _expectation(
    mean: Tensor,
    scale: Tensor,
    centre: Tensor,
    covariance: Tensor,
    reach: float,
    digits: float,
    derivatives: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_pairs(mean, scale, centre, covariance)
    operands = [x.contiguous() for x in (mean, scale, centre, covariance)]
    outputs = _expectation_shapes(mean, scale, centre, covariance, reach, digits, derivatives)
    value, *slopes = outputs
    problem = BallProblem(
        *(value.numel(), mean.shape[-1], *(x.data_ptr() for x in operands)),
        *(x.data_ptr() for x in _rules()),
        *(reach, digits, torch.get_num_threads(), value.data_ptr()),
        *(x.data_ptr() if derivatives else None for x in slopes),
    )
    run("paraboloid", problem)
    return outputs


def _expectation_shapes(
    mean: Tensor,
    scale: Tensor,
    centre: Tensor,
    covariance: Tensor,
    reach: float,
    digits: float,
    derivatives: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d, batch = mean.shape[-1], mean.shape[:-1]
    slopes = ((*batch, d), (*batch, d, d)) if derivatives else ((0,), (0,))
    return mean.new_empty(batch), mean.new_empty(slopes[0]), mean.new_empty(slopes[1])


def _check_mixtures(
    weights: Tensor,
    positions: Tensor,
    least: Tensor,
    mixing: Tensor,
    mean: Tensor,
    covariance: Tensor,
) -> None:
    """Mixtures (..., mode); weights have their last leading axes, and are shared by the others."""
    check(positions, "positions", (_POSITION, _COMPONENT), REAL)
    count, d = positions.shape
    _check_axes("positions", d, MOST_MIXTURE_AXES)
    check(mixing, "mixing", (*mixing.shape[:-1], _MODE), REAL)
    if mixing.shape[-1] == 0:
        raise ValueError(f"mixing must have at least one mode, got shape {tuple(mixing.shape)}")
    shape, batch = mixing.shape, mixing.shape[max(0, mixing.ndim - weights.ndim) : -1]
    check(weights, "weights", (*batch, count), REAL)
    check(least, "least", (), REAL)
    check(mean, "mean", (*shape, d), (mixing.dtype,))
    check(covariance, "covariance", (*shape, d, d), (mixing.dtype,))


def _iterations(
    weights: Tensor,
    positions: Tensor,
    least: Tensor,
    mixing: Tensor,
    mean: Tensor,
    covariance: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_mixtures(weights, positions, least, mixing, mean, covariance)
    parameters = [x.to(torch.float64, copy=True).contiguous() for x in (mixing, mean, covariance)]
    weights, lines = (x.to(torch.float64).contiguous() for x in (weights, positions.mT))
    (count, d), modes = positions.shape, mixing.shape[-1]
    rows, batch = mixing.shape[:-1].numel(), max(1, weights.shape[:-1].numel())
    problem = MixtureProblem(
        *(rows, batch, count, modes, d, iterations, torch.get_num_threads()),
        *(weights.data_ptr(), lines.data_ptr(), float(least)),
        *(x.data_ptr() for x in parameters),
    )
    run("mixture", problem)
    first, second, third = (x.to(mixing.dtype) for x in parameters)
    return first, second, third


def _iterations_shapes(
    weights: Tensor,
    positions: Tensor,
    least: Tensor,
    mixing: Tensor,
    mean: Tensor,
    covariance: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        mixing.new_empty(mixing.shape),
        mean.new_empty(mean.shape),
        covariance.new_empty(covariance.shape),
    )


paraboloid_expectation = register_native(
    _LIBRARY, "paraboloid_expectation", _expectation, _expectation_shapes
)
mixture_iterations = register_native(
    _LIBRARY, "mixture_iterations", _iterations, _iterations_shapes
)
