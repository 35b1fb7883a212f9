"""Expected paraboloids, and the bases themselves."""

import numpy as np
import pytest
import torch

import fenchel.continuous as fc
from tests.continuous import reference
from tests.continuous.bases import ALPHAS, at, functions, gaussians
from tests.continuous.checks import assert_near
from tests.continuous.families import DOUBLE, make, parameters

# ---- paraboloid functions


@pytest.mark.parametrize("alpha", ALPHAS)
def test_paraboloid_under_sparse_on_a_line(alpha):
    rng = np.random.default_rng(0)
    ours, expected = [], []
    for _ in range(40):
        mean, centre = rng.uniform(0, 1, (2, 1))
        scale, basis_scale = 10 ** rng.uniform(-4, 0, (2, 1, 1))
        basis = fc.ParaboloidBasis(torch.from_numpy(centre[None]), torch.from_numpy(basis_scale))
        ours.append(make(mean, scale, alpha).expect(basis)[0])
        expected.append(reference.overlap(mean, scale, alpha, centre, basis_scale))
    assert sum(x == 0 for x in expected) > 2
    # Polynomials are exact; other powers keep the tolerance that is set by default.
    assert_near(torch.stack(ours), expected, 1e-12 if alpha == 2 else 1e-9)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 2.0, 3.0])
def test_paraboloid_under_sparse_in_the_plane(alpha):
    rng = np.random.default_rng(1)
    ours, expected = [], []
    for _ in range(30):
        mean, centre = rng.uniform(0, 1, (2, 2))
        scale, basis_scale = (reference.random_spd(rng, 2, 1e-2, 1.0) for _ in range(2))
        basis = fc.ParaboloidBasis(torch.from_numpy(centre[None]), torch.from_numpy(basis_scale))
        ours.append(make(mean, scale, alpha).expect(basis)[0])
        expected.append(reference.overlap(mean, scale, alpha, centre, basis_scale, 100))
    assert_near(torch.stack(ours), expected, 1e-6)


def test_the_reference_of_two_paraboloids():
    """By sums over a fine grid of the plane."""
    (mean, scale), (centre, basis_scale) = parameters(2), parameters(2, 1)
    x = 1 + 3 * reference.gauss(600, -1, 1)[0]
    w = np.outer(*[3 * reference.gauss(600, -1, 1)[1]] * 2).ravel()
    points = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    grid = (
        w
        * reference.density(points, mean, scale, 2)
        @ reference.density(points, centre, basis_scale, 2)
    )
    actual = reference.overlap(mean, scale, 2, centre, basis_scale)
    assert actual > 0.01
    assert_near(actual, grid, 3e-5)
    assert_near(actual, reference.overlap(mean, scale, 2, centre, basis_scale, 60), 1e-12)
    assert_near(actual, reference.overlap(centre, basis_scale, 2, mean, scale), 1e-12)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_paraboloid_under_gaussian(d):
    mean, scale = parameters(d)
    centre, basis_scale = parameters(d, 1)
    basis = fc.ParaboloidBasis(torch.from_numpy(centre[None]), torch.from_numpy(basis_scale))
    swapped = reference.expectation(
        lambda t: reference.normal(t, mean, scale), centre, basis_scale, 2, (64, 64, 24)[d - 1]
    )
    assert_near(make(mean, scale, 1.0).expect(basis), [swapped], 1e-8)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 3.0])
