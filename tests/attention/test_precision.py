"""Low precision is judged relatively: at most twice the error of the plain PyTorch computation."""

import pytest
import torch

import fenchel as fl
from tests.attention.cases import (
    chance,
    dense,
    dense_scores,
    derivatives,
    draw,
    largest,
    largest_difference,
    make_case,
)

pytestmark = pytest.mark.usefixtures("kernels")


def plain(query, key, value, regularizer, *, base=None, **options):
    """What one would write: softmax in the precision of its input, or the map of `solve`."""
    if type(regularizer) is not fl.Shannon or base is not None:
        return dense(query, key, value, regularizer, base=base, **options)
    return torch.softmax(dense_scores(query, key, **options), -1) @ value


def errors(attend, cases, dtype):
    """The largest error of each number over the cases, in the max norm, relative to its size."""
    worst = {}
    for case in cases:
        case = case.rounded(dtype)
        exact, gradients = derivatives(dense, case), derivatives(attend, case, dtype)
        for name, expected in exact.items():
            error = largest_difference(gradients[name], expected) / largest(expected)
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def assert_no_worse(attend, cases, dtype, factor=2.0):
    """`attend` errs at most twice as much as the plain computation; half a unit is free."""
    unit = torch.finfo(dtype).eps
    ours, theirs = errors(attend, cases, dtype), errors(plain, cases, dtype)
    for name, error in ours.items():
        allowed = factor * max(theirs[name], unit / 2)
        assert error <= allowed, f"{name}: {error:.2e}, plain {theirs[name]:.2e}"


def spread_cases(regularizer, deviation, n, seeds=3, **options):
    """Scores of this standard deviation: d = 16 components, scale 1/4."""
    return [
        make_case(
            regularizer,
            lead=(1,),
            queries=n,
            keys=n,
            d=16,
            d_value=16,
            seed=10 * seed,
            spread=deviation,
            options=options,
        )
        for seed in range(seeds)
    ]


def off_by(relative):
    def attend(*args, **options):
        return plain(*args, **options) * (1 + relative)

    return attend


def blurred(query, key, *rest, **options):
    """Scores as if made in half precision: small errors that a loose comparison would pass."""
    return plain(query.bfloat16().to(query.dtype) + 0 * query, key, *rest, **options)


def test_the_judge_refuses_worse_answers():
    cases = spread_cases(fl.Tsallis(1.5), 1.0, 64)
    assert_no_worse(plain, cases, torch.float32)
    with pytest.raises(AssertionError, match="plain"):
        assert_no_worse(blurred, cases, torch.float32)
    with pytest.raises(AssertionError, match="output"):
        assert_no_worse(off_by(1e-5), cases, torch.float32)
    with pytest.raises(AssertionError, match="output"):
        assert_no_worse(off_by(0.05), cases, torch.bfloat16)


@pytest.mark.parametrize("n", [64, 200])
@pytest.mark.parametrize("deviation", [0.02, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_float32(alpha, deviation, n):
    assert_no_worse(fl.attention, spread_cases(fl.Tsallis(alpha), deviation, n), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("n", [128, 333, 512])
@pytest.mark.parametrize("deviation", [0.02, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_float32_with_more_seeds(alpha, deviation, n):
    cases = spread_cases(fl.Tsallis(alpha), deviation, n, seeds=8)
    assert_no_worse(fl.attention, cases, torch.float32)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_float32_causal_and_masked(alpha):
    for options in (
        {"is_causal": True},
        {"attn_mask": chance(4, 0.5, 100, 100)},
        {"base": fl.priors.ALiBi(1)},
    ):
        cases = spread_cases(fl.Tsallis(alpha), 1.0, 100, **options)
        assert_no_worse(fl.attention, cases, torch.float32)


def test_float32_softmax():
    for deviation in (0.2, 1.0, 3.0):
        for options in ({}, {"is_causal": True}):
            cases = spread_cases(fl.Shannon(), deviation, 100, **options)
            assert_no_worse(fl.attention, cases, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_half_precision(alpha, dtype):
    regularizer = fl.Tsallis(alpha) if alpha > 1 else fl.Shannon()
    for options in ({}, {"is_causal": True}, {"base": fl.priors.ALiBi(1)}):
        for deviation in (0.2, 1.0):
            cases = spread_cases(regularizer, deviation, 64, **options)
            assert_no_worse(fl.attention, cases, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("regularizer", [fl.Shannon(0.5), fl.Tsallis(1.5, 0.5)], ids=str)
def test_a_float_mask_keeps_its_precision_in_half_precision(regularizer, dtype):
    """Computed in float32 inside: a mask of float32 is not rounded to eight bits first."""
    q, k, v = (draw(i, 2, 33, 16, dtype=dtype) for i in range(3))
    mask = 30 + draw(5, 33, 33, dtype=torch.float32)  # eight bits leave steps of an eighth
    output = fl.attention(q, k, v, regularizer, attn_mask=mask)
    expected = dense(q.double(), k.double(), v.double(), regularizer, attn_mask=mask.double())
    assert output.dtype == dtype
    assert largest_difference(output, expected) <= torch.finfo(dtype).eps * largest(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_that_of_float32_rounded_at_the_end(dtype):
    q, k, v = (draw(i, 2, 33, 16, dtype=dtype) for i in range(3))
    for alpha in (1.3, 1.5, 2.0):
        output = fl.attention(q, k, v, fl.Tsallis(alpha))
        expected = fl.attention(q.float(), k.float(), v.float(), fl.Tsallis(alpha))
        assert largest_difference(output, expected) <= torch.finfo(dtype).eps * largest(expected)
