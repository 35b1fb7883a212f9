"""Chapter 4 and Appendix A.2: integrals of a Gaussian over the ellipse of a truncated paraboloid.

c = -λ > 0 throughout; the plain formulas are in `_disc.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import fenchel.continuous as fc
from benchmarks import integrals_methods
from papers.claims.evidence import DIFFERENCES, Curves, Evidence, largest, smallest
from papers.claims.ledger import claim
from papers.claims.thesis._disc import (
    Pair,
    Rays,
    around,
    circle,
    closed_moments,
    ellipse,
    inside,
    normal,
    standard_normal,
    uniform,
)
from papers.claims.thesis._expectations import (
    affine,
    by_quadrature,
    difference,
    escort_covariances,
    expected,
    of_square,
    on_a_line,
    problem,
    raw_moments,
    slopes,
)
from papers.claims.thesis._timing import area, measured, quadrature_over_sum
from papers.claims.verdicts import Verdict

_ANGLES = 100  # the thesis' I
_WIDE = Pair.narrow(variance=0.06, distance=0.467)  # under a density that fills the unit square


def _pairs(evidence: Evidence) -> list[Pair]:
    return [Pair.draw(generator) for generator in evidence.generators()]


def _off(computed: list[Tensor], true: list[Tensor]) -> float:
    """The largest difference of any entry, NaN if one is."""
    return largest((one - other).abs() for one, other in zip(computed, true, strict=True))


# ---- the forward pass


@claim(
    "F-E4.13/A.12/A.15/A.16",
    "E_TP[ψ_j] = ∫∫_E TP ψ_j dt = c ∫∫ (1-|u|²) N(u;m̃,S̃) du on the unit disc, also in polar form",
    Verdict.CONFIRMED,
)
def forward_integral(evidence: Evidence) -> None:
    pairs = _pairs(evidence)
    values = [expected(pair) for pair in pairs]
    plane, disc, polar = [], [], []
    for pair in pairs:
        t, w = pair.on_support()
        plane.append((w * pair.density(t) * pair.psi(t)).sum())
        mean, covariance = pair.on_disc()
        u, w = inside(torch.eye(2, dtype=torch.float64))
        disc.append(pair.level * (w * (1 - u.square().sum(-1)) * normal(u, mean, covariance)).sum())
        rays = pair.rays(circle(200))
        r, _, dr = rays.along()
        polar.append(pair.level * around(rays, (dr * (1 - r**2)).sum(-1)))
    evidence.below("library − quadrature over the ellipse (4.13, A.12)", _off(values, plane))
    evidence.below("library − quadrature over the unit disc (A.15)", _off(values, disc))
    evidence.below("library − quadrature along the rays (A.16)", _off(values, polar))


@claim("F-L1", "N(Au+b; m, S) = s̃ N(u; m̃, S̃) for A of full column rank", Verdict.CORRECTED)
def affine_gaussian(evidence: Evidence) -> None:
    errors, prefactor = [], []
    for generator in evidence.generators():
        for d, r in ((3, 1), (3, 2), (2, 2)):
            a, b, m, s = affine(generator, d, r)
            u = uniform(generator, -1, 1, 6, r)
            true = fc.Gaussian(m, s).prob(u @ a.T + b)
            inverse = torch.linalg.inv(s)
            covariance = torch.linalg.inv(a.T @ inverse @ a)
            mean = covariance @ a.T @ inverse @ (m - b)
            p = inverse - inverse @ a @ covariance @ a.T @ inverse
            size = (torch.linalg.det(covariance) / torch.linalg.det(s)).sqrt()
            off = (-((m - b) @ p @ (m - b)) / 2).exp()
            factor = (2 * math.pi) ** ((r - d) / 2) * size * off
            errors.append(factor * fc.Gaussian(mean, covariance).prob(u) / true - 1)
            prefactor.append(_as_in_the_proof(u @ a.T + b, m, s, r) / true - 1)
    square = [of_square(generator) for generator in evidence.generators()]
    evidence.below("relative difference, (D, R) = (3,1), (3,2), (2,2)", torch.cat(errors).abs())
    evidence.below("the same for R = D with s̃ = 1/|det A|", [x for x, _ in square])
    evidence.printed_below("with s̃ = 1/det A, det A < 0", smallest(x for _, x in square), 1.0)
    evidence.printed_below("with the prefactor (2π)^(-R/2)", torch.cat(prefactor).abs(), 1.0)
    evidence.correction = (
        "For R = D the factor is s̃ = 1/|det A|, with the absolute value: |S| stands for a "
        "determinant elsewhere, and det A may be negative. The prefactor in (A.11) is (2π)^(-D/2)."
    )


def _as_in_the_proof(points: Tensor, mean: Tensor, covariance: Tensor, rank: int) -> Tensor:
    """(A.11) as printed, (2π)^(-R/2) |S|^(-1/2) exp(...)."""
    apart = points - mean
    squared: Tensor = (apart @ torch.linalg.inv(covariance) * apart).sum(-1)
    size: Tensor = (2 * math.pi) ** (rank / 2) * torch.linalg.det(covariance).sqrt()
    return (-squared / 2).exp() / size


@claim("F-A.17", "N(ar; m̃, S̃) = s̃ N(r; r₀, σ²) along the ray of each angle", Verdict.CONFIRMED)
def along_a_ray(evidence: Evidence) -> None:
    errors, totals = [], []
    angles = circle(24)
    r = torch.linspace(0, 1, 11, dtype=torch.float64)
    for pair in _pairs(evidence):
        a = torch.stack([angles.cos(), angles.sin()], -1)
        true = fc.Gaussian(*pair.on_disc()).prob(a.unsqueeze(1) * r.unsqueeze(1))
        rays = pair.rays(angles)
        sigma, r0 = rays.sigma.unsqueeze(1), rays.r0.unsqueeze(1)
        along = rays.s.unsqueeze(1) * standard_normal((r - r0) / sigma) / sigma
        errors.append((along - true).abs().max())
        rays = pair.rays(circle(200))
        r_, _, dr = rays.along()
        totals.append(pair.level * around(rays, (dr * (1 - r_**2)).sum(-1)) - expected(pair))
    evidence.below("s̃ N(r; r₀, σ²) − the library's Gaussian at ar", torch.stack(errors))
    evidence.below("their total over the disc − the library", torch.stack(totals).abs())


@claim(
    "F-A.18..21",
    "∫_u^v t^k N(t;0,1) dt in closed form, k = 0..3: erf and the density at the ends",
    Verdict.CONFIRMED,
)
def truncated_moments(evidence: Evidence) -> None:
    from scipy.integrate import quad

    by_quad, values, slopes = [], [], []
    for generator in evidence.generators():
        low, high = uniform(generator, -3, 3, 2).sort().values.tolist()
        closed = closed_moments(low, high)
        for k in range(4):
            true, _ = quad(
                lambda x, k=k: x**k * math.exp(-x * x / 2) / math.sqrt(2 * math.pi),
                low,
                high,
                epsabs=1e-13,
            )
            by_quad.append(abs(closed[k] - true))
        formulas, true_pair = on_a_line(generator)
        values.append(abs(formulas[0] - true_pair[0]))
        slopes.append(abs(formulas[1] - true_pair[1]))
    evidence.below("closed forms − quadrature, k = 0..3", by_quad)
    evidence.below("library's E[ψ] on a line − moments 0..2", values)
    evidence.below("its derivative in ψ's centre − moments 0..3", slopes)


@claim("F-A.22", "F(θ) = ∫₀¹ r(1-r²) N(r; r₀, σ²) dr in closed form", Verdict.CONFIRMED)
def closed_forward(evidence: Evidence) -> None:
    from scipy.integrate import quad

    formulas, library = [], []
    for generator in evidence.generators():
        r0, sigma = uniform(generator, -0.5, 1.5, 4), uniform(generator, 0.1, 1.5, 4)
        none = torch.zeros(2, dtype=torch.float64)
        closed = Rays(sigma, r0, torch.ones_like(r0), none.expand(4, 2), none).forward()
        library.append((integrals_methods.radial(r0, sigma, torch) - closed).abs().max())
        for value, at, size in zip(closed.tolist(), r0.tolist(), sigma.tolist(), strict=True):
            true, _ = quad(_radial_integrand(at, size), 0, 1, epsabs=1e-13)
            formulas.append(abs(value - true))
    evidence.below("closed form − quadrature, 20 draws", formulas)
    evidence.below("library's integral over the radius − closed form", torch.stack(library))


def _radial_integrand(r0: float, sigma: float) -> Callable[[float], float]:
    size = sigma * math.sqrt(2 * math.pi)
    return lambda r: r * (1 - r * r) * math.exp(-(((r - r0) / sigma) ** 2) / 2) / size


@claim("F-A.23", "E_TP[ψ_j] = c ∫₀^2π s̃(θ) F(θ) dθ", Verdict.CONFIRMED)
def single_integral(evidence: Evidence) -> None:
    around_rays, plane, values = [], [], []
    for pair in [*_pairs(evidence), _WIDE]:
        rays = pair.rays(circle(400))
        around_rays.append(pair.level * around(rays, rays.forward()))
        t, w = pair.on_support(100)
        plane.append((w * pair.density(t) * pair.psi(t)).sum())
        values.append(expected(pair))
    evidence.below("c ∫ s̃ F dθ − library", _off(around_rays, values))
    evidence.below("c ∫ s̃ F dθ − quadrature over the ellipse", _off(around_rays, plane))
    angles = circle(60)
    lines = {}
    for name, pair in (("about as wide", _pairs(evidence)[0]), ("S_j = 0.001 I", _WIDE)):
        rays = pair.rays(angles)
        each = rays.s * rays.forward()
        lines[name] = (angles.tolist(), (each / each.max()).tolist())
    evidence.draw(Curves("What is left to integrate", "angle θ", "s̃ F / its largest", lines))


# ---- the backward pass


@claim(
    "F-E4.14", "dE_TP[ψ_j]/dθ is the generalised covariance cov_{p,0}(φ, ψ_j)", Verdict.CORRECTED
)
def jacobian(evidence: Evidence) -> None:
    pairs = _pairs(evidence)
    true = [slope for pair in pairs for slope in slopes(pair)]
    by_power = [
        [each for pair in pairs for each in escort_covariances(pair, power)] for power in (0, 2)
    ]
    scaled = [each * pair.level for pair in pairs for each in escort_covariances(pair, 0)]
    moved = []
    for pair, generator in zip(pairs, evidence.generators(), strict=True):
        towards = [uniform(generator, -1, 1, 2), ellipse(generator, -1, 1)]
        along = sum(
            float((a * b).sum()) for a, b in zip(towards, escort_covariances(pair, 0), strict=True)
        )
        moved.append(abs(difference(pair, towards) - along))
    evidence.below("cov_{p,0} − the library's derivative", _off(by_power[0], true))
    evidence.below("cov_{p,0} − central differences in θ", moved, DIFFERENCES)
    evidence.printed_below("cov_{p,2} − the library's derivative", _off(by_power[1], true), 1e-3)
    evidence.printed_below("with a prefactor c before cov_{p,0}", _off(scaled, true), 1e-3)
    evidence.correction = (
        "The index is β = 2 − α = 0, not 2: dE[ψ]/dθ = cov_{p,0}(φ, ψ), |E| times the covariance "
        "under the uniform distribution on E. Its integrals have no factor −λ; only E[ψ] has."
    )


@claim(
    "F-A.24/A.25",
    "cov_{p,0}(φ, ψ_j) = ∫_E φψ_j - (1/|E|) ∫_E φ ∫_E ψ_j for φ = t and tt', and is dE[ψ_j]/dθ",
    Verdict.CONFIRMED,
)
def covariances(evidence: Evidence) -> None:
    right_hand, closed, true, moved = [], [], [], []
    for pair, generator in zip(_pairs(evidence), evidence.generators(), strict=True):
        zeroth, first, second = by_quadrature(pair)
        derivatives = [
            first - pair.mean * zeroth,
            second - (pair.mean.outer(pair.mean) + pair.scale / pair.area) * zeroth,
        ]
        closed += derivatives
        right_hand += escort_covariances(pair, 0)
        true += slopes(pair)
        towards = [uniform(generator, -1, 1, 2), ellipse(generator, -1, 1)]
        along = sum(float((a * b).sum()) for a, b in zip(towards, derivatives, strict=True))
        moved.append(abs(difference(pair, towards) - along))
    evidence.below("right-hand sides − the library's derivative in θ", _off(right_hand, true))
    evidence.below("the same with (1/|E|) ∫_E φ from (A.26)", _off(closed, true))
    evidence.below("the same − central differences in θ", moved, DIFFERENCES)
    evidence.note("The thesis labels both cov_{p,2}; the index is 2 − α = 0, as in F-E4.14.")


_LITERALLY = (
    "The intermediate line has N(r; r₀, σ²) under ds where it must have N(s; 0, 1), a factor σ."
)


def _check_closed(
    evidence: Evidence, closed: Callable[[Rays], Tensor], along: str, moment: int
) -> None:
    """Closed form along a ray, then its total, against quadrature and the library.

    along: what the integrand has beside r N, in the letters of einsum; moment: of t, its number.
    """
    each, library, plane = [], [], []
    for pair in _pairs(evidence):
        rays = pair.rays(circle(200))
        _, points, dr = rays.along()
        by_nodes = torch.einsum(along, dr, *[points] * moment)
        each.append((closed(rays) - by_nodes).abs().max())
        total = around(rays, closed(rays))
        library.append((total - raw_moments(pair)[moment]).abs().max())
        plane.append((total - by_quadrature(pair)[moment]).abs().max())
    evidence.below("∫ s̃ × closed form dθ − library", torch.stack(library))
    evidence.below("closed form − quadrature along each ray", torch.stack(each))
    evidence.below("∫ s̃ × closed form dθ − quadrature over the ellipse", torch.stack(plane))


def _literally(
    evidence: Evidence, closed: Callable[[Rays], Tensor], along: str, moment: int
) -> None:
    """The intermediate line, ds from -r₀/σ to (1-r₀)/σ with r = sσ + r₀, by quadrature: with
    N(s; 0, 1) it is the closed form; with N(r; r₀, σ²), as printed, its total is not the moment."""
    mended, printed = [], []
    for pair in _pairs(evidence):
        rays = pair.rays(circle(200))
        s, points, ds = rays.in_deviations()
        r = s * rays.sigma.unsqueeze(1) + rays.r0.unsqueeze(1)
        by_s, by_r = (
            torch.einsum(along, ds * r * density, *[points] * moment)
            for density in (standard_normal(s), rays.normal(r))
        )
        mended.append((by_s - closed(rays)).abs())
        true = raw_moments(pair)[moment]
        printed.append((around(rays, by_r) - true).norm() / true.norm())
    evidence.below("intermediate line with N(s; 0, 1) − closed form", mended)
    evidence.above("∫ s̃ × that line as printed dθ / library − 1", largest(printed), 1e-2)
    evidence.note(_LITERALLY)


@claim("F-A.30/A.31", "∫_E t ψ_j dt = ∫ s̃ G dθ with G in closed form", Verdict.CONFIRMED)
def closed_first(evidence: Evidence) -> None:
    _check_closed(evidence, Rays.first, "nk,nki->ni", 1)
    _literally(evidence, Rays.first, "nk,nki->ni", 1)


@claim("F-A.33/A.34", "∫_E ψ_j dt = ∫ s̃ H dθ with H in closed form", Verdict.CONFIRMED)
def closed_zeroth(evidence: Evidence) -> None:
    _check_closed(evidence, Rays.zeroth, "nk->n", 0)
    _literally(evidence, Rays.zeroth, "nk->n", 0)


@claim(
    "F-A.35..A.41",
    "∫_E tt' ψ_j dt = ∫ s̃ M dθ with M in closed form from A, B, C and Ã, B̃, C̃, D̃",
    Verdict.CONFIRMED,
)
def closed_second(evidence: Evidence) -> None:
    _check_closed(evidence, Rays.second, "nk,nki,nkj->nij", 2)


# ---- sums over angles


def _as_printed(pair: Pair) -> Tensor:
    """Algorithm 4 to the letter: β from 0 by 1/I up to 2π, each with the weight 2π/I."""
    betas = torch.arange(math.floor(2 * math.pi * _ANGLES) + 1, dtype=torch.float64) / _ANGLES
    rays = pair.rays(betas)
    return (2 * math.pi / _ANGLES * pair.level * rays.s * rays.forward()).sum()


@claim("F-A4", "Algorithm 4 returns E_TP[ψ_j] with steps of 1/I from 0 to 2π", Verdict.REFUTED)
def algorithm_four(evidence: Evidence) -> None:
    pairs = _pairs(evidence)
    true = [expected(pair) for pair in pairs]
    ratios = [float(_as_printed(pair) / value) for pair, value in zip(pairs, true, strict=True)]
    mended = [integrals_methods.loop(problem(pair), _ANGLES)[0, 0] for pair in pairs]
    evidence.printed_near("the loop as printed / E[ψ], I = 100", ratios[0], 1.0, 0.01)
    for ratio in (smallest(ratios), largest(ratios)):
        evidence.near("that ratio is 2π, within what the ends add", ratio, 2 * math.pi, 0.06)
    evidence.below("with steps of 2π/I, from r = 0, − library", _off(mended, true))
    pair = pairs[0]
    evidence.counterexample = (
        f"m = {_shown(pair.mean)}, S = {_shown(pair.scale)}, m_j = {_shown(pair.centre)}, "
        f"S_j = {_shown(pair.covariance)}: the loop returns {float(_as_printed(pair)):.6f}, "
        f"E[ψ] = {float(true[0]):.6f}"
    )
    evidence.correction = "The step is 2π/I, I angles without 2π itself; r starts at 0."


def _shown(x: Tensor) -> str:
    return str(x.numpy().round(4).tolist())


def _with_both_ends(pair: Pair, count: int) -> float:
    rays = pair.rays(torch.linspace(0, 2 * math.pi, count, dtype=torch.float64))
    return pair.level * float(around(rays, rays.forward()))


def _without_end(pair: Pair, count: int) -> float:
    rays = pair.rays(circle(count))
    return pair.level * float(around(rays, rays.forward()))


@claim("F-NAIVE", "100 equal angles give E_TP[ψ_j] if 2π is left out", Verdict.CORRECTED)
def naive_sum(evidence: Evidence) -> None:
    smooth, ends, excess = [], [], []
    for pair in _pairs(evidence):
        true = float(expected(pair))
        smooth.append(abs(_without_end(pair, _ANGLES) / true - 1))
        ends.append(_with_both_ends(pair, _ANGLES) / true - 1)
        rays = pair.rays(circle(1))  # counted twice of 100, where the whole is 99 of them
        at_zero = pair.level * float(around(rays, rays.forward()))
        excess.append(abs(_with_both_ends(pair, _ANGLES) - true * 0.99 - at_zero * 0.01))
    wide = float(expected(_WIDE))
    evidence.near(
        "both ends counted, S_j = 0.001 I at angle 0: excess",
        _with_both_ends(_WIDE, _ANGLES) / wide - 1,
        0.36,
        0.005,
    )
    evidence.below("2π left out, ψ as wide as the density: relative error", smooth)
    evidence.below("2π left out, S_j = 0.001 I", abs(_without_end(_WIDE, _ANGLES) / wide - 1), 1e-9)
    evidence.printed_below("both ends counted, the smooth ones", map(abs, ends), 1e-4)
    bench = integrals_methods.both_ends(problem(_WIDE), _ANGLES)
    evidence.below("library's sum with both ends", abs(float(bench) - _with_both_ends(_WIDE, 100)))
    evidence.below("the excess is (value at angle 0 − mean) / 100", excess)
    evidence.correction = (
        "0 and 2π are the same point and must be counted once: 100 angles θ = 2πi/100. "
        "linspace(0, 2π, 100) counts it twice, an error of 36 % where a narrow function lies there."
    )
    _draw_angles(evidence, wide)


def _draw_angles(evidence: Evidence, true: float) -> None:
    counts = [10, 20, 30, 40, 50, 60, 70, 80, 100, 120, 140, 200, 400]
    lines = {}
    for name, rule in (("2π left out", _without_end), ("both ends", _with_both_ends)):
        errors = [max(abs(rule(_WIDE, count) / true - 1), 1e-16) for count in counts]
        lines[name] = ([float(count) for count in counts], errors)
    title = "Equal angles, S_j = 0.001 I at angle 0"
    evidence.draw(Curves(title, "angles", "relative error", lines, "xy"))


# ---- time


@claim(
    "F-Tab4.1",
    "time of 2-D quadrature ≫ 1-D quadrature > a plain sum over angles",
    Verdict.CONFIRMED,
)
def times(evidence: Evidence) -> None:
    pair = Pair.draw(next(iter(evidence.generators())))
    box, polar, angular = measured(pair)
    evidence.above("calls of the integrand, 2-D on a box / 1-D", box.calls / angular.calls, 20.0)
    evidence.above("the same, 2-D in polar coordinates / 1-D", polar.calls / angular.calls, 5.0)
    evidence.above("seconds, 2-D on a box / 1-D", box.seconds / angular.seconds, 5.0)
    ratio = quadrature_over_sum(evidence.seed, evidence.trials(5, 9))
    evidence.above("seconds of 100 integrals, 1-D / sums of 100 angles", ratio, 3.0)
    true = float(expected(pair))
    off = [abs(each.value - true) for each in (box, polar, angular)]
    evidence.below("the three − library, asked for 1e-5", off, 1e-4)
    by_sum = float(integrals_methods.trapezoid(problem(pair), _ANGLES))
    evidence.below("sum of 100 angles − library", abs(by_sum - true))
    for side, share in ((1.0, 1.0), (2.0, math.pi)):
        what = f"area of the unit disc in a {side:g} × {side:g} box"
        evidence.near(what, area(side), share, 1e-6)
    evidence.note(
        "The thesis' “1 × 1 box” for the unit disc would hold 1.0 of its area π; it must be 2 × 2."
    )
