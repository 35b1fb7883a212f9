"""Each bad input on purpose: a clear error, or a status in its own row."""

import math

import numpy as np
import pytest
import torch

import fenchel as fl
from fenchel._solution import SolveError
from tests.families import FAMILIES

CUBE = torch.zeros(4, 4, 6, 6)
SCORES = torch.tensor([[0.3, -1.0, 2.0, 0.5], [1.0, 1.0, 0.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: fl.Tsallis(0.5), ValueError, ("alpha", ">= 1", "0.5")),
        (lambda: fl.Tsallis(torch.tensor([1.5, 0.9])), ValueError, ("alpha", ">= 1", "0.9")),
        (lambda: fl.Tsallis(math.nan), ValueError, ("alpha", "nan")),
        (lambda: fl.Tsallis(math.inf), ValueError, ("alpha", "finite")),
        (lambda: fl.Tsallis("1.5"), TypeError, ("alpha", "str")),
        (lambda: fl.Tsallis(True), TypeError, ("alpha", "bool")),
        (lambda: fl.Shannon(0.0), ValueError, ("temperature", "> 0", "argmax")),
        (lambda: fl.Tsallis(1.5, -1.0), ValueError, ("temperature", "-1")),
        (lambda: fl.Norm(1.0), ValueError, ("alpha", "> 1")),
        (lambda: fl.Budget(0), ValueError, ("k", "> 0")),
        (lambda: fl.Fused(-0.1), ValueError, ("strength", ">= 0")),
        (lambda: fl.Fused(0.1, grid=(0, 3)), ValueError, ("grid", "height")),
        (lambda: fl.Fused(0.1, tolerance=1e-3), ValueError, ("tolerance", "grid")),
        (lambda: fl.Fused(0.1, max_steps=5), ValueError, ("max_steps", "grid")),
        (lambda: fl.Fused(0.1, grid=4), ValueError, ("grid", "height", "4")),
        (lambda: fl.Fused(0.1, grid=(2.0, 2.0)), ValueError, ("grid", "whole")),
        (lambda: fl.Fused(0.1, grid=(2, 2), max_steps=1.5), TypeError, ("max_steps", "1.5")),
        (lambda: fl.Fused(0.1, grid=(2, 2), max_steps=0), ValueError, ("max_steps", ">= 1")),
        (lambda: fl.priors.SlidingWindow(1.5), TypeError, ("width", "1.5")),
        (lambda: fl.priors.KeyPadding([1, 2]), TypeError, ("real", "list")),
        (lambda: fl.priors.Preference(torch.ones(3) > 0), TypeError, ("logits", "mask")),
        (lambda: fl.priors.Causal().shifted(-1), ValueError, ("offset", "-1")),
        (lambda: fl.priors.SlidingWindow(-1), ValueError, ("width", "-1")),
        (lambda: fl.priors.ALiBi(0), ValueError, ("heads", "0")),
        (lambda: fl.priors.ALiBi(2, torch.ones(3)), ValueError, ("slopes", "(2,)", "(3,)")),
        (lambda: fl.priors.KeyPadding(torch.tensor([1.5])), TypeError, ("real", "lengths")),
        (lambda: fl.priors.RelativeBuckets(torch.ones(4)), ValueError, ("table", "buckets")),
        (lambda: fl.priors.RelativeBuckets(torch.ones(2, 1)), ValueError, ("buckets",)),
    ],
)
def test_parameters_out_of_range(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fl.softmax([1.0, 2.0]), TypeError, ("tensor", "list")),
        (lambda: fl.softmax(torch.tensor([1, 2])), TypeError, ("float32", "int64", ".float()")),
        (lambda: fl.softmax(torch.tensor([1j])), TypeError, ("complex", "real part")),
        (lambda: fl.softmax(SCORES.to_sparse()), TypeError, ("sparse", "to_dense")),
        (lambda: fl.softmax(SCORES, dim=1.0), TypeError, ("dim", "1.0")),
        (lambda: fl.softmax(SCORES, dim=True), TypeError, ("dim", "True")),
        (lambda: fl.softmax(SCORES, base=fl.priors.Causal), TypeError, ("Causal", "call")),
        (
            lambda: fl.softmax(SCORES, base=fl.priors.Preference(torch.zeros(7))),
            ValueError,
            ("7 logits", "4 keys"),
        ),
        (
            lambda: fl.softmax(
                torch.zeros(4, 4, 6, 6), base=fl.priors.KeyPadding(torch.ones(4).long())
            ),
            ValueError,
            ("lengths[:, None]", "(4,)"),
        ),
        (lambda: fl.solve(SCORES.float(), fl.Shannon(1e39)), ValueError, ("1e+39", "float64")),
        (
            lambda: fl.entmax(SCORES, torch.tensor(1.5, device="meta")),
            ValueError,
            ("alpha", "meta", "cpu"),
        ),
        (lambda: fl.solve(SCORES, fl.Shannon()).advantage([1.0]), TypeError, ("utility", "list")),
        (lambda: fl.softmax(torch.tensor(1.0)), ValueError, ("at least one axis",)),
        (lambda: fl.softmax(SCORES, dim=2), IndexError, ("dim", "2", "(2, 4)")),
        (lambda: fl.softmax(SCORES, dim=-3), IndexError, ("dim", "-3")),
        (lambda: fl.solve(SCORES, 1.5), TypeError, ("regularizer", "Tsallis(1.5)", "1.5")),
        (lambda: fl.softmax(SCORES, base=-torch.ones(4)), ValueError, ("non-negative", "-1")),
        (lambda: fl.softmax(SCORES, base=torch.ones(3)), ValueError, ("(3,)", "(2, 4)")),
        (lambda: fl.softmax(SCORES, base=torch.ones(5, 2, 4)), ValueError, ("(5, 2, 4)",)),
        (lambda: fl.softmax(SCORES, base=torch.ones(3, 1), dim=0), ValueError, ("(3, 1)",)),
        (lambda: fl.softmax(SCORES, base=1.0), TypeError, ("base", "float")),
        (lambda: fl.softmax(SCORES, base=torch.ones(4) * 1j), TypeError, ("base", "complex")),
        (
            lambda: fl.softmax(SCORES, base=torch.ones(4, device="meta")),
            ValueError,
            ("meta", "cpu"),
        ),
        (lambda: fl.softmax(SCORES, base=fl.priors.Causal(), dim=0), ValueError, ("dim=0",)),
        (lambda: fl.softmax(SCORES, base=fl.priors.ALiBi(3)), ValueError, ("ALiBi", "(2, 4)")),
        (lambda: fl.entmax(SCORES, torch.ones(3) * 1.5), ValueError, ("alpha", "(3,)", "(2,)")),
        (lambda: fl.entmax(SCORES, torch.ones(2, 1) * 1.5), ValueError, ("alpha", "(2, 1)")),
        (lambda: fl.solve(SCORES, fl.Fused(0.1, grid=(3, 3))), ValueError, ("9 keys", "have 4")),
        (
            lambda: fl.solve(SCORES, fl.Shannon()).advantage(torch.ones(4)),
            ValueError,
            ("utility", "(4,)", "(2, 4)"),
        ),
    ],
)
def test_wrong_type_or_shape(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", [n for n in FAMILIES if not FAMILIES[n]().takes_base])
def test_masks_only(name):
    omega = FAMILIES[name]()
    with pytest.raises(ValueError, match="masks"):
        fl.solve(SCORES, omega, base=torch.tensor([1.0, 0.5, 1.0, 1.0]))
    with pytest.raises(ValueError, match="masks"):
        fl.solve(SCORES, omega, base=fl.priors.Preference(torch.ones(4)))
    with pytest.raises(ValueError, match="no derivative"):
        fl.solve(SCORES, omega, base=torch.ones(4, requires_grad=True))
    solution = fl.solve(SCORES, omega, base=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert (solution.weights[:, 1] == 0).all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "+inf"])
