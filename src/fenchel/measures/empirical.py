"""Measures that sit on finitely many points: what tokens are, taken together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_tensor, has, where
from fenchel.measures.gaussian import GaussianMeasure
from fenchel.measures.measure import Function, Measure, average, check_offset, check_points, valued


@dataclass(frozen=True, eq=False)
class Empirical(Measure):
    """sum_i weights_i delta at points_i.

    >>> mu = Empirical(torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0.5, 0.25, 0.25]))
    >>> mu.mean
    tensor([1.2500])
    >>> mu.expectation(lambda x: x.square())
    tensor([4.2500])

    points: (..., n, d), float32 or float64.
    weights: (..., n), non-negative with sum 1; uniform by default.

    Leading axes broadcast and stand for many measures; points that all of them share need not be
    repeated.
    """

    points: Tensor
    weights: Tensor = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        check_points(self.points, "points")
        n = self.points.shape[-2]
        if n == 0:
            raise ValueError(f"a measure needs a point, got points {tuple(self.points.shape)}")
        if self.weights is None:
            weights = self.points.new_full((), 1 / n).expand(self.points.shape[:-1])
            object.__setattr__(self, "weights", weights)
            return
        _check_weights(self.weights, self.points)
        _check_total(self.weights)
        dtype = torch.promote_types(self.points.dtype, self.weights.dtype)
        object.__setattr__(self, "points", self.points.to(dtype))
        object.__setattr__(self, "weights", self.weights.to(dtype))

    @classmethod
    def of_masses(cls, points: Tensor, masses: Tensor) -> Empirical:
        """Weights in proportion to the masses (..., n), which may have any positive sum."""
        check_points(points, "points")
        _check_weights(masses, points, "masses")
        total = masses.sum(-1, keepdim=True)
        if has(~((total.detach() > 0) & total.detach().isfinite())):
            raise ValueError(
                "masses must have a positive, finite sum; a measure without mass cannot be "
                "normalised"
            )
        return cls(points, masses / total)

    @classmethod
    def _unchecked(cls, points: Tensor, weights: Tensor) -> Empirical:
        """Of numbers that are right by construction: sums that drift by rounding are kept."""
        measure = object.__new__(cls)
        object.__setattr__(measure, "points", points)
        object.__setattr__(measure, "weights", weights)
        return measure

    # ---- what it is

    @property
    def size(self) -> int:
        """n, points without mass and repeated ones included."""
        return self.points.shape[-2]

    @property
    def dim(self) -> int:
        return self.points.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        shape: torch.Size = torch.broadcast_shapes(self.points.shape[:-2], self.weights.shape[:-1])
        return shape

    @property
    def mean(self) -> Tensor:
        return self._expand(average(self.weights, self.points), self.dim)

    @property
    def covariance(self) -> Tensor:
        """E[(X - mean)(X - mean)']: divided by the whole mass, not by n - 1. (..., d, d)"""
        apart = self.points - self.mean.unsqueeze(-2)
        return (self.weights.unsqueeze(-1) * apart).mT @ apart

    def expectation(self, function: Function) -> Tensor:
        """E[function]: (...) for a function (..., n, d) -> (..., n), (..., e) for (..., n, e)."""
        return self.averages(function)[0]

    def averages(self, function: Function) -> tuple[Tensor, bool]:
        """E[function], and whether the function gives vectors."""
        values, vectors = valued(function, self.points)
        _check_values(values, self.weights)
        if vectors:
            return self._expand(average(self.weights, values)), True
        return self._expand(average(self.weights, values.unsqueeze(-1))).squeeze(-1), False

    def _expand(self, value: Tensor, size: int = -1) -> Tensor:
        lead = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return value.expand(*lead, size)

    def rows(self) -> Tensor:
        """The weights with every batch axis in full, (..., n); a view."""
        return self.weights.expand(*self.batch_shape, self.size)

    # ---- what can be made of it

    def translate(self, offset: Tensor) -> Empirical:
        check_offset(offset)
        _check_same_dim(self.dim, offset.shape[-1], "offset")
        return Empirical._unchecked(self.points + offset.unsqueeze(-2), self.weights)

    def convolve(self, other: Measure) -> Measure:
        """The law of X + Y for independent X and Y: n m points.

        >>> coin = Empirical(torch.tensor([[0.0], [1.0]]))
        >>> coin.convolve(coin).merged().weights
        tensor([0.2500, 0.5000, 0.2500])
        """
        # Vuckovic et al. (2020), definition 13
        if isinstance(other, GaussianMeasure):
            return other.convolve(self)
        if not isinstance(other, Empirical):
            raise TypeError(f"other must be a measure, got {type(other).__name__}")
        _check_same_dim(self.dim, other.dim, "other")
        sums = self.points.unsqueeze(-2) + other.points.unsqueeze(-3)  # (..., n, m, d)
        weights = self.weights.unsqueeze(-1) * other.weights.unsqueeze(-2)  # (..., n, m)
        return Empirical._unchecked(sums.flatten(-3, -2), weights.flatten(-2))

    def kl(self, other: Empirical) -> Tensor:
        """KL(self | other) = E_self log(dself / dother), +inf off absolute continuity. (...)

        The integral is in self: as printed in the paper, in the other, it has the opposite sign
        and order. Masses are compared point by point, wherever a point is listed and however often.
        Memory: n m.

        >>> fair = Empirical(torch.tensor([[0.0], [1.0]]))
        >>> Dirac(torch.tensor([1.0])).kl(fair), fair.kl(Dirac(torch.tensor([1.0])))
        (tensor(0.6931), tensor(inf))
        """
        # In Vuckovic et al. (2020) the integral is printed against the other measure.
        if not isinstance(other, Empirical):
            raise TypeError(
                f"other must be an Empirical, got {type(other).__name__}; between Gaussians use "
                "other.density.fenchel_young(self.density)"
            )
        _check_same_dim(self.dim, other.dim, "other")
        self_mass = _mass_at(self.points, self)
        other_mass = _mass_at(self.points, other)
        on = self.weights > 0
        # log of one where there is no mass, so that derivatives stay finite
        ratio = where(on, self_mass, 1.0).log() - where(on, other_mass, 1.0).log()
        return (self.weights * ratio).sum(-1)

    def merged(self) -> Empirical:
        """Equal points joined, in the order of their first appearance."""
        if self.points.dim() != 2:
            raise ValueError(
                "merged() needs points (n, d), since every measure of a batch would keep another "
                f"number of them; got {tuple(self.points.shape)}. Take one measure at a time"
            )
        inverse = torch.unique(self.points.detach(), dim=0, return_inverse=True)[1]
        order = torch.arange(self.size, device=inverse.device)
        first = torch.full_like(order, self.size).scatter_reduce(0, inverse, order, "amin")
        first = first[first < self.size]
        first, rank = first.sort()
        place = torch.empty_like(rank).scatter(0, rank, torch.arange(len(rank), device=rank.device))
        weights = self.weights.new_zeros(*self.weights.shape[:-1], len(first))
        return Empirical._unchecked(
            self.points[first], weights.index_add(-1, place[inverse], self.weights)
        )

    def __repr__(self) -> str:
        return f"Empirical(batch {tuple(self.batch_shape)}, n {self.size}, d {self.dim})"


def Dirac(point: Tensor) -> Empirical:
    """All mass at one point (..., d).

    >>> Dirac(torch.tensor([1.0, 2.0])).mean
    tensor([1., 2.])
    """
    check_points(point, "point", axes=1)
    return Empirical(point.unsqueeze(-2))


def mixture(
    measures: Sequence[Empirical], weights: Sequence[float] | Tensor | None = None
) -> Empirical:
    """sum_j weights_j measures_j: first draw which measure, then a point of it.

    weights: one for each measure, non-negative with sum 1; uniform by default.

    >>> a, b = Dirac(torch.zeros(1)), Dirac(torch.ones(1))
    >>> mixture([a, b], [0.25, 0.75]).mean
    tensor([0.7500])
    """
    for measure in measures:
        if not isinstance(measure, Empirical):
            raise TypeError(
                f"measures must be Empirical, got {type(measure).__name__}; for Gaussians use "
                "fenchel.continuous.Mixture"
            )
    share = mixing_weights(weights, len(measures))
    dims = {measure.dim for measure in measures}
    if len(dims) > 1:
        raise ValueError(f"measures must live in one space, got dimensions {sorted(dims)}")
    lead = torch.broadcast_shapes(*(m.points.shape[:-2] for m in measures))
    batch = torch.broadcast_shapes(*(m.batch_shape for m in measures))
    points = [m.points.expand(*lead, -1, -1) for m in measures]
    parts = [w.to(m.weights) * m.weights for m, w in zip(measures, share.unbind(), strict=True)]
    return Empirical._unchecked(
        torch.cat(points, -2), torch.cat([part.expand(*batch, -1) for part in parts], -1)
    )


def mixing_weights(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """(count,), checked."""
    if count == 0:
        raise ValueError("a mixture needs at least one part, got none")
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    share = weights if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64)
    if share.shape != (count,) or not share.is_floating_point():
        raise ValueError(
            f"weights must be one number for each of {count} parts, got {share.dtype} "
            f"{tuple(share.shape)}"
        )
    _check_signs(share, "weights")
    _check_total(share, "divide them by their sum")
    return share


def coincide(left: Tensor, right: Tensor) -> Tensor:
    """Which points are equal, to the last bit. (..., m, d), (..., n, d) -> bool (..., m, n)"""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    same = torch.ones(*lead, left.shape[-2], right.shape[-2], dtype=torch.bool, device=left.device)
    for axis in range(left.shape[-1]):  # one axis at a time: memory m n, not m n d
        same &= left[..., :, None, axis] == right[..., None, :, axis]
    return same


def _mass_at(points: Tensor, measure: Empirical) -> Tensor:
    """What the measure gives to each of the points, (..., n)."""
    same = coincide(points.detach(), measure.points.detach()).to(measure.weights.dtype)
    return (same @ measure.weights.unsqueeze(-1)).squeeze(-1)


def _check_values(values: Tensor, weights: Tensor) -> None:
    """Of a function whose expectation is asked for."""
    if values.dtype != weights.dtype and not torch.is_autocast_enabled(values.device.type):
        hint = " gives the probability of a condition" if values.dtype == torch.bool else ""
        raise TypeError(
            f"the function gives {values.dtype} and the measure is {weights.dtype}; nothing is cast"
            f" on the way: .to({weights.dtype}) on what the function returns{hint}"
        )


def _check_same_dim(dim: int, other_dim: int, name: str) -> None:
    if dim != other_dim:
        raise ValueError(f"{name} lives in dimension {other_dim}, the measure in {dim}")


def _check_weights(weights: object, points: Tensor, name: str = "weights") -> None:
    check_tensor(weights, name)
    assert isinstance(weights, Tensor)
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} must be float32 or float64, got {weights.dtype}; use {name}.double()"
        )
    n = points.shape[-2]
    if weights.dim() < 1 or weights.shape[-1] != n:
        raise ValueError(
            f"{name} must be (..., {n}), one for each of the points {tuple(points.shape)}, got "
            f"{tuple(weights.shape)}"
        )
    try:
        torch.broadcast_shapes(weights.shape[:-1], points.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"leading axes must broadcast: points {tuple(points.shape)}, {name} "
            f"{tuple(weights.shape)}"
        ) from None
    _check_signs(weights, name)


def _check_signs(weights: Tensor, name: str) -> None:
    values = weights.detach()
    if has(~((values >= 0) & values.isfinite())):
        raise ValueError(
            f"{name} must be non-negative and finite, the smallest is {float(values.min()):.3g} "
            f"and the largest {float(values.max()):.3g}"
        )


def _check_total(
    weights: Tensor, remedy: str = "Empirical.of_masses(points, masses) normalises"
) -> None:
    values = weights.detach()
    # Weights rounded one by one move their sum by eps / 2; pairwise summation adds log2 n of them.
    slack = 16 * torch.finfo(values.dtype).eps * (1 + math.log2(values.shape[-1]))
    total = values.sum(-1)
    if has((total - 1).abs() > slack):
        worst = total.flatten()[(total - 1).abs().argmax()]
        raise ValueError(
            f"weights must sum to 1, got a sum of {float(worst):.6g}, off by "
            f"{float(worst) - 1:+.2g} where rounding in {values.dtype} explains {slack:.1g}; "
            f"{remedy}"
        )
