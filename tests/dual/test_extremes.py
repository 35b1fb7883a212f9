"""Estimates at the ends of the range: much and little evidence, stiff rows, whole numbers."""

import pytest
import torch

import fenchel as fl
from fenchel import dual
from tests import needs
from tests.dual.problems import F64, LINE


@pytest.mark.parametrize("size", [1e10, 1e25, 1e26, 1e100])
def test_evidence_of_any_size_takes_its_step(size):
    estimate = dual.estimate(LINE, None, torch.tensor([size], dtype=F64), 1.0)
    assert float(estimate.mean) == 1.0
    assert estimate.gap == 0
    assert estimate.status == fl.Status.OK


@pytest.mark.parametrize("reliability", [1e6, 4e8, 1e9, 1e12])
def test_any_reliability_reaches_the_corner(reliability):
    """4e8 stood still: reliability times the rounding of dw was larger than the step."""
    estimate = dual.estimate(LINE, None, torch.tensor([4.0], dtype=F64), reliability)
    assert float(estimate.mean) == 1.0
    assert estimate.status == fl.Status.OK


@pytest.mark.parametrize("off", [0.0, 1e8, 1e10, 1e13])
def test_evidence_across_the_templates_changes_nothing(off):
    templates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]], dtype=F64)
    estimate = dual.estimate(templates, None, torch.tensor([0.7, off], dtype=F64), 5.0)
    assert float(estimate.mean[0]) == pytest.approx(1.5233293533849517, abs=1e-14)


@pytest.mark.parametrize("size", [1e-8, 1e-11, 3e-13])
def test_little_evidence_is_followed_exactly(size):
    """lam = z / (1 + variance) there, up to the rounding of the templates."""
    estimate = dual.estimate(LINE, None, torch.tensor([size], dtype=F64), 1.0)
    assert float(estimate.multiplier) == pytest.approx(0.8 * size, abs=1e-15)


def test_little_evidence_keeps_its_digits():
    """lam = z / (1 + variance), to first order in z."""
    estimate = dual.estimate(LINE, None, torch.tensor([1e-9], dtype=F64), 1.0)
    assert float(estimate.multiplier) == pytest.approx(0.8e-9, rel=1e-6)


@pytest.mark.parametrize("seed", [*range(1, 21)])
def test_very_stiff_rows_reach_the_hulls_nearest_point(seed):
    """They fell into a corner, from which weights that are zero do not come back."""
    nnls = needs.package("scipy.optimize", "very stiff rows against scipy").nnls
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(6, 3, generator=g, dtype=F64)
    u, z = torch.rand(6, generator=g, dtype=F64) + 0.1, torch.randn(3, generator=g, dtype=F64)
    z = 2 * z / z.norm()
    estimate = dual.estimate(1e5 * templates, u, 1e5 * z, 1e6)
    assert estimate.weights.isfinite().all()
    target = u / u.sum() @ templates + z
    tall = torch.cat([templates.mT, torch.full((1, 6), 1e4, dtype=F64)])
    expected = torch.from_numpy(nnls(tall.numpy(), [*target.tolist(), 1e4])[0])
    nearest = (target - expected @ templates).norm()
    assert float((target - estimate.weights @ templates).norm() - nearest) <= 1e-6
    assert estimate.steps < 60
    assert estimate.status == fl.Status.OK or estimate.gap > 0


def test_values_beyond_the_largest_float_are_no_success():
    for solve in (dual.estimate, dual.first_order):
        solution = solve(LINE, None, torch.tensor([1e200], dtype=F64), 1.0)
        assert solution.status == fl.Status.NONFINITE


def test_whole_numbers_are_as_exact_as_others():
    half = LINE.bfloat16()
    z = torch.tensor([0.25], dtype=torch.bfloat16)
    one, other = (dual.transport(half, None, None, z, 1, g).objective for g in (257, 257.0))
    assert torch.equal(one, other)
    dual.estimate(LINE.half(), None, torch.tensor([0.25]).half(), 100000)
