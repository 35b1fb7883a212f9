"""transformers' cache on `KeyValueCache`: `generate` decodes by `fenchel.decode`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fenchel._attention.cache import KeyValueCache
from fenchel.hf.library import DynamicCache, DynamicLayer, PreTrainedConfig, PreTrainedModel

_ATTRIBUTE = "_fenchel_cache"


class Cache(DynamicCache):  # type: ignore[misc]
    """Keys and values of a model's past tokens, read by exact sparse decoding.

    >>> model.generate(ids, past_key_values=fenchel.hf.Cache(model))

    `generate` of a converted model makes one by itself. Layers that keep every token are ours;
    layers with a sliding window, linear attention or an indexer stay as transformers has them.
    Attention other than fenchel's sees ordinary tensors.

    model: or its configuration.
    """

    def __init__(self, model: Any) -> None:
        config = model.config if isinstance(model, PreTrainedModel) else model
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"hf.Cache needs a model or its config, got {type(model).__name__}")
        super().__init__(config=config.get_text_config(decoder=True))
        usual: Any = self  # of transformers, which says no types
        usual.layers = [
            CachedLayer() if type(layer) is DynamicLayer else layer for layer in usual.layers
        ]
        if usual.layer_class_to_replicate is DynamicLayer:
            usual.layer_class_to_replicate = CachedLayer

    @property
    def read(self) -> list[Any]:
        """What the last step read in each of our layers: see `KeyValueCache.read`."""
        caches = (layer.cache for layer in self.layers if isinstance(layer, CachedLayer))
        return [cache.read for cache in caches if cache is not None and cache.was_read]


class CachedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: a `KeyValueCache`, or transformers' own way where a gradient or graph is made."""

    cache: KeyValueCache | None = None
    _tensors: tuple[Tensor, Tensor] | None = None  # transformers' own way

    @property
    def keys(self) -> Tensor | None:
        if self._tensors is not None:
            return self._tensors[0]
        return None if self.cache is None else self.cache.key

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._set(0, keys)

    @property
    def values(self) -> Tensor | None:
        if self._tensors is not None:
            return self._tensors[1]
        return None if self.cache is None else self.cache.value

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._set(1, values)

    def _set(self, which: int, tensor: Tensor | None) -> None:
        """Somebody else put a tensor here: it is kept as transformers keeps it."""
        if tensor is None:
            self.cache = self._tensors = None
            return
        pair = [self.keys, self.values]
        pair[which] = tensor
        self._tensors, self.cache = (pair[0], pair[1]), None  # type: ignore[assignment]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if _is_followed(key_states, value_states):
            nothing = torch.tensor([], dtype=self.dtype, device=self.device)
            self._tensors = (nothing, nothing)
            return
        batch, heads, _, d = key_states.shape
        self.cache = KeyValueCache(
            batch, heads, d, value_states.shape[3], dtype=self.dtype, device=self.device
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache is not None and _is_followed(key_states, value_states):
            self._tensors, self.cache = (self.cache.key, self.cache.value), None
        if self.cache is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        cache = self.cache
        cache.append(key_states, value_states)
        cache.compact()  # after a beam search has shared pages
        keys, values = cache.key, cache.value
        changes = cache._table.changes, keys._version, values._version
        setattr(keys, _ATTRIBUTE, (cache, values, changes))
        return keys, values

    def get_seq_length(self) -> int:
        if self.cache is not None:
            return len(self.cache)
        return int(super().get_seq_length())

    def reset(self) -> None:
        self.cache = self._tensors = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if self.cache is None or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        else:
            self.cache.crop(max(0, len(self.cache) + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is None:
            super().reorder_cache(beam_idx)
        else:
            self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is None:
            super().batch_repeat_interleave(repeats)
        else:
            self.cache = self.cache.select(
                torch.arange(self.cache.batch).repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is None:
            super().batch_select_indices(indices)
        else:
            numbers = torch.arange(self.cache.batch)[indices.cpu()]
            self.cache = self.cache.select(numbers)

    def offload(self) -> None:
        """Nothing: a cache on the CPU is where offloading would put it."""

    def prefetch(self) -> None:
        """Nothing, likewise."""


def _is_followed(*tensors: Tensor) -> bool:
    """A gradient or a graph goes through these: only torch's own operations may hold them."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return followed or any(type(tensor) is not Tensor for tensor in tensors)


def cache_of(keys: Tensor, values: Tensor) -> KeyValueCache | None:
    """The cache that both were just read from, if nobody has changed them or it."""
    origin: tuple[KeyValueCache, Tensor, Any] | None = getattr(keys, _ATTRIBUTE, None)
    if origin is None or origin[1] is not values:
        return None
    cache = origin[0]
    changes = cache._table.changes, keys._version, values._version
    return cache if changes == origin[2] else None


def use_cache(model: Any, options: dict[str, Any]) -> None:
    """In place of the cache that `generate` has just made for a converted model, if it is the usual
    one."""
    usual: Any = options.get("past_key_values")
    if _is_usual(usual):
        options["past_key_values"] = _like(usual, Cache(model))
    of_decoder = getattr(usual, "self_attention_cache", None)  # beside that of an encoder
    if _is_usual(of_decoder):
        usual.self_attention_cache = _like(of_decoder, Cache(model))


def _is_usual(cache: Any) -> bool:
    return type(cache) is DynamicCache and not cache.offloading


def _like(usual: Any, cache: Cache) -> Cache:
    """Assisted generation has asked the usual one to keep what a window would drop."""
    if any(getattr(layer, "record_past", False) for layer in usual.layers):
        cache.activate_past_recording()
    return cache
