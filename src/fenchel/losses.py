"""Fenchel–Young losses: how far a target is from the distribution that the scores give."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._numerics import dot, has, where
from fenchel.priors import Prior
from fenchel.regularizers.contract import Regularizer
from fenchel.solution import Solution
from fenchel.solve import solve

_REDUCTIONS = ("none", "mean", "sum")


def fenchel_young_loss(
    scores: Tensor,
    target: Tensor,
    regularizer: Regularizer,
    *,
    base: Tensor | Prior | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """L(s, y) = Omega*(s) + Omega(y) - <s, y>  (Blondel, Martins and Niculae, 2020).

    Convex in the scores, never negative, and zero exactly where y solves the problem for s; its
    gradient is `weights - y`. With Shannon it is the cross-entropy.

    >>> fl.fenchel_young_loss(scores, labels, fl.Tsallis(1.5))

    scores: (..., n), classes last. target: (...) class indices, or (..., n) distributions.
    weight: (n,), one a class; a distribution is weighted by its mean class weight.
    ignore_index: rows with this class index count nothing, not even in the mean.
    reduction: "mean" (over the weights of the rows that count), "sum" or "none".
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    solution = solve(scores, regularizer, base=base)
    distribution, counted = _as_distribution(target, scores, ignore_index, solution)
    loss = _loss(solution, distribution)
    factor = _row_weights(weight, distribution, scores)
    factor = where(counted, factor.expand(counted.shape), 0.0)
    weighted = where(counted, loss, 0.0) * factor
    if reduction == "none":
        return weighted.to(scores.dtype)
    total = weighted.sum()
    if reduction == "mean":
        norm = factor.sum()
        total = total / where(norm > 0, norm, 1.0)
    return total.to(scores.dtype)


def _loss(solution: Solution, y: Tensor) -> Tensor:
    """The loss of y is the gap of y taken as an answer: that sum of non-negative terms keeps its
    digits and is zero at the optimum. The derivative comes from the definition."""
    problem, omega = solution.problem, solution.regularizer
    gap = omega.gap(problem.scores.detach(), y.detach(), solution.dual, problem.base).to(y.dtype)
    known = where(solution.status == 0, gap, math.nan)
    definition = solution.conjugate - dot(problem.scores, y) + omega.value(y, problem.base)
    definition = where(definition.isfinite(), definition, 0.0)
    return known + (definition - definition.detach())


def _as_distribution(
    target: Tensor, scores: Tensor, ignore_index: int, solution: Solution
) -> tuple[Tensor, Tensor]:
    """(target as rows of weights, which rows count)."""
    dtype = solution.problem.scores.dtype
    if target.is_floating_point():
        if target.shape != scores.shape:
            raise ValueError(
                f"a distribution target must have the scores' shape {tuple(scores.shape)}, "
                f"got {tuple(target.shape)}"
            )
        y = target.to(dtype)
        _check_distribution(y, solution.regularizer.total(solution.problem.scores))
        return y, torch.ones(target.shape[:-1], dtype=torch.bool, device=target.device)
    return _one_hot(target, scores, ignore_index, solution)


def _one_hot(
    target: Tensor, scores: Tensor, ignore_index: int, solution: Solution
) -> tuple[Tensor, Tensor]:
    n, dtype = scores.shape[-1], solution.problem.scores.dtype
    if target.is_complex() or target.dtype == torch.bool or target.shape != scores.shape[:-1]:
        raise ValueError(
            f"target must be class indices of shape {tuple(scores.shape[:-1])} or distributions "
            f"of shape {tuple(scores.shape)}, got {target.dtype} of shape {tuple(target.shape)}"
        )
    if has(solution.regularizer.total(solution.problem.scores) != 1):
        raise ValueError("a class index has mass one; give a Budget target with sum k as floats")
    counted = target != ignore_index
    wrong = counted & ((target < 0) | (target >= n))
    if has(wrong):
        raise ValueError(
            f"class indices must lie in [0, {n}), got {target[wrong][0].item()}; "
            f"rows to leave out are marked by ignore_index={ignore_index}"
        )
    classes = torch.arange(n, device=scores.device)
    return (classes == target.unsqueeze(-1)).to(dtype), counted


def _check_distribution(y: Tensor, total: Tensor) -> None:
    off = (y.sum(-1) - total).abs() > total * y.shape[-1] * torch.finfo(y.dtype).eps * 8
    if has((y < 0).any(-1) | off):
        raise ValueError(
            f"target rows must be non-negative and sum to {total.max().item():g}, got smallest "
            f"entry {y.min().item():g} and sums from {y.sum(-1).min().item():g} to "
            f"{y.sum(-1).max().item():g}; divide by their sum"
        )


def _row_weights(weight: Tensor | None, y: Tensor, scores: Tensor) -> Tensor:
    if weight is None:
        return y.new_ones(y.shape[:-1])
    if weight.shape != scores.shape[-1:]:
        raise ValueError(
            f"weight must have shape ({scores.shape[-1]},), one a class, got {tuple(weight.shape)}"
        )
    return dot(y, weight.to(y.dtype))
