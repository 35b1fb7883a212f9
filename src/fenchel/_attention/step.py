"""The next token: a call of `decode` like the last one, without its checks.

A model that generates makes the same call for every token and layer, with another query and one
more key. Where nothing else has changed, the struct of the last call is filled in again.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fenchel._attention.plans import is_watched
from fenchel._kernels.attention_plan import Extent, Plan
from fenchel.regularizers.contract import Regularizer

if TYPE_CHECKING:
    from fenchel._attention.cache import KeyValueCache


class DecodingStep:
    """One query per sequence, all keys visible, one regulariser of plain numbers."""

    def __init__(
        self,
        plan: Plan,
        extent: Extent,
        query: Tensor,
        cache: KeyValueCache,
        question: tuple[Regularizer, float | None, float | None],
    ) -> None:
        """question: regulariser, scale, softcap."""
        self._struct, self._operands = cache._table.struct(), cache.pool.operands
        self._regularizer, self._scale, self._softcap = question
        self._shape, self._dtype, self._output_shape = query.shape, query.dtype, extent.output
        self._is_like_query = query.shape == extent.output
        with torch.inference_mode(False):
            self._counts = query.new_empty((*query.shape[:3], 5), dtype=torch.int64)
        self._counts_address = self._counts.data_ptr()
        address = ctypes.addressof(self._struct)
        output = query.new_empty(extent.output)  # in which order every output lies in memory
        self._call = plan.stand(extent, query, *self._operands, output, address)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # addresses mean nothing to a copy, which has no last call

    def repeat(
        self,
        query: Tensor,
        cache: KeyValueCache,
        regularizer: object,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor | None:
        """The same call with another query; None where anything else differs, or a check is due."""
        if (
            regularizer is not self._regularizer
            or type(query) is not Tensor
            or query.dtype is not self._dtype
            or query.shape != self._shape
            or scale != self._scale
            or softcap != self._softcap
            or not query.is_cpu
            or query.is_neg()
            or (query.requires_grad and torch.is_grad_enabled())
            or torch.compiler.is_compiling()
            or is_watched()
        ):
            return None
        with cache._lock:
            lengths = cache._table.lengths
            moved = cache._table.struct() is not self._struct
            if moved or cache.pool.operands is not self._operands or 0 in lengths:
                return None
            return self._run(query, cache, max(lengths))

    def _run(self, query: Tensor, cache: KeyValueCache, keys: int) -> Tensor:
        if self._is_like_query:  # in half the time
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
        else:
            output = query.new_empty(self._output_shape)
        c = self._struct
        c.read, c.candidate, c.bound = self._counts_address, None, None
        self._call.attend(keys, query, output)
        cache._counts_read = self._counts
        return output
