"""Independent answers for the continuous room: numpy and scipy, nothing of the library's.

A density of the family is the law of mean + R scale^(1/2) u, where u has the density
(1 - |u|^2)^(1/eps) / I on the unit ball, eps = alpha - 1, I a Beta integral, and R from the
normalisation. Expectations are sums over polar nodes of the ball, as many as it takes.
"""

import itertools
import math
from functools import lru_cache

import numpy as np
import torch
from scipy.special import beta, roots_jacobi

DOUBLE = torch.float64


def random_spd(rng, d, low=0.1, high=2.0):
    """Eigenvalues between low and high, axes at random."""
    axes, _ = np.linalg.qr(rng.standard_normal((d, d)))
    spread = np.exp(rng.uniform(math.log(low), math.log(high), d))
    matrix = axes * spread @ axes.T
    return (matrix + matrix.T) / 2


def ball_integral(alpha, d):
    """Of (1 - |u|^2)^(1/(alpha - 1)) over the unit ball."""
    area = 2 * math.pi ** (d / 2) / math.gamma(d / 2)
    return area / 2 * beta(d / 2, 1 / (alpha - 1) + 1)


def peak_and_radius(scale, alpha):
    """From mass 1, R^d I peak sqrt|scale| = 1, and R^2 = 2 peak^eps / eps. Any batch of scales."""
    eps, d = alpha - 1, scale.shape[-1]
    root = np.sqrt(np.linalg.det(scale)) * ball_integral(alpha, d) * (2 / eps) ** (d / 2)
    peak = root ** (-1 / (1 + d * eps / 2))
    return peak, np.sqrt(2 * peak**eps / eps)


def density(points, mean, scale, alpha):
    """p at points (..., d), straight from its definition."""
    apart = points - mean
    squared = (apart @ np.linalg.inv(scale) * apart).sum(-1)
    if alpha == 1:
        return np.exp(-squared / 2) / math.sqrt(np.linalg.det(2 * math.pi * scale))
    peak, radius = peak_and_radius(scale, alpha)
    return peak * np.maximum(1 - squared / radius**2, 0) ** (1 / (alpha - 1))


def normal(points, centre, covariance):
    return density(points, centre, covariance, 1)


def gauss(n, low, high):
    """Nodes and weights of Gauss and Legendre on [low, high]."""
    x, w = _legendre(n)
    return (low + high) / 2 + (high - low) / 2 * x, (high - low) / 2 * w


_legendre = lru_cache(maxsize=64)(np.polynomial.legendre.leggauss)


def ball_rule(alpha, d, n):
    """Points of the unit ball (K, d) and probabilities (K,) of the law of u.

    Polar: n radii by Gauss and Jacobi in the squared radius, which takes any power of
    1 - |u|^2 with it, and 2 n equally spaced angles, with every direction also its opposite.
    """
    x, w = roots_jacobi(n, 1 / (alpha - 1), d / 2 - 1)  # (1 - x)^(1 / eps) (1 + x)^(d / 2 - 1)
    radius, w = np.sqrt((1 + x) / 2), w / w.sum()
    if d == 1:
        directions, share = np.array([[-1.0], [1.0]]), np.full(2, 0.5)
    else:
        turn = np.arange(2 * n) * math.pi / n
        directions = np.stack([np.cos(turn), np.sin(turn)], -1)
        share = np.full(2 * n, 0.5 / n)
    if d == 3:
        height, w_height = gauss(n, -1, 1)
        flat = np.sqrt(1 - height**2)[:, None, None] * directions
        tall = np.broadcast_to(height[:, None, None], (n, 2 * n, 1))
        directions = np.concatenate([flat, tall], -1).reshape(-1, 3)
        share = np.outer(w_height / 2, share).ravel()
    points = radius[:, None, None] * directions
    return points.reshape(-1, d), np.outer(w, share).ravel()


def whole_rule(mean, scale, n, reach=9.0):
    """Nodes of R^d and weights dt for things that fall like this Gaussian. (K, d), (K,)"""
    d = len(mean)
    x, w = gauss(n, -reach, reach)
    z = np.stack(np.meshgrid(*[x] * d, indexing="ij"), -1).reshape(-1, d)
    share = np.prod(np.stack(np.meshgrid(*[w] * d, indexing="ij"), -1), -1).ravel()
    values, axes = np.linalg.eigh(scale)
    return mean + z * np.sqrt(values) @ axes.T, share * math.sqrt(np.prod(values))


