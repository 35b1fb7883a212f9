"""What attention decided: the same rows as `solve`, sparse, with the same certificates."""

import pytest
import torch

import fenchel as fl
from tests.attention.cases import (
    DOUBLE,
    INF,
    REGULARIZERS,
    chance,
    dense_scores,
    draw,
    make_case,
)

pytestmark = pytest.mark.usefixtures("kernels")


def densified(solution):
    """(..., query, key), from the compressed rows alone."""
    weights = torch.zeros(solution.shape.numel(), dtype=solution.entries.dtype)
    keys = max(1, solution.shape[-1])
    for row in range(len(solution.rows) - 1):
        for entry in range(int(solution.rows[row]), int(solution.rows[row + 1])):
            weights[row * keys + int(solution.keys[entry])] = solution.entries[entry]
    return weights.reshape(solution.shape)


def same(actual, reference, allowed):
    """Equal up to `allowed`, infinities and NaN in the same places."""
    assert actual.shape == reference.shape
    assert torch.equal(actual.isnan(), reference.isnan())
    finite = reference.isfinite()
    assert torch.equal(actual[~finite].nan_to_num(), reference[~finite].to(actual).nan_to_num())
    assert ((actual - reference)[finite].abs() <= allowed).all()


OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": chance(3, 0.6, 2, 1, 6, 9)},
    "float": {"attn_mask": draw(8, 6, 9).masked_fill(chance(9, 0.3, 6, 9), -INF)},
    "scale": {"scale": -0.4},
}


def expected(case, regularizer, attn_mask=None, is_causal=False, scale=None, base=None):
    query, key, _ = case.operands(case.leaves)
    return fl.solve(dense_scores(query, key, attn_mask, is_causal, scale), regularizer, base=base)


def assert_matches(actual, reference):
    """Every number of the solution, in the tolerance of float64."""
    same(densified(actual), reference.weights, 1e-13)
    same(actual.weights.to_dense(), reference.weights, 1e-13)
    same(actual.threshold, reference.threshold.to(DOUBLE), 1e-13)
    same(actual.gap, reference.gap.to(DOUBLE), 1e-14)
    assert torch.equal(actual.status, reference.status)
    assert torch.equal(actual.support, reference.support)
    assert torch.equal(actual.support_size, reference.support_size)
    assert actual.shape == reference.weights.shape
    assert actual.rows[0] == 0
    assert actual.rows[-1] == len(actual.keys) == len(actual.entries)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_everything_is_that_of_solve(name, option):
    case = make_case(REGULARIZERS[name])
    solution = fl.attention_solution(
        *case.operands(case.leaves), REGULARIZERS[name], **OPTIONS[option]
    )
    reference = expected(case, REGULARIZERS[name], **OPTIONS[option])
    assert_matches(solution, reference)


def test_wrong_solutions_do_not_match():
    case = make_case(fl.Tsallis(1.5))
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Tsallis(1.5))
    for alpha, options in ((1.501, {}), (1.5, {"is_causal": True}), (1.5, {"scale": 0.4})):
        with pytest.raises(AssertionError):
            assert_matches(solution, expected(case, fl.Tsallis(alpha), **options))


@pytest.mark.parametrize("base", [fl.priors.ALiBi(3), draw(5, 9).exp(), chance(5, 0.6, 6, 9)])
def test_with_a_base(base):
    for name in ("shannon", "tsallis 1.3", "tsallis 2"):
        case = make_case(REGULARIZERS[name])
        solution = fl.attention_solution(
            *case.operands(case.leaves), REGULARIZERS[name], base=base, is_causal=True
        )
        assert_matches(solution, expected(case, REGULARIZERS[name], is_causal=True, base=base))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_leading_axes_and_tiles(lead, tiles):
    regularizer = fl.Tsallis(1.5)
    case = make_case(regularizer, lead=lead, queries=53, keys=11)
    operands = case.operands(case.leaves)
    whole = fl.attention_solution(*operands, regularizer, is_causal=True)
    assert_matches(whole, expected(case, regularizer, is_causal=True))
    tiles(1)
    cut = fl.attention_solution(*operands, regularizer, is_causal=True)
    assert_matches(cut, expected(case, regularizer, is_causal=True))
    for name in ("rows", "keys", "status"):
        assert torch.equal(getattr(cut, name), getattr(whole, name))


