"""Derivatives measured: each kind against an independent way to get the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import fenchel as fl

Map = Callable[[Tensor], Tensor]

FIRST = "first"
SECOND = "second"
MODES = "jvp = vjp"
VMAP = "vmap = loop"
COMPILE = "compile (aot_eager)"
NATIVE_COMPILE = "compile (C++)"


@dataclass(frozen=True)
class Check:
    """The largest difference between two ways, and what rounding alone may give."""

    name: str
    difference: float
    tolerance: float
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


def checks(regularizer: fl.Regularizer, scores: Tensor, *, native: bool = False) -> list[Check]:
    """Every check of one regulariser. scores: (rows, n), float64. `native` needs a compiler."""
    exact = _rounding(scores)
    differences = _difference_tolerance(scores)

    def solve(x: Tensor) -> Tensor:
        return fl.solve(x, regularizer).weights

    row = scores[0]
    wanted: list[tuple[str, Callable[[], Tensor], float]] = [
        (FIRST, lambda: _first(solve, row), differences),
        (SECOND, lambda: _second(solve, row), differences),
        (MODES, lambda: jacfwd(solve)(row) - jacrev(solve)(row), exact),
        (VMAP, lambda: vmap(solve)(scores) - torch.stack([solve(x) for x in scores]), exact),
        (COMPILE, lambda: _compiled(solve, scores, "aot_eager"), exact),
    ]
    if native:
        wanted.append((NATIVE_COMPILE, lambda: _compiled(solve, scores, "inductor"), exact))
    return [_check(*arguments) for arguments in wanted]


def alpha_derivative(scores: Tensor, alphas: Tensor) -> Tensor:
    """d entmax / d alpha for one row of scores (n) at every alpha (m): (m, n)."""
    rows = scores.expand(len(alphas), -1)
    tangent: Tensor = jvp(lambda a: fl.entmax(rows, a), (alphas,), (torch.ones_like(alphas),))[1]
    return tangent


def alpha_check(scores: Tensor, alpha: float) -> Check:
    """`alpha_derivative` against differences, from the right where alpha = 1 is too near."""
    point = torch.tensor([alpha], dtype=scores.dtype)
    step = _step(scores)

    def at(shift: float) -> Tensor:
        return fl.entmax(scores, point.squeeze(0) + shift)

    if alpha - 1 > step:
        estimate = (at(step) - at(-step)) / (2 * step)
    else:
        estimate = (4 * at(step) - 3 * at(0.0) - at(2 * step)) / (2 * step)
    difference = (alpha_derivative(scores, point).squeeze(0) - estimate).abs().max().item()
    return Check(f"alpha = {alpha:.10g}", difference, _difference_tolerance(scores))


def _check(name: str, measure: Callable[[], Tensor], tolerance: float) -> Check:
    try:
        return Check(name, measure().abs().max().item(), tolerance)
    except Exception as failure:  # a report must show what failed, whatever it was, and go on
        return Check(name, float("nan"), tolerance, f"{type(failure).__name__}: {failure}")


def _first(solve: Map, row: Tensor) -> Tensor:
    jacobian: Tensor = jacrev(solve)(row)
    return jacobian - _central(solve, row)


def _second(solve: Map, row: Tensor) -> Tensor:
    """The Hessian in the scores of a fixed combination of the weights."""
    direction = torch.linspace(-1, 1, len(row), dtype=row.dtype)
    slope = grad(lambda x: (solve(x) * direction).sum())
    hessian: Tensor = jacrev(slope)(row)
    return hessian - _central(slope, row)


def _compiled(solve: Map, scores: Tensor, backend: str) -> Tensor:
    torch.compiler.reset()  # each regulariser is a fresh function: no limit on recompilations
    return torch.compile(solve, backend=backend)(scores) - solve(scores)


def _central(function: Map, row: Tensor) -> Tensor:
    """Columns of central differences: the Jacobian up to step^2 and rounding / step."""
    step = _step(row)
    units = torch.eye(len(row), dtype=row.dtype) * step
    columns = [(function(row + unit) - function(row - unit)) / (2 * step) for unit in units]
    return torch.stack(columns, -1)


def _step(like: Tensor) -> float:
    return float(torch.finfo(like.dtype).eps ** (1 / 3))  # where both errors are about equal


def _difference_tolerance(like: Tensor) -> float:
    return 1e3 * _step(like) ** 2


def _rounding(like: Tensor) -> float:
    return float(16 * like.shape[-1] * torch.finfo(like.dtype).eps)
