"""Transport against independent computations: brute force, linear programs, Sinkhorn, loops."""

import doctest
import importlib
import itertools
import math

import numpy
import pytest
import torch
from scipy.optimize import linprog, minimize

from fenchel._solution import Status
from fenchel.dual.estimate import estimate
from fenchel.dual.transport import (
    dot_product_transport,
    transport,
    transport_first_order,
    true_preference,
)
from tests.dual.problems import space

DOUBLE = torch.float64
# By name: `fenchel.dual.transport` is also the function.
MODULES = {
    name: importlib.import_module(f"fenchel.dual.{name}")
    for name in ("transport", "transport_newton", "transport_attention")
}


def draw(n=7, columns=None, d=3, seed=0, batch=(), size=1.0):
    """templates, preference, cost (not symmetric), evidence."""
    g = torch.Generator().manual_seed(seed)
    columns = n if columns is None else columns
    templates = size * torch.randn(*batch, n, d, generator=g, dtype=DOUBLE)
    preference = torch.rand(*batch, columns, generator=g, dtype=DOUBLE) + 0.05
    cost = 2 * torch.rand(*batch, n, columns, generator=g, dtype=DOUBLE)
    return templates, preference, cost, size * torch.randn(*batch, d, generator=g, dtype=DOUBLE)


def plan_of(templates, preference, cost, lam, gamma):
    """As the formula is written. (N, n)"""
    scores = (templates @ lam).unsqueeze(-1) - cost
    return (scores / gamma).softmax(-2) * preference / preference.sum()


def sinkhorn(p, u, cost, gamma, steps=20_000):
    """W_gamma(p, u) with marginals p and u, in the log domain."""
    f, g = torch.zeros_like(p), torch.zeros_like(u)
    for _ in range(steps):
        before = f
        f = gamma * (p.log() - torch.logsumexp((g - cost) / gamma, 1))
        g = gamma * (u.log() - torch.logsumexp((f.unsqueeze(1) - cost) / gamma, 0))
        if (f - before).abs().max() < 1e-14:
            break
    plan = ((f.unsqueeze(1) + g - cost) / gamma).exp()
    return float((plan * cost).sum() + gamma * (plan * plan.log()).sum())


def assert_optimal(e, evidence, reliability, tolerance=1e-10):
    expected = e.prior_mean + evidence - e.multiplier / reliability
    assert (e.mean - expected).abs().max() <= tolerance * (1 + expected.abs().max())
    assert (e.weights.sum(-1) - 1).abs().max() <= 1e-12
    assert (e.status == Status.OK).all()


