"""Attention as transformers computes it, seen and changed from outside, in float64 throughout."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Weigh = Callable[[Tensor], Tensor]  # scores (…, key) -> weights

_SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax}
_SDPA = F.scaled_dot_product_attention
_TORCHS = F.multi_head_attention_forward  # a function of torch that attends inside
_ATTENDS = re.compile("attention|attn", re.IGNORECASE)
_FORBIDDEN = torch.finfo(torch.float64).min / 2  # what masks write into float64 scores
_FAR = 1e3  # below the largest score; entmax gives such a key nothing
_SINGLE = ("float32", "float")


def softmax(scores: Tensor) -> Tensor:
    """A row without a visible key is zero, as fenchel has it and scaled_dot_product_attention."""
    return torch.softmax(scores, -1).masked_fill(_is_empty(scores), 0.0)


def entmax15(scores: Tensor) -> Tensor:
    """By the package entmax. Its sums of squares overflow where masks are written as numbers."""
    from benchmarks.extras import load

    empty = _is_empty(scores)
    scores = scores.masked_fill(empty, 0.0)
    lowest = scores.detach().amax(-1, keepdim=True) - _FAR
    weights: Tensor = load("entmax").entmax15(torch.maximum(scores, lowest), dim=-1)
    return weights.masked_fill(empty, 0.0)


def _is_empty(scores: Tensor) -> Tensor:
    return (scores <= _FORBIDDEN).all(-1, keepdim=True)


class Watch(TorchFunctionMode):
    """Count the attentions that torch computes, and weigh their keys in another way.

    weigh: what a softmax over keys becomes; scaled_dot_product_attention keeps its own unless
        everywhere is True. None: nothing is changed.
    """

    def __init__(self, weigh: Weigh | None = None, everywhere: bool = False) -> None:
        super().__init__()
        self.weigh = weigh
        self.everywhere = everywhere
        self.seen = 0  # attentions that torch computed
        self.ours = 0  # calls from inside fenchel
        self._inside = False  # a function of torch that attends

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        frames = _callers()
        if frames and _package(frames[0]) == "fenchel":
            self.ours += 1
            return func(*args, **options)
        if func is _TORCHS:
            return self._look_inside(args, options)
        if func is _SDPA:
            self.seen += 1
            if self.everywhere and self.weigh is not None:
                return _attend(self.weigh, *args, **options)
            if self.weigh is not None:
                return _attend_as_torch(*args, **options)
        elif func in _SOFTMAX and _over_keys(args, options) and self._by_attention(frames):
            self.seen += 1
            if self.weigh is not None:
                return self.weigh(args[0] if args else options["input"])
        return func(*args, **options)

    def _look_inside(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The function would hand itself to this mode again."""
        self._inside = True
        try:
            with self, mock.patch.object(F, "has_torch_function", return_value=False):
                return _TORCHS(*args, **options)
        finally:
            self._inside = False

    def _by_attention(self, frames: list[FrameType]) -> bool:
        return self._inside or any(map(_attends, frames))


def _callers() -> list[FrameType]:
    """Outside torch, the innermost first, up to where torch calls a module; a module that is a
    softmax belongs to the one around it."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(frames) < 3:
        if _package(frame) == "torch":
            if frames and "softmax" not in _owner(frames[-1]).lower():
                break
        else:
            frames.append(frame)
        frame = frame.f_back
    return frames


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _attends(frame: FrameType) -> bool:
    """By the name of the function, or of the class that it belongs to."""
    return bool(_ATTENDS.search(frame.f_code.co_name) or _ATTENDS.search(_owner(frame)))


def _owner(frame: FrameType) -> str:
    return type(frame.f_locals.get("self")).__name__


def _over_keys(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    scores = args[0] if args else options["input"]
    dim = args[1] if len(args) > 1 else options.get("dim")
    return isinstance(dim, int) and dim % scores.ndim == scores.ndim - 1


def _attend(
    weigh: Weigh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as its documentation writes it; dropout is off here."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return weigh(scores) @ value


def _attend_as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *others: Any,
    **options: Any,
) -> Tensor:
    """With a mask of numbers, a query without a visible key sees all of them in torch; it is a
    padded one, and here it sees none."""
    output = _SDPA(query, key, value, attn_mask, *others, **options)
    if attn_mask is None:
        return output
    boolean = attn_mask.dtype == torch.bool
    empty = ~attn_mask.any(-1, keepdim=True) if boolean else _is_empty(attn_mask)
    return output.masked_fill(empty, 0.0)


# ---- float64 throughout


class _DoubleTorch(ModuleType):
    """torch, where single precision is double."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in _SINGLE else getattr(torch, name)


_DOUBLE = _DoubleTorch()
_MODELS = ("transformers", "tests")  # packages whose files hold models


@contextmanager
def in_double() -> Iterator[Callable[[], None]]:
    """Float64 throughout: for new tensors, and wherever a model file asks for float32.

    Many round parts of their work by name, among them softmax; answers that agree to 1e-16 would
    then differ by 1e-7 now and then. Yields what includes the files loaded since.
    """
    before, single = torch.get_default_dtype(), torch.Tensor.float
    changed: list[Any] = []

    def float_(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        by_model = _package(sys._getframe(1)) in _MODELS
        return self.double() if by_model else single(self, *arguments, **options)

    def include() -> None:
        for module in _model_files():
            module.torch = _DOUBLE
            changed.append(module)

    torch.set_default_dtype(torch.float64)
    with mock.patch.object(torch.Tensor, "float", float_):
        try:
            include()
            yield include
        finally:
            torch.set_default_dtype(before)
            for module in changed:
                module.torch = torch


def _model_files() -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _MODELS and vars(module).get("torch") is torch
    ]
