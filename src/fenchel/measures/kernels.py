"""Markov kernels: a measure K(x, .) for every x.

They act on measures from the left, on functions from the right, and compose:

    mu @ K        the law of Y, where X has law mu and Y has law K(X, .)
    K @ f         the function x -> E f(Y)
    K @ L         one after the other, so that (mu @ K) @ L = mu @ (K @ L)
"""
# Vuckovic et al. (2020), definition 2

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from fenchel.measures.affine import (
    Affine,
    Map,
    affine_of,
    apply_map,
    as_map,
    check_settled,
    map_name,
)
from fenchel.measures.empirical import Empirical, mixing_weights, mixture
from fenchel.measures.gaussian import GaussianMeasure
from fenchel.measures.measure import Function, Measure, average, check_points


class Kernel(ABC):
    """x -> K(x, .). One's own needs only `_at`.

    >>> class Coin(Kernel):
    ...     def _at(self, x):  # x + 1 or x - 1, with probability 1/2 each
    ...         return Empirical(torch.stack([x + 1, x - 1], -2))
    >>> walk = Coin() @ Coin()
    >>> (Empirical(torch.zeros(1, 1)) @ walk).merged().weights
    tensor([0.2500, 0.5000, 0.2500])
    """

    def at(self, x: Tensor) -> Measure:
        """The m measures K(x_i, .) for x (..., m, d), a batch (..., m).

        For an Empirical: weights (..., m, n), points (..., m, n, d'), or (..., 1, n, d') where all
        share them.
        """
        check_points(x, "x")
        return self._at(x)

    @abstractmethod
    def _at(self, x: Tensor) -> Measure:
        """The same, of points that are checked."""

    def affine(self) -> Affine | None:
        """x -> A x + b, for a kernel that is known to be the Dirac there."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @overload
    def __matmul__(self, other: Kernel) -> Kernel: ...
    @overload
    def __matmul__(self, other: Function) -> Function: ...
    def __matmul__(self, other: Kernel | Function) -> Kernel | Function:
        if isinstance(other, Kernel):
            return Composed(self, other)
        if isinstance(other, NonlinearKernel):
            raise TypeError(_ask_for_measure(other))
        if isinstance(other, Tensor) or not callable(other):
            raise TypeError(
                f"a kernel acts on functions and composes with kernels, got {type(other).__name__};"
                " for a matrix use Deterministic(matrix)"
            )
        return Applied(self, other)

    @overload
    def __rmatmul__(self, measure: Empirical) -> Empirical: ...
    @overload
    def __rmatmul__(self, measure: GaussianMeasure) -> GaussianMeasure: ...
    def __rmatmul__(self, measure: Measure) -> Measure:
        if isinstance(measure, GaussianMeasure):
            return push_forward(measure, self)
        if not isinstance(measure, Empirical):
            raise TypeError(
                f"a kernel acts on measures, got {type(measure).__name__}; use Empirical(points)"
            )
        # as the one row of a kernel
        row = Empirical._unchecked(measure.points.unsqueeze(-3), measure.weights.unsqueeze(-2))
        moved = discrete(carry(row, self))
        points = moved.points if moved.points.dim() == 2 else moved.points.squeeze(-3)
        return Empirical._unchecked(points, moved.weights.squeeze(-2))


class Applied:
    """K @ f: x -> E f(Y) for Y of law K(x, .), (..., m, d) -> (..., m) or (..., m, e).

    The kernel's own batch axes may stand in front of those of x.
    """

    def __init__(self, kernel: Kernel, function: Function) -> None:
        self.kernel, self.function = kernel, function

    def __call__(self, x: Tensor) -> Tensor:
        return self.valued(x)[0]

    def valued(self, x: Tensor) -> tuple[Tensor, bool]:
        """The values, and whether they are vectors: with more axes than x has, no shape says so."""
        image = self.kernel.at(x)
        measure = image.quadrature() if isinstance(image, GaussianMeasure) else discrete(image)
        inner = self.function
        return measure.averages(_ByRows(inner) if isinstance(inner, Applied) else inner)

    def __repr__(self) -> str:
        return f"{self.kernel!r} @ {map_name(self.function)}"


class _ByRows:
    """K @ f on points (..., m, n, d) of m measures, which go in as (..., m n, d): as in `carry`,
    the kernel's own batch axes never meet the axis m."""

    def __init__(self, function: Applied) -> None:
        self.function = function

    def __call__(self, points: Tensor) -> Tensor:
        return self.valued(points)[0]

    def valued(self, points: Tensor) -> tuple[Tensor, bool]:
        points = points if points.dim() > 2 else points.unsqueeze(0)
        values, vectors = self.function.valued(points.flatten(-3, -2))
        return values.unflatten(-2 if vectors else -1, points.shape[-3:-1]), vectors


