"""A transformer of one block repeated until nothing changes: its output is a fixed point

    X = T(X) + U,    T = feed-forward after self-attention, both with a Lipschitz bound.

If the constant of T is below one there is exactly one, whatever the start (Banach), and how far an
iterate is from it is known. Without U it would be the same for all inputs, with all tokens
equal: the input must enter every step.
"""
# Vuckovic et al. (2020), proposition 26 and remark 27

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fenchel._implicit import Solve, implicit_root, without_derivative
from fenchel._numerics import check_whole, full_precision, where
from fenchel._solution import Status
from fenchel.bounds.bound import Bound
from fenchel.bounds.maps import compose
from fenchel.bounds.modules import BoundedMap, mix, mixed_constant
from fenchel.nn.extra_state import NumberedLayer, as_numbers, check_numbers
from fenchel.nn.lipschitz import (
    LipschitzAttention,
    LipschitzFeedForward,
    check_dtype,
    check_input,
    check_mask,
    working_dtype,
)

Step = Callable[[Tensor], Tensor]
_ONCE = (
    "a fixed point has a first derivative only: that one is found by iteration. For a second, "
    "unroll the layer: apply its attention and feed-forward as often as you need"
)


@dataclass(frozen=True)
class Iteration:
    """x <- T(x) until |T(x) - x| <= tolerance (sqrt(numbers in x) + |x|), sequence by sequence.

    memory: how many past steps Anderson's acceleration combines; 0 is plain iteration. An
        accelerated step that does not lower the residual is undone and a plain one is taken.
    tolerance: 64 times the precision of the dtype if None.
    max_steps: how often T may be evaluated.
    """

    memory: int = 0
    tolerance: float | None = None
    max_steps: int = 500

    def __post_init__(self) -> None:
        check_whole(self.memory, "memory", 0)
        check_whole(self.max_steps, "max_steps", 1)
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(
                f"tolerance must be finite and > 0, got {self.tolerance}; None follows the dtype"
            )

    def run(self, step: Step, start: Tensor) -> Iterate:
        """start (batch, ...); step keeps its shape. Nothing is differentiated."""
        state = _IterationState(self, step, start)
        while state.left > 0 and not bool(state.is_done.all()):
            state.advance()
        return state.result()


