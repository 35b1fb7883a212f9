"""What an estimate says of itself: comparisons, statuses in words, the gap."""

import math

import pytest
import torch

from fenchel import dual
from tests.dual.problems import F64, LINE, plane, space

# ---- comparisons


@pytest.mark.parametrize("reliability", [0.1, 1.0, 1e6])
def test_without_evidence_nothing_is_off(reliability):
    templates, u, z = space()
    rows = torch.stack([torch.zeros_like(z), z])
    problem = (templates, u, rows, reliability)
    exact, first = dual.estimate(*problem), dual.first_order(*problem)
    assert not exact.multiplier[0].any()
    assert exact.steps[0] == 0
    for actual in (first.compare(exact), exact.compare(first)):
        for name in ("multiplier", "mean", "mean_shift"):
            assert getattr(actual, name)[0] == 0
            assert getattr(actual, name)[1] > 0
    cost = torch.cdist(templates, templates)
    moved = dual.transport(templates, u, cost, rows, reliability, 0.5)
    near = dual.transport_first_order(templates, u, cost, rows, reliability, 0.5)
    assert not moved.multiplier[0].any()
    assert near.compare(moved).multiplier[0] == 0
    assert near.compare(moved).mean_shift[0] == 0
    assert near.compare(moved).multiplier[1] > 0


def test_evidence_below_rounding_counts_as_none():
    templates, u, z = space()
    problem = (templates, u, 1e-30 * z, 1.0)
    assert dual.first_order(*problem).compare(dual.estimate(*problem)).multiplier == 0


def test_against_zero_a_difference_is_infinite():
    templates, u, z = space()
    none = dual.estimate(templates, u, torch.zeros_like(z), 1.0)
    some = dual.estimate(templates, u, z, 1.0)
    deviation = some.compare(none)
    assert deviation.multiplier == math.inf
    assert deviation.mean_shift == math.inf
    assert 0 < deviation.mean < math.inf
    assert none.compare(none).multiplier == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparisons_are_not_of_rounded_numbers(dtype):
    """At a small reliability the orders differ by less than the operands' precision."""
    rounded = [x.to(dtype) for x in space()]
    a = 2.0**-20
    for one in (dual.first_order, dual.second_order):
        problems = [(*rounded, a), (*(x.double() for x in rounded), a)]
        low, wide = (one(*p).compare(dual.estimate(*p)) for p in problems)
        for name in ("multiplier", "mean", "mean_shift"):
            assert torch.equal(getattr(low, name), getattr(wide, name))
    covariance = torch.cov(rounded[0].double().T, correction=0, aweights=rounded[1].double())
    z = rounded[2].double()
    expected = a * (covariance @ z).norm() / z.norm()
    first = dual.first_order(*rounded, a).compare(dual.estimate(*rounded, a))
    assert float(first.multiplier) == pytest.approx(float(expected), rel=1e-4)


def test_comparisons_that_make_no_sense_are_named():
    one = dual.estimate(LINE, None, torch.zeros(1, dtype=F64), 1.0)
    two = dual.estimate(torch.eye(2), None, torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match="1 and 2 coordinates"):
        one.compare(two)
    rows = [dual.estimate(LINE, None, torch.zeros(n, 1, dtype=F64), 1.0) for n in (2, 3)]
    with pytest.raises(ValueError, match=r"do not broadcast: this \(2,\), other \(3,\)"):
        rows[0].compare(rows[1])
    with pytest.raises(TypeError, match="other must be an Estimate"):
        one.compare(one.mean)


# ---- words, and the gap


def test_every_status_is_explained():
    templates, u, z = space()
    mask = torch.tensor([[True] * 6, [False] * 6])
    estimate = dual.estimate(templates, u, z, 1.0, mask=mask)
    lines = estimate.explain().splitlines()
    assert lines[0] == "OK: 1 of 2 rows; nothing to do: the row is solved"
    assert lines[1].startswith("EMPTY: 1 of 2 rows; no template takes part")
    rough = dual.estimate(templates, u, 30 * z, 1.0, max_steps=1)
    assert "Raise max_steps" in rough.explain()
    far = dual.within_radius(LINE, None, torch.tensor([4.0], dtype=F64), 0.1).estimate
    assert "enlarge the radius" in far.explain()
    huge = dual.estimate(LINE, None, torch.tensor([1e200], dtype=F64), 1.0)
    assert "range of float64" in huge.explain()
    none = dual.estimate(templates, u, torch.zeros(0, 3, dtype=F64), 1.0)
    assert none.explain() == "no rows"


def test_the_gap_carries_no_derivative():
    templates, u, z = plane()
    z = z.clone().requires_grad_()
    for solve in (dual.estimate, dual.first_order, dual.second_order):
        assert not solve(templates, u, z, 1.0).gap.requires_grad
