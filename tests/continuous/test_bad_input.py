"""Everything that densities and bases refuse: the message has the value and a way out."""

import math

import pytest
import torch

import fenchel.continuous as fc
from tests.continuous.checks import assert_says

ZERO, EYE = torch.zeros(2), torch.eye(2)
SKEW = torch.tensor([[1.0, 0.5], [0.0, 1.0]])
INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
SINGULAR = torch.ones(2, 2)
NAN = torch.full((2, 2), math.nan)

MATRICES = [
    (SKEW, ValueError, ("symmetric", "(A + A.mT) / 2")),
    (INDEFINITE, ValueError, ("positive definite", "identity", "match_moments")),
    (SINGULAR, ValueError, ("positive definite", "identity")),
    (-EYE, ValueError, ("positive definite", "identity")),
    (torch.zeros(2, 2), ValueError, ("positive definite", "identity")),
    (NAN, ValueError, ("finite", "NaN")),
    (torch.full((2, 2), math.inf), ValueError, ("finite", "infinity")),
    (torch.eye(3), ValueError, ("2", "3 x 3")),
    (torch.ones(2), ValueError, ("(..., d, d)", "(2,)")),
    (torch.ones(2, 3), ValueError, ("(..., d, d)", "(2, 3)")),
    (torch.ones(0, 0), ValueError, ("(..., d, d)", "(0, 0)")),
    (torch.eye(2, dtype=torch.long), TypeError, ("floating point", "int64")),
    ([[1.0, 0.0], [0.0, 1.0]], TypeError, ("list", "torch.tensor")),
    (torch.stack([EYE, INDEFINITE]), ValueError, ("positive definite", "identity")),
]
MAKERS = {
    "gaussian": lambda s: fc.Gaussian(ZERO, s),
    "paraboloid": lambda s: fc.Paraboloid(ZERO, s),
    "tsallis": lambda s: fc.TsallisGaussian(ZERO, s, 1.5),
    "gaussian from covariance": lambda s: fc.Gaussian.from_covariance(ZERO, s),
    "paraboloid from covariance": lambda s: fc.Paraboloid.from_covariance(ZERO, s),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("matrix", "error", "words"), MATRICES)
def test_scale(maker, matrix, error, words):
    name = "covariance" if maker == "paraboloid from covariance" else "scale"
    with pytest.raises(error) as caught:
        MAKERS[maker](matrix)
    assert_says(caught, name, *words)


@pytest.mark.parametrize(
    ("matrix", "value"),
    [
        (SKEW, "0.5"),  # how far from symmetric
        (INDEFINITE, "-1"),  # the smallest eigenvalue
        (torch.stack([EYE, -3 * EYE]), "-3"),
    ],
)
def test_the_message_has_the_value(matrix, value):
    for make in (fc.Gaussian, fc.Paraboloid, fc.Paraboloid.from_covariance):
        with pytest.raises(ValueError, match="must be") as caught:
            make(ZERO, matrix)
        assert_says(caught, value)


@pytest.mark.parametrize(("matrix", "error", "words"), MATRICES)
def test_bases(matrix, error, words):
    words = [word for word in words if word not in ("2", "3 x 3")]
    with pytest.raises(error) as caught:
        fc.GaussianBasis(torch.zeros(4, 2), matrix)
    assert_says(caught, "covariances", *words)
    with pytest.raises(error) as caught:
        fc.ParaboloidBasis(torch.zeros(4, 2), matrix)
    assert_says(caught, "scales", *words)


@pytest.mark.parametrize(
    ("mean", "error", "words"),
    [
        (torch.zeros(3), ValueError, ("d = 3", "2 x 2")),
        (torch.tensor(0.0), ValueError, ("(..., d)", "()")),
        (torch.zeros(2, dtype=torch.long), ValueError, ("floating point", "int64")),
        (torch.tensor([0.0, math.nan]), ValueError, ("mean", "finite", "NaN")),
        (torch.tensor([0.0, math.inf]), ValueError, ("mean", "finite", "infinity")),
        ([0.0, 0.0], TypeError, ("mean", "list", "torch.tensor")),
        (None, TypeError, ("mean", "NoneType")),
    ],
)
@pytest.mark.parametrize("family", [fc.Gaussian, fc.Paraboloid])
def test_mean(mean, error, words, family):
    with pytest.raises(error) as caught:
        family(mean, EYE)
    assert_says(caught, *words)


