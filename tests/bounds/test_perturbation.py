"""Tokens dropped, added, replaced, subsampled: against all subsets."""

import itertools
import math

import pytest
import torch

from fenchel.bounds import attack
from fenchel.bounds.perturbation import added, dropped, move_bound, replaced, subsampled
from tests.bounds.draws import F64, generator, normal, shrunk


def softmax_of(scores, values, keep, about):
    return scores[keep].softmax(-1) @ (values[keep] - about)


def brute_force(scores, values, sizes):
    """The largest move over all subsets whose number of dropped tokens is in `sizes`."""
    n, about = len(scores), values[scores.argmax()]
    output = softmax_of(scores, values, list(range(n)), about)
    top = 0.0
    for size in sizes:
        for gone in itertools.combinations(range(n), size):
            keep = [i for i in range(n) if i not in gone]
            moved = (softmax_of(scores, values, keep, about) - output).norm()
            top = max(top, float(moved))
    return top


def settings(count):
    """Scores from flat to peaked, values far from zero or not, some repeated."""
    g = generator(0)
    for seed in range(count):
        n = int(torch.randint(2, 9, (), generator=g))
        width = int(torch.randint(1, 4, (), generator=g))
        peaked = 10 ** (3 * float(torch.rand((), generator=g)) - 1)
        values = normal(n, width, seed=seed) + (1e5 if seed % 3 == 0 else 0.0)
        if seed % 4 == 0:
            values[1] = values[0]
        yield (
            peaked * normal(n, seed=seed + 1000),
            values,
            int(torch.randint(1, n, (), generator=g)),
        )


def test_dropped_against_all_subsets():
    for scores, values, count in settings(120):
        truth = brute_force(scores, values, range(count + 1))
        assert truth <= dropped(scores, values, count).value * (1 + 1e-9) + 1e-14


def test_one_dropped_is_exact():
    for scores, values, _ in settings(120):
        truth = brute_force(scores, values, [0, 1])
        assert dropped(scores, values, 1).value == pytest.approx(truth, rel=1e-9, abs=1e-14)


def test_subsampled_against_all_subsets():
    for scores, values, kept in settings(60):
        truth = brute_force(scores, values, [len(scores) - kept])
        assert truth <= subsampled(scores, values, kept).value * (1 + 1e-9) + 1e-14


def test_dinkelbach_against_all_subsets():
    """The bound itself, max over D of sum_D c / (1 - p(D)), cut off by the hull."""
    for scores, values, count in settings(60):
        p = scores.softmax(-1)
        about = values - values[scores.argmax()]
        away = (about - p @ about).norm(dim=-1)
        top = 0.0
        for gone in itertools.combinations(range(len(p)), count):
            keep = [i for i in range(len(p)) if i not in gone]
            top = max(top, float((p * away)[list(gone)].sum() / p[keep].sum()))
        known = min(top, float(away.max()))
        assert dropped(scores, values, count).value == pytest.approx(known, rel=1e-9, abs=1e-14)


def test_a_token_with_nearly_all_weight():
    """1 - p and v - y cancel unless computed with care: once 6e-6 too small."""
    for gap in (20.0, 25.0, 30.0, 100.0, 600.0, 740.0, 2000.0):
        scores = torch.tensor([gap, 0.0], dtype=F64)
        values = torch.tensor([[1 / 3], [1.7]], dtype=F64)
        weight = 1 / (1 + math.exp(-min(gap, 700)))
        truth = (1.7 - 1 / 3) * weight
        assert dropped(scores, values, 1).value == pytest.approx(truth, rel=1e-13)


def test_no_weight_left():
    """What is left has weights that underflow: the hull decides."""
    scores = torch.tensor([0.0, -800.0, -900.0], dtype=F64)
    values = torch.tensor([[0.0], [1.0], [3.0]], dtype=F64)
    assert brute_force(scores, values, [1, 2]) == 3
    assert dropped(scores, values, 1).value == 3  # true: 1
    assert dropped(scores, values, 2).value == 3


@pytest.mark.parametrize("count", [1, 3])
def test_added_against_random_tokens(count):
    for seed in range(10):
        scores, values = normal(5, seed=seed), normal(5, 2, seed=seed + 50)
        bound = added(scores, values, count, largest_score=0.5, radius=2.0)
        output, top = scores.softmax(-1) @ values, 0.0
        for angle in torch.linspace(0, 2 * math.pi, 60, dtype=F64):
            new = 2.0 * torch.stack([angle.cos(), angle.sin()]).expand(count, 2)
            for score in (-1.0, 0.5):
                joined = torch.cat([scores, torch.full((count,), score, dtype=F64)])
                moved = joined.softmax(-1) @ torch.cat([values, new]) - output
                top = max(top, float(moved.norm()))
        assert 0.98 * bound.value <= top <= bound.value * (1 + 1e-12)


def test_replaced_against_all_subsets():
    for seed in range(10):
        scores, values = 2 * normal(5, seed=seed), normal(5, 1, seed=seed + 50)
        for count in (1, 2, 5):
            bound = replaced(scores, values, count, largest_score=1.0, radius=1.5).value
            output, top = scores.softmax(-1) @ values, 0.0
            for gone in itertools.combinations(range(5), count):
                for end, score in itertools.product((-1.5, 1.5), (-3.0, 1.0)):
                    moved, marks = values.clone(), scores.clone()
                    moved[list(gone)], marks[list(gone)] = end, score
                    top = max(top, float((marks.softmax(-1) @ moved - output).norm()))
            assert top <= bound * (1 + 1e-12)
            if count == 5:
                assert bound == pytest.approx(top)


