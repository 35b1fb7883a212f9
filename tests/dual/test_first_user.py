"""What a first user of the estimates met with; each is the smallest call that shows it."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
import fenchel.continuous as fc
from fenchel import dual
from tests import needs
from tests.dual.problems import F64, plane

LINE = torch.tensor([[0.0], [1.0]], dtype=F64)


def drawn(n=6, d=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(n, d, generator=g, dtype=F64)
    return (
        templates,
        torch.rand(n, generator=g, dtype=F64) + 0.1,
        torch.randn(d, generator=g).to(F64),
    )


# ---- within a radius


@pytest.mark.parametrize("evidence", [[0.7], [[0.4], [50.0]], [[0.05], [0.4], [0.7]]])
def test_rows_out_of_reach_do_not_spoil_derivatives(evidence):
    z = torch.tensor(evidence, dtype=F64, requires_grad=True)
    found = dual.within_radius(LINE, None, z, 0.1)
    out = z.detach().squeeze(-1) > 0.6
    assert (found.estimate.status == fl.Status.INFEASIBLE).equal(out)
    total = found.estimate.mean.sum() + found.reliability.sum() + found.divergence.sum()
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
        (wanted,) = torch.autograd.grad(whole, alone)
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)


def test_the_search_of_a_row_out_of_reach_has_no_derivative():
    z = torch.tensor([0.7], dtype=F64, requires_grad=True)
    found = dual.within_radius(LINE, None, z, 0.1)
    assert not found.reliability.requires_grad or not torch.autograd.grad(found.reliability, z)[0]


@pytest.mark.parametrize("radius", [1e-6, 1e-9, 1e-11])
def test_a_tiny_radius_deep_inside_the_hull_is_feasible(radius):
    templates, _, z = drawn()
    found = dual.within_radius(templates, None, 0.1 * z, radius)
    assert found.estimate.status == fl.Status.OK
    distance = (templates.mean(0) + 0.1 * z - found.estimate.mean).norm()
    assert float(distance) == pytest.approx(radius, rel=1e-14 / radius)


def test_where_rounding_decides_it_is_not_called_infeasible():
    templates, _, z = drawn()
    found = dual.within_radius(templates, None, 0.1 * z, 1e-15)
    assert found.estimate.status == fl.Status.MAX_STEPS
    assert "enlarge the radius" in found.estimate.explain()


@pytest.mark.parametrize("distance", [0.0999, 0.1001])
def test_infeasible_is_proven_on_both_sides_of_the_hulls_distance(distance):
    """The target lies beyond the hull by a little less, and a little more, than the radius."""
    templates, u, _ = drawn(8, 2)
    far = templates[templates[:, 0].argmax()]
    step = torch.tensor([1.0, 0.0], dtype=F64) * distance
    z = far + step - u / u.sum() @ templates
    found = dual.within_radius(templates, u, z, 0.1)
    wanted = fl.Status.OK if distance < 0.1 else fl.Status.INFEASIBLE
    assert found.estimate.status == wanted


@pytest.mark.parametrize(("length", "status"), [(0.05, fl.Status.OK), (1.0, fl.Status.INFEASIBLE)])
def test_templates_that_are_all_the_same(length, status):
    u = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.05, 0.2], dtype=F64)
    templates = torch.tensor([0.1, -0.7, 1 / 3], dtype=F64).expand(6, 3).clone()
    z = torch.tensor([length, 0.0, 0.0], dtype=F64)
    found = dual.within_radius(templates, u, z, 0.1)
    assert found.estimate.status == status
    torch.testing.assert_close(found.estimate.weights, u, rtol=1e-14, atol=0)
    assert 0 <= found.divergence <= 1e-15
    assert (found.reliability == 0) == (status == fl.Status.OK)


def test_a_row_without_templates_has_no_reliability():
    templates, u, z = drawn()
    mask = torch.zeros(6, dtype=torch.bool)
    found = dual.within_radius(templates, u, 10 * z, 0.1, mask=mask)
    assert found.estimate.status == fl.Status.EMPTY
    assert found.reliability == 0
    assert found.divergence == 0


# ---- comparisons


@pytest.mark.parametrize("reliability", [0.1, 1.0, 1e6])
def test_without_evidence_nothing_is_off(reliability):
    templates, u, z = drawn()
    rows = torch.stack([torch.zeros_like(z), z])
    problem = (templates, u, rows, reliability)
    exact, first = dual.estimate(*problem), dual.first_order(*problem)
    assert not exact.multiplier[0].any()
    assert exact.steps[0] == 0
    for found in (first.compare(exact), exact.compare(first)):
        for name in ("multiplier", "mean", "mean_shift"):
            assert getattr(found, name)[0] == 0
            assert getattr(found, name)[1] > 0
    cost = torch.cdist(templates, templates)
    moved = dual.transport(templates, u, cost, rows, reliability, 0.5)
    near = dual.transport_first_order(templates, u, cost, rows, reliability, 0.5)
    assert not moved.multiplier[0].any()
    assert near.compare(moved).multiplier[0] == 0
    assert near.compare(moved).mean_shift[0] == 0
    assert near.compare(moved).multiplier[1] > 0


def test_evidence_below_rounding_counts_as_none():
    templates, u, z = drawn()
    problem = (templates, u, 1e-30 * z, 1.0)
    assert dual.first_order(*problem).compare(dual.estimate(*problem)).multiplier == 0


def test_against_zero_a_difference_is_infinite():
    templates, u, z = drawn()
    none = dual.estimate(templates, u, torch.zeros_like(z), 1.0)
    some = dual.estimate(templates, u, z, 1.0)
    found = some.compare(none)
    assert found.multiplier == math.inf
    assert found.mean_shift == math.inf
    assert 0 < found.mean < math.inf
    assert none.compare(none).multiplier == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparisons_are_not_of_rounded_numbers(dtype):
    """At a small reliability the orders differ by less than the operands' precision."""
    rounded = [x.to(dtype) for x in drawn()]
    a = 2.0**-20
    for one in (dual.first_order, dual.second_order):
        problems = [(*rounded, a), (*(x.double() for x in rounded), a)]
        low, wide = (one(*p).compare(dual.estimate(*p)) for p in problems)
        for name in ("multiplier", "mean", "mean_shift"):
            assert torch.equal(getattr(low, name), getattr(wide, name))
    covariance = torch.cov(rounded[0].double().T, correction=0, aweights=rounded[1].double())
    z = rounded[2].double()
    wanted = a * (covariance @ z).norm() / z.norm()
    first = dual.first_order(*rounded, a).compare(dual.estimate(*rounded, a))
    assert float(first.multiplier) == pytest.approx(float(wanted), rel=1e-4)


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