def test_parameters_a_row_in_tiles(tiles):
    tiles(1)
    alpha = 1.1 + draw(4, 2, 35).abs()
    case = make_case(lambda _: None, lead=(2,), queries=35)
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Tsallis(alpha))
    assert_matches(solution, expected(case, fl.Tsallis(alpha)))


def test_grouped_heads():
    q, k, v = draw(0, 4, 6, 3), draw(1, 2, 9, 3), draw(2, 2, 9, 2)
    solution = fl.attention_solution(q, k, v, fl.Tsallis(1.5), enable_gqa=True)
    reference = fl.solve(dense_scores(q, k.repeat_interleave(2, 0)), fl.Tsallis(1.5))
    assert_matches(solution, reference)


def test_the_weights_make_the_output_of_attention():
    case = make_case(fl.Tsallis(1.5))
    operands = case.operands(case.leaves)
    weights = densified(fl.attention_solution(*operands, fl.Tsallis(1.5)))
    output = fl.attention(*operands, fl.Tsallis(1.5))
    assert (weights @ operands[2] - output).abs().max() <= 1e-13


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_one_head_as_a_sparse_matrix(tiles):
    tiles(1)
    case = make_case(fl.Tsallis(2.0), queries=35)
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Tsallis(2.0), is_causal=True)
    weights = densified(solution)
    assert (weights == 0).any()
    for batch in range(2):
        for head in range(3):
            matrix = solution.head(batch, head)
            assert matrix.layout == torch.sparse_csr
            assert torch.equal(matrix.to_dense(), weights[batch, head])
            assert len(matrix.values()) == solution.support_size[batch, head].sum()
            rebuilt = torch.sparse_csr_tensor(
                matrix.crow_indices(),
                matrix.col_indices(),
                matrix.values(),
                matrix.shape,
                check_invariants=True,
            )
            assert rebuilt.shape == (35, 9)
    assert torch.equal(solution.head(-1, -3).to_dense(), weights[1, 0])
    flat = make_case(fl.Tsallis(2.0), lead=())
    alone = fl.attention_solution(*flat.operands(flat.leaves), fl.Tsallis(2.0))
    assert torch.equal(alone.head().to_dense(), densified(alone))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_heads_that_are_not_there():
    case = make_case(fl.Tsallis(1.5))
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Tsallis(1.5))
    for index in ((2, 0), (0, 3), (-3, 0), (0, -4)):
        with pytest.raises(IndexError, match=r"outside of the leading axes \(2, 3\)"):
            solution.head(*index)
    for index in ((), (0,), (0, 0, 0)):
        with pytest.raises(ValueError, match=r"one index for each leading axis \(2, 3\)"):
            solution.head(*index)


def test_a_sparse_matrix_comes_without_a_warning():
    """Torch announces that its CSR is young, here at every call; not the caller's concern."""
    case = make_case(fl.Tsallis(1.5))
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Tsallis(1.5))
    assert torch.is_warn_always_enabled()
    assert solution.head(0, 0).layout == torch.sparse_csr


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["shannon", "tsallis 1.3", "tsallis 1.5", "tsallis 2"])
def test_certificates_are_tight(name, dtype):
    q, k, v = (draw(i, 2, 3, 65, 16, dtype=dtype) for i in range(3))
    solution = fl.attention_solution(3 * q, k, v, REGULARIZERS[name], is_causal=True)
    assert (solution.status == fl.Status.OK.value).all()
    assert (solution.gap >= 0).all()
    assert solution.gap.max() <= (1e-12 if dtype == torch.float64 else 1e-9)
    assert solution.gap.dtype == solution.threshold.dtype == DOUBLE
    assert solution.entries.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_empty_and_broken_rows():
    mask = torch.zeros(6, 9, dtype=DOUBLE)
    mask[1], mask[2, 4], mask[3, 5] = -INF, torch.nan, INF
    for name in REGULARIZERS:
        case = make_case(REGULARIZERS[name])
        solution = fl.attention_solution(
            *case.operands(case.leaves), REGULARIZERS[name], attn_mask=mask
        )
        reference = torch.tensor([0, 1, 2, 2, 0, 0]).expand(2, 3, 6)
        assert torch.equal(solution.status, reference), name
        assert (solution.support_size[..., 1] == 0).all()
        assert (solution.gap[..., 1] == 0).all()
        assert (solution.threshold[..., 1] == INF).all()
        assert solution.gap[..., 2:4].isnan().all()
        assert densified(solution)[..., 2:4, :].isnan().all()
        assert densified(solution)[..., [0, 1, 4, 5], :].isfinite().all()