def test_one_bad_score_spoils_one_row(name, bad):
    scores = SCORES.clone()
    scores[0, 1] = bad
    leaf = scores.requires_grad_()
    solution = fl.solve(leaf, FAMILIES[name]())
    assert solution.status.tolist() == [fl.Status.NONFINITE, fl.Status.OK]
    assert solution.weights[0].isnan().all()
    assert solution.gap[0].isnan()
    assert solution.potential[0].isnan()
    assert torch.equal(solution.weights[1], fl.solve(SCORES, FAMILIES[name]()).weights[1])
    (gradient,) = torch.autograd.grad((solution.weights[1] ** 2).sum(), leaf)
    assert gradient.isfinite().all()
    assert "NaN or +inf" in solution.explain()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bad_score_under_the_mask_is_nobody(name):
    scores = SCORES.clone()
    scores[:, 1] = torch.tensor([math.nan, math.inf], dtype=torch.float64)
    leaf = scores.requires_grad_()
    for base in (torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([True, False, True, True])):
        solution = fl.solve(leaf, FAMILIES[name](), base=base)
        clean = fl.solve(SCORES, FAMILIES[name](), base=base)
        assert torch.equal(solution.weights, clean.weights)
        (gradient,) = torch.autograd.grad((solution.weights**2).sum(), leaf)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("how", ["-inf", "bool", "zero mass"])
