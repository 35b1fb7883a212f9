"""The same estimate for a preference with a density: a Gaussian, in closed form, or a mixture.

All that is asked of a preference is K(lam) = log E_u e^<t, lam>, which for Gaussians is
<mean, lam> + lam' covariance lam / 2 (CLAIMS D-E5, D-E12).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_whole, has
from fenchel.continuous import matrices
from fenchel.continuous.densities import Gaussian
from fenchel.continuous.mixture import Mixture, log_mixing
from fenchel.dual.estimate import TOLERANCE, Estimate
from fenchel.dual.problem import checked_reliability
from fenchel.solution import Status

_LINES, _FALL = 50, 1e-4


def gaussian(
    mean: Tensor, covariance: Tensor, evidence: Tensor, reliability: float | Tensor
) -> Estimate:
    """lam = (I / reliability + covariance)^-1 evidence, exactly; the mean moves by covariance lam.

    mean (..., d), covariance (..., d, d), evidence (..., d). There are no templates, so no weights:
    the solution is the Gaussian moved to `mean`.

    >>> e = gaussian(torch.zeros(1), torch.eye(1), torch.ones(1), 1.0)
    >>> e.mean, e.multiplier
    (tensor([0.5000]), tensor([0.5000]))
    """
    return gaussian_mixture(_one_mode(Gaussian(mean, covariance)), evidence, reliability)


def _one_mode(density: Gaussian) -> Mixture:
    ones = torch.ones_like(density.mean[..., :1])
    mean, covariance = density.mean.unsqueeze(-2), density.covariance_matrix.unsqueeze(-3)
    return Mixture(ones, Gaussian(mean, covariance))


def gaussian_mixture(
    preference: Mixture,
    evidence: Tensor,
    reliability: float | Tensor,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = 100,
) -> Estimate:
    """For a `fenchel.continuous.Mixture` of Gaussians; evidence (..., d).

    The dual is strongly concave and smooth, so that Newton's method with Armijo's rule reaches its
    maximum from anywhere; one Gaussian takes one step. Derivatives, to the third, are those of two
    more steps in plain operations.
    """
    check_whole(max_steps, "max_steps", 1)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    if not isinstance(preference, Mixture) or not isinstance(preference.components, Gaussian):
        raise TypeError("preference must be a mixture of Gaussians (fenchel.continuous.Mixture)")
    problem = _Problem.make(preference, evidence, reliability)
    fixed = _Problem(*(x.detach() for x in vars(problem).values()))
    multiplier, steps = _maximise(fixed, tolerance, max_steps)
    for _ in range(2):
        multiplier = multiplier + problem.newton(multiplier)
    dtype = torch.promote_types(preference.mixing.dtype, evidence.dtype)
    return problem.estimate(multiplier, steps, dtype)


@dataclass(frozen=True, eq=False)
class _Problem:
    """One batch shape for all, in float64, about the preference's mean."""

    log_mixing: Tensor  # (..., K)
    means: Tensor  # (..., K, d)
    covariances: Tensor  # (..., K, d, d)
    evidence: Tensor  # (..., d)
    reliability: Tensor  # (..., 1)
    centre: Tensor  # (..., d)

    @classmethod
    def make(cls, preference: Mixture, evidence: Tensor, reliability: float | Tensor) -> _Problem:
        inner = certificate_dtype(evidence.device)
        strength = checked_reliability(reliability, "reliability", evidence).to(inner)
        mixing, parts = preference.mixing.to(inner), preference.components
        d = parts.mean.shape[-1]
        if evidence.dim() < 1 or evidence.shape[-1] != d:
            raise ValueError(f"evidence must be (..., {d}), got {tuple(evidence.shape)}")
        if has(~evidence.detach().isfinite()):
            raise ValueError("evidence must be finite; it holds NaN or infinity")
        batch = torch.broadcast_shapes(mixing.shape[:-1], evidence.shape[:-1], strength.shape)
        means = parts.mean.to(inner)
        centre = (mixing.unsqueeze(-1) * means).sum(-2)
        return cls(
            log_mixing(mixing).expand(*batch, -1),
            (means - centre.unsqueeze(-2)).expand(*batch, -1, -1),
            parts.covariance_matrix.to(inner).expand(*batch, -1, -1, -1),
            evidence.to(inner).expand(*batch, -1),
            strength.expand(batch).unsqueeze(-1),
            centre.expand(*batch, -1),
        )

    def tilt(self, multiplier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K(lam), the modes' weights and means after the tilt. (...), (..., K), (..., K, d)"""
        spread = matrices.multiply(self.covariances, multiplier.unsqueeze(-2))
        scores = ((self.means + 0.5 * spread) * multiplier.unsqueeze(-2)).sum(-1) + self.log_mixing
        return torch.logsumexp(scores, -1), torch.softmax(scores, -1), self.means + spread

    def value(self, multiplier: Tensor) -> Tensor:
        potential = self.tilt(multiplier)[0]
        price = 0.5 * (multiplier.square() / self.reliability).sum(-1)
        return (multiplier * self.evidence).sum(-1) - price - potential

    def newton(self, multiplier: Tensor) -> Tensor:
        """The step of Newton's method."""
        slope, curvature = self.slopes(multiplier)
        found: Tensor = torch.linalg.solve(curvature, slope.unsqueeze(-1))
        return found.squeeze(-1)

    def slopes(self, multiplier: Tensor) -> tuple[Tensor, Tensor]:
        """The dual's gradient, and its negative Hessian I / reliability + the tilted covariance."""
        _, weights, means = self.tilt(multiplier)
        mean = (weights.unsqueeze(-1) * means).sum(-2)
        apart = means - mean.unsqueeze(-2)
        between = (weights.unsqueeze(-1) * apart).mT @ apart
        within = (weights[..., None, None] * self.covariances).sum(-3)
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        curvature = eye / self.reliability.unsqueeze(-1) + between + within
        return self.evidence - mean - multiplier / self.reliability, curvature

    def estimate(self, multiplier: Tensor, steps: Tensor, dtype: torch.dtype) -> Estimate:
        potential, weights, means = self.tilt(multiplier)
        about = (weights.unsqueeze(-1) * means).sum(-2)
        apart = self.evidence - about
        pull = 0.5 * (self.reliability * apart.square()).sum(-1)
        divergence = (about * multiplier).sum(-1) - potential
        off = apart - multiplier / self.reliability
        gap = 0.5 * (self.reliability * off.square()).sum(-1).detach()
        scale = 1 + (pull + divergence).detach().abs() + potential.detach().abs()
        status = torch.full_like(steps, int(Status.OK))
        status[~(gap <= 1e-12 * scale)] = int(Status.MAX_STEPS)
        return Estimate(
            multiplier=multiplier.to(dtype),
            weights=None,
            mean=(about + self.centre).to(dtype),
            objective=pull + divergence,
            dual_value=self.value(multiplier),
            gap=gap,
            steps=steps,
            status=status,
            prior_mean=self.centre.to(dtype),
        )


def _maximise(problem: _Problem, tolerance: float, max_steps: int) -> tuple[Tensor, Tensor]:
    """lam (..., d) and how many steps it took (...)."""
    now = torch.zeros_like(problem.evidence)
    value = problem.value(now)
    steps = torch.zeros_like(value, dtype=torch.int64)
    for _ in range(max_steps):
        slope, curvature = problem.slopes(now)
        gap = 0.5 * (problem.reliability * slope.square()).sum(-1)
        live = gap > tolerance * (1 + value.abs())
        if not bool(live.any()):
            break
        step = torch.linalg.solve(curvature, slope.unsqueeze(-1)).squeeze(-1)
        gain = (slope * step).sum(-1)
        size = torch.ones_like(value)
        for _ in range(_LINES):
            moved = now + size.unsqueeze(-1) * step
            reached = problem.value(moved)
            short = live & (reached < value + _FALL * size * gain - 1e-14 * (1 + value.abs()))
            if not bool(short.any()):
                break
            size = torch.where(short, size / 2, size)
        now = torch.where(live.unsqueeze(-1), moved, now)
        value = torch.where(live, reached, value)
        steps = steps + live
    return now, steps
