"""`row_weights`, its derivative and `row_offsets` in Triton: what `_kernels/rows.py` does in C++.

One program per row, float32. Nothing here reads a value on the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fenchel._kernels.gpu import rows_gradient, rows_search
from fenchel._kernels.gpu.device import registers
from fenchel._kernels.gpu.rows_budget import weigh_budget_rows
from fenchel._kernels.gpu.rows_gradient import differentiate_rows
from fenchel._kernels.gpu.rows_search import offset_rows, weigh_rows
from fenchel._kernels.operands import check
from fenchel._kernels.tsallis import EDGE_ABOVE

_SINGLE = (torch.float32,)
_LARGEST = 2048  # keys that stay in the registers of one program
_BLOCK = 2048  # of longer rows, which are read several times
_KEYS_OF_A_WARP = 256
_REGISTERS = 128  # of a thread, of which there are 256 at most: a half of a device's


class _Shape(NamedTuple):
    """How a row is cut."""

    block: int
    whole: bool

    @classmethod
    def of(cls, keys: int) -> _Shape:
        if keys > _LARGEST:
            return cls(_BLOCK, False)
        return cls(max(32, triton.next_power_of_2(keys)), True)

    @property
    def constants(self) -> dict[str, int | bool]:
        """With as many warps as leave each thread 8 keys."""
        warps = max(1, self.block // _KEYS_OF_A_WARP)
        launch = {"num_warps": warps, **registers(_REGISTERS)}
        return {"BLOCK": self.block, "WHOLE": self.whole, **launch}


def row_weights(scores: Tensor, family: str, parameter: float) -> Tensor:
    check(scores, "scores", (scores.shape[0], scores.shape[1]), _SINGLE)
    scores = scores.contiguous()
    weights = torch.empty_like(scores)
    rows, keys = scores.shape
    shape = _Shape.of(keys)
    if family == "budget":
        whole = math.floor(parameter)
        numbers = (math.ceil(parameter), whole, parameter - whole)
        weigh_budget_rows[(rows,)](scores, weights, keys, *numbers, **shape.constants)
    else:
        kind = _family(family, parameter)
        weigh_rows[(rows,)](scores, weights, keys, parameter, kind, **shape.constants)
    return weights


def row_weights_backward(
    gradient: Tensor, weights: Tensor, family: str, parameter: float
) -> Tensor:
    check(weights, "weights", (weights.shape[0], weights.shape[1]), _SINGLE)
    check(gradient, "gradient", weights.shape, _SINGLE)
    gradient, weights = gradient.contiguous(), weights.contiguous()
    slopes = torch.empty_like(weights)
    rows, keys = weights.shape
    shape = _Shape.of(keys)
    kind = _response(family, parameter)
    arguments = (weights, gradient, slopes, keys, parameter, kind)
    differentiate_rows[(rows,)](*arguments, **shape.constants)
    return slopes


def row_offsets(scores: Tensor, eps: Tensor) -> Tensor:
    check(scores, "scores", (scores.shape[0], scores.shape[1]), _SINGLE)
    check(eps, "eps", (scores.shape[0],), (torch.float64,))
    offsets = scores.new_empty((scores.shape[0], 2), dtype=torch.float64)
    rows, keys = scores.shape
    shape = _Shape.of(keys)
    operands = (scores.contiguous(), eps.contiguous(), offsets, keys)
    offset_rows[(rows,)](*operands, **shape.constants)
    return offsets


def _family(name: str, parameter: float) -> int:
    if name == "norm":
        chosen = rows_search.NORM_2 if parameter == 1 else rows_search.NORM
    elif parameter in (0.5, 1):
        chosen = rows_search.SQUARE if parameter == 0.5 else rows_search.RAMP
    else:
        chosen = rows_search.GENTLE if parameter <= EDGE_ABOVE else rows_search.EDGE
    return int(chosen.value)


def _response(name: str, parameter: float) -> int:
    if name == "budget":
        chosen = rows_gradient.FREE
    elif name == "norm":
        chosen = rows_gradient.NORM
    else:
        closed = {0.5: rows_gradient.ROOT, 1: rows_gradient.FLAT}
        chosen = closed.get(parameter, rows_gradient.SHARE)
    return int(chosen.value)
