"""Value functions: the regression, contexts, padding, and the trap of narrow functions."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import fenchel as fl
import fenchel.continuous as fc
from fenchel.continuous.values import border
from tests.continuous.checks import assert_near, assert_says
from tests.continuous.families import DOUBLE

POSITIONS = fc.cell_centers(14, 14).to(DOUBLE)


def corners(count):
    """count x count points from one corner of the unit square to the other."""
    line = torch.linspace(0, 1, count, dtype=DOUBLE)
    return torch.cartesian_prod(line, line)


def functions(count=7, variance=0.01):
    return fc.GaussianBasis(corners(count), variance * torch.eye(2, dtype=DOUBLE))


def features(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def slope(values, basis, points, targets, ridge):
    """Of |B psi(points) - targets|^2 / 2 + ridge |B|^2 / 2 in B, over the size of psi' targets."""
    at, b = basis(points), values.coefficients  # (L, N), (N, channels)
    whole = at.mT @ (at @ b - targets) + ridge * b
    return (whole.abs().max() / (at.mT @ targets).abs().max()).item()


@pytest.mark.parametrize("ridge", [1e-4, 0.01, 10.0])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("basis", [functions(), fc.ParaboloidBasis.grid(5, 0.02, 2).to(DOUBLE)])
def test_the_fit_is_stationary(ridge, padding, basis):
    """Farinhas, 2021, eq. 3.17: the ridge regression's gradient is zero."""
    h = features(196, 3)
    values = fc.fit_values(h, POSITIONS, basis, ridge, padding)
    points, targets = POSITIONS, h
    if padding:
        around = border(POSITIONS)
        points = torch.cat([POSITIONS, around])
        targets = torch.cat([h, torch.zeros(len(around), 3, dtype=DOUBLE)])
    assert slope(values, basis, points, targets, ridge) < 1e-12
    wrong = fc.fit_values(h, POSITIONS, basis, 1.01 * ridge, padding)
    assert slope(wrong, basis, points, targets, ridge) > 1e-9


