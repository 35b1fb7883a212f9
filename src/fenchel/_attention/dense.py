"""Softmax attention: torch's own `scaled_dot_product_attention`, the base measure as a bias.

Torch's fused CPU operator has a first derivative only, and none in a float mask. Whatever it
cannot do goes through the tiles; second derivatives are taken there too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel._attention.call import AttentionCall, rounded_base, unexpand
from fenchel._attention.sparse import (
    NATIVE_PATH,
    CallNumbers,
    against_whole,
    attend_structured,
)
from fenchel._attention.tiled import TILES, by_tiles, tiled
from fenchel._kernels.route import Path, Reason, against_sdpa, against_sparse_attention
from fenchel._numerics import traced, where
from fenchel._unchanged import Unchanged
from fenchel.priors.contract import Prior
from fenchel.priors.measure import resolve
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis


def softmax_paths(call: AttentionCall, regularizer: Shannon) -> list[Path]:
    """The fastest first."""
    rounded = rounded_base(call)
    structured = _StructuredSoftmax(rounded, regularizer)
    return [
        Path(NATIVE_PATH, structured.against, structured.attend),
        Path(
            "torch's fused attention",
            lambda: _against(rounded, regularizer),
            partial(_attend, rounded, regularizer),
        ),
        Path(TILES, lambda: None, partial(tiled, call, regularizer)),
    ]


class _StructuredSoftmax:
    """Softmax in our own kernels, where torch's would need every bias written out."""

    def __init__(self, call: AttentionCall, regularizer: Shannon) -> None:
        # For softmax a base is a bias: one prior, added after the temperature.
        self.numbers = CallNumbers(call)
        self.regularizer = regularizer

    def against(self) -> Reason:
        call, temperature = self.numbers.call, self.regularizer.temperature
        few = is_decoding(call.query, call.key, call.value)
        if not call.priors and not call.softcap and not few:
            return "torch's attention is made for softmax without structure"
        if isinstance(call.base, Tensor) and call.base.dtype != torch.bool:
            return "a base that is a tensor becomes a bias of torch's attention"
        if isinstance(temperature, Tensor):
            return "one temperature per row is divided by in torch's operations"
        reason = against_sparse_attention(call.query, call.key, call.value, None)
        return reason or against_whole(self.numbers, Tsallis(1.0))

    def attend(self) -> Tensor:
        return attend_structured(self.numbers, as_tsallis(self.regularizer))


def as_tsallis(regularizer: Tsallis | Shannon) -> Tsallis:
    """The same in the words of the fused kernels."""
    if isinstance(regularizer, Tsallis):
        return regularizer
    return Tsallis(1.0, temperature=regularizer.temperature)


FEW = 16  # queries that share one reading of the keys: kFew of native/problem.h


