"""Chapter 3 of the thesis, second half: value functions, their expectations, and the Jacobian."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Generator, Tensor

import fenchel as fl
from fenchel import continuous as fc
from papers.claims.evidence import DIFFERENCES, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.thesis._numbers import (
    EXACT,
    definite,
    differences,
    ellipsoid,
    half_width,
    lattice,
    least,
    moved,
    normal,
    normal_density,
    segment,
    simplex_map,
    spread,
    uniform,
    worst,
)
from papers.claims.verdicts import Verdict

Basis = Callable[[Tensor], Tensor]
FINE = 1e-13  # what is asked of expectations that are compared to 1e-10


# ---- expectations


@claim(
    "F-E3.16",
    "attention is r = E_p[ψ]; the context B r is E_p[V_B] for V_B = B ψ",
    Verdict.CONFIRMED,
)
def expected_values(evidence: Evidence) -> None:
    context, expected = worst(evidence, _contexts)
    evidence.below("context against ∫ p V_B by quadrature, Gaussian and paraboloid", context)
    evidence.below("r against ∫ p ψ_j by quadrature", expected)


def _contexts(generator: Generator) -> tuple[Tensor, Tensor]:
    mean, scale = normal(generator, 2), definite(generator, 2)
    centers, covariances = normal(generator, 5, 2), definite(generator, 2, 5)
    basis = fc.GaussianBasis(centers, covariances)
    positions, features = normal(generator, 9, 2), normal(generator, 9, 3)
    values = fc.fit_values(features, positions, basis, 0.1)
    coefficients = _ridge(features, _psi(positions, centers, covariances), 0.1)
    contexts, expected = [], []
    for density, (t, weights) in (
        (fc.Gaussian(mean, scale), moved(lattice(2, 121), mean, scale)),
        (fc.Paraboloid(mean, scale), ellipsoid(mean, scale, 40)),
    ):
        psi, p = _psi(t, centers, covariances), density.prob(t)
        contexts.append(values.expect(density, FINE) - (weights * p) @ (psi @ coefficients))
        expected.append(density.expect(basis, FINE) - (weights * p) @ psi)
    return torch.stack(contexts), torch.stack(expected)


def _psi(t: Tensor, centers: Tensor, covariances: Tensor) -> Tensor:
    """(..., N)"""
    return normal_density(t.unsqueeze(-2), centers, covariances)


def _ridge(features: Tensor, psi: Tensor, penalty: float) -> Tensor:
    """B' by least squares on rows of the penalty, not by normal equations. (N, channels)"""
    count = psi.shape[-1]
    rows = torch.cat([psi, math.sqrt(penalty) * torch.eye(count, dtype=EXACT)])
    zeros = torch.zeros(count, features.shape[-1], dtype=EXACT)
    coefficients: Tensor = torch.linalg.lstsq(rows, torch.cat([features, zeros])).solution
    return coefficients


@claim(
    "F-E3.17/3.18",
    "B = H F'(F F' + ρ I)⁻¹ minimises |B F - H|² + ρ |B|² (Frobenius)",
    Verdict.CONFIRMED,
)
def ridge_regression(evidence: Evidence) -> None:
    stationary, squares, norm = worst(evidence, _regressions)
    evidence.below("(B F - H) F' + ρ B, relative to H F'", stationary)
    evidence.below("B against least squares with rows √ρ I, relative", squares)
    evidence.below("√tr(B'B) against √Σ B_ij², relative", norm)
    evidence.above(
        "objective of perturbed B less that of B, less ρ |perturbation|², at least",
        least(evidence, _perturbed),
        -1e-10,
    )
    printed = {(l1 / 14, l2 / 14) for l1, l2 in product(range(15), repeat=2)}
    centers = fc.cell_centers(14, 14, dtype=EXACT)
    beyond = len(printed) - len(centers)
    evidence.near("points l/√L, l = 0 .. √L, beyond the cells for L = 196", beyond, 29, 0)
    half = torch.tensor(
        [[(l1 - 0.5) / 14, (l2 - 0.5) / 14] for l1, l2 in product(range(1, 15), repeat=2)],
        dtype=EXACT,
    )
    evidence.near("centres of cells for L = 196", len(centers), 196, 0)
    evidence.below("centres against (l - ½)/√L, l = 1 .. √L", (centers - half).abs())


