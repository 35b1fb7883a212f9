"""Where two regularisers are the same function, and where one has a known limit."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

import fenchel as fl

from .checks import assert_near, assert_solved, rounding, spread, weight_error
from .families import Family, each, fused, fused_grid, grid_shape
from .runner import invariant
from .strategies import problems, score_rows


@invariant(problem=problems(), temperature=st.sampled_from([0.1, 1.0, 20.0]))
def test_tsallis_one_is_shannon(problem: tuple[Tensor, Tensor], temperature: float) -> None:
    """As a number, where Tsallis hands over to Shannon, and as a tensor, where it does not."""
    scores, mass = problem
    shannon = fl.solve(scores, fl.Shannon(temperature), base=mass)
    for alpha in (1.0, torch.ones((), dtype=scores.dtype)):
        tsallis = fl.solve(scores, fl.Tsallis(alpha, temperature), base=mass)
        assert_near(tsallis.weights, shannon.weights, rounding(scores, 8.0))
        size = spread(scores) + float(scores.abs().max()) + 8 * temperature
        assert_near(tsallis.potential, shannon.potential, rounding(scores, size))
        assert_near(tsallis.objective, shannon.objective, rounding(scores, size))


@invariant(problem=problems())
def test_four_names_of_sparsemax(problem: tuple[Tensor, Tensor]) -> None:
    """Weights and thresholds; the potentials differ by the constants that entropies carry."""
    scores, mass = problem
    mask = mass > 0
    first = fl.solve(scores, fl.Tsallis(2.0), base=mask)
    grid = grid_shape(scores.shape[-1])
    for regularizer in (fl.Budget(1), fl.Fused(0.0), fl.Fused(0.0, grid=grid)):
        other = fl.solve(scores, regularizer, base=mask)
        assert_solved(other)
        assert_near(other.weights, first.weights, rounding(scores, 8.0))
        size = float(scores.abs().max()) + spread(scores)
        assert_near(other.potential, first.potential - 0.5, rounding(scores, size))


@each([fused(1e6), fused_grid(1e6)])
@invariant(scores=score_rows())
def test_strong_fusion_makes_equal_weights(family: Family, scores: Tensor) -> None:
    """Beyond the sum of all scores no difference pays: one group, the mean."""
    weights = family.solve(scores).weights
    uniform = torch.full_like(scores, 1 / scores.shape[-1])
    assert_near(weights, uniform, weight_error(family, scores))


@invariant(scores=score_rows(2), cut=st.integers(1, 39))
def test_strong_fusion_is_equal_on_each_side_of_a_mask(scores: Tensor, cut: int) -> None:
    cut = 1 + cut % (scores.shape[-1] - 1)
    masked = scores.clone()
    masked[..., cut] = -torch.inf
    weights = fl.solve(masked, fl.Fused(1e6)).weights
    error = weight_error(fused(1e6), scores)
    for side in (weights[..., :cut], weights[..., cut + 1 :]):
        if side.shape[-1]:
            assert_near(side, side[..., :1].expand_as(side), error)


@invariant(scores=score_rows(1, 12))
def test_a_full_budget_fills_every_key(scores: Tensor) -> None:
    """k = n leaves no choice; half a key less is taken from the smallest score, and from others
    only if they are within one half of it."""
    n = scores.shape[-1]
    error = rounding(scores, spread(scores))
    full = fl.solve(scores, fl.Budget(n)).weights
    assert_near(full, torch.ones_like(scores), error)
    less = fl.solve(scores, fl.Budget(n - 0.5)).weights
    far = scores > scores.amin(-1, keepdim=True) + 0.5
    assert_near(less[far], full[far], error)
