"""The same estimate for a preference with a density: a Gaussian, in closed form, or a mixture.

All that is asked of a preference is K(lam) = log E_u e^<t, lam>, which for Gaussians is
<mean, lam> + lam' covariance lam / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach
from fenchel._numerics import certificate_dtype, check_finite, check_tensor, check_whole, has
from fenchel._solution import Status
from fenchel.continuous import matrices
from fenchel.continuous.densities import Gaussian
from fenchel.continuous.mixture import Mixture, log_mixing
from fenchel.dual.estimate import TOLERANCE
from fenchel.dual.problem import broadcast, read_positive
from fenchel.dual.result import Estimate, Unrounded

_LINES, _FALL = 50, 1e-4
_POLISH = 2  # whole steps after the last one: the gap is the square of what they mend
_ASYMMETRY = 1e-4  # of a covariance, relative to its size: more is a mistake, less is averaged out


def gaussian(
    mean: Tensor, covariance: Tensor, evidence: Tensor, reliability: float | Tensor
) -> Estimate:
    """lam = (I / reliability + covariance)^-1 evidence, exactly; the mean moves by covariance lam.

    mean (..., d), covariance (..., d, d), evidence (..., d); leading axes broadcast. There are no
    templates, so no weights: the solution is the Gaussian moved to `mean`. The covariance may lack
    rank, and its symmetric part is used. Results in the precision of the operands.

    >>> e = gaussian(torch.zeros(1), torch.eye(1), torch.ones(1), 1.0)
    >>> e.mean, e.multiplier
    (tensor([0.5000]), tensor([0.5000]))
    """
    _check_gaussian(mean, covariance, evidence)  # Deciphering Attention, eqs. 5 and 12
    dtype = torch.promote_types(torch.promote_types(mean.dtype, covariance.dtype), evidence.dtype)
    whole = matrices.symmetric(covariance.to(certificate_dtype(evidence.device)))
    sure = whole.new_zeros(1)  # the logarithm of one
    parts = (sure, mean.unsqueeze(-2), whole.unsqueeze(-3))
    return _solve(_Problem.make(parts, evidence, reliability), TOLERANCE, 100, dtype)


def _check_gaussian(mean: Tensor, covariance: Tensor, evidence: Tensor) -> None:
    named = {"mean": mean, "covariance": covariance, "evidence": evidence}
    for name, value in named.items():
        check_tensor(value, name)
        if not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}; use .float()")
        check_finite(value, name)
    if mean.dim() < 1 or mean.shape[-1] == 0:
        raise ValueError(f"mean must be (..., d), got {tuple(mean.shape)}")
    d = mean.shape[-1]
    if covariance.shape[-2:] != (d, d):
        raise ValueError(
            f"covariance must be (..., {d}, {d}) for a mean of {d} coordinates, got "
            f"{tuple(covariance.shape)}; variances alone go in as variances.diag_embed()"
        )
    values = covariance.detach().to(certificate_dtype(covariance.device))
    size = values.abs().amax((-1, -2), keepdim=True)
    apart = (values - values.mT).abs()
    if has(apart > _ASYMMETRY * size):
        raise ValueError(
            f"covariance must be symmetric, its halves differ by {float(apart.max()):.3g}; "
            "pass (C + C.mT) / 2"
        )
    least = torch.linalg.eigvalsh(matrices.symmetric(values))[..., :1]
    if has(least < -64 * d * torch.finfo(covariance.dtype).eps * size.squeeze(-1)):
        raise ValueError(
            "covariance must have no negative eigenvalue, its smallest is "
            f"{float(least.min()):.3g}; it may lack rank. Build it as A @ A.mT, or add a multiple "
            "of the identity"
        )


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
    maximum from anywhere; one Gaussian takes one step. Derivatives of every order are exact.
    tolerance: a row is solved when its gap is below tolerance * (1 + |objective|).
    """
    check_whole(max_steps, "max_steps", 1)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    if isinstance(preference, Gaussian):
        raise TypeError(
            "preference is one Gaussian: use dual.gaussian(preference.mean, "
            "preference.covariance_matrix, evidence, reliability)"
        )
    if not isinstance(preference, Mixture) or not isinstance(preference.components, Gaussian):
        raise TypeError(
            "preference must be a mixture of Gaussians, fenchel.continuous.Mixture(mixing, "
            f"fenchel.continuous.Gaussian(means, covariances)), got {type(preference).__name__}"
        )
    check_tensor(evidence, "evidence")
    mixing, modes = preference.mixing, preference.components
    logs = log_mixing(mixing.to(certificate_dtype(evidence.device)))
    problem = _Problem.make((logs, modes.mean, modes.covariance_matrix), evidence, reliability)
    return _solve(problem, tolerance, max_steps, torch.promote_types(mixing.dtype, evidence.dtype))


def _solve(problem: _Problem, tolerance: float, max_steps: int, dtype: torch.dtype) -> Estimate:
    operands = tuple(vars(problem).values())
    root, steps = _maximise(_Problem(*(x.detach() for x in operands)), tolerance, max_steps)
    return problem.estimate(attach(root, _linearise, *operands), steps, dtype)


def _linearise(multiplier: Tensor, *operands: Tensor) -> tuple[Tensor, Solve]:
    """The dual's gradient, and solutions with its negative Hessian."""
    slope, curvature = _Problem(*operands).slopes(multiplier)
    return slope, partial(matrices.solve, curvature)


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
    def make(
        cls, modes: tuple[Tensor, Tensor, Tensor], evidence: Tensor, reliability: float | Tensor
    ) -> _Problem:
        """modes: log-mixing (..., K), means (..., K, d) and covariances (..., K, d, d)."""
        inner = certificate_dtype(evidence.device)
        logs, means, covariances = (x.to(inner) for x in modes)
        strength = read_positive(reliability, "reliability", evidence).to(inner)
        d = means.shape[-1]
        if evidence.dim() < 1 or evidence.shape[-1] != d:
            raise ValueError(f"evidence must be (..., {d}), got {tuple(evidence.shape)}")
        check_finite(evidence, "evidence")
        batch = broadcast(
            mean=means.shape[:-2],
            covariance=covariances.shape[:-3],
            evidence=evidence.shape[:-1],
            reliability=strength.shape,
        )
        centre = (logs.exp().unsqueeze(-1) * means).sum(-2)
        return cls(
            logs.expand(*batch, -1),
            (means - centre.unsqueeze(-2)).expand(*batch, -1, -1),
            covariances.expand(*batch, -1, -1, -1),
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
            unrounded=Unrounded.of(
                multiplier,
                (about, torch.zeros_like(about), self.centre),
                (weights * means.norm(dim=-1)).sum(-1) + self.means.norm(dim=-1).amax(-1),
                self.evidence,
                self.reliability,
            ),
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
        step = matrices.solve(curvature, slope)
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
    for _ in range(_POLISH):
        slope, curvature = problem.slopes(now)
        now = now + matrices.solve(curvature, slope)
    return now, steps
