"""Integrals over the ellipse of a truncated paraboloid: as the library has them, and plainly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fenchel.continuous as fc
from benchmarks.integrals_methods import Problem
from papers.claims.thesis._disc import Pair, closed_moments, normal, uniform

TOLERANCE = 1e-13  # asked of the library


def basis(pair: Pair) -> fc.GaussianBasis:
    return fc.GaussianBasis(pair.centre.unsqueeze(0), pair.covariance)


def expected(pair: Pair) -> Tensor:
    """E[psi] by the library. ()"""
    return fc.Paraboloid(pair.mean, pair.scale).expect(basis(pair), TOLERANCE)[0]


def raw_moments(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Integrals over E of psi, t psi and t t' psi, from the library's derivatives of E[psi].

    d/dm = S^-1 ∫(t - m) psi; and S -> (1 + x) S changes E[psi] by x (c/2 ∫psi - E[psi]).
    """
    mean, scale = pair.mean.clone().requires_grad_(), pair.scale.clone().requires_grad_()
    value = fc.Paraboloid(mean, scale).expect(basis(pair), TOLERANCE)[0]
    to_mean, to_scale = torch.autograd.grad(value, (mean, scale))
    m, s, c = pair.mean, pair.scale, pair.level
    zeroth = 2 / c * (value.detach() + (s * to_scale).sum())
    first = s @ to_mean + m * zeroth
    central = 2 * s @ to_scale @ s + c / 2 * zeroth * s
    return zeroth, first, central + m.outer(first) + first.outer(m) - zeroth * m.outer(m)


def by_quadrature(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """The same three, over the ellipse as it stands."""
    t, w = pair.on_support()
    mass = w * pair.psi(t)
    return mass.sum(), mass @ t, torch.einsum("k,ki,kj->ij", mass, t, t)


def escort_covariances(pair: Pair, power: float) -> list[Tensor]:
    """cov_{p,b} of (t, psi) and (t t', psi), integrals over E: ∫p^b φψ - ∫p^b φ ∫p^b ψ / ∫p^b."""
    t, w = pair.on_support()
    w = w * pair.density(t) ** power
    psi = pair.psi(t)
    both = [t, t.unsqueeze(-1) * t.unsqueeze(-2)]
    return [
        torch.tensordot(w * psi, phi, 1) - torch.tensordot(w, phi, 1) * (w @ psi) / w.sum()
        for phi in both
    ]


def slopes(pair: Pair) -> list[Tensor]:
    """The library's derivatives of E[psi] in θ = (S^-1 m, -S^-1/2). (2,), (2, 2)"""
    precision = torch.linalg.inv(pair.scale)
    theta = [(precision @ pair.mean).requires_grad_(), (-precision / 2).requires_grad_()]
    value = fc.Paraboloid.from_canonical(*theta).expect(basis(pair), TOLERANCE)
    return list(torch.autograd.grad(value.sum(), theta))


def difference(pair: Pair, towards: list[Tensor], step: float = 1e-6) -> float:
    """Of E[psi] in θ along a direction, central, by quadrature alone."""
    precision = torch.linalg.inv(pair.scale)
    values = []
    for sign in (1, -1):
        theta1 = precision @ pair.mean + sign * step * towards[0]
        scale = torch.linalg.inv(precision - 2 * sign * step * towards[1])
        moved = Pair(scale @ theta1, scale, pair.centre, pair.covariance)
        t, w = moved.on_support()
        values.append(float((w * moved.density(t) * moved.psi(t)).sum()))
    return (values[0] - values[1]) / (2 * step)


def problem(pair: Pair) -> Problem:
    density = fc.Paraboloid(pair.mean.unsqueeze(0), pair.scale.unsqueeze(0))
    return Problem(density, basis(pair))


def on_a_line(generator: torch.Generator) -> tuple[list[float], list[float]]:
    """E[psi] and its derivative in psi's centre: by the moments, and by the library.

    At t = centre + deviation z the density is c - (shift + deviation z)^2 / (2 scale).
    """
    mean, centre = uniform(generator, -0.5, 0.5, 2).tolist()
    scale, deviation = uniform(generator, 0.1, 1.0, 2).tolist()
    level = (math.gamma(2.5) / math.sqrt(2 * math.pi * scale)) ** (2 / 3)
    reach, shift = math.sqrt(2 * level * scale), centre - mean
    moments = closed_moments((-shift - reach) / deviation, (-shift + reach) / deviation)
    powers = (shift**2, 2 * shift * deviation, deviation**2)
    density = [(level if k == 0 else 0.0) - power / (2 * scale) for k, power in enumerate(powers)]
    closed = [
        sum(x * moments[k] for k, x in enumerate(density)),
        sum(x * moments[k + 1] for k, x in enumerate(density)) / deviation,
    ]
    at = torch.tensor([[centre]], dtype=torch.float64, requires_grad=True)
    function = fc.GaussianBasis(at, torch.tensor([[deviation**2]], dtype=torch.float64))
    shape = at.detach().new_tensor([mean]), at.detach().new_tensor([[scale]])
    value = fc.Paraboloid(*shape).expect(function, TOLERANCE)
    (slope,) = torch.autograd.grad(value.sum(), at)
    return closed, [float(value.detach()), float(slope)]


def affine(generator: torch.Generator, d: int, r: int) -> tuple[Tensor, ...]:
    """A (d, r) of singular values between 1/2 and 2, b, m (d,) and S (d, d)."""
    draw = torch.randn(d, d, generator=generator, dtype=torch.float64)
    axes = torch.linalg.qr(draw).Q
    a = axes[:, :r] * uniform(generator, 0.5, 2, r)
    root = torch.randn(d, d, generator=generator, dtype=torch.float64)
    s = root @ root.T / d + 0.5 * torch.eye(d, dtype=torch.float64)
    return a, uniform(generator, -1, 1, d), uniform(generator, -1, 1, d), s


def of_square(generator: torch.Generator) -> tuple[float, float]:
    """Relative errors of s̃ = 1/|det A| and 1/det A for an A that reflects."""
    a, b, m, s = affine(generator, 2, 2)
    if torch.linalg.det(a) > 0:
        a = a.flip(1)
    u = uniform(generator, -1, 1, 6, 2)
    true = fc.Gaussian(m, s).prob(u @ a.T + b)
    inverse = torch.linalg.inv(a)
    density = normal(u, inverse @ (m - b), inverse @ s @ inverse.T)
    det = torch.linalg.det(a)
    right, wrong = (float((density / x / true - 1).abs().max()) for x in (det.abs(), det))
    return right, wrong