def test_all_masked_row_is_empty(name, how):
    scores, base = SCORES.clone(), None
    if how == "-inf":
        scores[0] = -math.inf
    elif how == "bool":
        base = torch.tensor([[False], [True]])
    else:
        base = torch.tensor([[0.0], [1.0]])
    leaf = scores.requires_grad_()
    solution = fl.solve(leaf, FAMILIES[name](), base=base)
    assert solution.status.tolist() == [fl.Status.EMPTY, fl.Status.OK]
    assert (solution.weights[0] == 0).all()
    assert solution.gap[0] == 0
    assert solution.potential[0] == -math.inf
    assert solution.threshold[0] == math.inf
    (gradient,) = torch.autograd.grad((solution.weights**2).sum(), leaf, create_graph=True)
    assert (gradient[0] == 0).all()
    assert gradient.isfinite().all()
    if gradient.requires_grad:
        (second,) = torch.autograd.grad((gradient**2).sum(), leaf)
        assert second.isfinite().all()
    assert (solution.hessian()[0] == 0).all()
    assert (solution.fisher()[0] == 0).all()


def test_negative_infinity_masks_a_key():
    masked = SCORES.clone()
    masked[:, 2] = -math.inf
    for name, make in FAMILIES.items():
        by_score = fl.solve(masked, make()).weights
        by_base = fl.solve(SCORES, make(), base=torch.tensor([True, True, False, True])).weights
        assert torch.equal(by_score, by_base), name


@pytest.mark.parametrize("name", FAMILIES)
def test_length_zero_and_one_and_no_rows(name):
    if name in ("budget", "fused grid"):
        return assert_length_edges(fl.Budget(1) if name == "budget" else fl.Fused(0.2, grid=(1, 1)))
    return assert_length_edges(FAMILIES[name]())