@dataclass(frozen=True, eq=False)
class Iterate:
    """x (batch, ...), residual |T(x) - x|, evaluations of T and codes of `Status`, (batch) each."""

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Where the iteration ended, sequence by sequence.

    points: (batch, n, d), differentiable; NaN where the status is NONFINITE.
    residual: (batch), |T(X) + U - X|. steps: (batch), evaluations of T. status: (batch), codes of
        `Status`: OK, MAX_STEPS or NONFINITE.
    constant: of T; below one it is certain that there is a fixed point, and only one.
    rounding: (batch), how far T(X) + U may be from what exact arithmetic gives, for sums of
        roundings of random sign. cast: (batch), how far the points moved when they were brought to
        the dtype of U.
    """

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor
    constant: float
    rounding: Tensor
    cast: Tensor

    @property
    def unique(self) -> bool:
        """Whether the constant proves that there is no other; False says nothing."""
        return self.constant < 1

    @property
    def error(self) -> Tensor:
        """(batch): the fixed point is no further away, rounding included; infinite if nothing is
        proved."""
        if not self.unique:
            return torch.full_like(self.residual, math.inf)
        error = (self.residual + self.rounding) / (1 - self.constant) + self.cast
        return where(error.isfinite(), error, math.inf)


class UniversalTransformer(NumberedLayer):
    """U -> X with X = T(X) + U, by iteration; derivatives by the implicit function theorem.

        T = mixed feed-forward after mixed attention,   mixed f: x -> (1 - mixing) x + mixing f(x)

    >>> block = LipschitzAttention(8, 2, 0.7), LipschitzFeedForward(8, constant=0.9)
    >>> layer = UniversalTransformer(*block)
    >>> fixed = layer.solve(torch.randn(3, 5, 8))
    >>> fixed.unique, fixed.status.tolist(), bool(fixed.error.max() < 1e-3)
    (True, [0, 0, 0], True)

    With a constant of one or more the layer runs all the same: there may be several fixed points,
    or none that the iteration finds; `solve` says which it was, and derivatives are those at the
    points returned.

    attention, feedforward: of the same width.
    mixing: in (0, 1], how much of a layer's output replaces its input.
    solver: `Iteration()`, or with a memory, accelerated; also for the derivative.
    """

    def __init__(
        self,
        attention: LipschitzAttention,
        feedforward: LipschitzFeedForward,
        *,
        mixing: float = 1.0,
        solver: Iteration | None = None,
    ) -> None:
        super().__init__()
        _check_block(attention, feedforward, mixing)
        self.attention, self.feedforward = attention, feedforward
        self.mixing = float(mixing)
        self.solver = Iteration() if solver is None else solver

    def forward(
        self, u: Tensor, start: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """(batch, n, d) -> (batch, n, d), the points of `solve`."""
        return self.solve(u, start, key_padding_mask=key_padding_mask).points

    def solve(
        self,
        u: Tensor | None,
        start: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> FixedPoint:
        """u, start: (batch, n, d). The start is u if None; a u of None is zero, and needs a start.

        key_padding_mask: bool (batch, n), True = **ignored**: zero in the result.
        """
        tokens = _check_operands(u, start, key_padding_mask, self.attention.output)
        dtype = working_dtype(tokens, self.attention.output)
        with full_precision(tokens):
            block = self._block(tokens.shape[1], key_padding_mask, dtype)
            begin = _zero_ignored(tokens if start is None else start, key_padding_mask).to(dtype)
            added = None if u is None else _zero_ignored(u, key_padding_mask).to(dtype)

            def step(x: Tensor) -> Tensor:
                return block(x) if added is None else block(x) + added

            with torch.no_grad():
                iterate = self.solver.run(step, begin.detach())
            points = iterate.points
            moving = (*self.parameters(), points if added is None else added)
            if torch.is_grad_enabled() and any(x.requires_grad for x in moving):
                points = _attach(step, points, self.solver)
        return self._round(points, iterate, added, tokens.dtype, block.constant)

    def constant(self, tokens: int) -> float:
        """Of T with the present weights, in the l2 norm of a sequence of so many tokens."""
        check_whole(tokens, "tokens", 1)
        with torch.no_grad():
            weight = self.attention.output
            return self._block(tokens, None, working_dtype(weight, weight)).constant

    def bound(self, tokens: int) -> Bound:
        """Of T with the present weights, to be attacked."""
        parts = (self.attention.bound(tokens), self.feedforward.bound(tokens))
        first, then = (mix(part, self.mixing) for part in parts)
        return compose(first, then)

    def extra_repr(self) -> str:
        return f"mixing={self.mixing:g}, solver={self.solver}"

    def get_extra_state(self) -> Tensor:
        """What the weights do not say, as numbers; the solver may be another."""
        return as_numbers(self.mixing)

    def set_extra_state(self, state: object) -> None:
        check_numbers(self, state, ("mixing",))

    def _round(
        self,
        points: Tensor,
        iterate: Iterate,
        added: Tensor | None,
        dtype: torch.dtype,
        constant: float,
    ) -> FixedPoint:
        """In the dtype of the operands, in which points may be less precise, or too large."""
        rounded = points.to(dtype)
        exact = iterate.points.detach()
        moved = _size(rounded.detach().to(exact.dtype) - exact)
        lost = ~moved.isfinite()
        status = torch.where(lost, Status.NONFINITE.value, iterate.status)
        rounded = where(~lost.reshape(-1, 1, 1), rounded, math.nan)
        # T is a chain of sums, whose roundings grow like the root of their length
        longest = max(exact.shape[1], *self.feedforward.inner.shape)
        share = 4 * math.sqrt(longest) * torch.finfo(exact.dtype).eps
        size = _size(exact) if added is None else _size(exact) + _size(added.detach())
        return FixedPoint(
            points=rounded,
            residual=iterate.residual,
            steps=iterate.steps,
            status=status,
            constant=constant,
            rounding=share * size,
            cast=moved,
        )

    def _block(self, tokens: int, ignored: Tensor | None, dtype: torch.dtype) -> BoundedMap:
        """T with the present weights."""
        attention = self.attention.bounded_map(tokens, ignored, dtype)
        feedforward = self.feedforward.bounded_map(dtype)
        a = self.mixing

        def function(x: Tensor) -> Tensor:
            x = (1 - a) * x + a * attention(x)
            return _zero_ignored((1 - a) * x + a * feedforward(x), ignored)

        lipschitz = (attention.constant, feedforward.constant)
        return BoundedMap(function, math.prod(mixed_constant(c, a) for c in lipschitz))


# ---- iteration


class _IterationState:
    """The state of all sequences: x, T(x), the residual; and the past, for acceleration."""

    def __init__(self, solver: Iteration, step: Step, start: Tensor) -> None:
        self.solver, self.shape, self.left = solver, start.shape, solver.max_steps
        self.step = step
        self.numbers = math.prod(start.shape[1:])
        precision = torch.finfo(start.dtype).eps
        self.tolerance = 64 * precision if solver.tolerance is None else solver.tolerance
        self.ridge = 16 * precision
        self.x = start.reshape(len(start), self.numbers)
        self.image, self.residual = self._evaluate(self.x)
        self.steps = torch.ones_like(self.residual, dtype=torch.long)
        self.plain = torch.ones_like(self.residual, dtype=torch.bool)  # after a failed acceleration
        # (batch, numbers) each, of norm one or zero: changes of T(x) - x, and of T(x) with them
        self.changes: list[tuple[Tensor, Tensor]] = []

    @property
    def is_done(self) -> Tensor:
        """(batch): at rest, or lost."""
        size = math.sqrt(self.numbers) + self.x.norm(dim=-1)
        is_at_rest: Tensor = self.residual <= self.tolerance * size
        return is_at_rest | ~self.residual.isfinite()

    def advance(self) -> None:
        """One evaluation. Sequences that are done stay where they are."""
        active = ~self.is_done
        there = torch.where(self.plain.unsqueeze(-1), self.image, self._accelerate())
        image, residual = self._evaluate(torch.where(active.unsqueeze(-1), there, self.x))
        is_accepted = active & (self.plain | (residual < self.residual))
        self._remember(there, image, is_accepted, active)
        keep = is_accepted.unsqueeze(-1)
        self.x, self.image = torch.where(keep, there, self.x), torch.where(keep, image, self.image)
        self.residual = torch.where(is_accepted, residual, self.residual)
        self.plain = ~is_accepted if self.changes else torch.ones_like(is_accepted)
        self.steps = self.steps + active.long()

    def result(self) -> Iterate:
        lost = ~self.residual.isfinite()
        status = torch.where(self.is_done, Status.OK.value, Status.MAX_STEPS.value)
        status = torch.where(lost, Status.NONFINITE.value, status)
        points = where(~lost.unsqueeze(-1), self.x, math.nan).reshape(self.shape)
        return Iterate(points, self.residual, self.steps, status)

    def _evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """T(x) and |T(x) - x|: (batch, numbers), (batch)"""
        self.left -= 1
        image = self.step(x.reshape(self.shape)).reshape(x.shape)
        return image, (image - x).norm(dim=-1)

    def _remember(self, there: Tensor, image: Tensor, is_accepted: Tensor, active: Tensor) -> None:
        """The change of a step that was taken; a step that was not makes forget all."""
        if not self.solver.memory:
            return
        change, image_change = (image - there) - (self.image - self.x), image - self.image
        size = change.norm(dim=-1, keepdim=True)
        use = is_accepted.unsqueeze(-1) & (size > 0)
        size = torch.where(use, size, 1.0)
        newest = (where(use, change / size, 0.0), where(use, image_change / size, 0.0))
        keeps_memory = (is_accepted | ~active).unsqueeze(-1)
        old = [(where(keeps_memory, a, 0.0), where(keeps_memory, b, 0.0)) for a, b in self.changes]
        self.changes = [*old, newest][-self.solver.memory :]

    def _accelerate(self) -> Tensor:
        """T(x) less the combination of past changes that would cancel T(x) - x best."""
        if not self.changes:
            return self.image
        changes, image_changes = (torch.stack(x, -1) for x in zip(*self.changes, strict=True))
        gram = changes.mT @ changes  # (batch, memory, memory)
        gram = gram + self.ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        aim = changes.mT @ (self.image - self.x).unsqueeze(-1)
        share: Tensor = torch.linalg.solve_ex(gram, aim)[0]
        return self.image - (image_changes @ share).squeeze(-1)


# ---- derivative


def _attach(step: Step, points: Tensor, solver: Iteration) -> Tensor:
    """The points, with the derivative of the fixed point X = T(X) that they are."""
    leaf = points.detach().requires_grad_()
    image = step(leaf)

    def linearise(x: Tensor, moved: Tensor) -> tuple[Tensor, Solve]:
        return moved - x, partial(_pull_back, image, leaf, solver, x)

    return implicit_root(points, linearise, image)


def _pull_back(
    image: Tensor, leaf: Tensor, solver: Iteration, root: Tensor, gradient: Tensor
) -> Tensor:
    """g = gradient + (dT/dX)' g, by iteration."""
    incoming = gradient.detach()
    # In units of the gradient's own size: a loss may be scaled by anything.
    numbers = math.prod(incoming.shape[1:])
    size = incoming.flatten(1).norm(dim=-1) / math.sqrt(max(1, numbers))
    size = torch.where(size > 0, size, 1.0).reshape(-1, *(1,) * (incoming.dim() - 1))
    unit = incoming / size

    def step(g: Tensor) -> Tensor:
        return unit + torch.autograd.grad(image, leaf, g, retain_graph=True)[0]

    with torch.no_grad():
        end = solver.run(step, unit)
    late = int((end.status == Status.MAX_STEPS.value).sum())
    if late:
        warnings.warn(
            f"the derivative of {late} of {len(incoming)} sequences did not converge in "
            f"{solver.max_steps} steps (residual up to {end.residual.max():.1e} of its "
            "size); raise max_steps, or lower the constants below one",
            RuntimeWarning,
            stacklevel=2,
        )
    return without_derivative(end.points * size, gradient, root, refusal=_ONCE)


