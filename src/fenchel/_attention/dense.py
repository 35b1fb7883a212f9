"""Softmax attention: torch's own `scaled_dot_product_attention`, the base measure as a bias.

Torch's fused CPU operator has a first derivative only, and none in a float mask. Whatever it
cannot do goes through the tiles; second derivatives are taken there too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel._attention.call import Call, finite, rounded_base, stored
from fenchel._attention.tiled import by_tiles, tiled
from fenchel._numerics import has, transformed, where
from fenchel._unchanged import Unchanged
from fenchel.priors import Prior, resolve
from fenchel.regularizers.shannon import Shannon


def softmax_attention(call: Call, regularizer: Shannon) -> Tensor:
    """(batch, head, query, d_value)."""
    given, call = call, rounded_base(call)
    if not _fits(call, regularizer):
        return tiled(given, regularizer)
    if torch.compiler.is_compiling():
        return _fused(call, regularizer)
    operands = (call.query, call.key, call.value)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        output: Tensor = _Fused.apply(call, regularizer, *operands)  # type: ignore[no-untyped-call]
        return output
    return _fused(call, regularizer)


def _fits(call: Call, regularizer: Shannon) -> bool:
    """Torch's operator can do it: first derivatives in query, key and value only, no dropout
    (which it does on the whole n x n matrix), biases in full precision."""
    if transformed() or call.seed is not None or isinstance(regularizer.temperature, Tensor):
        return False
    if 0 in call.scores_shape or not finite(call.query, call.key, call.value):
        return False  # torch lets NaN on hidden keys reach every query, and loses that of a query
    if call.base is not None and call.query.dtype in (torch.float16, torch.bfloat16):
        return False
    if call.bias is not None and (call.bias.requires_grad or call.bias.dtype != call.query.dtype):
        return False
    if isinstance(call.base, Prior):
        one = torch.arange(1, device=call.query.device)
        return not call.base.log_mass(one, one).requires_grad
    return call.base is None or _is_mask_or_mass(call.base, call.query.dtype)


def _is_mask_or_mass(base: Tensor, dtype: torch.dtype) -> bool:
    """A measure whose logarithm this precision holds, without a derivative."""
    if base.dtype == torch.bool:
        return True
    base = stored(base)
    strange = base.requires_grad or base.dtype != dtype
    return not strange and not has(~((base >= 0) & (base < torch.inf)))


def _fused(call: Call, regularizer: Shannon) -> Tensor:
    simple = call.bias is None and call.base is None
    if simple and not (call.causal and call.mask is not None):
        return _sdpa(call, regularizer, call.mask, call.causal)
    return by_tiles(call, regularizer, _biased)


def _biased(call: Call, regularizer: Shannon) -> Tensor:
    """A tile with everything that is not the product put into one additive mask."""
    bias = call.query.new_zeros(())
    if call.bias is not None:
        bias = bias + call.bias.to(bias.dtype) / regularizer.temperature
    if call.base is not None:
        bias = bias + _log_mass(call).reshape(call.scores_shape)
    hidden = call.hidden()
    if hidden is not None:
        bias = where(~hidden, bias, -torch.inf)
    return _sdpa(call, regularizer, bias.expand(call.scores_shape), False)


def _log_mass(call: Call) -> Tensor:
    base = call.restore(call.base) if isinstance(call.base, Tensor) else call.base
    shape = torch.Size((*call.lead, *call.scores_shape[2:]))
    measure = resolve(base, shape, call.query)
    log_mass = measure.log()
    if log_mass is None:  # a mask
        return where(measure.allowed, call.query.new_zeros(()), -torch.inf)
    return log_mass


def _sdpa(call: Call, regularizer: Shannon, mask: Tensor | None, causal: bool) -> Tensor:
    assert isinstance(regularizer.temperature, float | int)
    query, key, value = call.query, call.key, call.value
    scale = call.scale / regularizer.temperature
    if scale <= 0:  # with which torch's causal mask makes NaN
        query, scale = query * scale, 1.0
    # Torch's fused operator wants equally many components everywhere; zeros change nothing.
    extra = value.shape[3] - key.shape[3]
    if extra > 0:
        query, key = pad(query, (0, extra)), pad(key, (0, extra))
    elif extra < 0:
        value = pad(value, (0, -extra))
    output: Tensor = torch.ops.aten.scaled_dot_product_attention(  # which `replace_sdpa` lets be
        query,
        key,
        value,
        attn_mask=None if mask is None else stored(mask),
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., : call.value.shape[3]]


class _Fused(torch.autograd.Function):
    """Torch's operator with its own derivative; a derivative of that is taken through the tiles."""

    @staticmethod
    def forward(ctx: Any, call: Call, regularizer: Shannon, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.call, ctx.regularizer = call, regularizer
        rest = {"mask": call.mask, "bias": call.bias, "base": call.base}
        ctx.unchanged = Unchanged(**rest, regularizer=regularizer)
        with torch.enable_grad():
            ctx.inputs = [operand.detach().requires_grad_() for operand in operands]
            query, key, value = ctx.inputs
            ctx.output = _fused(replace(call, query=query, key=key, value=value), regularizer)
        output: Tensor = ctx.output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            gradients = torch.autograd.grad(ctx.output, ctx.inputs, gradient, retain_graph=True)
            return None, None, *gradients
        query, key, value = ctx.saved_tensors
        ctx.unchanged.check()
        call = replace(ctx.call, query=query, key=key, value=value)
        output = tiled(call, ctx.regularizer)
        wanted = [x for x in ctx.saved_tensors if x.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
        return None, None, *(next(found) if x.requires_grad else None for x in ctx.saved_tensors)