@pytest.mark.parametrize(
    ("alpha", "error", "words"),
    [
        (0.5, ValueError, ("0.5", "between 1 and 4")),
        (0.999999, ValueError, ("0.999999", "between 1 and 4")),
        (4.1, ValueError, ("4.1", "between 1 and 4")),
        (-1, ValueError, ("-1", "between 1 and 4")),
        (math.nan, ValueError, ("nan", "between 1 and 4")),
        (math.inf, ValueError, ("inf", "between 1 and 4")),
        (torch.tensor([1.5, 0.5]), ValueError, ("0.5", "between 1 and 4")),
        (torch.tensor(math.nan), ValueError, ("nan", "between 1 and 4")),
        ("1.5", TypeError, ("alpha", "'1.5'")),
        (True, TypeError, ("alpha", "True")),
        (None, TypeError, ("alpha", "None")),
    ],
)
def test_alpha(alpha, error, words):
    for make in (fc.TsallisGaussian, fc.TsallisGaussian.from_covariance):
        with pytest.raises(error) as caught:
            make(ZERO, EYE, alpha)
        assert_says(caught, "alpha", *words)
    with pytest.raises(error) as caught:
        fc.TsallisGaussian.from_canonical(ZERO, -EYE, alpha)
    assert_says(caught, "alpha", *words)


@pytest.mark.parametrize(
    ("theta1", "theta2", "error", "words"),
    [
        (ZERO, EYE, ValueError, ("theta2", "positive definite")),
        (ZERO, -SKEW, ValueError, ("theta2", "symmetric")),
        (torch.zeros(3), -EYE, ValueError, ("d = 3", "2 x 2")),
        (ZERO, [[-1.0, 0.0], [0.0, -1.0]], TypeError, ("theta2", "list")),
        ([0.0, 0.0], -EYE, TypeError, ("theta1", "list")),
        (torch.tensor([math.nan, 0.0]), -EYE, ValueError, ("theta1", "NaN")),
    ],
)
def test_canonical(theta1, theta2, error, words):
    with pytest.raises(error) as caught:
        fc.Paraboloid.from_canonical(theta1, theta2)
    assert_says(caught, *words)


@pytest.mark.parametrize("family", [fc.Gaussian, fc.Paraboloid])
def test_points_of_another_dimension(family):
    density = family(ZERO, EYE)
    for method in (density.log_prob, density.prob):
        with pytest.raises(ValueError, match="value") as caught:
            method(torch.zeros(4, 3))
        assert_says(caught, "(..., 2)", "(4, 3)")
        with pytest.raises(ValueError, match="value") as caught:
            method(torch.tensor(0.0))
        assert_says(caught, "(..., 2)", "()")
        with pytest.raises(TypeError, match="value") as caught:
            method([0.0, 0.0])
        assert_says(caught, "list", "torch.tensor")
    with pytest.raises(ValueError, match=r"points|value") as caught:
        fc.GaussianBasis.grid(2, 0.1, 2)(torch.zeros(4, 3))
    assert_says(caught, "(..., 2)", "(4, 3)")
    with pytest.raises(ValueError, match=r"points|value") as caught:
        fc.ParaboloidBasis.grid(2, 0.1, 2)(torch.zeros(4, 3))
    assert_says(caught, "2", "3")


@pytest.mark.parametrize("basis", [fc.GaussianBasis, fc.ParaboloidBasis])
@pytest.mark.parametrize("family", [fc.Gaussian, fc.Paraboloid])
def test_a_basis_of_another_dimension(basis, family):
    with pytest.raises(ValueError, match="d = ") as caught:
        family(ZERO, EYE).expect(basis.grid(2, 0.1, 3))
    assert_says(caught, "d = 2", "d = 3")


@pytest.mark.parametrize("tolerance", [0.0, -1e-6, 0.5, 1e-15, math.nan, math.inf])
@pytest.mark.parametrize("basis", [fc.GaussianBasis, fc.ParaboloidBasis])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_tolerance(tolerance, basis, alpha):
    density = fc.TsallisGaussian(ZERO, EYE, alpha)
    with pytest.raises(ValueError, match="tolerance") as caught:
        density.expect(basis.grid(2, 0.1, 2), tolerance)
    assert_says(caught, str(tolerance), "1e-14", "0.01")
    with pytest.raises(ValueError, match="tolerance"):
        fc.expect_with_error(density, basis.grid(2, 0.1, 2), tolerance)


def test_paraboloids_in_space_under_sparse_densities():
    density = fc.Paraboloid(torch.zeros(3), torch.eye(3))
    with pytest.raises(ValueError, match="d <= 2") as caught:
        density.expect(fc.ParaboloidBasis.grid(2, 0.1, 3))
    assert_says(caught, "3", "GaussianBasis", "Gaussian density")


@pytest.mark.parametrize(
    ("centers", "error", "words"),
    [
        (torch.zeros(2), ValueError, ("(N, d)", "(2,)")),
        (torch.zeros(0, 2), ValueError, ("not empty", "(0, 2)")),
        (torch.full((1, 2), math.nan), ValueError, ("centers", "NaN")),
        (torch.zeros(3, 3), ValueError, ("(3, 3)",)),
        ([[0.0, 0.0]], TypeError, ("centers", "list")),
    ],
)
def test_centers(centers, error, words):
    for basis in (fc.GaussianBasis, fc.ParaboloidBasis):
        with pytest.raises(error) as caught:
            basis(centers, EYE)
        assert_says(caught, *words)