def ellipsoid_rule(mean, scale, alpha, n):
    """Nodes of the support and probabilities of the density. (K, d), (K,)"""
    u, share = ball_rule(alpha, len(mean), n)
    values, axes = np.linalg.eigh(scale)
    _, radius = peak_and_radius(scale, alpha)
    return mean + radius * u * np.sqrt(values) @ axes.T, share


def expectation(function, mean, scale, alpha, n):
    """E[function(t)] by n and by 5n/4 nodes along each axis, which must agree to 1e-11."""
    rough, fine = (_expectation(function, mean, scale, alpha, k) for k in (n, 5 * n // 4))
    assert np.all(np.abs(rough - fine) <= 1e-11 * (1 + np.abs(fine))), np.abs(rough - fine).max()
    return fine


def _expectation(function, mean, scale, alpha, n):
    if alpha == 1:
        points, weights = whole_rule(mean, scale, n)
        weights = weights * density(points, mean, scale, 1)
    else:
        points, weights = ellipsoid_rule(mean, scale, alpha, n)
    return np.tensordot(weights, function(points), 1)


# ---- a Gaussian function under a sparse density, with both derivatives


def jets(mean, scale, centre, covariance, alpha, refine=1.0):
    """Value (B,), gradient (B, k), Hessian (B, k, k) of E_p[N(t; centre, covariance)].

    In mean and the upper triangle of scale, k = d + d (d + 1) / 2. mean, centre (B, d), scale,
    covariance (B, d, d). With t = m + A u and z = t - centre, a move delta = dm + dA u changes N by
    the factor 1 - z'P delta - delta'P delta / 2 + (z'P delta)^2 / 2 up to second order: moments of
    (1, u) up to order four under N say everything.
    """
    d, at = mean.shape[-1], torch.from_numpy
    free = pack(at(mean), at(scale)).requires_grad_()
    moved = torch.cat(_factor(free, d, alpha), -1)  # (B, d, 1 + d)
    start = moved.detach()
    away = torch.cat([start[..., :1] - at(centre).unsqueeze(-1), start[..., 1:]], -1)
    parts = zip(away.numpy(), covariance, strict=True)
    fourth = at(np.stack([_fourth_moments(z, c, alpha, refine) for z, c in parts]))
    second = fourth[..., 0, 0]
    delta, precision = moved - start, at(np.linalg.inv(covariance))
    mixed = away.mT @ precision @ delta
    change = -((mixed + delta.mT @ precision @ delta / 2) * second).sum()
    change = change + torch.einsum("bij,bkl,bijkl", mixed, mixed, fourth) / 2
    (gradient,) = torch.autograd.grad(change, free, create_graph=True)
    rows = [torch.autograd.grad(x.sum(), free, retain_graph=True)[0] for x in gradient.unbind(-1)]
    return second[:, 0, 0].numpy(), gradient.detach().numpy(), torch.stack(rows, -2).numpy()


def _fourth_moments(away, covariance, alpha, refine):
    """Of (1, u), under the law of u times N(away (1, u); 0, covariance). (1 + d,) * 4"""
    back = np.linalg.inv(away[:, 1:])
    narrow = math.sqrt(np.linalg.eigvalsh(back @ covariance @ back.T)[0])
    # So many nodes resolve a Gaussian of this deviation in the ball: tested in test_reference.
    count = 32 * math.ceil(refine * (24 + 6 / narrow) / 32)
    u, share, powers, place = _rule_with_powers(alpha, len(covariance), count)
    weight = share * normal(away[:, 0] + u @ away[:, 1:].T, 0.0, covariance)
    return (weight @ powers)[place]


@lru_cache(maxsize=16)
def _rule_with_powers(alpha, d, count):
    """A rule of the ball, the monomials of (1, u) of order four, and where each goes."""
    u, share = ball_rule(alpha, d, count)
    one = np.concatenate([np.ones((len(u), 1)), u], 1)
    names = list(itertools.combinations_with_replacement(range(d + 1), 4))
    powers = np.stack([one[:, list(name)].prod(-1) for name in names], -1)
    place = np.zeros([d + 1] * 4, dtype=int)
    for k, name in enumerate(names):
        for order in itertools.permutations(name):
            place[order] = k
    return u, share, powers, place


def pack(mean, scale):
    """Free numbers: the mean and the upper triangle. (B, k)"""
    rows, columns = np.triu_indices(mean.shape[-1])
    return torch.cat([mean, scale[..., rows, columns]], -1)


def unpack(x, d):
    """mean (..., d), scale (..., d, d)"""
    rows, columns = np.triu_indices(d)
    place = np.zeros((d, d), dtype=int)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows)) + d
    return x[..., :d], x[..., torch.from_numpy(place)]


