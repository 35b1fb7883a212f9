"""One call of a transformers attention function, in the words of `fenchel.attention`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel._attention.cache import KeyValueCache
from fenchel._attention.call import Options
from fenchel._attention.decode import attend_cached
from fenchel._attention.dense import FEW
from fenchel._attention.front import attention, attention_with_weights
from fenchel.hf import trial
from fenchel.hf.cache import cache_of
from fenchel.hf.held import REGULARIZER_ATTRIBUTE
from fenchel.hf.library import active_collector
from fenchel.hf.masks import StructuredMask, within_sequences, written_out
from fenchel.hf.parallel import regularizer_here
from fenchel.priors.contract import Prior
from fenchel.priors.kinds import Causal, Sink
from fenchel.regularizers.budget import Budget
from fenchel.regularizers.contract import Regularizer

# Arguments that change attention and that `fenchel.attention` cannot express.
_REFUSED = {
    "cache": "is a paged cache",
    "head_mask": "rescales heads",
}

# What the attention functions of transformers take besides, and what says nothing here: positions
# are in the queries, keys and mask by now, and lengths of packed sequences are said twice.
_PASSENGERS = frozenset(
    {
        "attention_mask",
        "deterministic",
        "dropout",
        "key",
        "kwargs",
        "max_length_k",
        "max_length_q",
        "module",
        "output_attentions",
        "position_ids",
        "query",
        "scaling",
        "seq_idx",
        "use_cache",
        "value",
    }
)


# Those of ours that do change it.
_MATTERS = frozenset(
    {
        "block_indices",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "indices",
        "position_bias",
        "s_aux",
        "sliding_window",
        "softcap",
    }
)


class Unsupported(ValueError):
    """A model asks for what fenchel's attention cannot do."""