def test_new_tokens_may_have_no_weight():
    """New values at the output itself only hold it back: most moves with none of them."""
    values = torch.tensor([[1.0], [-1.0], [0.0], [0.0]])
    bound = replaced(torch.zeros(4), values, 1, largest_score=5.0, radius=0.0)
    assert bound.value == pytest.approx(1 / 3)


def test_all_replaced_by_tokens_of_tiny_scores():
    """Nothing else is left, so they decide, however small: once the bound forgot them."""
    scores, values = torch.zeros(2), torch.tensor([[0.0], [0.1]])
    for largest in (-10.0, -700.0, -800.0, -1e6):
        bound = replaced(scores, values, 2, largest_score=largest, radius=100.0)
        assert bound.value == pytest.approx(100.05)
    peaked = torch.tensor([0.0, -1000.0])
    bound = replaced(peaked, values, 1, largest_score=-900.0, radius=100.0)
    assert bound.value == pytest.approx(100.0)


def test_a_new_token_that_takes_all():
    bound = added(torch.zeros(3), normal(3, 2), 1, largest_score=1e6, radius=5.0)
    output = normal(3, 2).mean(0)
    assert bound.value == pytest.approx(5 + float(output.norm()))


def test_tiny_scores_add_nothing():
    bound = added(torch.zeros(3), normal(3, 2), 1, largest_score=-1e6, radius=5.0)
    assert bound.value < 1e-290


def test_batched_bounds_equal_single_ones():
    weights, values = (3 * normal(4, 2, 7)).softmax(-1), normal(4, 2, 7, 3, seed=1)
    many = move_bound(weights, values, 2, most=0.1, radius=2.0)
    assert many.shape == (4, 2)
    for i, j in itertools.product(range(4), range(2)):
        one = move_bound(weights[i, j], values[i, j], 2, most=0.1, radius=2.0)
        torch.testing.assert_close(many[i, j], one, rtol=1e-12, atol=0)


# ---- attacks


def test_a_bound_of_nine_tenths_is_refuted():
    scores, values = normal(10), normal(10, 3, seed=1)
    for bound in (
        dropped(scores, values, 1),
        added(scores, values, 2, largest_score=1.0, radius=2.0),
        replaced(scores, values, 10, largest_score=1.0, radius=9.0),
    ):
        assert attack(bound, 1000).holds
        assert not attack(shrunk(bound), 1000).holds


def test_equal_values_do_not_move():
    values = torch.full((9, 3), 0.1)
    for bound in (dropped(normal(9), values, 2), subsampled(normal(9), normal(9, 3), 9)):
        assert bound.value == 0
        assert attack(bound, 200).ratio == 0


def test_check_of_a_choice():
    """Ranks, the largest of which go; no new tokens."""
    scores, values = torch.zeros(4), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    bound = dropped(scores, values, 1)
    nothing = torch.zeros(0, dtype=F64), torch.zeros(0, 1, dtype=F64)
    ranks = torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=F64)
    assert bound.check(ranks, *nothing).ratio == pytest.approx(1)
    assert bound.check(ranks.flip(0), *nothing).quotient == pytest.approx(1 / 3 - 1 / 4)


def test_check_refuses_new_tokens_that_the_bound_is_not_for():
    bound = added(torch.zeros(3), normal(3, 2), 1, largest_score=0.0, radius=1.0)
    ranks, mark = torch.zeros(3, dtype=F64), torch.zeros(1, dtype=F64)
    assert bound.check(ranks, mark, torch.tensor([[0.6, 0.8]], dtype=F64)).holds
    for wrong in ((mark, torch.tensor([[3.0, 4.0]])), (mark + 1, torch.zeros(1, 2))):
        with pytest.raises(ValueError, match="outside of what the bound is for"):
            bound.check(ranks, *(x.double() for x in wrong))


# ---- refusals


def test_bad_input():
    scores, values = torch.zeros(3), normal(3, 2)
    with pytest.raises(ValueError, match="count must be below the 3 tokens there are, got 3"):
        dropped(scores, values, 3)
    with pytest.raises(ValueError, match="count must be >= 1, got 0"):
        dropped(scores, values, 0)
    with pytest.raises(ValueError, match="count must be at most the 3 tokens there are, got 4"):
        subsampled(scores, values, 4)
    with pytest.raises(ValueError, match="count must be at most the 3 tokens"):
        replaced(scores, values, 4, largest_score=0.0, radius=1.0)
    with pytest.raises(ValueError, match="leave masked tokens out"):
        dropped(torch.tensor([0.0, -math.inf, 0.0]), values, 1)
    with pytest.raises(ValueError, match=r"scores must be \(n\) and values \(n, e\)"):
        dropped(scores, values[:2], 1)
    with pytest.raises(TypeError, match="scores must be a tensor"):
        dropped([0.0], values, 1)
    for largest in (math.inf, math.nan):
        with pytest.raises(ValueError, match="largest_score must be finite"):
            added(scores, values, 1, largest_score=largest, radius=1.0)
    for radius in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="radius must be finite and >= 0"):
            added(scores, values, 1, largest_score=0.0, radius=radius)
