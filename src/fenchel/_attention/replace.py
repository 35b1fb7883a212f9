"""Swap the attention of any model without touching its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import checkpoint

from fenchel._attention.front import attention
from fenchel._attention.reach import refuse, refuse_script
from fenchel._attention.suspension import is_nearest, suspendable_owner
from fenchel.regularizers.contract import Regularizer, resolve_regularizer

F = TypeVar("F", bound=Callable[..., Any])

_CHECKPOINT = (
    "torch.utils.checkpoint, or another autograd.Function that began inside replace_sdpa, may "
    "compute attention again in the backward pass, where the block does not hold; enter the block "
    "inside the checkpointed function, or pass checkpoint(..., use_reentrant=False, "
    "context_fn=lambda: (fenchel.replace_sdpa(r), fenchel.replace_sdpa(r))), or convert the model "
    "with fenchel.nn.convert or fenchel.hf.convert"
)

_COMPILED = (
    "torch.compile cannot tell whether the generator or coroutine that entered replace_sdpa runs "
    "or is suspended; enter the block inside the compiled function"
)


class replace_sdpa:
    """Inside the block, every `scaled_dot_product_attention` and `flex_attention` uses this
    regulariser, or the one that a module such as `nn.LearnedTsallis` makes at each call.

    >>> with fl.replace_sdpa(fl.Tsallis(1.5)):
    ...     model(x)

    It decorates functions, too: `@fl.replace_sdpa(fl.Tsallis(1.5))`.

    The block holds for the thread that entered it, and not in the backward pass: attention inside a
    checkpoint that began in the block raises. Enter the block in the checkpointed function instead.
    Entered in a generator or a coroutine, it holds while that runs and not while it is suspended.

    What the block sees and cannot replace raises an error that names it: `nn.MultiheadAttention`
    (`fenchel.nn.convert` swaps it), torch's fused operators, traced and scripted functions, and
    models of transformers on eager attention.
    """

    def __init__(self, regularizer: Regularizer | Module) -> None:
        resolve_regularizer(regularizer)  # refuses at once what is none
        self.regularizer = regularizer

    def __enter__(self) -> replace_sdpa:
        _push_mode(_Block(self, _surroundings(), suspendable_owner()))
        return self

    def __exit__(self, *raised: object) -> None:
        _leave(self)

    def __call__(self, function: F) -> F:
        """The function, run inside the block."""
        if not inspect.isroutine(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                "replace_sdpa decorates functions, generators and coroutines, got "
                f"{function!r}; use `with fenchel.replace_sdpa(regularizer):` around its call"
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        def generate(*args: Any, **kwargs: Any) -> Any:
            with self:
                return (yield from function(*args, **kwargs))

        async def wait(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        wrapper: Any = run
        if inspect.isgeneratorfunction(function):
            wrapper = generate
        elif inspect.iscoroutinefunction(function):
            wrapper = wait
        return functools.wraps(function)(wrapper)  # type: ignore[return-value]


class _Block(TorchFunctionMode):
    """One entering of a block, by a generator or coroutine (its owner) or by neither."""

    def __init__(self, block: replace_sdpa, surroundings: _Surroundings, owner: Any) -> None:
        super().__init__()
        self.block, self.surroundings, self.owner = block, surroundings, owner
        # Where a generator that is suspended now goes on, its own block is the inner one.
        self.suspended = [other for other in _blocks() if not is_nearest(other.owner)]
        self.is_plain = owner is None and not self.suspended

    def holds(self) -> bool:
        """For the code that runs now."""
        if self.is_plain:
            return True
        if torch.compiler.is_compiling():
            raise RuntimeError(_COMPILED)
        return is_nearest(self.owner, [x.owner for x in _blocks() if x in self.suspended])

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self.holds():
            return func(*args, **(kwargs or {}))
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            refuse(func)
            return func(*args, **(kwargs or {}))
        _refuse_checkpoints_since(*self.surroundings)
        return replacement(self.block.regularizer, *args, **(kwargs or {}))


def _blocks() -> list[_Block]:
    """Of this thread, the innermost last."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Block)]


def _leave(block: replace_sdpa) -> None:
    """Takes it off the stack of this thread, wherever it is: generators end in any order."""
    above = []
    while torch._C._len_torch_function_stack():
        mode = _pop_mode()
        if isinstance(mode, _Block) and mode.block is block and mode.holds():
            break
        above.append(mode)
    else:
        _push(above)
        raise RuntimeError("replace_sdpa must be left in the thread that entered it")
    _push(above)


def _push(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


@contextmanager
def outside_blocks() -> Iterator[None]:
    """Inside, no block of this thread holds: for those who look at a model as it is."""
    modes = _pop_all()
    _push([mode for mode in modes if not isinstance(mode, _Block)])
    try:
        yield
    finally:
        _pop_all()
        _push(modes)


def _pop_all() -> list[Any]:
    """Of this thread, the innermost first."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]


def _watch_scripts(kind: Any) -> None:
    """No mode sees their calls."""
    call = kind.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(block.holds() for block in _blocks()):
            refuse_script(self.inlined_graph)
        return call(self, *args, **kwargs)

    kind.__call__ = checked


_watch_scripts(torch.jit.ScriptFunction)
_watch_scripts(torch._C.ScriptMethod)


# Grad mode; whether an autograd.Function runs its forward pass; the hooks of checkpoints.
_Surroundings = tuple[bool, bool, tuple[int, ...]]


def _surroundings() -> _Surroundings:
    """What a checkpoint changes around the function that it runs.

    The reentrant kind is an autograd.Function, which switches forward mode off; the other kind
    keeps tensors by a hook of its own.
    """
    in_function = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
    return torch.is_grad_enabled(), in_function, _checkpoint_hooks()


def _checkpoint_hooks() -> tuple[int, ...]:
    """Of all hooks for saved tensors, the numbers of those that checkpoints have set."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(hooks):  # there is no way to look below the top
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    return tuple(id(pack) for pack, _ in hooks if pack.__module__ == checkpoint.__module__)


def _refuse_checkpoints_since(followed: bool, in_function: bool, hooks: tuple[int, ...]) -> None:
    """A reentrant checkpoint always, since in its forward pass nobody sees whether a gradient is
    taken; the other kind where one is taken, here or where the block was entered."""
    follows_now, in_function_now, hooks_now = _surroundings()
    began = not set(hooks_now) <= set(hooks) and (followed or follows_now)
    if began or in_function_now > in_function:
        raise RuntimeError(_CHECKPOINT)


# The compiler runs them while it traces, as it does `_against_library` in `_kernels/route.py`.
_surroundings._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_checkpoints_since._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attend(
    regularizer: Regularizer | Module,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Torch's order of arguments."""
    return attention(
        query,
        key,
        value,
        regularizer,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _flex(*args: Any, **kwargs: Any) -> Any:
    from fenchel._attention.flex import flex_attention  # brings the compiler, which is slow to load

    return flex_attention(*args, **kwargs)


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    scaled_dot_product_attention: _attend,
    torch.ops.aten.scaled_dot_product_attention: _attend,
    torch.ops.aten.scaled_dot_product_attention.default: _attend,
    flex_operator: _flex,
}
