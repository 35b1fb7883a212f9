"""Expected Gaussian functions: values against quadrature of our own, tolerances, extremes."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate

import fenchel.continuous as fc
from tests.continuous import pairs, reference
from tests.continuous.bases import ALPHAS, at, functions, gaussians
from tests.continuous.checks import assert_near, assert_relative, assert_rows_near
from tests.continuous.families import DOUBLE, make, parameters

# ---- Gaussian functions


@pytest.mark.parametrize("d", [1, 2, 3])
def test_gaussian_under_gaussian(d):
    """Farinhas, 2021, eqs. 4.7 to 4.10."""
    mean, scale = parameters(d)
    centres, covariances = functions(d, 1, low=0.1 if d < 3 else 0.6)
    expected = reference.expectation(at(centres, covariances), mean, scale, 1, (80, 80, 56)[d - 1])
    ours = make(mean, scale, 1.0).expect(gaussians(centres, covariances))
    assert_near(ours, expected, 1e-10)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_gaussian_under_sparse(d, alpha):
    mean, scale = parameters(d)
    centres, covariances = functions(d, 2)
    expected = reference.expectation(at(centres, covariances), mean, scale, alpha, 64)
    density, basis = make(mean, scale, alpha), gaussians(centres, covariances)
    assert_near(density.expect(basis), expected, 1e-8)
    assert_near(density.expect(basis, 1e-12), expected, 1e-11)
    general = fc.TsallisGaussian(density.mean, density.scale, torch.tensor(alpha, dtype=DOUBLE))
    assert_near(general.expect(basis), expected, 1e-8)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_on_a_line_by_quad(alpha):
    (mean,), scale = parameters(1, 2)
    half = reference.peak_and_radius(scale, alpha)[1] * math.sqrt(scale[0, 0])
    for centre, variance in ((mean, 1e-3), (mean + 0.9 * half, 0.01), (mean + half, 1.0)):

        def product(t, centre=centre, variance=variance):
            psi = reference.normal(np.array([t]), np.array([centre]), np.array([[variance]]))
            return reference.density(np.array([t]), np.array([mean]), scale, alpha) * psi

        cuts = [
            mean - half,
            *(centre + k * math.sqrt(variance) for k in (-6, -2, 0, 2, 6)),
            mean + half,
        ]
        cuts = sorted({min(max(x, mean - half), mean + half) for x in cuts})
        expected = sum(
            integrate.quad(product, *ends, epsabs=1e-12, epsrel=1e-12)[0]
            for ends in itertools.pairwise(cuts)
        )
        ours = make([mean], scale, alpha).expect(gaussians([[centre]], [[variance]]))
        assert_near(ours, [expected], 1e-9)


def test_gaussian_under_paraboloid_in_space():
    mean, scale = parameters(3)
    centres, covariances = functions(3, 3)
    expected = reference.expectation(at(centres, covariances), mean, scale, 2, 24)
    assert_near(make(mean, scale, 2.0).expect(gaussians(centres, covariances)), expected, 1e-8)
    narrow = (mean + 0.1)[None], 0.02 * np.eye(3)[None]
    expected = reference.expectation(at(*narrow), mean, scale, 2, 60)
    assert_near(make(mean, scale, 2.0).expect(gaussians(*narrow)), expected, 1e-8)


@pytest.mark.parametrize("alpha", [1.25, 3.0])
def test_gaussian_under_sparse_in_space(alpha):
    mean, scale = parameters(3)
    centres, covariances = functions(3, 3, 2)
    expected = reference.expectation(at(centres, covariances), mean, scale, alpha, 24)
    density = make(mean, scale, alpha)
    assert_near(density.expect(gaussians(centres, covariances), 1e-4), expected, 1e-4)


def test_first_derivatives_in_space():
    mean, scale = parameters(3)
    centres, covariances = functions(3, 5, 2)
    free = reference.pack(torch.from_numpy(mean), torch.from_numpy(scale)).requires_grad_()
    value = make(*reference.unpack(free, 3), 2.0).expect(gaussians(centres, covariances))
    actual = torch.stack([torch.autograd.grad(v, free, retain_graph=True)[0] for v in value])
    operands = [np.stack([x] * 2) for x in (mean, scale)]
    expected, gradient, _ = reference.jets(*operands, centres, covariances, 2, refine=0.6)
    assert_near(value, expected, 1e-8)
    assert_rows_near(actual, gradient, 1e-8)


# ---- a thousand pairs


BLOCKS = {"mean": slice(0, 2), "scale": slice(2, 5)}


def assert_jets(value, gradient, hessian, expected, bar):
    """Every block of derivatives against its own size."""
    assert_near(value, expected[0], bar)
    for rows in BLOCKS.values():
        assert_rows_near(gradient[:, rows], expected[1][:, rows], bar)
        if hessian is not None:
            for columns in BLOCKS.values():
                assert_rows_near(hessian[:, rows, columns], expected[2][:, rows, columns], bar)


def library_jets(case, dtype, second):
    """Each density under its own function: the diagonal of what `expect` gives."""
    mean, scale, centre, covariance = (torch.from_numpy(x).to(dtype) for x in case)
    free = reference.pack(mean, scale).requires_grad_()
    values = [
        fc.Paraboloid(*reference.unpack(one, 2)).expect(gaussians(c, v, dtype))
        for one, c, v in zip(*(x.split(5) for x in (free, centre, covariance)), strict=True)
    ]
    value = torch.cat([x.diagonal() for x in values])
    assert value.dtype == dtype
    if not second:
        return value, torch.autograd.grad(value.sum(), free)[0], None
    (gradient,) = torch.autograd.grad(value.sum(), free, create_graph=True)
    rows = [torch.autograd.grad(x.sum(), free, retain_graph=True)[0] for x in gradient.unbind(-1)]
    return value, gradient, torch.stack(rows, -2)


@pytest.fixture(scope="module")
def thousand():
    case = pairs.plane()
    return case, reference.jets(*case, 2)


@pytest.mark.xdist_group("thousand pairs")
@pytest.mark.parametrize(("dtype", "bar"), [(DOUBLE, 1e-8), (torch.float32, 1e-5)])
def test_a_thousand_pairs(thousand, dtype, bar):
    """Values and first derivatives, at the tolerance that is set by default."""
    case, expected = thousand
    assert_jets(*library_jets(case, dtype, False), expected, bar)


@pytest.mark.xdist_group("thousand pairs")
@pytest.mark.parametrize(("dtype", "bar"), [(DOUBLE, 1e-8), (torch.float32, 1e-5)])
def test_second_derivatives_of_some_pairs(thousand, dtype, bar):
    case, expected = ([x[:28] for x in y] for y in thousand)
    assert_jets(*library_jets(case, dtype, True), expected, bar)


@pytest.mark.xdist_group("thousand pairs")
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bar"), [(DOUBLE, 1e-8), (torch.float32, 1e-5)])
def test_second_derivatives_of_a_thousand_pairs(thousand, dtype, bar):
    case, _ = thousand
    for rows in np.array_split(np.arange(len(case[0])), 20):
        some, right = ([x[rows] for x in y] for y in thousand)
        assert_jets(*library_jets(some, dtype, True), right, bar)


def test_the_check_of_a_thousand_pairs_can_fail(thousand):
    _, expected = thousand
    for k in range(3):
        wrong = [x.copy() for x in expected]
        wrong[k][17] *= 1 + 1e-7
        wrong[k][17] += 1e-6
        with pytest.raises(AssertionError):
            assert_jets(*wrong, expected, 1e-8)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 3.0, 4.0])
def test_derivatives_under_other_alphas(alpha):
    case = pairs.plane(8, seed=4)
    expected = reference.jets(*case, alpha)
    mean, scale, centre, covariance = (torch.from_numpy(x) for x in case)
    free = reference.pack(mean, scale).requires_grad_()
    rows = []
    for k in range(8):
        one = fc.TsallisGaussian(*reference.unpack(free[k], 2), alpha)
        rows.append(one.expect(gaussians(centre[k : k + 1], covariance[k]))[0])
    value = torch.stack(rows)
    (gradient,) = torch.autograd.grad(value.sum(), free, create_graph=True)
    second = [torch.autograd.grad(x.sum(), free, retain_graph=True)[0] for x in gradient.unbind(-1)]
    assert_jets(value, gradient, torch.stack(second, -2), expected, 1e-8)


# ---- tolerance


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-6, 1e-8, 1e-10])
def test_tolerance_is_kept(alpha, tolerance):
    case = pairs.plane(20, seed=5)
    expected, _, _ = reference.jets(*case, alpha)
    mean, scale, centre, covariance = (torch.from_numpy(x) for x in case)
    ours = [
        make(mean[k], scale[k], alpha).expect(
            gaussians(centre[k : k + 1], covariance[k]), tolerance
        )
        for k in range(20)
    ]
    assert_near(torch.cat(ours), expected, tolerance)


def test_a_looser_tolerance_is_another_computation():
    density, basis = make(*parameters(2), 2.0), gaussians(*functions(2, 2))
    fine, rough = density.expect(basis, 1e-12), density.expect(basis, 1e-2)
    assert 1e-12 < (fine - rough).abs().max() < 1e-2


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_estimate_of_the_error_bounds_it(alpha):
    mean, scale = parameters(2)
    centres, covariances = functions(2, 2)
    expected = reference.expectation(at(centres, covariances), mean, scale, alpha, 80)
    for tolerance in (1e-2, 1e-4, 1e-7):
        expectation = fc.expect_with_error(
            make(mean, scale, alpha), gaussians(centres, covariances), tolerance
        )
        error = np.abs(expectation.value.numpy() - expected)
        assert (expectation.error.numpy() <= tolerance * (1 + expected)).all()
        assert (error <= 1.1 * expectation.error.numpy() + 1e-11).all()
    exact = make(mean, scale, alpha).expect(gaussians(centres, covariances), tolerance)
    assert torch.equal(expectation.value, exact)


# ---- extremes


def exact_on_a_line(scale, centre, variance):
    """E under the paraboloid of mean 0, in closed form with 80 digits."""
    with mpmath.workdps(80):
        scale, b, v = (mpmath.mpf(x) for x in (scale, -centre, variance))  # tails, not 1 - tails
        level = (mpmath.gamma(mpmath.mpf(5) / 2) / mpmath.sqrt(2 * mpmath.pi * scale)) ** (
            mpmath.mpf(2) / 3
        )
        radius, s = mpmath.sqrt(2 * level * scale), mpmath.sqrt(v)
        low, high = (-radius - b) / s, (radius - b) / s

        def normal(z):
            return mpmath.exp(-(z**2) / 2) / mpmath.sqrt(2 * mpmath.pi)

        def tail(z):
            return mpmath.erfc(z / mpmath.sqrt(2)) / 2

        mass = tail(low) - tail(high)
        first = s * (normal(low) - normal(high)) + b * mass
        second = v * (mass + low * normal(low) - high * normal(high))
        second += 2 * b * (first - b * mass) + b**2 * mass
        return float(level * mass - second / (2 * scale))


@pytest.mark.parametrize(
    ("scale", "centre", "variance"),
    [
        (1.0, 0.2, 1e-8), (1.0, 0.0, 1e-12), (1.0, 1.14, 1e-6), (1.0, 1.2, 1e-3), (1.0, 1.7, 1e-3),
        (1.0, 3.0, 0.1), (1.0, 6.0, 0.1), (1.0, 0.3, 1e6), (1e-6, 0.5, 0.01), (1e-8, 0.5, 1e-3),
        (1e4, 30.0, 100.0), (1e4, 300.0, 100.0), (1.0, 30.0, 2.0), (1e8, 1.0, 1e-6),
    ],
)  # fmt: skip
def test_tiny_values_are_right_to_their_own_size(scale, centre, variance):
    expected = exact_on_a_line(scale, centre, variance)
    assert expected > 0
    mean, square = torch.zeros(1, dtype=DOUBLE), torch.full((1, 1), scale, dtype=DOUBLE)
    basis = gaussians([[centre]], [[variance]])
    assert_relative(fc.Paraboloid(mean, square).expect(basis), [expected], 1e-8)


def test_tiny_values_in_the_plane():
    """A function outside the ellipse, ever further away: values down to 1e-197."""
    scale = np.array([[0.2, 0.05], [0.05, 0.1]])
    centres = np.stack([np.linspace(0.8, 1.7, 10), np.linspace(0.3, 0.46, 10)], -1)
    covariance = np.stack([1e-3 * np.eye(2)] * 10)
    operands = [np.stack([x] * 10) for x in (np.zeros(2), scale)]
    expected, gradient, _ = reference.jets(*operands, centres, covariance, 2, refine=1.5)
    assert_relative(reference.jets(*operands, centres, covariance, 2)[0], expected, 1e-9)
    assert expected.min() < 1e-190
    mean = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    density, basis = fc.Paraboloid(mean, torch.from_numpy(scale)), gaussians(centres, covariance)
    large = expected > 1e-60  # what is promised is an error that is absolute there
    assert_relative(density.expect(basis)[large], expected[large], 1e-6)
    value = density.expect(basis, 1e-12)
    assert_relative(value, expected, 1e-6)
    actual = torch.stack([torch.autograd.grad(v, mean, retain_graph=True)[0] for v in value])
    size = np.abs(gradient[:, :2]).max(-1, keepdims=True)
    assert_near(actual.numpy() / size, gradient[:, :2] / size, 1e-6)


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("basis", [fc.GaussianBasis, fc.ParaboloidBasis])
@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0, 3.0])
def test_sizes_from_1e_12_to_1e12(d, basis, alpha):
    shape = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=DOUBLE)[:d, :d]
    for size, spread in itertools.product((1e-12, 1.0, 1e12), repeat=2):
        mean = torch.zeros(d, dtype=DOUBLE, requires_grad=True)
        scale = (size * shape).requires_grad_()
        centres = torch.tensor([0.0, 0.5, 30.0, 1e6], dtype=DOUBLE).unsqueeze(-1).expand(4, d)
        value = make(mean, scale, alpha).expect(basis(centres, spread * torch.eye(d, dtype=DOUBLE)))
        gradients = torch.autograd.grad(value.sum(), (mean, scale))
        assert (value >= 0).all()
        assert value.isfinite().all()
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("basis", [fc.GaussianBasis, fc.ParaboloidBasis])
def test_the_narrow_one_of_two_is_a_point(alpha, basis):
    """A narrow density reads the function off, a narrow function the density."""
    mean, scale = (torch.from_numpy(x) for x in parameters(2))
    centre, eye = mean + 0.1, torch.eye(2, dtype=DOUBLE)
    narrow = basis(centre.unsqueeze(0), 1e-20 * eye)  # a paraboloid's radius is its 1/4th power
    density = make(mean, scale, alpha)
    assert_near(density.expect(narrow), density.prob(centre).unsqueeze(0), 1e-6)
    point = make(mean, 1e-20 * scale, alpha)
    wide = basis(centre.unsqueeze(0), 0.5 * eye)
    assert_near(point.expect(wide), wide(mean), 1e-6)


def test_a_thin_ellipse_in_float32():
    turn = torch.tensor([[0.7648, -0.6442], [0.6442, 0.7648]], dtype=DOUBLE)
    turn = torch.linalg.qr(turn).Q
    scale = (turn @ torch.diag(torch.tensor([1.0, 1e-5], dtype=DOUBLE)) @ turn.mT).float()
    scale = (scale + scale.mT) / 2
    basis = fc.GaussianBasis(torch.zeros(1, 2), scale)
    single = fc.Gaussian(torch.zeros(2), scale).expect(basis)
    double = fc.Gaussian(torch.zeros(2, dtype=DOUBLE), scale.double()).expect(basis.to(DOUBLE))
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)
