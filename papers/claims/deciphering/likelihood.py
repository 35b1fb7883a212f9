"""The appendices: the moment generating function, and two other readings of the problem."""

from __future__ import annotations

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
    halvings,
    normal,
    numbers,
    order,
    weights_of,
)
from papers.claims.evidence import DIFFERENCES, SLACK, Evidence, largest
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict

# ---- the moment generating function


def _generating(problem: Drawn, multiplier: Tensor) -> Tensor:
    """M(λ) = E_u e^{<a, λ>}, by the library."""
    scores = multiplier @ problem.templates.mT
    return fl.solve(scores, fl.Shannon(), base=problem.preference).potential.exp()


def _derivatives(problem: Drawn) -> tuple[Tensor, Tensor]:
    """M'(0) and M''(0), by central differences."""
    eye = torch.eye(len(problem.evidence), dtype=F64)
    first = _generating(problem, 1e-6 * eye) - _generating(problem, -1e-6 * eye)
    corners = [
        a * b * _generating(problem, 1e-4 * (a * eye[:, None] + b * eye[None]))
        for a in (1, -1)
        for b in (1, -1)
    ]
    return first / 2e-6, torch.stack(corners).sum(0) / 4e-8


@claim(
    "D-E23..26",
    "M(λ) = ∫<a, λ>u = 1 + <M'(0), λ> + λ'M''(0)λ/2 + o, and log(1 + x) = t - t²/2 + o",
    Verdict.CORRECTED,
)
def generating_function(evidence: Evidence) -> None:
    sizes, rest = halvings(1, 8), torch.zeros(8, dtype=F64)
    printed, true, first, second, covariance = [], [], [], [], []
    for generator in evidence.generators():
        problem = draw(generator)
        multiplier = 0.1 * normal(generator, 3)
        printed.append(problem.mean @ multiplier)
        true.append(_generating(problem, multiplier))
        slope, bent = _derivatives(problem)
        raw = problem.templates.mT @ (problem.preference[:, None] * problem.templates)
        first.append(slope - problem.mean)
        second.append(bent - raw)
        covariance.append(bent - slope[:, None] * slope - problem.covariance)
        along = sizes[:, None] * torch.nn.functional.normalize(normal(generator, 3), dim=0)
        series = 1 + along @ problem.mean + 0.5 * (along @ raw * along).sum(-1)
        rest = rest + (_generating(problem, along) - series).abs()
    apart = (torch.stack(printed) - torch.stack(true)).abs()
    evidence.printed_below("|∫<a, λ>u - M(λ)|, |λ| ~ 0.1", apart, DIFFERENCES)
    evidence.correction = (
        "(23) lost the exponential: M(λ) = ∫e^{<a, λ>}u; in (26) x and t are one variable"
    )
    evidence.near("order of M's remainder in |λ|", order(sizes, rest), 3, 0.1)
    evidence.below("|M'(0) - μ|", torch.stack(first).abs(), DIFFERENCES)
    evidence.below("|M''(0) - E aa'|", torch.stack(second).abs(), DIFFERENCES)
    evidence.below("|M''(0) - M'(0)M'(0)' - Σ|", torch.stack(covariance).abs(), DIFFERENCES)
    left = (sizes.log1p() - sizes + sizes.square() / 2).abs()
    evidence.near("order of log(1 + x) - x + x²/2", order(sizes, left), 3, 0.05)
    evidence.note(f"∫<a, λ>u = {float(printed[0]):.3f} where M(λ) = {float(true[0]):.3f}")


# ---- likelihood and Bayes


def _noisy(generator: torch.Generator) -> tuple[Drawn, float, float]:
    """A problem whose target is at least 1 from the hull; σ and η near 1."""
    problem = draw(generator)
    away = torch.nn.functional.normalize(problem.evidence, dim=0) * (problem.diameter + 1)
    sigma, eta = (0.8 + 0.5 * torch.rand(2, generator=generator, dtype=F64)).tolist()
    return Drawn(problem.templates, problem.preference, away), sigma, eta


def _log_likelihood(problem: Drawn, p: Tensor, sigma: float) -> Tensor:
    """Of the target, if p is true: torch's N(Σ p_i t_i, σ² I). NaN is for the checks to find."""
    density = torch.distributions.Normal(p @ problem.templates, sigma, validate_args=False)
    total: Tensor = density.log_prob(problem.target).sum(-1)
    return total


