"""What the claims of `families` compute for one seed: errors, largest or least to be taken."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Generator, Tensor

import fenchel as fl
from fenchel import continuous as fc
from papers.claims.thesis._numbers import (
    EXACT,
    differences,
    distributions,
    exp_b,
    half_width,
    log_b,
    negentropy,
    normal,
    segment,
    simplex_map,
    spread,
    uniform,
)

ALPHAS = (1.1, 1.3, 1.5, 1.7, 2.0, 3.0)
Errors = tuple[Tensor, ...]


def on_the_line(mean: float, variance: float, alpha: float) -> fc.Density:
    where, scale = torch.tensor([mean], dtype=EXACT), torch.tensor([[variance]], dtype=EXACT)
    if alpha == 2:
        return fc.Paraboloid(where, scale)
    return fc.TsallisGaussian(where, scale, alpha)


def placed(generator: Generator) -> tuple[float, float]:
    """A mean and a variance."""
    return float(normal(generator, 1)), float(0.2 + uniform(generator, 1))


# ---- F-E3.1, F-E3.2


def predicted(generator: Generator) -> Errors:
    theta = 1.5 * normal(generator, 6)
    values, weights = [], [fl.solve(theta, fl.Shannon()).weights - torch.softmax(theta, -1)]
    for alpha in (1.0, 1.5, 2.0):
        solution = fl.solve(theta, fl.Tsallis(alpha))
        expected, _ = simplex_map(theta, alpha)
        values.append(solution.objective - (theta @ expected - negentropy(expected, alpha)))
        weights.append(solution.weights - expected)
    return torch.stack(values), torch.stack(weights)


def missed(generator: Generator, count: int) -> Tensor:
    """By how much random points fall short of the maximum."""
    theta, others = 1.5 * normal(generator, 6), distributions(generator, count, 6)
    short = []
    for alpha in (1.0, 1.5, 2.0):
        best = fl.solve(theta, fl.Tsallis(alpha)).objective
        short.append(best - (others @ theta - negentropy(others, alpha)))
    return torch.stack(short)


def on_a_grid(generator: Generator, count: int) -> Errors:
    """The largest error of three alphas, and of alpha = 2 in units of h²/σ²."""
    mean, variance = placed(generator)
    errors = []
    for alpha in (4 / 3, 1.5, 2.0):
        reach = 1.5 * half_width(alpha, variance)
        t = torch.linspace(mean - reach, mean + reach, count, dtype=EXACT)
        step = t[1] - t[0]
        score = -((t - mean) ** 2) / (2 * variance)
        weights = fl.solve(score, fl.Tsallis(alpha), base=step.expand(count)).weights
        density = on_the_line(mean, variance, alpha).prob(t.unsqueeze(-1))
        errors.append((weights / step - density).abs().max())
    return torch.stack(errors), errors[-1] * variance / step**2


def gaussian_on_a_grid(generator: Generator) -> Errors:
    mean, variance = placed(generator)
    t = mean + math.sqrt(variance) * torch.linspace(-10, 10, 401, dtype=EXACT)
    score, step = -((t - mean) ** 2) / (2 * variance), t[1] - t[0]
    weights = fl.solve(score, fl.Shannon(), base=step.expand(401)).weights
    return (weights / step - on_the_line(mean, variance, 1.0).prob(t.unsqueeze(-1)),)


def objective(parabola: fc.Density, variance: float) -> Tensor:
    """J(p) = E_p f - Ω_2(p) of a parabola around zero."""
    return parabola.entropy() - parabola.variance.squeeze() / (2 * variance)


def attained(generator: Generator) -> Errors:
    """J(p) against quadrature of f p - p²/2."""
    _, variance = placed(generator)
    parabola = on_the_line(0.0, variance, 2.0)
    t, weights, _ = segment(0.0, half_width(2.0, variance))
    p = parabola.prob(t.unsqueeze(-1))
    by_hand = weights @ (-(t**2) / (2 * variance) * p - p**2 / 2) + 0.5
    return (objective(parabola, variance) - by_hand,)


def above_gaussians(generator: Generator) -> Tensor:
    """J(p) - J(q) - |p - q|²/2 >= 0, since Ω_2 is 1-strongly convex; the first q is the best."""
    _, variance = placed(generator)
    parabola = on_the_line(0.0, variance, 2.0)
    best = objective(parabola, variance)
    widths, shifts = 0.02 + 2 * uniform(generator, 20), normal(generator, 20)
    widths[0], shifts[0] = (variance / (4 * math.sqrt(math.pi))) ** (2 / 3), 0.0
    square = 1 / (2 * (math.pi * widths).sqrt())  # ∫ q²
    reached = -(widths + shifts**2) / (2 * variance) - (square - 1) / 2
    t, weights, _ = segment(0.0, half_width(2.0, variance))
    q = (-((t[:, None] - shifts) ** 2) / (2 * widths)).exp() / (2 * math.pi * widths).sqrt()
    p = parabola.prob(t.unsqueeze(-1))
    apart = square + weights @ p**2 - 2 * (weights * p) @ q
    return best - reached - apart / 2


# ---- F-E3.3 to F-E3.5


def logarithms(generator: Generator) -> Errors:
    errors = []
    for alpha in (1.0, 1.5, 1.7, 2.0, 3.0):
        scores = spread(generator, alpha)
        weights = fl.solve(scores, fl.Tsallis(alpha)).weights
        offset = (scores - log_b(weights, 2 - alpha))[weights > 0]
        errors.append(offset.max() - offset.min())
    return (torch.stack(errors),)


def inverses(generator: Generator) -> Errors:
    x, there, back = 0.05 + 3 * uniform(generator, 20), [], []
    for b in (-1.0, 0.0, 0.3, 0.5, 1.0, 1.5):
        there.append(exp_b(log_b(x, b), b) - x)
        u = 4 * uniform(generator, 20) - 2
        inside = 1 + (1 - b) * u > 0.01
        back.append(torch.where(inside, log_b(exp_b(u, b), b) - u, 0.0))
    u = 4 * uniform(generator, 20) - 2
    limit = torch.cat([exp_b(u, 1 - 1e-6) - u.exp(), log_b(x, 1 - 1e-6) - x.log()])
    return torch.stack(there), torch.stack(back), limit


def negentropies(generator: Generator) -> Errors:
    scores = 1.5 * normal(generator, 6)

    def omega(alpha: float) -> tuple[Tensor, Tensor]:
        solution = fl.solve(scores, fl.Tsallis(alpha))
        return scores @ solution.weights - solution.objective, solution.weights

    errors = []
    for alpha in (1.0, *ALPHAS):
        value, weights = omega(alpha)
        errors.append(value - negentropy(weights, alpha))
    gini, weights = omega(2.0)
    index = 1 - weights.square().sum()
    return torch.stack(errors), omega(1 + 1e-6)[0] - omega(1.0)[0], gini + index / 2


def density_entropies(generator: Generator) -> Errors:
    mean, variance = placed(generator)
    errors = []
    for alpha in (4 / 3, 1.5, 2.0, 3.0):
        density = on_the_line(mean, variance, alpha)
        t, weights, _ = segment(mean, half_width(alpha, variance))
        power = weights @ density.prob(t.unsqueeze(-1)) ** alpha
        errors.append(density.entropy() + (power - 1) / (alpha * (alpha - 1)))
    return (torch.stack(errors),)


# ---- F-E3.6 to F-E3.9


def forms(generator: Generator) -> Errors:
    scores, (_, variance) = 1.5 * normal(generator, 7), placed(generator)
    solved, mapped, line = [], [], []
    for alpha in ALPHAS:
        expected, _ = simplex_map(scores, alpha)
        solved.append(fl.solve(scores, fl.Tsallis(alpha)).weights - expected)
        mapped.append(fl.entmax(scores, alpha) - expected)
        t = torch.linspace(-0.9, 0.9, 19, dtype=EXACT) * half_width(alpha, variance)
        density = on_the_line(0.0, variance, alpha).prob(t.unsqueeze(-1))
        offset = log_b(density, 2 - alpha) + t**2 / (2 * variance)
        line.append(offset.max() - offset.min())
    return torch.stack(solved), torch.stack(mapped), torch.stack(line)


def normaliser(scores: Tensor, alpha: float) -> Tensor:
    """The library's A: at the threshold 1 + (α-1)(f - A) is zero."""
    return fl.solve(scores, fl.Tsallis(alpha)).threshold + 1 / (alpha - 1)