SIZES = [(7, 7, 3), (7, 4, 3), (3, 3, 6), (6, 2, 1)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("reliability", [1e-4, 0.5, 20.0, 1e3])
@pytest.mark.parametrize("gamma", [0.05, 1.0, 10.0])
def test_the_conditions_of_optimality_hold(shape, reliability, gamma):
    n, columns, d = shape
    templates, preference, cost, evidence = draw(n, columns, d)
    e = transport(templates, preference, cost, evidence, reliability, gamma)
    plan = plan_of(templates, preference, cost, e.multiplier, gamma)
    torch.testing.assert_close(e.weights, plan.sum(-1), rtol=0, atol=1e-10)
    torch.testing.assert_close(e.mean, plan.sum(-1) @ templates, rtol=0, atol=1e-10)
    prior = plan_of(templates, preference, cost, torch.zeros(d, dtype=DOUBLE), gamma).sum(-1)
    torch.testing.assert_close(e.prior_mean, prior @ templates, rtol=0, atol=1e-13)
    assert_optimal(e, evidence, reliability)
    # The objective from the plan itself, and no gap to the dual as written.
    apart = e.prior_mean + evidence - e.mean
    value = reliability / 2 * apart.square().sum() + (plan * cost).sum()
    value = value + gamma * torch.xlogy(plan, plan).sum()
    torch.testing.assert_close(e.objective, value, rtol=1e-11, atol=1e-11)
    u = preference / preference.sum()
    lse = torch.logsumexp(((templates @ e.multiplier).unsqueeze(-1) - cost) / gamma, 0)
    dual = (e.prior_mean + evidence) @ e.multiplier - e.multiplier.square().sum() / (
        2 * reliability
    )
    dual = dual - gamma * ((u * lse).sum() - (u * u.log()).sum())
    torch.testing.assert_close(e.dual_value, dual, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(e.objective, e.dual_value, rtol=1e-11, atol=1e-11)


def test_the_conditions_can_fail():
    templates, preference, cost, evidence = draw()
    e = transport_first_order(templates, preference, cost, evidence, 5.0, 1.0)
    with pytest.raises(AssertionError):
        assert_optimal(e, evidence, 5.0)


@pytest.mark.parametrize("seed", range(3))
def test_brute_force_over_plans_finds_the_same(seed):
    templates, preference, cost, evidence = draw(5, 4, 2, seed)
    reliability, gamma = 2.0, 0.7
    e = transport(templates, preference, cost, evidence, reliability, gamma)
    u, target = preference / preference.sum(), e.prior_mean + evidence

    def objective(x):
        free = torch.tensor(x.reshape(5, 4), requires_grad=True)
        plan = free.softmax(0) * u
        apart = target - plan.sum(1) @ templates
        value = reliability / 2 * apart.square().sum()
        value = value + (plan * cost).sum() + gamma * (plan * plan.log()).sum()
        (gradient,) = torch.autograd.grad(value, free)
        return value.item(), gradient.numpy().ravel()

    solution = minimize(objective, numpy.zeros(20), jac=True, method="BFGS", options={"gtol": 1e-9})
    weights = (torch.tensor(solution.x.reshape(5, 4)).softmax(0) * u).sum(1)
    assert abs(solution.fun - float(e.objective)) <= 1e-11
    torch.testing.assert_close(e.weights, weights, rtol=0, atol=1e-7)


def test_one_column_is_the_estimation_problem():
    templates, _, cost, evidence = draw(6, 1, 3)
    gamma, reliability = 0.6, 4.0
    e = transport(templates, None, cost, evidence, reliability, gamma)
    base = (-cost.squeeze(-1) / gamma).softmax(0)
    same = estimate(templates, base, evidence, reliability / gamma)
    torch.testing.assert_close(e.weights, same.weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(e.multiplier, gamma * same.multiplier, rtol=1e-10, atol=1e-12)


def test_the_gap_bounds_what_is_missing():
    templates, preference, cost, evidence = draw(12, 12, 4, size=30.0)
    problem = (templates, preference, cost, evidence, 100.0, 0.05)
    best = transport(*problem)
    assert best.status == Status.OK
    assert best.gap <= 1e-9
    for steps in (0, 1, 3):
        e = transport(*problem, max_steps=steps)
        assert e.status == Status.MAX_STEPS
        assert e.steps == steps
        missing = e.objective - best.objective
        assert 0 < missing <= e.gap
        # It is no smaller than the difference of the two values of its own.
        torch.testing.assert_close(e.gap, e.objective - e.dual_value, rtol=1e-8, atol=0)


CORNERS = list(itertools.product([1e-3, 1.0, 1e3], [1e-2, 1.0, 10.0], [1.0, 100.0]))


@pytest.mark.parametrize(("reliability", "gamma", "size"), CORNERS)
def test_steps_stay_few(reliability, gamma, size):
    templates, preference, cost, evidence = draw(16, 16, 5, 1, (4,), size)
    templates = templates * (size / templates.norm(dim=-1).max())
    cost[::2] = torch.cdist(templates, templates)[::2] ** 2
    e = transport(templates, preference, cost, evidence, reliability, gamma)
    assert (e.status == Status.OK).all()
    assert int(e.steps.max()) <= 6 + 7 * math.log10(1 + reliability * size**2 / gamma)


def test_what_rounding_leaves_is_not_called_solved():
    templates, preference, cost, evidence = draw(2, 2, 8, 5)
    e = transport(templates, preference, cost, evidence, 1e12, 1.0)
    assert e.gap > 1e-9 * e.objective.abs()
    assert e.status == Status.MAX_STEPS


@pytest.mark.parametrize("size", [1e3, 1e8, 1e11])
def test_evidence_across_the_templates_moves_no_weight(size):
    """The templates leave out a coordinate exactly: what is there must not end the search."""
    templates, preference, cost, evidence = draw(6, None, 3)
    templates[:, 2] = 0
    evidence[2] = 0
    alone = transport(templates, preference, cost, evidence, 2.0, 0.5)
    across = torch.tensor([0.0, 0.0, size], dtype=DOUBLE)
    both = transport(templates, preference, cost, evidence + across, 2.0, 0.5)
    assert_optimal(both, evidence + across, 2.0)
    torch.testing.assert_close(both.weights, alone.weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1e-9, 1e-11])
def test_little_evidence_keeps_its_digits(size):
    """To first order in the evidence, lam = (1 / a + C / gamma)^-1 z; the mean rounds at 1e-16."""
    templates, preference, cost, evidence = draw(6, None, 3)
    e = transport(templates, preference, cost, size * evidence, 2.0, 0.5)
    plan = plan_of(templates, preference, cost, torch.zeros(3, dtype=DOUBLE), 0.5)
    u = plan.sum(0)
    means = (plan / u).mT @ templates
    spread = templates.mT @ (plan.sum(1, keepdim=True) * templates)
    spread = spread - means.mT @ (u.unsqueeze(1) * means)
    eye = torch.eye(3, dtype=DOUBLE)
    expected = torch.linalg.solve(eye / 2.0 + spread / 0.5, size * evidence)
    assert (e.multiplier - expected).norm() <= (10 * size + 1e-14 / size) * expected.norm()


@pytest.mark.parametrize("constant", [1e3, 1e12])
def test_a_constant_of_the_cost_costs_no_digits(constant):
    templates, preference, cost, evidence = draw()
    cost = (cost * 16).round() / 16  # so that the sum is exact
    expected = transport(templates, preference, cost, evidence, 2.0, 0.25)
    solution = transport(templates, preference, cost + constant, evidence, 2.0, 0.25)
    assert torch.equal(solution.weights, expected.weights)
    torch.testing.assert_close(
        solution.objective, expected.objective + constant, rtol=1e-15, atol=1e-12
    )
    assert solution.gap == expected.gap


# ---- limits and orders


def exact_transport(p, u, cost):
    n, columns = cost.shape
    rows = numpy.kron(numpy.eye(n), numpy.ones((1, columns)))
    sums = numpy.kron(numpy.ones((1, n)), numpy.eye(columns))
    marginals = numpy.concatenate([p.numpy(), u.numpy()])
    solution = linprog(cost.numpy().ravel(), A_eq=numpy.vstack([rows, sums]), b_eq=marginals)
    assert solution.status == 0
    return solution.fun


@pytest.mark.parametrize("gamma", [1e-1, 1e-2, 1e-3])
def test_small_gamma_is_exact_transport(gamma):
    templates, preference, cost, evidence = draw(6, 6, 2)
    e = transport(templates, preference, cost, evidence, 2.0, gamma)
    u = preference / preference.sum()
    apart = e.prior_mean + evidence - e.mean
    transported = float(e.objective - apart.square().sum())
    most = gamma * math.log(36)  # of gamma H
    assert -most <= transported - exact_transport(e.weights, u, cost) <= 1e-9


def test_the_true_preference_tends_to_the_preference():
    templates, preference, _, _ = draw(6)
    cost = torch.cdist(templates, templates)
    u = preference / preference.sum()
    off = [
        float((true_preference(templates, u, cost, gamma).weights - u).abs().max())
        for gamma in (1.0, 0.1, 0.01)
    ]
    assert off[0] > 1e-2 > off[1] > off[2]
    assert off[2] < 1e-12
    tied = torch.zeros_like(cost)  # where the cost does not tell them apart, it does not
    shared = true_preference(templates, u, tied, 0.01).weights
    torch.testing.assert_close(shared, torch.full_like(u, 1 / 6))


def test_the_true_preference_minimises_transport():
    templates, preference, cost, _ = draw(5)
    u = preference / preference.sum()
    actual = true_preference(templates, u, cost, 0.5)
    torch.testing.assert_close(actual.weights.sum(), u.sum())  # D-E37 as printed sums to more
    torch.testing.assert_close(actual.mean, actual.weights @ templates)
    least = sinkhorn(actual.weights, u, cost, 0.5)
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        other = actual.weights * torch.rand(5, generator=g, dtype=DOUBLE).add(0.5)
        assert sinkhorn(other / other.sum(), u, cost, 0.5) > least + 1e-6


def test_without_reliability_nothing_moves():
    templates, preference, cost, evidence = draw()
    prior = true_preference(templates, preference, cost, 0.5)
    e = transport(templates, preference, cost, evidence, 1e-12, 0.5)
    torch.testing.assert_close(e.weights, prior.weights, rtol=0, atol=1e-11)
    torch.testing.assert_close(e.prior_mean, prior.mean, rtol=0, atol=1e-14)


def slope(x, y):
    return numpy.polyfit(numpy.log(x), numpy.log(y), 1)[0]


def test_the_first_order_is_off_by_reliability_squared_over_gamma():
    templates, preference, cost, evidence = draw()

    def off(reliability, gamma):
        e = transport(templates, preference, cost, evidence, reliability, gamma)
        return float((e.multiplier - reliability * evidence).norm())

    small = [2.0**-k for k in range(6, 12)]
    assert abs(slope(small, [off(r, 1.0) for r in small]) - 2) < 0.05
    large = [2.0**k for k in range(6, 12)]
    assert abs(slope(large, [off(0.1, gamma) for gamma in large]) + 1) < 0.05


def test_one_newton_step_is_of_third_order():
    """Newton's direction, with the covariances of the columns computed here."""
    templates, preference, cost, evidence = draw()
    plan = plan_of(templates, preference, cost, torch.zeros(3, dtype=DOUBLE), 1.0)
    share = plan.sum(0)
    means = (plan / share).mT @ templates
    spread = templates.mT @ (plan.sum(1, keepdim=True) * templates)
    spread = spread - means.mT @ (share.unsqueeze(-1) * means)
    small, off = [2.0**-k for k in range(5, 10)], []
    for reliability in small:
        e = transport(templates, preference, cost, evidence, reliability, 1.0)
        matrix = torch.eye(3, dtype=DOUBLE) + reliability * spread
        step = torch.linalg.solve(matrix, reliability * evidence)
        off.append(float((e.multiplier - step).norm()))
    assert abs(slope(small, off) - 3) < 0.1


def test_fenchel_and_young():
    """W(p) + W*(g) = <g, p> exactly where p is the gradient of W* at g (eqs. 33 and 34)."""
    templates, preference, cost, lam = draw(5)
    u, gamma = preference / preference.sum(), 0.5
    scores = templates @ lam
    lse = torch.logsumexp((scores.unsqueeze(-1) - cost) / gamma, 0)
    conjugate = gamma * float((u * lse).sum() - (u * u.log()).sum())
    e = transport_first_order(templates, u, cost, lam, 1.0, gamma)  # whose multiplier is lam

    def gap(p):
        return sinkhorn(p, u, cost, gamma) + conjugate - float(scores @ p)

    assert abs(gap(e.weights)) < 1e-11
    assert gap(0.9 * e.weights + 0.1 * u) > 1e-4


# ---- the costs of the paper


def test_groups_share_evenly():
    """Section 9: cost 0 within a group and infinite outside; equal <t, z> inside."""
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    cost = torch.where(group[:, None] == group, 0.0, math.inf).double()
    g = torch.Generator().manual_seed(0)
    templates = torch.randn(6, 3, generator=g, dtype=DOUBLE)
    templates[:, 0] = group.double()
    evidence = torch.tensor([0.8, 0.0, 0.0], dtype=DOUBLE)
    preference = torch.tensor([0.5, 0.0, 0.0, 0.2, 0.1, 0.2], dtype=DOUBLE)
    expected = torch.tensor([0.5 / 3] * 3 + [0.15] * 2 + [0.2], dtype=DOUBLE)
    e = transport_first_order(templates, preference, cost, evidence, 1.0, 0.5)
    torch.testing.assert_close(e.weights, expected, rtol=0, atol=1e-15)
    used = transport_first_order(
        templates, preference[[0, 3, 4, 5]], cost[:, [0, 3, 4, 5]], evidence, 1.0, 0.5
    )
    torch.testing.assert_close(used.weights, expected, rtol=0, atol=1e-15)
    exact = transport(templates, preference, cost, evidence, 3.0, 0.5)
    assert_optimal(exact, evidence, 3.0)
    for k, mass in enumerate([0.5, 0.3, 0.2]):  # nothing leaves its group
        torch.testing.assert_close(exact.weights[group == k].sum(), exact.mean.new_tensor(mass))


@pytest.mark.parametrize("masked", [False, True])
def test_the_dot_product_cost_needs_no_matrix(masked):
    templates, preference, _, evidence = draw(9, 9, 3, batch=(2,))
    mask = torch.arange(9) < 7 if masked else None
    products = templates @ templates.mT
    cost, gamma = products.max() - products, 1.3
    for function in (transport, transport_first_order):
        one = function(templates, preference, None, evidence, 2.0, gamma, mask=mask)
        two = function(templates, preference, cost, evidence, 2.0, gamma, mask=mask)
        torch.testing.assert_close(one.weights, two.weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(one.multiplier, two.multiplier, rtol=0, atol=1e-11)
        for name in ("objective", "dual_value"):  # those of C = 0
            shifted = getattr(two, name) - products.max()
            torch.testing.assert_close(getattr(one, name), shifted, rtol=0, atol=1e-10)
        assert (one.gap - two.gap).abs().max() <= 1e-12
    weights = true_preference(templates, preference, None, gamma, mask=mask).weights
    expected = true_preference(templates, preference, cost, gamma, mask=mask).weights
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("some", [1, 40])
def test_columns_in_parts_give_the_same(monkeypatch, some):
    templates, preference, cost, evidence = draw(9, 9, 3, batch=(3,))
    for given in (cost, None):
        whole = transport(templates, preference, given, evidence, 5.0, 0.4)
        with monkeypatch.context() as patch:
            patch.setattr(MODULES["transport"], "_ENTRIES", some)
            patch.setattr(MODULES["transport_newton"], "_ENTRIES", some)
            patch.setattr(MODULES["transport_newton"], "_CACHED", some)
            with torch.no_grad():
                parts = transport(templates, preference, given, evidence, 5.0, 0.4)
        torch.testing.assert_close(parts.weights, whole.weights, rtol=0, atol=1e-13)
        torch.testing.assert_close(parts.mean, whole.mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-6), (DOUBLE, 1e-12)], ids=str)
def test_the_dot_product_cost_is_an_average_of_attentions(dtype, off):
    """Section 9, many evidence rows, each with its own reliability and gamma."""
    templates, preference, _, _ = draw(200, 200, 16, size=0.5)
    evidence = draw(4, 1, 16, 1)[0]
    reliability, gamma = torch.tensor([0.5, 1, 2, 3]), torch.tensor([4.0, 4, 3, 2])
    query = reliability[:, None, None] * evidence.unsqueeze(1) + templates  # (row, j, d)
    weights = (query @ templates.mT / gamma[:, None, None]).softmax(-1)
    u = preference / preference.sum()
    expected = (u @ weights) @ templates
    problem = (templates.to(dtype), preference.to(dtype), evidence.to(dtype), reliability, gamma)
    mean = dot_product_transport(*problem)
    assert mean.dtype == dtype
    assert (mean - expected).abs().max() <= off
    first = transport_first_order(*problem[:2], None, *problem[2:])
    assert (first.mean - expected).abs().max() <= off


def test_examples_run():
    for name in ("transport", "transport_attention"):
        result = doctest.testmod(MODULES[name], extraglobs={"torch": torch})
        assert result.attempted > 0
        assert result.failed == 0


def test_a_constant_of_a_column_moves_the_objective_alone():
    """By its preference times it, as the text of `transport` says."""
    templates, u, z = space()
    cost = torch.cdist(templates, templates)
    more = torch.zeros(6, dtype=DOUBLE)
    more[2] = 5.0
    one, two = (transport(templates, u, c, z, 1.0, 0.5) for c in (cost, cost + more))
    torch.testing.assert_close(one.weights, two.weights, rtol=1e-12, atol=1e-14)
    share = u[2] / u.sum()
    assert float(two.objective - one.objective) == pytest.approx(float(5 * share), rel=1e-12)
