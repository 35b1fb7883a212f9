"""The judges of this folder refuse wrong answers."""

import pytest
import torch

import fenchel as fl
from tests.attention.cases import (
    DOUBLE,
    assert_agrees,
    assert_within,
    dense,
    derivatives,
    draw,
    largest_difference,
    make_case,
    margin,
)


def wrong_by(relative):
    def attend(*args, **options):
        return dense(*args, **options) * (1 + relative)

    return attend


def forgets_the_mask(*args, attn_mask=None, **options):
    return dense(*args, **options)


def detaches_the_key(query, key, value, *rest, **options):
    gone = key.detach() + 0 * key  # in the graph, with a gradient of zero
    return dense(query, gone, value, *rest, **options)


CASE = make_case(fl.Tsallis(1.5), options={"attn_mask": torch.arange(9) < 7})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_agrees_with_itself(dtype):
    assert_agrees(dense, CASE, dtype)


@pytest.mark.parametrize(
    ("attend", "dtype", "words"),
    [
        (wrong_by(1e-11), torch.float64, "output"),
        (wrong_by(1e-3), torch.float32, "output"),
        (forgets_the_mask, torch.float64, "output"),
        (detaches_the_key, torch.float64, "key"),
        (lambda *a, **o: dense(*a, **o).mT, torch.float64, "not"),
        (lambda *a, **o: dense(*a, **o) + torch.nan, torch.float64, "NaN"),
        (lambda q, k, v, *a, **o: dense(q, k.detach(), v, *a, **o), torch.float64, "left out"),
    ],
)
def test_wrong_answers_are_refused(attend, dtype, words):
    with pytest.raises(AssertionError, match=words):
        assert_agrees(attend, CASE, dtype)


def test_a_missing_nan_is_refused():
    with pytest.raises(AssertionError, match="NaN"):
        assert_within(torch.zeros(2), torch.tensor([0.0, torch.nan]), 1.0)
    strange = torch.tensor([1.0, torch.nan])
    assert largest_difference(strange, torch.ones(2)) == torch.inf
    assert largest_difference(strange, strange + 2) == 2


def test_the_reference_is_softmax_attention_at_one_head():
    q, k, v = draw(0, 3, 4), draw(1, 5, 4), draw(2, 5, 2)
    weights = torch.softmax(q @ k.T / 2, -1)
    assert (dense(q, k, v, fl.Shannon()) - weights @ v).abs().max() <= 1e-14
    causal = torch.softmax((q @ k.T / 2).masked_fill(torch.ones(3, 5).triu(1) > 0, -torch.inf), -1)
    assert (dense(q, k, v, fl.Shannon(), is_causal=True) - causal @ v).abs().max() <= 1e-14


def test_the_reference_repeats_heads_in_a_row():
    q, k, v = draw(0, 4, 3, 2), draw(1, 2, 5, 2), draw(2, 2, 5, 2)
    grouped = dense(q, k, v, fl.Tsallis(1.5), enable_gqa=True)
    for head in range(4):
        alone = dense(q[head], k[head // 2], v[head // 2], fl.Tsallis(1.5))
        assert (grouped[head] - alone).abs().max() <= 1e-14


def test_derivatives_are_those_of_finite_differences():
    gradients = derivatives(dense, CASE)
    step, direction = 1e-6, draw(5, *CASE.leaves["query"].shape)
    sides = []
    for sign in (1, -1):
        leaves = {**CASE.leaves, "query": CASE.leaves["query"] + sign * step * direction}
        output = CASE.call(dense, leaves)
        sides.append((output * draw(77, *output.shape)).sum())
    slope = (sides[0] - sides[1]) / (2 * step)
    assert abs(slope - (gradients["query"] * direction).sum()) <= 1e-7 * abs(slope)


def test_margin_sees_a_key_on_the_edge():
    value = torch.zeros(2, 1, dtype=DOUBLE)
    scores = torch.tensor([[1.0, 0.0]], dtype=DOUBLE)  # sparsemax: threshold 0
    case = make_case(
        fl.Tsallis(2.0), query=scores, key=torch.eye(2, dtype=DOUBLE), value=value, lead=()
    )
    case = make_case(case.regularizer, options={"scale": 1.0}, **case.leaves)
    assert margin(case) == 0.0
    assert margin(make_case(fl.Tsallis(1.5))) > 0
