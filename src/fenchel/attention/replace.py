"""Swap the attention of any model without touching its code."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fenchel.attention.call import check_regularizer
from fenchel.attention.front import attention
from fenchel.regularizers.contract import Regularizer

# They call attention where no mode sees it: an error is better than softmax in silence.
_OUT_OF_REACH = (
    multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)


class replace_sdpa(TorchFunctionMode):
    """Inside the block, every `scaled_dot_product_attention` uses this regulariser.

    >>> with fl.replace_sdpa(fl.Tsallis(1.5)):
    ...     model(x)

    `torch.nn.MultiheadAttention` and layers built on it raise: `fenchel.nn.convert` swaps those.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        super().__init__()
        check_regularizer(regularizer)
        self.regularizer = regularizer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return _attend(self.regularizer, *args, **(kwargs or {}))
        if func in _OUT_OF_REACH:
            raise RuntimeError(
                "torch.nn.MultiheadAttention keeps its attention out of replace_sdpa's reach; "
                "convert the model with fenchel.nn.convert(model, regularizer)"
            )
        return func(*args, **(kwargs or {}))


def _attend(
    regularizer: Regularizer,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Torch's order of arguments."""
    return attention(
        query,
        key,
        value,
        regularizer,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
