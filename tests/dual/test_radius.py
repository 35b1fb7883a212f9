"""The least divergence within a radius: its conditions, its search, its derivatives."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
from fenchel import dual
from tests.dual.problems import F64, LINE, plane, space


def test_the_radius_is_met_or_does_not_bind():
    templates, u, _ = plane()
    z = 0.4 * torch.randn(9, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    z[:3] /= 10
    solution = dual.within_radius(templates, u, z, 0.2)
    distance = (u @ templates + z - solution.estimate.mean).norm(dim=-1)
    free = z.norm(dim=-1) <= 0.2
    assert free.any()
    assert not free.all()
    torch.testing.assert_close(distance[~free], torch.full_like(distance[~free], 0.2))
    torch.testing.assert_close(solution.estimate.weights[free], u.expand(int(free.sum()), -1))
    assert not solution.reliability[free].any()
    p = solution.estimate.weights
    torch.testing.assert_close(
        solution.divergence, (p * (p / u).log()).sum(-1), atol=1e-14, rtol=1e-10
    )


def test_nothing_within_the_radius_has_less_divergence():
    templates, u, z = plane()
    solution = dual.within_radius(templates, u, z, 0.5)
    p, target = solution.estimate.weights, u @ templates + z
    g = torch.Generator().manual_seed(2)
    tried = 0
    for size in (1e-4, 1e-3, 1e-2, 1e-1):
        for _ in range(200):
            other = p * (size * torch.randn(len(p), generator=g, dtype=F64)).exp()
            other = other / other.sum()
            if (target - other @ templates).norm() <= 0.5:
                tried += 1
                assert (other * (other / u).log()).sum() >= solution.divergence - 1e-15
    assert tried > 50


def test_the_papers_radius_is_another_problem():
    """D-MEM: the estimate at a reliability is not that within 1 / (2 reliability)."""
    templates, u, z = plane()
    e = dual.estimate(templates, u, z, 0.833)
    squared = float((u @ templates + z - e.mean).square().sum())
    assert abs(squared - 1 / (2 * 0.833)) > 0.05
    same = dual.within_radius(templates, u, z, squared**0.5)
    torch.testing.assert_close(same.estimate.weights, e.weights, rtol=1e-9, atol=1e-12)
    assert float(same.reliability) == pytest.approx(0.833, rel=1e-9)


def test_penalised_likelihood_and_bayes():
    """D-E27..30: 1 / (2 noise^2) |.|^2 + strength KL has the estimate's minimiser."""
    templates, u, z = plane()
    noise, strength = 0.7, 1.9
    e = dual.estimate(templates, u, z, dual.reliability_of(noise, strength))
    target = u @ templates + z

    def cost(p):
        pull = (target - p @ templates).square().sum() / (2 * noise**2)
        return pull + strength * (p * (p / u).log()).sum()

    g = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 1e-1):
        other = e.weights * (size * torch.randn(len(u), generator=g, dtype=F64)).exp()
        assert cost(other / other.sum()) > cost(e.weights)
    with pytest.raises(ValueError, match="noise must be finite and > 0"):
        dual.reliability_of(0.0)


# ---- out of reach, and next to it


def test_out_of_reach():
    templates = torch.tensor([[0.0], [1.0]], dtype=F64)
    solution = dual.within_radius(templates, None, torch.tensor([4.0], dtype=F64), 0.1)
    assert solution.estimate.status == fl.Status.INFEASIBLE
    assert float(solution.estimate.mean) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="radius must be finite and > 0"):
        dual.within_radius(templates, None, torch.tensor([4.0], dtype=F64), 0.0)


@pytest.mark.parametrize("distance", [0.0999, 0.1001])
def test_infeasible_is_proven_on_both_sides_of_the_hulls_distance(distance):
    """The target lies beyond the hull by a little less, and a little more, than the radius."""
    templates, u, _ = space(8, 2)
    far = templates[templates[:, 0].argmax()]
    step = torch.tensor([1.0, 0.0], dtype=F64) * distance
    z = far + step - u / u.sum() @ templates
    solution = dual.within_radius(templates, u, z, 0.1)
    expected = fl.Status.OK if distance < 0.1 else fl.Status.INFEASIBLE
    assert solution.estimate.status == expected


@pytest.mark.parametrize("radius", [1e-6, 1e-9, 1e-11])
def test_a_tiny_radius_deep_inside_the_hull_is_feasible(radius):
    templates, _, z = space()
    solution = dual.within_radius(templates, None, 0.1 * z, radius)
    assert solution.estimate.status == fl.Status.OK
    distance = (templates.mean(0) + 0.1 * z - solution.estimate.mean).norm()
    assert float(distance) == pytest.approx(radius, rel=1e-14 / radius)


def test_a_small_radius_around_a_target_inside():
    solution = dual.within_radius(LINE, None, torch.tensor([0.2], dtype=F64), 1e-7)
    assert solution.estimate.status == fl.Status.OK
    assert float(solution.estimate.mean) == pytest.approx(0.7 - 1e-7, abs=1e-13)


