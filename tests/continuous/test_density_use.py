"""Densities: samples, the loss, optimality, shapes and precision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import MultivariateNormal, kl_divergence

import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.checks import assert_mean, assert_near
from tests.continuous.families import ALPHAS, DOUBLE, make, parameters, random_density

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
        gradients = torch.autograd.grad(((t @ a) ** 2 + t @ b).mean(), inputs)
        return torch.cat([x.reshape(-1) for x in gradients])

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
    actual = type(density).from_canonical(*theta, *rest)
    first, second = torch.autograd.grad(actual.fenchel_young(target), theta)

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
