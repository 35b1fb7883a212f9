"""Swap the attention of any model without touching its code."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fenchel._attention.front import attention
from fenchel._attention.recomputation import Blocks, called_by_a_checkpoint
from fenchel.regularizers.contract import Regularizer, resolve_regularizer

# They call attention where no mode sees it: an error is better than softmax in silence.
_MULTIHEAD = (
    "torch.nn.MultiheadAttention keeps its attention out of replace_sdpa's reach; "
    "convert the model with fenchel.nn.convert(model, regularizer)"
)
_OUT_OF_REACH = {
    multi_head_attention_forward: _MULTIHEAD,
    torch._native_multi_head_attention: _MULTIHEAD,
    torch._transformer_encoder_layer_fwd: _MULTIHEAD,
    checkpoint: (  # which only the compiler shows to a mode
        "torch.compile keeps the function of a checkpoint out of replace_sdpa's reach; compile "
        "that function instead, or convert the model with fenchel.nn.convert or fenchel.hf.convert"
    ),
}

_UNKNOWN_CHECKPOINT = (
    "replace_sdpa does not reach what torch.utils.checkpoint of this version of torch computes "
    "again in the backward pass; enter the block inside the checkpointed function, or convert the "
    "model with fenchel.nn.convert or fenchel.hf.convert"
)

_BLOCKS = Blocks()


class replace_sdpa(TorchFunctionMode):
    """Inside the block, every `scaled_dot_product_attention` uses this regulariser, or the one that
    a module such as `nn.LearnedTsallis` makes at each call.

    >>> with fl.replace_sdpa(fl.Tsallis(1.5)):
    ...     model(x)

    The block holds for the thread that entered it. What `torch.utils.checkpoint` computes again in
    the backward pass keeps the attention of its forward pass, wherever `backward` is called.

    `torch.nn.MultiheadAttention` and layers built on it raise: `fenchel.nn.convert` swaps those.
    """

    def __init__(self, regularizer: Regularizer | Module) -> None:
        super().__init__()
        resolve_regularizer(regularizer)  # refuses at once what is none
        self.regularizer = regularizer

    def __enter__(self) -> replace_sdpa:
        if not torch.compiler.is_compiling():
            _BLOCKS.enter(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling():
            _BLOCKS.leave(self)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _OUT_OF_REACH:
            raise RuntimeError(_OUT_OF_REACH[func])
        ours = func is scaled_dot_product_attention
        if not torch.compiler.is_compiling() and (ours or called_by_a_checkpoint()):
            # Asked by a checkpoint too: what it runs may be compiled, and not ask at all.
            followed = _BLOCKS.follow(self)
            if ours and not followed:
                raise RuntimeError(_UNKNOWN_CHECKPOINT)
        if ours:
            return _attend(self.regularizer, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    regularizer: Regularizer | Module,
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
