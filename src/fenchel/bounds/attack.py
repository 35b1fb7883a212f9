"""The attack on a bound: random trials, then gradient ascent from the best of them and from where
the proof is tight. What it observes is at most the true constant, and its ratio to the bound says
how tight the bound is at least. A ratio above one refutes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.bounds.bound import ROUNDING, Bound, State, holds

_BATCH = 256
_CLIMBERS, _MANY = 32, 256  # at least, and at most: one for sixty trials
_AIMS = 4  # times that suspects are tried, each time better aimed
_AIMING = 3  # every so many steps only the direction changes
_RANDOM = 0.4  # of the budget; the rest climbs
_RATE, _LAST_RATE = 0.1, 1e-3  # of a climber's size


@dataclass(frozen=True)
class Attack:
    """The strongest trial of a bound.

    observed: its quotient; for a map that of a secant, or of a tangent, which nearby secants come
    near. trials: how many were tried. witness: inputs that `bound.check` takes, whose quotient is
    near what was observed.
    """

    bound: Bound
    observed: float
    trials: int
    witness: State

    @property
    def ratio(self) -> float:
        """observed / bound: one is tight, more refutes it."""
        return self.bound.ratio(self.observed)

    @property
    def holds(self) -> bool:
        """Whether the bound survived."""
        return holds(self.ratio)

    @property
    def tightness(self) -> float:
        """bound / observed: at most this far from the smallest true bound."""
        return math.inf if self.ratio == 0 else 1 / self.ratio


def attack(
    bound: Bound, budget: int = 10_000, *, generator: torch.Generator | None = None
) -> Attack:
    """Try to exceed the bound, with at most `budget` trials; stops at the first that does.

    >>> keys, values = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])
    >>> strongest = attack(query_lipschitz(keys, values, fl.Shannon()), budget=1000)
    >>> strongest.holds, round(strongest.ratio, 6)
    (True, 1.0)
    """
    check_whole(budget, "budget", 1)
    if not isinstance(bound, Bound):
        raise TypeError(f"bound must be a Bound, got {type(bound).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        kind = type(generator).__name__
        raise TypeError(f"generator must be a torch.Generator, got {kind}; use manual_seed")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    campaign = _Campaign(bound, budget)
    suspects = _try_suspects(campaign, generator)
    _try_at_random(campaign, math.ceil(_RANDOM * budget), generator)
    leaders = campaign.leaders()
    starts = leaders if suspects is None else _concatenate(leaders, suspects)
    while campaign.goes_on:
        _climb(campaign, _first(starts, campaign.left))
        some = bound.trials.sample(campaign.climbers, generator)
        starts = _concatenate(campaign.leaders(), some)
    return campaign.result()


def _try_suspects(campaign: _Campaign, generator: torch.Generator) -> State | None:
    """Where the proof is tight, each time better aimed."""
    trials = campaign.bound.trials
    suspects = trials.suspects(campaign.climbers, generator)
    if suspects is None:
        return None
    for number in range(_AIMS):
        if not campaign.goes_on:
            break
        campaign.take(_first(suspects, campaign.left))
        if number + 1 < _AIMS:
            suspects = trials.project(trials.aim(suspects))
    return suspects


def _try_at_random(campaign: _Campaign, count: int, generator: torch.Generator) -> None:
    while count > 0 and campaign.goes_on:
        some = min(_BATCH, count, campaign.left)
        campaign.take(campaign.bound.trials.sample(some, generator))
        count -= some


class _Campaign:
    """The best trials so far."""

    def __init__(self, bound: Bound, budget: int) -> None:
        self.bound, self.left, self.budget = bound, budget, budget
        self.climbers = min(_MANY, max(_CLIMBERS, budget // 60))
        self.best: State | None = None
        self.numbers = 0
        self.quotients = torch.empty(0, dtype=torch.float64)

    @property
    def goes_on(self) -> bool:
        """Until the budget is spent, or the bound exceeded."""
        top = float(self.quotients[0]) if len(self.quotients) else 0.0
        return self.left > 0 and top <= self.bound.value * (1 + ROUNDING)

    def take(self, state: State) -> None:
        with torch.no_grad():
            self.note(state, self.bound.trials.quotient(state))

    def note(self, state: State, quotients: Tensor) -> None:
        """Keep the best; what is not a number was no trial, and is counted all the same."""
        self.left -= len(quotients)
        self.numbers += int(quotients.isfinite().sum())
        quotients = torch.where(quotients.isfinite(), quotients, 0.0).detach()
        state = tuple(x.detach() for x in state)
        if self.best is not None:
            state = _concatenate(self.best, state)
            quotients = torch.cat([self.quotients, quotients])
        order = quotients.argsort(descending=True)[: self.climbers]
        self.best, self.quotients = tuple(x[order] for x in state), quotients[order]

    def leaders(self) -> State:
        assert self.best is not None
        return self.best

    def result(self) -> Attack:
        assert self.best is not None
        if not self.numbers:
            raise ValueError(
                f"not one trial of {self.bound.name} gave a finite number: nothing was "
                "tested; look at what its function returns"
            )
        trials = self.budget - max(0, self.left)
        with torch.no_grad():
            best = self.bound.trials.witness(tuple(x[:1] for x in self.best))
        return Attack(self.bound, float(self.quotients[0]), trials, tuple(x[0] for x in best))


def _climb(campaign: _Campaign, start: State) -> None:
    """Adam's steps on the logarithm of the quotient, of a share of each input's size."""
    trials = campaign.bound.trials
    state = tuple(x.clone() for x in start)
    means = [torch.zeros_like(x) for x in state]
    squares = [torch.zeros_like(x) for x in state]
    rounds = max(1, min(200, campaign.left // max(1, len(state[0]))))
    for number in range(rounds):
        leaves = tuple(x.detach().requires_grad_() for x in state)
        quotients = trials.quotient(leaves)
        campaign.note(leaves, quotients)
        if not campaign.goes_on:
            return
        if number % _AIMING == 0:
            state = trials.project(trials.aim(tuple(x.detach() for x in leaves)))
            continue
        if not quotients.requires_grad:  # choices of tokens: nothing to climb
            return
        rate = _RATE * (_LAST_RATE / _RATE) ** (number / rounds)
        total = torch.where(quotients > 0, quotients, 1.0).log().sum()
        slopes = torch.autograd.grad(total, leaves, allow_unused=True)
        state = trials.project(
            tuple(
                _adam(x.detach(), slope, mean, square, number, rate)
                for x, slope, mean, square in zip(leaves, slopes, means, squares, strict=True)
            )
        )


def _adam(
    x: Tensor, slope: Tensor | None, mean: Tensor, square: Tensor, number: int, rate: float
) -> Tensor:
    if slope is None:
        return x
    slope = torch.where(slope.isfinite(), slope, 0.0)
    mean.mul_(0.9).add_(0.1 * slope)
    square.mul_(0.99).add_(0.01 * slope.square())
    step = mean / (1 - 0.9 ** (number + 1))
    step = step / ((square / (1 - 0.99 ** (number + 1))).sqrt() + 1e-300)
    size = x.flatten(1).square().mean(-1).sqrt().clamp_min(1e-12)
    return x + rate * size.reshape(-1, *(1,) * (x.dim() - 1)) * step


def _first(state: State, count: int) -> State:
    return tuple(x[: max(1, count)] for x in state)


def _concatenate(one: State, other: State) -> State:
    return tuple(torch.cat([a, b]) for a, b in zip(one, other, strict=True))
