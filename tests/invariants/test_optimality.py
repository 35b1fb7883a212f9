"""Feasible, optimal by its own certificate, and not beaten by anything else we can think of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import fenchel as fl
from fenchel.priors.measure import resolve

from .checks import (
    assert_feasible,
    assert_near,
    assert_not_above,
    gap_limit,
    rounding,
    weight_error,
)
from .families import ALL, Family, each
from .runner import invariant
from .strategies import feasible_weights, gentle_rows, problems, score_rows, seeds

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def value_error(scores: Tensor, *sizes: Tensor) -> float:
    """Rounding of <s, p> - Omega(p), from the largest of its parts."""
    return rounding(scores, sum(float(size.abs().max()) for size in sizes))


@DTYPES
@each(ALL)
@invariant(problem=problems())
def test_feasible_with_a_small_gap(
    family: Family, dtype: torch.dtype, problem: tuple[Tensor, Tensor]
) -> None:
    scores, mass = problem[0].to(dtype), problem[1]
    solution = family.solve(scores, mass)
    assert_feasible(family, scores, mass, solution)
    assert bool((solution.gap >= 0).all())
    assert_not_above(solution.gap, torch.zeros_like(solution.gap), gap_limit(family, scores))


@pytest.mark.parametrize("second", [-600.0, -707.0, -708.5, -730.0, -744.0, -760.0])
@each([family for family in ALL if family.name in ("shannon(1.0)", "tsallis(1.0,1.0)")])
def test_gap_is_not_negative_where_weights_underflow(family: Family, second: float) -> None:
    """A sum of non-negative terms has no sign to lose, however small."""
    gap = family.solve(torch.tensor([0.0, second], dtype=torch.float64)).gap
    assert float(gap) >= 0


@DTYPES
@pytest.mark.parametrize("best", [1.0, 256.0, 1e4, 1e8])
def test_budget_is_spent_whatever_the_spread(best: float, dtype: torch.dtype) -> None:
    """The best key is full; the other two are equal and share what is left, however far below."""
    scores = torch.tensor([0.0, 0.0, best], dtype=dtype)
    solution = fl.solve(scores, fl.Budget(1.2))
    expected = torch.tensor([0.1, 0.1, 1.0], dtype=dtype)
    assert_near(solution.weights, expected, rounding(scores))
    loss = fl.fenchel_young_loss(scores, solution.weights, fl.Budget(1.2))
    assert float(loss) <= rounding(scores)


@DTYPES
@each(ALL)
@invariant(problem=problems())
def test_objective_meets_potential(
    family: Family, dtype: torch.dtype, problem: tuple[Tensor, Tensor]
) -> None:
    scores, mass = problem[0].to(dtype), problem[1]
    solution = family.solve(scores, mass)
    size = scores.abs().max() * family.total(scores, mass) * 2
    error = value_error(scores, size, solution.potential) + gap_limit(family, scores)
    assert_near(solution.objective, solution.potential, error)


@each(ALL)
@invariant(scores=score_rows(), generator=seeds())
def test_nothing_feasible_is_better(
    family: Family, scores: Tensor, generator: torch.Generator
) -> None:
    """Omega here is the textbook's, so that value, map and potential are checked at once."""
    total = family.total(scores)
    solution = family.solve(scores)
    other = feasible_weights(scores.shape, total, generator)
    near = 0.9 * solution.weights + 0.1 * other
    size = scores.abs().max() * total * 2
    for q in (other, near, torch.full_like(scores, total / scores.shape[-1])):
        objective = (scores * q).sum(-1) - family.omega(q)
        error = value_error(scores, size, family.omega(q))
        assert_not_above(objective, solution.potential, error + gap_limit(family, scores))


@each(ALL)
@invariant(scores=score_rows(), generator=seeds())
def test_value_is_the_textbooks(family: Family, scores: Tensor, generator: torch.Generator) -> None:
    q = feasible_weights(scores.shape, family.total(scores), generator)
    expected = family.omega(q)
    assert_near(_omega(family, q), expected, value_error(scores, expected))


@each(ALL)
@invariant(scores=score_rows(), generator=seeds())
def test_omega_is_convex(family: Family, scores: Tensor, generator: torch.Generator) -> None:
    total = family.total(scores)
    p, q = (feasible_weights(scores.shape, total, generator) for _ in range(2))
    chord = (_omega(family, p) + _omega(family, q)) / 2
    assert_not_above(_omega(family, (p + q) / 2), chord, value_error(scores, chord))


def _omega(family: Family, weights: Tensor) -> Tensor:
    everywhere = resolve(None, weights.shape, weights)
    return family.regularizer(weights).value(weights, everywhere)


@each(ALL)
@invariant(scores=gentle_rows(), generator=seeds(), step=st.sampled_from([1e-3, 0.3, 4.0]))
def test_loss_is_convex_in_the_scores(
    family: Family, scores: Tensor, generator: torch.Generator, step: float
) -> None:
    target = feasible_weights(scores.shape, family.total(scores), generator)
    other = scores + step * torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
    chord = (_loss(family, scores, target) + _loss(family, other, target)) / 2
    middle = _loss(family, (scores + other) / 2, target)
    error = value_error(scores, scores, other) * max(1.0, family.total(scores))
    assert_not_above(middle, chord, error + gap_limit(family, scores))


@each(ALL)
@invariant(scores=score_rows(), generator=seeds())
def test_loss_is_non_negative(family: Family, scores: Tensor, generator: torch.Generator) -> None:
    target = feasible_weights(scores.shape, family.total(scores), generator)
    assert bool((_loss(family, scores, target) >= 0).all())


@each(ALL)
@invariant(scores=score_rows())
def test_loss_is_zero_at_the_weights(family: Family, scores: Tensor) -> None:
    loss = _loss(family, scores, family.solve(scores).weights)
    assert_not_above(loss, torch.zeros_like(loss), gap_limit(family, scores))


@each([family for family in ALL if family.curved])
@invariant(scores=score_rows(), generator=seeds())
def test_loss_is_at_least_half_the_squared_distance(
    family: Family, scores: Tensor, generator: torch.Generator
) -> None:
    """Omega is 1-strongly convex for the Euclidean norm, so a wrong target cannot cost nothing."""
    target = feasible_weights(scores.shape, family.total(scores), generator)
    distance = (target - family.solve(scores).weights).square().sum(-1) / 2
    error = 4 * weight_error(family, scores) * max(1.0, family.total(scores))
    assert_not_above(distance, _loss(family, scores, target), error)


@each(ALL)
@invariant(scores=score_rows(), generator=seeds())
def test_loss_is_its_definition(family: Family, scores: Tensor, generator: torch.Generator) -> None:
    """potential + Omega(y) - <s, y>, put together by hand."""
    total = family.total(scores)
    target = feasible_weights(scores.shape, total, generator)
    omega = family.omega(target)
    expected = family.solve(scores).potential + omega - (scores * target).sum(-1)
    error = value_error(scores, scores * max(1.0, total) * 2, omega) + gap_limit(family, scores)
    assert_near(_loss(family, scores, target), expected, error)


def _loss(family: Family, scores: Tensor, target: Tensor) -> Tensor:
    regularizer = family.regularizer(scores)
    return fl.fenchel_young_loss(scores, target, regularizer, reduction="none")