def test_against_numpy():
    basis, h = functions(), features(196, 2)
    f = basis(POSITIONS).numpy()
    b = np.linalg.solve(f.T @ f + 0.01 * np.eye(49), f.T @ h.numpy())
    values = fc.fit_values(h, POSITIONS, basis)
    assert_near(values.coefficients, b, 1e-10)
    points = torch.rand(9, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    assert_near(values(points), basis(points).numpy() @ b, 1e-10)


@pytest.mark.parametrize("family", [fc.Gaussian, fc.Paraboloid])
def test_the_context_is_the_coefficients_times_expected_functions(family):
    """Farinhas, 2021, eq. 3.16, and eq. 5.5 for a mixture."""
    basis, h = functions(), features(196, 4)
    values = fc.fit_values(h, POSITIONS, basis)
    mean = torch.tensor([[0.5, 0.4], [0.2, 0.8]], dtype=DOUBLE)
    density = family.from_covariance(mean, 0.02 * torch.eye(2, dtype=DOUBLE))
    expected = density.expect(basis) @ values.coefficients
    assert_near(values.expect(density), expected, 1e-10)
    assert_near(values.combine(density.expect(basis)), expected, 1e-10)
    mixture = fc.Mixture(torch.tensor([0.3, 0.7], dtype=DOUBLE), density)
    assert_near(values.expect(mixture), torch.tensor([0.3, 0.7], dtype=DOUBLE) @ expected, 1e-10)


def test_the_context_is_the_mean_of_the_function():
    """Against samples of V under the density."""
    torch.manual_seed(0)
    values = fc.fit_values(features(196, 2), POSITIONS, functions())
    mean = torch.tensor([0.5, 0.5], dtype=DOUBLE)
    density = fc.Paraboloid.from_covariance(mean, 0.01 * torch.eye(2, dtype=DOUBLE))
    each = values(density.sample((20000,)))
    error = each.std(0) / 20000**0.5
    assert ((each.mean(0) - values.expect(density)).abs() <= 5 * error).all()


def test_tolerance_reaches_the_density():
    values = fc.fit_values(features(196, 2), POSITIONS, functions())
    mean = torch.tensor([0.5, 0.4], dtype=DOUBLE)
    density = fc.Paraboloid.from_covariance(mean, 0.02 * torch.eye(2, dtype=DOUBLE))
    assert 1e-12 < (values.expect(density, 1e-2) - values.expect(density, 1e-12)).abs().max() < 1e-2
    with pytest.raises(ValueError, match="tolerance"):
        values.expect(density, 0.5)


# ---- one fit, many queries


def test_one_fit_serves_many():
    basis = functions()
    fit = fc.ValueFit(POSITIONS, basis)
    h = features(2, 3, 196, 4)
    values = fit(h)
    assert values.coefficients.shape == (2, 3, 49, 4)
    assert values(corners(5)).shape == (2, 3, 25, 4)
    mean = torch.rand(5, 2, 3, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    density = fc.Gaussian(mean, 0.02 * torch.eye(2, dtype=DOUBLE))
    context = values.expect(density)
    assert context.shape == (5, 2, 3, 4)
    alone = fc.fit_values(h[1, 2], POSITIONS, basis)
    assert_near(context[4, 1, 2], alone.expect(density[4, 1, 2]), 1e-12)
    assert_near(values(corners(5))[1, 2], alone(corners(5)), 1e-12)
    one_image = fit(h[0, 0]).expect(density)
    assert one_image.shape == (5, 2, 3, 4)


def test_queries_do_not_fit_again(monkeypatch):
    fit = fc.ValueFit(POSITIONS, functions())

    def refuse(*_):
        raise AssertionError("factored again")

    monkeypatch.setattr(torch.linalg, "cholesky_ex", refuse)
    monkeypatch.setattr(fc.ValueFit, "_operator", refuse)
    for seed in range(3):
        assert fit(features(196, 2, seed=seed)).coefficients.shape == (49, 2)


def test_derivatives_reach_features_and_density():
    basis = fc.GaussianBasis.grid(3, 0.05, 2).to(DOUBLE)
    positions = fc.cell_centers(4, 4).to(DOUBLE)
    h = features(16, 2).requires_grad_()
    mean = torch.tensor([0.4, 0.6], dtype=DOUBLE, requires_grad=True)

    def context(h, m):
        density = fc.Paraboloid(m, 0.05 * torch.eye(2, dtype=DOUBLE))
        return fc.fit_values(h, positions, basis).expect(density, 1e-6)

    assert gradcheck(context, (h, mean))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    basis, h = fc.GaussianBasis.grid(7, 0.01, 2), features(196, 3).to(dtype)
    positions = fc.cell_centers(14, 14)
    density = fc.Gaussian(torch.tensor([0.5, 0.4]), 0.02 * torch.eye(2))
    ours = fc.fit_values(h, positions, basis).expect(density)
    exact = fc.fit_values(h.double(), positions.double(), basis.to(DOUBLE)).expect(
        fc.Gaussian(density.mean.double(), density.scale.double())
    )
    assert ours.dtype == dtype
    assert_near(
        ours, exact, {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    )


@pytest.mark.parametrize("of_points", [torch.float32, DOUBLE, torch.float16])
@pytest.mark.parametrize("of_positions", [torch.float32, DOUBLE])
@pytest.mark.parametrize("of_basis", [torch.float32, DOUBLE])
def test_precisions_mix(of_points, of_positions, of_basis):
    values = fc.fit_values(
        torch.ones(196, 1, dtype=of_positions), POSITIONS.to(of_positions), functions().to(of_basis)
    )
    half = torch.full((1, 2), 0.5)
    expected = fc.fit_values(torch.ones(196, 1, dtype=DOUBLE), POSITIONS, functions())(
        half.double()
    )
    assert_near(values(half.to(of_points)), expected, 1e-4)
    density = fc.Gaussian(half[0].to(of_points), 0.01 * torch.eye(2).to(of_points))
    assert_near(values.expect(density), [[1.0]][0], 0.05)


# ---- the trap, and padding


@pytest.mark.parametrize(
    ("count", "variance", "low", "high"),
    [(7, 0.001, 0.006, 3.61), (10, 0.001, 0.29, 2.68), (7, 0.01, 0.98, 1.03)],
)
def test_narrow_functions_leave_holes(count, variance, low, high):
    """Farinhas, 2021, table 6.1: a constant image, functions from corner to corner, no padding.

    The ledger's numbers are those of a grid with step 0.01 over [0.1, 0.9]^2.
    """
    values = fc.fit_values(torch.ones(196, 1, dtype=DOUBLE), POSITIONS, functions(count, variance))
    line = torch.linspace(0.1, 0.9, 81, dtype=DOUBLE)
    actual = values(torch.cartesian_prod(line, line))
    assert abs(actual.min() - low) < (5e-4 if low < 0.01 else 5e-3)
    assert abs(actual.max() - high) < 5e-3


def test_border():
    around = border(POSITIONS)
    assert len(around) == 28**2 - 14**2
    assert ((around < 0) | (around > 1)).any(-1).all()
    assert around.min() >= -0.5
    assert around.max() <= 1.5
    # With the positions it is a grid of the doubled square.
    lines = torch.cat([POSITIONS, around]).mul(28).round().unique(dim=0)
    assert len(lines) == 28**2


def test_padding_takes_the_function_to_zero_outside():
    one = torch.ones(196, 1, dtype=DOUBLE)
    basis = fc.GaussianBasis.grid(12, 0.01, 2, low=-0.5, high=1.5).to(DOUBLE)
    line = torch.linspace(-0.45, 1.45, 39, dtype=DOUBLE)
    points = torch.cartesian_prod(line, line)
    outside = ((points < -0.2) | (points > 1.2)).any(-1)
    inside = ((points > 0.15) & (points < 0.85)).all(-1)
    actual = {p: fc.fit_values(one, POSITIONS, basis, 0.01, p)(points) for p in (False, True)}
    assert actual[True][outside].abs().max() < 0.1
    assert actual[False][outside].abs().max() > 0.2
    assert (actual[True][inside] - 1).abs().max() < 0.1


# ---- what is refused


def test_too_few_positions_without_a_ridge():
    positions = fc.cell_centers(4, 4).to(DOUBLE)
    with pytest.raises(ValueError, match="do not determine") as caught:
        fc.fit_values(torch.ones(16, 1, dtype=DOUBLE), positions, functions(), 0.0)
    assert_says(caught, "16 positions", "49", "ridge > 0", "more positions")
    assert fc.fit_values(torch.ones(16, 1, dtype=DOUBLE), positions, functions(), 1e-3)


def test_without_a_ridge_a_fit_that_is_determined_interpolates():
    positions = fc.cell_centers(3, 3).to(DOUBLE)
    basis = fc.GaussianBasis(positions, 0.02 * torch.eye(2, dtype=DOUBLE))
    h = features(9, 2)
    assert_near(fc.fit_values(h, positions, basis, 0.0)(positions), h, 1e-9)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"features": [1.0]}, TypeError, ("features", "list")),
        ({"features": torch.ones(9, 1)}, ValueError, ("(..., 4, channels)", "(9, 1)")),
        ({"features": torch.ones(4)}, ValueError, ("(..., 4, channels)", "(4,)")),
        ({"features": torch.ones(4, 1, dtype=torch.long)}, TypeError, ("floating", "int64")),
        ({"positions": torch.ones(4, 3)}, ValueError, ("(L, 2)", "(4, 3)")),
        ({"positions": torch.ones(0, 2)}, ValueError, ("L >= 1", "(0, 2)")),
        ({"positions": torch.ones(4, 2).long()}, TypeError, ("floating point", "int64")),
        ({"positions": torch.full((4, 2), float("nan"))}, ValueError, ("finite", "NaN")),
        ({"positions": None}, TypeError, ("positions", "NoneType")),
        ({"ridge": -1.0}, ValueError, ("ridge", "-1.0", ">= 0")),
        ({"ridge": float("nan")}, ValueError, ("ridge", "nan")),
        ({"ridge": float("inf")}, ValueError, ("ridge", "inf")),
    ],
)
def test_bad_input(change, error, words):
    arguments = {
        "features": torch.ones(4, 1), "positions": fc.cell_centers(2, 2),
        "basis": fc.GaussianBasis.grid(2, 0.1, 2),
    } | change  # fmt: skip
    with pytest.raises(error) as caught:
        fc.fit_values(**arguments)
    assert_says(caught, *words)


def test_the_gradient_in_the_mixing_scores():
    """Farinhas, eq. 5.5: dL / dscore_k = mixing_k (c_k - sum mixing c)."""
    values = fc.fit_values(features(196, 1), POSITIONS, functions())
    mean = torch.tensor([[0.5, 0.4], [0.2, 0.8], [0.7, 0.7]], dtype=DOUBLE)
    modes = fc.Gaussian(mean, 0.01 * torch.eye(2, dtype=DOUBLE))
    scores = torch.tensor([0.1, -0.5, 0.3], dtype=DOUBLE, requires_grad=True)
    context = values.expect(fc.Mixture.from_scores(scores, modes, fl.Shannon()))
    (gradient,) = torch.autograd.grad(context.sum(), scores)
    mixing, each = torch.softmax(scores.detach(), 0), values.expect(modes)[:, 0]
    assert_near(gradient, mixing * (each - mixing @ each), 1e-12)
    assert gradient.abs().max() > 1e-3


def test_padding_needs_the_unit_cube():
    with pytest.raises(ValueError, match="padding"):
        fc.fit_values(
            torch.ones(5, 1), 2 * fc.cell_centers(5), fc.GaussianBasis.grid(3, 0.1, 1), padding=True
        )
