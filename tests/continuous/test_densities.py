"""Densities: integrals, support, limits in alpha, other ways to make one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch.distributions import MultivariateNormal

import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.checks import assert_near
from tests.continuous.families import ALPHAS, DOUBLE, make, parameters, random_density
from tests.continuous.integrals import BAR, assert_integrals, half_width, statistics

# ---- what the density integrates to


@pytest.mark.parametrize("alpha", ALPHAS)
def test_integrals_on_a_line_by_adaptive_quadrature(alpha):
    (mean,), scale = parameters(1)
    density, half = make([mean], scale, alpha), half_width(scale, alpha)

    def at(t):
        return statistics(density, np.array([[t]]))[0]

    total, error = integrate.quad_vec(at, mean - half, mean + half, epsabs=1e-10, epsrel=1e-10)
    assert error < BAR
    assert_integrals(density, total)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_mass_on_a_line_by_quad(alpha):
    (mean,), scale = parameters(1, 1)
    density, half = make([mean], scale, alpha), half_width(scale, alpha)
    mass, _ = integrate.quad(
        lambda t: density.prob(torch.tensor([t], dtype=DOUBLE)).item(),
        mean - half, mean + half, epsabs=1e-11, limit=200,
    )  # fmt: skip
    assert_near(mass, 1.0, BAR)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_integrals_in_the_plane_by_adaptive_quadrature(alpha):
    """Over t1 adaptively, over the chord of t2 by Gauss's rule; both from the quadratic form."""
    mean, scale = parameters(2)
    density, half = make(mean, scale, alpha), half_width(scale, alpha)
    precision = np.linalg.inv(scale)
    squared = 144.0 if alpha == 1 else reference.peak_and_radius(scale, alpha)[1] ** 2
    angle, weight = reference.gauss(160, -math.pi / 2, math.pi / 2)

    def chord(t):
        x = t - mean[0]
        # p11 y^2 + 2 p01 x y + p00 x^2 = squared
        b = precision[0, 1] * x
        root = math.sqrt(max(b**2 - precision[1, 1] * (precision[0, 0] * x**2 - squared), 0))
        y = mean[1] + (-b + root * np.sin(angle)) / precision[1, 1]
        points = np.stack([np.full_like(y, t), y], -1)
        return weight * np.cos(angle) * root / precision[1, 1] @ statistics(density, points)

    total, error = integrate.quad_vec(
        chord, mean[0] - half, mean[0] + half, epsabs=1e-10, epsrel=1e-10
    )
    assert error < BAR
    assert_integrals(density, total)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_integrals_in_space_by_spherical_nodes(alpha):
    mean, scale = parameters(3)
    density = make(mean, scale, alpha)

    def total(n):
        if alpha == 1:
            points, weights = reference.whole_rule(mean, scale, n)
        else:
            points, share = reference.ellipsoid_rule(mean, scale, alpha, n)
            weights = share / reference.density(points, mean, scale, alpha)
        return weights @ statistics(density, points)

    rough, fine = total(24 if alpha > 1 else 40), total(30 if alpha > 1 else 50)
    assert_near(rough, fine, 1e-10)
    assert_integrals(density, fine)


def test_the_integral_check_can_fail():
    mean, scale = parameters(1)
    density = make(mean, scale, 2.0)
    points, share = reference.ellipsoid_rule(mean, scale, 2.0, 40)
    total = share / reference.density(points, mean, scale, 2.0) @ statistics(density, points)
    assert_integrals(density, total)
    for k in range(4):
        wrong = total.copy()
        wrong[k] += 1e-6
        with pytest.raises(AssertionError):
            assert_integrals(density, wrong)


@pytest.mark.parametrize("d", [1, 2, 3, 5])
@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0, 4.0])
def test_the_density_is_its_definition(d, alpha):
    mean, scale = parameters(d)
    points = mean + np.random.default_rng(0).standard_normal((50, d)) * 0.4
    expected = reference.density(points, mean, scale, alpha)
    assert_near(make(mean, scale, alpha).prob(torch.from_numpy(points)), expected, 1e-13)


