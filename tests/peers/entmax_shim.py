"""The names and signatures of the `entmax` package, answered by fenchel.

What fenchel has no use for is accepted and changes nothing: `k` (how many keys to sort first),
`n_iter` and `ensure_sum_one` (bisection) steer searches that fenchel does not make.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import fenchel as fl

Parameter = float | Tensor


def _map(X: Tensor, regularizer: fl.Regularizer, dim: int) -> Tensor:
    return fl.solve(X, regularizer, dim=dim, throw=True).weights


def _rowwise(parameter: Parameter, X: Tensor, dim: int) -> Parameter:
    """entmax keeps the key axis of a parameter with size one; fenchel leaves it out."""
    if not isinstance(parameter, Tensor):
        return parameter
    shape = list(X.shape)
    shape[dim] = 1
    return parameter.expand(shape).squeeze(dim)


def sparsemax(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    return _map(X, fl.Tsallis(2.0), dim)


def entmax15(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    return _map(X, fl.Tsallis(1.5), dim)


def sparsemax_bisect(
    X: Tensor, dim: int = -1, n_iter: int = 50, ensure_sum_one: bool = True
) -> Tensor:
    return _map(X, fl.Tsallis(2.0), dim)


def entmax_bisect(
    X: Tensor,
    alpha: Parameter = 1.5,
    dim: int = -1,
    n_iter: int = 50,
    ensure_sum_one: bool = True,
) -> Tensor:
    return _map(X, fl.Tsallis(_rowwise(alpha, X, dim)), dim)


def normmax_bisect(X: Tensor, alpha: Parameter = 2.0, dim: int = -1, n_iter: int = 50) -> Tensor:
    return _map(X, fl.Norm(_rowwise(alpha, X, dim)), dim)


def budget_bisect(X: Tensor, budget: Parameter = 2.0, dim: int = -1, n_iter: int = 50) -> Tensor:
    return _map(X, fl.Budget(_rowwise(budget, X, dim)), dim)


def _losses(X: Tensor, target: Tensor, regularizer: fl.Regularizer) -> Tensor:
    return fl.fenchel_young_loss(X, target, regularizer, reduction="none")


def sparsemax_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    return _losses(X, target, fl.Tsallis(2.0))


def entmax15_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    return _losses(X, target, fl.Tsallis(1.5))


def sparsemax_bisect_loss(X: Tensor, target: Tensor, n_iter: int = 50) -> Tensor:
    return _losses(X, target, fl.Tsallis(2.0))


def entmax_bisect_loss(
    X: Tensor, target: Tensor, alpha: Parameter = 1.5, n_iter: int = 50
) -> Tensor:
    return _losses(X, target, fl.Tsallis(_rowwise(alpha, X, -1)))


def normmax_bisect_loss(
    X: Tensor, target: Tensor, alpha: Parameter = 2.0, n_iter: int = 50
) -> Tensor:
    return _losses(X, target, fl.Norm(_rowwise(alpha, X, -1)))


class _Loss(torch.nn.Module):
    """`reduction` in entmax's words: elementwise_mean, sum or none."""

    def __init__(
        self,
        regularizer: fl.Regularizer,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__()
        self.loss = partial(
            fl.fenchel_young_loss,
            regularizer=regularizer,
            ignore_index=int(ignore_index),
            reduction=reduction.removeprefix("elementwise_"),
        )

    def forward(self, X: Tensor, target: Tensor) -> Tensor:
        return self.loss(X, target)


def SparsemaxLoss(k: int | None = None, **options) -> _Loss:
    return _Loss(fl.Tsallis(2.0), **options)


def SparsemaxBisectLoss(n_iter: int = 50, **options) -> _Loss:
    return _Loss(fl.Tsallis(2.0), **options)


def Entmax15Loss(k: int | None = 100, **options) -> _Loss:
    return _Loss(fl.Tsallis(1.5), **options)


def EntmaxBisectLoss(alpha: Parameter = 1.5, n_iter: int = 50, **options) -> _Loss:
    return _Loss(fl.Tsallis(alpha), **options)


def NormmaxBisectLoss(alpha: Parameter = 2.0, n_iter: int = 50, **options) -> _Loss:
    return _Loss(fl.Norm(alpha), **options)
