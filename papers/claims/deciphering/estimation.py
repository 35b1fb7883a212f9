"""The estimation problem of sections 3 to 6: preference, evidence, reliability, and its dual."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import fenchel as fl
from fenchel import dual
from papers.claims.deciphering._problems import (
    F64,
    Drawn,
    descend,
    distributions,
    divergence,
    draw,
    normal,
    numbers,
    weights_of,
    worst,
)
from papers.claims.evidence import DIFFERENCES, SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict

ALPHAS = numbers([0.05, 0.3, 1.0, 3.0, 10.0])


# ---- the model


def _outside(point: Tensor, templates: Tensor) -> float:
    """How far a point is from the hull of the templates, largest coordinate: a linear program."""
    import numpy as np
    from scipy.optimize import linprog

    n, d = templates.shape
    plane, ones = templates.mT.numpy(), np.ones((d, 1))
    program = linprog(
        np.r_[np.zeros(n), 1.0],
        A_ub=np.block([[plane, -ones], [-plane, -ones]]),
        b_ub=np.r_[point.numpy(), -point.numpy()],
        A_eq=np.r_[np.ones(n), 0.0][None],
        b_eq=[1.0],
        bounds=[(0, None)] * (n + 1),
    )
    return float(program.fun)


@claim(
    "D-E1", "the output is a mean Σ p_i t_i of a distribution p, so in conv(T)", Verdict.CONFIRMED
)
def outputs_are_means(evidence: Evidence) -> None:
    far, apart, beyond = [], [], []
    for generator in evidence.generators():
        problem = draw(generator)
        templates = problem.templates
        for mean, weights in _outputs(problem):
            apart += [
                (mean - weights @ templates).abs().max(),
                (weights.sum(-1) - 1).abs().max(),
                -weights.min(),
            ]
            far.append(_outside(mean[-1], templates))  # the most reliable: furthest out
        corner = templates[templates[:, 0].argmax()]
        beyond.append(_outside(corner + numbers([1e-3, 0.0, 0.0]), templates))
    evidence.below("distance of outputs from the hull, by a linear program", far)
    evidence.below("|h - Σ p_i t_i|, |Σ p - 1|, and -min p", torch.stack(apart))
    evidence.above("distance of a point that is outside by 1e-3", beyond, 1e-4)


def _outputs(problem: Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    """Means (rows, d) and weights (rows, n) of each function; of attention the weights are its
    output where the values are unit vectors."""
    for solve in (dual.estimate, dual.first_order, dual.second_order):
        estimate = solve(*problem.operands, ALPHAS)
        yield estimate.mean, weights_of(estimate)
    templates, query = problem.templates, problem.evidence[None]
    units = torch.eye(len(templates), dtype=F64)
    for regularizer in (fl.Shannon(), fl.Tsallis(1.5)):
        mean, weights = (fl.attention(query, templates, x, regularizer) for x in (templates, units))
        yield mean, weights


@claim("D-E2", "evidence z = h - μ + noise, noise from N(0, σ² I)", Verdict.DEFINITION)
def evidence_is_a_noisy_shift(evidence: Evidence) -> None:
    sigma, count, d = 0.5, 20_000, 3
    off, spread, wrong, noiseless = torch.zeros(d, dtype=F64), [], [], []
    for generator in evidence.generators():
        problem = draw(generator, d=d)
        mean = distributions(generator, problem.preference, 1)[0] @ problem.templates
        nothing = dual.first_order(problem.templates, problem.preference, torch.zeros_like(mean), 1)
        shift = mean - nothing.prior_mean
        noise = sigma * normal(generator, count, d)
        sample = shift + noise
        off += (sample.mean(0) - (mean - problem.mean)) / 5
        spread.append(sample.var(0).mean() / sigma**2)
        wrong.append((nothing.prior_mean - problem.mean).abs().max())
        sure = dual.estimate(problem.templates, problem.preference, shift, 1e7)
        noiseless.append((sure.mean - mean).abs().max())
    error = sigma * math.sqrt(d / (5 * count))
    evidence.below("|mean of z - (h - μ)| in standard errors", off.norm() / error, 4.0)
    evidence.near("variance of z over σ²", torch.stack(spread).mean(), 1.0, 0.03)
    evidence.below("μ: mean of the preference", torch.stack(wrong))
    evidence.below("|estimate - h| without noise, at α = 1e7", torch.stack(noiseless), 1e-4)


# ---- the primal problem


@claim(
    "D-E3",
    "α/2 |b - Σ p_i t_i|² + KL(p, u) is strictly convex; one minimiser, zero where u is",
    Verdict.CONFIRMED,
)
def one_minimiser(evidence: Evidence) -> None:
    """With ∇F constant on the support, F(p) - F(p~) = KL(p, p~) + α/2 |h - h~|² > 0, exactly."""
    off, excess, brute, value, hidden = [], [], [], [], []
    for generator in evidence.generators():
        problem = draw(generator, hidden=1)
        best = weights_of(dual.estimate(*problem.operands, ALPHAS))
        others = distributions(generator, problem.preference, evidence.trials(20, 200))
        for alpha, p in zip(ALPHAS, best, strict=True):
            more = problem.primal(others, alpha) - problem.primal(p, alpha)
            moved = ((others - p) @ problem.templates).square().sum(-1)
            off.append((more - divergence(others, p) - 0.5 * alpha * moved).abs().max())
            excess.append((more - 0.5 * (others - p).abs().sum(-1).square()).min())
        minimisers = descend(problem, ALPHAS / 2, others[:3])
        brute.append((minimisers - best[:, None]).abs().max())
        levels = problem.primal(minimisers, ALPHAS[:, None]) - problem.primal(best, ALPHAS)[:, None]
        value.append(levels.abs().max())
        hidden.append(best[:, 0].abs().max())
    evidence.below("|F(p) - F(p~) - KL(p, p~) - α/2 |h - h~|²|, random p", torch.stack(off))
    evidence.above("F(p) - F(p~) - |p - p~|₁²/2, random p", torch.stack(excess), -SLACK)
    evidence.below("|p - p~|, p by mirror descent from 3 starts", torch.stack(brute), 1e-9)
    evidence.below("difference of the two values", torch.stack(value))
    evidence.below("weight where u is zero", torch.stack(hidden), 0.0)


@claim("D-E4", "the estimate is ĥ = Σ p~_i t_i, p~ the minimiser", Verdict.CONFIRMED)
def the_estimate_is_its_mean(evidence: Evidence) -> None:
    brute, of_weights, alphas = [], [], ALPHAS[1:4]
    for generator in evidence.generators():
        problem = draw(generator, hidden=1)
        estimate = dual.estimate(*problem.operands, alphas)
        start = distributions(generator, problem.preference, 1)
        minimiser = descend(problem, alphas / 2, start)[:, 0]
        brute.append((minimiser @ problem.templates - estimate.mean).abs().max())
        of_weights.append((weights_of(estimate) @ problem.templates - estimate.mean).abs().max())
    evidence.below("|ĥ - Σ p_i t_i|, p by mirror descent", torch.stack(brute), 1e-9)
    evidence.below("|ĥ - Σ p~_i t_i|", torch.stack(of_weights))


def _reachable(generator: torch.Generator) -> tuple[Drawn, float]:
    """With b in the hull, and α such that the printed radius, 1/√(2α), is half of |z|."""
    problem = draw(generator)
    inside = distributions(generator, problem.preference, 1)[0] @ problem.templates
    problem = Drawn(problem.templates, problem.preference, inside - problem.mean)
    return problem, 2 / float(problem.evidence.square().sum())


@claim(
    "D-MEM",
    "minimising (3) is minimising KL(p, u) under |b - Σ p_i t_i|² ≤ 1/(2α)",
    Verdict.REFUTED,
)
def fixed_radius(evidence: Evidence) -> None:
    drawn = [_reachable(generator) for generator in evidence.generators()]
    problems, alphas = [each for each, _ in drawn], numbers([alpha for _, alpha in drawn])
    by_kind = zip(*(problem.operands for problem in problems), strict=True)
    templates, u, z = (torch.stack(parts)[:, None] for parts in by_kind)  # (seed, 1, ...)
    estimate = dual.estimate(templates, u, z, alphas[:, None])
    target = torch.stack([problem.target for problem in problems])
    apart = (target - estimate.mean[:, 0]).norm(dim=-1)
    length = estimate.multiplier[:, 0].norm(dim=-1) / alphas
    printed = (2 * alphas).rsqrt()
    radii = torch.stack([printed, length, 1.5 * z[:, 0].norm(dim=-1)], 1)
    within = dual.within_radius(templates, u, z, radii)
    differ = (weights_of(within.estimate) - weights_of(estimate)).abs().amax(-1)  # (seed, radius)
    evidence.printed_below("|p - p~|, p with the radius² 1/(2α)", differ[:, 0], DIFFERENCES)
    evidence.printed_below("||b - ĥ|² - 1/(2α)|", (apart.square() - printed.square()).abs(), 1e-6)
    evidence.counterexample = (
        f"seed {evidence.seed}: α = {float(alphas[0]):.4f}, |b - ĥ|² = {float(apart[0]) ** 2:.4f}, "
        f"1/(2α) = {float(printed[0]) ** 2:.4f}; the weights differ by {float(differ[0, 0]):.4f}"
    )
    evidence.correction = (
        "the radius² of the same minimiser is |λ*|²/α², which depends on the data; with 1/(2α) the "
        "constraint may ask nothing (|z|² ≤ 1/(2α)) or be out of reach (dist(b, conv T)² > 1/(2α))"
    )
    evidence.below("||b - ĥ| - |λ*|/α|", (apart - length).abs())
    evidence.below("|p - p~|, p with the radius |λ*|/α", differ[:, 1], 1e-9)
    _within_radius(evidence, problems, within.estimate)
    _radius_out_of_reach(evidence, problems[0])


def _within_radius(evidence: Evidence, problems: list[Drawn], estimate: dual.Estimate) -> None:
    """The conditions that are enough, by convexity: log p/u affine along b - h, |b - h| = radius;
    and p = u for a radius above |z|. found: (seed, radius)"""
    bent, radius, free = [], [], []
    for problem, mean, p in zip(problems, estimate.mean, weights_of(estimate), strict=True):
        apart = problem.target - mean[0]
        tilt, along = (p[0] / problem.preference).log(), problem.templates @ apart
        tilt, along = tilt - tilt.mean(), along - along.mean()
        bent.append((tilt - along * (along @ tilt) / along.square().sum()).abs().max())
        radius.append((apart.norm() - problem.evidence.norm() / 2).abs())
        free.append((p[2] - problem.preference).abs().max())
    evidence.below("optimality of the constrained p", torch.stack(bent), 1e-8)
    evidence.below("| |b - Σ p_i t_i| - radius |", torch.stack(radius), 1e-9)
    evidence.below("|p - u| with a radius of 1.5 |z|", torch.stack(free))


def _radius_out_of_reach(evidence: Evidence, problem: Drawn) -> None:
    far = problem.evidence / problem.evidence.norm() * (problem.diameter + 1)  # hull 1 away
    answer = dual.within_radius(problem.templates, problem.preference, far, (2 * 5.0) ** -0.5)
    evidence.near("status at α = 5 of a target 1 from the hull", answer.estimate.status, 3, 0)


# ---- a Gaussian preference


@claim(
    "D-E5/E6",
    "u = N(μ, I): λ* = α/(1+α) (b - μ), and p~ = N((μ + α b)/(1+α), I)",
    Verdict.CONFIRMED,
)
def gaussian_preference(evidence: Evidence) -> None:
    slope, mean, spread, one_step, formula = [], [], [], [], []
    for generator in evidence.generators():
        middle, z = normal(generator, 1), normal(generator, 1)
        for alpha in ALPHAS.tolist():
            estimate = dual.gaussian(middle, torch.eye(1, dtype=F64), z, alpha)
            tilted, variance = _tilted(middle, estimate.multiplier)
            slope.append(middle + z - estimate.multiplier / alpha - tilted)
            mean.append(estimate.mean - tilted)
            spread.append(variance - 1)
            formula.append(estimate.multiplier - alpha / (1 + alpha) * z)
            formula.append(estimate.mean - (middle + alpha * (middle + z)) / (1 + alpha))
            short = z / max(1.0, alpha)  # for the grid: the tilt is by α z
            exact = dual.gaussian(middle, torch.eye(1, dtype=F64), short, alpha).mean
            more = alpha**2 / (1 + alpha) * short
            one_step.append(_tilted(middle, alpha * short)[0] - exact - more)
    evidence.below("slope of the dual at λ*, the tilted density by quadrature", worst(slope))
    evidence.below("λ* and ĥ against their formulas", worst(formula))
    evidence.below("|ĥ - mean of the tilted density|", worst(mean))
    evidence.below("|its variance - 1|", worst(spread))
    evidence.below("λ = α z of (14) instead: too far by α²/(1+α) z", worst(one_step))


def _tilted(middle: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of N(middle, 1) e^{λ x}: trapezia, exact for what decays at both ends."""
    grid = torch.linspace(-14, 14, 1401, dtype=F64) + middle
    logs = multiplier * grid - 0.5 * (grid - middle).square()
    weights = torch.softmax(logs, 0)
    mean = weights @ grid
    return mean[None], (weights @ (grid - mean).square())[None]


