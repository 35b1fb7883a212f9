"""One call of a transformers attention function, in the words of `fenchel.attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fenchel._attention import attention
from fenchel._numerics import compute_dtype, full_precision
from fenchel._solve import solve
from fenchel.hf.library import active_collector
from fenchel.regularizers.contract import Regularizer
from fenchel.scores import scaled_dot

# Arguments that change attention and that `fenchel.attention` cannot express.
_REFUSED = {
    "softcap": "squeezes scores by tanh before they are compared",
    "s_aux": "adds an attention sink, a score without a key",
    "sinks": "adds an attention sink, a score without a key",
    "indices": "chooses keys by index",
    "block_indices": "chooses blocks of keys by index",
    "head_mask": "rescales heads",
    "cache": "is a paged cache",
    "cu_seq_lens_q": "packs several sequences into one; pass position_ids alone",
    "cu_seq_lens_k": "packs several sequences into one; pass position_ids alone",
    "max_length_q": "packs several sequences into one; pass position_ids alone",
    "max_length_k": "packs several sequences into one; pass position_ids alone",
    "seq_idx": "packs several sequences into one; pass position_ids alone",
}

# Arguments that models hand through and that say nothing about who attends to whom: positions are
# in the queries, keys and mask by now, the rest concerns what is recorded or counted.
_PASSENGERS = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_hidden_states",
        "hidden_states",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, eq=False)
class TranslatedAttention:
    """sum_j p_j value_j for each query, in the signature of transformers' attention functions.

    >>> TranslatedAttention(Tsallis(1.5))(module, query, key, value, None, scaling=0.125)

    query: (batch, head, query, d); key, value: (batch, kv_head, key, d).
    attention_mask: (batch, 1 or head, query, key); bool: True = attend; float: added to the scores.
        None: everything, or the past where the module says `is_causal`.
    position_bias: added to the scores, as T5 does.
    sliding_window: already in the mask; a call that lost the mask is refused.

    Returns the output (batch, query, head, d) and the weights (batch, head, query, key) if the
    model records attention, else None.
    """

    regularizer: Regularizer | nn.Module

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        _check_options(module, options)
        _check_mask(module, attention_mask, sliding_window, key.shape[2])
        visible, bias = split_mask(attention_mask, position_bias)
        causal = means_causal(module, is_causal, attention_mask, query)
        if _wants_weights(options):
            visible = _with_past(visible, query, key) if causal else visible
            scores = _scores(query, key, bias, scaling)
            heads, weights = self._attend_densely(scores, value, visible, dropout)
            output = heads.to(query.dtype).transpose(1, 2).contiguous()
            return output, weights.to(query.dtype)
        output = attention(
            query,
            key,
            value,
            self.regularizer,
            base=visible if bias is not None else None,
            attn_mask=visible if bias is None else bias,
            is_causal=causal,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return output.transpose(1, 2).contiguous(), None

    def _attend_densely(
        self, scores: Tensor, value: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """The same attention through its weights, for calls that want to see them: both in the
        dtype of the scores (batch, head, query, key)."""
        groups = scores.shape[1] // value.shape[1]
        with full_precision(scores):
            weights = solve(scores, self.regularizer, base=visible).weights
            weights = nn.functional.dropout(weights, dropout)
            return weights @ value.to(scores.dtype).repeat_interleave(groups, 1), weights


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, scaling: float | None) -> Tensor:
    """(batch, head, query, key), in float32 at least; key (batch, kv_head, key, d)"""
    precision = compute_dtype(query.dtype)
    with full_precision(query):
        by_head = key.to(precision).repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = scaled_dot(query.to(precision), by_head, scaling)
        return scores if bias is None else scores + bias.to(precision)


def _with_past(visible: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """And no key after its query."""
    past = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return past if visible is None else visible & past


# The submodule of an attention that `convert` gave it.
REGULARIZER_ATTRIBUTE = "fenchel_regularizer"


class HeldAttention:
    """The same with the regulariser that the calling module holds, asked for at every call."""

    def __call__(
        self, module: nn.Module, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        regularizer = getattr(module, REGULARIZER_ATTRIBUTE, None)
        if regularizer is None:
            raise ValueError(
                f"{type(module).__name__} holds no regulariser; give it one with "
                "fenchel.hf.convert(model, regularizer), then load the state dict"
            )
        return TranslatedAttention(regularizer)(module, *arguments, **options)


def split_mask(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(which keys may be seen, what is added to the scores).

    transformers writes "forbidden" into float masks as the smallest number of the dtype, which
    still leaves a key its weight where all are forbidden or where a regulariser must fill a
    budget. Forbidden is forbidden: those become -inf.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, bias
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    added = mask.masked_fill(forbidden, -math.inf)
    return None, added if bias is None else added + bias


def means_causal(
    module: nn.Module, is_causal: bool | None, mask: Tensor | None, query: Tensor
) -> bool:
    """Whether the absent mask stands for a causal one: transformers leaves it out where a flag
    says as much. A single query comes last and sees all."""
    if mask is not None or query.shape[2] == 1:
        return False
    stated = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if stated is None:
        raise ValueError(
            f"{type(module).__name__} passes no mask and does not say whether it is causal; set "
            "is_causal on the module to True or False"
        )
    return bool(stated)


def _wants_weights(options: dict[str, Any]) -> bool:
    """Whether the model wants the weights of this call."""
    if options.get("output_attentions"):
        return True
    return any(name.endswith("attentions") for name in active_collector.get() or ())


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse what would change attention and cannot be honoured."""
    for name, argument in options.items():
        if argument is None or name in _PASSENGERS:
            continue
        reason = _REFUSED.get(name, "is unknown here, and may change attention")
        raise ValueError(
            f"{type(module).__name__} passes {name}, which fenchel's attention does not take: it "
            f"{reason}. Keep this model on attn_implementation='eager'"
        )


def _check_mask(
    module: nn.Module, mask: Tensor | None, sliding_window: int | None, keys: int
) -> None:
    if mask is None:
        if sliding_window is not None and keys > sliding_window:
            raise ValueError(
                f"{type(module).__name__} asks for a window of {sliding_window} keys and passes "
                f"{keys} without a mask; the mask function of this implementation was not used"
            )
        return
    if mask.ndim != 4:  # two axes would broadcast as (query, key)
        raise ValueError(
            f"attention_mask must have four axes (batch, head, query, key), got shape "
            f"{tuple(mask.shape)} from {type(module).__name__}"
        )