@given(
    alpha=st.floats(1.0, 4.0),
    low=st.floats(-6, 0),
    ratio=st.floats(0, 4),
    d=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_scale_and_alpha_have_mass_one(alpha, low, ratio, d, seed):
    rng = np.random.default_rng(seed)
    mean, scale = rng.standard_normal(d), reference.random_spd(rng, d, 10**low, 10 ** (low + ratio))
    density = make(mean, scale, alpha)
    if alpha < 1.02:  # the ball of the reference is too wide there
        points, weights = reference.whole_rule(mean, scale, 40)
        p = density.prob(torch.from_numpy(points)).numpy()
    else:
        points, weights = reference.ellipsoid_rule(mean, scale, alpha, 10)
        p = density.prob(torch.from_numpy(points)).numpy()
        p = p / reference.density(points, mean, scale, alpha)
    assert_near(weights @ p, 1.0, 1e-9)


# ---- the paper's statements


def test_figure_3_1():
    """Farinhas, 2021, figure 3.1: the two standard densities of the plane."""
    gaussian, paraboloid = (
        fc.Gaussian(torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE)),
        fc.Paraboloid(torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE)),
    )
    assert abs(gaussian.log_peak.exp() - 0.159155) < 5e-7
    assert abs(paraboloid.log_peak.exp() - 0.564190) < 5e-7
    assert abs(paraboloid.projection()[1] - 1.062252).max() < 5e-7
    # The Gaussian's peak is the higher one once the scale is below 1 / (4 pi).
    for size, gaussian_is_higher in ((0.99, True), (1.01, False)):
        scale = size / (4 * math.pi) * torch.eye(2, dtype=DOUBLE)
        peaks = [make(torch.zeros(2, dtype=DOUBLE), scale, a).log_peak for a in (1, 2)]
        assert (peaks[0] > peaks[1]) == gaussian_is_higher


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_covariance_of_the_paraboloid(d):
    """Farinhas, 2021, theorem 1 and its inverse, eqs. 4.2 to 4.6."""
    mean, scale = parameters(d)
    ours = fc.Paraboloid(torch.from_numpy(mean), torch.from_numpy(scale)).covariance_matrix.numpy()
    level = (math.gamma(d / 2 + 2) / math.sqrt(np.linalg.det(2 * math.pi * scale))) ** (2 / (d + 2))
    assert_near(ours, level * scale / (d / 2 + 2), 1e-14)
    constant = (d / 2 + 2) * (math.pi * (d + 4)) ** (d / 2) / math.gamma(d / 2 + 2)
    assert_near(constant * math.sqrt(np.linalg.det(ours)) * ours, scale, 1e-13)
    if d == 1:
        assert_near(ours, (1.5 * scale) ** (2 / 3) / 5, 1e-14)
        assert_near(2 / 3 * (5 * ours) ** 1.5, scale, 1e-14)
    if d == 2:
        assert_near(ours, scale / (3 * math.sqrt(math.pi) * np.linalg.det(scale) ** 0.25), 1e-14)
        assert_near(np.linalg.det(ours), np.linalg.det(scale) ** 0.5 / (9 * math.pi), 1e-14)
        assert_near(9 * math.pi * math.sqrt(np.linalg.det(ours)) * ours, scale, 1e-13)


# ---- where it lives


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 3.0])
def test_support_level_and_log_prob_agree(d, alpha):
    mean, scale = parameters(d)
    density = make(mean, scale, alpha)
    direction = np.random.default_rng(1).standard_normal((40, d))
    direction /= np.sqrt((direction @ np.linalg.inv(scale) * direction).sum(-1, keepdims=True))
    edge = direction * math.sqrt(2 * density.level.item())  # the score is -level there
    for size, inside in ((1 - 1e-9, True), (1 + 1e-9, False), (1e3, False), (0.0, True)):
        points = torch.from_numpy(mean + size * edge)
        assert (density.support.check(points) == inside).all()
        assert ((density.log_prob(points) > -math.inf) == inside).all()
        assert ((density.prob(points) > 0) == inside).all()
    assert_near(density.level, reference.peak_and_radius(scale, alpha)[1] ** 2 / 2, 1e-13)


