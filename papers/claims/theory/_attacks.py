"""Attacks on bounds, and the quotients of the pairs they find, computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fenchel import bounds
from fenchel.bounds import Bound
from fenchel.bounds.bound import State
from papers.claims.evidence import DIFFERENCES, SLACK, Evidence
from papers.claims.theory._draws import attended, earth_movers, softmax

Moved = tuple[Tensor, Tensor]  # how far apart the outputs are, in each reading, and the inputs
Quotient = Callable[[State], Moved]  # of a witness
ROUNDING = 1e-13  # of distances: what trials take off theirs, and more


def attacked(
    evidence: Evidence, bound: Bound, budget: tuple[int, int] = (120, 3000)
) -> tuple[float, State]:
    """What a search finds, observed / certified; and the pair it found."""
    generator = torch.Generator().manual_seed(evidence.seed)
    attack = bounds.attack(bound, evidence.trials(*budget), generator=generator)
    return attack.observed / bound.value, attack.witness


def survives(
    evidence: Evidence,
    bound: Bound,
    by_hand: Quotient,
    least: float,
    *,
    name: str = "certified",
    budget: tuple[int, int] = (120, 3000),
) -> None:
    """The bound holds under an attack that comes near it: to the share `least` of it."""
    ratio, witness = attacked(evidence, bound, budget)
    evidence.below(f"observed / {name}, under attack", ratio, 1 + SLACK)
    evidence.above(f"observed / {name}: the attack comes near", ratio, least)
    anew(evidence, bound, ratio, by_hand(witness))


def falls(
    evidence: Evidence,
    bound: Bound,
    by_hand: Quotient,
    what: str,
    budget: tuple[int, int] = (120, 3000),
) -> None:
    """The attack exceeds what is printed."""
    ratio, witness = attacked(evidence, bound, budget)
    evidence.printed_below(what, ratio, 1.0)
    anew(evidence, bound, ratio, by_hand(witness))


def anew(evidence: Evidence, bound: Bound, ratio: float, witness: Moved) -> None:
    """Pairs may be as near each other as rounding lets them: it is not held against them."""
    moved, apart = witness
    certified = bound.value * apart
    over = ((moved - ratio * certified).abs() - ROUNDING).clamp_min(0) / certified
    what = "the pair found: its quotient by hand − observed, in bounds"
    evidence.below(what, over.min(), DIFFERENCES)


# ---- quotients by hand: of pairs of measures, G = exp(<x, y> / heat) and the identity for values


class OfMeasures:
    """W1 by POT in the l1 norm, weights by the formula of a softmax."""

    def __init__(self, heat: float) -> None:
        self.heat = heat

    def scores(self, x: Tensor, points: Tensor, logs: Tensor) -> Tensor:
        return x @ points.mT / self.heat + logs

    def outputs(self, x: Tensor, points: Tensor, logs: Tensor) -> Tensor:
        return attended(self.scores(x, points, logs), points)

    def in_query(self, state: State) -> Moved:
        points, logs, _, _, x, y = state
        one, other = (softmax(self.scores(z, points, logs))[0] for z in (x, y))
        return earth_movers(points, one, points, other), (x - y).abs().sum()

    def in_measure(self, state: State) -> Moved:
        mu, logs, nu, other_logs, x, _ = state
        one, other = softmax(self.scores(x, mu, logs)), softmax(self.scores(x, nu, other_logs))
        return earth_movers(mu, one[0], nu, other[0]), self.apart(state)

    def attention(self, state: State) -> Moved:
        mu, logs, nu, other_logs, _, _ = state
        one, other = self.outputs(mu, mu, logs), self.outputs(nu, nu, other_logs)
        return earth_movers(one, softmax(logs), other, softmax(other_logs)), self.apart(state)

    def attention_query(self, state: State) -> Moved:
        points, logs, _, _, x, y = state
        moved = self.outputs(x, points, logs) - self.outputs(y, points, logs)
        return moved.square().sum().sqrt(), (x - y).square().sum().sqrt()

    def neighbourhood(self, state: State) -> Moved:
        mu, logs, nu, other_logs, x, _ = state
        moved = self.outputs(x, mu, logs) - self.outputs(x, nu, other_logs)
        return moved.abs().sum(), self.apart(state)

    @staticmethod
    def apart(state: State) -> Tensor:
        mu, logs, nu, other_logs, _, _ = state
        return earth_movers(mu, softmax(logs), nu, softmax(other_logs))


# ---- of pairs of tokens (N, d), G = exp(-|x - y|^2)


def _gaussian(x: Tensor) -> Tensor:
    """Scores among the tokens."""
    return -(x.unsqueeze(1) - x).square().sum(-1)


def longest_token(state: State) -> Moved:
    """Outputs of attention over inputs, in the norm of the longest token (l2): of the secant, and
    of the tangent that it stands for; a search may have taken either."""
    x, y = state
    here, tangent = torch.func.jvp(_gaussian_attention, (x,), (y - x,))  # type: ignore[misc]
    moved = torch.stack([_gaussian_attention(y) - here, tangent])
    return moved.norm(dim=-1).amax(-1), (x - y).norm(dim=-1).max()


def _gaussian_attention(x: Tensor) -> Tensor:
    return attended(_gaussian(x), x)


def gaussian_softmatch(state: State) -> Moved:
    """W1 of the softmatched measures at the first tokens; the tokens' distance + W1."""
    x, y = state
    even = torch.full_like(x[:, 0], 1 / len(x))
    one, other = softmax(_gaussian(x)[0]), softmax(_gaussian(y)[0])
    apart = (x[0] - y[0]).abs().sum() + earth_movers(x, even, y, even)
    return earth_movers(x, one, y, other), apart
