"""Four constants of Vuckovic, Baratin and Tachet des Combes (2020) as printed. They are false, and
`bounds.attack` finds it out; `bounds.contraction` has the corrected ones.

    M-P19b  W1(Psi_G mu, Psi_G nu) <= 2 Ly D / eps W1(mu, nu)
    M-T23   tau(A) <= d K 2 (Lx + Ly) D / eps
    M-P25   |A_mu(x) - A_nu(x)| <= d K 2 Ly D / eps W1(mu, nu)
    M-P28   W1(Psi_{G(x,.)} m(X), Psi_{G(y,.)} m(Y)) <= B (|x - y| + W1(m(X), m(Y))) on all of R^d,
            G(x, y) = exp(-|x - y|^2), x a token of X and y one of Y,
            B = sqrt(d) sqrt(ln N + 1 / (2 e)) sqrt(2 / e) + 1 + sqrt(d) + 2.

In the first three a term with the size of G is missing: a potential that hardly varies makes the
right side small, and the left side stays. The fourth hides a factor N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fenchel.bounds import contraction
from fenchel.bounds.attack import Attack, attack
from fenchel.bounds.bound import Bound, State, Trials
from fenchel.bounds.contraction import Setting
from fenchel.bounds.domain import Box
from fenchel.bounds.norms import Wasserstein1
from fenchel.measures import Dot, Empirical, GaussianPotential, Measure, Softmatch
from fenchel.measures.distances import wasserstein1


def printed_measure(setting: Setting) -> Bound:
    """M-P19b"""
    bound = 2 * setting.query_term()  # Lx = Ly for these potentials
    return replace(contraction.in_measure(setting), name="Proposition 19, second part", value=bound)


def printed_attention(setting: Setting) -> Bound:
    """M-T23, with the identity for a lookup"""
    bound = setting.dim * 4 * setting.query_term()
    return replace(contraction.attention(setting), name="Theorem 23", value=bound)


def printed_neighbourhood(setting: Setting) -> Bound:
    """M-P25, with the identity for a lookup"""
    bound = setting.dim * 2 * setting.query_term()
    return replace(contraction.neighbourhood(setting), name="Proposition 25", value=bound)


def printed_gaussian(dim: int, tokens: int) -> Bound:
    """M-P28"""
    slope = math.sqrt(dim * (math.log(tokens) + 1 / (2 * math.e)) * 2 / math.e)
    bound = slope + 1 + math.sqrt(dim) + 2
    given = ("all inputs", f"{tokens} tokens in R^{dim}")
    trials = GaussianTrials(dim, tokens)
    return Bound("Proposition 28", bound, Wasserstein1(), given, trials)


@dataclass(frozen=True)
class GaussianTrials(Trials):
    """State: X and Y (count, N, d), whose first tokens are x and y."""

    inputs = ("tokens of X (N, d), the first of them x", "tokens of Y, the first of them y")

    dim: int
    tokens: int

    def sample(self, count: int, generator: torch.Generator) -> State:
        """Tokens from near to far; one of them moved, or all."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

        far = 10 ** torch.rand(count, self.tokens, 1, generator=generator, dtype=torch.float64)
        x = normal(self.tokens, self.dim) * far
        which = torch.randint(0, self.tokens + 1, (count, 1), generator=generator)
        every = which == self.tokens
        moved = every | (torch.arange(self.tokens) == which)
        return x, x + 0.01 * normal(self.tokens, self.dim) * moved.unsqueeze(-1)

    def project(self, state: State) -> State:
        return state

    def quotient(self, state: State) -> Tensor:
        x, y = state
        kernel = Softmatch(GaussianPotential(1.0))
        one, other = Empirical(x), Empirical(y)
        images = [_first(kernel(m).at(m.points[..., :1, :])) for m in (one, other)]
        apart = (x[..., 0, :] - y[..., 0, :]).abs().sum(-1) + wasserstein1(one, other)
        moved = wasserstein1(images[0], images[1])
        return torch.where(apart > 0, moved / torch.where(apart > 0, apart, 1.0), 0.0)


def _first(family: Measure) -> Empirical:
    """(count, 1, N, d) -> (count, N, d)"""
    assert isinstance(family, Empirical)
    return Empirical(family.points.squeeze(-3), family.weights.squeeze(-2))


def refute(
    budget: int = 5_000, *, generator: torch.Generator | None = None
) -> dict[str, tuple[str, Attack]]:
    """Search settings at random until each of the four is exceeded: its setting, and the attack.

    The strongest attack where the budget of trials is used up without.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    best_trials = {}
    makers = (printed_measure, printed_attention, printed_neighbourhood, None)
    for make in makers:
        left, best = budget, None
        while left > 0 and (best is None or best[1].holds):
            bound, words = _setting(make, generator)
            tried = attack(bound, min(left, 500), generator=generator)
            left -= tried.trials
            if best is None or tried.ratio > best[1].ratio:
                best = (words, tried)
        assert best is not None
        best_trials[bound.name] = best
    return best_trials


def _setting(make: object, generator: torch.Generator) -> tuple[Bound, str]:
    """One setting at random: dimension, number of tokens, temperature."""

    def power(low: float, high: float) -> float:
        return float(2 ** (low + (high - low) * torch.rand((), generator=generator)))

    dim, size = round(power(0, 3)), round(power(1, 6))
    if make is None:
        return printed_gaussian(dim, size), f"d = {dim}, N = {size}"
    temperature = power(-4, 8)
    setting = Setting(Dot(temperature), Box(1.0), dim, min(size, 8))
    assert callable(make)
    words = f"d = {dim}, {setting.size} points, temperature {temperature:.3g}, unit box"
    return make(setting), words
