"""How `PreferenceAttention` and `TransportAttention` solve their estimation problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fenchel import dual
from fenchel._numerics import check_whole
from fenchel.dual import Estimate


@dataclass(frozen=True)
class FirstOrder:
    """To first order in the reliability: ordinary attention, whose weights are never stored whole
    unless they are asked for."""

    def estimate(self, *problem: Any, mask: Tensor | None) -> Estimate:
        """problem: as `fenchel.dual.first_order` takes it."""
        return dual.first_order(*problem, mask=mask)


@dataclass(frozen=True)
class SecondOrder:
    """One Newton step of the dual problem, in float64, with the weights stored whole."""

    def estimate(self, *problem: Any, mask: Tensor | None) -> Estimate:
        """problem: as `fenchel.dual.second_order` takes it."""
        return dual.second_order(*problem, mask=mask)


@dataclass(frozen=True)
class Exact:
    """The solution, by Newton's method in float64, with the weights stored whole.

    tolerance: of the gap; that of `fenchel.dual.estimate` or `fenchel.dual.transport` if None.
    max_steps: of Newton's method.
    """

    tolerance: float | None = None
    max_steps: int = 200

    def __post_init__(self) -> None:
        check_whole(self.max_steps, "max_steps", 0)
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(
                f"tolerance must be between 0 and 1, got {self.tolerance}; None is the default"
            )

    def estimate(self, *problem: Any, mask: Tensor | None) -> Estimate:
        """problem: as `fenchel.dual.estimate` takes it."""
        return dual.estimate(*problem, mask=mask, **self._settings)

    def transport(self, *problem: Any, mask: Tensor | None) -> Estimate:
        """problem: as `fenchel.dual.transport` takes it."""
        return dual.transport(*problem, mask=mask, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        tolerance = {} if self.tolerance is None else {"tolerance": self.tolerance}
        return {"max_steps": self.max_steps, **tolerance}
