"""Derivatives of expected basis functions, and torch.func through them."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.checks import assert_near
from tests.continuous.families import DOUBLE, make, positive, root

BASES = (fc.GaussianBasis, fc.ParaboloidBasis)


def case(d):
    """A density inside the functions' reach: leaf tensors and centres and squares of two."""
    mean = torch.tensor([0.1, -0.2][:d], dtype=DOUBLE, requires_grad=True)
    generator = torch.Generator().manual_seed(d)
    centres = 0.5 * torch.randn(2, d, dtype=DOUBLE, generator=generator)
    return mean, root(d, 3), centres.requires_grad_(), root(d, 5)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
def test_in_mean_and_scale(d, basis, alpha):
    mean, factor, centres, basis_factor = case(d)
    functions = basis(centres.detach(), positive(basis_factor.detach()))

    def expected(m, r):
        return make(m, positive(r), alpha).expect(functions, 1e-6)

    assert gradcheck(expected, (mean, factor))
    assert gradgradcheck(expected, (mean, factor))


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("alpha", [1.05, 1.4])
def test_in_alpha(d, alpha):
    mean, factor, centres, basis_factor = case(d)
    functions = fc.GaussianBasis(centres.detach(), positive(basis_factor.detach()))
    inputs = (mean, torch.tensor(alpha, dtype=DOUBLE, requires_grad=True))

    def expected(m, a):
        return fc.TsallisGaussian(m, positive(factor.detach()), a).expect(functions, 1e-8)

    assert gradcheck(expected, inputs)
    assert gradgradcheck(expected, inputs)


@pytest.mark.parametrize("basis", BASES)
def test_slope_in_alpha_at_one(basis):
    """From the right, against differences of the values at alpha = 1, 1 + h, ..., 1 + 4 h."""
    functions = basis(torch.tensor([[0.4]], dtype=DOUBLE), 0.5 * torch.eye(1, dtype=DOUBLE))

    def at(alpha):
        density = fc.TsallisGaussian(
            torch.zeros(1, dtype=DOUBLE), torch.eye(1, dtype=DOUBLE), alpha
        )
        return density.expect(functions, 1e-12)[0]

    alpha = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    (slope,) = torch.autograd.grad(at(alpha), alpha)
    h = 2e-3
    values = [at(torch.tensor(1 + k * h, dtype=DOUBLE)).item() for k in range(5)]
    expected = np.dot([-25, 48, -36, 16, -3], values) / (12 * h)
    assert abs(expected) > 1e-3
    # Functions with an edge have the slope of a chord that is 1e-4 long.
    bend = abs(values[2] - 2 * values[1] + values[0]) / h**2
    assert_near(slope, expected, 1e-6 if basis is fc.GaussianBasis else 1e-4 * bend)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_in_the_basis(d, basis, alpha):
    mean, factor, centres, basis_factor = case(d)

    def expected(c, o):
        density = make(mean.detach(), positive(factor.detach()), alpha)
        return density.expect(basis(c, positive(o)), 1e-6)

    assert gradcheck(expected, (centres, basis_factor))
    assert gradgradcheck(expected, (centres, basis_factor))


def test_in_density_and_basis_at_once():
    inputs = case(1)

    def expected(m, r, c, o):
        return fc.Paraboloid(m, positive(r)).expect(fc.GaussianBasis(c, positive(o)), 1e-6)

    assert gradcheck(expected, inputs)
    assert gradgradcheck(expected, inputs)