def _size(x: Tensor) -> Tensor:
    """(batch, ...) -> (batch)"""
    size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=-1)
    return size


def _zero_ignored(x: Tensor, ignored: Tensor | None) -> Tensor:
    return x if ignored is None else where(~ignored.unsqueeze(-1), x, 0.0)


# ---- checks


def _check_block(attention: object, feedforward: object, mixing: object) -> None:
    if not isinstance(attention, LipschitzAttention):
        kind = type(attention).__name__
        raise TypeError(f"attention must be a LipschitzAttention, got {kind}")
    if not isinstance(feedforward, LipschitzFeedForward):
        kind = type(feedforward).__name__
        raise TypeError(f"feedforward must be a LipschitzFeedForward, got {kind}")
    if attention.embed_dim != feedforward.embed_dim:
        widths = f"{attention.embed_dim} and {feedforward.embed_dim}"
        raise ValueError(f"attention and feedforward must have the same embed_dim, got {widths}")
    number = isinstance(mixing, int | float) and not isinstance(mixing, bool)
    if not number or not 0 < mixing <= 1:  # type: ignore[operator]
        raise ValueError(f"mixing must be a number in (0, 1], got {mixing!r}; 1 replaces all")


def _check_operands(
    u: Tensor | None, start: Tensor | None, mask: Tensor | None, weight: Tensor
) -> Tensor:
    """The one that says shape and dtype."""
    tokens = start if u is None else u
    if tokens is None:
        raise ValueError("give u, the input of every step, or a start for an iteration without one")
    for name, x in (("u", u), ("start", start)):
        if x is not None:
            check_input(x, len(weight), name)
            check_dtype(x, weight, name)
    if u is not None and start is not None and u.shape != start.shape:
        raise ValueError(
            f"u and start must have the same shape, got u {tuple(u.shape)} and start "
            f"{tuple(start.shape)}"
        )
    check_mask(mask, tokens)
    return tokens
