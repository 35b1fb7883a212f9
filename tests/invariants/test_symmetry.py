"""What must not change an answer: shifts, the order of keys, splitting, masks against deletion."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import fenchel as fl

from .checks import answer_to, assert_near, assert_solved, rounding, spread, weight_error
from .families import (
    ALL,
    SYMMETRIC,
    WITH_BASE,
    Family,
    each,
    fused,
    fused_grid,
    grid_shape,
)
from .runner import invariant
from .strategies import lattice_rows, problems, score_rows, seeds

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@DTYPES
@each(ALL)
@invariant(scores=lattice_rows(), constant=st.integers(-64, 64))
def test_exact_shift_changes_no_bit(
    family: Family, dtype: torch.dtype, scores: Tensor, constant: int
) -> None:
    """The shifted scores are exact, so the centred scores are the same numbers."""
    scores = scores.to(dtype)
    assert torch.equal(family.solve(scores + constant).weights, family.solve(scores).weights)


@each(ALL)
@invariant(problem=problems(), constant=st.floats(-1e6, 1e6))
def test_shift(family: Family, problem: tuple[Tensor, Tensor], constant: float) -> None:
    """Weights stay, the potential moves by constant * total."""
    scores, mass = problem
    before, after = family.solve(scores, mass), family.solve(scores + constant, mass)
    size = abs(constant) + float(scores.abs().max())
    rounded = 2 * torch.finfo(scores.dtype).eps * size  # what adding the constant does to a score
    error = weight_error(family, scores) + answer_to(family, rounded)
    assert_near(after.weights, before.weights, error)
    total = family.total(scores, mass)
    limit = rounding(scores, (size + spread(scores)) * max(1.0, total))
    assert_near(after.potential, before.potential + constant * total, limit)


@each(SYMMETRIC)
@invariant(problem=problems(), generator=seeds())
def test_permutation(
    family: Family, problem: tuple[Tensor, Tensor], generator: torch.Generator
) -> None:
    scores, mass = problem
    order = torch.randperm(scores.shape[-1], generator=generator)
    expected = family.solve(scores, mass).weights[..., order]
    actual = family.solve(scores[..., order], mass[order]).weights
    assert_near(actual, expected, weight_error(family, scores))


@invariant(problem=problems(), strength=st.sampled_from([0.01, 0.3, 5.0]))
def test_fused_reversal(problem: tuple[Tensor, Tensor], strength: float) -> None:
    scores, mass = problem
    family = fused(strength)
    expected = family.solve(scores, mass).weights.flip(-1)
    actual = family.solve(scores.flip(-1), mass.flip(-1)).weights
    assert_near(actual, expected, weight_error(family, scores))


@pytest.mark.parametrize("axis", [-1, -2])
@invariant(problem=problems(), strength=st.sampled_from([0.01, 0.3, 5.0]))
def test_fused_grid_flip(axis: int, problem: tuple[Tensor, Tensor], strength: float) -> None:
    scores, mass = problem
    family, shape = fused_grid(strength), grid_shape(scores.shape[-1])

    def flipped(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, shape).flip(axis).flatten(-2)  # (..., n) -> (..., h, w) -> back

    expected = flipped(family.solve(scores, mass).weights)
    actual = family.solve(flipped(scores), flipped(mass)).weights
    assert_near(actual, expected, weight_error(family, scores))


@invariant(scores=score_rows(1, 6), repeats=st.integers(1, 6), generator=seeds())
def test_fused_grid_transposition(scores: Tensor, repeats: int, generator: torch.Generator) -> None:
    """A field and its transpose, with the grid's shape turned as well."""
    family = fused_grid(0.3)
    noise = torch.randn(repeats, scores.shape[-1], generator=generator, dtype=scores.dtype)
    field = scores.unsqueeze(-2) + noise  # (rows, repeats, keys)
    upright = _solve_grid(field)
    assert_near(_solve_grid(field.mT).mT, upright, weight_error(family, field.flatten(-2)))


def _solve_grid(field: Tensor) -> Tensor:
    solution = fl.solve(field.flatten(-2), fl.Fused(0.3, grid=tuple(field.shape[-2:])))
    assert_solved(solution)
    return solution.weights.view(field.shape)


@each(WITH_BASE)
@invariant(
    problem=problems(), key=st.integers(0, 39), share=st.sampled_from([0.5, 0.25, 0.3, 1e-3])
)
def test_splitting_a_key(
    family: Family, problem: tuple[Tensor, Tensor], key: int, share: float
) -> None:
    """nu omega(p / nu) is homogeneous: two keys that share mass and score share the weight."""
    scores, mass = problem
    key %= scores.shape[-1]
    whole = family.solve(scores, mass).weights
    parts = torch.cat([scores, scores[..., key, None]], -1)
    masses = torch.cat([mass, (1 - share) * mass[key, None]])
    masses[key] *= share
    split = family.solve(parts, masses).weights
    error = weight_error(family, parts)
    assert_near(split[..., key], share * whole[..., key], error)
    joined = split[..., :-1].clone()
    joined[..., key] += split[..., -1]
    assert_near(joined, whole, error)


@pytest.mark.parametrize("how", ["score", "mask", "mass"])
@each(SYMMETRIC)
@invariant(problem=problems())
def test_masking_is_deleting(family: Family, how: str, problem: tuple[Tensor, Tensor]) -> None:
    scores, mass = problem
    keep = mass > 0
    ones = torch.ones_like(mass)
    if how == "score":
        masked = family.make(len(mass), int(keep.sum()))
        solution = fl.solve(scores.masked_fill(~keep, -math.inf), masked)
    else:
        solution = family.solve(scores, keep if how == "mask" else torch.where(keep, ones, 0.0))
    assert_solved(solution)
    assert bool((solution.weights[..., ~keep] == 0).all())
    alone = family.solve(scores[..., keep])
    assert_near(solution.weights[..., keep], alone.weights, weight_error(family, scores))


@invariant(scores=score_rows(), kept=st.integers(1, 40))
def test_fused_masking_the_end_is_deleting_it(scores: Tensor, kept: int) -> None:
    """In the middle a mask cuts the chain in two, which no deletion does."""
    family, n = fused(0.3), scores.shape[-1]
    live = torch.arange(n) < min(kept, n)
    masked = family.solve(scores, live.to(scores.dtype)).weights
    assert bool((masked[..., ~live] == 0).all())
    alone = family.solve(scores[..., live]).weights
    assert_near(masked[..., live], alone, weight_error(family, scores))
