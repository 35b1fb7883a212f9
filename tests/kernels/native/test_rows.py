"""Native rows of every family against torch's operations: weights, derivatives, odd rows."""

import math

import pytest
import torch

import fenchel as fl
from tests.kernels.native.cases import native, needs_library

pytestmark = needs_library

FAMILIES = [
    fl.Norm(1.5),
    fl.Norm(2.0),
    fl.Norm(3.0),
    fl.Budget(1),
    fl.Budget(2.5),
    fl.Budget(40),
    fl.Fused(0.0),
    fl.Fused(0.1),
    fl.Fused(2.0),
    fl.Tsallis(1.2),
    fl.Tsallis(1.5),
    fl.Tsallis(2.0),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def both(omega, scores, gradient=None):
    """(weights, derivative) natively and in torch's operations."""
    for enabled in (True, False):
        with native(enabled):
            leaf = scores.clone().requires_grad_()
            weights = fl.solve(leaf, omega).weights
            slope = torch.zeros_like(scores)
            if gradient is not None:
                (slope,) = torch.autograd.grad(weights, leaf, gradient)
            yield weights.detach(), slope


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", ["plain", None])
def test_weights_and_derivatives(omega, dtype, variant):
    generator = torch.Generator().manual_seed(3)
    for keys in (1, 2, 3, 7, 8, 33, 100, 1000):
        for spread in (0.1, 1.0, 5.0, 50.0):
            scores = spread * torch.randn(4, keys, dtype=dtype, generator=generator)
            if isinstance(omega, fl.Budget) and omega.k > keys:
                continue
            gradient = torch.randn(4, keys, dtype=dtype, generator=generator)
            with native(variant=variant):
                (fast, fast_slope), (slow, slow_slope) = both(omega, scores, gradient)
            assert (fast - slow).abs().max() <= TOLERANCE[dtype]
            apart = (fast_slope - slow_slope).abs().max() / (1 + slow_slope.abs().max())
            assert apart <= 50 * TOLERANCE[dtype]


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_odd_rows_are_those_of_the_general_path(omega):
    inf = math.inf
    rows = [
        [1.0, -inf, 0.5, 0.2] * 12,
        [-inf] * 48,
        [math.nan] + [0.0] * 47,
        [inf] + [0.0] * 47,
        [1e30, 1e30] + [-1e30] * 46,
        [0.0] * 48,
        [-inf] * 47 + [3.0],
    ]
    scores = torch.tensor(rows, dtype=torch.float64)
    (fast, _), (slow, _) = both(omega, scores)
    torch.testing.assert_close(fast, slow, equal_nan=True, rtol=0, atol=1e-12)


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_derivatives_of_derivatives(omega):
    keys = 48 if isinstance(omega, fl.Budget) and omega.k > 5 else 6
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, keys, dtype=torch.float64, generator=generator).requires_grad_()
    with native():
        assert torch.autograd.gradcheck(lambda s: fl.solve(s, omega).weights, scores)
        assert torch.autograd.gradgradcheck(lambda s: fl.solve(s, omega).weights, scores)


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_the_certificate_of_native_weights(omega):
    generator = torch.Generator().manual_seed(2)
    for dtype in TOLERANCE:
        scores = 3 * torch.randn(20, 64, dtype=dtype, generator=generator)
        with native():
            solution = fl.solve(scores, omega)
            assert (solution.status == fl.Status.OK).all(), solution.explain()


def test_a_certificate_of_changed_scores_is_refused():
    scores = torch.randn(3, 8)
    with native():
        solution = fl.solve(scores, fl.Tsallis(1.5))
        scores += 1
        with pytest.raises(RuntimeError, match="changed in place after `solve`: scores"):
            _ = solution.gap


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_bits_do_not_depend_on_threads(omega):
    scores = torch.randn(100, 333, generator=torch.Generator().manual_seed(1))
    before, actual = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            with native():
                actual.append(fl.solve(scores, omega).weights)
        finally:
            torch.set_num_threads(before)
    assert actual[0].equal(actual[1])
    assert actual[0].equal(actual[2])
