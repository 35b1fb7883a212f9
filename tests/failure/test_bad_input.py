"""Each bad input on purpose: a clear error, or a status in its own row."""

import math

import numpy as np
import pytest
import torch

import fenchel as fl
from fenchel.solution import SolveError
from fenchel.testing import gap_tolerance
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
        (lambda: fl.priors.KeyPadding([1, 2]), TypeError, ("lengths", "list")),
        (lambda: fl.priors.Preference(torch.ones(3) > 0), TypeError, ("logits", "mask")),
        (lambda: fl.priors.Causal().shifted(-1), ValueError, ("offset", "-1")),
        (lambda: fl.priors.SlidingWindow(-1), ValueError, ("width", "-1")),
        (lambda: fl.priors.ALiBi(0), ValueError, ("heads", "0")),
        (lambda: fl.priors.ALiBi(2, torch.ones(3)), ValueError, ("slopes", "(2,)", "(3,)")),
        (lambda: fl.priors.KeyPadding(torch.tensor([1.5])), TypeError, ("lengths", "integers")),
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
        return _length_edges(fl.Budget(1) if name == "budget" else fl.Fused(0.2, grid=(1, 1)))
    return _length_edges(FAMILIES[name]())


def _length_edges(omega):
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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_towering_scores(name, dtype):
    scores = torch.tensor([[1e30, -1e30, 0.0, 1e30 / 2], [-1e30, 3.0, 2.9, -1e30]], dtype=dtype)
    leaf = scores.requires_grad_()
    solution = fl.solve(leaf, FAMILIES[name]())
    assert (solution.status == fl.Status.OK).all()
    total = FAMILIES[name]().total(scores)
    assert (solution.weights.sum(-1) - total).abs().max() <= 1e-6
    (gradient,) = torch.autograd.grad((solution.weights**2).sum(), leaf)
    assert gradient.isfinite().all()
    if name not in ("budget", "fused", "fused grid"):
        assert solution.weights[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_scores_at_the_ends_of_the_range(dtype):
    top = torch.finfo(dtype).max
    scores = torch.tensor([[top, -top, 0.0, top]], dtype=dtype)
    for omega in (fl.Shannon(), fl.Shannon(1e-3), fl.Tsallis(1.5), fl.Tsallis(3.0), fl.Norm(2.0)):
        weights = fl.solve(scores, omega).weights
        expected = torch.tensor([[0.5, 0, 0, 0.5]], dtype=dtype)
        assert (weights - expected).abs().max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", FAMILIES)
def test_float16_with_a_wide_spread(name):
    scores = torch.tensor([[1e4, -1e4, 9999.0, 0.0]], dtype=torch.float16).requires_grad_()
    solution = fl.solve(scores, FAMILIES[name]())
    assert solution.weights.dtype == torch.float16
    assert solution.weights.isfinite().all()
    assert (solution.weights.float().sum() - FAMILIES[name]().total(scores.float())).abs() < 1e-3
    (gradient,) = torch.autograd.grad((solution.weights**2).sum(), scores)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_strides_do_not_matter(name):
    dense = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    omega = FAMILIES[name]() if name != "fused grid" else fl.Fused(0.2, grid=(2, 2))
    views = {
        "transposed": dense.t(),
        "every other": torch.stack([dense[:, :4]] * 2, -1)[..., 0],
        "zero stride": dense[:1, :4].expand(5, 4),
        "flipped": dense[:, :4].flip(-1),
    }
    for view in views.values():
        expected = fl.solve(view.contiguous(), omega).weights
        assert torch.equal(fl.solve(view, omega).weights, expected)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("alpha", [1.5, 1.8, 2.0, 3.0])
def test_flat_rows_of_many_keys(dtype, alpha):
    for scores in (torch.zeros(1, 100_000, dtype=dtype), 1e-4 * torch.randn(2, 4096, dtype=dtype)):
        solution = fl.solve(scores, fl.Tsallis(alpha))
        assert (solution.weights.double().sum(-1) - 1).abs().max() <= 1e3 * torch.finfo(dtype).eps
        assert (solution.gap <= gap_tolerance(dtype)).all()


@pytest.mark.parametrize("alpha", [10.0, 20.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_very_large_alpha(dtype, alpha):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, 6, dtype=dtype, generator=generator)
    leaf = scores.requires_grad_()
    solution = fl.solve(leaf, fl.Tsallis(alpha))
    assert (solution.weights.sum(-1) - 1).abs().max() <= 64 * torch.finfo(dtype).eps
    assert (solution.gap <= gap_tolerance(dtype)).all()
    if alpha < 50:  # there slopes of 1e96 cancel, and nothing is left of a derivative
        (gradient,) = torch.autograd.grad((solution.weights**2).sum(), leaf)
        assert gradient.isfinite().all()


def test_a_threshold_that_no_float_holds_is_said():
    """Five ties at alpha = 1000: the threshold lies 5^-999 below them."""
    solution = fl.solve(torch.zeros(5, dtype=torch.float64), fl.Tsallis(1000.0))
    assert solution.status == fl.Status.MAX_STEPS
    assert solution.gap > 1e-3
    assert "alpha" in solution.explain()


def test_masses_wider_than_the_scores_keep_their_range():
    base = torch.tensor([1e-50, 3e-50], dtype=torch.float64)
    solution = fl.solve(torch.zeros(2), fl.Shannon(), base=base)
    assert solution.weights.dtype == torch.float32
    assert (solution.weights - torch.tensor([0.25, 0.75])).abs().max() <= 1e-7


def test_a_tensor_alpha_is_subtracted_in_its_own_precision():
    alpha = 1 + 1e-9
    number = fl.solve(SCORES.float(), fl.Tsallis(alpha)).threshold
    tensor = fl.solve(
        SCORES.float(), fl.Tsallis(torch.tensor(alpha, dtype=torch.float64))
    ).threshold
    assert (number - tensor).abs().max() <= 1e-6 * number.abs().max()
    assert (fl.solve(SCORES.float(), fl.Norm(1 + 1e-6)).status == fl.Status.OK).all()


def test_default_dtype_does_not_leak():
    torch.set_default_dtype(torch.float64)
    try:
        for make in FAMILIES.values():
            solution = fl.solve(SCORES.float(), make())
            assert solution.threshold.dtype == solution.potential.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_fused_on_long_and_even_rows_ends():
    for scores, strength in (
        (torch.linspace(0, 1, 1000), 1000.0),
        (torch.linspace(0, 60, 10_000).sin(), 10.0),
        (torch.randn(1, 20_000).cumsum(-1).double(), 10.0),
    ):
        solution = fl.solve(scores, fl.Fused(strength))
        assert (solution.status == fl.Status.OK).all()
        assert (solution.gap <= 1e-9).all()


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


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.5, 2.0, 5.0])
@pytest.mark.parametrize(("dtype", "span"), [(torch.float32, 1e4), (torch.float64, 1e30)])
def test_masses_of_very_different_size(dtype, span, alpha):
    base = torch.tensor([1 / span, 1.0, span, 0.0], dtype=dtype)
    # 0.9: at 1 the light key alone would carry exactly everything, a tie at the edge.
    solution = fl.solve(0.9 * SCORES.to(dtype), fl.Tsallis(alpha), base=base)
    assert (solution.weights.sum(-1) - 1).abs().max() <= 32 * torch.finfo(dtype).eps
    assert (solution.gap <= gap_tolerance(dtype)).all()


@pytest.mark.parametrize("alpha", [1.0, 1.001, 1.5, 2.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_an_even_base_of_extreme_size_only_sets_the_temperature(dtype, alpha):
    limits = torch.finfo(dtype)
    tiny = fl.solve(
        SCORES.to(dtype), fl.Tsallis(alpha), base=torch.full((4,), limits.tiny, dtype=dtype)
    )
    huge = fl.solve(
        SCORES.to(dtype), fl.Tsallis(alpha), base=torch.full((4,), limits.max / 8, dtype=dtype)
    )
    for solution in (tiny, huge):
        assert (solution.weights.sum(-1) - 1).abs().max() <= 64 * limits.eps
    if alpha >= 1.5:  # tau c^(1 - alpha): nearly infinite, nearly zero
        assert (tiny.weights - 0.25).abs().max() <= 1e-6
        assert (
            huge.weights - fl.solve(SCORES.to(dtype), fl.Shannon(1e-6)).weights
        ).abs().max() <= 1e-6
