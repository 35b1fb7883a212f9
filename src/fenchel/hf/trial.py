"""One run of a model that shows who attends how: names in the source may say otherwise.

Attention is an expectation under a softmax. It is seen where it happens: a module asks transformers
for its attention function, calls torch's, or takes a softmax itself, and is called an attention or
multiplies the result with something along the same axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fenchel.nn.multihead import MultiheadAttention

_MULTIHEAD = (nn.MultiheadAttention, MultiheadAttention)
ASKS, FUSED, BY_HAND, MULTIHEAD = "interface", "sdpa", "softmax", "nn.MultiheadAttention"


def is_called_attention(kind: type) -> bool:
    """By the name of its class."""
    return re.search("attention|attn", kind.__name__, re.IGNORECASE) is not None


class Trial:
    """What a run showed."""

    def __init__(self) -> None:
        self.how: dict[nn.Module, str] = {}  # of each module that attends
        self.reached: set[nn.Module] = set()  # that ran to their end
        self.causal: set[nn.Module] = set()  # whose first query saw one key
        self.causal_by_flag: set[nn.Module] = set()  # no mask said so
        # Modules that take a softmax -> the modules that they ran in.
        self.softmaxes: dict[nn.Module, set[nn.Module]] = {}
        self._inside: list[nn.Module] = []
        self.paused = 0

    def record(self, how: str, module: nn.Module | None = None) -> None:
        module = self.current() if module is None else module
        if module is not None and not self.paused:
            self.how.setdefault(module, how)

    def way_of(self, kind: type) -> str | None:
        """How a module of this class attended."""
        return next((how for module, how in self.how.items() if type(module) is kind), None)

    def note_softmax(self) -> nn.Module | None:
        """Who takes it."""
        module = self.current()
        if module is not None:
            self.softmaxes.setdefault(module, set()).update(self._inside)
        return module

    def current(self) -> nn.Module | None:
        """The innermost module that is not one of torch's own small ones, such as nn.Softmax."""
        named = [x for x in self._inside if not type(x).__module__.startswith("torch.")]
        return next(reversed(named or self._inside), None)

    def enter(self, module: nn.Module, _inputs: Any) -> None:
        if _RUNNING.get() is not self:  # hooks see the modules of all threads
            return
        self._inside.append(module)
        if isinstance(module, _MULTIHEAD):
            self.record(MULTIHEAD, module)
            self.paused += 1

    def leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if _RUNNING.get() is not self:
            return
        while self._inside and self._inside.pop() is not module:
            pass  # modules whose own hooks were cut short by an error
        if isinstance(module, _MULTIHEAD):
            self.paused -= 1

    def finish(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        """One that an error cut short might have attended after it."""
        if _RUNNING.get() is self:
            self.reached.add(module)


_RUNNING: ContextVar[Trial | None] = ContextVar("trial", default=None)


def is_running() -> bool:
    """Whether attention is only watched: its answers are not looked at."""
    return _RUNNING.get() is not None


# Torch compiles nothing inside a trial, because a dispatch mode (`_Numbers`) is active there.
is_running._dynamo_marked_constant = True  # type: ignore[attr-defined]


def record(module: nn.Module, *, causal: bool, by_flag: bool) -> None:
    """This module asked transformers for its attention function. by_flag: no mask says that it is
    causal."""
    trial = _RUNNING.get()
    if trial is not None:
        trial.record(ASKS, module)
        if causal:
            trial.causal.add(module)
        if by_flag:
            trial.causal_by_flag.add(module)


@contextmanager
def watching() -> Iterator[Trial]:
    """Inside, every forward pass of this thread is watched."""
    trial = Trial()
    hooks = (
        register_module_forward_pre_hook(trial.enter),
        register_module_forward_hook(trial.finish),
        register_module_forward_hook(trial.leave, always_call=True),
    )
    token = _RUNNING.set(trial)
    try:
        with _Calls(trial), _Numbers(trial):
            yield trial
    finally:
        _RUNNING.reset(token)
        for hook in hooks:
            hook.remove()


class _Calls(TorchFunctionMode):
    """Sees torch's own attention functions."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        how = _FUNCTIONS.get(func)
        if how is None:
            return func(*args, **(kwargs or {}))
        self.trial.record(how)
        self.trial.paused += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.trial.paused -= 1


_FUNCTIONS: dict[Callable[..., Any], str] = {
    scaled_dot_product_attention: FUSED,
    multi_head_attention_forward: MULTIHEAD,
    torch._native_multi_head_attention: MULTIHEAD,
    torch._transformer_encoder_layer_fwd: MULTIHEAD,
}


class _Numbers(TorchDispatchMode):
    """Follows what a softmax made until it is multiplied along its axis."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = trial
        # A tensor that holds weights -> keys of a row, and who made them.
        self.weights: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.trial.paused:
            return output
        name = func.overloadpacket.__name__
        if name in _SOFTMAX:
            self._start(output, *args[:2])
        elif name.startswith("_scaled_dot_product"):
            self.trial.record(FUSED)
        elif name in _PRODUCTS:
            self._look_at(*args[-2:])
        elif name in _CARRIERS:
            self._carry(args, output)
        return output

    def _start(self, weights: Tensor, scores: Tensor, axis: int) -> None:
        module = self.trial.note_softmax()
        if is_called_attention(type(module)):
            self.trial.record(BY_HAND, module)
        if not isinstance(scores, nn.Parameter):  # weights of layers, say
            self.weights[weights] = (weights.shape[axis], module)

    def _look_at(self, left: Tensor, right: Tensor) -> None:
        for tensor, axis in ((left, -1), (right, -2)):
            keys, module = self.weights.get(tensor, (None, None))
            if keys is not None and tensor.ndim > 1 and tensor.shape[axis] == keys:
                self.trial.record(BY_HAND, module)

    def _carry(self, args: tuple[Any, ...], output: Any) -> None:
        for tensor in args:
            mark = self.weights.get(tensor) if isinstance(tensor, Tensor) else None
            if mark is None:
                continue
            for copy in tree_leaves(output):
                if isinstance(copy, Tensor) and copy.is_floating_point():
                    self.weights[copy] = mark


_SOFTMAX = {"_softmax", "_safe_softmax"}
_PRODUCTS = {"bmm", "baddbmm"}  # mm: with something that is the same for all rows, such as bins
_CARRIERS = {
    *("_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "detach"),
    *("dropout", "expand", "masked_fill", "native_dropout", "nan_to_num", "permute", "reshape"),
    *("select", "slice", "split", "squeeze", "t", "transpose", "unsqueeze", "view", "where"),
}