def _library(problem: Drawn, sigma: float, eta: float) -> Tensor:
    """p~ at the reliability that the library makes of σ and η."""
    return weights_of(dual.estimate(*problem.operands, dual.reliability_of(sigma, eta)))


def _penalised(problem: Drawn, p: Tensor, sigma: float, eta: float) -> Tensor:
    """(27)"""
    apart = (problem.target - p @ problem.templates).square().sum(-1)
    return apart / (2 * sigma**2) + eta * divergence(p, problem.preference)


def _log_posterior(problem: Drawn, p: Tensor, sigma: float, eta: float) -> Tensor:
    """Up to a constant."""
    return _log_likelihood(problem, p, sigma) - eta * divergence(p, problem.preference)


@claim(
    "D-E27/28",
    "maximum likelihood with the penalty η KL(p, u) is (3) at 1/α = η σ²",
    Verdict.CONFIRMED,
)
def penalised_likelihood(evidence: Evidence) -> None:
    apart, ratio, less, constant, quotient = [], [], [], [], []
    for generator in evidence.generators():
        problem, sigma, eta = _noisy(generator)
        others = distributions(generator, problem.preference, evidence.trials(50, 1000))
        best = _library(problem, sigma, eta)
        minimiser = descend(problem, numbers([0.5 / sigma**2]), others[:1], strength=eta)[0, 0]
        apart.append((minimiser - best).abs().max())
        at_others, at_best = (_penalised(problem, p, sigma, eta) for p in (others, best))
        ratio.append((at_others / eta - problem.primal(others, 1 / (eta * sigma**2))).abs())
        least = 0.5 * eta * (others - best).abs().sum(-1).square()  # Pinsker
        less.append((at_others - at_best - least).min())
        squares = (problem.target - others @ problem.templates).square().sum(-1) / (2 * sigma**2)
        likelihood = _log_likelihood(problem, others, sigma)
        constant.append((likelihood + squares).std())
        quotient.append((likelihood / -squares).std())
    evidence.below("|argmin of (27) - p~ at 1/(η σ²)|, by mirror descent", apart, 1e-9)
    evidence.below("|(27) / η - (3)|, random p", torch.stack(ratio))
    evidence.above("(27) at random p over that at p~, beyond η|p - p~|₁²/2", less, -SLACK)
    evidence.below("spread of ℓ + |b - h|²/(2σ²): equal up to a constant", constant)
    evidence.above("spread of their quotient: not proportional", largest(quotient), 1e-3)


@claim(
    "D-E29/30",
    "Bayes with the prior e^{-η KL(p, u)}: most probable p minimises |b - h|/(2ησ²) + KL",
    Verdict.CORRECTED,
)
def most_probable(evidence: Evidence) -> None:
    unsquared, squared, posterior, stays = [], [], [], []
    for generator in evidence.generators():
        problem, sigma, eta = _noisy(generator)
        others = distributions(generator, problem.preference, evidence.trials(50, 1000))
        best = _library(problem, sigma, eta)
        weight = numbers([0.5 / (eta * sigma**2)])
        unsquared.append((descend(problem, weight, others[:1], power=1)[0, 0] - best).abs().max())
        squared.append((descend(problem, weight, others[:1])[0, 0] - best).abs().max())
        at_others, at_best = (_log_posterior(problem, p, sigma, eta) for p in (others, best))
        posterior.append((at_best - at_others).min())
        leaf = best.clone().requires_grad_()
        (slope,) = torch.autograd.grad(_log_posterior(problem, leaf, sigma, eta), leaf)
        stays.append((best * (slope - best @ slope)).abs().max())
    evidence.printed_below("|argmin of the last display - p~|", unsquared, DIFFERENCES)
    evidence.correction = "the last display lost the square of the norm: |b - h|²/(2ησ²) + KL(p, u)"
    evidence.below("with the square: |argmin - p~|, by mirror descent", squared, 1e-9)
    evidence.below("slope of the log-posterior along the simplex at p~", stays, 1e-9)
    evidence.above("log-posterior of p~ less that of random p", posterior, 0.0)