@dataclass(frozen=True, eq=False)
class TranslatedAttention:
    """sum_j p_j value_j for each query, in the signature of transformers' attention functions.

    >>> TranslatedAttention(Tsallis(1.5))(module, query, key, value, None, scaling=0.125)

    query: (batch, head, query, d); key, value: (batch, kv_head, key, d).
    attention_mask: (batch, 1 or head, query, key); bool or whole numbers: True = attend; float:
        added to the scores. None: everything, or the past where the module says `is_causal`.
    position_bias: added to the scores, as T5 does.
    sliding_window: already in the mask; a call that lost the mask is refused.
    softcap: squeezes the scores, as in Gemma 2.
    s_aux: logits of a null key, one per head, as in gpt-oss.
    indices, block_indices: the keys, or blocks of them, that an indexer chose for each query.
    cu_seq_lens_q: where the sequences of a packed row begin and end; the mask may say it as well.

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
        scaling: float | Tensor | None = None,
        dropout: float = 0.0,
        **said: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = cache_of(key, value) if query.shape[2] == 1 else None
        if cache is None or attention_mask is not None or dropout != 0 or _wants_weights(said):
            return self._attend(module, query, key, value, attention_mask, scaling, dropout, **said)
        question = _Question(self.regularizer, module, scaling, _names(said))
        output = question.repeat(query, cache)
        if output is not None:
            return output.transpose(1, 2), None
        answer = self._attend(module, query, key, value, None, scaling, dropout, **said)
        if question.is_plain:
            cache.asked = question
        return answer

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | Tensor | None,
        dropout: float,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        indices: Tensor | None = None,
        block_indices: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        _check_options(module, options)
        _check_mask(module, attention_mask, sliding_window, key.shape[2])
        if isinstance(scaling, Tensor):  # which may train
            query, scaling = query * scaling, 1.0
        causal = means_causal(module, is_causal, attention_mask, query)
        first_sees_one = is_causal_call(causal, attention_mask)
        if first_sees_one:
            check_budget(self.regularizer)
        if trial.is_running():
            trial.record(module, causal=first_sees_one, by_flag=causal)
            rows = max(query.shape[0], key.shape[0])  # one query for all, in Q-Formers
            shape = (rows, query.shape[2], query.shape[1], value.shape[3])
            return value.new_zeros(shape), None
        ends = cu_seq_lens_q, cu_seq_lens_k
        attention_mask = within_sequences(attention_mask, *ends, query, key)
        if block_indices is not None:
            attention_mask = _block_mask(module, block_indices, attention_mask, query, key, options)
        if indices is not None:
            attention_mask = _with_chosen(indices, attention_mask, key)
        call = _Call(
            query, key, value, attention_mask, position_bias, causal, scaling, softcap, s_aux
        )
        regularizer = regularizer_here(self.regularizer, module, query, value)
        if _wants_weights(options):
            output, weights = call.attend_densely(regularizer, dropout)
            return output.transpose(1, 2).contiguous(), weights
        return call.attend(regularizer, dropout).transpose(1, 2).contiguous(), None


def _names(said: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in said.items() if value is not None)


class _Question(NamedTuple):
    """What a layer asks of its cache for each token, beside the query."""

    regularizer: Regularizer | nn.Module
    module: nn.Module
    scaling: float | Tensor | None
    said: tuple[str, ...]  # arguments of its call that are not None

    @property
    def is_plain(self) -> bool:
        """Nothing in it changes attention: of one query the causal flag says nothing."""
        return not isinstance(self.scaling, Tensor) and not _MATTERS.intersection(self.said)

    def repeat(self, query: Tensor, cache: KeyValueCache) -> Tensor | None:
        """The answer, where it was the last question, too."""
        last, scaling = cache.asked, self.scaling
        if not isinstance(last, _Question) or cache._step is None or isinstance(scaling, Tensor):
            return None
        same = last.regularizer is self.regularizer and last.module is self.module
        if not same or last.scaling != scaling or last.said != self.said:
            return None
        return cache._step.repeat(query, cache, self.regularizer, scaling, None)


class _Call(NamedTuple):
    """One attention: operands (batch, head, token, d), and what is said about them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    position_bias: Tensor | None
    causal: bool
    scaling: float | None
    softcap: float | None
    sink: Tensor | None  # logits, (head,)

    def attend(self, regularizer: Regularizer | nn.Module, dropout: float) -> Tensor:
        """(batch, head, query, d)"""
        options = self._options(dropout)
        cache = cache_of(self.key, self.value)
        trains = self.query.requires_grad and torch.is_grad_enabled()
        if cache is not None and dropout == 0 and not trains and self.query.shape[2] <= FEW:
            return attend_cached(self.query, cache, regularizer, options)
        return attention(self.query, self.key, self.value, regularizer, **options._asdict())

    def attend_densely(
        self, regularizer: Regularizer | nn.Module, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """The same through its weights (batch, head, query, key), for calls that want to see them.
        What a sink gets is left out of the weights."""
        operands = self.query, self.key, self.value
        return attention_with_weights(*operands, regularizer, self._options(dropout))

    def _options(self, dropout: float) -> Options:
        """In the words of `fenchel.attention`: a mask that is a prior stays one."""
        visible: Tensor | Prior | None
        if isinstance(self.mask, StructuredMask):
            visible, bias = self.mask.visible, self.position_bias
        else:
            visible, bias = split_mask(self.mask, self.position_bias)
        causal = self.causal
        if isinstance(visible, Causal) and visible.offset == 0:  # the words of torch
            visible, causal = None, True
        added: Tensor | Prior | None = bias
        if self.sink is not None:
            added = Sink(self.sink.to(self.query.dtype))
            visible = visible if bias is None else _as_mask(bias)
        elif bias is None and isinstance(visible, Tensor):
            visible, added = None, visible
        return Options(
            base=visible,
            attn_mask=added,
            is_causal=causal,
            scale=self.scaling,
            dropout_p=dropout,
            enable_gqa=bool(self.key.shape[1] != self.query.shape[1]),  # a tracer has a tensor
            softcap=self.softcap,
        )


def _as_mask(bias: Tensor) -> Tensor:
    """A float mask that only hides, as transformers writes them, in bool: beside a sink there is no
    room for numbers."""
    visible = bias > -math.inf
    if bool((visible & (bias != 0)).any()):
        raise ValueError("an attention sink beside scores that a mask changes is not taken")
    return visible


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
    """(which keys may be seen, what is added to the scores). Whole numbers are 1 for a visible key.

    transformers writes "forbidden" into float masks as the smallest number of the dtype, which
    still leaves a key its weight where all are forbidden or where a regulariser must fill a
    budget. Forbidden is forbidden: those become -inf.
    """
    if mask is None:
        return None, bias
    if not mask.is_floating_point():
        return mask.bool(), bias
    added = mask.masked_fill(forbidden(mask), -math.inf)
    return None, added if bias is None else added + bias


def forbidden(mask: Tensor) -> Tensor:
    """Where a float mask says that a key may not be seen."""
    return mask <= torch.finfo(mask.dtype).min / 2


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


def _block_mask(
    module: Any,
    block_indices: Tensor,
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """By the model's own indexer, as it does for eager attention."""
    queries, keys = query.shape[2], key.shape[2]
    places = options.get("position_ids")
    if places is None:
        places = torch.arange(keys - queries, keys, device=key.device)
    places = torch.atleast_2d(places).expand(query.shape[0], -1)
    build: Callable[..., Tensor] = module.indexer.build_block_mask
    return build(block_indices, written_out(mask), keys, query.dtype, query.device, places)


def _with_chosen(indices: Tensor, mask: Tensor | None, key: Tensor) -> Tensor:
    """Of the visible keys only those at `indices` (batch, query, chosen)."""
    shape = (*indices.shape[:2], key.shape[2])
    chosen = torch.zeros(shape, dtype=torch.bool, device=key.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    visible, bias = split_mask(written_out(mask), None)
    if bias is not None:
        return bias.masked_fill(~chosen, -math.inf)
    return chosen if visible is None else visible & chosen


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse what would change attention and cannot be honoured: what is known to, and what the
    model's own attention function reads. Everything else is on its way to somebody else."""
    for name, argument in options.items():
        if argument is None or name in _PASSENGERS:
            continue
        reason = _REFUSED.get(name)
        if reason is None and name in _read_by_eager(type(module).forward):
            reason = "changes the attention of this model"
        if reason is not None:
            raise Unsupported(
                f"{type(module).__name__} passes {name}, which fenchel's attention does not take: "
                f"it {reason}. Keep this model on attn_implementation='eager'"
            )


@cache
def _read_by_eager(forward: Any) -> frozenset[str]:
    """Arguments that the model's own attention function names."""
    scope = getattr(inspect.unwrap(forward), "__globals__", {})
    eager = scope.get("eager_attention_forward")
    return frozenset(inspect.signature(eager).parameters) if eager else frozenset()


def is_causal_call(causal: bool, mask: Tensor | None) -> bool:
    """Whether the first query sees one key."""
    prior = mask.visible if isinstance(mask, StructuredMask) else None
    if not isinstance(prior, Prior):
        return causal
    numbers = prior.structure(1, 1, 0, torch.device("cpu"))
    return causal or (numbers is not None and numbers.highest == 0)


def check_budget(regularizer: Regularizer | nn.Module) -> None:
    """A budget is spent on as many keys at least, and the first tokens of a text see fewer."""
    k = regularizer.k if isinstance(regularizer, Budget) else 1
    if isinstance(k, float | int) and k > 1:
        raise ValueError(
            f"Budget({k:g}) needs as many keys for every query, and the first tokens of a causal "
            "attention see fewer; choose another regulariser"
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