def test_little_evidence_keeps_its_digits():
    """lam = z / (1 + variance), to first order in z."""
    found = dual.estimate(LINE, None, torch.tensor([1e-9], dtype=F64), 1.0)
    assert float(found.multiplier) == pytest.approx(0.8e-9, rel=1e-6)


# ---- stiff rows


@pytest.mark.parametrize("seed", [*range(1, 21)])
def test_very_stiff_rows_reach_the_hulls_nearest_point(seed):
    """They fell into a corner, from which weights that are zero do not come back."""
    nnls = needs.package("scipy.optimize", "very stiff rows against scipy").nnls
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(6, 3, generator=g, dtype=F64)
    u, z = torch.rand(6, generator=g, dtype=F64) + 0.1, torch.randn(3, generator=g, dtype=F64)
    z = 2 * z / z.norm()
    found = dual.estimate(1e5 * templates, u, 1e5 * z, 1e6)
    assert found.weights.isfinite().all()
    target = u / u.sum() @ templates + z
    tall = torch.cat([templates.mT, torch.full((1, 6), 1e4, dtype=F64)])
    wanted = torch.from_numpy(nnls(tall.numpy(), [*target.tolist(), 1e4])[0])
    nearest = (target - wanted @ templates).norm()
    assert float((target - found.weights @ templates).norm() - nearest) <= 1e-6
    assert found.steps < 60
    assert found.status == fl.Status.OK or found.gap > 0


# ---- words


def test_every_status_is_explained():
    templates, u, z = drawn()
    mask = torch.tensor([[True] * 6, [False] * 6])
    found = dual.estimate(templates, u, z, 1.0, mask=mask)
    lines = found.explain().splitlines()
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


# ---- Gaussians


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gaussian_in_the_precision_of_its_operands(dtype):
    mean, z = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    found = dual.gaussian(mean, torch.eye(2, dtype=dtype), z, 1.0)
    assert found.mean.dtype == found.multiplier.dtype == dtype
    assert found.objective.dtype == F64


def test_a_covariance_may_lack_rank():
    root = torch.tensor([[1.0], [2.0], [-1.0]], dtype=F64)
    z = torch.tensor([0.3, -0.2, 0.5], dtype=F64)
    found = dual.gaussian(torch.zeros(3, dtype=F64), root @ root.mT, z, 2.0)
    wanted = torch.linalg.solve(torch.eye(3, dtype=F64) / 2 + root @ root.mT, z)
    torch.testing.assert_close(found.multiplier, wanted, rtol=1e-13, atol=1e-15)
    flat = dual.gaussian(torch.zeros(3, dtype=F64), torch.zeros(3, 3, dtype=F64), z, 2.0)
    torch.testing.assert_close(flat.multiplier, 2 * z)
    assert not flat.mean.any()