def assert_length_edges(omega):
    one = fl.solve(torch.tensor([[3.0], [-math.inf]], dtype=torch.float64), omega)
    assert one.weights.flatten().tolist() == [1.0, 0.0]
    assert one.status.tolist() == [fl.Status.OK, fl.Status.EMPTY]
    assert one.gap.abs().max() <= 1e-15
    leaf = torch.tensor([[3.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(fl.solve(leaf, omega).weights.sum(), leaf)
    assert gradient.abs().max() == 0
    none = fl.solve(torch.zeros(0, 1), omega)
    assert none.weights.shape == (0, 1)
    assert none.gap.shape == (0,)
    if not isinstance(omega, fl.Fused) or omega.grid is None:
        empty = fl.solve(torch.zeros(2, 0), omega)
        assert empty.weights.shape == (2, 0)
        assert empty.status.tolist() == [fl.Status.EMPTY] * 2
        assert empty.hessian().shape == (2, 0, 0)
        assert empty.gap.tolist() == [0, 0]


def test_budget_beyond_the_keys_is_infeasible():
    keep = torch.tensor([[True, True, True, True], [True, True, False, False]])
    solution = fl.solve(SCORES, fl.Budget(3), base=keep)
    assert solution.status.tolist() == [fl.Status.OK, fl.Status.INFEASIBLE]
    assert solution.weights[1].isnan().all()
    assert "lower k" in solution.explain()
    per_row = fl.solve(SCORES, fl.Budget(torch.tensor([3.0, 2.0])), base=keep)
    assert (per_row.status == fl.Status.OK).all()
    assert per_row.weights[1].tolist() == [1, 1, 0, 0]


def test_grid_that_may_not_iterate_says_so():
    scores = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    solution = fl.solve(scores, fl.Fused(0.5, grid=(8, 8), max_steps=1))
    assert (solution.status == fl.Status.MAX_STEPS).all()
    assert (solution.gap > 1e-9).all()
    assert "raise max_steps" in solution.explain()
    assert (fl.solve(scores, fl.Fused(0.5, grid=(8, 8))).status == fl.Status.OK).all()


def test_throw_names_rows_and_remedies():
    scores = SCORES.clone()
    scores[1, 0] = math.nan
    with pytest.raises(SolveError, match=r"NONFINITE in rows \(1,\).*mask with -inf"):
        fl.solve(scores, fl.Shannon(), throw=True)
    with pytest.raises(SolveError, match=r"EMPTY in rows \(0,\), \(1,\)"):
        fl.solve(SCORES, fl.Shannon(), base=torch.zeros(4), throw=True)
    assert fl.solve(SCORES, fl.Shannon(), throw=True).weights.shape == (2, 4)


def test_throw_needs_values():
    with pytest.raises(ValueError, match="throw=True"):
        torch.func.vmap(lambda s: fl.solve(s, fl.Shannon(), throw=True).weights)(SCORES)
    with pytest.raises(SolveError, match="the only one"):
        fl.solve(torch.tensor([math.nan, 1.0]), fl.Shannon(), throw=True)


def test_numbers_of_numpy_are_numbers():
    assert torch.equal(fl.entmax(SCORES, np.float64(1.5)), fl.entmax(SCORES, 1.5))
    assert torch.equal(
        fl.solve(SCORES, fl.Budget(np.int64(2))).weights, fl.solve(SCORES, fl.Budget(2)).weights
    )


def test_a_solution_survives_what_happens_to_its_parameters():
    alpha = torch.tensor(1.5, dtype=torch.float64)
    solution = fl.solve(SCORES, fl.Tsallis(alpha))
    before = solution.gap, solution.objective, solution.hessian()
    alpha.add_(0.2)
    after = solution.gap, solution.objective, solution.hessian()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_every_status_has_a_remedy():
    assert all(len(status.remedy) > 10 for status in fl.Status)


def test_where_python_may_not_look_bad_rows_get_a_status():
    scores = SCORES.clone()

    def under_vmap(s, b, a):
        solution = fl.solve(s, fl.Tsallis(a), base=b)
        return solution.weights, solution.status

    masses = torch.tensor([[1.0, -1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    alphas = torch.tensor([1.5, 1.5], dtype=torch.float64)
    weights, status = torch.func.vmap(under_vmap)(scores, masses, alphas)
    assert status.tolist() == [fl.Status.NONFINITE, fl.Status.OK]
    assert weights[0].isnan().all()
    assert torch.equal(weights[1], fl.entmax(scores[1], 1.5, base=masses[1]))

    alphas = torch.tensor([0.5, 1.5], dtype=torch.float64)
    weights, status = torch.func.vmap(under_vmap)(scores, masses.abs(), alphas)
    assert status.tolist() == [fl.Status.NONFINITE, fl.Status.OK]
    assert weights[0].isnan().all()


def test_compiled_code_marks_bad_rows_too():
    def weights_and_status(s, b):
        solution = fl.solve(s, fl.Budget(2), base=b)
        return solution.weights, solution.status

    torch._dynamo.reset()
    compiled = torch.compile(weights_and_status, fullgraph=True, backend="aot_eager")
    base = torch.tensor([[1.0, 0.5, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    weights, status = compiled(SCORES, base)
    assert status.tolist() == [fl.Status.NONFINITE, fl.Status.OK]
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


def test_infinite_or_nan_mass_is_nonfinite():
    for bad in (math.nan, math.inf):
        base = torch.ones(2, 4, dtype=torch.float64)
        base[0, 0] = bad
        solution = fl.solve(SCORES, fl.Tsallis(1.5), base=base)
        assert solution.status.tolist() == [fl.Status.NONFINITE, fl.Status.OK]


@pytest.mark.parametrize("parameter", ["alpha", "temperature"])
@pytest.mark.parametrize("alpha", [1.1, 1.5, 3.0])
def test_an_empty_row_leaves_the_gradient_of_parameters_finite(parameter, alpha):
    values = {"alpha": torch.tensor(alpha).double(), "temperature": torch.tensor(0.7).double()}
    values[parameter].requires_grad_()
    scores = torch.tensor([[-math.inf, -math.inf], [1.0, 0.5]]).double()
    fl.solve(scores, fl.Tsallis(**values)).weights[1, 0].backward()
    alone = values[parameter].detach().clone().requires_grad_()
    omega = fl.Tsallis(**{**values, parameter: alone})
    fl.solve(scores[1:], omega).weights[0, 0].backward()
    torch.testing.assert_close(values[parameter].grad, alone.grad, rtol=1e-14, atol=0)
