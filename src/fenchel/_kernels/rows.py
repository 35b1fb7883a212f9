"""Weights of rows of scores in one native pass, and their derivative. In Triton: `gpu/rows.py`.

`row_weights(scores, family, parameter)` maps (rows, keys) to weights. A row with NaN or +inf gives
NaN, a row of -inf zeros, as `solve` does. `row_offsets` returns what normalises Tsallis rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.gpu.device import asked_again, is_asked_for
from fenchel._kernels.library import RowsGradient, RowsProblem, code, run
from fenchel._kernels.operands import FULL, Axis, check, check_keys, register_native
from fenchel._numerics import where

# The parameter: alpha - 1, alpha - 1, k, the strength; the range that the kernels take.
FAMILIES = {
    "tsallis": (0.0, 1.0),
    "norm": (0.25, 4.0),
    "budget": (0.0, 2.0**31),
    "fused": (0.0, 1e6),
}
_CODES = {name: number for number, name in enumerate(FAMILIES)}

_LIBRARY = torch.library.Library("fenchel", "FRAGMENT")
_LIBRARY.define("row_weights(Tensor scores, str family, float parameter) -> Tensor")
_LIBRARY.define(
    "row_weights_backward(Tensor gradient, Tensor weights, str family, float parameter) -> Tensor"
)
_LIBRARY.define("row_offsets(Tensor scores, Tensor eps) -> Tensor")

_AXES = (Axis("row"), Axis("key"))


def _check(name: str, rows: Tensor, family: str, parameter: float) -> None:
    check(rows, name, _AXES, FULL)
    check_keys(rows.shape[1])
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    low, high = FAMILIES[family]
    if not low <= parameter <= high:
        raise ValueError(
            f"the parameter of {family} rows must lie in [{low:g}, {high:g}], got {parameter}; "
            "`solve` takes any"
        )


def _weights(scores: Tensor, family: str, parameter: float) -> Tensor:
    _check("scores", scores, family, parameter)
    scores = scores.contiguous()
    weights = torch.empty_like(scores)
    _run(scores, torch.tensor([parameter], dtype=torch.float64), _CODES[family], weights)
    return weights


def _offsets(scores: Tensor, eps: Tensor) -> Tensor:
    _check("scores", scores, "tsallis", 0.0)
    check(eps, "eps", (scores.shape[0],), (torch.float64,))
    return _run(scores.contiguous(), eps.contiguous(), _CODES["tsallis"], None)


def _run(scores: Tensor, parameter: Tensor, family: int, weights: Tensor | None) -> Tensor:
    rows, keys = scores.shape
    offset = scores.new_empty((rows, 2), dtype=torch.float64)
    run(
        "row_map",
        RowsProblem(
            rows=rows,
            keys=keys,
            dtype=code(scores.dtype),
            family=family,
            scores=scores.data_ptr(),
            parameter=parameter.data_ptr(),
            parameter_stride=0 if parameter.numel() == 1 else 1,
            weights=None if weights is None else weights.data_ptr(),
            offset=offset.data_ptr(),
            threads=torch.get_num_threads(),
        ),
    )
    return offset


def _weights_backward(gradient: Tensor, weights: Tensor, family: str, parameter: float) -> Tensor:
    _check("weights", weights, family, parameter)
    check(gradient, "gradient", weights.shape, (weights.dtype,))
    gradient, weights = gradient.contiguous(), weights.contiguous()
    scores = torch.empty_like(weights)
    run(
        "row_map_gradient",
        RowsGradient(
            rows=weights.shape[0],
            keys=weights.shape[1],
            dtype=code(weights.dtype),
            family=_CODES[family],
            weights=weights.data_ptr(),
            gradient=gradient.data_ptr(),
            parameter=parameter,
            scores=scores.data_ptr(),
            threads=torch.get_num_threads(),
        ),
    )
    return scores


# ---- the derivative, beside its operator


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.family, ctx.parameter = inputs
    ctx.on_gpu = is_asked_for()
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (weights,) = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        weights = where(~weights.isnan(), weights, 0.0)  # a row without an answer passes nothing on
        return _DIFFERENTIABLE[ctx.family](gradient, weights, ctx.parameter), None, None
    with asked_again(ctx.on_gpu):  # the kernels of the forward pass
        return row_weights_backward(gradient, weights, ctx.family, ctx.parameter), None, None


def _tsallis(gradient: Tensor, weights: Tensor, eps: float) -> Tensor:
    """r (g - <r, g> / sum r), r = p^(1 - eps): plain operations, with derivatives of their own."""
    on = weights != 0
    response = where(on, where(on, weights, 1.0) ** (1 - eps), 0.0)
    return response * (gradient - _mean(gradient, response))


def _norm(gradient: Tensor, weights: Tensor, eps: float) -> Tensor:
    """m - p sum m with m = r (g - <p, g>), r = p^(1 - eps) |p|^eps / eps."""
    on = weights != 0
    p = where(on, weights, 1.0)
    size = where(on, p ** (1 + eps), 0.0).sum(-1, keepdim=True) ** (eps / (1 + eps))
    response = where(on, p ** (1 - eps) * size / eps, 0.0)
    moves = response * (gradient - (weights * gradient).sum(-1, keepdim=True))
    return moves - weights * moves.sum(-1, keepdim=True)


def _budget(gradient: Tensor, weights: Tensor, _: float) -> Tensor:
    """The free keys move together, full and empty ones not at all."""
    free = ((weights > 0) & (weights < 1)).to(weights.dtype)
    return free * (gradient - _mean(gradient, free))


def _fused(gradient: Tensor, weights: Tensor, _: float) -> Tensor:
    """Runs of equal weight move together."""
    on = weights > 0
    together = on[..., 1:] & (weights[..., 1:] == weights[..., :-1])
    cut = torch.nn.functional.pad(~together, (0, 1), value=True)
    share = on.to(weights.dtype)
    from fenchel._kernels.total_variation import components, group_means  # of Fused alone

    labels = components(~cut.unsqueeze(-2), False)
    return group_means(share * (gradient - _mean(gradient, share)), labels)


def _mean(values: Tensor, response: Tensor) -> Tensor:
    """Weighted by the response; zero for a row without any. (..., 1)"""
    total = response.sum(-1, keepdim=True)
    return (response * values).sum(-1, keepdim=True) / where(total != 0, total, 1.0)


_DIFFERENTIABLE = {"tsallis": _tsallis, "norm": _norm, "budget": _budget, "fused": _fused}


def _empty_like(rows: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(rows)


row_weights = register_native(
    _LIBRARY, "row_weights", _weights, _empty_like, gpu="rows:row_weights"
)
row_weights_backward = register_native(
    _LIBRARY,
    "row_weights_backward",
    _weights_backward,
    _empty_like,
    gpu="rows:row_weights_backward",
)
row_offsets = register_native(
    _LIBRARY,
    "row_offsets",
    _offsets,
    lambda scores, eps: scores.new_empty((scores.shape[0], 2), dtype=torch.float64),
    gpu="rows:row_offsets",
)
torch.library.register_autograd("fenchel::row_weights", _backward, setup_context=_save)
