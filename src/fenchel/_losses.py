"""Fenchel–Young losses: how far a target is from the distribution that the scores give."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._numerics import check_tensor, check_whole, dot, has, where
from fenchel._solution import Solution, Status
from fenchel._solve import check_scores, solve_fully
from fenchel.priors import Prior
from fenchel.regularizers.contract import Regularizer, resolve_regularizer

_REDUCTIONS = ("none", "mean", "sum")
_IGNORE = -100  # as torch.nn.functional.cross_entropy


def fenchel_young_loss(
    scores: Tensor,
    target: Tensor,
    regularizer: Regularizer | Module,
    *,
    base: Tensor | Prior | None = None,
    weight: Tensor | None = None,
    ignore_index: int = _IGNORE,
    reduction: str = "mean",
) -> Tensor:
    """L(s, y) = Omega*(s) + Omega(y) - <s, y>  (Blondel, Martins and Niculae, 2020).

    Convex in the scores, never negative, and zero exactly where y solves the problem for s; its
    gradient is `weights - y`. With Shannon it is the cross-entropy. A target on a masked class
    costs +inf; where a target weight is zero Shannon's slope -inf in the target is taken as zero.

    >>> fl.fenchel_young_loss(scores, labels, fl.Tsallis(1.5))

    scores: (..., n), classes last. target: (...) class indices, or (..., n) distributions.
    weight: (n,), non-negative, one per class; a distribution is weighted by its mean class weight.
    ignore_index: rows with this class index count nothing, not even in the mean.
    reduction: "mean" (over the weights of the rows that count), "sum" or "none".
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    check_tensor(target, "target")
    check_whole(ignore_index, "ignore_index", -(2**63))
    check_scores(scores, -1)
    solution = solve_fully(scores, resolve_regularizer(regularizer), base=base)
    distribution, counted = _as_distribution(target, scores, ignore_index, solution)
    loss = _loss(solution, distribution)
    factor = _row_weights(weight, distribution, scores)
    factor = where(counted, factor.expand(counted.shape), 0.0)
    weighted = where(counted & (factor > 0), loss, 0.0) * factor  # 0 * inf counts nothing
    if reduction == "none":
        return weighted.to(scores.dtype)
    total = weighted.sum()
    if reduction == "mean":
        norm = factor.sum()
        total = total / where(norm > 0, norm, 1.0)
    return total.to(scores.dtype)


def _loss(solution: Solution, y: Tensor) -> Tensor:
    """The derivative comes from the definition. The value of our families is the gap of y taken as
    an answer: that sum of non-negative terms keeps its digits and is zero at the optimum."""
    problem, omega = solution.problem, solution.regularizer
    definition = solution.conjugate - dot(problem.scores, y) + omega.value(y, problem.base)
    loss = definition.detach()
    if omega.gap_is_loss:
        loss = solution.gap_of(y.detach()).to(y.dtype)
    failed = (solution.outcome == Status.NONFINITE.value) | (
        solution.outcome == Status.INFEASIBLE.value
    )
    definition = where(definition.isfinite(), definition, 0.0)
    return where(~failed, loss, math.nan) + (definition - definition.detach())


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
        if ignore_index != _IGNORE:
            raise ValueError(
                f"ignore_index={ignore_index} is for class indices; a distribution is left out by "
                "removing its row"
            )
        y = target.to(dtype)
        _check_distribution(y, target.dtype, solution.regularizer.total(solution.problem.scores))
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
    target = target.long()  # in uint8, -100 would be class 156
    counted = target != ignore_index
    wrong = counted & ((target < 0) | (target >= n))
    if has(wrong):
        raise ValueError(
            f"class indices must lie in [0, {n}), got {target[wrong][0].item()}; "
            f"rows to leave out are marked by ignore_index={ignore_index}"
        )
    classes = torch.arange(n, device=scores.device)
    return (classes == target.unsqueeze(-1)).to(dtype), counted


def _check_distribution(y: Tensor, dtype: torch.dtype, total: Tensor) -> None:
    coarse = max(torch.finfo(dtype).eps, torch.finfo(y.dtype).eps)
    off = (y.sum(-1) - total).abs() > total * y.shape[-1] * coarse * 8
    if has((y < 0).any(-1) | off):
        raise ValueError(
            f"target rows must be non-negative and sum to {total.max().item():g}, got smallest "
            f"entry {y.min().item():g} and sums from {y.sum(-1).min().item():.9g} to "
            f"{y.sum(-1).max().item():.9g}; divide by their sum"
        )


def _row_weights(weight: Tensor | None, y: Tensor, scores: Tensor) -> Tensor:
    if weight is None:
        return y.new_ones(y.shape[:-1])
    check_tensor(weight, "weight")
    if has(weight < 0):
        raise ValueError(f"weight must be non-negative, got {weight.min().item():g}")
    if weight.shape != scores.shape[-1:]:
        raise ValueError(
            f"weight must have shape ({scores.shape[-1]},), one per class, "
            f"got {tuple(weight.shape)}"
        )
    return dot(y, weight.to(y.dtype))
