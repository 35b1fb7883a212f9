"""Empirical measures against sums written out."""

import math

import pytest
import torch

from fenchel.measures import Dirac, Empirical, GaussianMeasure, mixture

from .draws import F64, close, measure, normal, shares


def test_moments_are_the_sums():
    mu = measure(5, 2, batch=(4,))
    for b in range(4):
        x, w = mu.points[b], mu.weights[b]
        mean = sum(w[i] * x[i] for i in range(5))
        spread = sum(w[i] * torch.outer(x[i] - mean, x[i] - mean) for i in range(5))
        assert close(mu.mean[b], mean, 1e-15)
        assert close(mu.covariance[b], spread, 1e-14)
        assert close(mu.expectation(lambda y: y.sin().sum(-1))[b], (w * x.sin().sum(-1)).sum())
        assert close(mu.expectation(torch.sin)[b], w @ x.sin(), 1e-15)


def test_uniform_weights_are_the_default():
    mu = Empirical(normal(4, 3, 2))
    assert close(mu.weights, torch.full((4, 3), 1 / 3, dtype=F64), 0.0)
    assert (mu.size, mu.dim, mu.batch_shape) == (3, 2, (4,))


def test_points_may_be_shared_by_a_batch_of_weights():
    points, weights = normal(5, 2), shares(3, 5)
    mu = Empirical(points, weights)
    assert mu.batch_shape == (3,)
    assert mu.points.shape == (5, 2)  # not copied
    assert close(mu.mean, weights @ points, 1e-15)
    each = torch.stack([Empirical(points, w).covariance for w in weights])
    assert close(mu.covariance, each, 1e-15)
    assert close(mu.expectation(lambda x: x[..., 0]), weights @ points[:, 0], 1e-15)


def test_weights_may_be_shared_by_a_batch_of_points():
    points, weights = normal(3, 5, 2), shares(5)
    mu = Empirical(points, weights)
    assert close(mu.mean, torch.stack([weights @ p for p in points]), 1e-15)


def test_masses_are_normalised():
    mu = Empirical.of_masses(normal(3, 1), torch.tensor([1.0, 2.0, 5.0], dtype=F64))
    assert close(mu.weights, torch.tensor([0.125, 0.25, 0.625], dtype=F64), 1e-16)


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        measure().points = torch.zeros(1, 1)


def test_convolution_adds_means_and_covariances():  # definition 13, lemma 36
    mu, nu = measure(4, 2, 0), measure(3, 2, 5)
    both = mu.convolve(nu)
    assert both.size == 12
    assert close(both.mean, mu.mean + nu.mean, 1e-14)
    assert close(both.covariance, mu.covariance + nu.covariance, 1e-14)
    # and as an integral, of a function that is not linear
    loops = sum(
        mu.weights[i] * nu.weights[j] * (mu.points[i] + nu.points[j]).sin().sum()
        for i in range(4)
        for j in range(3)
    )
    assert close(both.expectation(lambda x: x.sin().sum(-1)), loops, 1e-14)


def test_convolution_with_a_dirac_and_a_gaussian_is_a_translation():
    spread = torch.eye(2, dtype=F64)
    point = normal(2)
    moved = Dirac(point).convolve(GaussianMeasure(torch.ones(2, dtype=F64), spread))
    assert close(moved.mean, point + 1, 1e-15)
    assert close(moved.covariance, spread, 0.0)


def test_divergence_is_the_corrected_one():
    points, p, q = normal(4, 1), shares(4, seed=1), shares(4, seed=2)
    mu, nu = Empirical(points, p), Empirical(points, q)
    assert close(mu.kl(nu), (p * (p / q).log()).sum(), 1e-15)
    printed = (q * (p / q).log()).sum()  # in d nu
    assert close(printed, -nu.kl(mu), 1e-15)
    assert abs(float(mu.kl(nu) - printed)) > 1e-3


def test_divergence_off_absolute_continuity_is_infinite():
    points = normal(3, 2)
    half = Empirical(points, torch.tensor([0.5, 0.5, 0.0], dtype=F64))
    whole = Empirical(points)
    assert half.kl(whole) == pytest.approx(math.log(1.5), abs=1e-15)
    assert whole.kl(half) == math.inf
    assert whole.kl(Empirical(points + 1)) == math.inf


def test_divergence_compares_measures_and_not_lists():
    x = torch.tensor([[0.0], [1.0]], dtype=F64)
    twice = Empirical(x[[1, 0, 0]], torch.tensor([0.3, 0.2, 0.5], dtype=F64))
    once = Empirical(x, torch.tensor([0.7, 0.3], dtype=F64))
    assert abs(float(twice.kl(once))) < 1e-15
    assert abs(float(once.kl(twice))) < 1e-15
    left = Empirical(x[[0, 0]], torch.tensor([1.0, 0.0], dtype=F64))
    right = Empirical(x[[0, 0]], torch.tensor([0.0, 1.0], dtype=F64))
    assert left.kl(right) == 0  # the same Dirac


def test_divergence_is_differentiable_where_weights_vanish():
    points = normal(3, 1)
    masses = torch.tensor([0.4, 0.6, 0.0], dtype=F64, requires_grad=True)
    Empirical.of_masses(points, masses).kl(Empirical(points)).backward()
    assert masses.grad[:2].isfinite().all()


def test_divergence_takes_batches():
    points, p, q = normal(2, 4, 2), shares(2, 4, seed=1), shares(4, seed=2)
    divergence = Empirical(points, p).kl(Empirical(points, q))
    assert close(divergence, (p * (p / q).log()).sum(-1), 1e-15)


def test_merging_joins_equal_points_in_order():
    x = torch.tensor([[2.0], [0.0], [2.0], [1.0], [0.0]], dtype=F64)
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.25], [0.2, 0.2, 0.2, 0.2, 0.2]], dtype=F64)
    joined = Empirical(x, weights).merged()
    assert joined.points.flatten().tolist() == [2.0, 0.0, 1.0]
    expected = torch.tensor([[0.4, 0.45, 0.15], [0.4, 0.4, 0.2]], dtype=F64)
    assert close(joined.weights, expected, 1e-16)
    assert close(measure().merged().points, measure().points, 0.0)  # nothing to join


def test_merging_keeps_derivatives():
    x = torch.zeros(2, 1, dtype=F64, requires_grad=True)
    Empirical(x).merged().mean.backward()
    assert x.grad.sum() == 1


def test_mixtures_are_linear():
    parts = [measure(3, 2, 0), measure(5, 2, 7), Dirac(normal(2, seed=9))]
    shares_ = [0.2, 0.3, 0.5]
    mixed = mixture(parts, shares_)

    def function(x):
        return x.cos().sum(-1)

    expected = sum(w * m.expectation(function) for w, m in zip(shares_, parts, strict=True))
    assert close(mixed.expectation(function), expected, 1e-15)
    assert close(mixed.weights.sum(), torch.tensor(1.0, dtype=F64), 1e-15)
    even = mixture(parts)
    assert close(even.mean, sum(m.mean for m in parts) / 3, 1e-15)


def test_a_tolerance_that_follows_the_dtype():
    points = torch.zeros(1000, 1)
    weights = torch.full((1000,), 1e-3)
    Empirical(points, weights)
    with pytest.raises(ValueError, match="sum to 1"):
        Empirical(points, weights * (1 + 1e-4))
    with pytest.raises(ValueError, match="sum to 1"):
        Empirical(points.double(), weights.double())  # 1e-3 of float32 is not 1e-3
