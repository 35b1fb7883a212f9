"""The exact estimate: certificates over the whole range, limits, identities, derivatives."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
from fenchel import dual
from fenchel.dual import newton
from tests.dual.problems import F64, draw, order, plane


def scale(problem, actual):
    """1 + |objective| + |<lam, b>| + |K(lam)|, of templates about their middle."""
    templates = problem.templates - problem.templates[problem.preference > 0].mean(0)
    u = problem.preference / problem.preference.sum()
    target = u @ templates + problem.evidence
    potential = torch.logsumexp(templates @ actual.multiplier + u.log(), 0)
    inner = actual.multiplier @ target
    return 1 + abs(actual.objective) + abs(inner) + abs(potential)


def check(seed):
    problem = draw(seed)
    estimate = dual.estimate(*problem)
    stiff = problem.stiffness
    relative = float(estimate.gap / scale(problem, estimate))
    if stiff <= 1e6:
        assert estimate.status == fl.Status.OK, (seed, stiff)
    if estimate.status == fl.Status.OK:
        assert relative <= 1e-12, (seed, stiff, relative)
    else:
        assert estimate.status == fl.Status.MAX_STEPS
        # Not there, and it says so: the gap is the difference of the values.
        assert estimate.gap > 0
    if stiff <= 1e6:
        assert estimate.steps <= (30 if stiff <= 1e3 else 200), (seed, stiff)
    difference = float(
        (estimate.objective - estimate.dual_value - estimate.gap) / scale(problem, estimate)
    )
    assert abs(difference) <= 1e-12, (seed, stiff)


@pytest.mark.parametrize("block", range(6))
def test_certificates_over_the_whole_range(block):
    for seed in range(100 * block, 100 * (block + 1)):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_certificates_of_ten_thousand_problems(block):
    for seed in range(100 * block, 100 * (block + 1)):
        check(1000 + seed)


def test_a_wrong_answer_has_a_gap():
    templates, u, z = plane()
    exact = dual.estimate(templates, u, z, 2.0)
    rough = dual.estimate(templates, u, z, 2.0, max_steps=1)
    assert exact.gap < 1e-20
    assert rough.gap > 1e-9
    assert rough.status == fl.Status.MAX_STEPS
    # and it bounds what is lost
    assert rough.objective - exact.objective <= rough.gap


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("d", [1, 3, 20])
def test_stationarity_and_its_weights(n, d):
    """h = b - lam / reliability, and p = softmax(log u + <t, lam>) (D-E10, D-T1)."""
    g = torch.Generator().manual_seed(n + d)
    templates, z = torch.randn(n, d, generator=g, dtype=F64), torch.randn(d, generator=g, dtype=F64)
    u = torch.rand(n, generator=g, dtype=F64)
    e = dual.estimate(templates, u, z, 1.7)
    target = u / u.sum() @ templates + z
    torch.testing.assert_close(e.mean, target - e.multiplier / 1.7, rtol=0, atol=1e-14)
    weights = torch.softmax(u.log() + templates @ e.multiplier, 0)
    torch.testing.assert_close(e.weights, weights, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(e.mean, e.weights @ templates, rtol=0, atol=1e-14)


def test_no_weights_do_better():
    """Against gradient descent on softmax-parametrised weights (D-E3)."""
    templates, u, z = plane()
    target = u @ templates + z
    for reliability in (0.05, 0.3, 1.0, 3.0, 10.0):
        e = dual.estimate(templates, u, z, reliability)
        free = torch.zeros(len(u), dtype=F64, requires_grad=True)
        search = torch.optim.LBFGS(
            [free],
            max_iter=500,
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def value(reliability=reliability, free=free, search=search):
            search.zero_grad()
            p = torch.softmax(free, 0)
            pull = reliability / 2 * (target - p @ templates).square().sum()
            actual = pull + (p * (p / u).log()).sum()
            actual.backward()
            return actual.detach()

        search.step(value)
        weights = torch.softmax(free.detach(), 0)
        torch.testing.assert_close(weights, e.weights, rtol=0, atol=1e-6)
        assert abs(float(value() - e.objective)) < 1e-11


def test_limits():
    """Without trust in the evidence the prior mean, with all of it the nearest point (D-LIM)."""
    templates, u, _ = plane(3)
    inside = torch.tensor([0.2, 0.3, 0.5], dtype=F64) @ templates - u @ templates
    assert torch.allclose(dual.estimate(templates, u, inside, 1e-12).mean, u @ templates)
    sure = dual.estimate(templates, u, inside, 1e8)
    assert torch.allclose(sure.weights, torch.tensor([0.2, 0.3, 0.5], dtype=F64), atol=1e-6)
    corner = 10 * (templates[0] - templates.mean(0))
    assert dual.estimate(templates, u, corner, 1e4).weights[0] > 1 - 1e-6


def test_shared_templates_give_what_copies_give():
    g = torch.Generator().manual_seed(0)
    templates = torch.randn(2, 1, 1, 12, 20, generator=g, dtype=F64)
    evidence = torch.randn(2, 3, 10, 20, generator=g, dtype=F64)
    preference = torch.rand(3, 10, 12, generator=g, dtype=F64)
    reliability = torch.rand(3, 1, generator=g, dtype=F64) + 0.5
    shared = dual.estimate(templates, preference, evidence, reliability)
    copied = dual.estimate(templates.repeat(1, 3, 10, 1, 1), preference, evidence, reliability)
    expanded = dual.estimate(templates.expand(2, 3, 10, 12, 20), preference, evidence, reliability)
    for name in ("multiplier", "weights", "mean", "objective"):
        one = getattr(shared, name)
        torch.testing.assert_close(one, getattr(copied, name), rtol=1e-9, atol=1e-11)
        assert torch.equal(one, getattr(expanded, name))
    single = dual.estimate(
        templates[1, 0, 0], preference[2, 4], evidence[1, 2, 4], reliability[2, 0]
    )
    torch.testing.assert_close(shared.mean[1, 2, 4], single.mean, rtol=1e-10, atol=1e-12)


def test_the_first_axis_may_be_the_shared_one():
    g = torch.Generator().manual_seed(0)
    templates = torch.randn(3, 5, 4, generator=g, dtype=F64)  # a head each
    evidence = torch.randn(7, 3, 4, generator=g, dtype=F64)
    estimate = dual.estimate(templates, None, evidence, 2.0)
    for b in range(7):
        for h in range(3):
            one = dual.estimate(templates[h], None, evidence[b, h], 2.0)
            torch.testing.assert_close(estimate.weights[b, h], one.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("iterative", [True, False])
def test_both_ways_to_the_direction(monkeypatch, iterative):
    choose_method = newton.EstimationRows.choose_method

    def forced(self):
        chosen = choose_method(self)
        products = self.templates @ self.templates.mT
        return newton.replace(chosen, iterative=iterative, products=products if iterative else None)

    monkeypatch.setattr(newton.EstimationRows, "choose_method", forced)
    for seed in (3, 14, 15, 92, 65):
        problem = draw(seed, 40, 40)._replace(reliability=1.0)
        estimate = dual.estimate(*problem)
        if problem.stiffness <= 1e6:
            assert estimate.status == fl.Status.OK
            assert estimate.gap <= 1e-12 * scale(problem, estimate)


def test_memory_is_cut_into_parts(monkeypatch):
    templates, u, _ = plane()
    evidence = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    whole = dual.estimate(templates, u, evidence, 3.0)
    monkeypatch.setattr(newton, "_ENTRIES", 60)
    monkeypatch.setattr(newton, "_CACHED", 60)
    cut = dual.estimate(templates, u, evidence, 3.0)
    torch.testing.assert_close(whole.weights, cut.weights, rtol=1e-10, atol=1e-12)
    assert torch.equal(whole.steps, cut.steps)


# ---- ordinary attention, and the order of what it leaves out

HALVES = [2.0**-k for k in range(6, 12)]


def test_first_order_is_ordinary_attention():
    """D-E16: softmax(reliability <t, z> + log u), torch's own attention where u is even."""
    g = torch.Generator().manual_seed(0)
    templates, z = (
        torch.randn(9, 4, generator=g, dtype=F64),
        torch.randn(5, 4, generator=g, dtype=F64),
    )
    estimate = dual.first_order(templates, None, z, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(z, templates, templates, scale=0.3)
    torch.testing.assert_close(estimate.mean, expected, rtol=0, atol=1e-14)
    u = torch.rand(5, 9, generator=g, dtype=F64)
    estimate = dual.first_order(templates, u, z, 0.3)
    options = {"attn_mask": u.log(), "scale": 0.3}
    expected = torch.nn.functional.scaled_dot_product_attention(z, templates, templates, **options)
    torch.testing.assert_close(estimate.mean, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_orders_in_the_reliability(seed):
    templates, u, z = plane(seed=seed)
    exact = [dual.estimate(templates, u, z, a, tolerance=1e-30) for a in HALVES]
    first = [dual.first_order(templates, u, z, a) for a in HALVES]
    second = [dual.second_order(templates, u, z, a) for a in HALVES]

    def errors(name, approximate):
        pairs = zip(approximate, exact, strict=True)
        return [float((getattr(a, name) - getattr(b, name)).norm()) for a, b in pairs]

    assert order(errors("multiplier", first), HALVES) == pytest.approx(2, abs=0.05)
    assert order(errors("mean", first), HALVES) == pytest.approx(2, abs=0.05)
    assert order(errors("multiplier", second), HALVES) == pytest.approx(3, abs=0.05)
    lost = [float(a.objective - b.objective) for a, b in zip(first, exact, strict=True)][:4]
    assert order(lost, HALVES[:4]) == pytest.approx(4, abs=0.05)


def test_order_of_the_second_for_a_symmetric_preference():
    templates, u, z = plane(symmetric=True)
    sizes = HALVES[:5]
    errors = [
        float(
            (
                dual.second_order(templates, u, z, a).multiplier
                - dual.estimate(templates, u, z, a, tolerance=1e-30).multiplier
            ).norm()
        )
        for a in sizes
    ]
    assert order(errors, sizes) == pytest.approx(4, abs=0.05)


def test_leading_errors():
    """|lam* - a z| = a^2 |Sigma z|, |h* - h| = a^2 |Sigma^2 z| to leading order (D-E14, D-E15)."""
    templates, u, z = plane()
    centred = templates - u @ templates
    sigma = centred.mT @ (u[:, None] * centred)
    a = 1e-4
    exact, first = (f(templates, u, z, a) for f in (dual.estimate, dual.first_order))
    expected = a**2 * float((sigma @ z).norm())
    assert float((exact.multiplier - first.multiplier).norm()) == pytest.approx(expected, rel=1e-3)
    expected = a**2 * float((sigma @ sigma @ z).norm())
    assert float((exact.mean - first.mean).norm()) == pytest.approx(expected, rel=1e-3)


def test_compare():
    templates, u, z = plane()
    exact, first = (f(templates, u, z, 0.5) for f in (dual.estimate, dual.first_order))
    deviation = first.compare(exact)
    apart = (first.mean - exact.mean).norm()
    assert deviation.mean == pytest.approx(float(apart / exact.mean.norm()))
    shift = exact.mean - u @ templates
    assert deviation.mean_shift == pytest.approx(float(apart / shift.norm()))
    lam = (first.multiplier - exact.multiplier).norm() / exact.multiplier.norm()
    assert deviation.multiplier == pytest.approx(float(lam))
    assert exact.compare(exact).mean == 0


# ---- derivatives


def outputs(*operands):
    e = dual.estimate(*operands)
    return e.weights, e.mean, e.multiplier, e.objective, e.dual_value


def leaves(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    actual = []
    for kind, shape in shapes:
        x = torch.randn(shape, generator=g, dtype=F64)
        actual.append((x.abs() + 0.3 if kind == "positive" else x).requires_grad_())
    return actual


CASES = {
    "few": [("any", (4, 2)), ("positive", (4,)), ("any", (2,)), ("positive", ())],
    "wide": [("any", (3, 6)), ("positive", (3,)), ("any", (6,)), ("positive", ())],
    "shared": [("any", (2, 1, 4, 3)), ("positive", (3, 4)), ("any", (2, 3, 3)), ("positive", (3,))],
    "one": [("any", (1, 2)), ("positive", (1,)), ("any", (2,)), ("positive", ())],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_derivatives(case):
    operands = leaves(*CASES[case])
    assert gradcheck(outputs, operands)
    assert gradgradcheck(outputs, operands)


@pytest.mark.parametrize("approximate", [dual.first_order, dual.second_order])
def test_derivatives_of_the_approximations(approximate):
    operands = leaves(*CASES["few"])
    assert gradcheck(lambda *o: (approximate(*o).mean, approximate(*o).objective), operands)
    assert gradgradcheck(lambda *o: approximate(*o).mean, operands)


def test_one_sided_derivative_at_zero_preference():
    templates, u, z = plane()
    u = u.clone()
    u[3] = 0
    leaf = u.clone().requires_grad_()
    (slope,) = torch.autograd.grad(dual.estimate(templates, leaf, z, 2.0).weights[3], leaf)
    step = torch.zeros_like(u)
    step[3] = 1e-7
    actual = dual.estimate(templates, u + step, z, 2.0).weights[3] / 1e-7
    assert float(slope[3]) == pytest.approx(float(actual), rel=1e-5)
    assert slope[3] > 0


def test_large_problems_have_the_derivatives_of_small_ones():
    """The first derivative without a matrix: conjugate gradients against the explicit solve."""
    g = torch.Generator().manual_seed(0)
    templates = torch.randn(24, 40, generator=g, dtype=F64)
    z = (torch.randn(30, 40, generator=g, dtype=F64) / 4).requires_grad_()
    weigh = torch.randn(30, 40, generator=g, dtype=F64)
    (fast,) = torch.autograd.grad((dual.estimate(templates, None, z, 2.0).mean * weigh).sum(), z)
    (slow,) = torch.autograd.grad(
        (dual.estimate(templates, None, z, 2.0).mean * weigh).sum(), z, create_graph=True
    )
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-10)


def test_transforms_agree_with_autograd():
    templates, u, z = plane()
    many = torch.stack([z, -z, 2 * z])
    one = torch.func.vmap(lambda x: dual.estimate(templates, u, x, 1.3).mean)(many)
    torch.testing.assert_close(one, dual.estimate(templates, u, many, 1.3).mean)

    def value(x):
        return dual.estimate(templates, u, x, 1.3).objective

    there = torch.func.hessian(value)(z)
    here = torch.autograd.functional.hessian(value, z)
    torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(torch.func.jacfwd(value)(z), torch.func.jacrev(value)(z))


def test_compiled_whole():
    templates, u, z = plane()

    def mean(x):
        return dual.estimate(templates, u, x, 1.3).mean

    actual = torch.compile(mean, fullgraph=True)(z)
    torch.testing.assert_close(actual, mean(z), rtol=1e-12, atol=1e-14)


# ---- precisions and bad input


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_computed_in_float64(dtype):
    templates, u, z = (x.to(dtype) for x in plane())
    estimate = dual.estimate(templates, u, z, 2.0)
    wide = dual.estimate(templates.double(), u.double(), z.double(), 2.0)
    assert estimate.mean.dtype == estimate.weights.dtype == dtype
    assert torch.equal(estimate.mean, wide.mean.to(dtype))
    assert estimate.gap.dtype == F64


def test_masks_and_empty_rows():
    templates, u, z = plane()
    broken = templates.clone()
    broken[2] = math.nan
    mask = torch.tensor([True, True, False, True, True, True, True])
    estimate = dual.estimate(broken, u, z, 2.0, mask=mask)
    kept = dual.estimate(templates[mask], u[mask], z, 2.0)
    torch.testing.assert_close(estimate.mean, kept.mean)
    assert estimate.weights[2] == 0
    rows = torch.stack([mask, torch.zeros(7, dtype=torch.bool)])
    leaf = z.clone().requires_grad_()
    both = dual.estimate(templates, u, leaf, 2.0, mask=rows)
    assert both.status.tolist() == [fl.Status.OK, fl.Status.EMPTY]
    assert not both.mean[1].any()
    assert not both.weights[1].any()
    (slope,) = torch.autograd.grad(both.mean[1].sum(), leaf)
    assert not slope.any()


def test_extremes_have_exact_answers():
    one = dual.estimate(torch.ones(1, 3), None, torch.full((3,), 1e6), 1.0)
    assert one.weights.tolist() == [1.0]
    same = dual.estimate(torch.ones(5, 3), None, torch.full((3,), 1e6), 10.0)
    torch.testing.assert_close(same.weights, torch.full((5,), 0.2))
    templates, u, z = plane()
    far = dual.estimate(templates, u, 1e6 * z, 1.0)
    assert far.status == fl.Status.OK
    assert far.weights.argmax() == (templates @ z).argmax()
    nothing = torch.zeros(0, 2, dtype=F64, requires_grad=True)
    none = dual.estimate(templates, u, nothing, 1.0)
    assert none.mean.shape == (0, 2)
    assert torch.autograd.grad(none.mean.sum(), nothing)[0].shape == (0, 2)
    assert repr(far).startswith("Estimate(batch=(), d=2")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"preference": torch.tensor([1.0, -1.0])}, ValueError, "preference must be >= 0"),
        ({"preference": torch.tensor([1.0])}, ValueError, r"preference must be \(..., 2\)"),
        ({"preference": torch.tensor([1.0, math.nan])}, ValueError, "preference must be finite"),
        ({"evidence": torch.ones(2)}, ValueError, r"evidence must be \(..., 3\)"),
        ({"evidence": torch.full((3,), math.inf)}, ValueError, "evidence must be finite"),
        ({"templates": torch.full((2, 3), math.nan)}, ValueError, "templates must be finite"),
        ({"templates": torch.ones(0, 3)}, ValueError, "templates must be"),
        ({"templates": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "floating point"),
        ({"reliability": 0.0}, ValueError, "reliability must be finite and > 0, got 0"),
        ({"reliability": torch.tensor([1.0, -2.0])}, ValueError, "got -2"),
        ({"reliability": math.nan}, ValueError, "reliability must be finite"),
        ({"reliability": "much"}, TypeError, "reliability must be a number"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"mask must be bool \(..., 2\)"),
        ({"tolerance": 0.0}, ValueError, "tolerance must be between"),
        ({"max_steps": -1}, ValueError, "max_steps must be >= 0"),
        ({"evidence": torch.ones(4, 3), "preference": torch.ones(5, 2)}, ValueError, "broadcast"),
    ],
)
def test_bad_input(change, error, words):
    operands = {
        "templates": torch.eye(3)[:2],
        "preference": torch.ones(2),
        "evidence": torch.ones(3),
        "reliability": 1.0,
    }
    with pytest.raises(error, match=words):
        dual.estimate(**{**operands, **change})


def test_shapes_that_do_not_fit_are_named():
    templates = torch.randn(3, 6, 3)
    with pytest.raises(ValueError, match=r"do not broadcast.*reliability \(2,\)"):
        dual.estimate(templates, None, torch.randn(3), torch.ones(2))
    mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="do not broadcast"):
        dual.estimate(templates, None, torch.randn(3), 1.0, mask=mask)
