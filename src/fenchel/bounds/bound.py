"""What a bound is: a number, where it holds, in which norm, and trials that could break it.

    |f(x) - f(y)| <= value |x - y|     for all x, y of the domain.

A *trial* is a pair of inputs and the quotient it observes, |f(x) - f(y)| / |x - y|. Bounds about
measures are of the same form with a distance between measures on either side, so they differ in
their trials only. `attack` looks for the trial with the largest quotient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fenchel.bounds.norms import VectorNorm, Wasserstein1

State = tuple[Tensor, ...]  # of many trials: each (count, ...)
ROUNDING = 1e-9  # a quotient may exceed its bound by that much of it


class Check(NamedTuple):
    """quotient: of the outputs of these inputs. ratio: of it to the bound. holds: the ratio is at
    most one, up to rounding."""

    quotient: float
    ratio: float
    holds: bool


class Trials(ABC):
    """How to try a bound. inputs: what one trial is made of, in words."""

    inputs: ClassVar[tuple[str, ...]]

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> State:
        """At random."""

    @abstractmethod
    def quotient(self, state: State) -> Tensor:
        """(count): distance of the outputs over that of the inputs, differentiable; 0 for 0 / 0."""

    @abstractmethod
    def project(self, state: State) -> State:
        """Back into where the bound holds."""

    def allows(self, state: State) -> bool:
        """Whether the bound speaks of these inputs."""
        return agree(state, self.project(state))

    def observed(self, state: State) -> Tensor:
        """(count): the quotient of these very inputs."""
        return self.quotient(state)

    def witness(self, state: State) -> State:
        """Inputs of the domain whose quotient is near what was observed at `state`."""
        return state

    def suspects(self, count: int, generator: torch.Generator) -> State | None:
        """Where an attacker who knows the proof would look first."""
        return None

    def aim(self, state: State) -> State:
        """Improved where that can be computed; as it is otherwise."""
        return state


@dataclass(frozen=True, eq=False)
class Bound:
    """A sound upper bound of a Lipschitz constant.

    value: the bound itself; may be infinite: true, and of no use.
    norm: of the differences of inputs and outputs.
    assumptions: all that the bound needs, in words.
    """

    name: str
    value: float
    norm: VectorNorm | Wasserstein1
    assumptions: tuple[str, ...]
    trials: Trials

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(
                f"the bound of {self.name} must be a number >= 0, got {self.value}; where it came "
                "out as NaN the inputs are too large for float64: scale them down"
            )

    def ratio(self, quotient: float) -> float:
        """Of an observed quotient to the bound; above one it refutes the bound."""
        if self.value > 0:
            return quotient / self.value
        return math.inf if quotient > 0 else 0.0

    def check(self, *inputs: Tensor) -> Check:
        """One trial of your own: for a map two inputs, x and y."""
        names = self.trials.inputs
        if len(inputs) != len(names):
            shown = ", ".join(names)
            raise TypeError(f"check takes {len(names)} tensors ({shown}), got {len(inputs)}")
        state = tuple(torch.as_tensor(x).detach().double().unsqueeze(0) for x in inputs)
        if not self.trials.allows(state):
            assumptions = "; ".join(self.assumptions)
            raise ValueError(f"these inputs lie outside of what the bound is for: {assumptions}")
        with torch.no_grad():
            quotient = float(self.trials.observed(state))
        ratio = self.ratio(quotient)
        return Check(quotient, ratio, holds(ratio))

    def __str__(self) -> str:
        assumptions = "; ".join(self.assumptions)
        return f"{self.name}: at most {self.value:.6g} in norm {self.norm}, given {assumptions}"


def holds(ratio: float) -> bool:
    """Whether a bound survives an observation of this ratio to it."""
    return ratio <= 1 + ROUNDING


def agree(one: State, other: State) -> bool:
    """Up to rounding."""
    pairs = zip(one, other, strict=True)
    return all(bool((x - y).abs().le(ROUNDING * (1 + x.abs())).all()) for x, y in pairs)
