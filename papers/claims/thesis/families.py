"""Chapter 3 of the thesis, first half: Tsallis entropies, their maps, and the densities they give.

Throughout b = 2 - α, p = exp_b(f - A), and integrals of powers of p run over its support alone.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Generator, Tensor

import fenchel as fl
from fenchel import continuous as fc
from papers.claims.evidence import DIFFERENCES, Curves, Evidence, Fields
from papers.claims.ledger import claim
from papers.claims.thesis import _predictions as predictions
from papers.claims.thesis._numbers import (
    EXACT,
    definite,
    ellipsoid,
    exp_b,
    lattice,
    least,
    level,
    log_b,
    moved,
    negentropy,
    normal,
    uniform,
    worst,
)
from papers.claims.verdicts import Verdict

# ---- the problem


@claim(
    "F-E3.1",
    "prediction = argmax over the simplex of <θ, p> - Ω(p): softmax, sparsemax, entmax, argmax",
    Verdict.CONFIRMED,
)
def regularised_prediction(evidence: Evidence) -> None:
    count = evidence.trials(1_000, 20_000)
    value, weights = worst(evidence, predictions.predicted)
    evidence.below("the maximum that is attained against <θ, p> - Ω(p) of p by bisection", value)
    evidence.below("the weights against softmax, and against bisection", weights)
    evidence.above(
        f"by how much {count} random points a seed miss the maximum, at least",
        least(evidence, partial(predictions.missed, count=count)),
        -1e-12,
    )
    cold = fl.solve(torch.tensor([1.0, 0.3, -0.2], dtype=EXACT), fl.Shannon(0.01)).weights
    evidence.near("temperature to zero gives the argmax: its weight", cold[0], 1.0, 1e-12)


@claim(
    "F-E3.2",
    "over densities: argmax E_p f - Ω_α(p); for α = 2 and quadratic f a truncated parabola",
    Verdict.CONFIRMED,
)
def prediction_over_densities(evidence: Evidence) -> None:
    counts = [101, 401, 1601, 3201]
    by_count = [worst(evidence, partial(predictions.on_a_grid, count=count)) for count in counts]
    evidence.below("map on 3201 cells against the density, α = 4/3, 3/2, 2", by_count[-1][0], 1e-5)
    # a cell at the border is off by at most h |p'| / 2, the others by h p'' / 24
    evidence.below("the same for α = 2, in units of h²/σ²", by_count[-1][1], 0.55)
    (gaussian,) = worst(evidence, predictions.gaussian_on_a_grid)
    evidence.below("α = 1 against the Gaussian", gaussian)
    (value,) = worst(evidence, predictions.attained)
    evidence.below("objective of the parabola against quadrature", value)
    evidence.above(
        "objective of the parabola less that of a Gaussian, less |p - q|²/2, at least",
        least(evidence, predictions.above_gaussians),
        -1e-12,
    )
    errors = [float(each[0]) for each in by_count]
    square = [errors[0] * (counts[0] / count) ** 2 for count in counts]
    lines = {"largest of five seeds": (counts, errors), "order 2": (counts, square)}
    evidence.draw(Curves("The map on n cells against the density", "n", "error", lines, "xy"))


# ---- the entropies


@claim(
    "F-E3.3/3.4",
    "exp_b and log_b are inverse where 1 + (1-b)u > 0, and go to exp and log as b → 1",
    Verdict.CONFIRMED,
)
def deformed_exponential(evidence: Evidence) -> None:
    (apart,) = worst(evidence, predictions.logarithms)
    inverse, other, near = worst(evidence, predictions.inverses)
    evidence.below("exp_b(log_b(x)) against x, b = -1, 0, .3, .5, 1, 1.5", inverse)
    evidence.below("log_b(exp_b(u)) against u where 1 + (1-b)u > 0", other)
    evidence.below("|exp_b - exp| and |log_b - log| at b = 1 - 1e-6, |u| ≤ 2", near, 2e-5)
    evidence.below("on the support log_{2-α}(p_i) - log_{2-α}(p_j) against s_i - s_j", apart)
    back = log_b(exp_b(torch.tensor(-3.0, dtype=EXACT), 0.0), 0.0)
    evidence.near("not inverse on the clipped part: log_0(exp_0(-3))", back, -1.0, 1e-12)
    evidence.note("b is called positive, and is 0 for α = 2 and negative for α > 2")


@claim(
    "F-E3.5",
    "Ω_α(p) = (∫ p^α - 1) / (α(α-1)): Shannon's for α → 1, minus half the Gini index for α = 2",
    Verdict.CONFIRMED,
)
def tsallis_negentropy(evidence: Evidence) -> None:
    discrete, limit, gini = worst(evidence, predictions.negentropies)
    (continuous,) = worst(evidence, predictions.density_entropies)
    evidence.below("Ω_α of a solution against the formula, α = 1, 1.1, .., 3", discrete)
    evidence.below("Ω_α of a density against quadrature, α = 4/3, 3/2, 2, 3", continuous)
    evidence.below("|Ω at α = 1 + 1e-6 less Shannon's|", limit, 1e-4)
    evidence.below("Ω_2 against -(1 - Σ p²)/2", gini)
    twice = negentropy(torch.tensor([1.2, 0.8], dtype=EXACT), 1 + 1e-6)
    evidence.above("needs mass one: |Ω| at α = 1 + 1e-6 of mass two", twice.abs(), 1e5)


# ---- the map


@claim("F-E3.6", "p = exp_{2-α}(f - A) with the A of mass one", Verdict.CONFIRMED)
def deformed_exponential_form(evidence: Evidence) -> None:
    solved, mapped, line = worst(evidence, predictions.forms)
    evidence.below("solve against bisection of Σ exp_{2-α}(f - A) = 1, α = 1.1 .. 3", solved)
    evidence.below("entmax against the same", mapped)
    evidence.below("densities: log_{2-α} p - f is one number on the support", line)
    difference = torch.linspace(-3, 3, 49, dtype=EXACT)
    pairs = torch.stack([difference, torch.zeros_like(difference)], -1)
    lines = {
        f"α = {alpha:g}": (difference.tolist(), fl.entmax(pairs, alpha)[:, 0].tolist())
        for alpha in (1.0, 1.5, 2.0, 3.0)
    }
    evidence.draw(Curves("The weight of one of two keys", "s_1 - s_2", "p_1", lines))


@claim(
    "F-E3.7",
    "A = (1/(1-α) + ∫ p^{2-α} f) / ∫ p^{2-α} - 1/(1-α), integrals over supp p; → LSE as α → 1",
    Verdict.CONFIRMED,
)
def normaliser(evidence: Evidence) -> None:
    closed, bisected, slope = worst(evidence, predictions.normalisers)
    evidence.below("closed form against the threshold + 1/(α-1), α = 1.1 .. 3", closed)
    evidence.below("threshold + 1/(α-1) against bisection", bisected)
    evidence.below("(LSE - A)/(α-1) at α = 1 + 1e-5 against E_p[log² p]/2, relative", slope, 1e-3)
    far = torch.tensor([1.0, 0.5, -9.0], dtype=EXACT)
    weights = fl.solve(far, fl.Tsallis(2.0)).weights
    wrong = predictions.closed_normaliser(weights, far, 2.0) - predictions.normaliser(far, 2.0)
    evidence.near(
        "off by, if α = 2, f = (1, .5, -9) counts the key without weight", wrong, -37 / 12, 1e-10
    )


@claim(
    "F-E3.8", "∇A is the mean under the escort p^{2-α}; A is convex for α ≤ 2", Verdict.CORRECTED
)
def normaliser_gradient(evidence: Evidence) -> None:
    first, second = worst(evidence, predictions.normaliser_derivatives)
    evidence.below("∂A/∂f by differences against the escort, α = 1.3 .. 3", first, DIFFERENCES)
    evidence.below(
        "A'' by differences against (2-α) Σ p^{3-2α}(φ - E)² / Σ p^{2-α}, relative",
        second,
        DIFFERENCES,
    )
    count = evidence.trials(600, 3_000)
    for alpha in (1.2, 1.5, 2.0):
        bulge = least(evidence, partial(predictions.bulge, alpha=alpha, count=count))
        evidence.above(
            f"convex, {count} midpoints a seed: α = {alpha:g}, by at least", bulge, -1e-12
        )
    line = torch.linspace(-0.5, 0.5, 41, dtype=EXACT)
    pairs = torch.stack([line, torch.zeros_like(line)], -1)
    offsets = predictions.normaliser(pairs, 3.0)
    parabola = 0.5 - (1 - 2 * line) ** 2 / 8
    evidence.below("α = 3, f = (x, 0): A against 1/2 - (1 - 2x)²/8", (offsets - parabola).abs())
    above = offsets[20] - (offsets[0] + offsets[-1]) / 2
    evidence.near("there A(0) - (A(½) + A(-½))/2", above, 0.125, 1e-10)
    evidence.printed_below("convex for every α > 0: the same, α = 3", above, 1e-12)
    evidence.correction = "A is convex for α ≤ 2 alone; for α = 3 and f = (x, 0) it is concave"
    lines = {
        f"α = {alpha:g}": (line.tolist(), predictions.normaliser(pairs, alpha).tolist())
        for alpha in (1.5, 2.0, 3.0)
    }
    evidence.draw(Curves("The normaliser along f = (x, 0)", "x", "A", lines))


@claim(
    "F-E3.9",
    "escort p^b / ∫ p^b: p itself for b = 1, uniform on the support for b = 0",
    Verdict.CONFIRMED,
)
def escort_distribution(evidence: Evidence) -> None:
    formula, total, same, even = worst(evidence, predictions.escorts)
    evidence.below("escort of a solution against p^{2-α} / Σ p^{2-α} on the support", formula)
    evidence.below("its sum less 1", total)
    evidence.below("b = 1 (α = 1): against p", same)
    evidence.below("b = 0 (α = 2): against 1/|supp p| on the support", even)


# ---- the densities


@claim(
    "F-E3.10/3.11",
    "α = 1 gives exp(f) / ∫ exp f with A = log ∫ exp f; on a finite set softmax",
    Verdict.CONFIRMED,
)
def gibbs(evidence: Evidence) -> None:
    density, potential, finite = worst(evidence, _quartic)
    evidence.below("map of a quartic score on a fine grid against exp(f) / ∫ exp f", density)
    evidence.below("potential against log ∫ exp f by adaptive quadrature", potential)
    evidence.below("finite: against exp(f) / Σ exp(f)", finite)


def _quartic(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    from scipy.integrate import quad

    a, b = (float(x) for x in normal(generator, 2))
    total, _ = quad(lambda t: math.exp(a * t + b * t * t - t**4), -6, 6, epsabs=1e-13, limit=200)
    t = torch.linspace(-6, 6, 601, dtype=EXACT)
    score = a * t + b * t**2 - t**4
    solution = fl.solve(score, fl.Shannon(), base=torch.full_like(t, 0.02))
    finite = normal(generator, 6)
    raised = finite.exp()
    return (
        solution.weights / 0.02 - score.exp() / total,
        solution.potential - math.log(total),
        fl.softmax(finite) - raised / raised.sum(),
    )


@claim(
    "F-E3.12",
    "α = 1, quadratic score: N(t; μ, Σ) with the factor (2π)^{-N/2} |Σ|^{-1/2}",
    Verdict.CORRECTED,
)
def gaussian_factor(evidence: Evidence) -> None:
    (mass,) = worst(evidence, _gaussian_masses)
    evidence.below("mass of the Gaussian less 1, N = 1, 2, 3", mass)
    for d in (1, 2, 3):
        scale = torch.eye(d, dtype=EXACT)
        t, weights = lattice(d)
        peak = fc.Gaussian(torch.zeros(d, dtype=EXACT), scale).prob(t[0] * 0)
        printed = weights @ (-t.square().sum(-1) / 2).exp() / (2 * math.pi)
        evidence.near(f"peak for N = {d}, Σ = I", peak, (2 * math.pi) ** (-d / 2), 1e-12)
        evidence.near(f"mass as printed, N = {d}", printed, (2 * math.pi) ** (d / 2 - 1), 1e-10)
        if d != 2:
            evidence.printed_near(f"mass as printed is 1, N = {d}", printed, 1.0, 1e-10)
    evidence.correction = "the factor is (2π)^{-N/2} |Σ|^{-1/2}; (2π)^{-1} holds for N = 2 alone"


def _gaussian_masses(generator: Generator) -> tuple[Tensor]:
    masses = []
    for d in (1, 2, 3):
        mean, scale = normal(generator, d), definite(generator, d)
        t, weights = moved(lattice(d), mean, scale)
        masses.append(weights @ fc.Gaussian(mean, scale).prob(t) - 1)
    return (torch.stack(masses),)


@claim("F-E3.13", "α = 2 gives p = [f - λ]_+ with mass one, and A = λ + 1", Verdict.CONFIRMED)
def clipped_score(evidence: Evidence) -> None:
    weights, threshold, normalised = worst(evidence, _clipped)
    evidence.below("weights against [f - λ]_+", weights)
    evidence.below("λ against the root of Σ [f - λ]_+ = 1", threshold)
    evidence.below("A of (3.7) against λ + 1", normalised)
    low, high = (
        fl.solve(torch.full((4,), level, dtype=EXACT), fl.Tsallis(2.0)).threshold
        for level in (0.0, 1.0)
    )
    evidence.near("λ of four equal scores of 0: either sign occurs", low, -0.25, 1e-12)
    evidence.near("λ of four equal scores of 1", high, 0.75, 1e-12)


def _clipped(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    from scipy.optimize import brentq

    scores = 1.5 * normal(generator, 7)
    solution = fl.solve(scores, fl.Tsallis(2.0))
    top = float(scores.max())
    root = brentq(lambda x: float((scores - x).clamp_min(0).sum()) - 1, top - 1, top, xtol=1e-15)
    on = solution.support
    offset = predictions.closed_normaliser(solution.weights[on], scores[on], 2.0)
    expected = (scores - root).clamp_min(0)
    return solution.weights - expected, solution.threshold - root, offset - (root + 1)


@claim(
    "F-E3.14/3.15",
    "α = 2, quadratic score: [c - z²/2]_+ with c = (Γ(N/2+2) / √det(2πΣ))^{2/(N+2)}",
    Verdict.CONFIRMED,
)
def truncated_paraboloid(evidence: Evidence) -> None:
    mass, height, values = worst(evidence, _paraboloids)
    evidence.below("mass less 1 by quadrature over the ellipsoid, N = 1, 2, 3", mass)
    evidence.below("level of the library against c", height)
    evidence.below("density against [c - (t-μ)'Σ⁻¹(t-μ)/2]_+, points in and out", values)


def _paraboloids(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    masses, heights, values = [], [], []
    for d in (1, 2, 3):
        mean, scale = normal(generator, d), definite(generator, d)
        density = fc.Paraboloid(mean, scale)
        t, weights = ellipsoid(mean, scale)
        masses.append(weights @ density.prob(t) - 1)
        heights.append(density.level - level(scale))
        t = mean + 2 * normal(generator, 30, d)
        form = ((t - mean) @ torch.linalg.inv(scale) * (t - mean)).sum(-1)
        values.append(density.prob(t) - (level(scale) - form / 2).clamp_min(0))
    return torch.stack(masses), torch.stack(heights), torch.stack(values)


@claim(
    "F-S3.2txt",
    "for α > 1 supports may be smaller than S, unlike α = 1",
    Verdict.CORRECTED,
)
def sparse_families(evidence: Evidence) -> None:
    scores = torch.tensor([3.0, 1.0, -30.0], dtype=EXACT)
    lightest = torch.stack([fl.solve(scores, fl.Tsallis(a)).weights.min() for a in (1.05, 1.5, 2)])
    evidence.below("weight of a key 33 below the best, α = 1.05, 1.5, 2", lightest, 0.0)
    evidence.above("the same, α = 1", fl.solve(scores, fl.Shannon()).weights.min(), 1e-15)
    far, zero = torch.full((2,), 6.0, dtype=EXACT), torch.zeros(2, dtype=EXACT)
    eye = torch.eye(2, dtype=EXACT)
    evidence.above("N(0, I) at (6, 6)", fc.Gaussian(zero, eye).prob(far), 1e-17)
    evidence.below("TP(0, I) at (6, 6)", fc.Paraboloid(zero, eye).prob(far), 0.0)
    two = fc.TsallisGaussian(zero, eye, 2.0).prob(zero) - fc.Paraboloid(zero, eye).prob(zero)
    one = fc.TsallisGaussian(zero, eye, 1.0).prob(zero) - fc.Paraboloid(zero, eye).prob(zero)
    evidence.below("TP(0, I) is the density of α = 2: peaks apart by", two.abs())
    evidence.printed_below("TP(0, I) is that of α = 1 (Figure 3.1): peaks apart by", one.abs())
    evidence.correction = (
        "'α = 0' in the text is a slip for α = 1 (Ω_0 does not exist), and the right panel of "
        "Figure 3.1, captioned α = 1, shows α = 2"
    )


@claim(
    "F-Fig3.1",
    "N(0, I) and TP(0, I) in the plane: peaks 1/(2π) and 1/√π, support a disc of radius √(2/√π)",
    Verdict.CONFIRMED,
)
def two_densities(evidence: Evidence) -> None:
    zero, eye = torch.zeros(2, dtype=EXACT), torch.eye(2, dtype=EXACT)
    gaussian, paraboloid = fc.Gaussian(zero, eye), fc.Paraboloid(zero, eye)
    evidence.near("peak of TP(0, I)", paraboloid.prob(zero), 0.564190, 1e-6)
    evidence.near("peak of N(0, I)", gaussian.prob(zero), 0.159155, 1e-6)
    evidence.near("radius of the support", paraboloid.projection()[1][0], 1.062252, 1e-6)
    angle = 2 * math.pi * uniform(torch.Generator().manual_seed(evidence.seed), 200)
    rim = 1.062252 * torch.stack([angle.cos(), angle.sin()], -1)
    inside = paraboloid.support.check(rim * (1 - 1e-5)).double() - 1
    outside = paraboloid.support.check(rim * (1 + 1e-5)).double()
    evidence.below("points within and beyond the circle told apart", (inside.abs() + outside), 0.0)
    oval = fc.Paraboloid(zero, torch.diag(torch.tensor([1.0, 4.0], dtype=EXACT))).projection()[1]
    evidence.near(
        "Σ diagonal is not enough: ratio of axes for diag(1, 4)", oval[1] / oval[0], 2.0, 1e-10
    )
    for share, sign in ((1.0, 0.0), (0.9, 1.0)):
        small = share / (4 * math.pi) * eye
        higher = fc.Gaussian(zero, small).prob(zero) - fc.Paraboloid(zero, small).prob(zero)
        expected = 2 / share - 2 / math.sqrt(share) if sign else 0.0
        evidence.near(f"Σ = {share:g}/(4π) I: peak of N less that of TP", higher, expected, 1e-10)
    line = torch.linspace(-1.5, 1.5, 40, dtype=EXACT)
    points = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
    panels = {"N(0, I)": gaussian, "TP(0, I)": paraboloid}
    fields = {name: each.prob(points).tolist() for name, each in panels.items()}
    evidence.draw(Fields("Two densities of one score", fields, (-1.5, 1.5, -1.5, 1.5)))
