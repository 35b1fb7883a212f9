"""Masks that are not written out: what transformers says about them in words, in priors.

transformers makes one mask per forward pass from functions such as "causal and within 4,096 keys".
Written out it has one entry for each query and key. The kernels need only the words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fenchel.hf.held import CONFIG_MASKS
from fenchel.hf.library import AttentionMaskInterface, is_tracing, masking_utils
from fenchel.priors.contract import Prior
from fenchel.priors.kinds import Causal, Documents, KeyPadding, SlidingWindow

_FAR = 2**40  # positions ahead: no limit


class StructuredMask(Tensor):
    """A mask (batch, 1, query, key) of which only the description exists.

    Attention reads `visible`. Whoever computes with it as with a tensor, as some models do, gets
    the mask written out, as transformers does for eager attention if its dtype is a float: 0, and
    the smallest number of the dtype where a key is hidden.
    """

    visible: Prior | Tensor | None  # a tensor: bool, True = seen. None: every key is seen
    _write: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        visible: Prior | Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        write: Callable[[], Tensor],
    ) -> StructuredMask:
        place = torch.device(device)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=place)
        mask.visible, mask._write = visible, write
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StructuredMask({self.visible}, shape={tuple(self.shape)})"

    def dense(self) -> Tensor:
        """The mask as an ordinary tensor."""
        return _as_dtype(self._write(), self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SAME or (func is torch.ops.aten.slice.Tensor and _is_whole(*args)):
            mask = args[0]
            return cls(mask.visible, mask.shape, mask.dtype, mask.device, mask._write)
        args, kwargs = tree_map(written_out, (args, kwargs or {}))
        return func(*args, **kwargs)


_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def _is_whole(
    mask: Tensor,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> bool:
    """A slice that leaves nothing out: models cut masks to the number of keys."""
    size = mask.shape[dim]
    return start in (None, 0) and step == 1 and (stop is None or stop >= size)


def written_out(thing: Any) -> Any:
    """A structured mask as an ordinary tensor; anything else as it is."""
    return thing.dense() if isinstance(thing, StructuredMask) else thing


def _as_dtype(visible: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return visible
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, hidden
    )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """In the signature of transformers' mask functions. None: all keys; and while a compiler traces
    the model, which no mask without entries survives, also the past alone."""

    def write(*, skip: bool = False, use_vmap: bool = use_vmap) -> Any:
        return AttentionMaskInterface()["sdpa"](
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=skip and allow_is_causal_skip,
            allow_is_bidirectional_skip=skip and allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **options,
        )

    shape = (batch_size, 1, q_length, kv_length)
    dtype = dtype if getattr(config, CONFIG_MASKS, None) == "eager" else torch.bool
    known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    if not known or is_tracing(attention_mask):
        mask = write(skip=True)
        return None if mask is None else _as_dtype(mask, dtype)
    prior = read_prior(mask_function, q_offset, kv_offset, kv_length)
    if prior is NotImplemented:
        visible = write()
        return StructuredMask(visible, shape, dtype, device, lambda: visible)
    padding = _padding(attention_mask, kv_offset, kv_length)
    if padding is not None:
        prior = _product([padding] if prior is None else [prior, padding])
    else:
        one = q_length == 1 and allow_is_causal_skip and _sees_all(prior, kv_length)
        if one or (prior is None and allow_is_bidirectional_skip):
            return None
    # What is known needs no vmap, which would not run where a tensor writes itself out.
    return StructuredMask(prior, shape, dtype, device, partial(write, use_vmap=False))


def _padding(mask: Tensor | None, kv_offset: int, kv_length: int) -> KeyPadding | None:
    """None: every key is real."""
    if mask is None:
        return None
    whole = masking_utils.prepare_padding_mask(mask, kv_length, kv_offset)
    real = whole[:, kv_offset : kv_offset + kv_length].bool()
    return None if bool(real.all()) else KeyPadding(real[:, None])


def _sees_all(prior: Prior | None, keys: int) -> bool:
    """Whether one query sees every key."""
    if prior is None:
        return True
    numbers = prior.structure(1, keys, 0, torch.device("cpu"))
    if numbers is None or numbers.start is not None:
        return False
    lowest, highest = numbers.lowest, numbers.highest
    return (lowest is None or lowest <= 0) and (highest is None or highest >= keys - 1)


def read_prior(
    function: Callable[..., Any], q_offset: int, kv_offset: int, keys: int
) -> Prior | Any | None:
    """The mask of a function of transformers, as priors; None: it hides nothing. NotImplemented:
    it is of another make, and must be asked about each pair."""
    terms = _terms(function, kv_offset, keys)
    if terms is None:
        return NotImplemented
    offset = q_offset - kv_offset
    causal = any(type(term) is Causal for term in terms)
    others = [term for term in terms if type(term) is not Causal]
    if offset != 0 and not causal and others:
        return NotImplemented  # an offset is Causal's to say
    factors: list[Prior] = [Causal(offset)] if causal else []
    return _product([*factors, *others])


def _product(factors: list[Prior]) -> Prior | None:
    product: Prior | None = None
    for factor in factors:
        product = factor if product is None else product * factor
    return product


def _terms(function: Callable[..., Any], kv_offset: int, keys: int) -> list[Prior] | None:
    """Factors of the mask; None for what is not known."""
    if function is masking_utils.causal_mask_function:
        return [Causal()]
    if function is masking_utils.bidirectional_mask_function:
        return []
    maker = getattr(function, "__qualname__", "").split(".")[0]
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    held = _closure(function)
    if maker == "and_masks":
        parts = [_terms(part, kv_offset, keys) for part in held["mask_functions"]]
        return None if None in parts else [term for part in parts for term in part or ()]
    if held.get("sliding_window", 1) < 1:  # no key at all
        return None
    if maker == "sliding_window_overlay":
        return [SlidingWindow(held["sliding_window"] - 1, right=_FAR)]
    if maker == "sliding_window_bidirectional_overlay":
        return [SlidingWindow(held["sliding_window"])]
    if maker == "packed_sequence_mask_function" and kv_offset == 0:
        ids = held["packed_sequence_mask"]
        return [Documents(ids[:, None])] if ids.shape[-1] == keys else None
    if maker == "chunked_overlay":
        padding = held["left_padding"]
        places = torch.arange(kv_offset, kv_offset + keys, device=padding.device)
        return [Documents(((places - padding[:, None]) // held["chunk_size"])[:, None])]
    return None


def _closure(function: Any) -> dict[str, Any]:
    """What a function of transformers was made with, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def within_sequences(
    mask: Tensor | None,
    cu_seq_q: Tensor | None,
    cu_seq_k: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Tensor | None:
    """The mask, and of several sequences in one row each sees itself. A mask in words may not say
    so: transformers leaves that out where there is a cache. One of numbers is taken as it is."""
    if mask is None:
        return packed_mask(cu_seq_q, cu_seq_k, query, key)
    if not isinstance(mask, StructuredMask) or isinstance(mask.visible, Tensor):
        return mask
    if cu_seq_q is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return mask
    packed = packed_mask(cu_seq_q, cu_seq_k, query, key)
    if packed is None:
        return mask
    prior = _product([each.visible for each in (mask, packed) if isinstance(each.visible, Prior)])

    def write() -> Tensor:
        return mask._write() & packed._write()

    return StructuredMask(prior, tuple(mask.shape), mask.dtype, mask.device, write)


def packed_mask(
    cu_seq_q: Tensor | None, cu_seq_k: Tensor | None, query: Tensor, key: Tensor
) -> StructuredMask | None:
    """Of several sequences in one row: each sees itself. query, key: (1, head, token, d)."""
    if cu_seq_q is None or cu_seq_k is None:
        return None
    queries, keys = query.shape[2], key.shape[2]
    same = cu_seq_q is cu_seq_k or torch.equal(cu_seq_q, cu_seq_k)
    if not same or query.shape[0] != 1 or queries != keys:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must be the same, of one row of tokens; got a batch "
            f"of {query.shape[0]}, {queries} queries and {keys} keys"
        )
    places = torch.arange(keys, device=key.device)
    ids = torch.bucketize(places, cu_seq_q.to(key.device), right=True)
    prior = Documents(ids[None, None])

    def write() -> Tensor:
        return (ids[:, None] == ids)[None, None]

    return StructuredMask(prior, (1, 1, queries, keys), torch.bool, key.device, write)
