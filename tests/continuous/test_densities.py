"""Densities: integrals, support, limits in alpha, samples, loss, optimality."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch.distributions import MultivariateNormal, kl_divergence

import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.checks import assert_mean, assert_near
from tests.continuous.families import ALPHAS, DOUBLE, make, parameters, random_density

BAR = 1e-8


def statistics(density, points):
    """1, t, t t' and what the entropy integrates, times the density. (K, 1 + d + d^2 + 1)"""
    log_p = density.log_prob(torch.from_numpy(points)).numpy()
    p, alpha = np.exp(log_p), density.alpha
    inner = np.where(p > 0, log_p, 0) if alpha == 1 else p ** (alpha - 1)
    squares = (points[:, :, None] * points[:, None, :]).reshape(len(points), -1)
    return p[:, None] * np.concatenate(
        [np.ones_like(p)[:, None], points, squares, inner[:, None]], 1
    )


def assert_integrals(density, totals):
    d, alpha = density.dim, density.alpha
    mean = totals[1 : 1 + d]
    covariance = totals[1 + d : -1].reshape(d, d) - np.outer(mean, mean)
    omega = totals[-1] if alpha == 1 else (totals[-1] - 1) / (alpha * (alpha - 1))
    assert_near(totals[0], 1.0, BAR)
    assert_near(density.mean, mean, BAR)
    assert_near(density.covariance_matrix, covariance, BAR)
    assert_near(density.entropy(), -omega, BAR)


def half_width(scale, alpha):
    """Of the support along the first axis; twelve deviations of a Gaussian."""
    radius = 12.0 if alpha == 1 else reference.peak_and_radius(scale, alpha)[1]
    return radius * math.sqrt(scale[0, 0])


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


# ---- CLAIMS


def test_figure_3_1():
    """CLAIMS F-Fig3.1: the two standard densities of the plane."""
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
    """CLAIMS F-T1 and its inverse, F-E4.2..4.6."""
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


# ---- samples


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_samples_have_the_moments(d, alpha):
    torch.manual_seed(d)
    density = random_density(d, alpha)
    samples = density.sample((20000,))
    assert samples.shape == (20000, d)
    assert_mean(samples, density.mean)
    apart = samples - density.mean
    assert_mean(apart.unsqueeze(-1) * apart.unsqueeze(-2), density.covariance_matrix)
    assert_mean(apart**3, torch.zeros(d))


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.25, 2.0, 4.0])
def test_samples_have_the_law(alpha):
    """|u|^2 of a sample is Beta(d/2, 1/eps + 1); chi-squared for alpha = 1."""
    torch.manual_seed(0)
    mean, scale = parameters(2)
    apart = make(mean, scale, alpha).sample((5000,)).numpy() - mean
    squared = (apart @ np.linalg.inv(scale) * apart).sum(-1)
    if alpha == 1:
        law = stats.chi2(2)
    else:
        squared /= reference.peak_and_radius(scale, alpha)[1] ** 2
        law = stats.beta(1, 1 / (alpha - 1) + 1)
    assert stats.kstest(squared, law.cdf).pvalue > 1e-3
    assert stats.kstest(1.05 * squared, law.cdf).pvalue < 1e-1  # it would be seen


@pytest.mark.parametrize("alpha", [1.0, 1.25, 2.0, 3.0])
def test_reparametrised_gradients(alpha):
    """Of E[(a't)^2 + b't] in mean and scale, and alpha where it is a tensor."""
    torch.manual_seed(1)
    values = [torch.from_numpy(x) for x in parameters(2)]
    a, b = torch.tensor([0.7, -0.4], dtype=DOUBLE), torch.tensor([0.3, 1.0], dtype=DOUBLE)
    if alpha > 1:
        values.append(torch.tensor(alpha, dtype=DOUBLE))

    def sampled():
        inputs = [x.clone().requires_grad_() for x in values]
        t = make(*inputs[:2], inputs[2] if alpha > 1 else alpha).rsample((500,))
        found = torch.autograd.grad(((t @ a) ** 2 + t @ b).mean(), inputs)
        return torch.cat([x.reshape(-1) for x in found])

    inputs = [x.clone().requires_grad_() for x in values]
    density = make(*inputs[:2], inputs[2] if alpha > 1 else alpha)
    second = density.covariance_matrix + density.mean.unsqueeze(-1) * density.mean
    exact = torch.autograd.grad(a @ second @ a + b @ density.mean, inputs)
    assert_mean(
        torch.stack([sampled() for _ in range(80)]), torch.cat([x.reshape(-1) for x in exact])
    )