def test_where_rounding_decides_it_is_not_called_infeasible():
    templates, _, z = space()
    solution = dual.within_radius(templates, None, 0.1 * z, 1e-15)
    assert solution.estimate.status == fl.Status.MAX_STEPS
    assert "enlarge the radius" in solution.estimate.explain()


@pytest.mark.parametrize(("length", "status"), [(0.05, fl.Status.OK), (1.0, fl.Status.INFEASIBLE)])
def test_templates_that_are_all_the_same(length, status):
    u = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.05, 0.2], dtype=F64)
    templates = torch.tensor([0.1, -0.7, 1 / 3], dtype=F64).expand(6, 3).clone()
    z = torch.tensor([length, 0.0, 0.0], dtype=F64)
    solution = dual.within_radius(templates, u, z, 0.1)
    assert solution.estimate.status == status
    torch.testing.assert_close(solution.estimate.weights, u, rtol=1e-14, atol=0)
    assert 0 <= solution.divergence <= 1e-15
    assert (solution.reliability == 0) == (status == fl.Status.OK)


def test_one_template_has_nothing_to_choose():
    solution = dual.within_radius(LINE[:1], None, torch.tensor([0.2], dtype=F64), 0.1)
    assert solution.estimate.status == fl.Status.INFEASIBLE
    assert solution.divergence == 0
    assert float(solution.estimate.weights) == 1.0


def test_a_row_without_templates_has_no_reliability():
    templates, u, z = space()
    mask = torch.zeros(6, dtype=torch.bool)
    solution = dual.within_radius(templates, u, 10 * z, 0.1, mask=mask)
    assert solution.estimate.status == fl.Status.EMPTY
    assert solution.reliability == 0
    assert solution.divergence == 0


@pytest.mark.parametrize("hidden", [1e3, 1e8, 1e200, math.inf, math.nan])
def test_masked_templates_do_not_set_the_search(hidden):
    g = torch.Generator().manual_seed(0)
    templates = torch.randn(6, 3, generator=g, dtype=F64)
    z = 0.3 * torch.randn(3, generator=g, dtype=F64)
    mask = torch.arange(6) < 5
    expected = dual.within_radius(templates[:5], None, z, 0.1)
    templates[5] = hidden
    solution = dual.within_radius(templates, None, z, 0.1, mask=mask)
    assert solution.estimate.status == fl.Status.OK
    assert float(solution.reliability) == pytest.approx(float(expected.reliability), rel=1e-9)
    assert float(solution.divergence) == pytest.approx(float(expected.divergence), rel=1e-9)
    if math.isfinite(hidden) and hidden < 1e9:
        none = torch.where(mask, 1.0, 0.0).double()
        solution = dual.within_radius(templates, none, z, 0.1)
        assert solution.estimate.status == fl.Status.OK


# ---- derivatives


def test_derivatives_within_a_radius():
    templates, u, z = plane(5)
    leaves = [x.clone().requires_grad_() for x in (templates, u, z, torch.tensor(0.3, dtype=F64))]

    def compute(*operands):
        solution = dual.within_radius(*operands)
        return solution.estimate.mean, solution.reliability, solution.divergence

    assert gradcheck(compute, leaves)
    assert gradgradcheck(compute, leaves)


@pytest.mark.parametrize("evidence", [[0.7], [[0.4], [50.0]], [[0.05], [0.4], [0.7]]])
def test_rows_out_of_reach_do_not_spoil_derivatives(evidence):
    z = torch.tensor(evidence, dtype=F64, requires_grad=True)
    solution = dual.within_radius(LINE, None, z, 0.1)
    out = z.detach().squeeze(-1) > 0.6
    assert (solution.estimate.status == fl.Status.INFEASIBLE).equal(out)
    total = solution.estimate.mean.sum() + solution.reliability.sum() + solution.divergence.sum()
    (slope,) = torch.autograd.grad(total, z)
    assert slope.isfinite().all()
    if z.dim() == 1:
        return
    for row, lost, ours in zip(z.detach(), out, slope, strict=True):
        if lost:
            continue
        alone = row.clone().requires_grad_()
        one = dual.within_radius(LINE, None, alone, 0.1)
        whole = one.estimate.mean.sum() + one.reliability + one.divergence
        (expected,) = torch.autograd.grad(whole, alone)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_the_search_of_a_row_out_of_reach_has_no_derivative():
    z = torch.tensor([0.7], dtype=F64, requires_grad=True)
    solution = dual.within_radius(LINE, None, z, 0.1)
    assert (
        not solution.reliability.requires_grad
        or not torch.autograd.grad(solution.reliability, z)[0]
    )


# ---- what is refused


def test_a_list_is_named_by_within_radius():
    with pytest.raises(TypeError, match="templates must be a tensor"):
        dual.within_radius([[0.0], [1.0]], None, torch.tensor([0.4]), 0.1)


def test_shapes_within_a_radius_are_named():
    with pytest.raises(ValueError, match=r"do not broadcast.*preference \(2,\)"):
        dual.within_radius(torch.randn(6, 3), torch.ones(2, 6), torch.randn(3, 3), 0.1)
