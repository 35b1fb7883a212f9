"""The derivative of what a search finds, once for every solver; and the softmax with mass.

A search finds the root x of residual(x, operands) = 0 outside the graph. Newton's method around it
has the root's derivative: with J = -d residual / dx,

    dx = J^-1 (d residual / d operands) d operands.

A solver describes its equation by one function, linearise(x, *operands) -> (residual, solve), where
solve(right) = J^-1 right, J being symmetric, in operations that have derivatives. That is all that
`attach` asks for, in reverse and forward mode, under every transform and when compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import exponent_limit, masked_max, traced, transformed, where

Solve = Callable[[Tensor], Tensor]
Linearise = Callable[..., tuple[Tensor, Solve]]

_MIXED = (
    "reverse mode asks transforms for a derivative of too high an order; take all derivatives by "
    "torch.autograd.grad(..., create_graph=True), or all of them by nested transforms of torch.func"
)
_STEPS = 2  # of Newton's method: three orders, whatever is asked of them afterwards


def attach(root: Tensor, linearise: Linearise, *operands: Tensor | None) -> Tensor:
    """The root with its derivatives in the operands. Its value is not touched.

    They are right to every order in reverse mode, and to any depth of nested transforms. Where
    reverse mode differentiates the result of transforms more than once, a derivative beyond the
    third raises; where it does so to compiled code, which cannot raise, it is NaN.
    """
    if transformed() or torch.compiler.is_compiling() or traced():
        return newton_steps(root, linearise, *operands)
    return implicit_root(root, linearise, *operands)


# ---- by Newton's steps in the graph


def newton_steps(root: Tensor, linearise: Linearise, *operands: Tensor | None) -> Tensor:
    """In plain operations, which every transform knows.

    Only the derivative of the steps is kept, not their value (rounding). Newton's error is
    quadratic, so each step takes derivatives that are exact to order k to order 2 k + 1.
    """
    # One order more than the transforms': what is compiled is differentiated once from outside.
    steps = max(_STEPS, (_transforms() + 1).bit_length())
    x, change = root.detach(), torch.zeros_like(root)
    for _ in range(steps):
        residual, solve = linearise(x + change, *operands)
        step = solve(residual)
        change = change + (step - step.detach())
    return x + change + _limit(change, 2**steps - 1, _MIXED)


def _transforms() -> int:
    """How many derivatives the transforms around us may take."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    kinds = [level.key() for level in stack]
    transform = torch._C._functorch.TransformType
    forward = torch.autograd.forward_ad._current_level >= 0 and transform.Jvp not in kinds
    return len(kinds) - kinds.count(transform.Vmap) + forward


# torch.compiler.assume_constant_result, which would import the compiler: the compiler calls this
# function while it traces, and guards the transforms itself.
_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _limit(change: Tensor, order: int, refusal: str) -> Tensor:
    """Zero with that many derivatives, all zero; one more raises. The change is zero, too."""
    if torch.compiler.is_compiling() or traced():
        return change.pow(order + 0.5)  # one more is infinite
    zero: Tensor = _Zero.apply(change, order, refusal)  # type: ignore[no-untyped-call]
    return zero


class _Zero(torch.autograd.Function):
    """Its derivative is again a zero that depends on the change, of one order less."""

    generate_vmap_rule = True

    @staticmethod
    def forward(change: Tensor, order: int, refusal: str) -> Tensor:
        return torch.zeros_like(change)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
        change, ctx.order, ctx.refusal = inputs
        ctx.save_for_backward(change)
        ctx.save_for_forward(change)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * _Zero._slope(ctx), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent * _Zero._slope(ctx)

    @staticmethod
    def _slope(ctx: Any) -> Tensor:
        if ctx.order == 0:
            raise NotImplementedError(ctx.refusal)
        (change,) = ctx.saved_tensors
        return _limit(change, ctx.order - 1, ctx.refusal)


# ---- by the implicit function theorem


def implicit_root(root: Tensor, linearise: Linearise, *operands: Tensor | None) -> Tensor:
    """In reverse mode, to every order: the derivative is made of the attached root itself.

    Here solve is asked for J^-T right, whether J is symmetric or not.
    """
    moving = (x for x in operands if x is not None)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in moving):
        return root.detach()
    attached: Tensor = _Root.apply(linearise, root.detach(), *operands)  # type: ignore[no-untyped-call]
    return attached


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linearise: Linearise, root: Tensor, *operands: Tensor | None) -> Tensor:
        ctx.linearise = linearise
        attached = root.clone()
        ctx.save_for_backward(attached, *operands)
        return attached

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root, *operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that the derivative in the operands is taken at a fixed root.
            views = [x.view_as(x) if need else x for x, need in zip(operands, needed, strict=True)]
            residual, solve = ctx.linearise(root if again else root.detach(), *views)
        pulled = solve(gradient)
        differentiated = [x for x, need in zip(views, needed, strict=True) if need]
        slopes = iter(
            torch.autograd.grad(
                residual, differentiated, pulled, create_graph=again, allow_unused=True
            )
        )
        return None, None, *(next(slopes) if need else None for need in needed)


def without_derivative(value: Tensor, *operands: Tensor, refusal: str) -> Tensor:
    """The value, whose derivative in the operands is not known: asking for it raises."""
    change = torch.stack([(x - x.detach()).sum() for x in operands]).sum()
    return value.detach() + _limit(change, 0, refusal)


# ---- the softmax with mass


def tilt(log_g: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """(mass g / Z, log Z) for Z = sum mass g over the last axis; (..., n) and (..., 1).

    Zeros and 0 where a row has no mass. The mass stays a factor: its derivative at zero is the
    one-sided g / Z, where softmax(log_g + log mass) would give 0 / 0.
    """
    limit = exponent_limit(log_g.dtype)
    on = mass > 0
    live = on.any(-1, keepdim=True)
    log_mass = where(on, mass, 1.0).log()
    peak = where(live, masked_max((log_g + log_mass).detach(), on), 0.0)
    exponent = log_g - peak
    # Where either factor alone could leave the range of numbers, logarithms are added.
    far = on & ~(exponent.abs() <= limit)
    product = mass * exponent.clamp(max=limit).exp()
    terms = torch.where(far, where(far, exponent + log_mass, 0.0).exp(), product)
    total = where(live, terms.sum(-1, keepdim=True), 1.0)
    return where(live, terms / total, 0.0), where(live, total.log() + peak, 0.0)
