"""Small positive definite matrices, many at a time.

Attention needs thousands of 1 x 1 and 2 x 2 factorisations, for which LAPACK's calls cost more than
the arithmetic: up to three dimensions they are written out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_finite, forward_mode, has

_WRITTEN_OUT = 3


def check_positive_definite(matrix: Tensor, name: str) -> None:
    """Square, finite, symmetric, positive definite; checked where the values can be read."""
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"{name} must be (..., d, d), got {tuple(matrix.shape)}")
    if not matrix.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {matrix.dtype}")
    values = matrix.detach()
    check_finite(values, name)
    size = values.abs().amax((-1, -2), keepdim=True)
    slack = 64 * torch.finfo(matrix.dtype).eps * size
    apart = (values - values.mT).abs()
    if has(apart > slack):
        raise ValueError(
            f"{name} must be symmetric, its halves differ by {float(apart.max()):.3g}; "
            "use (A + A.mT) / 2"
        )
    wide = values.to(certificate_dtype(values.device))
    if has(~(torch.linalg.cholesky_ex(wide).info == 0)):
        smallest = float(torch.linalg.eigvalsh(wide).min())
        raise ValueError(
            f"{name} must be positive definite, its smallest eigenvalue is {smallest:.3g}; add a "
            "small multiple of the identity, or use match_moments, which has a floor"
        )


def symmetric(matrix: Tensor) -> Tensor:
    """Its symmetric part, so that derivatives are symmetric too."""
    return (matrix + matrix.mT) / 2


def cholesky(matrix: Tensor) -> Tensor:
    """Lower triangular L with L L' = matrix; NaN where it is not positive definite. (..., d, d)"""
    d = matrix.shape[-1]
    matrix = symmetric(matrix)
    if d > _WRITTEN_OUT:
        whole: Tensor = torch.linalg.cholesky_ex(matrix).L
        return whole
    rows: list[list[Tensor]] = []
    for i in range(d):
        row: list[Tensor] = []
        for j in range(i + 1):
            remainder = matrix[..., i, j]
            for k in range(j):
                remainder = remainder - row[k] * (row[k] if i == j else rows[j][k])
            row.append(remainder.sqrt() if i == j else remainder / rows[j][j])
        rows.append(row)
    zero = torch.zeros_like(rows[0][0])
    full = [torch.stack([*row, *[zero] * (d - len(row))], -1) for row in rows]
    return torch.stack(full, -2)


def half_log_det(factor: Tensor) -> Tensor:
    """log det of the factor: half that of the matrix. (...)"""
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def solve_lower(factor: Tensor, vector: Tensor) -> Tensor:
    """L^-1 vector, vector (..., d)."""
    d = factor.shape[-1]
    if d > _WRITTEN_OUT:
        shape = torch.broadcast_shapes(factor.shape[:-1], vector.shape)
        column = vector.expand(shape).unsqueeze(-1)
        full = factor.expand(*shape, d)
        solved: Tensor = torch.linalg.solve_triangular(full, column, upper=False)
        return solved.squeeze(-1)
    coordinates = _substitute(factor, list(vector.unbind(-1)))
    return torch.stack(torch.broadcast_tensors(*coordinates), -1)


def _substitute(factor: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """The coordinates of L^-1 v from those of v, each of the batch's shape."""
    solution: list[Tensor] = []
    for i, remainder in enumerate(parts):
        for k in range(i):
            remainder = remainder - factor[..., i, k] * solution[k]
        solution.append(remainder / factor[..., i, i])
    return solution


def multiply(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix vector, in plain operations. (..., d)"""
    return (matrix * vector.unsqueeze(-2)).sum(-1)


def solve(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix^-1 vector, for matrices of any kind. (..., d)"""
    column: Tensor = vector.unsqueeze(-1)
    if forward_mode():
        # torch.linalg.solve takes its factor for a constant: a tangent's tangent would be wrong.
        column = torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), column)
    else:  # whose backward pass is faster
        column = torch.linalg.solve(matrix, column)
    return column.squeeze(-1)


def inverse_of_factor(factor: Tensor) -> Tensor:
    """L^-1. (..., d, d)"""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    columns = [solve_lower(factor, eye[i]) for i in range(factor.shape[-1])]
    return torch.stack(columns, -1)


def squared_length(factor: Tensor, vector: Tensor) -> Tensor:
    """vector' (L L')^-1 vector. (...)"""
    if factor.shape[-1] > _WRITTEN_OUT:
        return solve_lower(factor, vector).square().sum(-1)
    first, *others = (part.square() for part in _substitute(factor, list(vector.unbind(-1))))
    return sum(others, start=first)


def normal_log_density(vector: Tensor, factor: Tensor) -> Tensor:
    """log N(vector; 0, L L'). (...)"""
    d = factor.shape[-1]
    constant = 0.5 * d * math.log(2 * math.pi)
    return -0.5 * squared_length(factor, vector) - half_log_det(factor) - constant


def smallest_eigenvalue(matrix: Tensor) -> Tensor:
    """Of symmetric matrices. (...)"""
    if matrix.shape[-1] == 1:
        return matrix[..., 0, 0]
    if matrix.shape[-1] == 2:
        first, second, mixed = matrix[..., 0, 0], matrix[..., 1, 1], matrix[..., 0, 1]
        half = torch.hypot((first - second) / 2, mixed)
        return (first + second) / 2 - half
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return values[..., 0]


def principal_axes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(variances, axes): matrix = axes diag(variances) axes', the largest variance first."""
    d = matrix.shape[-1]
    if d == 1:
        return matrix[..., 0], torch.ones_like(matrix)
    if d > 2:
        variances, axes = torch.linalg.eigh(matrix)
        return variances.flip(-1), axes.flip(-1)
    first, second, mixed = matrix[..., 0, 0], matrix[..., 1, 1], matrix[..., 0, 1]
    half = torch.hypot((first - second) / 2, mixed)
    large = (first + second) / 2 + half
    # The determinant over the large one: the difference would cancel in a thin ellipse.
    small = (first * second - mixed.square()) / large
    angle = 0.5 * torch.atan2(mixed, (first - second) / 2)
    cosine, sine = angle.cos(), angle.sin()
    axes = torch.stack([torch.stack([cosine, -sine], -1), torch.stack([sine, cosine], -1)], -2)
    return torch.stack([large, small], -1), axes
