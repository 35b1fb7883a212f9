"""Faults that were found by attacking the estimates; each is the smallest call that shows it."""

import math

import pytest
import torch

import fenchel as fl
from fenchel import dual
from tests.dual.problems import F64

LINE = torch.tensor([[0.0], [1.0]], dtype=F64)


@pytest.mark.parametrize("size", [1e10, 1e25, 1e26, 1e100])
def test_evidence_of_any_size_takes_its_step(size):
    found = dual.estimate(LINE, None, torch.tensor([size], dtype=F64), 1.0)
    assert float(found.mean) == 1.0
    assert found.gap == 0
    assert found.status == fl.Status.OK


@pytest.mark.parametrize("reliability", [1e6, 4e8, 1e9, 1e12])
def test_any_reliability_reaches_the_corner(reliability):
    """4e8 stood still: reliability times the rounding of dw was larger than the step."""
    found = dual.estimate(LINE, None, torch.tensor([4.0], dtype=F64), reliability)
    assert float(found.mean) == 1.0
    assert found.status == fl.Status.OK


@pytest.mark.parametrize("off", [0.0, 1e8, 1e10, 1e13])
def test_evidence_across_the_templates_changes_nothing(off):
    templates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]], dtype=F64)
    found = dual.estimate(templates, None, torch.tensor([0.7, off], dtype=F64), 5.0)
    assert float(found.mean[0]) == pytest.approx(1.5233293533849517, abs=1e-14)


@pytest.mark.parametrize("size", [1e-8, 1e-11, 3e-13])
def test_little_evidence_is_followed_exactly(size):
    """lam = z / (1 + variance) there, up to the rounding of the templates."""
    found = dual.estimate(LINE, None, torch.tensor([size], dtype=F64), 1.0)
    assert float(found.multiplier) == pytest.approx(0.8 * size, abs=1e-15)


def test_values_beyond_the_largest_float_are_no_success():
    for solve in (dual.estimate, dual.first_order):
        found = solve(LINE, None, torch.tensor([1e200], dtype=F64), 1.0)
        assert found.status == fl.Status.NONFINITE


def test_whole_numbers_are_as_exact_as_others():
    half = LINE.bfloat16()
    z = torch.tensor([0.25], dtype=torch.bfloat16)
    one, other = (dual.transport(half, None, None, z, 1, g).objective for g in (257, 257.0))
    assert torch.equal(one, other)
    dual.estimate(LINE.half(), None, torch.tensor([0.25]).half(), 100000)


# ---- within a radius


@pytest.mark.parametrize("hidden", [1e3, 1e8, 1e200, math.inf, math.nan])
def test_masked_templates_do_not_set_the_search(hidden):
    g = torch.Generator().manual_seed(0)
    templates = torch.randn(6, 3, generator=g, dtype=F64)
    z = 0.3 * torch.randn(3, generator=g, dtype=F64)
    mask = torch.arange(6) < 5
    wanted = dual.within_radius(templates[:5], None, z, 0.1)
    templates[5] = hidden
    found = dual.within_radius(templates, None, z, 0.1, mask=mask)
    assert found.estimate.status == fl.Status.OK
    assert float(found.reliability) == pytest.approx(float(wanted.reliability), rel=1e-9)
    assert float(found.divergence) == pytest.approx(float(wanted.divergence), rel=1e-9)
    if math.isfinite(hidden) and hidden < 1e9:
        none = torch.where(mask, 1.0, 0.0).double()
        found = dual.within_radius(templates, none, z, 0.1)
        assert found.estimate.status == fl.Status.OK


def test_a_small_radius_around_a_target_inside():
    found = dual.within_radius(LINE, None, torch.tensor([0.2], dtype=F64), 1e-7)
    assert found.estimate.status == fl.Status.OK
    assert float(found.estimate.mean) == pytest.approx(0.7 - 1e-7, abs=1e-13)


def test_one_template_has_nothing_to_choose():
    found = dual.within_radius(LINE[:1], None, torch.tensor([0.2], dtype=F64), 0.1)
    assert found.estimate.status == fl.Status.INFEASIBLE
    assert found.divergence == 0
    assert float(found.estimate.weights) == 1.0


# ---- layers and messages


@pytest.mark.parametrize("solver", [fl.nn.Exact(), fl.nn.FirstOrder()])
def test_padding_of_a_transport_layer_may_hold_anything(solver):
    torch.manual_seed(0)
    layer = fl.nn.TransportAttention(8, 2, solver=solver).double()
    query, templates = torch.randn(2, 3, 8, dtype=F64), torch.randn(2, 4, 8, dtype=F64)
    mask = torch.tensor([[False, False, False, True], [True, True, True, True]])
    wanted = layer(query, templates, key_padding_mask=mask)
    templates[0, 3] = math.nan
    templates[1] = math.inf
    found = layer(query, templates, key_padding_mask=mask)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_shapes_that_do_not_fit_are_named():
    templates = torch.randn(3, 6, 3)
    with pytest.raises(ValueError, match=r"do not broadcast.*reliability \(2,\)"):
        dual.estimate(templates, None, torch.randn(3), torch.ones(2))
    mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="do not broadcast"):
        dual.estimate(templates, None, torch.randn(3), 1.0, mask=mask)


def test_shapes_within_a_radius_are_named():
    with pytest.raises(ValueError, match=r"do not broadcast.*preference \(2,\)"):
        dual.within_radius(torch.randn(6, 3), torch.ones(2, 6), torch.randn(3, 3), 0.1)


def test_tolerance_of_a_mixture_is_checked():
    preference = fl.continuous.Mixture(
        torch.ones(1), fl.continuous.Gaussian(torch.zeros(1, 2), torch.eye(2).expand(1, 2, 2))
    )
    with pytest.raises(ValueError, match="tolerance must be between"):
        dual.gaussian_mixture(preference, torch.ones(2), 1.0, tolerance=-1.0)
