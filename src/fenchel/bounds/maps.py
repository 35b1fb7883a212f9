"""Bounds of maps of vectors: how they are tried, and how two of them compose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.bounds.bound import ROUNDING, Bound, State, Trials, agree
from fenchel.bounds.domain import Ball, Domain, Everywhere
from fenchel.bounds.norms import VectorNorm, length, top_direction, top_functional

Guesses = Callable[[int, torch.Generator], Tensor]
_NEAR = 1e-6  # how far a witness's inputs are from each other, relative to their size


@dataclass(frozen=True, eq=False)
class VectorMap:
    """x -> function(x), for x of a convex domain.

    function: (count, *shape) -> (count, ...). shape: of one input; tokens are the last axis.
    norm: of differences of inputs and of outputs.
    reach: no token of an output is longer (l2), for inputs of the domain.
    """

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    domain: Domain
    norm: VectorNorm = 2.0
    reach: float = math.inf

    def __post_init__(self) -> None:
        if not callable(self.function):
            kind = type(self.function).__name__
            raise TypeError(f"function must be callable, got {kind}")
        if not isinstance(self.domain, Domain):
            raise TypeError(
                f"domain must be Everywhere(), Ball(radius) or Box(radius), got {self.domain!r}"
            )
        for size in self.shape:
            check_whole(size, "tokens and d", 1)

    @property
    def output_shape(self) -> torch.Size:
        """Of one output."""
        start = self.domain.project(torch.zeros(1, *self.shape, dtype=torch.float64))
        with torch.no_grad():
            return self.function(start).shape[1:]

    def length(self, x: Tensor) -> Tensor:
        """Of inputs, or of their differences: (count, *shape) -> (count)"""
        return length(x, self.norm, len(self.shape))


@dataclass(frozen=True, eq=False)
class TrialStart:
    """Where trials of a map begin.

    unit: the size of inputs that matter, where the domain gives none.
    guesses: (count, generator) -> inputs (count, *shape) to begin with.
    far: in units, how long the tokens of a trial may be where the domain has no end: beyond it the
    function's rounding would be what is observed.
    """

    unit: float = 1.0
    guesses: Guesses | None = None
    far: float = 1e8


@dataclass(frozen=True, eq=False)
class MapTrials(Trials):
    """Pairs (x, y) for a map that has a bound on a convex domain.

    A trial is worth the larger of two quotients: the tangent's at x towards y, and that of the
    secant to y, or to the point of the domain nearest to it. On a convex domain the two have the
    same supremum, and tangents reach it without cancellation.
    """

    inputs = ("x", "y")

    map: VectorMap
    start: TrialStart = TrialStart()

    def sample(self, count: int, generator: torch.Generator) -> State:
        shape = torch.Size(self.map.shape)
        x = self.map.domain.sample(count, shape, self.start.unit, generator)
        return self._with_neighbours(x, generator)

    def suspects(self, count: int, generator: torch.Generator) -> State | None:
        if self.start.guesses is None:
            return None
        return self._with_neighbours(self.start.guesses(count, generator), generator)

    def project(self, state: State) -> State:
        x, y = state
        domain = self.map.domain
        if isinstance(domain, Everywhere):
            domain = Ball(self.start.far * self.start.unit)
        inside = domain.project(x)
        return inside, inside + (y - x)

    def allows(self, state: State) -> bool:
        for x in state:
            if x.shape[1:] != self.map.shape:
                shapes = f"{tuple(self.map.shape)}, got {tuple(x.shape[1:])}"
                raise ValueError(f"this bound is for inputs of shape {shapes}")
        return agree(state, tuple(self.map.domain.project(x) for x in state))

    def quotient(self, state: State) -> Tensor:
        x, y = (z.to(torch.float64) for z in state)
        here, tangent = torch.func.jvp(self.map.function, (x,), (y - x,))  # type: ignore[misc]
        slope = _over(length(tangent, self.map.norm, here.dim() - 1), self.map.length(y - x))
        return torch.maximum(slope, self._chord(x, here, self.map.domain.project(y)))

    def observed(self, state: State) -> Tensor:
        x, y = (z.to(torch.float64) for z in state)
        return self._chord(x, self.map.function(x), y)

    def witness(self, state: State) -> State:
        """y itself, or near x along the same line on either side: whichever shows most."""
        domain = self.map.domain
        x, y = (z.to(torch.float64) for z in state)
        x = domain.project(x)
        wide = (-1, *(1,) * len(self.map.shape))
        long = (y - x).flatten(1).norm(dim=-1).clamp_min(1e-300)
        size = x.flatten(1).norm(dim=-1).clamp_min(self.start.unit)
        step = (y - x) * (_NEAR * size / long).reshape(wide)
        there = [domain.project(z) for z in (y, x + step, x - step)]
        quotients = torch.stack([self.observed((x, z)) for z in there])  # (3, count)
        best = torch.stack(there)[quotients.argmax(0), torch.arange(len(x))]
        return x, best

    def _chord(self, x: Tensor, here: Tensor, y: Tensor) -> Tensor:
        """|f(y) - f(x)| / |y - x|, less what rounding may have made of the difference."""
        there = self.map.function(y)
        axes = here.dim() - 1
        apart = length(there - here, self.map.norm, axes)
        size = length(there.abs() + here.abs(), self.map.norm, axes)
        return _over((apart - 1e-15 * size).clamp_min(0), self.map.length(y - x))

    def aim(self, state: State) -> State:
        """The direction that the map at x stretches most, by one step of a power method (Boyd,
        1974): towards the functional that is largest on the image, pulled back."""
        x, y = state
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            output = self.map.function(leaf)
            image = torch.func.jvp(self.map.function, (x,), (y - x,))[1]
            functional = top_functional(image, self.map.norm)
            (pulled,) = torch.autograd.grad(output, leaf, functional)
        step = top_direction(pulled, self.map.norm)
        wide = (-1, *(1,) * (x.dim() - 1))
        long = step.flatten(1).norm(dim=-1)
        size = _over((y - x).flatten(1).norm(dim=-1), long)
        # where nothing is stretched, no direction is better than another
        return x, torch.where((long > 0).reshape(wide), x + step * size.reshape(wide), y)

    def _with_neighbours(self, x: Tensor, generator: torch.Generator) -> State:
        """y at any distance from x, from a thousandth of its size to ten times that."""
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        away = 10 ** (4 * torch.rand(len(x), generator=generator, dtype=torch.float64) - 3)
        least = 1e-3 * self.start.unit
        size = x.flatten(1).norm(dim=-1).clamp_min(least) / noise.flatten(1).norm(dim=-1)
        y = x + (away * size).reshape(-1, *(1,) * (x.dim() - 1)) * noise
        return self.project((x, y))


def _over(image: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, image / torch.where(size > 0, size, 1.0), 0.0)


# ---- two maps, one after the other


def compose(first: Bound, then: Bound) -> Bound:
    """Of x -> then(first(x)): the product, where `then` holds on all that `first` may give."""
    before, after = trials_of(first, "first"), trials_of(then, "then")
    if first.norm != then.norm:
        raise ValueError(f"both need the same norm, got {first.norm} and {then.norm}")
    _check_reach(before.map, after.map)
    inner, outer = before.map.function, after.map.function
    both = replace(before.map, function=lambda x: outer(inner(x)), reach=after.map.reach)
    needed = (x for x in then.assumptions if x != str(after.map.domain))  # the domain was proven
    return Bound(
        name=f"{then.name} after {first.name}",
        value=_product(first.value, then.value),
        norm=first.norm,
        assumptions=tuple(dict.fromkeys((*first.assumptions, *needed))),
        trials=replace(before, map=both),
    )


def _product(first: float, second: float) -> float:
    return 0.0 if 0.0 in (first, second) else first * second


def trials_of(bound: Bound, name: str) -> MapTrials:
    """Of a bound of a map; `name` says which argument it was."""
    if not isinstance(bound.trials, MapTrials):
        raise TypeError(f"{name} must bound a map of vectors, got {bound.name}")
    return bound.trials


def _check_reach(first: VectorMap, then: VectorMap) -> None:
    """All that the first may give lies where the second holds."""
    output = first.output_shape
    if output != then.shape:
        shapes = f"{tuple(output)} and {tuple(then.shape)}"
        raise ValueError(f"the first map's outputs do not fit the second's inputs: {shapes}")
    if isinstance(then.domain, Everywhere):
        return
    centre = then.domain.centre if isinstance(then.domain, Ball) else None
    needed = first.reach + (0.0 if centre is None else float(centre.norm(dim=-1).max()))
    if needed > then.domain.radius * (1 + ROUNDING):  # no coordinate exceeds its token's length
        raise ValueError(
            f"the second bound holds for {then.domain}, but the first map may give tokens of "
            f"length {first.reach:g}; bound the second where they lie"
        )