def closed_normaliser(p: Tensor, scores: Tensor, alpha: float) -> Tensor:
    """(3.7), over the keys that are given."""
    power = p ** (2 - alpha)
    first = 1 / (1 - alpha)
    return (first + (power * scores).sum()) / power.sum() - first


def normalisers(generator: Generator) -> Errors:
    scores, closed, bisected = 1.5 * normal(generator, 7), [], []
    for alpha in ALPHAS:
        solution = fl.solve(scores, fl.Tsallis(alpha))
        on, offset = solution.support, normaliser(scores, alpha)
        closed.append(closed_normaliser(solution.weights[on], scores[on], alpha) - offset)
        bisected.append(offset - simplex_map(scores, alpha)[1])
    # A = LSE - (α-1)/2 E_p[log² p] + O((α-1)²)
    alpha, soft = 1 + 1e-5, torch.softmax(scores, -1)
    near = closed_normaliser(fl.solve(scores, fl.Tsallis(alpha)).weights, scores, alpha)
    slope = (scores.exp().sum().log() - near) / (alpha - 1)
    expected = soft @ soft.log() ** 2 / 2
    return torch.stack(closed), torch.stack(bisected), slope / expected - 1


def normaliser_derivatives(generator: Generator) -> Errors:
    first, second = [], []
    for alpha in (1.3, 1.5, 2.0, 3.0):
        scores = spread(generator, alpha)
        direction = normal(generator, scores.numel())
        escort = fl.solve(scores, fl.Tsallis(alpha)).escort()
        slopes = differences(partial(normaliser, alpha=alpha), scores)
        first.append((slopes - escort).abs().max())
        moves = torch.stack([scores + 1e-6 * direction, scores - 1e-6 * direction])
        up, down = fl.solve(moves, fl.Tsallis(alpha)).escort() @ direction
        p = exp_b(scores, 2 - alpha)  # A is zero
        on = p > 0
        power = p[on] ** (2 - alpha)
        apart = direction[on] - (power @ direction[on]) / power.sum()
        bend = (2 - alpha) * (p[on] ** (3 - 2 * alpha) * apart**2).sum() / power.sum()
        second.append(((up - down) / 2e-6 - bend).abs() / (1 + bend.abs()))
    return torch.stack(first), torch.stack(second)


def bulge(generator: Generator, alpha: float, count: int) -> Tensor:
    """The mean of A at two ends less A in their middle: not negative where A is convex."""
    one, other = 2 * normal(generator, count, 4), 2 * normal(generator, count, 4)
    ends = normaliser(one, alpha) + normaliser(other, alpha)
    return ends / 2 - normaliser((one + other) / 2, alpha)


def escorts(generator: Generator) -> Errors:
    scores, formula, total = 1.5 * normal(generator, 7), [], []
    for alpha in (1.0, *ALPHAS):
        escort, p = fl.solve(scores, fl.Tsallis(alpha)).escort(), simplex_map(scores, alpha)[0]
        power = torch.where(p > 0, p ** (2 - alpha), 0.0)
        formula.append(escort - power / power.sum())
        total.append(escort.sum() - 1)
    soft, projection = (simplex_map(scores, alpha)[0] for alpha in (1.0, 2.0))
    on = (projection > 0).double()
    one, two = (fl.solve(scores, fl.Tsallis(alpha)).escort() for alpha in (1.0, 2.0))
    return torch.stack(formula), torch.stack(total), one - soft, two - on / on.sum()
