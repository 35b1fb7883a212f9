"""Any torch model as it runs: every attention call, in order, with the module that made it.

Four doors lead to attention: `fenchel.attention`, torch's `scaled_dot_product_attention` and
`multi_head_attention_forward`, and the table in which transformers looks up functions, for models
on eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fenchel._attention.call import OBSERVER, AttentionCall, Options, observer, prepare
from fenchel._uncompiled import uncompiled
from fenchel.lens.capture.calls import configs_of
from fenchel.lens.capture.evaluation import evaluating
from fenchel.regularizers import Regularizer, Shannon

# path of the module, call, regulariser, output (batch, head, query, d_value)
OnCall = Callable[[str, AttentionCall, Regularizer, Tensor], None]

_ONE_AT_A_TIME = RLock()  # of those who watch eager functions


@contextmanager
def watch_calls(model: Module, on_call: OnCall) -> Iterator[CallWatch]:
    """While open, every attention call of this thread is handed to `on_call`, in the order it runs.

    Evaluation mode, without gradients; code that was compiled runs as it was written.
    """
    watch = CallWatch(on_call)
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        undo.enter_context(torch.no_grad())
        undo.enter_context(uncompiled())
        if any(config._attn_implementation in (None, "eager") for config in configs_of(model)):
            undo.enter_context(_watch_eager(watch))
        for path, module in model.named_modules():
            for hook in watch.follow(path, module):
                undo.callback(hook.remove)
        undo.callback(OBSERVER.reset, OBSERVER.set(watch.observe))
        yield undo.enter_context(watch)


class CallWatch(TorchFunctionMode):
    """Sees the calls of torch's functions; `observe` sees those of `fenchel.attention`."""

    def __init__(self, on_call: OnCall) -> None:
        super().__init__()
        self.softmax_paths: dict[str, None] = {}  # modules that call softmax by themselves
        self._on_call = on_call
        self._count = 0
        self._running = [""]  # paths of the modules that are running, the outermost first
        self._inside = False  # of an attention that is recorded as a whole
        self._given: Tensor | None = None  # what the model gets from the call that is read now

    def follow(self, path: str, module: Module) -> Iterator[Any]:
        """Note when the module runs; hooks see it run in other threads, too."""

        def enter(*_: Any) -> None:
            if observer() == self.observe:
                self._running.append(path)

        def leave(*_: Any) -> None:
            if observer() == self.observe:
                self._running.pop()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)

    def observe(
        self, call: AttentionCall, regularizer: Regularizer, run: Callable[[], Tensor]
    ) -> Tensor:
        """A call of `fenchel.attention`; what it calls itself is no call of the model."""
        if self._inside:
            return run()
        with self._within():
            output = run()
            self._record(call, regularizer, output if self._given is None else self._given)
        return output

    def attend_eagerly(self, function: Any, module: Module, *args: Any, **options: Any) -> Any:
        """A call of a family's own function, which sees what its mask shows and no flag; read by a
        call of ours beside it."""
        from fenchel.hf.translate import TranslatedAttention

        with self._within():
            result = function(module, *args, **options)
        self._given = result[0].transpose(1, 2)  # (batch, head, query, d)
        try:
            TranslatedAttention(Shannon())(module, *args, **{**options, "is_causal": False})
        finally:
            self._given = None
        return result

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if not self._inside:
            if func is scaled_dot_product_attention:
                return self._attend(args, options)
            if func is multi_head_attention_forward:
                self._attend_multihead(args, options)
            elif getattr(func, "__name__", "") == "softmax":  # torch has three of them
                self.softmax_paths[self._running[-1]] = None
        return func(*args, **options)

    def _attend(self, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        before = self._count
        output: Tensor = scaled_dot_product_attention(*args, **options)
        # Inside of `replace_sdpa` this was a call of ours, and has been observed.
        if self._count == before and not output.is_nested:
            call = _read_sdpa(*args, **options)
            with self._within():
                four = output.reshape(*call.scores_shape[:3], output.shape[-1])
                self._record(call, Shannon(), four)
        return output

    def _attend_multihead(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Once more beside the model's own call, which hides its attention from modes, and which
        computes the weights in other ways where it returns them."""
        with self:
            _open_multihead()(*args, **{**options, "need_weights": False})

    def _record(self, call: AttentionCall, regularizer: Regularizer, output: Tensor) -> None:
        self._count += 1
        self._on_call(self._running[-1], call, regularizer, output)

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


def _read_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Torch's order of arguments. Dropout, which has no part in a solution, is left out."""
    mask = _hide_forbidden(attn_mask)
    options = Options(attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return prepare(query, key, value, options)


def _hide_forbidden(mask: Tensor | None) -> Tensor | None:
    """The smallest number, by which models forbid a key, as -inf; the weights stay the same, so
    not in a row where all keys are forbidden, which torch attends to evenly."""
    if type(mask) is not Tensor or not mask.is_floating_point():
        return mask
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.masked_fill(forbidden & ~forbidden.all(-1, keepdim=True), -torch.inf)


def _open_multihead() -> Callable[..., Any]:
    """Torch's function without the lines that hand it to a mode: what it calls is seen instead."""
    function: Any = multi_head_attention_forward
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


@contextmanager
def _watch_eager(watch: CallWatch) -> Iterator[None]:
    """Each family has an eager function of its own, which it hands to transformers' table as the
    default: there it is found. Other threads get what they ask for, or wait to watch."""
    from fenchel.hf.library import attention_functions

    look_up = partial(type(attention_functions).get_interface, attention_functions)

    def get_interface(name: str | None, default: Any) -> Any:
        function = look_up(name, default)
        is_ours = function is default and observer() == watch.observe
        return partial(watch.attend_eagerly, function) if is_ours else function

    with _ONE_AT_A_TIME:
        attention_functions.get_interface = get_interface
        try:
            yield
        finally:
            vars(attention_functions).pop("get_interface", None)
