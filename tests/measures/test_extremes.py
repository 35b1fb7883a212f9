"""Measures of tiny and huge extent, without mass, without batch, and what is refused clearly."""

import math

import numpy as np
import pytest
import torch

from fenchel import measures as fm
from fenchel.measures import (
    Empirical,
    GaussianMeasure,
    entropic_wasserstein1,
    transport_plan,
    wasserstein1,
)

D = torch.float64


def points(*rows):
    return torch.tensor(rows, dtype=D)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


# ---- Wasserstein


LEFT, RIGHT = points([0.0, 0], [1, 0]), points([0.5, 0.25], [0.2, 0])


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 10, 100, 2000, 1e300, math.inf])
@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-4, 10.0, 1e160, 1e300])
def test_the_distance_scales_with_the_points(p, scale):
    cost = np.linalg.norm(LEFT.numpy()[:, None] - RIGHT.numpy()[None], ord=min(p, 300), axis=-1)
    if p > 300:
        cost = np.abs(LEFT.numpy()[:, None] - RIGHT.numpy()[None]).max(-1)
    true = min(cost[0, 0] + cost[1, 1], cost[0, 1] + cost[1, 0]) / 2
    distance = wasserstein1(Empirical(LEFT * scale), Empirical(RIGHT * scale), norm=p)
    assert float(distance) / scale == pytest.approx(true, rel=1e-12)


def test_distinct_measures_are_apart():
    def apart(gap, p):
        return float(
            wasserstein1(Empirical(points([0.0, 0.0])), Empirical(points([gap, 0.0])), norm=p)
        )

    assert apart(1e-4, 100) == pytest.approx(1e-4)
    assert apart(0.5, 2000) == pytest.approx(0.5)
    assert apart(1e-170, 2) / 1e-170 == pytest.approx(1.0)


@pytest.mark.parametrize("p", [2, 3, 100])
def test_small_distances_beside_large_ones(p):
    mu = Empirical(points([0.0, 0], [1e10, 0]))
    nu = Empirical(points([1e-170, 0.0], [1e10, 0]))
    assert float(wasserstein1(mu, nu, norm=p)) / 1e-170 == pytest.approx(0.5)


@pytest.mark.parametrize("p", [1.5, 2, 3, 50])
def test_slopes_of_general_norms(p):
    x, y = draw(3, 2).requires_grad_(), draw(3, 2, seed=1)
    assert torch.autograd.gradcheck(lambda x: wasserstein1(Empirical(x), Empirical(y), norm=p), [x])
    same = y.clone().requires_grad_()
    (slope,) = torch.autograd.grad(wasserstein1(Empirical(same), Empirical(y), norm=p), same)
    assert not slope.any()


def test_the_value_on_the_line_does_not_depend_on_derivatives():
    weights = points(0.0, 0.3, 0.2, 0.5)
    x = points([1e17], [0.3], [0.1], [0.7])
    nu = Empirical(points([0.1], [0.2], [0.9]), points(0.3, 0.6, 0.1))
    plain = wasserstein1(Empirical(x, weights), nu)
    assert float(plain) == pytest.approx(0.26, rel=1e-12)
    moving = wasserstein1(Empirical(x, weights.requires_grad_()), nu)
    assert torch.equal(plain, moving.detach())


def test_the_slope_in_a_weight_of_zero_is_that_of_its_atom():
    nu = Empirical(points([1.0], [10.0]))
    weights = points(0.0, 1.0).requires_grad_()
    value = wasserstein1(Empirical(points([5.0], [0.0]), weights), nu)
    (slope,) = torch.autograd.grad(value, weights)
    h = 1e-6
    far = wasserstein1(Empirical(points([5.0], [0.0]), points(h, 1 - h)), nu)
    assert float(slope[0] - slope[1]) == pytest.approx(float(far - value.detach()) / h, rel=1e-6)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_measures_at_all(d, weighted):
    weights = torch.ones(0, 3) / 3 if weighted else None
    mu, nu = Empirical(torch.zeros(0, 3, d), weights), Empirical(torch.zeros(0, 2, d))
    for p in (1, 2, 3):
        assert wasserstein1(mu, nu, norm=p).shape == (0,)
        assert transport_plan(mu, nu, norm=p).plan.shape == (0, 3, 2)
        distance = entropic_wasserstein1(mu, nu, norm=p)
        assert distance.upper.shape == distance.lower.shape == (0,)


