"""Calls that were made before: what was decided for their shapes is remembered, and runs at once.

A decoder calls attention a thousand times with the same shapes, and its checks would cost more than
the kernel. A plan holds the kernel's description of one such call, all but the addresses. It is
kept for calls whose description depends on no number in a tensor.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fenchel._attention.call import Options
from fenchel._kernels.attention import differentiate
from fenchel._kernels.attention_call import Arguments, Description, Saved
from fenchel._kernels.route import chosen_kernels
from fenchel._numerics import transformed
from fenchel.priors.contract import Product, Shifted
from fenchel.priors.kinds import ALiBi, Causal, SlidingWindow
from fenchel.regularizers.tsallis import Tsallis

_MOST = 256  # plans; a decoder without a cache of fixed size needs a new one for every token
_PLANS: dict[Any, Plan] = {}

Key = tuple[Any, ...]
_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (bool, float, int, type(None))


class Plan:
    """One call, but for the addresses of its operands."""

    def __init__(self, x: Arguments) -> None:
        self.without, self.saving = Description(x, save=False), Description(x, save=True)
        nothing = x.query.new_empty(0)
        self.arguments = x._replace(query=nothing, key=nothing, value=nothing)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The call with these operands."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            output: Tensor = _Planned.apply(self, query, key, value)  # type: ignore[no-untyped-call]
            return output
        return self.without.run(query, key, value)[0]


class _Planned(torch.autograd.Function):
    """A planned call, with the derivative of any other."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *operands: Tensor) -> Tensor:
        output, *saved = plan.saving.run(*operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *saved)
        ctx.arguments = plan.arguments
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: a checkpoint makes them again at each reading
        if gradient is None:
            return (None,) * 4
        x = ctx.arguments._replace(**dict(zip(_OPERANDS, tensors, strict=False)))
        needed = dict.fromkeys(Arguments._fields, False)
        needed |= dict(zip(_OPERANDS, ctx.needs_input_grad[1:], strict=True))
        gradients = differentiate(x, Saved(*tensors[3:]), gradient, needed)
        return None, *(gradients[name] if needed[name] else None for name in _OPERANDS)


_OPERANDS = ("query", "key", "value")


def key_of(
    operands: tuple[Tensor, Tensor, Tensor], regularizer: object, options: Options
) -> Key | None:
    """What decides the plan of a call; None for calls that are not planned."""
    if type(regularizer) is not Tsallis or torch.compiler.is_compiling():
        return None
    base, attn_mask, *numbers = options
    if any(type(x) not in _PLAIN for x in numbers) or options.dropout_p != 0:
        return None
    alpha, temperature = regularizer.alpha, regularizer.temperature
    if type(alpha) is not float or type(temperature) is not float:
        return None
    # With their types: 1 equals True, and is refused where True is not.
    key: list[Any] = [alpha, temperature, options, *map(type, numbers)]
    for x in operands:
        if type(x) not in _TENSORS or not x.is_cpu or x.layout is not torch.strided or x.is_nested:
            return None
        if x.is_neg() or x.ndim != 4:
            return None
        key += (x.shape, x.stride(), x.dtype)
    if not (_is_constant(base) and _is_constant(attn_mask)) or _is_watched():
        return None
    return tuple(key)


def _is_constant(term: object) -> bool:
    """No prior, or one that holds no tensor."""
    if term is None or type(term) in (Causal, SlidingWindow):
        return True
    if isinstance(term, Product):
        return _is_constant(term.first) and _is_constant(term.second)
    if isinstance(term, Shifted):
        return _is_constant(term.prior)
    return isinstance(term, ALiBi) and term.slopes is None


def _is_watched() -> bool:
    """Something wants to see or change torch's calls, or other kernels were asked for."""
    return (
        chosen_kernels() is not None
        or "FENCHEL_NATIVE" in os.environ
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or transformed()
        or torch._C._get_tracing_state() is not None
    )


def recall(key: Key) -> Plan | None:
    """The plan of such a call, if there was one before."""
    return _PLANS.get(key)


def remember(key: Key, x: Arguments) -> Plan:
    """The kernels run this call: the next one of its kind can go to them at once."""
    if len(_PLANS) >= _MOST:
        _PLANS.clear()
    plan = _PLANS[key] = Plan(x)
    return plan
