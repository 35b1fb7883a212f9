"""Contraction of attention as a map of measures, in W1 with the l1 norm: the constants of Vuckovic,
Baratin and Tachet des Combes (2020), corrected where they are false and sharpened where they are
loose (Vuckovic et al., 2020, propositions 19 to 25).

E is a ball or a box, on which eps <= G <= top, G(., y) is Lx-Lipschitz and G(x, .) Ly-Lipschitz; D
is its l1 diameter, K the Lipschitz constant of the lookup. Then

    in_query         W1(Psi_{G(x,.)} mu, Psi_{G(y,.)} mu) <= Lx D / (2 eps) |x - y|
    in_measure       W1(Psi_G mu, Psi_G nu)               <= (Ly D + top) / eps W1(mu, nu)
    projection       W1(Pi mu, Pi nu)                     <= W1(mu, nu)
    attention        W1(mu A_mu, nu A_nu)            <= K ((Lx / 2 + Ly) D + top) / eps W1(mu, nu)
    attention_query  |A_mu(x) - A_mu(y)|_2                <= sqrt(d) K Lx D / (2 eps) |x - y|_2
    neighbourhood    |A_mu(x) - A_nu(x)|_1                <= K (Ly D + top) / eps W1(mu, nu).

Proofs. With G_s = (1 - s) G_x + s G_y, the derivative in s of Psi_{G_s} mu(f) is Cov(h / G_s, f),
h = G_y - G_x, at most sup|h| / eps times half the oscillation of f: the first. With
k = Psi_G nu(f), Psi_G mu(f) - Psi_G nu(f) = (mu - nu)(G (f - k)) / mu(G), and G (f - k) has the
Lipschitz constant Ly D + top: the second. Jensen: the third. The others compose them.

They divide by the smallest value of the potential: exp(2 R^2 / tau) and the like. They are true,
and for real layers astronomically large; `query_lipschitz` is what to use there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_finite, check_whole
from fenchel.bounds.bound import Bound, State, Trials
from fenchel.bounds.domain import Ball, Box
from fenchel.bounds.norms import VectorNorm, Wasserstein1
from fenchel.measures import (
    AttentionKernel,
    Dot,
    Empirical,
    GaussianPotential,
    Lookup,
    Measure,
    ScaledDot,
    Softmatch,
)
from fenchel.measures.affine import identity
from fenchel.measures.distances import wasserstein1
from fenchel.measures.potentials import InteractionPotential

Space = Ball | Box
_W1 = Wasserstein1()


@dataclass(frozen=True)
class PotentialBounds:
    """Of G on a set: log of its least and largest value, and log of its slopes in x and in y (l1).

    Logarithms, since the numbers themselves often overflow.
    """

    log_least: float
    log_most: float
    log_query_slope: float
    log_key_slope: float


def potential_bounds(potential: InteractionPotential, space: Space, dim: int) -> PotentialBounds:
    """For dot, scaled dot and Gaussian potentials, without projections."""
    if isinstance(potential, Dot | ScaledDot):
        temperature = math.sqrt(dim) if potential.temperature is None else potential.temperature
        _check_plain(potential)
        inner = space.radius * space.radius * (1 if isinstance(space, Ball) else dim) / temperature
        slope = inner + math.log(space.radius / temperature)
        return PotentialBounds(-inner, inner, slope, slope)
    if isinstance(potential, GaussianPotential):
        _check_plain(potential)
        across = 2 * space.radius * (1 if isinstance(space, Ball) else math.sqrt(dim))
        slope = 0.5 * math.log(2 / (math.e * potential.temperature))
        return PotentialBounds(-(across * across) / potential.temperature, 0.0, slope, slope)
    raise TypeError(
        "bounds are derived for Dot, ScaledDot and GaussianPotential, got "
        f"{type(potential).__name__}; give `bounds=PotentialBounds(...)` for another potential"
    )


def _check_plain(potential: Dot | ScaledDot | GaussianPotential) -> None:
    if potential.query is not identity or potential.key is not identity:
        raise ValueError(
            "bounds are for potentials without projections; project the points first, or give "
            "`bounds=PotentialBounds(...)`"
        )


# ---- the bounds


@dataclass(frozen=True)
class Setting:
    """Measures of `size` points in `space`, a set of R^dim, and a potential on it.

    bounds: of the potential there; computed if None.
    """

    potential: InteractionPotential
    space: Space
    dim: int
    size: int = 4
    bounds: PotentialBounds | None = None

    def __post_init__(self) -> None:
        check_whole(self.dim, "dim", 1)
        check_whole(self.size, "size", 1)
        if not isinstance(self.space, Ball | Box):
            raise TypeError(
                f"space must be a Ball or a Box, got {self.space!r}: on an unbounded set these "
                "potentials come as near to zero as one likes; give the radius of your tokens"
            )
        if isinstance(self.space, Ball) and self.space.centre is not None:
            raise ValueError("space must be centred at zero; move the points first")

    @property
    def diameter(self) -> float:
        """In the l1 norm."""
        return 2 * self.space.radius * (self.dim if isinstance(self.space, Box) else self.dim**0.5)

    def potential_bounds(self) -> PotentialBounds:
        return self.bounds or potential_bounds(self.potential, self.space, self.dim)

    def query_term(self) -> float:
        """Lx D / eps"""
        g = self.potential_bounds()
        return _exp(g.log_query_slope + math.log(self.diameter) - g.log_least)

    def measure_term(self) -> float:
        """(Ly D + top) / eps"""
        g = self.potential_bounds()
        slope = _exp(g.log_key_slope + math.log(self.diameter) - g.log_least)
        return slope + _exp(g.log_most - g.log_least)

    def assumptions(self) -> tuple[str, ...]:
        return (f"{self.space}, in R^{self.dim}", f"{type(self.potential).__name__} potential")


def in_query(setting: Setting) -> Bound:
    """x -> Psi_{G(x, .)} mu, in W1."""
    kernel = Softmatch(setting.potential)

    def moved(t: Trial) -> Tensor:
        at = kernel(t.mu)
        return wasserstein1(_first(at.at(t.x)), _first(at.at(t.y)))

    trials = MeasureTrials(setting, _apart, moved)
    return _bound("softmatch in its query", setting.query_term() / 2, setting, trials)


def in_measure(setting: Setting) -> Bound:
    """mu -> Psi_{G(x, .)} mu, for any one x, in W1."""
    kernel = Softmatch(setting.potential)

    def moved(t: Trial) -> Tensor:
        return wasserstein1(_first(kernel(t.mu).at(t.x)), _first(kernel(t.nu).at(t.x)))

    trials = MeasureTrials(setting, _between, moved)
    return _bound("softmatch in its measure", setting.measure_term(), setting, trials)


def projection(setting: Setting) -> Bound:
    """mu -> the Dirac at its mean, in W1: 1, whatever the potential."""

    def moved(t: Trial) -> Tensor:
        return (t.mu.mean - t.nu.mean).abs().sum(-1)

    trials = MeasureTrials(setting, _between, moved)
    return _bound("moment projection", 1.0, setting, trials)


def attention(setting: Setting, value: Tensor | None = None) -> Bound:
    """mu -> mu A_mu, one self-attention step, in W1; value (d, d): the lookup, identity if None."""
    kernel, steep = _attention(setting, value)

    def moved(t: Trial) -> Tensor:
        return wasserstein1(t.mu @ kernel(t.mu), t.nu @ kernel(t.nu))

    constant = _times(steep, setting.query_term() / 2 + setting.measure_term())
    trials = MeasureTrials(setting, _between, moved)
    return _bound("self-attention of measures", constant, setting, trials)


def attention_query(setting: Setting, value: Tensor | None = None) -> Bound:
    """x -> the output of attention at x, in the l2 norm."""
    kernel, steep = _attention(setting, value)

    def moved(t: Trial) -> Tensor:
        at = kernel(t.mu)
        return _length(at.at(t.x).mean - at.at(t.y).mean)

    def apart(t: Trial) -> Tensor:
        return _length(t.x - t.y)

    constant = _times(math.sqrt(setting.dim) * steep, setting.query_term() / 2)
    trials = MeasureTrials(setting, apart, moved)
    return _bound("attention in its query", constant, setting, trials, norm=2.0)


def neighbourhood(setting: Setting, value: Tensor | None = None) -> Bound:
    """The neighbourhood mu -> the output of attention at x: l1 of the outputs over W1."""
    kernel, steep = _attention(setting, value)

    def moved(t: Trial) -> Tensor:
        one, other = (kernel(measure).at(t.x).mean for measure in (t.mu, t.nu))
        return (one - other).squeeze(-2).abs().sum(-1)

    trials = MeasureTrials(setting, _between, moved)
    constant = _times(steep, setting.measure_term())
    return _bound("attention in its neighbourhood", constant, setting, trials)


def _attention(setting: Setting, value: Tensor | None) -> tuple[AttentionKernel, float]:
    """The kernel, and the lookup's Lipschitz constant in the l1 norm."""
    value = torch.eye(setting.dim, dtype=torch.float64) if value is None else value.double()
    check_finite(value, "value")
    if value.dim() != 2 or value.shape[1] != setting.dim:
        raise ValueError(f"value must be (e, {setting.dim}), got {tuple(value.shape)}")
    return AttentionKernel(setting.potential, lookup=Lookup(value)), float(value.abs().sum(0).max())


