"""Multi-head attention: torch's module, with the regulariser as a choice."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn import functional as F
from torch.nn.init import xavier_normal_, xavier_uniform_, zeros_

from fenchel._attention.call import Options
from fenchel._attention.front import attention, attention_with_weights
from fenchel._numerics import check_tensor, check_whole
from fenchel.nn.heads import join_heads, split_heads
from fenchel.nn.masks import lay_out_attn_mask, lay_out_padding, merge_masks
from fenchel.nn.regularizer import as_module
from fenchel.regularizers.contract import Regularizer
from fenchel.regularizers.shannon import Shannon

_SHANNON = Shannon()


class MultiheadAttention(Module):
    """concat_h(E_p[values_h]) W + b, with p = argmax_p <scores_h, p> - Omega(p) in every head h.

    >>> layer = fl.nn.MultiheadAttention(64, 8, batch_first=True, regularizer=fl.Tsallis(1.5))
    >>> output, weights = layer(x, x, x)       # x: (batch, token, 64); weights have exact zeros

    Arguments, masks, parameters and state dict are those of `torch.nn.MultiheadAttention`, which
    computes `Shannon()`. What differs: a query that may see no key gets zeros (then the output
    projection), not NaN; bool and float masks may be mixed; nested tensors are refused.

    embed_dim, num_heads: width of the model, and into how many heads it is cut.
    dropout: share of weights set to zero in training.
    bias: whether projections have one.
    add_bias_kv, add_zero_attn: append a learned key and value, or zeros, that all queries see.
    kdim, vdim: widths of key and value; embed_dim if None.
    batch_first: tensors are (batch, token, width); otherwise (token, batch, width).
    regularizer: a `Regularizer`, whose Parameters become the module's, or a module whose
        `forward()` returns one, such as `LearnedTsallis(num_heads)`. It is moved to `device`.
    """

    # Torch's encoder layer asks this before it puts a fused softmax in our place: never.
    _qkv_same_embed_dim: ClassVar[bool] = False

    in_proj_weight: Parameter | None
    q_proj_weight: Parameter | None
    k_proj_weight: Parameter | None
    v_proj_weight: Parameter | None
    in_proj_bias: Parameter | None
    bias_k: Parameter | None
    bias_v: Parameter | None
    out_proj: Linear
    regularizer: Module  # calling it gives the Regularizer in use

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        regularizer: Regularizer | Module = _SHANNON,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        _check_sizes((embed_dim, self.kdim, self.vdim), num_heads, dropout)
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self._make_parameters(bias, add_bias_kv, {"device": device, "dtype": dtype})
        self._reset_parameters()
        self.hold(regularizer)

    def hold(self, regularizer: Regularizer | Module) -> None:
        """Use this regulariser from now on."""
        self.regularizer = as_module(regularizer).to(self.out_proj.weight.device)
        self.regularizer.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights): the shape of query, and (batch, query, key) or None.

        query: (token, batch, embed_dim), (batch, token, embed_dim) if batch_first, or unbatched
            (token, embed_dim); key and value likewise, with kdim and vdim.
        key_padding_mask: (batch, key), unbatched (key,): bool with True = **ignored**, or float,
            added to the scores.
        need_weights: return the weights, after dropout; without, they are never stored whole.
        attn_mask: (query, key) or (batch * head, query, key): bool with True = **not allowed**, or
            float, added to the scores.
        average_attn_weights: the mean over heads; otherwise (batch, head, query, key).
        is_causal: a promise that attn_mask, which must be given, is the causal one; it is then
            not read where the promise alone will do.
        """
        _check_operands(self, query, key, value)
        batched = query.ndim == 3
        q, k, v = (self._enter(x, batched) for x in self._project(query, key, value))
        shape = torch.Size((*q.shape[:3], k.shape[2]))  # (batch, head, query, key)
        k, v = self._extend(k, v)
        extra = k.shape[2] - shape[3]
        mask = lay_out_attn_mask(attn_mask, shape)
        padding = lay_out_padding(key_padding_mask, shape, batched)
        _check_promise(is_causal, attn_mask)
        causal = is_causal and padding is None and not extra and not need_weights
        merged = None if causal else merge_masks(mask, padding, q, extra)
        omega, p = self.regularizer(), self._dropout_now
        if need_weights:
            options = Options(attn_mask=merged, dropout_p=p)
            heads, weights = attention_with_weights(q, k, v, omega, options)
            weights = weights.mean(1) if average_attn_weights else weights
            return self._leave(heads, batched), weights if batched else weights.squeeze(0)
        heads = attention(q, k, v, omega, attn_mask=merged, is_causal=causal, dropout_p=p)
        return self._leave(heads, batched), None

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"

    @property
    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def _make_parameters(self, bias: bool, bias_kv: bool, like: dict[str, Any]) -> None:
        width = self.embed_dim

        def parameter(exists: bool, *shape: int) -> Parameter | None:
            return Parameter(torch.empty(shape, **like)) if exists else None

        packed = self.kdim == width and self.vdim == width
        self.register_parameter("in_proj_weight", parameter(packed, 3 * width, width))
        self.register_parameter("q_proj_weight", parameter(not packed, width, width))
        self.register_parameter("k_proj_weight", parameter(not packed, width, self.kdim))
        self.register_parameter("v_proj_weight", parameter(not packed, width, self.vdim))
        self.register_parameter("in_proj_bias", parameter(bias, 3 * width))
        self.out_proj = Linear(width, width, bias=bias, **like)
        self.register_parameter("bias_k", parameter(bias_kv, 1, 1, width))
        self.register_parameter("bias_v", parameter(bias_kv, 1, 1, width))

    def _reset_parameters(self) -> None:
        """In torch's order, so that the same seed gives the same parameters."""
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in weights:
            if weight is not None:
                xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            zeros_(self.in_proj_bias)
            zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                xavier_normal_(extra)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of all heads: (..., embed_dim) each, other axes as given."""
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            together: Tensor = F.linear(query, packed, bias)
            return together.chunk(3, -1)
        if packed is not None:
            weights: tuple[Tensor, ...] = packed.chunk(3)
        else:
            assert self.q_proj_weight is not None
            assert self.k_proj_weight is not None
            assert self.v_proj_weight is not None
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        operands = zip((query, key, value), weights, biases, strict=True)
        return tuple(F.linear(x, weight, b) for x, weight, b in operands)

    def _enter(self, x: Tensor, batched: bool) -> Tensor:
        """The caller's axes -> (batch, head, token, head_dim)."""
        if not batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return split_heads(x, self.num_heads)

    def _leave(self, heads: Tensor, batched: bool) -> Tensor:
        """(batch, head, query, head_dim) -> the caller's axes, through the output projection."""
        output: Tensor = self.out_proj(join_heads(heads))  # (batch, query, width)
        if not batched:
            return output.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1)

    def _extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values that every query sees."""
        if self.bias_k is not None and self.bias_v is not None:
            key, value = self._append(key, self.bias_k), self._append(value, self.bias_v)
        if self.add_zero_attn:
            zero = key.new_zeros(1, 1, self.embed_dim)
            key, value = self._append(key, zero), self._append(value, zero)
        return key, value

    def _append(self, x: Tensor, token: Tensor) -> Tensor:
        """token: (1, 1, embed_dim) -> one more token in every (batch, head, token, head_dim)."""
        by_head = token.to(x.dtype).reshape(1, self.num_heads, 1, self.head_dim)
        return torch.cat([x, by_head.expand(x.shape[0], -1, -1, -1)], 2)


def _check_sizes(widths: tuple[int, int, int], num_heads: int, dropout: float) -> None:
    for name, width in zip(("embed_dim", "kdim", "vdim"), widths, strict=True):
        check_whole(width, name, 1)
    check_whole(num_heads, "num_heads", 1)
    if widths[0] % num_heads:
        raise ValueError(
            f"embed_dim must be divisible by num_heads, got {widths[0]} and {num_heads}"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must lie between 0 and 1, got {dropout}")


def _check_promise(is_causal: bool, attn_mask: Tensor | None) -> None:
    if is_causal and attn_mask is None:
        raise ValueError(
            "is_causal=True promises that attn_mask is causal, but attn_mask is None; pass "
            "torch.nn.Transformer.generate_square_subsequent_mask(tokens) with it"
        )


def _check_operands(layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
        check_tensor(x, name)
        if x.is_nested:
            raise TypeError(
                f"{name} is a nested tensor, which fenchel.nn.MultiheadAttention does not take; "
                "pass a padded one with key_padding_mask. Inside torch.nn.TransformerEncoder set "
                "enable_nested_tensor=False, or let fenchel.nn.convert do it"
            )
        if x.ndim not in (2, 3) or x.ndim != query.ndim:
            raise ValueError(
                "query, key and value must all have three axes (batched) or all two, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if x.shape[-1] != width:
            raise ValueError(f"{name} must have width {width}, got shape {tuple(x.shape)}")
    batch = 0 if layer.batch_first else 1
    if key.shape[:-1] != value.shape[:-1] or (
        query.ndim == 3 and query.shape[batch] != key.shape[batch]
    ):
        raise ValueError(
            "key and value must have the same tokens, and all the same batch; with batch_first="
            f"{layer.batch_first} got query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)}"
        )