def test_grids_and_cells():
    for arguments, words in (
        ((), ("count",)),
        ((0,), ("counts", "0")),
        ((2.5,), ("counts", "2.5")),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            fc.cell_centers(*arguments)
        assert_says(caught, *words)
    with pytest.raises(ValueError, match="low < high") as caught:
        fc.cell_centers(2, low=1.0, high=0.0)
    assert_says(caught, "1.0", "0.0")
    for kind in (fc.GaussianBasis, fc.ParaboloidBasis):
        with pytest.raises(ValueError, match=r"variance must be a finite number > 0, got -0\.1"):
            kind.grid(2, -0.1, 2)


def test_messages_name_what_was_given():
    """The argument at fault, as the caller knows it, and only what is allowed there."""
    weights, positions = torch.ones(4), fc.cell_centers(4)
    start = fc.fit_mixture(weights, positions, 3)
    for call, error, words in (
        (lambda: fc.select_mixture(weights, positions, 3, start=start), TypeError, "Random"),
        (lambda: fc.select_mixture(weights, positions, 0), ValueError, "max_modes must be >= 1"),
        (lambda: fc.select_mixture(weights, positions, 5), ValueError, "max_modes must be at most"),
        (lambda: fc.fit_mixture(weights, positions, 5), ValueError, "modes must be at most"),
        (
            lambda: fc.match_moments(weights, positions, fc.TsallisGaussian),
            ValueError,
            "needs alpha",
        ),
        (start.entropy, NotImplementedError, "entropy of a mixture"),
        (lambda: start.cdf(torch.zeros(1)), NotImplementedError, "count samples"),
        (lambda: start.components.cdf(torch.zeros(1)), NotImplementedError, "count samples"),
    ):
        with pytest.raises(error) as caught:
            call()
        assert_says(caught, words)
        assert "a mixture, got" not in str(caught.value)


def test_a_regression_without_ridge_counts_the_positions_alone():
    positions, basis = fc.cell_centers(3, 3), fc.GaussianBasis.grid(7, 0.01, 2)
    with pytest.raises(
        ValueError, match="9 positions and the border of the padding do not"
    ) as caught:
        fc.ValueFit(positions, basis, ridge=0.0, padding=True)
    assert_says(caught, "49 basis functions")


def test_batches_that_do_not_fit_are_named():
    values = fc.fit_values(
        torch.zeros(4, 9, 2), fc.cell_centers(9), fc.GaussianBasis.grid(3, 0.1, 1)
    )
    density = fc.Gaussian(torch.zeros(3, 1), torch.eye(1))
    with pytest.raises(ValueError, match="do not broadcast") as caught:
        values.expect(density)
    assert_says(caught, "(3,)", "(4, 9, 2)", "features[:, None]")


def test_bases_and_values_can_be_read():
    values = fc.fit_values(
        torch.zeros(4, 9, 2), fc.cell_centers(9), fc.GaussianBasis.grid(3, 0.1, 1)
    )
    assert repr(fc.ParaboloidBasis.grid(3, 0.1, 2)) == "ParaboloidBasis(9 functions, d 2)"
    expected = "ValueFit(9 positions, GaussianBasis(3 functions, d 1), ridge 0.01)"
    assert repr(values) == f"Values(features (4, 9, 2), {expected})"


def test_targets_of_the_loss():
    ours = fc.Paraboloid(ZERO, EYE)
    with pytest.raises(TypeError, match="target") as caught:
        ours.fenchel_young(torch.distributions.MultivariateNormal(ZERO, EYE))
    assert_says(caught, "MultivariateNormal")
    with pytest.raises(ValueError, match="alpha") as caught:
        ours.fenchel_young(fc.Gaussian(ZERO, EYE))
    assert_says(caught, "2.0", "1.0")
    with pytest.raises(ValueError, match="dimension") as caught:
        ours.fenchel_young(fc.Paraboloid(torch.zeros(3), torch.eye(3)))
    assert_says(caught, "2", "3")


def test_bases_that_are_none():
    with pytest.raises(TypeError, match="basis") as caught:
        fc.Gaussian(ZERO, EYE).expect(lambda t: t)
    assert_says(caught, "GaussianBasis")


def test_four_dimensions_are_refused_for_sparse_densities():
    basis = fc.GaussianBasis(torch.zeros(1, 4), torch.eye(4))
    assert fc.Gaussian(torch.zeros(4), torch.eye(4)).expect(basis).isfinite().all()
    with pytest.raises(ValueError, match="d <= 3"):
        fc.Paraboloid(torch.zeros(4), torch.eye(4)).expect(basis)