# ---- duality


@claim("D-T1", "strong duality: min (3) = max (7), and p~ = w(λ*)", Verdict.CONFIRMED)
def strong_duality(evidence: Evidence) -> None:
    gap, tilt, said, weak, excess = [], [], [], [], []
    for generator in evidence.generators():
        problem = draw(generator, hidden=1)
        estimate = dual.estimate(*problem.operands, ALPHAS)
        p, multiplier = weights_of(estimate), estimate.multiplier
        primal, value = problem.primal(p, ALPHAS), problem.dual(multiplier, ALPHAS)
        gap.append((primal - value).abs())
        tilt.append((p - problem.weights(multiplier)).abs().amax(-1))
        said += [(estimate.objective - primal).abs(), (estimate.dual_value - value).abs()]
        count = evidence.trials(50, 1000)
        others = distributions(generator, problem.preference, count)
        multipliers = normal(generator, count, 3)
        weak.append(problem.primal(others, 1.0) - problem.dual(multipliers, 1.0))
        # which is how far any λ is from the optimum
        away = problem.target - problem.weights(multipliers) @ problem.templates - multipliers
        between = problem.primal(problem.weights(multipliers), 1.0) - problem.dual(multipliers, 1.0)
        excess.append((between - 0.5 * away.square().sum(-1)).abs())
    evidence.below("|primal(p~) - dual(λ*)|", torch.stack(gap))
    evidence.below("|p~ - w(λ*)|", torch.stack(tilt))
    evidence.below("the library's two values against ours", torch.stack(said))
    evidence.above("primal(p) - dual(λ), random p and λ", torch.stack(weak), -SLACK)
    evidence.below("|primal(w(λ)) - dual(λ) - α/2 |b - h(λ) - λ/α|²|", torch.stack(excess))
    _draw_the_gap(evidence)


def _draw_the_gap(evidence: Evidence) -> None:
    problem = draw(torch.Generator().manual_seed(evidence.seed))
    lines = {}
    for alpha in (0.3, 3.0, 30.0):
        gaps = [float(dual.estimate(*problem.operands, alpha, max_steps=k).gap) for k in range(9)]
        lines[f"α = {alpha:g}"] = ([float(k) for k in range(9)], [max(gap, 1e-32) for gap in gaps])
    evidence.draw(Curves("Duality gap of Newton's steps", "steps", "gap", lines, "y"))


@claim("D-E10", "ĥ = h(λ*), and so ĥ = μ + z - λ*/α", Verdict.CONFIRMED)
def stationarity(evidence: Evidence) -> None:
    residual, mean = [], []
    for generator in evidence.generators():
        problem = draw(generator, hidden=1)
        estimate = dual.estimate(*problem.operands, ALPHAS)
        tilted = problem.weights(estimate.multiplier) @ problem.templates
        residual.append(problem.target - estimate.multiplier / ALPHAS[:, None] - tilted)
        mean.append(estimate.mean - tilted)
    evidence.below("|h(λ*) - (μ + z - λ*/α)|", worst(residual))
    evidence.below("|ĥ - h(λ*)|", worst(mean))
