"""Swap the attention of any model without touching its code."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fenchel.attention.call import check_regularizer
from fenchel.attention.front import attention
from fenchel.regularizers.contract import Regularizer


class replace_sdpa(TorchFunctionMode):
    """Inside the block, every `scaled_dot_product_attention` uses this regulariser.

    >>> with fl.replace_sdpa(fl.Tsallis(1.5)):
    ...     model(x)

    Modules that choose a fused operator of their own instead (`torch.nn.TransformerEncoderLayer`
    in inference) are not reached; `fenchel.nn.convert` swaps those.
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
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(self.regularizer, *args, **(kwargs or {}))


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
