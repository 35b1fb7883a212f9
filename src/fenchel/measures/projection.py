"""Moment projection: the member of a family with the same moments."""
# Vuckovic et al. (2020), definitions 6 and 7, proposition 16

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import overload

from torch import Tensor

from fenchel._numerics import has
from fenchel._solution import SolveError, Status
from fenchel.measures.affine import Affine, map_name
from fenchel.measures.empirical import Dirac, Empirical
from fenchel.measures.gaussian import GaussianMeasure
from fenchel.measures.kernels import Kernel
from fenchel.measures.maximum_entropy import maximum_entropy
from fenchel.measures.measure import Function, Measure


class MeasureFamily(ABC):
    """A set of measures, one for each vector of moments."""

    fixed: bool  # whether the features belong to the family, and none are given

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def member(self, measure: Measure, features: Function | None) -> Measure:
        """The one with the moments of `measure`."""


class Diracs(MeasureFamily):
    """Moments are the mean: the projection that attention ends with."""

    fixed = True

    def member(self, measure: Measure, features: Function | None) -> Empirical:
        return Dirac(measure.mean)


class Gaussians(MeasureFamily):
    """Moments are the mean and the covariance."""

    fixed = True

    def member(self, measure: Measure, features: Function | None) -> GaussianMeasure:
        return GaussianMeasure._unchecked(measure.mean, measure.covariance)


class GridFamily(MeasureFamily):
    """exp(<theta, features> - A(theta)) times a base measure on a grid.

    points (n, d), weights (n,) of the base; uniform by default.
    """

    fixed = False

    def __init__(self, points: Tensor, weights: Tensor | None = None) -> None:
        base = Empirical(points) if weights is None else Empirical(points, weights)
        if base.points.dim() != 2 or base.weights.dim() != 1:
            raise ValueError(
                f"the grid must be points (n, d) with weights (n,), got {tuple(points.shape)} and "
                f"{tuple(base.weights.shape)}"
            )
        self.base = base

    def __repr__(self) -> str:
        return f"GridFamily({self.base.size} points)"

    def member(self, measure: Measure, features: Function | None) -> Empirical:
        assert features is not None
        solution = maximum_entropy(self.base, features, measure.expectation(features))
        if has(solution.status != Status.OK.value):
            worst = Status(int(solution.status[solution.status != Status.OK.value].flatten()[0]))
            where = {
                Status.INFEASIBLE: "outside of what the grid can have; widen the grid",
                Status.MAX_STEPS: "on the boundary of what the grid can have, where no member of "
                "the family has them; widen the grid, or use maximum_entropy for the limit",
            }[worst]
            raise SolveError(f"the moments of a measure are {where} ({worst.name})")
        return solution.measure


class MomentProjection:
    """Pi(mu): the member of the family with mu's expectations of the features.

    Onto an exponential family it is the member nu with the least KL(mu | nu); onto Diracs, the
    limit of that for ever narrower Gaussians. Of a kernel it takes every K(x, .).

    >>> mu = Empirical(torch.tensor([[0.0], [1.0], [5.0]]))
    >>> MomentProjection()(mu).mean
    tensor([2.])
    >>> MomentProjection(family=Gaussians())(mu).covariance
    tensor([[4.6667]])

    features: for a `GridFamily`, a function (..., n, d) -> (..., n, k); the others have their own.
    """

    # Vuckovic et al. (2020), propositions 16 and 17

    def __init__(
        self, features: Function | None = None, family: MeasureFamily | None = None
    ) -> None:
        self.family = Diracs() if family is None else family
        if not isinstance(self.family, MeasureFamily):
            raise TypeError(
                "family must be Diracs(), Gaussians() or GridFamily(points), got "
                f"{type(family).__name__}"
            )
        name = type(self.family).__name__
        if self.family.fixed and features is not None:
            raise ValueError(f"{name} has its own features; use GridFamily(points) with others")
        if not self.family.fixed and features is None:
            raise ValueError(f"{name} needs features: a function (..., n, d) -> (..., n, k)")
        self.features = features

    def __repr__(self) -> str:
        parts = [] if self.features is None else [map_name(self.features)]
        parts += [] if isinstance(self.family, Diracs) else [f"family={self.family!r}"]
        return f"MomentProjection({', '.join(parts)})"

    @overload
    def __call__(self, measure_or_kernel: Kernel) -> Kernel: ...
    @overload
    def __call__(self, measure_or_kernel: Measure) -> Measure: ...
    def __call__(self, measure_or_kernel: Measure | Kernel) -> Measure | Kernel:
        if isinstance(measure_or_kernel, Kernel):
            return _Projected(self, measure_or_kernel)
        if not isinstance(measure_or_kernel, Measure):
            raise TypeError(
                f"Pi takes a measure or a kernel, got {type(measure_or_kernel).__name__}"
            )
        return self.family.member(measure_or_kernel, self.features)


class _Projected(Kernel):
    def __init__(self, projection: MomentProjection, kernel: Kernel) -> None:
        self.projection, self.kernel = projection, kernel

    def _at(self, x: Tensor) -> Measure:
        return self.projection(self.kernel.at(x))

    def affine(self) -> Affine | None:
        """A Dirac is its own mean."""
        return self.kernel.affine() if isinstance(self.projection.family, Diracs) else None

    def __repr__(self) -> str:
        return f"{self.projection!r}({self.kernel!r})"
