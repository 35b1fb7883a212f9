"""Calls that were made before: what was decided for their kind is remembered, and runs at once.

A decoder calls attention a thousand times with one more key each, and its checks would cost more
than the kernel. A kind of calls is all that decides which implementation runs: lengths do not,
unless a prior has a table by position. It is remembered where no number in a tensor decides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel._attention.call import AttentionCall, Options, observer
from fenchel._attention.dense import as_tsallis, is_decoding
from fenchel._attention.sparse import CallNumbers, arguments
from fenchel._kernels.attention import differentiate, is_followed
from fenchel._kernels.attention_call import FAR, Arguments
from fenchel._kernels.attention_plan import Extent, Lengths, Plan, lengths_of
from fenchel._kernels.library import is_mentioned
from fenchel._kernels.route import chosen_kernels
from fenchel._numerics import transformed
from fenchel.priors.contract import Prior, Product, Shifted
from fenchel.priors.kinds import ALiBi, Causal, SlidingWindow
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

_MOST = 256  # plans
_LARGEST = 2**18  # bytes of a plan: longer tables are of calls that outweigh their checks
_PLANS: dict[Any, Plan] = {}

_TENSORS = (Tensor, torch.nn.Parameter)
_NUMBERS = (float, int)  # no truth value, which equals a number, and is refused where that is not
_OPTIONAL = (*_NUMBERS, type(None))
_OPERANDS = ("query", "key", "value")


class Described(NamedTuple):
    """A call that has a plan: its kind, and what the plan is filled in with beside the operands."""

    kind: tuple[Any, ...]
    extent: Extent


def describe(
    operands: tuple[Tensor, Tensor, Tensor], regularizer: object, options: Options
) -> Described | None:
    """None for calls that are not planned."""
    if torch.compiler.is_compiling() or not all(map(_is_plain, operands)):
        return None
    query, key, value = operands
    lengths = lengths_of(query, key, value, options.enable_gqa)
    if lengths is None or key.dtype is not query.dtype or value.dtype is not query.dtype:
        return None
    if type(regularizer) is Shannon and not is_decoding(*operands):
        return None
    return describe_lengths(lengths, query.dtype, regularizer, options)


def describe_lengths(
    lengths: Lengths, dtype: torch.dtype, regularizer: object, options: Options
) -> Described | None:
    """The same for operands that need no more looking at."""
    softmax = type(regularizer) is Shannon
    if not softmax and type(regularizer) is not Tsallis:
        return None
    base, attn_mask, is_causal, scale, dropout_p, enable_gqa, softcap = options
    alpha = 1.0 if softmax else regularizer.alpha  # type: ignore[attr-defined]
    temperature = regularizer.temperature  # type: ignore[attr-defined]
    if (
        type(alpha) not in _NUMBERS
        or type(temperature) not in _NUMBERS
        or type(is_causal) is not bool
        or type(enable_gqa) is not bool
        or type(scale) not in _OPTIONAL
        or type(softcap) not in _OPTIONAL
        or type(dropout_p) not in _NUMBERS
        or dropout_p != 0
        or is_watched()
    ):
        return None
    if not (_is_constant(base) and _is_constant(attn_mask)):
        return None
    bounds = _bounds(base, attn_mask)
    tables = None if bounds is not None else (base, attn_mask, lengths)
    lowest, highest = bounds or (-FAR, FAR)
    if lowest > FAR or highest < -FAR:
        return None
    kind = (alpha, softmax, temperature, is_causal, scale, softcap, dtype, lengths[5], tables)
    return Described(kind, Extent(*lengths, lowest, highest))


def _is_plain(x: Tensor) -> bool:
    """The numbers of four axes lie in memory as shape, strides and dtype say."""
    return (
        type(x) in _TENSORS
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_neg()
        and x.ndim == 4
    )


def is_watched() -> bool:
    """Something wants to see or change torch's calls, or other kernels were asked for."""
    return (
        chosen_kernels() is not None
        or observer() is not None
        or is_mentioned()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or transformed()
        or torch._C._get_tracing_state() is not None
    )


