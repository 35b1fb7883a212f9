"""Native expectations under paraboloids and native EM against torch's operations."""

import itertools
import math

import pytest
import torch

import fenchel.continuous as fc
from fenchel._kernels import continuous as kernels
from fenchel._kernels import library
from fenchel.continuous import expectations
from fenchel.continuous.ball import Rule
from tests.kernels.native.cases import native, needs_library

pytestmark = needs_library

F64 = torch.float64


def _pairs(d, count, seed=0):
    """Gaussians of all sizes and shapes, inside and outside of ellipsoids of all shapes."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=F64)

    def matrix(deviation):
        axes = torch.linalg.qr(torch.randn(count, d, d, generator=g, dtype=F64)).Q
        return axes @ deviation.square().diag_embed() @ axes.mT

    scale = matrix(10 ** (uniform(count, d) - 0.5))
    size = 10 ** (3 * uniform(count, 1) - 2)
    covariance = matrix(size * 10 ** -(1.5 * uniform(count, d)))
    mean, centre = (torch.randn(count, d, generator=g, dtype=F64) for _ in range(2))
    return mean, scale, centre, covariance


def _native(operands, tolerance, derivatives=True):
    reach, digits = Rule.closed(tolerance).reach, -math.log10(tolerance)
    return kernels.paraboloid_expectation(*operands, reach, digits, derivatives)


@pytest.mark.parametrize("tolerance", [1e-6, 1e-9, 1e-11])
@pytest.mark.parametrize(("d", "count"), [(1, 2000), (2, 1500), (3, 40)])
def test_expectations_within_a_tenth_of_the_tolerance(d, count, tolerance):
    operands = _pairs(d, count)
    actual = _native(operands, tolerance)
    expected = expectations.by_moments(*operands, Rule(120 if d < 3 else 70, 12.0))
    for one, other in zip(actual, expected, strict=True):
        error = (one - other).abs() / (1 + other.abs())
        assert float(error.max()) <= 0.1 * tolerance


@pytest.mark.parametrize("variant", library.VARIANTS)
def test_every_instruction_set_gives_the_same_numbers(variant):
    """A set the machine lacks falls back to its best one."""
    for d in (1, 2, 3):
        operands = _pairs(d, 24, seed=d)
        best = _native(operands, 1e-9)
        with native(variant=variant):
            for one, other in zip(_native(operands, 1e-9), best, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_same_bits_for_any_number_of_threads():
    operands, before = _pairs(2, 500), torch.get_num_threads()
    first = _native(operands, 1e-9)
    weights, positions = torch.rand(33, 50, dtype=F64) + 0.01, fc.cell_centers(5, 10).to(F64)
    fitted = fc.fit_mixture(weights, positions, 3)
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for one, other in zip(_native(operands, 1e-9), first, strict=True):
                assert torch.equal(one, other), threads
            again = fc.fit_mixture(weights, positions, 3)
            assert torch.equal(again.components.mean, fitted.components.mean), threads
    finally:
        torch.set_num_threads(before)


def test_without_derivatives_the_value_is_the_same():
    operands = _pairs(2, 100)
    value, *slopes = _native(operands, 1e-9, derivatives=False)
    assert torch.equal(value, _native(operands, 1e-9)[0])
    assert all(slope.numel() == 0 for slope in slopes)


@pytest.mark.parametrize("place", range(4))
def test_nan_stays_with_its_pair(place):
    operands = [x.clone() for x in _pairs(2, 9)]
    clean = _native(operands, 1e-9)[0]
    operands[place][4] = math.nan
    value = _native(operands, 1e-9)[0]
    assert value[4].isnan()
    kept = torch.arange(9) != 4
    assert torch.equal(value[kept], clean[kept])


def test_far_away_and_very_wide_or_narrow_gaussians():
    mean, scale = torch.zeros(4, 2, dtype=F64), torch.eye(2, dtype=F64).expand(4, 2, 2)
    far = torch.tensor([[1e8, 0], [0, 40.0], [0, 0], [0, 0]], dtype=F64)
    size = torch.tensor([1e-3, 1.0, 1e12, 1e-12], dtype=F64)
    covariance = size[:, None, None] * torch.eye(2, dtype=F64)
    value = _native((mean, scale, far, covariance), 1e-9)[0]
    assert value[0] == 0
    assert 0 <= value[1] < 1e-200
    assert float(value[2]) == pytest.approx(1 / (2 * math.pi * 1e12), rel=1e-9)  # flat: its height
    assert float(value[3]) == pytest.approx(math.pi**-0.5, rel=1e-9)  # a point: the peak


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    ("shape", "modes"),
    # no fewer positions than modes: those are refused, see test_bad_input
    [((1,), 1), *itertools.product([(7,), (23,), (14, 14), (3, 5)], [1, 2, 5])],
)
def test_mixtures_as_in_torch(shape, modes, dtype):
    positions = fc.cell_centers(*shape).to(dtype) + 3
    g = torch.Generator().manual_seed(modes)
    weights = torch.rand(2, 3, len(positions), generator=g, dtype=F64).to(dtype) ** 6
    weights[..., -1] = 0.5  # never all zero
    start = fc.Random(3, generator=torch.Generator().manual_seed(0))
    # Restarts compare likelihoods, which in float32 are ties that rounding decides.
    for begin in (None, start) if dtype == F64 else (None,):
        mixture = fc.fit_mixture(weights, positions, modes, iterations=10, start=begin)
        start.generator.manual_seed(0)
        with native(False):
            expected = fc.fit_mixture(weights, positions, modes, iterations=10, start=begin)
        tolerance = 2e-5 if dtype == torch.float32 else 1e-11
        for one, other in (
            (mixture.mixing, expected.mixing),
            (mixture.components.mean, expected.components.mean),
            (mixture.components.covariance_matrix, expected.components.covariance_matrix),
        ):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_start_with_more_batch_axes_than_the_weights():
    positions = fc.cell_centers(6, 6).to(F64)
    weights = torch.rand(36, dtype=F64, generator=torch.Generator().manual_seed(0)) + 0.1
    means = torch.rand(4, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    square = 0.1 * torch.eye(2, dtype=F64).expand(4, 2, 2, 2)
    start = fc.Mixture(torch.full((4, 2), 0.5, dtype=F64), fc.Gaussian(means, square))
    mixture = fc.fit_mixture(weights, positions, 2, start=start)
    with native(False):
        expected = fc.fit_mixture(weights, positions, 2, start=start)
    assert mixture.mixing.shape == (4, 2)
    torch.testing.assert_close(mixture.components.mean, expected.components.mean)


def test_a_mode_without_mass_keeps_what_it_had():
    positions = fc.cell_centers(10).to(F64)
    weights = torch.zeros(10, dtype=F64)
    weights[2] = 1.0
    means = torch.tensor([[0.25], [1e3]], dtype=F64)
    square = torch.full((2, 1, 1), 1e-4, dtype=F64)
    start = fc.Mixture(torch.tensor([0.5, 0.5], dtype=F64), fc.Gaussian(means, square))
    mixture = fc.fit_mixture(weights, positions, 2, start=start)
    assert mixture.mixing.tolist() == [1.0, 0.0]
    assert float(mixture.components.mean[1, 0]) == pytest.approx(1e3)
