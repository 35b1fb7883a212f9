"""What continuous attention has in native code: expectations under paraboloids, and EM.

Numbers in, numbers out, float64 on the CPU. The derivative of an expectation comes with it; that of
EM is left to plain operations.
"""

from __future__ import annotations

from functools import lru_cache

import numpy
import torch
from torch import Tensor

from fenchel._kernels.library import BallProblem, MixtureProblem, native, run

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


def available(like: Tensor) -> bool:
    """Whether the native code can be used on this tensor's device; for shapes alone, always."""
    return like.device.type == "meta" or (like.device.type == "cpu" and native() is not None)


@lru_cache(maxsize=1)
def _rules() -> tuple[Tensor, Tensor]:
    """Gauss and Legendre's nodes and weights for 4, 8, ..., 96 of them, a row each."""
    nodes, weights = (torch.zeros(_MOST // _STEP, _MOST, dtype=torch.float64) for _ in range(2))
    for row, count in enumerate(range(_STEP, _MOST + 1, _STEP)):
        x, w = numpy.polynomial.legendre.leggauss(count)
        nodes[row, :count], weights[row, :count] = torch.from_numpy(x), torch.from_numpy(w)
    return nodes, weights


def _expectation(
    mean: Tensor,
    scale: Tensor,
    centre: Tensor,
    covariance: Tensor,
    reach: float,
    digits: float,
    derivatives: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = [x.contiguous() for x in (mean, scale, centre, covariance)]
    made = _expectation_shapes(mean, scale, centre, covariance, reach, digits, derivatives)
    value, *slopes = made
    problem = BallProblem(
        *(value.numel(), mean.shape[-1], *(x.data_ptr() for x in operands)),
        *(x.data_ptr() for x in _rules()),
        *(reach, digits, torch.get_num_threads(), value.data_ptr()),
        *(x.data_ptr() if derivatives else None for x in slopes),
    )
    run("paraboloid", problem)
    return made


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


def _iterations(
    weights: Tensor,
    positions: Tensor,
    least: Tensor,
    mixing: Tensor,
    mean: Tensor,
    covariance: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    made = [x.to(torch.float64, copy=True).contiguous() for x in (mixing, mean, covariance)]
    weights, lines = (x.to(torch.float64).contiguous() for x in (weights, positions.mT))
    (count, d), modes = positions.shape, mixing.shape[-1]
    rows, batch = mixing.numel() // modes, max(1, weights.numel() // count)
    problem = MixtureProblem(
        *(rows, batch, count, modes, d, iterations, torch.get_num_threads()),
        *(weights.data_ptr(), lines.data_ptr(), float(least)),
        *(x.data_ptr() for x in made),
    )
    run("mixture", problem)
    first, second, third = (x.to(mixing.dtype) for x in made)
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


_LIBRARY.impl("paraboloid_expectation", _expectation, "CPU")
_LIBRARY.impl("mixture_iterations", _iterations, "CPU")
torch.library.register_fake("fenchel::paraboloid_expectation", _expectation_shapes, lib=_LIBRARY)
torch.library.register_fake("fenchel::mixture_iterations", _iterations_shapes, lib=_LIBRARY)

paraboloid_expectation = torch.ops.fenchel.paraboloid_expectation.default
mixture_iterations = torch.ops.fenchel.mixture_iterations.default