def test_derivatives_in_a_covariance():
    g = torch.Generator().manual_seed(0)
    root = torch.randn(3, 2, generator=g, dtype=F64, requires_grad=True)
    mean, z = (torch.randn(3, generator=g, dtype=F64, requires_grad=True) for _ in range(2))

    def made(mean, root, z):
        e = dual.gaussian(mean, root @ root.mT, z, 1.5)
        return e.mean, e.multiplier, e.objective

    assert gradcheck(made, (mean, root, z))
    assert gradgradcheck(made, (mean, root, z))
    covariance = (root @ root.mT).detach() + torch.eye(3, dtype=F64)
    assert gradcheck(lambda c: dual.gaussian(mean.detach(), c, z.detach(), 1.5).mean,
                     covariance.requires_grad_())  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mean": [0.0, 0.0]}, TypeError, "mean must be a tensor"),
        ({"mean": torch.tensor([0.0, math.nan])}, ValueError, "mean must be finite"),
        ({"mean": torch.tensor([0, 0])}, TypeError, "mean must be floating point"),
        ({"covariance": torch.ones(2)}, ValueError, r"must be \(..., 2, 2\).*diag_embed"),
        ({"covariance": torch.eye(3)}, ValueError, r"covariance must be \(..., 2, 2\)"),
        ({"covariance": torch.tensor([[1.0, 0.5], [0, 1]])}, ValueError,
         r"covariance must be symmetric.*\(C \+ C.mT\) / 2"),
        ({"covariance": -torch.eye(2)}, ValueError,
         "covariance must have no negative eigenvalue, its smallest is -1.*A @ A.mT"),
        ({"evidence": torch.ones(3)}, ValueError, r"evidence must be \(..., 2\)"),
        ({"evidence": torch.full((2,), math.inf)}, ValueError, "evidence must be finite"),
        ({"evidence": torch.ones(2, 2), "mean": torch.ones(3, 2)}, ValueError,
         r"do not broadcast: mean \(3,\).*evidence \(2,\)"),
        ({"reliability": 0.0}, ValueError, "reliability must be finite and > 0"),
    ],
)  # fmt: skip
def test_messages_of_a_gaussian(change, error, message):
    given = {
        "mean": torch.zeros(2),
        "covariance": torch.eye(2),
        "evidence": torch.ones(2),
        "reliability": 1.0,
    }
    dual.gaussian(**given)
    with pytest.raises(error, match=message):
        dual.gaussian(**(given | change))


def test_messages_of_a_mixture():
    one = fc.Gaussian(torch.zeros(2), torch.eye(2))
    with pytest.raises(TypeError, match=r"one Gaussian: use dual.gaussian\(preference.mean"):
        dual.gaussian_mixture(one, torch.ones(2), 1.0)
    with pytest.raises(TypeError, match=r"preference must be a mixture of Gaussians.*got Tensor"):
        dual.gaussian_mixture(torch.ones(2), torch.ones(2), 1.0)
    three = fc.Mixture(torch.ones(3, 1), fc.Gaussian(torch.zeros(3, 1, 2), torch.eye(2)))
    with pytest.raises(ValueError, match=r"do not broadcast: mean \(3,\).*evidence \(2,\)"):
        dual.gaussian_mixture(three, torch.ones(2, 2), 1.0)
    with pytest.raises(TypeError, match="evidence must be a tensor"):
        dual.gaussian_mixture(three, [1.0, 2.0], 1.0)


# ---- costs


def test_what_rounding_leaves_below_zero_is_a_cost():
    templates, u, z = drawn()
    cost = torch.cdist(templates, templates).square()
    wanted = dual.transport(templates, u, cost, z, 1.0, 0.5)
    low = cost - 1e-7 * cost.max() * torch.eye(6, dtype=F64)
    found = dual.transport(templates, u, low, z, 1.0, 0.5)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"cost must be >= 0.*subtract the least"):
        dual.transport(templates, u, cost - 1e-3 * cost.max(), z, 1.0, 0.5)


def test_a_constant_of_a_column_moves_the_objective_alone():
    """By its preference times it, as the text of `transport` says."""
    templates, u, z = drawn()
    cost = torch.cdist(templates, templates)
    more = torch.zeros(6, dtype=F64)
    more[2] = 5.0
    one, two = (dual.transport(templates, u, c, z, 1.0, 0.5) for c in (cost, cost + more))
    torch.testing.assert_close(one.weights, two.weights, rtol=1e-12, atol=1e-14)
    share = u[2] / u.sum()
    assert float(two.objective - one.objective) == pytest.approx(float(5 * share), rel=1e-12)