def _fitted(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """H (3, 16), F (9, 16) and the library's B (3, 9)."""
    positions, features = fc.cell_centers(4, 4, dtype=EXACT), normal(generator, 16, 3)
    centers, width = fc.cell_centers(3, 3, dtype=EXACT), 0.05 * torch.eye(2, dtype=EXACT)
    values = fc.fit_values(features, positions, fc.GaussianBasis(centers, width), ridge=0.1)
    psi = _psi(positions, centers, width)
    return features.mT, psi.mT, values.coefficients.mT


def _regressions(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    target, at, coefficients = _fitted(generator)
    slope = (coefficients @ at - target) @ at.mT + 0.1 * coefficients
    squares = _ridge(target.mT, at.mT, 0.1).mT
    norm = (coefficients.mT @ coefficients).trace().sqrt() / coefficients.square().sum().sqrt()
    size = (target @ at.mT).abs().max()
    return slope / size, (coefficients - squares) / squares.abs().max(), norm - 1


def _perturbed(generator: Generator) -> Tensor:
    target, at, coefficients = _fitted(generator)
    moves = 0.1 * normal(generator, 50, 3, 9)

    def objective(b: Tensor) -> Tensor:
        return (b @ at - target).square().sum((-1, -2)) + 0.1 * b.square().sum((-1, -2))

    return (
        objective(coefficients + moves)
        - objective(coefficients)
        - 0.1 * moves.square().sum((-1, -2))
    )


# ---- the Jacobian


def generalised_covariance(
    p: Tensor, phi: Tensor, psi: Tensor, b: float, weights: Tensor | None = None
) -> Tensor:
    """(3.19) over the support. p (P,), phi (P, M), psi (P, N), weights of quadrature -> (M, N)"""
    on = p > 0
    measure = p[on] ** b if weights is None else weights[on] * p[on] ** b
    total = measure.sum()
    escort, phi, psi = (measure / total).unsqueeze(-1), phi[on], psi[on]
    means = torch.outer((escort * phi).sum(0), (escort * psi).sum(0))
    return total * ((escort * phi).mT @ psi - means)


@claim(
    "F-E3.19",
    "cov_{p,b}(φ, ψ) = ∫p^b (E~[φψ'] - E~φ E~ψ'): the ordinary one for b = 1, b = 0 of the support",
    Verdict.CONFIRMED,
)
def covariance_of_escort(evidence: Evidence) -> None:
    formula, ordinary, even = worst(evidence, _covariances)
    evidence.below("φ' hessian ψ of a solution against the formula, b = 1, .5, 0, -1", formula)
    evidence.below("b = 1 (α = 1) against E[φψ'] - E φ E ψ' under p", ordinary)
    evidence.below("b = 0 (α = 2) against |supp p| times the covariance on the support", even)


def _covariances(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    scores, errors = 1.5 * normal(generator, 7), []
    phi, psi = normal(generator, 7, 2), normal(generator, 7, 3)

    def by_hessian(alpha: float) -> Tensor:
        return phi.mT @ fl.solve(scores, fl.Tsallis(alpha)).hessian() @ psi

    for alpha in (1.0, 1.5, 2.0, 3.0):
        p, _ = simplex_map(scores, alpha)
        errors.append(by_hessian(alpha) - generalised_covariance(p, phi, psi, 2 - alpha))
    p = torch.softmax(scores, -1)
    ordinary = (p[:, None] * phi).mT @ psi - torch.outer(p @ phi, p @ psi)
    on = simplex_map(scores, 2.0)[0] > 0
    joint = torch.cat([phi[on], psi[on]], -1).mT
    # torch.cov divides by the count with correction 0, and is a number for a single key
    even = on.sum() * torch.cov(joint, correction=0).reshape(5, 5)[:2, 2:]
    return torch.stack(errors), by_hessian(1.0) - ordinary, by_hessian(2.0) - even


@claim("F-E3.20", "(∂r/∂θ)' = cov_{p,2-α}(φ, ψ) for f = θ'φ", Verdict.CONFIRMED)
def jacobian(evidence: Evidence) -> None:
    discrete, derived = worst(evidence, _on_keys)
    line, automatic = worst(evidence, _on_the_line)
    evidence.below("keys: ∂r/∂θ by differences, α = 1, 1.5, 2, 3", discrete, DIFFERENCES)
    evidence.below("line: ∂r/∂θ by differences, α = 4/3, 1.5, 2, 3", line, DIFFERENCES)
    evidence.below("keys: ∂r/∂θ by autograd, N x M, against the transpose", derived)
    evidence.below("line: the same", automatic)
    evidence.note("cov(φ, ψ) is M x N, the Jacobian ∂r/∂θ is N x M: one is the other's transpose")


def _on_keys(generator: Generator) -> tuple[Tensor, Tensor]:
    by_differences, by_autograd = [], []
    for alpha in (1.0, 1.5, 2.0, 3.0):
        scores = spread(generator, alpha)
        n = scores.numel()
        # f = θ'φ is `scores` at θ = (1, 0)
        phi = torch.cat([scores.unsqueeze(-1), normal(generator, n, 1)], -1)
        psi, theta = normal(generator, n, 3), torch.tensor([1.0, 0.0], dtype=EXACT)

        def r(at: Tensor, phi: Tensor = phi, psi: Tensor = psi, alpha: float = alpha) -> Tensor:
            return fl.solve(at @ phi.mT, fl.Tsallis(alpha)).weights @ psi

        expected = generalised_covariance(simplex_map(scores, alpha)[0], phi, psi, 2 - alpha)
        derived = torch.autograd.functional.jacobian(r, theta)
        by_differences.append(differences(r, theta) - expected)
        by_autograd.append(derived - expected.mT)
    return torch.stack(by_differences), torch.stack(by_autograd)


def _on_the_line(generator: Generator) -> tuple[Tensor, Tensor]:
    by_differences, by_autograd = [], []
    centers, widths = normal(generator, 3, 1), 0.3 + uniform(generator, 3, 1, 1)
    basis = fc.GaussianBasis(centers, widths)
    mean, variance = float(normal(generator, 1)), float(0.3 + uniform(generator, 1))
    theta = torch.tensor([mean / variance, -0.5 / variance], dtype=EXACT)
    for alpha in (4 / 3, 1.5, 2.0, 3.0):

        def r(at: Tensor, alpha: float = alpha) -> Tensor:
            parts = at[..., :1], at[..., 1:].unsqueeze(-1)
            return fc.TsallisGaussian.from_canonical(*parts, alpha).expect(basis, FINE)

        expected = _line_covariance(mean, variance, alpha, _psi_of(centers, widths))
        derived = torch.autograd.functional.jacobian(r, theta)
        by_differences.append(differences(r, theta) - expected)
        by_autograd.append(derived - expected.mT)
    return torch.stack(by_differences), torch.stack(by_autograd)


def _psi_of(centers: Tensor, widths: Tensor) -> Basis:
    return lambda t: _psi(t.unsqueeze(-1), centers, widths)


def _line_covariance(mean: float, variance: float, alpha: float, psi: Basis) -> Tensor:
    """By quadrature of the density's own formula, with φ = (t, t²). (2, N)"""
    reach = half_width(alpha, variance)
    t, weights, cosine = segment(mean, reach)
    p = ((alpha - 1) * (reach * cosine) ** 2 / (2 * variance)) ** (1 / (alpha - 1))
    return generalised_covariance(p, torch.stack([t, t**2], -1), psi(t), 2 - alpha, weights)


@claim(
    "F-REF1D",
    "on a line: E of N(t; μ_j, σ_j²) under the truncated parabola, and its derivatives",
    Verdict.CONFIRMED,
)
def sparsemax_on_a_line(evidence: Evidence) -> None:
    value, slopes, exact = worst(evidence, _parabola)
    evidence.below("E_p[ψ_j] against adaptive quadrature", value)
    evidence.below("∂/∂(μ, σ²) by autograd against differences", slopes, DIFFERENCES)
    evidence.below("∂/∂θ by autograd against cov_{p,0} by quadrature", exact)
    places = torch.linspace(-2, 2, 41, dtype=EXACT)
    basis = fc.GaussianBasis(torch.zeros(1, 1, dtype=EXACT), torch.full((1, 1), 0.05, dtype=EXACT))
    lines = {}
    for name, family in (("parabola", fc.Paraboloid), ("Gaussian", fc.Gaussian)):
        one = torch.full((41, 1, 1), 0.2, dtype=EXACT)
        density = family.from_covariance(places.unsqueeze(-1), one)
        lines[name] = (places.tolist(), density.expect(basis).squeeze(-1).tolist())
    evidence.draw(Curves("E_p[N(t; 0, 0.05)], p of variance 0.2 around μ", "μ", "r", lines))


def _parabola(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    from scipy.integrate import quad

    centers, widths = normal(generator, 3, 1), 0.1 + uniform(generator, 3, 1, 1)
    basis = fc.GaussianBasis(centers, widths)
    mean, variance = float(normal(generator, 1)), float(0.3 + uniform(generator, 1))
    reach = half_width(2.0, variance)

    def integrand(t: float, j: int) -> float:
        center, width = float(centers[j]), float(widths[j])
        gaussian = math.exp(-((t - center) ** 2) / (2 * width)) / math.sqrt(2 * math.pi * width)
        return (reach**2 - (t - mean) ** 2) / (2 * variance) * gaussian

    ends = (mean - reach, mean + reach)
    integrals = [quad(integrand, *ends, args=(j,), epsabs=1e-13, limit=200)[0] for j in range(3)]

    def r(at: Tensor) -> Tensor:
        return fc.Paraboloid(at[..., :1], at[..., 1:].unsqueeze(-1)).expect(basis, FINE)

    def of_theta(at: Tensor) -> Tensor:
        parts = at[..., :1], at[..., 1:].unsqueeze(-1)
        return fc.Paraboloid.from_canonical(*parts).expect(basis, FINE)

    where = torch.tensor([mean, variance], dtype=EXACT)
    theta = torch.tensor([mean / variance, -0.5 / variance], dtype=EXACT)
    expected = _line_covariance(mean, variance, 2.0, _psi_of(centers, widths))
    derived = torch.autograd.functional.jacobian(r, where)
    canonical = torch.autograd.functional.jacobian(of_theta, theta)
    value = r(where) - torch.tensor(integrals, dtype=EXACT)
    return value, derived - differences(r, where).mT, canonical - expected.mT