@pytest.mark.parametrize("steps", [1, 5, 20, 200])
def test_bounds_with_masses_near_zero(steps):
    mu = Empirical(points([1.6e-6], [7.5e-7]), points(1.0, 0.0))
    masses = points(
        0.49093912415444557, 5.4096542493891334e-20, 4.196880048995005e-06, 0.5090566789655054
    )
    nu = Empirical.of_masses(points([1.6e-6], [7.5e-7], [1.6e-6], [1.6e-6]), masses)
    distance = entropic_wasserstein1(mu, nu, max_steps=steps)
    true = float(wasserstein1(mu, nu))
    assert float(distance.lower) <= true * (1 + 1e-9) + 1e-40
    assert true * (1 - 1e-9) <= float(distance.upper) < 1.6e-6


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_bounds_of_any_size(scale):
    mu, nu = Empirical(LEFT * scale), Empirical(RIGHT * scale)
    for regularization in (1e-300, 2e-3, 1e300):
        distance = entropic_wasserstein1(
            mu, nu, regularization=regularization, max_steps=200, tolerance=0
        )
        true = float(wasserstein1(mu, nu)) / scale
        assert float(distance.lower) / scale <= true + 1e-12
        assert float(distance.upper) / scale >= true - 1e-12


# ---- kernels


def test_one_key_keeps_the_batch():
    mu, key = Empirical(draw(2, 3, 2)), draw(1, 2, seed=1)
    match = fm.Softmatch(fm.Dot())(Empirical(key))
    table = fm.Lookup.table(key, draw(1, 3, seed=2))
    for first, second in ((match, table), (match, fm.Deterministic(draw(4, 2, seed=3)))):
        one, other = (mu @ first @ second).mean, (mu @ (first @ second)).mean
        assert one.shape == other.shape == (2, second.at(key).dim)
        torch.testing.assert_close(one, other)
    single = Empirical(draw(2, 1, 2))
    assert (match @ table).at(single.points).mean.shape == (2, 1, 3)
    assert single.expectation((match @ table) @ (lambda y: y.sin())).shape == (2, 3)


@pytest.mark.parametrize("size", [None, 1, 3])
def test_functions_of_kernels_with_more_axes_than_the_measure(size):
    def function(y):
        return (
            y.sin().sum(-1)
            if size is None
            else y.sin().sum(-1, keepdim=True).expand(*y.shape[:-1], size)
        )

    mu = Empirical(draw(3, 2), torch.tensor([0.5, 0.2, 0.3], dtype=D))
    match = fm.Softmatch(fm.Dot())(Empirical(draw(3, 4, 2, seed=1)))  # 3 batches, 3 points
    one, other = mu.expectation(match @ function), (mu @ match).expectation(function)
    assert one.shape == ((3,) if size is None else (3, size))
    torch.testing.assert_close(one, other)
    twice = fm.Deterministic(torch.eye(2, dtype=D)) @ (match @ function)
    torch.testing.assert_close(mu.expectation(twice), one)


# ---- what is refused


def test_messages():
    mu = Empirical(draw(4, 2))
    with pytest.raises(
        TypeError, match=r"gives torch\.bool and the measure is torch\.float64.*prob"
    ):
        mu.expectation(lambda x: x[..., 0] > 0)
    with pytest.raises(TypeError, match=r"gives torch\.float32 .* \.to\(torch\.float64\)"):
        mu.expectation(lambda x: x.float())
    with pytest.raises(TypeError, match=r"log_g must be floating-point, got torch\.int64"):
        fm.boltzmann_gibbs(torch.arange(4), mu)
    with pytest.raises(ValueError, match=r"there must be a feature, got \(4, 0\)"):
        fm.maximum_entropy(mu, torch.zeros(4, 0, dtype=D), torch.zeros(0, dtype=D))
    with pytest.raises(ValueError, match=r"a Gaussian needs a dimension, got a mean \(0,\)"):
        GaussianMeasure(torch.zeros(0), torch.zeros(0, 0))
    for measure in (mu, GaussianMeasure(torch.zeros(2), torch.eye(2))):
        with pytest.raises(ValueError, match=r"offset must be \(\.\.\., d\), got the number"):
            measure.translate(torch.tensor(1.0))
        with pytest.raises(ValueError, match="offset lives in dimension 3, the measure in 2"):
            measure.translate(torch.zeros(3))
    for shape in ((3, 4, 4), (1, 4, 4)):
        with pytest.raises(ValueError, match=r"broadcast to those of the measures, \(\), got \("):
            wasserstein1(mu, mu, norm=lambda x, y, shape=shape: torch.ones(shape))
