"""The attack on a certificate: random trials, then gradient ascent from the best of them and from
where the proof is tight. What it finds is a lower bound of the constant that is certified, and the
ratio of the two says how tight the certificate is at least. A ratio above one refutes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_whole
from fenchel.bounds.certificate import ROUNDING, Certificate, State, Trials

_BATCH = 256
_CLIMBERS, _MANY = 32, 256  # at least, and at most: one for sixty trials
_AIMS = 4  # times that suspects are tried, each time better aimed
_AIMING = 3  # every so many steps only the direction changes
_RANDOM = 0.4  # of the budget; the rest climbs
_RATE, _LAST_RATE = 0.1, 1e-3  # of a climber's own size


@dataclass(frozen=True)
class Attack:
    """The strongest trial found.

    observed: its quotient; for a map that of a secant, or of a tangent, which nearby secants come
    near. ratio: observed / certified. trials: how many were tried. witness: inputs that
    `certificate.check` takes, whose own quotient is near what was observed.
    """

    ratio: float
    observed: float
    certified: float
    trials: int
    witness: State

    @property
    def holds(self) -> bool:
        """Whether the certificate survived."""
        return self.ratio <= 1 + ROUNDING

    @property
    def tightness(self) -> float:
        """certified / observed: at most this far from the smallest true bound."""
        return math.inf if self.ratio == 0 else 1 / self.ratio


def attack(
    certificate: Certificate, budget: int = 10_000, *, generator: torch.Generator | None = None
) -> Attack:
    """Try to exceed the certificate, with at most `budget` trials; stops at the first that does.

    >>> keys, values = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])
    >>> found = attack(query_lipschitz(keys, values, fl.Shannon()), budget=1000)
    >>> found.holds, round(found.ratio, 6)
    (True, 1.0)
    """
    check_whole(budget, "budget", 1)
    if not isinstance(certificate, Certificate):
        raise TypeError(f"certificate must be a Certificate, got {type(certificate).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        kind = type(generator).__name__
        raise TypeError(f"generator must be a torch.Generator, got {kind}; use manual_seed")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    run = _Run(certificate, budget)
    trials = certificate.trials
    suspects = trials.suspects(run.climbers, generator)
    for number in range(_AIMS if suspects is not None else 0):
        assert suspects is not None
        if run.left <= 0 or run.broken:
            break
        run.take(_first(suspects, run.left))
        if number + 1 < _AIMS:
            suspects = trials.project(trials.aim(suspects))
    random = math.ceil(_RANDOM * budget)
    while random > 0 and run.left > 0 and not run.broken:
        some = min(_BATCH, random, run.left)
        run.take(trials.sample(some, generator))
        random -= some
    starts = run.leaders() if suspects is None else _joined(run.leaders(), suspects)
    while run.left > 0 and not run.broken:
        _climb(run, trials, _first(starts, run.left))
        starts = _joined(run.leaders(), trials.sample(run.climbers, generator))
    return run.result()


class _Run:
    """The best trials so far."""

    def __init__(self, certificate: Certificate, budget: int) -> None:
        self.certificate, self.left, self.budget = certificate, budget, budget
        self.climbers = min(_MANY, max(_CLIMBERS, budget // 60))
        self.best: State | None = None
        self.numbers = 0
        self.quotients = torch.empty(0, dtype=torch.float64)

    @property
    def broken(self) -> bool:
        top = float(self.quotients[0]) if len(self.quotients) else 0.0
        return top > self.certificate.bound * (1 + ROUNDING)

    def take(self, state: State) -> None:
        with torch.no_grad():
            self.note(state, self.certificate.trials.quotient(state))

    def note(self, state: State, quotients: Tensor) -> None:
        """Keep the best; what is not a number was no trial, and is counted all the same."""
        self.left -= len(quotients)
        self.numbers += int(quotients.isfinite().sum())
        seen = torch.where(quotients.isfinite(), quotients, 0.0).detach()
        state = tuple(x.detach() for x in state)
        if self.best is not None:
            state, seen = _joined(self.best, state), torch.cat([self.quotients, seen])
        order = seen.argsort(descending=True)[: self.climbers]
        self.best, self.quotients = tuple(x[order] for x in state), seen[order]

    def leaders(self) -> State:
        assert self.best is not None
        return self.best

    def result(self) -> Attack:
        assert self.best is not None
        if not self.numbers:
            raise ValueError(
                f"not one trial of {self.certificate.name} gave a finite number: nothing was "
                "tested; look at what its function returns"
            )
        observed, certified = float(self.quotients[0]), self.certificate.bound
        ratio = math.inf if observed > 0 else 0.0
        if certified > 0:
            ratio = observed / certified
        trials = self.budget - max(0, self.left)
        with torch.no_grad():
            best = self.certificate.trials.witness(tuple(x[:1] for x in self.best))
        return Attack(ratio, observed, certified, trials, tuple(x[0] for x in best))


def _climb(run: _Run, trials: Trials, start: State) -> None:
    """Adam's steps on the logarithm of the quotient, of a share of each input's own size."""
    state = tuple(x.clone() for x in start)
    means = [torch.zeros_like(x) for x in state]
    squares = [torch.zeros_like(x) for x in state]
    rounds = max(1, min(200, run.left // max(1, len(state[0]))))
    for number in range(rounds):
        leaves = tuple(x.detach().requires_grad_() for x in state)
        quotients = trials.quotient(leaves)
        run.note(leaves, quotients)
        if run.left <= 0 or run.broken:
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


def _joined(one: State, other: State) -> State:
    return tuple(torch.cat([a, b]) for a, b in zip(one, other, strict=True))