def _bound(
    name: str, value: float, setting: Setting, trials: Trials, norm: VectorNorm | Wasserstein1 = _W1
) -> Bound:
    return Bound(name, value, norm, setting.assumptions(), trials)


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def _times(one: float, other: float) -> float:
    return 0.0 if 0.0 in (one, other) else one * other


# ---- trials


@dataclass(frozen=True)
class Trial:
    """mu and nu, (count) measures each; x and y (count, 1, d)."""

    mu: Empirical
    nu: Empirical
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class MeasureTrials(Trials):
    """State: points and log-weights of mu, those of nu, x and y.

    apart, moved: the distance of the inputs, and of the outputs. (count)
    """

    inputs = (
        "points of mu (n, d)",
        "their log-weights (n)",
        "points of nu",
        "their log-weights",
        "x (1, d)",
        "y (1, d)",
    )

    setting: Setting
    apart: Callable[[Trial], Tensor]
    moved: Callable[[Trial], Tensor]

    def sample(self, count: int, generator: torch.Generator) -> State:
        """nu: new points, or those of mu a little moved, or its points with other weights."""
        s = self.setting

        def points(size: int) -> Tensor:
            shape = torch.Size((size, s.dim))
            return s.space.sample(count, shape, s.space.radius, generator)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(count, *shape, generator=generator, dtype=torch.float64)

        def logs() -> Tensor:  # from even weights to nearly one point
            noise = torch.randn(count, s.size, generator=generator, dtype=torch.float64)
            return noise * 10 * uniform(1) ** 3

        mu, x, log_mu, log_nu = points(s.size), points(1), logs(), logs()
        kind, small = uniform(1), 10 ** (-3 * uniform(1, 1))
        nu = torch.where(kind.unsqueeze(-1) < 0.7, mu, points(s.size))
        nu = torch.where(kind.unsqueeze(-1) < 0.4, mu + small * (points(s.size) - mu), nu)
        log_nu = torch.where(kind < 0.4, log_mu, log_nu)
        y = x + small * (points(1) - x)
        return self.project((mu, log_mu, nu, log_nu, x, y))

    def project(self, state: State) -> State:
        mu, log_mu, nu, log_nu, x, y = state
        inside = self.setting.space.project
        return inside(mu), log_mu, inside(nu), log_nu, inside(x), inside(y)

    def quotient(self, state: State) -> Tensor:
        mu, log_mu, nu, log_nu, x, y = (z.to(torch.float64) for z in state)
        trial = Trial(Empirical(mu, log_mu.softmax(-1)), Empirical(nu, log_nu.softmax(-1)), x, y)
        apart, moved = self.apart(trial), self.moved(trial)
        # less what rounding may have made of the outputs' distance
        moved = (moved - 1e-14 * self.setting.diameter).clamp_min(0)
        return torch.where(apart > 0, moved / torch.where(apart > 0, apart, 1.0), 0.0)


def _length(x: Tensor) -> Tensor:
    """(count, 1, d) -> (count), in the l2 norm."""
    size: Tensor = torch.linalg.vector_norm(x.squeeze(-2), dim=-1)
    return size


def _apart(t: Trial) -> Tensor:
    return (t.x - t.y).squeeze(-2).abs().sum(-1)


def _between(t: Trial) -> Tensor:
    return wasserstein1(t.mu, t.nu)


def _first(family: Measure) -> Empirical:
    """The measures K(x, .) for one x each: (count, 1, n, d) -> (count, n, d)."""
    assert isinstance(family, Empirical)
    return Empirical(family.points.squeeze(-3), family.weights.squeeze(-2))