def test_disjoint_supports(d, alpha):
    mean = torch.zeros(d, dtype=DOUBLE, requires_grad=True)
    scale = (0.1 * torch.eye(d, dtype=DOUBLE)).requires_grad_()
    centre = torch.full((1, d), 5.0, dtype=DOUBLE, requires_grad=True)
    basis = fc.ParaboloidBasis(centre, 0.1 * torch.eye(d, dtype=DOUBLE))
    value = make(mean, scale, alpha).expect(basis)
    assert (value == 0).all()
    for gradient in torch.autograd.grad(value.sum(), (mean, scale, centre)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("basis", [fc.GaussianBasis, fc.ParaboloidBasis])
def test_alpha_of_each_member_may_be_one(basis):
    """The values and derivatives of the special classes, in one batch with the others."""
    alpha = torch.tensor([1.0, 1.0 + 1e-10, 1.5, 2.0], dtype=DOUBLE)
    mean, scale = (torch.from_numpy(x) for x in parameters(1))
    functions_ = basis(torch.tensor([[0.5], [1.5]], dtype=DOUBLE), 0.3 * torch.eye(1, dtype=DOUBLE))
    together = [x.expand(4, *x.shape).clone().requires_grad_() for x in (mean, scale)]
    value = fc.TsallisGaussian(*together, alpha).expect(functions_)
    gradients = torch.autograd.grad(value[:, 0].sum(), together)
    for k, number in enumerate((1.0, 1.0, 1.5, 2.0)):
        alone = [x.clone().requires_grad_() for x in (mean, scale)]
        one = make(*alone, number).expect(functions_)
        expected = torch.autograd.grad(one[0], alone)
        assert_near(value[k], one, 1e-8)
        for x, y in zip(gradients, expected, strict=True):
            assert_near(x[k], y, 1e-8)


# ---- the bases themselves


def test_bases_are_their_functions():
    centres, covariances = functions(2, 1)
    points = np.random.default_rng(0).normal(1, 0.5, (5, 3, 2))
    gaussian = gaussians(centres, covariances)(torch.from_numpy(points))
    assert_near(gaussian, at(centres, covariances)(points), 1e-13)
    basis = fc.ParaboloidBasis(torch.from_numpy(centres), torch.from_numpy(covariances))
    each = [reference.density(points, c, v, 2) for c, v in zip(centres, covariances, strict=True)]
    assert_near(basis(torch.from_numpy(points)), np.stack(each, -1), 1e-13)
    assert len(basis) == 4


@pytest.mark.parametrize("basis", [fc.GaussianBasis, fc.ParaboloidBasis])
def test_grids(basis):
    grid = basis.grid(3, 0.04, 2)
    assert len(grid) == 9
    assert_near(grid.centers[5], [0.5, 5 / 6], 1e-7)
    moved = basis.grid(2, 0.04, 1, low=-1.0, high=3.0)
    assert_near(moved.centers, [[0.0], [2.0]], 1e-7)
    assert moved.to(DOUBLE).centers.dtype == DOUBLE
    # Each function has the variance asked for.
    one = (fc.Gaussian if basis is fc.GaussianBasis else fc.Paraboloid)(
        moved.centers, moved.covariances if basis is fc.GaussianBasis else moved.scales
    )
    assert_near(one.covariance_matrix, np.full((2, 1, 1), 0.04), 1e-6)


def test_cell_centers():
    assert_near(
        fc.cell_centers(2, 3), [[x, y] for x in (0.25, 0.75) for y in (1 / 6, 0.5, 5 / 6)], 1e-7
    )
    assert_near(fc.cell_centers(1, low=2, high=4), [[3.0]], 0)


def test_batches_of_densities():
    mean = torch.randn(3, 1, 2, dtype=DOUBLE)
    scale = torch.stack([torch.eye(2, dtype=DOUBLE), 0.3 * torch.eye(2, dtype=DOUBLE)])
    basis = gaussians(*functions(2, 1))
    for alpha in (1.0, 1.5, 2.0):
        whole = make(mean, scale, alpha).expect(basis)
        assert whole.shape == (3, 2, 4)
        assert_near(whole[2, 1], make(mean[2, 0], scale[1], alpha).expect(basis), 1e-9)
        empty = make(mean[:0], scale, alpha).expect(basis)
        assert empty.shape == (0, 2, 4)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_single_precision_against_double(alpha):
    mean, scale = (torch.from_numpy(x).float() for x in parameters(2))
    centres, covariances = (torch.from_numpy(x).float() for x in functions(2, 1))
    for basis in (fc.GaussianBasis, fc.ParaboloidBasis):
        ours = make(mean, scale, alpha).expect(basis(centres, covariances))
        assert ours.dtype == torch.float32
        exact = make(mean.double(), scale.double(), alpha).expect(
            basis(centres.double(), covariances.double())
        )
        assert_near(ours, exact, 2e-6)


def test_many_pairs_are_worked_on_in_parts(monkeypatch):
    """With and without a split: the same numbers and derivatives."""
    from fenchel.continuous import expectations

    mean = torch.randn(5, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    basis = gaussians(*functions(2, 1))

    def derivatives():
        leaf = mean.clone().requires_grad_()
        value = fc.TsallisGaussian(leaf, torch.eye(2, dtype=DOUBLE), 1.5).expect(basis, 1e-4)
        (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        return value, first, torch.autograd.grad(first.square().sum(), leaf)[0]

    whole = derivatives()
    monkeypatch.setattr(expectations, "_MOST", 1)
    for one, other in zip(derivatives(), whole, strict=True):
        assert_near(one, other, 1e-14)


def test_the_estimate_of_the_error_covers_paraboloids():
    z = torch.zeros(2, dtype=DOUBLE)
    scale = torch.tensor(
        [[2.291837420447644, -5.244700066769546], [-5.244700066769546, 32.59935576203325]],
        dtype=DOUBLE,
    )
    basis_scale = torch.tensor(
        [[71.82235918629387, -61.69832573076481], [-61.69832573076481, 57.94000112062558]],
        dtype=DOUBLE,
    )
    basis = fc.ParaboloidBasis(z.unsqueeze(0), basis_scale)
    expectation = fc.expect_with_error(fc.TsallisGaussian(z, scale, 3.0), basis, 1e-5)
    assert 0 < expectation.error < 1e-6
    assert abs(expectation.value - 0.0665812298) < 1e-6
