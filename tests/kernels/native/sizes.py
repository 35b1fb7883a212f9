"""How large each result of a random call would be if nothing cancelled: the unit of its rounding.

With r = dp/ds on the support, the response of the weights, and g = <dO, v>,

    ds_i = r_i (g_i - sum r g / sum r),   dq = scale sum ds_i k_i,   dk_i = scale sum ds_i q.

Each ds_i is rounded in units of r_i max|g|. The steepest key answers with what the others leave,
so that sum |ds| <= 4 max|g| R, with R = sum r - max r. Only for softmax is R below 1 / temperature.
Equal scores under masses nu have r_i = nu_i N^(alpha - 2) / temperature, N = sum nu, so R is almost
N^(alpha - 1): 7e6 for alpha = 4 and the 190 of half a row of masses. If all keys are equal too,
dq = 0 exactly, and what any computation returns is R max|g| max|k| times rounding. The tiles, our
reference, are farther from that zero than the kernels: in `Tsallis` the mean's slopes are
exp((1 - eps) log x) and those of the weights p / y, which differ by some ulps, alike for all keys.

The derivative in eps = alpha - 1 is sum p l (g - mean) over the keys of every row that shares it,
with l = (1 - z - e^-z) / eps^2, z = eps log(p / nu), the derivative of log p at the offset of the
row. Roundings of rows are independent: their sum is of the order of the root of the sum of squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._attention.call import Options, prepare
from fenchel._attention.tiled import solve_tile
from tests.kernels.native.cases import Case, cast, native, options_of, regularizer_of


def sizes(case: Case) -> dict[str, float]:
    """Of the output and each gradient by name, of all other gradients, and of the scores."""
    query, key, value = (case.leaves[name] for name in ("query", "key", "value"))
    scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    coldest = float(torch.as_tensor(case.temperature).min())
    gain = largest(case.gradient) * largest(value) * value.shape[-1] ** 0.5
    responses = respond(case)
    push = gain * max(1 / coldest, largest(responses.to_scores))  # of ds
    return {
        "output": largest(value),
        "query": push * largest(key) * scale,
        "key": push * largest(query) * scale,
        "value": largest(case.gradient),
        "scores": largest(query) * largest(key) * query.shape[-1] * scale / coldest,
        "mask": push,
        "alpha": gain * max(1.0, largest(responses.to_alpha)),
        "other": gain,
    }


def largest(x: Tensor) -> float:
    return x.double().abs().max().item()


class Responses(NamedTuple):
    """How weights answer to scores, and to alpha."""

    to_scores: Tensor  # R of every row  (..., query)
    to_alpha: Tensor  # root of the sum over rows of (sum p |l|)^2, in the shape of alpha


def respond(case: Case) -> Responses:
    """In float64, by torch's operations."""
    double = torch.float64
    leaves = {name: cast(x, double) for name, x in case.leaves.items()}
    regularizer = regularizer_of(case, leaves, double)
    operands = (leaves[name] for name in ("query", "key", "value"))
    with native(False), torch.no_grad():
        call = prepare(*operands, Options(**options_of(case, leaves, double)))
        solution = solve_tile(call, regularizer)
        p, base = solution.weights, solution.problem.base
        r = regularizer.curvature(p, base).response
        log_ratio = torch.where(p > 0, p, 1.0).log() - torch.where(p > 0, base.safe_log(), 0.0)
    alpha = torch.as_tensor(case.alpha, dtype=double)
    of_rows = (p * log_slope(log_ratio, alpha.unsqueeze(-1) - 1).abs()).sum(-1)
    return Responses(r.sum(-1) - r.amax(-1), of_rows.square().sum_to_size(alpha.shape).sqrt())


def log_slope(log_ratio: Tensor, eps: Tensor) -> Tensor:
    """l, which is -log(p / nu)^2 / 2 at eps = 0."""
    z = eps * log_ratio
    series = z.abs() < 1e-4
    return torch.where(
        series,
        -log_ratio.square() / 2,
        -(torch.expm1(-z) + z) / torch.where(series, 1.0, eps).square(),
    )
