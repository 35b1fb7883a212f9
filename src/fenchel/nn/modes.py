"""How many modes the density of a continuous attention has."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.continuous import Mixture, Regions, fit_mixture, select_mixture
from fenchel.continuous.em import Penalty, Start


@dataclass(frozen=True)
class Modes:
    """So many modes for every example, by weighted EM (`continuous.fit_mixture`).

    count: how many; one needs no EM. iterations: of EM. start: where it begins.
    """

    count: int
    iterations: int = 20
    start: Start = field(default_factory=Regions)

    def __post_init__(self) -> None:
        check_whole(self.count, "modes", 1)
        check_whole(self.iterations, "iterations", 0)

    def fit(self, weights: Tensor, positions: Tensor) -> Mixture:
        """weights (..., L), positions (L, d) -> batch (...)"""
        return fit_mixture(
            weights, positions, self.count, iterations=self.iterations, start=self.start
        )


@dataclass(frozen=True)
class ModeSelection:
    """As many modes for each example as pay for themselves (`continuous.select_mixture`)."""

    max_modes: int = 5
    penalty: float | Penalty = 10.0
    iterations: int = 20
    start: Start = field(default_factory=Regions)

    def __post_init__(self) -> None:
        check_whole(self.max_modes, "max_modes", 1)
        check_whole(self.iterations, "iterations", 0)

    def fit(self, weights: Tensor, positions: Tensor) -> Mixture:
        """weights (..., L), positions (L, d) -> batch (...)"""
        return select_mixture(
            weights,
            positions,
            min(self.max_modes, len(positions)),
            self.penalty,
            iterations=self.iterations,
            start=self.start,
        )