def test_a_budget_that_cannot_be_met():
    case = make_case(fl.Budget(3))
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Budget(3), is_causal=True)
    assert (solution.status[..., :2] == fl.Status.INFEASIBLE.value).all()
    assert (solution.status[..., 2:] == fl.Status.OK.value).all()


@pytest.mark.parametrize("enough", [True, False])
def test_budgets_under_a_causal_mask(enough):
    """The first queries see too few keys: NaN there only, unless each has a budget of its own."""
    q, k, v = draw(0, 2, 6, 4), draw(1, 2, 6, 4), draw(2, 2, 6, 4)
    budget = fl.Budget(torch.arange(1.0, 7.0).clamp(max=3) if enough else 3)
    output = fl.attention(q, k, v, budget, is_causal=True)
    assert output[:, :2].isnan().all() == (not enough)
    assert output[:, 2:].isfinite().all()


def test_it_prints_as_one_line():
    case = make_case(fl.Tsallis(1.5))
    operands = case.operands(case.leaves)
    solution = fl.attention_solution(*operands, fl.Tsallis(1.5))
    share = solution.support_size.sum() / (2 * 3 * 6 * 9)
    shown = repr(solution)
    assert "\n" not in shown
    assert len(shown) < 120
    assert f"scores (2, 3, 6, 9), support {100 * share:.3g}%, gap <= " in shown
    assert shown.endswith(f"gap <= {solution.gap.max():.2g}, 36 OK)")
    budget = fl.attention_solution(*operands, fl.Budget(3), is_causal=True)
    assert str(budget).endswith("24 OK, 12 INFEASIBLE)"), "and gaps that are NaN are left out"
    assert "nan" not in str(budget)
    nothing = fl.attention_solution(*(x[..., :0, :] for x in operands), fl.Tsallis(1.5))
    assert str(nothing) == "AttentionSolution(scores (2, 3, 0, 0), support 0%, no gap, no rows)"


@pytest.mark.parametrize(
    ("lead", "queries", "keys"),
    [((2, 3), 0, 4), ((2, 3), 4, 0), ((2, 3), 0, 0), ((0, 3), 4, 5), ((2, 0), 4, 5), ((), 3, 0)],
)
def test_nothing_to_solve(lead, queries, keys):
    case = make_case(fl.Tsallis(1.5), lead=lead, queries=queries, keys=keys)
    solution = fl.attention_solution(*case.operands(case.leaves), fl.Tsallis(1.5))
    assert solution.shape == (*lead, queries, keys)
    for rows in (solution.status, solution.gap, solution.threshold, solution.support_size):
        assert rows.shape == (*lead, queries)
    if keys == 0:
        assert (solution.status == fl.Status.EMPTY.value).all()
    assert len(solution.keys) == len(solution.entries) == 0
    assert solution.weights.shape == solution.support.shape == solution.shape


def test_no_graph_is_kept():
    q, k, v = (draw(i, 2, 4, 3).requires_grad_() for i in range(3))
    solution = fl.attention_solution(q, k, v, fl.Tsallis(1.5))
    assert not any(x.requires_grad for x in (solution.entries, solution.threshold, solution.gap))


@pytest.mark.parametrize("wrong", [fl.Tsallis, "sparsemax"])
def test_a_regularizer_is_needed(wrong):
    q = draw(0, 2, 3)
    with pytest.raises(TypeError, match=r"must be a Regularizer such as Tsallis\(1.5\)"):
        fl.attention_solution(q, q, q, wrong)