def test_sampling_repeats_with_the_seed_and_has_the_right_shapes():
    density = random_density(2, 1.5).expand((3,))
    torch.manual_seed(5)
    first = density.sample((4, 2))
    torch.manual_seed(5)
    assert torch.equal(first, density.sample((4, 2)))
    assert first.shape == (4, 2, 3, 2)
    assert not density.sample().requires_grad
    assert density.support.check(first).all()


# ---- the loss


@pytest.mark.parametrize("alpha", ALPHAS)
def test_loss_is_zero_at_itself_and_positive_elsewhere(alpha):
    density, other = random_density(2, alpha), random_density(2, alpha, 1)
    assert density.fenchel_young(density) == 0
    same = make(density.mean.clone(), density.scale.clone(), alpha)
    assert density.fenchel_young(same) == 0
    assert density.fenchel_young(other) > 1e-2
    for size in (1e-2, 1e-4, 1e-6):
        near = make(density.mean + size, density.scale * (1 + size), alpha)
        assert density.fenchel_young(near) >= -1e-15


@given(alpha=st.floats(1.0, 4.0), first=st.integers(0, 99), second=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_loss_is_never_negative(alpha, first, second):
    loss = random_density(2, alpha, first).fenchel_young(random_density(2, alpha, second))
    assert loss >= -1e-13
    assert loss.isfinite()


def test_loss_of_gaussians_is_the_divergence():
    ours, target = random_density(3, 1.0), random_density(3, 1.0, 1)
    expected = kl_divergence(
        MultivariateNormal(target.mean, target.scale), MultivariateNormal(ours.mean, ours.scale)
    )
    assert_near(ours.fenchel_young(target), expected, 1e-13)


@pytest.mark.parametrize("alpha", [1.25, 2.0, 3.0])
def test_loss_is_its_definition(alpha):
    """Omega*(f) + Omega(q) - E_q[f] on a line, with Omega*(f) = E_p[f] - Omega(p) by quadrature."""
    ours, target = random_density(1, alpha), random_density(1, alpha, 1)

    def score(t):
        return -((t - ours.mean.numpy()) ** 2)[:, 0] / (2 * ours.scale.item())

    def parts(density):
        operands = density.mean.numpy(), density.scale.numpy(), alpha
        mean_score = reference.expectation(score, *operands, 40)
        power = reference.expectation(
            lambda t: reference.density(t, *operands) ** (alpha - 1), *operands, 40
        )
        return mean_score, (power - 1) / (alpha * (alpha - 1))

    (own_score, own_omega), (score_of_target, omega) = parts(ours), parts(target)
    definition = own_score - own_omega + omega - score_of_target
    assert_near(ours.fenchel_young(target), definition, 1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_of_the_loss_is_the_difference_of_statistics(alpha):
    density, target = random_density(2, alpha), random_density(2, alpha, 1)
    theta = [x.clone().requires_grad_() for x in density.canonical()]
    rest = () if alpha in (1, 2) else (alpha,)
    made = type(density).from_canonical(*theta, *rest)
    first, second = torch.autograd.grad(made.fenchel_young(target), theta)

    def moments(x):
        return x.mean, x.covariance_matrix + x.mean.unsqueeze(-1) * x.mean.unsqueeze(-2)

    expected = [x - y for x, y in zip(moments(density), moments(target), strict=True)]
    assert_near(first, expected[0], 1e-12)
    assert_near(second, expected[1], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_in_low_precision_is_not_negative(dtype):
    mean = torch.tensor([0.3, -0.2], dtype=dtype)
    scale = torch.tensor([[0.5, 0.125], [0.125, 1.0]], dtype=dtype)
    for step in (0.0, 1e-3, 1e-2):
        near = fc.Paraboloid(mean + step, scale * (1 + step))
        loss = fc.Paraboloid(mean, scale).fenchel_young(near)
        assert loss.dtype == torch.float32
        assert -1e-6 <= loss <= 1e-2


# ---- optimality


def objective(p, score, alpha, width):
    """E_p[f] - Omega_alpha(p) of grid densities (..., n)."""
    safe = np.where(p > 0, p, 1.0)
    omega = p * np.log(safe) if alpha == 1 else p**alpha / (alpha * (alpha - 1))
    return ((p * score - omega) * width).sum(-1)


def beaten_by(p, t, score, alpha, rng):
    """How much better the best of 200 perturbed densities is than p, on a grid."""
    width = t[1] - t[0]
    p = p / (p.sum() * width)
    bumps = np.exp(-((t - rng.uniform(t[0], t[-1], (200, 1))) ** 2) / 0.05)
    size = 10 ** rng.uniform(-4, 0, (200, 1)) * rng.choice([-1, 1], (200, 1))
    other = np.maximum(p + size * bumps, 0) * (1 + size * np.sin(3 * t))
    other = np.maximum(other, 0)
    other /= other.sum(-1, keepdims=True) * width
    best = objective(other, score, alpha, width).max()
    return best - objective(p, score, alpha, width)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_other_density_does_better(alpha):
    rng = np.random.default_rng(0)
    (mean,), scale = parameters(1)
    t = mean + np.linspace(-8, 8, 4001)
    score = -((t - mean) ** 2) / (2 * scale[0, 0])
    p = make([mean], scale, alpha).prob(torch.from_numpy(t[:, None])).numpy()
    assert beaten_by(p, t, score, alpha, rng) <= 1e-9
    # The checker sees that a density for another alpha, or another scale, is not the best one.
    other = make([mean], 1.2 * scale, alpha).prob(torch.from_numpy(t[:, None])).numpy()
    assert objective(p, score, alpha, 0.004) > objective(other, score, alpha, 0.004)
    assert beaten_by(other, t, score, alpha, rng) > 1e-6


# ---- shapes and precision


def test_batches_broadcast():
    mean = torch.randn(4, 1, 2, dtype=DOUBLE)
    scale = torch.stack([torch.eye(2, dtype=DOUBLE), 2 * torch.eye(2, dtype=DOUBLE)])
    alpha = torch.tensor([[[1.0]], [[1.5]], [[3.0]]], dtype=DOUBLE)
    density = fc.TsallisGaussian(mean, scale, alpha)
    assert density.batch_shape == (3, 4, 2)
    assert density.event_shape == (2,)
    points = torch.randn(5, 1, 1, 1, 2, dtype=DOUBLE)
    assert density.log_prob(points).shape == (5, 3, 4, 2)
    for i, j, k in ((0, 1, 0), (1, 3, 1), (2, 0, 1)):
        one = fc.TsallisGaussian(mean[j, 0], scale[k], alpha[i, 0, 0].item())
        assert_near(density.log_prob(points)[:, i, j, k].exp(), one.prob(points[:, 0, 0, 0]), 1e-15)
        for name in ("covariance_matrix", "log_peak", "variance"):
            assert_near(getattr(density, name)[i, j, k], getattr(one, name), 1e-15)
        assert_near(density.entropy()[i, j, k], one.entropy(), 1e-15)
        assert_near(density[i, j, k].entropy(), one.entropy(), 1e-15)
        assert density.level[i, j, k] == one.level


def test_expand_and_index():
    mean = torch.arange(12.0, dtype=DOUBLE).reshape(2, 3, 2)
    alpha = torch.tensor([1.2, 1.5, 2.0], dtype=DOUBLE)
    density = fc.TsallisGaussian(mean, torch.eye(2, dtype=DOUBLE), alpha)
    wide = density.expand((4, 2, 3))
    assert wide.batch_shape == (4, 2, 3)
    assert torch.equal(wide.mean[2], mean)
    assert torch.equal(wide.entropy()[1], density.entropy())
    mask = torch.tensor([[True, False, True], [False, True, False]])
    picked = torch.tensor([1, 0])
    for index in (0, (0, 1), (slice(None), 2), (..., 1), mask, None, (picked, picked), slice(1, 2)):
        chosen = density[index]
        number = torch.arange(6).reshape(2, 3)[index]
        assert torch.equal(chosen.mean, mean.reshape(6, 2)[number])
        assert torch.equal(chosen.entropy(), density.entropy()[index])
        assert chosen.batch_shape == density.entropy()[index].shape
    with pytest.raises(IndexError):
        density[2]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_single_precision(alpha):
    mean, scale = (torch.from_numpy(x).float() for x in parameters(2))
    density, exact = make(mean, scale, alpha), make(mean.double(), scale.double(), alpha)
    points = mean + 0.3 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    for name in ("mean", "covariance_matrix", "log_peak"):
        assert getattr(density, name).dtype == torch.float32
        assert_near(getattr(density, name), getattr(exact, name), 2e-6)
    assert density.log_prob(points).dtype == torch.float32
    assert_near(density.prob(points), exact.prob(points.double()), 5e-6)
    assert_near(density.entropy(), exact.entropy(), 2e-6)
    assert density.sample().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    mean, scale = (torch.from_numpy(x).to(dtype) for x in parameters(2))
    scale = (scale + scale.mT) / 2
    density, exact = fc.Paraboloid(mean, scale), fc.Paraboloid(mean.double(), scale.double())
    assert density.mean.dtype == torch.float32
    assert_near(density.covariance_matrix, exact.covariance_matrix, 2e-6)
    assert_near(density.log_prob(mean), exact.log_peak, 2e-6)
    for family in (fc.Gaussian, fc.Paraboloid):
        low, high = (family.from_canonical(mean.to(t), -scale.to(t)) for t in (dtype, DOUBLE))
        assert_near(low.mean, high.mean, 1e-5)
        assert_near(low.scale, high.scale, 1e-5)
        low, high = (family.from_covariance(mean.to(t), scale.to(t)) for t in (dtype, DOUBLE))
        assert_near(low.scale, high.scale, 1e-5)


def test_memory_layout_does_not_matter():
    scale = torch.from_numpy(parameters(2)[1])
    mean = torch.randn(2, 6, dtype=DOUBLE).mT  # (6, 2), not contiguous
    points = torch.randn(2, 5, 6, dtype=DOUBLE).permute(1, 2, 0)[:, ::1]
    odd = fc.Paraboloid(mean, scale.mT).log_prob(points)
    plain = fc.Paraboloid(mean.contiguous(), scale).log_prob(points.contiguous())
    assert torch.equal(odd, plain)


def test_one_alpha_for_each():
    alpha = torch.tensor([1.0, 1.0 + 1e-12, 1.05, 1.5, 2.0, 4.0], dtype=DOUBLE)
    mean, scale = (torch.from_numpy(x) for x in parameters(2))
    density = fc.TsallisGaussian(mean, scale, alpha)
    matched = fc.TsallisGaussian.from_covariance(mean, scale, alpha)
    assert_near(matched.covariance_matrix, scale.expand(6, 2, 2), 1e-13)
    torch.manual_seed(0)
    samples = density.sample((4000,))
    for k, value in enumerate(alpha.tolist()):
        one = make(mean, scale, value)
        point = mean + 0.2
        assert_near(density.log_prob(point)[k], one.log_prob(point), 1e-14)
        assert_near(density.entropy()[k], one.entropy(), 1e-14)
        assert_near(density.covariance_matrix[k], one.covariance_matrix, 1e-14)
        assert_near(density[k].fenchel_young(one if value > 1 else density[k]), 0.0, 1e-14)
        assert_mean(samples[:, k], mean)
        assert_mean((samples[:, k] - mean) ** 2, one.variance)


def test_an_empty_batch():
    density = fc.Paraboloid(torch.zeros(0, 2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE))
    assert density.batch_shape == (0,)
    assert density.log_prob(torch.zeros(2, dtype=DOUBLE)).shape == (0,)
    assert density.entropy().shape == (0,)
    assert density.sample((3,)).shape == (3, 0, 2)
