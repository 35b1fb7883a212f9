"""Swap the attention of any model without touching its code."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fenchel._attention.front import attention
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

_CHECKPOINT = (
    "torch.utils.checkpoint, or another autograd.Function that began inside replace_sdpa, may "
    "compute attention again in the backward pass, where the block does not hold; enter the block "
    "inside the checkpointed function, or pass checkpoint(..., use_reentrant=False, "
    "context_fn=lambda: (fenchel.replace_sdpa(r), fenchel.replace_sdpa(r))), or convert the model "
    "with fenchel.nn.convert or fenchel.hf.convert"
)


class replace_sdpa(TorchFunctionMode):
    """Inside the block, every `scaled_dot_product_attention` uses this regulariser, or the one that
    a module such as `nn.LearnedTsallis` makes at each call.

    >>> with fl.replace_sdpa(fl.Tsallis(1.5)):
    ...     model(x)

    The block holds for the thread that entered it, and not in the backward pass: attention inside a
    checkpoint that began in the block raises. Enter the block in the checkpointed function instead.

    `torch.nn.MultiheadAttention` and layers built on it raise: `fenchel.nn.convert` swaps those.
    """

    def __init__(self, regularizer: Regularizer | Module) -> None:
        super().__init__()
        resolve_regularizer(regularizer)  # refuses at once what is none
        self.regularizer = regularizer
        self._outer: list[_Surroundings] = []  # of each time that the block was entered

    def __enter__(self) -> replace_sdpa:
        self._outer.append(_surroundings())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._outer.pop()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _OUT_OF_REACH:
            raise RuntimeError(_OUT_OF_REACH[func])
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        _refuse_checkpoints_since(*self._outer[-1])
        return _attend(self.regularizer, *args, **(kwargs or {}))


# Grad mode; whether an autograd.Function runs its forward pass; the hooks of checkpoints.
_Surroundings = tuple[bool, bool, tuple[int, ...]]


def _surroundings() -> _Surroundings:
    """What a checkpoint changes around the function that it runs.

    The reentrant kind is an autograd.Function, which switches forward mode off; the other kind
    keeps tensors by a hook of its own.
    """
    in_function = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
    return torch.is_grad_enabled(), in_function, _checkpoint_hooks()


def _checkpoint_hooks() -> tuple[int, ...]:
    """Of all hooks for saved tensors, the numbers of those that checkpoints have set."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(hooks):  # there is no way to look below the top
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    return tuple(id(pack) for pack, _ in hooks if pack.__module__ == checkpoint.__module__)


def _refuse_checkpoints_since(followed: bool, in_function: bool, hooks: tuple[int, ...]) -> None:
    """A reentrant checkpoint always, since in its forward pass nobody sees whether a gradient is
    taken; the other kind where one is taken, here or where the block was entered."""
    follows_now, in_function_now, hooks_now = _surroundings()
    began = not set(hooks_now) <= set(hooks) and (followed or follows_now)
    if began or in_function_now > in_function:
        raise RuntimeError(_CHECKPOINT)


# The compiler runs them while it traces, as it does `_against_library` in `_kernels/route.py`.
_surroundings._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_checkpoints_since._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
