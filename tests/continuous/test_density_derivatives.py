"""Derivatives of densities: in mean, scale and alpha, and in alpha down to one."""

import math

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel.continuous as fc
from tests.continuous.families import DOUBLE, positive, root

EPSILONS = (0.0, 1e-12, 1e-8, 1e-4, 1e-2, 0.0999, 0.1001, 0.3, 1.0, 2.7)


def both(function, inputs):
    return gradcheck(function, inputs) and gradgradcheck(function, inputs)


@pytest.mark.parametrize(
    ("d", "alpha"),
    [(d, a) for d in (1, 2) for a in (1.05, 1.25, 1.7, 2.0, 3.3)] + [(3, 1.05), (3, 2.0), (4, 1.7)],
)
def test_in_mean_scale_and_alpha(d, alpha):
    inputs = (
        torch.zeros(d, dtype=DOUBLE).requires_grad_(),
        root(d),
        torch.tensor(alpha, dtype=DOUBLE, requires_grad=True),
    )
    points = 0.2 * torch.randn(2, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))

    def numbers(m, r, a):
        density = fc.TsallisGaussian(m, positive(r), a)
        covariance = density.covariance_matrix[0]  # a row: the others are alike
        return torch.cat([density.log_prob(points), density.entropy().reshape(1), covariance])

    assert numbers(*inputs).isfinite().all()
    assert both(numbers, inputs)


@pytest.mark.parametrize("family", [fc.Gaussian, fc.Paraboloid])
def test_of_the_special_classes(family):
    inputs = (torch.zeros(2, dtype=DOUBLE).requires_grad_(), root(2))
    points = 0.2 * torch.randn(3, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    assert both(lambda m, r: family(m, positive(r)).log_prob(points), inputs)
    assert both(lambda r: family(inputs[0].detach(), positive(r)).entropy(), inputs[1:])
    assert both(lambda r: family.from_covariance(inputs[0].detach(), positive(r)).scale, inputs[1:])
    other = family(torch.ones(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE))
    assert both(lambda m, r: family(m, positive(r)).fenchel_young(other), inputs)
    assert both(lambda m, r: other.fenchel_young(family(m, positive(r))), inputs)


def test_from_covariance_in_alpha():
    inputs = (root(2), torch.tensor(1.4, dtype=DOUBLE, requires_grad=True))
    zero = torch.zeros(2, dtype=DOUBLE)
    assert both(lambda r, a: fc.TsallisGaussian.from_covariance(zero, positive(r), a).scale, inputs)


def test_second_derivatives_in_points():
    points = torch.tensor([[0.1, 0.2], [-0.2, 0.1]], dtype=DOUBLE, requires_grad=True)
    for alpha in (1.0, 1.5, 2.0):
        density = fc.TsallisGaussian(
            torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE), alpha
        )
        assert both(density.log_prob, (points,))


# ---- alpha next to one, with 60 digits


def exact(eps, d, half_log_det, squared):
    """log peak, log p at z^2 = squared, entropy and covariance / scale, from the definitions."""
    if eps == 0:
        peak = -mpmath.mpf(d) / 2 * mpmath.log(2 * mpmath.pi) - half_log_det
        return peak, peak - squared / 2, mpmath.mpf(d) / 2 - peak, mpmath.mpf(1)
    s, half = 1 / eps, mpmath.mpf(d) / 2
    log_ball = half * mpmath.log(mpmath.pi) + mpmath.loggamma(s + 1) - mpmath.loggamma(s + 1 + half)
    peak = -(half_log_det + log_ball + half * mpmath.log(2 * s)) / (1 + half * eps)
    rho = mpmath.exp(eps * peak)
    log_p = peak + s * mpmath.log(1 - eps * squared / (2 * rho))
    power = rho * (2 + 2 * eps) / (2 + (d + 2) * eps)
    return peak, log_p, (1 - power) / (eps * (1 + eps)), 2 * rho / (2 + (d + 2) * eps)


def exact_with_slope(eps, *rest):
    """By a right-hand difference of fourth order."""
    h = mpmath.mpf("1e-9")
    values = [exact(eps + k * h, *rest) for k in range(5)]
    slopes = [(-25 * a + 48 * b - 36 * c + 16 * d - 3 * e) / (12 * h)
              for a, b, c, d, e in zip(*values, strict=True)]  # fmt: skip
    return values[0], slopes


def error(ours, theirs):
    return max(abs(mpmath.mpf(a) - b) / (1 + abs(b)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("d", [1, 2, 6])
@pytest.mark.parametrize("eps", EPSILONS)
def test_values_and_slopes_in_alpha(eps, d):
    alpha = torch.tensor(1 + eps, dtype=DOUBLE)
    scale = torch.diag(torch.linspace(0.3, 1.5, d, dtype=DOUBLE))
    point = torch.full((d,), 0.3 / math.sqrt(d), dtype=DOUBLE)

    def numbers(a):
        density = fc.TsallisGaussian(torch.zeros(d, dtype=DOUBLE), scale, a)
        actual = density.log_peak, density.log_prob(point), density.entropy()
        return torch.stack([*actual, density.covariance_matrix[0, 0] / scale[0, 0]])

    values, slopes = torch.func.jvp(numbers, (alpha,), (torch.ones_like(alpha),))
    with mpmath.workdps(60):
        diagonal = [mpmath.mpf(x) for x in scale.diagonal().tolist()]
        squared = sum(mpmath.mpf(x) ** 2 / s for x, s in zip(point.tolist(), diagonal, strict=True))
        half_log_det = sum(mpmath.log(x) for x in diagonal) / 2
        real = mpmath.mpf(alpha.item()) - 1  # what the float holds
        expected, expected_slopes = exact_with_slope(real, d, half_log_det, squared)
        assert error(values.tolist(), expected) < 1e-14
        assert error(slopes.tolist(), expected_slopes) < 1e-12
        wrong = [x + 1e-9 for x in expected]
        assert error(values.tolist(), wrong) > 1e-10


def test_curvature_in_alpha_is_continuous_through_one():
    def entropy(a):
        zero, eye = torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE)
        return fc.TsallisGaussian(zero, eye, a).entropy()

    second = torch.func.grad(torch.func.grad(entropy))
    at = [second(torch.tensor(1 + e, dtype=DOUBLE)).item() for e in (0, 1e-12, 1e-8, 1e-6, 1e-2)]
    slope = abs(at[-1] - at[0]) / 1e-2
    assert slope > 0.1
    assert all(abs(value - at[0]) <= 2 * slope * 1e-6 + 1e-9 for value in at[:-1])


def test_rsample_has_the_derivative_in_alpha_at_one():
    """E[t^2] = the variance, of which the derivative is known; without one it would be -0.93."""
    torch.manual_seed(0)
    alpha = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    density = fc.TsallisGaussian(torch.zeros(1, dtype=DOUBLE), torch.eye(1, dtype=DOUBLE), alpha)
    (expected,) = torch.autograd.grad(density.variance.sum(), alpha, retain_graph=True)
    slopes = []
    for _ in range(30):
        each = density.rsample((200_000,)).square().mean()
        slopes.append(torch.autograd.grad(each, alpha, retain_graph=True)[0])
    actual = torch.stack(slopes)
    error = actual.std() / 30**0.5
    assert error < 0.2
    assert (actual.mean() - expected).abs() < 4 * error
