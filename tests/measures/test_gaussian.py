"""Gaussian measures: closed forms, quadrature of polynomials, samples."""

import pytest
import torch

from fenchel.measures import (
    Affine,
    Deterministic,
    GaussianMeasure,
    Gaussians,
    Lookup,
    MomentProjection,
    Residual,
)

from .draws import F64, close, generator, normal


def draw(d=2, seed=0, batch=()):
    root = normal(*batch, d, d, seed=seed)
    return GaussianMeasure(normal(*batch, d, seed=seed + 1), root @ root.mT)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_quadrature_has_the_moments(d):
    g = draw(d)
    rule = g.quadrature(6)
    assert rule.size == 6**d
    assert close(rule.mean, g.mean, 1e-13)
    assert close(rule.covariance, g.covariance, 1e-12)


def test_quadrature_is_exact_up_to_its_degree_and_no_further():
    standard = GaussianMeasure(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))

    def moment(degree, order):
        return float(standard.expectation(lambda x: x[..., 0] ** degree, order=order))

    assert moment(6, 4) == pytest.approx(15, rel=1e-12)  # (2k - 1)!!
    assert abs(moment(8, 4) - 105) > 1  # degree 8 > 2 * 4 - 1
    assert moment(8, 5) == pytest.approx(105, rel=1e-12)


def test_expectation_of_an_exponential():
    g = draw(2, batch=(3,))
    u = normal(2, seed=5) / 4
    expected = (g.mean @ u + 0.5 * (g.covariance @ u) @ u).exp()
    expectation = g.expectation(lambda x: (x @ u).exp(), order=30)
    assert close(expectation, expected, 1e-11)
    assert g.expectation(lambda x: x, order=3).shape == (3, 2)


def test_push_forward_is_exact():
    g, a, b = draw(3), normal(2, 3, seed=3), normal(2, seed=4)
    pushed = g.push(a, b)
    assert close(pushed.mean, a @ g.mean + b, 1e-14)
    assert close(pushed.covariance, a @ g.covariance @ a.mT, 1e-13)
    for kernel in (
        Lookup(Affine(a, b)),
        Deterministic(a) @ Deterministic(Affine(torch.eye(2).double(), b)),
    ):
        again = g @ kernel
        assert close(again.mean, pushed.mean, 1e-14)
        assert close(again.covariance, pushed.covariance, 1e-13)


def test_linear_modules_are_affine():
    layer = torch.nn.Linear(2, 3).double()
    g = draw(2)
    assert close((g @ Lookup(layer)).mean, layer(g.mean), 1e-15)
    with pytest.raises(TypeError, match=r"not known to be affine.*sample"):
        g @ Lookup(torch.nn.Sequential(layer, torch.nn.Tanh()))


def test_affine_maps_compose_with_their_offsets():
    first, second = Affine(normal(2, 3), normal(2, seed=1)), Affine(normal(4, 2), normal(4, seed=2))
    whole = (Deterministic(first) @ Deterministic(second)).affine()
    x = normal(5, 3, seed=3)
    assert close(whole(x), second(first(x)), 1e-14)
    bare = Deterministic(first) @ Deterministic(second.matrix)
    assert close(bare.affine()(x), first(x) @ second.matrix.mT, 1e-14)


def test_residuals_and_means_of_affine_maps_are_affine():
    g, matrix, offset = draw(2), normal(2, 2), normal(2, seed=5)
    step = Deterministic(Affine(matrix, offset))
    whole = torch.eye(2, dtype=matrix.dtype) + matrix
    for kernel in (Residual(step), MomentProjection()(Residual(step))):
        moved = g @ kernel
        assert close(moved.mean, whole @ g.mean + offset, 1e-14)
        assert close(moved.covariance, whole @ g.covariance @ whole.mT, 1e-14)
    x = normal(3, 2, seed=6)
    assert close(Residual(step).affine()(x), Residual(step).at(x).mean, 1e-14)
    assert MomentProjection(family=Gaussians())(step).affine() is None


def test_convolution_adds():  # Vuckovic et al., 2020, definition 13
    a, b = draw(2, 0), draw(2, 7)
    both = a.convolve(b)
    assert close(both.mean, a.mean + b.mean, 0.0)
    assert close(both.covariance, a.covariance + b.covariance, 1e-15)


def test_a_covariance_of_zero_is_a_dirac():
    point = normal(2)
    g = GaussianMeasure(point, torch.zeros(2, 2, dtype=F64))
    assert close(g.expectation(torch.sin), point.sin(), 1e-13)
    assert close(g.sample(3, generator(0)).points, point.expand(3, 2), 0.0)


def test_samples_follow_their_generator():
    g = draw(4, batch=(2,))
    one, two = g.sample(7, generator(1)), g.sample(7, generator(1))
    assert close(one.points, two.points, 0.0)
    assert one.points.shape == (2, 7, 4)
    many = g.sample(200_000, generator(2))
    spread = g.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((many.mean - g.mean).abs() < 5 * spread / 200_000**0.5).all()


def test_derivatives_of_an_expectation():
    def function(mean, root):
        g = GaussianMeasure(mean, root @ root.mT + torch.eye(2, dtype=F64))
        return g.expectation(lambda x: (x.sin() * x.flip(-1)).sum(-1), order=8)

    leaves = (normal(2).requires_grad_(), normal(2, 2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(function, leaves)


def test_the_density_is_that_of_the_continuous_room():
    g = draw(2)
    x = normal(2, seed=8)
    expected = torch.distributions.MultivariateNormal(g.mean, g.covariance).log_prob(x)
    assert close(g.density.log_prob(x), expected, 1e-12)
