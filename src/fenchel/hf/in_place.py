"""Modules that do not ask transformers for a function: their own is exchanged where it runs.

Torch's fused attention becomes fenchel's. A softmax that such a module takes itself becomes the map
of the regulariser, dense as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fenchel._attention.replace import replace_sdpa
from fenchel._solve import solve
from fenchel.hf import trial
from fenchel.hf.held import REGULARIZER_ATTRIBUTE
from fenchel.hf.translate import forbidden
from fenchel.regularizers.contract import Regularizer


class ExchangedForward:
    """The forward of one module, with its own softmax and fused attention exchanged."""

    def __init__(self, module: nn.Module, how: str) -> None:
        self.module, self.how = module, how
        self.inner = module.__dict__.get("forward")  # what others put there

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = self.inner or type(self.module).forward.__get__(self.module)
        if trial.is_running():
            return forward(*args, **options)
        regularizer = getattr(self.module, REGULARIZER_ATTRIBUTE)
        block = replace_sdpa if self.how == trial.FUSED else _ReplaceSoftmax
        with block(regularizer):
            return forward(*args, **options)


def exchange(module: nn.Module, how: str) -> None:
    """From now on. The module holds its regulariser already."""
    if not isinstance(module.__dict__.get("forward"), ExchangedForward):
        module.forward = ExchangedForward(module, how)


def restore(module: nn.Module) -> None:
    """The forward that it had."""
    ours = module.__dict__.get("forward")
    if isinstance(ours, ExchangedForward):
        del module.forward
        if ours.inner is not None:
            module.forward = ours.inner


class _ReplaceSoftmax(TorchFunctionMode):
    """Inside, a softmax over the last axis is the map of the regulariser."""

    def __init__(self, regularizer: Regularizer | nn.Module) -> None:
        super().__init__()
        self.regularizer = regularizer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _SOFTMAX:
            return func(*args, **(kwargs or {}))
        return _weights(self.regularizer, *args, **(kwargs or {}))


_SOFTMAX = (torch.softmax, torch.Tensor.softmax, nn.functional.softmax)


def _weights(
    regularizer: Regularizer | nn.Module,
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """In the order of torch's arguments. Keys that transformers forbids get nothing."""
    scores = input if dtype is None else input.to(dtype)
    scores = scores.masked_fill(forbidden(scores), -torch.inf)
    return solve(scores, regularizer, dim=-1 if dim is None else dim).weights.to(scores.dtype)