def _is_constant(term: object) -> bool:
    """No prior, or one that holds no tensor."""
    if term is None or type(term) in (Causal, SlidingWindow):
        return True
    if isinstance(term, Product):
        return _is_constant(term.first) and _is_constant(term.second)
    if isinstance(term, Shifted):
        return _is_constant(term.prior)
    return isinstance(term, ALiBi) and term.slopes is None


def _bounds(*terms: object) -> tuple[int, int] | None:
    """Query i sees keys i + lowest .. i + highest, if the terms are masks; None for others."""
    lowest, highest = -FAR, FAR
    for prior in terms:
        if not isinstance(prior, Prior):
            continue
        if type(prior) is Causal:  # without the detour
            highest = min(highest, prior.offset or 0)
            continue
        if not prior.is_mask:
            return None
        numbers = prior.structure(1, 1, 0, torch.device("cpu"))  # of any lengths
        assert numbers is not None
        lowest = max(lowest, -FAR if numbers.lowest is None else numbers.lowest)
        highest = min(highest, FAR if numbers.highest is None else numbers.highest)
    return lowest, highest


def recall(kind: tuple[Any, ...]) -> Plan | None:
    """The plan of such calls, if there was one before."""
    return _PLANS.get(kind)


def remember(kind: tuple[Any, ...], call: AttentionCall, regularizer: Tsallis | Shannon) -> Plan:
    """The kernels run this call: the next one of its kind can go to them at once."""
    if all(prior.is_mask for prior in call.priors):  # which are in the extent of each call
        call = replace(call, bias=None, base=None)
    plan = Plan(arguments(CallNumbers(call), as_tsallis(regularizer)))
    if plan.nbytes <= _LARGEST:
        if len(_PLANS) >= _MOST:
            _PLANS.clear()
        _PLANS[kind] = plan
    return plan


def run(plan: Plan, extent: Extent, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A call of this kind, with these operands."""
    trains = query.requires_grad or key.requires_grad or value.requires_grad
    if trains and torch.is_grad_enabled():
        output: Tensor = _apply(plan, extent, *map(_unwrap_if_dead, (query, key, value)))  # type: ignore[no-untyped-call]
        return output
    return plan.attend(extent, query, key, value)


class _Planned(torch.autograd.Function):
    """A planned call, with the derivative of any other."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, extent: Extent, *operands: Tensor) -> Tensor:
        output, saved = plan.attend_saving(extent, *operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, saved)
        ctx.plan, ctx.extent = plan, extent
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: a checkpoint makes them again at each reading
        if gradient is None:
            return (None,) * 5
        needed = ctx.needs_input_grad[2:]
        gradients = _differentiate(ctx.plan, ctx.extent, tensors, gradient, needed)
        return None, None, *(g if need else None for g, need in zip(gradients, needed, strict=True))


# What `_Planned.apply` comes to where no transform is active, without looking for one.
_apply = super(torch.autograd.Function, _Planned).apply
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def _differentiate(
    plan: Plan, extent: Extent, tensors: tuple[Tensor, ...], gradient: Tensor, needed: list[bool]
) -> tuple[Tensor | None, ...]:
    """In query, key and value."""
    *operands, saved = tensors
    plain = all(map(_is_plain, (*operands, gradient))) and type(saved) is Tensor and saved.is_cpu
    followed = torch.compiler.is_compiling() or is_followed(gradient)
    if plain and not followed and plan.fits(extent, gradient, *tensors):
        return plan.differentiate(extent, gradient, *tensors)
    x, kept = plan.arguments(extent, *tensors)
    wanted = dict.fromkeys(Arguments._fields, False) | dict(zip(_OPERANDS, needed, strict=True))
    gradients = differentiate(x, kept, gradient, wanted)
    return tuple(gradients.get(name) for name in _OPERANDS)
