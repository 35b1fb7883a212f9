"""`torch.nn.attention.flex_attention` with any regulariser, by tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, noop_mask

from fenchel._attention.call import Options, prepare
from fenchel._attention.tiled import tiled
from fenchel._numerics import where
from fenchel.regularizers.contract import Regularizer, resolve_regularizer

_STATISTICS = (
    "flex_attention inside replace_sdpa returns its output alone: the logarithm of a sum of "
    "exponentials and the largest score belong to softmax; leave out return_lse and return_aux"
)
_BARE_BLOCKS = (
    "replace_sdpa reads the mask_mod of a BlockMask, and this one has none; give it one, or leave "
    "out block_mask if every key is seen"
)
_WHOLE = 1 << 30  # the block size of the mask that torch makes where none is given


def flex_attention(
    regularizer: Regularizer | torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of the operator that torch's function calls. Its options say how a kernel runs."""
    asked = kernel_options.get("OUTPUT_LOGSUMEXP") and query.device.type == "cpu"
    if asked or kernel_options.get("OUTPUT_MAX"):
        raise NotImplementedError(_STATISTICS)
    mask_mod = block_mask[-1]
    if mask_mod is noop_mask and block_mask[-3] < _WHOLE:
        raise NotImplementedError(_BARE_BLOCKS)
    seen = _vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(mask_buffers))
    change = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_buffers))

    def modify(scores: Tensor, first: int) -> Tensor:
        batch, heads, rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape)
        places = (batch, heads, rows + first, keys)
        with TransformGetItemToIndex():
            visible = seen(*places, *mask_buffers)
            return where(visible, change(scores, *places, *score_buffers), -torch.inf)

    grouped = query.shape[1] != key.shape[1]
    call = prepare(query, key, value, Options(scale=scale, enable_gqa=grouped))
    output = call.restore(tiled(replace(call, modify=modify), resolve_regularizer(regularizer)))
    nothing = output.new_full(output.shape[:-1], torch.nan)  # not known here whether it is asked
    return output, nothing, nothing