def test_gaussian_basis_gradients_of_the_thesis():
    """Eqs. 4.11 and 4.12: the Jacobian in (theta1, theta2) is a covariance with the statistics."""
    mean, factor, centres, basis_factor = case(2)
    scale, covariance = (positive(x.detach()) for x in (factor, basis_factor))
    functions = fc.GaussianBasis(centres.detach(), covariance)
    density = fc.Gaussian(mean.detach(), scale)
    theta = [x.clone().requires_grad_() for x in density.canonical()]
    values = fc.Gaussian.from_canonical(*theta).expect(functions)
    for j in range(2):
        first, second = torch.autograd.grad(values[j], theta, retain_graph=True)
        # psi p is a Gaussian with these moments, times E[psi].
        inverse = torch.linalg.inv(torch.linalg.inv(scale) + torch.linalg.inv(covariance))
        middle = inverse @ (
            torch.linalg.solve(scale, density.mean)
            + torch.linalg.solve(covariance, functions.centers[j])
        )
        second_moment = inverse + torch.outer(middle, middle)
        own_moment = scale + torch.outer(density.mean, density.mean)
        assert_near(first, values[j] * (middle - density.mean), 1e-12)
        assert_near(second, values[j] * (second_moment - own_moment), 1e-12)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_jacobian_is_the_generalised_covariance(alpha):
    """Eqs. 3.20 and 4.14, beta = 2 - alpha: for alpha = 2 the uniform density, eq. A.24."""
    mean, scale = np.array([0.1, -0.2]), np.array([[0.6, 0.1], [0.1, 0.4]])
    centre, covariance = np.array([[0.3, 0.2]]), 0.2 * np.eye(2)
    density = make(mean, scale, alpha)
    theta = [x.clone().requires_grad_() for x in density.canonical()]
    rest = () if alpha == 2 else (alpha,)
    basis = fc.GaussianBasis(torch.from_numpy(centre), torch.from_numpy(covariance))
    value = type(density).from_canonical(*theta, *rest).expect(basis, 1e-10)
    first, second = torch.autograd.grad(value[0], theta)

    # p^(2 - alpha) is a power q of 1 - |u|^2: a law of the family with another alpha.
    q = (2 - alpha) / (alpha - 1)
    other = 1 + 1 / q if q else np.inf
    u, share = reference.ball_rule(other, 2, 60)
    peak, radius = reference.peak_and_radius(scale, alpha)
    t = mean + radius * u @ np.linalg.cholesky(scale).T
    mass = peak ** (2 - alpha) * radius**2 * np.sqrt(np.linalg.det(scale))
    weight = mass * reference.ball_integral(other, 2) * share
    psi = reference.normal(t, centre[0], covariance)
    phi = np.concatenate([t, (t[:, :, None] * t[:, None, :]).reshape(-1, 4)], -1)
    expected = weight * psi @ phi - (weight @ psi) * (weight @ phi) / weight.sum()
    assert_near(first, expected[:2], 1e-8)
    assert_near(second.reshape(-1), expected[2:], 1e-8)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_vmap_and_jvp(basis, alpha):
    _, factor, centres, basis_factor = case(2)
    functions = basis(centres.detach(), positive(basis_factor.detach()))
    means = 0.2 * torch.randn(3, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    scale = positive(factor.detach())

    def expected(m):
        return make(m, scale, alpha).expect(functions, 1e-8)

    # Inside a transform the rule is another one: both keep the tolerance.
    bar = 1e-6 if basis is fc.ParaboloidBasis and alpha > 1 else 1e-8
    assert_near(torch.func.vmap(expected)(means), expected(means), bar)
    direction = torch.tensor([0.3, -1.0], dtype=DOUBLE)
    value, slope = torch.func.jvp(expected, (means[0],), (direction,))
    leaf = means[0].clone().requires_grad_()
    plain = expected(leaf)
    rows = [torch.autograd.grad(x, leaf, retain_graph=True)[0] @ direction for x in plain]
    assert_near(value, plain, bar)
    assert_near(slope, torch.stack(rows), 10 * bar)
    jacobian = torch.func.vmap(torch.func.jacrev(expected))(means)
    assert jacobian.shape == (3, 2, 2)
    assert_near(jacobian[0] @ direction, slope, 10 * bar)


def test_forward_mode_without_a_transform():
    import torch.autograd.forward_ad as forward

    functions = fc.GaussianBasis(torch.tensor([[0.4]], dtype=DOUBLE), torch.eye(1, dtype=DOUBLE))
    with forward.dual_level():
        mean = forward.make_dual(torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE))
        value = fc.Paraboloid(mean, torch.eye(1, dtype=DOUBLE)).expect(functions)
        slope = forward.unpack_dual(value).tangent
    leaf = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    expected = fc.Paraboloid(leaf, torch.eye(1, dtype=DOUBLE)).expect(functions)
    assert_near(slope, torch.autograd.grad(expected[0], leaf)[0], 1e-9)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_gradients_of_two_paraboloids(alpha):
    """In the mean, against Richardson's differences of our own values."""
    rng = np.random.default_rng(2)
    ours, expected, h = [], [], 1e-4
    for _ in range(8):
        mean, centre = rng.uniform(0, 1, (2, 2))
        scale, basis_scale = (reference.random_spd(rng, 2, 1e-2, 1.0) for _ in range(2))
        leaf = torch.from_numpy(mean).requires_grad_()
        basis = fc.ParaboloidBasis(torch.from_numpy(centre[None]), torch.from_numpy(basis_scale))
        value = make(leaf, torch.from_numpy(scale), alpha).expect(basis)
        ours.append(torch.autograd.grad(value[0], leaf)[0])
        at = [
            [
                reference.overlap(mean + k * h * axis, scale, alpha, centre, basis_scale, 80)
                for k in range(-2, 3)
            ]
            for axis in np.eye(2)
        ]
        expected.append([np.dot([1, -8, 0, 8, -1], line) / (12 * h) for line in at])
    assert np.abs(expected).max() > 0.1
    assert_near(torch.stack(ours), expected, 1e-5)


# ---- one function on a line


BASIS = fc.GaussianBasis(torch.tensor([[1.0]], dtype=DOUBLE), torch.eye(1, dtype=DOUBLE))
ONE = torch.eye(1, dtype=DOUBLE)


def slope_in_mean(density, basis=BASIS):
    mean = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    return torch.autograd.grad(density(mean).expect(basis).sum(), mean)[0]


@pytest.mark.parametrize("basis", [BASIS, fc.ParaboloidBasis(BASIS.centers, ONE)])
def test_a_tensor_alpha_of_one_is_the_gaussian(basis):
    alpha = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    expected = slope_in_mean(lambda m: fc.Gaussian(m, ONE), basis)
    torch.testing.assert_close(
        slope_in_mean(lambda m: fc.TsallisGaussian(m, ONE, alpha), basis),
        expected,
        rtol=1e-8,
        atol=0,
    )
    actual = fc.TsallisGaussian(torch.zeros(1, dtype=DOUBLE), ONE, alpha).expect(basis).sum()
    (slope,) = torch.autograd.grad(actual, alpha)
    ahead = fc.TsallisGaussian(torch.zeros(1, dtype=DOUBLE), ONE, 1.001).expect(basis).sum()
    assert abs(float((ahead - actual.detach()) / 1e-3 / slope) - 1) < 0.01


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.7])
def test_forward_mode_agrees_with_reverse_mode(alpha):
    def expected(mean):
        return fc.TsallisGaussian(mean, ONE, alpha).expect(BASIS)

    mean = torch.tensor([0.3], dtype=DOUBLE)
    forward = torch.func.jvp(expected, (mean,), (torch.ones(1, dtype=DOUBLE),))[1]
    torch.testing.assert_close(forward, torch.func.jacrev(expected)(mean)[:, 0])
    assert torch.func.hessian(lambda m: expected(m).sum())(mean).isfinite().all()