def _factor(x, d, alpha):
    """mean (..., d, 1) and A (..., d, d) with t = mean + A u."""
    eps = alpha - 1
    mean, scale = unpack(x, d)
    whole = torch.linalg.det(scale).sqrt() * ball_integral(alpha, d) * (2 / eps) ** (d / 2)
    squared = 2 / eps * whole ** (-eps / (1 + d * eps / 2))
    return mean.unsqueeze(-1), torch.linalg.cholesky(squared[..., None, None] * scale)


# ---- a paraboloid under a sparse density, in the plane


def overlap(mean, scale, alpha, centre, basis_scale, n=160):
    """E_p[psi], psi the paraboloid of (centre, basis_scale); d = 1 or 2.

    Along rays from psi's centre, on which both supports are intervals. In the plane the angles at
    which a ray touches the density's ellipse, or meets it on psi's own edge, are cut out.
    """
    peak, radius = peak_and_radius(scale, alpha)
    level, reach = peak_and_radius(basis_scale, 2)
    values, axes = np.linalg.eigh(basis_scale)
    out = reach * axes * np.sqrt(values)  # t = centre + out u, |u| < 1
    at = np.linalg.solve(out, mean - centre)
    form = out.T @ np.linalg.inv(scale) @ out / radius**2
    if len(mean) == 1:
        directions, share = np.array([[-1.0], [1.0]]), np.ones(2)
    else:
        angles, share = _between(_cuts(form, at), n)
        directions = np.stack([np.cos(angles), np.sin(angles)], -1)
    # p > 0 where (r e - at)' form (r e - at) < 1
    a, b = (directions @ form * directions).sum(-1), directions @ form @ at
    root = np.sqrt(np.maximum(b**2 - a * (at @ form @ at - 1), 0))
    low, high = np.clip([(b - root) / a, (b + root) / a], 0, 1)
    x, w = gauss(n, -math.pi / 2, math.pi / 2)
    r = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * np.sin(x)
    apart = r[..., None] * directions[:, None] - at
    p = peak * np.maximum(1 - (apart @ form * apart).sum(-1), 0) ** (1 / (alpha - 1))
    inner = p * level * (1 - r**2) * r ** (len(mean) - 1) * np.cos(x) * w
    return share @ (inner.sum(-1) * (high - low) / 2) * abs(np.linalg.det(out))


def _cuts(form, at):
    """Angles of e with (e' form at)^2 = (e' form e) k or e' form e - 2 e' form at + k = 0."""
    linear, k = form @ at, at @ form @ at - 1
    touching = np.outer(linear, linear) - k * form
    return _roots(touching, np.zeros(2), 0.0) + _roots(form, -2 * linear, k)


def _roots(square, linear, constant):
    """Of e' square e + linear' e + constant on the circle, as a polynomial of exp(i angle)."""
    (p, q), (_, s) = square
    second, first = (p - s) / 4 - 0.5j * q, (linear[0] - 1j * linear[1]) / 2
    roots = np.roots([second, first, constant + (p + s) / 2, np.conj(first), np.conj(second)])
    return list(np.angle(roots))  # also of those next to the circle, where the integrand is steep


def _between(cuts, n):
    """Nodes around the circle, in pieces between the cuts."""
    edges = np.unique([-math.pi, *cuts, math.pi])
    x, w = gauss(n, -math.pi / 2, math.pi / 2)
    pieces = [
        (low + high) / 2 + (high - low) / 2 * np.sin(x) for low, high in itertools.pairwise(edges)
    ]
    weights = [(high - low) / 2 * np.cos(x) * w for low, high in itertools.pairwise(edges)]
    return np.concatenate(pieces), np.concatenate(weights)
