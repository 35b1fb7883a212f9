"""Packed sequences: many of them end to end in one tensor, each attending to itself alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.call import AttentionCall, Options, prepare
from fenchel._attention.sparse import (
    CallNumbers,
    against_whole,
    against_whole_on_gpu,
    arguments,
    attend_by_sequence,
    for_gpu,
    run_kernels,
)
from fenchel._kernels.attention_call import Arguments
from fenchel._kernels.route import against_sparse_attention
from fenchel._numerics import check_tensor, readable
from fenchel.priors.contract import Prior, Structure, factors
from fenchel.priors.kinds import KeyPadding
from fenchel.regularizers.contract import Regularizer, resolve_regularizer
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

_SHANNON = Shannon()
_WHOLE = (torch.int32, torch.int64)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None = None,
    regularizer: Regularizer | Module = _SHANNON,
    *,
    base: Prior | None = None,
    attn_mask: Prior | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """`attention` within each of several sequences that lie end to end. (tokens, head, d_value)

    >>> q, k, v = torch.randn(3, 7, 8, 64)                     # 7 tokens, 8 heads
    >>> lengths = torch.tensor([0, 3, 7])                      # sequences of 3 and 4 tokens
    >>> fl.varlen_attention(q, k, v, lengths, regularizer=fl.Tsallis(1.5), is_causal=True)

    The result has the bits of one call per sequence. No padding is computed.

    query: (tokens, head, d); key, value: (tokens, head, d), as in flash-attn and torch's
        `varlen_attn`.
    cu_seq_q: tokens before each sequence, and all of them at the end: (sequences + 1,).
    cu_seq_k: the same for the keys; as the queries if None.
    base, attn_mask: priors, whose positions count within a sequence: query 0 is the first of each.
        `Preference` and `Documents` have one number per token of all sequences.
    Other arguments: as in `attention`.
    """
    options = Options(base, attn_mask, is_causal, scale, dropout_p, enable_gqa, softcap)
    cu_seq_k = cu_seq_q if cu_seq_k is None else cu_seq_k
    return _attend_packed(query, key, value, (cu_seq_q, cu_seq_k), regularizer, options)


def attend_jagged(
    query: Tensor, key: Tensor, value: Tensor, regularizer: Regularizer | Module, options: Options
) -> Tensor:
    """`attention` of jagged nested tensors (batch, head, tokens of each, component)."""
    tensors = (query, key, value)
    if not all(x.is_nested and x.layout == torch.jagged and x.ndim == 4 for x in tensors):
        raise TypeError(
            "nested query, key and value must all be jagged (batch, head, tokens, component), as "
            "torch.nested.nested_tensor(..., layout=torch.jagged).transpose(1, 2) is"
        )
    rows = [x.transpose(1, 2) for x in tensors]
    if any(x.lengths() is not None for x in rows):  # type: ignore[attr-defined]
        raise ValueError(
            "a jagged tensor with holes (torch.nested.narrow) must be made whole first"
        )
    starts: list[Tensor] = [x.offsets() for x in rows]  # type: ignore[attr-defined]
    if not torch.equal(starts[1], starts[2]):
        raise ValueError("key and value must have equally many tokens in every sequence")
    q, k, v = (x.values() for x in rows)
    packed = _attend_packed(q, k, v, (starts[0], starts[1]), regularizer, options)
    jagged: Tensor = torch.nested.nested_tensor_from_jagged(packed, starts[0])
    return jagged.transpose(1, 2)


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq: tuple[Tensor, Tensor],
    regularizer: Regularizer | Module,
    options: Options,
) -> Tensor:
    """(tokens, head, d_value)"""
    _check_packed(query, key, value)
    starts = _starts(cu_seq[0], query, "cu_seq_q"), _starts(cu_seq[1], key, "cu_seq_k")
    if starts[0].shape != starts[1].shape:
        raise ValueError(
            f"cu_seq_q and cu_seq_k must be of equally many sequences, got {len(starts[0]) - 1} "
            f"and {len(starts[1]) - 1}"
        )
    _check_prior(options.base, "base")
    _check_prior(options.attn_mask, "attn_mask")
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    call = prepare(q, k, v, options)
    output = _attend(call, resolve_regularizer(regularizer), starts)
    return output.squeeze(0).transpose(0, 1)


def _check_packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(tensor, name)
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} must have shape (tokens, head, component), got {tuple(tensor.shape)}; "
                "a batch goes to `attention`"
            )


def _check_prior(term: object, name: str) -> None:
    if isinstance(term, Prior) and any(isinstance(x, KeyPadding) for x in factors(term)):
        raise ValueError(
            "the lengths of packed sequences are those of cu_seq_k; leave KeyPadding out"
        )
    if term is not None and not isinstance(term, Prior):
        raise TypeError(
            f"{name} of packed sequences must be a fenchel prior, got {type(term).__name__}; a "
            "tensor over queries and keys goes to `attention`, one sequence at a time"
        )


def on_host(*starts: Tensor) -> bool:
    """Whether they can be read without waiting for a device."""
    return readable(*starts) and all(x.device.type == "cpu" for x in starts)


def _starts(starts: Tensor, tokens: Tensor, name: str) -> Tensor:
    check_tensor(starts, name)
    if starts.ndim != 1 or starts.dtype not in _WHOLE or starts.shape[0] == 0:
        raise TypeError(
            f"{name} must be whole numbers (sequences + 1,), got {starts.dtype} of shape "
            f"{tuple(starts.shape)}"
        )
    if on_host(starts):  # while tracing the operator sees to it; a device reads what is there
        first, last, count = int(starts[0]), int(starts[-1]), tokens.shape[0]
        if (first, last) != (0, count):
            raise ValueError(
                f"{name} must start at 0 and end at the number of tokens, {count}; got {first} and "
                f"{last}"
            )
        if bool((starts.diff() < 0).any()):
            raise ValueError(f"{name} must not decrease, got {starts.tolist()}")
    return starts.to(torch.int64)


def _attend(call: AttentionCall, regularizer: Regularizer, starts: tuple[Tensor, Tensor]) -> Tensor:
    """(1, head, tokens, d_value)"""
    numbers = _PackedNumbers(call, starts)
    if not numbers.complete:
        raise ValueError(
            "packed sequences take priors that numbers describe, and documents that stand "
            "together; call `attention` for each sequence"
        )
    if starts[0].shape[0] == 1:  # no sequence: still a function of its operands
        return (call.query.sum() + call.value.sum()) * call.query.new_zeros(
            (*call.query.shape[:3], call.value.shape[3])
        )
    tsallis = _as_tsallis(regularizer)
    if tsallis is not None:
        on_gpu = against_whole_on_gpu(numbers, tsallis) is None
        if on_gpu or _against(numbers, tsallis) is None:
            x = numbers.pack(arguments(numbers, tsallis))
            return run_kernels(for_gpu(x, tsallis) if on_gpu else x).to(call.query.dtype)
    if not readable(*starts):
        raise NotImplementedError(
            "packed sequences are traced where the native kernels compute them (Shannon, Tsallis, "
            "on the CPU); otherwise call `varlen_attention` outside of the traced function"
        )
    x = numbers.pack(arguments(numbers, Tsallis(2.0)))  # for its masks, biases and masses
    return attend_by_sequence(x, regularizer, call.scale, call.softcap)


def _as_tsallis(regularizer: Regularizer) -> Tsallis | None:
    """What the kernels can compute."""
    if regularizer.maximizer is Shannon:
        return Tsallis(1.0, temperature=regularizer.temperature)  # type: ignore[attr-defined]
    return regularizer if regularizer.maximizer is Tsallis else None  # type: ignore[return-value]


def _against(numbers: CallNumbers, regularizer: Tsallis) -> str | None:
    call = numbers.call
    reason = against_sparse_attention(call.query, call.key, call.value, None)
    return reason or against_whole(numbers, regularizer)


class _PackedNumbers(CallNumbers):
    """Positions count within a sequence; what belongs to a token, among all tokens."""

    def __init__(self, call: AttentionCall, starts: tuple[Tensor, Tensor]) -> None:
        self.starts = starts
        self.lengths = starts[0].diff(), starts[1].diff()
        if on_host(*starts):
            longest = [int(x.max()) if len(x) else 0 for x in self.lengths]
        else:  # all tokens may be of one sequence
            longest = list(call.scores_shape[2:])
        self.longest_query, self.longest_key = longest
        super().__init__(call)

    def _numbers(self, term: Tensor | Prior | None) -> Structure | None:
        if not isinstance(term, Prior):
            return None
        device = self.call.query.device
        queries, keys = self.call.scores_shape[2:]
        near = term.structure(self.longest_query, self.longest_key, 0, device)
        tokens = term.structure(queries, keys, 0, device)
        if near is None or tokens is None:
            return None
        before = torch.repeat_interleave(  # keys of earlier sequences, for each query
            self.starts[1][:-1], self.lengths[0], output_size=queries
        )
        start, stop = (None if x is None else x - before for x in (tokens.start, tokens.stop))
        return replace(near, start=start, stop=stop, of_key=tokens.of_key)

    def seen_surely(self) -> Structure | None:
        """Of sequences that attend to themselves."""
        seen = self.seen()
        fixed = seen.start is not None or seen.stop is not None
        if fixed or not readable(*self.starts) or not torch.equal(*self.starts):
            return None
        return seen

    def pack(self, x: Arguments) -> Arguments:
        """The same call for the kernels of packed sequences."""
        return x._replace(
            query_start=self.starts[0],
            key_start=self.starts[1],
            longest_query=self.longest_query,
            longest_key=self.longest_key,
            queries=x.query.shape[2],
        )