def test_off_the_support_derivatives_are_zero():
    mean = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    density = fc.Paraboloid(mean, torch.eye(2, dtype=DOUBLE))
    points = torch.tensor([[5.0, 0.0], [0.1, 0.2]], dtype=DOUBLE, requires_grad=True)
    log_p = density.log_prob(points)
    assert log_p[0] == -math.inf
    gradients = torch.autograd.grad(log_p[1] + density.prob(points).sum(), (mean, points))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[1][0] == 0).all()
    assert (gradients[1][1] != 0).all()


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_projection_touches_the_ellipsoid(alpha):
    mean, scale = parameters(3)
    density = make(mean, scale, alpha)
    low, high = (x.numpy() for x in density.projection())
    for i in range(3):
        # The largest t_i on the ellipsoid is where its gradient 2 P (t - mean) is along axis i.
        reach = scale[i] / math.sqrt(scale[i, i]) * math.sqrt(2 * density.level.item())
        for sign, bound in ((1, high), (-1, low)):
            touch = mean + sign * reach
            assert_near(touch[i], bound[i], 1e-13)
            inside = torch.from_numpy(mean + sign * (1 - 1e-9) * reach)
            assert density.support.check(inside)
            outside = torch.from_numpy(mean + sign * (1 + 1e-9) * reach)
            assert not density.support.check(outside)
    torch.manual_seed(0)
    samples = density.sample((2000,)).numpy()
    assert (samples >= low).all()
    assert (samples <= high).all()


def test_a_gaussian_lives_everywhere():
    density = random_density(2, 1.0)
    assert density.level == math.inf
    far = torch.full((2,), 1e3, dtype=DOUBLE)
    assert density.support.check(far)
    assert density.log_prob(far).isfinite()
    low, high = density.projection()
    assert (low == -math.inf).all()
    assert (high == math.inf).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_not_a_number_is_not_off_the_support(alpha):
    value = torch.tensor([math.nan, 0.0], dtype=DOUBLE)
    assert random_density(2, alpha).log_prob(value).isnan()


# ---- other ways to make one


@pytest.mark.parametrize("d", [1, 2, 3, 4])
@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0, 3.0, 4.0])
def test_round_trips(d, alpha):
    mean, covariance = (torch.from_numpy(x) for x in parameters(d))
    families = {1.0: [fc.Gaussian], 2.0: [fc.Paraboloid]}.get(alpha, [])
    for family, rest in [(f, ()) for f in families] + [(fc.TsallisGaussian, (alpha,))]:
        density = family.from_covariance(mean, covariance, *rest)
        assert_near(density.covariance_matrix, covariance, 1e-13)
        assert_near(density.mean, mean, 0)
        theta1, theta2 = density.canonical()
        again = family.from_canonical(theta1, theta2, *rest)
        assert_near(again.mean, mean, 1e-12)
        assert_near(again.scale, density.scale, 1e-12)
        # f(t) = theta1' t + t' theta2 t differs from the score by a constant.
        points = torch.randn(6, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
        score = points @ theta1 + (points @ theta2 * points).sum(-1)
        apart = points - mean
        squared = (torch.linalg.solve(density.scale, apart.mT).mT * apart).sum(-1)
        offset = score + squared / 2
        assert_near(offset, offset.mean().expand(6), 1e-12)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_gaussian_is_the_multivariate_normal(d):
    mean, scale = (torch.from_numpy(x) for x in parameters(d))
    ours, theirs = fc.Gaussian(mean, scale), MultivariateNormal(mean, scale)
    points = torch.randn(7, d, dtype=DOUBLE)
    assert_near(ours.log_prob(points), theirs.log_prob(points), 1e-13)
    for name in ("mean", "covariance_matrix", "variance", "stddev", "mode"):
        assert_near(getattr(ours, name), getattr(theirs, name), 1e-14)
    assert_near(ours.entropy(), theirs.entropy(), 1e-13)
    assert ours.batch_shape == theirs.batch_shape
    assert ours.event_shape == theirs.event_shape


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_the_general_class_at_the_special_alphas(alpha):
    mean, scale = (torch.from_numpy(x) for x in parameters(2))
    points = torch.randn(7, 2, dtype=DOUBLE)
    for value in (alpha, int(alpha), torch.tensor(alpha, dtype=DOUBLE)):
        general, special = fc.TsallisGaussian(mean, scale, value), make(mean, scale, alpha)
        assert_near(general.prob(points), special.prob(points), 1e-15)
        assert_near(general.entropy(), special.entropy(), 1e-15)
