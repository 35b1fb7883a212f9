"""Interaction potentials G(x, y) > 0, by their logarithm: the similarity of x and y.

    log G: (..., m, d), (..., n, d) -> (..., m, n)

`query` and `key` are maps applied first, to x and to y: a matrix (d', d), acting as W x (with the
transpose that the paper prints, shapes do not match), or a callable such as torch.nn.Linear.
"""
# Vuckovic et al. (2020), proposition 12

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from fenchel import scores
from fenchel._numerics import check_tensor
from fenchel.measures.affine import Map, apply_map, as_map, identity, map_name


class InteractionPotential(ABC):
    """G(x, y) > 0, known by its logarithm."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def log(self, x: Tensor, y: Tensor) -> Tensor:
        """log G(x_i, y_j), (..., m, n)"""


class Dot(InteractionPotential):
    """G(x, y) = exp(<query x, key y> / temperature).

    >>> Dot().log(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[1., 2.]])
    """

    def __init__(
        self, temperature: float = 1.0, query: Map | None = None, key: Map | None = None
    ) -> None:
        self.temperature = _read_temperature(temperature)
        self.query, self.key = as_map(query, "query"), as_map(key, "key")

    def __repr__(self) -> str:
        return _describe(self)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return _dot(*_project(self, x, y), self.temperature)


class ScaledDot(InteractionPotential):
    """The same at the temperature sqrt(d'), d' the dimension of the projected query.

    >>> ScaledDot().log(torch.ones(1, 4), torch.ones(1, 4))
    tensor([[2.]])
    """

    def __init__(
        self, temperature: float | None = None, query: Map | None = None, key: Map | None = None
    ) -> None:
        self.temperature = None if temperature is None else _read_temperature(temperature)
        self.query, self.key = as_map(query, "query"), as_map(key, "key")

    def __repr__(self) -> str:
        return _describe(self)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        return _dot(*_project(self, x, y), self.temperature)


class GaussianPotential(InteractionPotential):
    """G(x, y) = exp(-|query x - key y|^2 / temperature).

    >>> GaussianPotential().log(torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]))
    tensor([[ 0., -4.]])
    """

    def __init__(
        self, temperature: float = 1.0, query: Map | None = None, key: Map | None = None
    ) -> None:
        self.temperature = _read_temperature(temperature)
        self.query, self.key = as_map(query, "query"), as_map(key, "key")

    def __repr__(self) -> str:
        return _describe(self)

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = _project(self, x, y)
        _check_same(x, y)
        return scores.negative_squared_distance(x, y, 1 / self.temperature)


class Potential(InteractionPotential):
    """Any log-potential, (..., m, d), (..., n, d) -> (..., m, n). -inf forbids a pair.

    >>> Potential(lambda x, y: -torch.cdist(x, y)).log(torch.zeros(1, 1), torch.ones(2, 1))
    tensor([[-1., -1.]])
    """

    def __init__(self, log: Callable[[Tensor, Tensor], Tensor]) -> None:
        if not callable(log):
            raise TypeError(f"a log-potential must be callable, got {type(log).__name__}")
        self._log = log

    def __repr__(self) -> str:
        return f"Potential({map_name(self._log)})"

    def log(self, x: Tensor, y: Tensor) -> Tensor:
        values = self._log(x, y)
        check_tensor(values, "what the log-potential returns")
        m, n = x.shape[-2], y.shape[-2]
        if values.shape[-2:] != (m, n):
            raise ValueError(f"a log-potential must be (..., {m}, {n}), got {tuple(values.shape)}")
        return values


def _project(
    potential: Dot | ScaledDot | GaussianPotential, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    return apply_map(potential.query, x), apply_map(potential.key, y)


def _describe(potential: Dot | ScaledDot | GaussianPotential) -> str:
    heat = potential.temperature
    parts = [] if heat is None else [f"temperature={heat:g}"]
    maps = (("query", potential.query), ("key", potential.key))
    parts += [
        f"{name}={map_name(transform)}" for name, transform in maps if transform is not identity
    ]
    return f"{type(potential).__name__}({', '.join(parts)})"


def _dot(x: Tensor, y: Tensor, temperature: float | None) -> Tensor:
    _check_same(x, y)
    return scores.scaled_dot(x, y, None if temperature is None else 1 / temperature)


def _check_same(x: Tensor, y: Tensor) -> None:
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"queries and keys must have one dimension, got {x.shape[-1]} and {y.shape[-1]}; "
            "give `query` and `key` maps into one space"
        )


def _read_temperature(temperature: object) -> float:
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    return float(temperature)
