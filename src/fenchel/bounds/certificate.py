"""What a certificate is: a bound, where it holds, in which norm, and trials that could break it.

    |f(x) - f(y)| <= bound |x - y|     for all x, y of the domain.

A *trial* is a pair of inputs and the quotient it observes, |f(x) - f(y)| / |x - y|. Certificates
about measures are of the same form with a distance between measures on either side, so they differ
in their trials only. `attack` looks for the trial with the largest quotient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fenchel.bounds.domain import Ball, Domain, Everywhere

State = tuple[Tensor, ...]  # of many trials: each (count, ...)
_NEAR = 1e-6  # how far a witness's inputs are from each other, relative to their size
ROUNDING = 1e-9  # a quotient may exceed its bound by that much of it


class Check(NamedTuple):
    """quotient: of the inputs' own outputs. ratio: of it to the bound. holds: at most one, up to
    rounding."""

    quotient: float
    ratio: float
    holds: bool


class Trials(ABC):
    """How to try a certificate. inputs: what one trial is made of, in words."""

    inputs: ClassVar[tuple[str, ...]]

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> State:
        """At random."""

    @abstractmethod
    def quotient(self, state: State) -> Tensor:
        """(count): distance of the outputs over that of the inputs, differentiable; 0 for 0 / 0."""

    @abstractmethod
    def project(self, state: State) -> State:
        """Back into where the certificate holds."""

    def allows(self, state: State) -> bool:
        """Whether the certificate speaks of these inputs."""
        return _same(state, self.project(state))

    def observed(self, state: State) -> Tensor:
        """(count): the quotient of these very inputs."""
        return self.quotient(state)

    def witness(self, state: State) -> State:
        """Inputs of the domain whose own quotient is near what was found at `state`."""
        return state

    def suspects(self, count: int, generator: torch.Generator) -> State | None:
        """Where an attacker who knows the proof would look first."""
        return None

    def aim(self, state: State) -> State:
        """Improved where that can be computed; as it is otherwise."""
        return state


@dataclass(frozen=True, eq=False)
class Certificate:
    """A sound upper bound of a Lipschitz constant.

    bound: may be infinite: true, and of no use.
    norm: of the differences of inputs and outputs, in words where it is not a number.
    assumptions: all that the bound needs, in words.
    """

    name: str
    bound: float
    norm: float | str
    assumptions: tuple[str, ...]
    trials: Trials

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ValueError(
                f"the bound of {self.name} must be a number >= 0, got {self.bound}; where it came "
                "out as NaN the inputs are too large for float64: scale them down"
            )

    def check(self, *inputs: Tensor) -> Check:
        """One trial of your own: for a map two inputs, x and y."""
        named = self.trials.inputs
        if len(inputs) != len(named):
            shown = ", ".join(named)
            raise TypeError(f"check takes {len(named)} tensors ({shown}), got {len(inputs)}")
        state = tuple(torch.as_tensor(x).detach().double().unsqueeze(0) for x in inputs)
        if not self.trials.allows(state):
            given = "; ".join(self.assumptions)
            raise ValueError(f"these inputs lie outside of what is certified: {given}")
        with torch.no_grad():
            quotient = float(self.trials.observed(state))
        ratio = quotient / self.bound if self.bound > 0 else math.inf if quotient > 0 else 0.0
        return Check(quotient, ratio, ratio <= 1 + ROUNDING)

    def __str__(self) -> str:
        given = "; ".join(self.assumptions)
        return f"{self.name}: at most {self.bound:.6g} in norm {self.norm}, given {given}"


def _same(one: State, other: State) -> bool:
    """Up to rounding."""
    pairs = zip(one, other, strict=True)
    return all(bool((x - y).abs().le(ROUNDING * (1 + x.abs())).all()) for x, y in pairs)


# ---- maps of vectors


def length(x: Tensor, norm: float | str, axes: int) -> Tensor:
    """Of x (count, ..., *shape of `axes` axes). (count, ...)

    "tokens": the longest token in the l2 norm; a number: of all coordinates together.
    """
    if norm == "tokens":
        tokens: Tensor = torch.linalg.vector_norm(x, dim=-1)
        return tokens.flatten(1 - axes).amax(-1) if axes > 1 else tokens
    size: Tensor = torch.linalg.vector_norm(x.flatten(-axes), norm, dim=-1)
    return size


def _over(image: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, image / torch.where(size > 0, size, 1.0), 0.0)


def _functional(image: Tensor, norm: float | str) -> Tensor:
    """Of dual norm one, up to a factor, and largest on the image (count, ...)."""
    flat = image.flatten(1)
    if norm == 1:
        return image.sign()
    if norm == 2:
        return image
    if norm == "tokens":
        size: Tensor = torch.linalg.vector_norm(image, dim=-1)
        longest = size == size.flatten(1).amax(-1).reshape(-1, *(1,) * (size.dim() - 1))
        return image * longest.unsqueeze(-1)
    largest = flat.abs() == flat.abs().amax(-1, keepdim=True)
    return (flat.sign() * largest).view_as(image)


def _direction(pulled: Tensor, norm: float | str) -> Tensor:
    """Of norm one, up to a factor, and with the largest product with `pulled` (count, ...)."""
    flat = pulled.flatten(1)
    if norm == 1:
        return (flat.sign() * (flat.abs() == flat.abs().amax(-1, keepdim=True))).view_as(pulled)
    if norm == 2:
        return pulled
    if norm == "tokens":
        size: Tensor = torch.linalg.vector_norm(pulled, dim=-1, keepdim=True)
        return pulled / size.clamp_min(1e-300)
    return pulled.sign()


@dataclass(frozen=True, eq=False)
class MapTrials(Trials):
    """Pairs (x, y) for a map that is certified on a convex domain.

    A trial is worth the larger of two quotients: the tangent's at x towards y, and that of the
    secant to y, or to the point of the domain nearest to it. On a convex domain the two have the
    same supremum, and tangents reach it without cancellation.

    function: (count, *shape) -> (count, ...). unit: the size of inputs that matter, where the
    domain gives none. guesses: (count, generator) -> inputs (count, *shape) to begin with.
    reach: no token of an output is longer (l2), for inputs of the domain.
    far: in units, how long the tokens of a trial may be where the domain has no end: beyond it the
    function's own rounding would be what is observed.
    """

    inputs = ("x", "y")

    function: Callable[[Tensor], Tensor]
    shape: torch.Size
    domain: Domain
    norm: float | str = 2.0
    unit: float = 1.0
    guesses: Callable[[int, torch.Generator], Tensor] | None = None
    reach: float = math.inf
    far: float = 1e8

    def sample(self, count: int, generator: torch.Generator) -> State:
        x = self.domain.sample(count, self.shape, self.unit, generator)
        return self._with_neighbours(x, generator)

    def suspects(self, count: int, generator: torch.Generator) -> State | None:
        if self.guesses is None:
            return None
        return self._with_neighbours(self.guesses(count, generator), generator)

    def project(self, state: State) -> State:
        x, y = state
        domain = Ball(self.far * self.unit) if isinstance(self.domain, Everywhere) else self.domain
        inside = domain.project(x)
        return inside, inside + (y - x)

    def allows(self, state: State) -> bool:
        for x in state:
            if x.shape[1:] != self.shape:
                shapes = f"{tuple(self.shape)}, got {tuple(x.shape[1:])}"
                raise ValueError(f"this certificate is for inputs of shape {shapes}")
        return _same(state, tuple(self.domain.project(x) for x in state))

    def quotient(self, state: State) -> Tensor:
        x, y = (z.to(torch.float64) for z in state)
        here, tangent = torch.func.jvp(self.function, (x,), (y - x,))  # type: ignore[misc]
        slope = _over(length(tangent, self.norm, here.dim() - 1), self._length(y - x))
        return torch.maximum(slope, self._chord(x, here, self.domain.project(y)))

    def observed(self, state: State) -> Tensor:
        x, y = (z.to(torch.float64) for z in state)
        return self._chord(x, self.function(x), y)

    def witness(self, state: State) -> State:
        """y itself, or near x along the same line on either side: whichever shows most."""
        x, y = (z.to(torch.float64) for z in state)
        x = self.domain.project(x)
        wide = (-1, *(1,) * len(self.shape))
        long = (y - x).flatten(1).norm(dim=-1).clamp_min(1e-300)
        size = x.flatten(1).norm(dim=-1).clamp_min(self.unit)
        step = (y - x) * (_NEAR * size / long).reshape(wide)
        there = [self.domain.project(z) for z in (y, x + step, x - step)]
        shown = torch.stack([self.observed((x, z)) for z in there])  # (3, count)
        best = torch.stack(there)[shown.argmax(0), torch.arange(len(x))]
        return x, best

    def _chord(self, x: Tensor, here: Tensor, y: Tensor) -> Tensor:
        """|f(y) - f(x)| / |y - x|, less what rounding may have made of the difference."""
        there = self.function(y)
        outward = here.dim() - 1
        apart = length(there - here, self.norm, outward)
        size = length(there.abs() + here.abs(), self.norm, outward)
        return _over((apart - 1e-15 * size).clamp_min(0), self._length(y - x))

    def aim(self, state: State) -> State:
        """The direction that the map at x stretches most, by one step of a power method (Boyd,
        1974): towards the functional that is largest on the image, pulled back."""
        x, y = state
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            made = self.function(leaf)
            image = torch.func.jvp(self.function, (x,), (y - x,))[1]
            weights = _functional(image, self.norm)
            (pulled,) = torch.autograd.grad(made, leaf, weights)
        step = _direction(pulled, self.norm)
        wide = (-1, *(1,) * (x.dim() - 1))
        long = step.flatten(1).norm(dim=-1)
        size = _over((y - x).flatten(1).norm(dim=-1), long)
        # where nothing is stretched, no direction is better than another
        return x, torch.where((long > 0).reshape(wide), x + step * size.reshape(wide), y)

    def _length(self, x: Tensor) -> Tensor:
        return length(x, self.norm, len(self.shape))

    def _with_neighbours(self, x: Tensor, generator: torch.Generator) -> State:
        """y at any distance from x, from a thousandth of its size to ten times that."""
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        away = 10 ** (4 * torch.rand(len(x), generator=generator, dtype=torch.float64) - 3)
        size = x.flatten(1).norm(dim=-1).clamp_min(1e-3 * self.unit) / noise.flatten(1).norm(dim=-1)
        y = x + (away * size).reshape(-1, *(1,) * (x.dim() - 1)) * noise
        return self.project((x, y))


def compose(first: Certificate, then: Certificate) -> Certificate:
    """Of x -> then(first(x)): the product, where `then` holds on all that `first` may give."""
    one, two = as_maps(first, "first"), as_maps(then, "then")
    if first.norm != then.norm:
        raise ValueError(f"both need the same norm, got {first.norm} and {then.norm}")
    _check_reach(one, two)
    trials = replace(one, function=lambda x: two.function(one.function(x)), reach=two.reach)
    needed = (x for x in then.assumptions if x != str(two.domain))  # the domain was proven
    return Certificate(
        name=f"{then.name} after {first.name}",
        bound=_product(first.bound, then.bound),
        norm=first.norm,
        assumptions=tuple(dict.fromkeys((*first.assumptions, *needed))),
        trials=trials,
    )


def _product(first: float, second: float) -> float:
    return 0.0 if 0.0 in (first, second) else first * second


def as_maps(certificate: Certificate, name: str) -> MapTrials:
    if not isinstance(certificate.trials, MapTrials):
        raise TypeError(f"{name} must certify a map of vectors, got {certificate.name}")
    return certificate.trials


def _check_reach(one: MapTrials, two: MapTrials) -> None:
    """All that the first may give lies where the second holds."""
    made = image_shape(one)
    if made != two.shape:
        shapes = f"{tuple(made)} and {tuple(two.shape)}"
        raise ValueError(f"the first map's outputs do not fit the second's inputs: {shapes}")
    if isinstance(two.domain, Everywhere):
        return
    centre = two.domain.centre if isinstance(two.domain, Ball) else None
    needed = one.reach + (0.0 if centre is None else float(centre.norm(dim=-1).max()))
    if needed > two.domain.radius * (1 + ROUNDING):  # no coordinate exceeds its token's length
        raise ValueError(
            f"the second certificate holds for {two.domain}, but the first map may give tokens of "
            f"length {one.reach:g}; certify the second where they lie"
        )


def image_shape(trials: MapTrials) -> torch.Size:
    """Of one output."""
    start = torch.zeros(1, *trials.shape, dtype=torch.float64)
    with torch.no_grad():
        return trials.function(trials.project((start, start))[0]).shape[1:]