def is_decoding(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Few queries and no derivative: heads that share keys read them once in our kernels, and for
    each of them in torch's. What is compiled or traced serves all lengths, and is not asked."""
    if torch.compiler.is_compiling() or traced():
        return False
    trains = query.requires_grad or key.requires_grad or value.requires_grad
    return query.shape[-2] <= FEW and not (trains and torch.is_grad_enabled())


def _against(call: AttentionCall, regularizer: Shannon) -> Reason:
    if call.softcap or any(prior.sink is not None for prior in call.priors):
        return "torch's attention has neither softcap nor sink"
    if isinstance(call.bias, Prior):
        return "a prior as attn_mask is added in blocks of torch's operations"
    trains = None
    if isinstance(call.base, Prior):
        sizes = (min(1, n) for n in call.scores_shape[2:])  # there may be no key to ask about
        row, key = (torch.arange(size, device=call.query.device) for size in sizes)
        trains = call.base.log_mass(row, key).requires_grad
    return against_sdpa(
        (call.query, call.key, call.value),
        bias=call.bias,
        base=unexpand(call.base) if isinstance(call.base, Tensor) else None,
        prior_trains=trains,
        dropout=call.seed is not None,
        temperature=regularizer.temperature,
    )


def _attend(call: AttentionCall, regularizer: Shannon) -> Tensor:
    """(batch, head, query, d_value)."""
    operands = (call.query, call.key, call.value)
    follows = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if torch.compiler.is_compiling() or traced() or not follows:
        return _attend_fused(call, regularizer)
    output: Tensor = _Fused.apply(call, regularizer, *operands)  # type: ignore[no-untyped-call]
    return output


def _attend_fused(call: AttentionCall, regularizer: Shannon) -> Tensor:
    simple = call.bias is None and call.base is None
    if simple and not (call.causal and call.mask is not None):
        return _sdpa(call, regularizer, call.mask, call.causal)
    return by_tiles(call, regularizer, _attend_biased)


def _attend_biased(call: AttentionCall, regularizer: Shannon) -> Tensor:
    """A tile with everything that is not the product put into one additive mask."""
    bias = call.query.new_zeros(())
    if call.bias is not None:
        assert isinstance(call.bias, Tensor)  # priors take another path
        scaled = call.bias.to(bias.dtype) / regularizer.temperature
        lowest = torch.finfo(bias.dtype).min  # finite scores stay finite: -inf alone hides
        bias = bias + torch.where(call.bias > -torch.inf, scaled.clamp(min=lowest), scaled)
    if call.base is not None:
        bias = bias + _log_mass(call).reshape(call.scores_shape)
    hidden = call.hidden()
    if hidden is not None:
        bias = where(~hidden, bias, -torch.inf)
    return _sdpa(call, regularizer, bias.expand(call.scores_shape), False)


def _log_mass(call: AttentionCall) -> Tensor:
    base = call.restore(call.base) if isinstance(call.base, Tensor) else call.base
    shape = torch.Size((*call.lead, *call.scores_shape[2:]))
    measure = resolve(base, shape, call.query)
    log_mass = measure.log()
    if log_mass is None:  # a mask
        return where(measure.allowed, call.query.new_zeros(()), -torch.inf)
    return log_mass


def _sdpa(call: AttentionCall, regularizer: Shannon, mask: Tensor | None, causal: bool) -> Tensor:
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
    with torch._C.DisableTorchFunction():  # this softmax is meant, also inside `replace_sdpa`
        output: Tensor = torch.ops.aten.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else unexpand(mask),
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output[..., : call.value.shape[3]]


class _Fused(torch.autograd.Function):
    """Torch's operator with its own derivative; a derivative of that is taken through the tiles."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, regularizer: Shannon, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        nothing = call.query.new_empty(0)  # autograd alone keeps the operands, and frees them
        ctx.call = replace(call, query=nothing, key=nothing, value=nothing)
        ctx.regularizer = regularizer
        ctx.unchanged = Unchanged(
            mask=call.mask, bias=call.bias, base=call.base, regularizer=regularizer
        )
        with torch.enable_grad():
            ctx.inputs = [operand.detach().requires_grad_() for operand in operands]
            query, key, value = ctx.inputs
            ctx.output = _attend_fused(
                replace(call, query=query, key=key, value=value), regularizer
            )
        output: Tensor = ctx.output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors  # raises where the graph was freed
        if not torch.is_grad_enabled():
            kept = torch._C._autograd._get_current_graph_task_keep_graph()
            gradients = torch.autograd.grad(ctx.output, ctx.inputs, gradient, retain_graph=kept)
            if not kept:
                ctx.output = ctx.inputs = None
            return None, None, *gradients
        ctx.unchanged.check()
        call = replace(ctx.call, query=query, key=key, value=value)
        output = tiled(call, ctx.regularizer)
        operands = ctx.saved_tensors
        leaves = [x for x in operands if x.requires_grad]
        slopes = iter(torch.autograd.grad(output, leaves, gradient, create_graph=True))
        return None, None, *(next(slopes) if x.requires_grad else None for x in operands)
