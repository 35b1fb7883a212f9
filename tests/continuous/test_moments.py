"""Densities with the moments of discrete weights, and what happens where there are none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import fenchel.continuous as fc
from tests.continuous.checks import assert_near, assert_relative, assert_says
from tests.continuous.families import DOUBLE

FAMILIES = [
    (fc.Gaussian, {}),
    (fc.Paraboloid, {}),
    (fc.TsallisGaussian, {"alpha": 1.3}),
    (fc.TsallisGaussian, {"alpha": 1.0}),
    (fc.TsallisGaussian, {"alpha": 4.0}),
]
IDS = ["gaussian", "paraboloid", "1.3", "1.0", "4.0"]


def data(d, batch=(), seed=0, count=12):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randn(count, d, dtype=DOUBLE, generator=generator)
    return torch.rand(*batch, count, dtype=DOUBLE, generator=generator), positions


def moments(weights, positions):
    """By numpy, one row at a time."""
    flat = weights.reshape(-1, weights.shape[-1]).numpy()
    mean = np.stack([np.average(positions, 0, w) for w in flat])
    each = [np.cov(positions.numpy().T, aweights=w, ddof=0).reshape(*[positions.shape[1]] * 2)
            for w in flat]  # fmt: skip
    batch, d = weights.shape[:-1], positions.shape[1]
    return mean.reshape(*batch, d), np.stack(each).reshape(*batch, d, d)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=IDS)
def test_moments_are_matched(d, family, options):
    weights, positions = data(d, (3, 2))
    density = fc.match_moments(weights, positions, family, **options)
    mean, covariance = moments(weights, positions)
    assert type(density) is family
    assert density.batch_shape == (3, 2)
    assert_near(density.mean, mean, 1e-12)
    assert_near(density.covariance_matrix, covariance, 1e-12)


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=5, max_size=5).filter(lambda w: sum(w) > 1e-3),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
)
@settings(max_examples=40, deadline=None)
def test_any_weights_give_a_density(weights, size):
    positions = size * torch.tensor(
        [[0.0, 0.0], [1.0, 0.2], [0.3, 1.0], [1.0, 1.0], [0.5, 0.5]], dtype=DOUBLE
    )
    weights = torch.tensor(weights, dtype=DOUBLE)
    mean, covariance = moments(weights, positions)
    density = fc.match_moments(weights, positions, fc.Paraboloid)
    assert_near(density.mean / size, mean / size, 1e-12)
    # The determinant of a thin ellipse, through which the scale goes, is known as its condition is.
    bar = 1e-12 + 4 * np.finfo(float).eps * np.linalg.cond(density.covariance_matrix.numpy())
    assert bar < 1e-8
    raised = (density.covariance_matrix.numpy() - covariance) / size**2
    assert_near(raised, np.eye(2) * raised[0, 0], bar)
    assert raised[0, 0] >= -bar
    assert density.log_prob(density.mean).isfinite()


def test_one_alpha_for_each_row():
    weights, positions = data(2, (3,))
    alpha = torch.tensor([1.0, 1.5, 3.0], dtype=DOUBLE)
    density = fc.match_moments(weights, positions, fc.TsallisGaussian, alpha=alpha)
    assert_near(density.covariance_matrix, moments(weights, positions)[1], 1e-12)


def test_weights_need_not_sum_to_one():
    weights, positions = data(2)
    one, other = (fc.match_moments(c * weights, positions, fc.Gaussian) for c in (1.0, 1e30))
    assert_near(one.covariance_matrix, other.covariance_matrix, 1e-14)


# ---- where the weights have no spread


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=IDS)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_floor(family, options, dtype):
    """One position, or a line: the least variance is 1e-6 of that of the positions."""
    positions = fc.cell_centers(4, 4).to(dtype)
    spread = positions.var(0, correction=0).mean().item()
    one = torch.zeros(16, dtype=dtype)
    one[5] = 1.0
    density = fc.match_moments(one, positions, family, **options)
    bar = 1e-12 if dtype == DOUBLE else 1e-5
    assert_near(density.mean, positions[5], bar)
    relative = density.covariance_matrix.double().numpy() / (1e-6 * spread)
    assert_near(relative, np.eye(2), bar)
    line = torch.zeros(16, dtype=dtype)
    line[[0, 5, 10, 15]] = 0.25  # along the diagonal
    density = fc.match_moments(line, positions, family, **options)
    values = np.linalg.eigvalsh(density.covariance_matrix.double().numpy())
    assert_relative(values[0], 1e-6 * spread, 1e-6 if dtype == DOUBLE else 0.5)
    assert_near(values[1], 5 / 32, bar + 1e-6)
    assert density.log_prob(density.mean).isfinite()


def test_another_floor():
    weights, positions = torch.tensor([0.0, 1.0]), torch.tensor([[0.0], [2.0]])
    density = fc.match_moments(weights, positions, fc.Gaussian, floor=0.25)
    assert_near(density.variance, [0.25], 1e-7)
    _, covariance = fc.weighted_moments(weights, positions, floor=0.5)
    assert_near(covariance, [[0.5]], 1e-7)
    spread = fc.match_moments(torch.ones(2), positions, fc.Gaussian, floor=0.25)
    assert_near(spread.variance, [1.0], 1e-7)  # above the floor nothing is added


def test_equal_positions():
    """Without any spread at all the floor is a number."""
    positions = torch.full((5, 2), 3.0, dtype=DOUBLE)
    density = fc.match_moments(torch.ones(5, dtype=DOUBLE), positions, fc.Paraboloid)
    assert_near(density.mean, [3.0, 3.0], 1e-12)
    assert_near(density.covariance_matrix.numpy() / 1e-6, np.eye(2), 1e-9)
    single = fc.match_moments(torch.ones(1), torch.ones(1, 3), fc.Gaussian)
    assert_near(single.covariance_matrix.double().numpy() / 1e-6, np.eye(3), 1e-5)


def test_derivatives_at_the_floor_are_finite():
    weights = torch.tensor([0.0, 1.0, 0.0], dtype=DOUBLE, requires_grad=True)
    positions = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=DOUBLE, requires_grad=True)
    density = fc.match_moments(weights, positions, fc.Paraboloid)
    target = density.entropy() + density.mean.sum() + density.log_prob(density.mean.detach())
    gradients = torch.autograd.grad(target, (weights, positions))
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[1][1] != 0).all()


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=IDS)
def test_derivatives(family, options):
    weights, positions = data(2, count=4)
    inputs = weights.requires_grad_(), positions.requires_grad_()

    def numbers(w, t):
        density = fc.match_moments(w, t, family, **options)
        shape = density.scale.diagonal().log(), density.scale[0, 1:] / density.scale[0, 0]
        return torch.cat([density.mean, *shape, density.log_peak.reshape(1)])

    assert gradcheck(numbers, inputs)
    assert gradgradcheck(numbers, inputs)


def test_precision_and_layout():
    weights, positions = data(2, (3,))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        low = [x.to(dtype) for x in (weights, positions)]
        density = fc.match_moments(*low, fc.Gaussian)
        exact = fc.match_moments(*(x.double() for x in low), fc.Gaussian)
        assert density.mean.dtype == torch.float32
        assert_near(density.covariance_matrix, exact.covariance_matrix, 1e-5)
    odd = fc.match_moments(weights.mT.contiguous().mT, positions.mT.contiguous().mT, fc.Gaussian)
    assert_near(odd.scale, fc.match_moments(weights, positions, fc.Gaussian).scale, 1e-15)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weights": torch.tensor([1.0, math.nan, 1.0])}, ValueError, ("weights", "NaN")),
        ({"weights": torch.tensor([1.0, math.inf, 1.0])}, ValueError, ("weights", "infinity")),
        ({"weights": torch.tensor([1.0, -1.0, 1.0])}, ValueError, (">= 0", "not scores")),
        ({"weights": torch.zeros(3)}, ValueError, ("zero", "leave out")),
        ({"weights": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])}, ValueError, ("zero",)),
        ({"weights": torch.ones(4)}, ValueError, ("(..., 3)", "(4,)")),
        ({"weights": torch.tensor(1.0)}, ValueError, ("(..., 3)", "()")),
        ({"weights": [1.0, 1.0, 1.0]}, TypeError, ("weights", "list", "torch.tensor")),
        ({"weights": torch.ones(3, dtype=torch.long)}, TypeError, ("weights", "int64")),
        ({"positions": torch.ones(3)}, ValueError, ("(L, d)", "(3,)")),
        ({"positions": torch.ones(0, 2)}, ValueError, ("not empty", "(0, 2)")),
        ({"positions": torch.full((3, 1), math.nan)}, ValueError, ("positions", "NaN")),
        ({"family": fc.Gaussian, "alpha": 1.5}, ValueError, ("alpha", "TsallisGaussian")),
        ({"family": fc.TsallisGaussian}, ValueError, ("alpha", "TsallisGaussian")),
        ({"family": fc.TsallisGaussian, "alpha": 0.5}, ValueError, ("alpha", "0.5", "1 and 4")),
        ({"family": fc.TsallisGaussian, "alpha": 5.0}, ValueError, ("alpha", "5.0", "1 and 4")),
        ({"family": "Gaussian"}, TypeError, ("family", "'Gaussian'")),
        ({"family": fc.Density}, TypeError, ("family", "Density")),
        ({"family": fc.Mixture}, TypeError, ("family", "Mixture")),
        ({"floor": 0.0}, ValueError, ("floor", "0.0")),
        ({"floor": -1.0}, ValueError, ("floor", "-1.0")),
        ({"floor": math.nan}, ValueError, ("floor", "nan")),
    ],
)  # fmt: skip
def test_bad_input(change, error, words):
    arguments = {
        "weights": torch.ones(3), "positions": torch.eye(3)[:, :2], "family": fc.Gaussian
    } | change  # fmt: skip
    with pytest.raises(error) as caught:
        fc.match_moments(**arguments)
    assert_says(caught, *words)


# ---- extremes


def test_positions_far_from_zero():
    g = torch.Generator().manual_seed(0)
    positions, weights = torch.rand(50, 1, generator=g) + 1e4, torch.rand(50, generator=g)
    single = fc.match_moments(weights, positions, fc.Gaussian).covariance_matrix
    double = fc.match_moments(weights.double(), positions.double(), fc.Gaussian).covariance_matrix
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)
    pair = [
        fc.fit_mixture(w, p, 2).components.covariance_matrix
        for w, p in ((weights, positions), (weights.double(), positions.double()))
    ]
    torch.testing.assert_close(pair[0].double(), pair[1], rtol=1e-4, atol=0)


def test_weights_whose_sum_overflows():
    density = fc.match_moments(
        torch.full((3,), 3e38), torch.tensor([[5.0], [6.0], [7.0]]), fc.Gaussian
    )
    torch.testing.assert_close(density.mean, torch.tensor([6.0]))


def test_the_floor_is_a_constant_in_forward_mode_too():
    positions = fc.cell_centers(3, 3).double()
    weights = torch.tensor([0.3, 0, 0, 0, 0.4, 0, 0, 0, 0.3], dtype=DOUBLE)

    def covariance(w):
        return fc.match_moments(w, positions, fc.Gaussian).covariance_matrix

    direction = torch.eye(9, dtype=DOUBLE)[1]
    forward = torch.func.jvp(covariance, (weights,), (direction,))[1]
    torch.testing.assert_close(forward, torch.func.jacrev(covariance)(weights)[..., 1])