class NonlinearKernel(ABC):
    """mu -> a kernel K_mu: tokens move in a way that depends on where all of them are."""

    @abstractmethod
    def __call__(self, mu: Empirical) -> Kernel:
        """K_mu"""

    def __matmul__(self, other: object) -> Kernel:
        raise TypeError(_ask_for_measure(self))

    def __rmatmul__(self, other: object) -> Kernel:
        raise TypeError(_ask_for_measure(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Composed(Kernel):
    """First one kernel, then the other: KL(x, .) = integral of K(x, dy) L(y, .)."""

    def __init__(self, first: Kernel, second: Kernel) -> None:
        self.first, self.second = first, second

    def _at(self, x: Tensor) -> Measure:
        return carry(self.first.at(x), self.second)

    def affine(self) -> Affine | None:
        first, second = self.first.affine(), self.second.affine()
        if first is None or second is None:
            return None
        offset = None if first.offset is None else second.matrix @ first.offset
        if second.offset is not None:
            offset = second.offset if offset is None else offset + second.offset
        return Affine(second.matrix @ first.matrix, offset)

    def __repr__(self) -> str:
        return f"{self.first!r} @ {self.second!r}"


class Deterministic(Kernel):
    """x -> the Dirac at f(x), for a matrix (d', d) or a callable of single points.

    `FeedForward` and `LayerNorm` are other names for it.

    >>> Deterministic(torch.tensor([[2.0]])).at(torch.tensor([[1.0], [3.0]])).mean
    tensor([[2.],
            [6.]])
    """

    def __init__(self, function: Map) -> None:
        if function is None:
            raise TypeError("function must be a matrix or a callable, got None")
        self.function = as_map(function, "function")

    def _at(self, x: Tensor) -> Empirical:
        check_settled(self.function)
        image = apply_map(self.function, x)
        if not isinstance(image, Tensor) or image.shape[:-1] != x.shape[:-1]:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"the function must map points {tuple(x.shape)} one by one, to "
                f"{(*x.shape[:-1], 'e')}, got {got}"
            )
        points = image.unsqueeze(-2)  # (..., m, 1, e)
        return Empirical._unchecked(points, torch.ones_like(points[..., 0]))

    def affine(self) -> Affine | None:
        return affine_of(self.function)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({map_name(self.function)})"


FeedForward = Deterministic
LayerNorm = Deterministic


class Residual(Kernel):
    """The law of x + Y, where Y has law K(x, .).

    >>> Residual(Deterministic(torch.eye(1))).at(torch.ones(1, 1)).mean
    tensor([[2.]])
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = _require_kernel(kernel)

    def _at(self, x: Tensor) -> Measure:
        step = self.kernel.at(x)
        self._check(x.shape[-1], step.dim)
        return step.translate(x)

    def affine(self) -> Affine | None:
        """x + A x + b"""
        step = self.kernel.affine()
        if step is None:
            return None
        to, start = step.matrix.shape
        self._check(start, to)
        same = torch.eye(start, dtype=step.matrix.dtype, device=step.matrix.device)
        return Affine(same + step.matrix, step.offset)

    def _check(self, start: int, to: int) -> None:
        if start != to:
            raise ValueError(
                f"a residual needs a kernel that stays in dimension {start}, it goes to {to}"
            )

    def __repr__(self) -> str:
        return f"Residual({self.kernel!r})"


class KernelMixture(Kernel):
    """sum_j weights_j K_j, weights non-negative with sum 1; uniform by default.

    >>> maps = [Deterministic(torch.eye(1)), Deterministic(-torch.eye(1))]
    >>> KernelMixture(maps, [0.75, 0.25]).at(torch.ones(1, 1)).mean
    tensor([[0.5000]])
    """

    def __init__(
        self, kernels: Sequence[Kernel], weights: Sequence[float] | Tensor | None = None
    ) -> None:
        self.kernels = [_require_kernel(kernel) for kernel in kernels]
        self.weights = mixing_weights(weights, len(self.kernels))

    def _at(self, x: Tensor) -> Empirical:
        return mixture([discrete(kernel.at(x)) for kernel in self.kernels], self.weights)

    def __repr__(self) -> str:
        weights = ", ".join(f"{weight:.3g}" for weight in self.weights.tolist()[:4])
        more = ", …" if len(self.kernels) > 4 else ""
        return f"KernelMixture({len(self.kernels)} kernels, weights [{weights}{more}])"


# ---- how a measure goes through a kernel


def carry(first: Measure, kernel: Kernel) -> Measure:
    """The batch (..., m) of measures `first`, each sent through the kernel.

    Points go in as (..., m n, d): the kernel's own batch axes stay beside those of `first` and
    never meet the axis m.
    """
    if isinstance(first, GaussianMeasure):
        return push_forward(first, kernel)
    first = discrete(first)
    points = first.points if first.points.dim() > 2 else first.points.unsqueeze(0)
    rows, n = points.shape[-3], first.size  # rows: 1 where the m measures share their points
    if n == 1 and rows == first.batch_shape[-1]:
        # points that a whole batch shares are one for each of its measures
        return kernel.at(points.squeeze(-2).expand(*first.batch_shape, first.dim))
    then = discrete(kernel.at(points.flatten(-3, -2)))
    weights = then.rows().unflatten(-2, (rows, n))  # (..., rows, n, n')
    if then.points.dim() == 2 or (then.points.shape[-3] == 1 and rows * n > 1):
        return Empirical._unchecked(then.points, average(first.weights, weights))  # shared: sums
    joint = first.weights.unsqueeze(-1) * weights  # (..., m, n, n')
    targets = then.points.unflatten(-3, (rows, n)).flatten(-3, -2)  # (..., rows, n n', d')
    return Empirical._unchecked(targets, joint.flatten(-2))


def push_forward(measure: GaussianMeasure, kernel: Kernel) -> GaussianMeasure:
    """A Gaussian through an affine map, exactly."""
    affine = kernel.affine()
    if affine is None:
        raise TypeError(
            f"a Gaussian through {kernel!r}, which is not known to be affine, need be no Gaussian; "
            "use .sample(n, generator) @ kernel, or .quadrature(order) @ kernel up to three "
            "dimensions"
        )
    return measure.push(affine.matrix, affine.offset)


def discrete(measure: Measure) -> Empirical:
    """Refuse what does not sit on finitely many points."""
    if not isinstance(measure, Empirical):
        raise TypeError(
            f"this would be a mixture of {type(measure).__name__} objects, which is no measure of "
            "this room; take kernel.at(x), project onto Diracs with MomentProjection(), or sample"
        )
    return measure


def _require_kernel(kernel: object) -> Kernel:
    if isinstance(kernel, NonlinearKernel):
        raise TypeError(_ask_for_measure(kernel))
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"a kernel is needed, got {type(kernel).__name__}; for a map of points use "
            "Deterministic(function)"
        )
    return kernel


def _ask_for_measure(kernel: NonlinearKernel) -> str:
    name = type(kernel).__name__
    return f"{name} is a kernel only once it has a measure; use A(mu) for A = {name}(...)"
