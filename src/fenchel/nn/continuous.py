"""Continuous attention as modules: scores over a grid become a density, features a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, Module

from fenchel._numerics import check_whole
from fenchel.continuous import (
    Density,
    Gaussian,
    GaussianBasis,
    Mixture,
    Paraboloid,
    ParaboloidBasis,
    Random,
    Regions,
    TsallisGaussian,
    ValueFit,
    cell_centers,
    fit_mixture,
    match_moments,
    select_mixture,
)
from fenchel.continuous.em import Penalty, Start
from fenchel.nn.multihead import MultiheadAttention
from fenchel.regularizers import Regularizer, Shannon, Tsallis
from fenchel.solve import solve

Basis = GaussianBasis | ParaboloidBasis


class Attended(NamedTuple):
    """context (..., channels) and the density it is an expectation under."""

    context: Tensor
    density: Density | Mixture


@dataclass(frozen=True)
class Select:
    """As many modes for each example as pay for themselves (`continuous.select_mixture`)."""

    max_modes: int = 5
    penalty: float | Penalty = 10.0
    iterations: int = 20
    start: Start = field(default_factory=Random)


class _ContinuousAttention(Module):
    """What one and two dimensions share."""

    def __init__(
        self,
        regularizer: Regularizer,
        functions: int | Basis,
        ridge: float,
        padding: bool,
        modes: int | Select,
        dim: int,
    ) -> None:
        super().__init__()
        self.regularizer = regularizer
        self._member = _Member(regularizer)
        if not isinstance(modes, Select):
            check_whole(modes, "modes", 1)
        self.modes = modes
        self.basis = _grid_basis(functions, dim) if isinstance(functions, int) else functions
        self.ridge, self.padding = ridge, padding
        self._fits: dict[tuple[int, ...], ValueFit] = {}
        if self.basis.centers.shape[1] != dim:
            raise ValueError(f"the basis must have d = {dim}, got {self.basis.centers.shape[1]}")

    def _fit(self, shape: tuple[int, ...]) -> ValueFit:
        """The regression for a grid of that shape, made once."""
        if shape not in self._fits:
            positions = cell_centers(*shape).to(self.basis.centers)
            self._fits[shape] = ValueFit(positions, self.basis, self.ridge, self.padding)
        return self._fits[shape]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The basis moves with the module; regressions are made again where they are needed."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        target = fn(self.basis.centers)
        if target.device != self.basis.centers.device or target.dtype != self.basis.centers.dtype:
            self.basis = self.basis.to(target)
            self._fits = {}
        return self

    def _attend(
        self, features: Tensor, what: Any, mask: Tensor | None, shape: tuple[int, ...]
    ) -> Attended:
        fit = self._fit(shape)
        if mask is not None:
            features = torch.where(mask.unsqueeze(-1), features, features.new_zeros(()))
        density = what
        if isinstance(what, Tensor):
            density = self.density(what, shape, mask)
        elif mask is not None:
            raise ValueError("a mask goes with scores; a density has its own support")
        return Attended(fit(features).expect(density), density)

    def density(
        self, scores: Tensor, shape: tuple[int, ...], mask: Tensor | None = None
    ) -> Density | Mixture:
        """From scores (..., L) over the cells of a grid: weights by softmax, then moments."""
        if scores.shape[-1:].numel() != math.prod(shape):
            raise ValueError(
                f"scores must be (..., {math.prod(shape)}) for a grid of {shape}, "
                f"got {tuple(scores.shape)}"
            )
        positions = self._fit(shape).positions
        weights = solve(scores, Shannon(), base=mask).weights
        if self.modes == 1:
            return self._member.matched(weights, positions)
        if isinstance(self.modes, Select):
            choice = self.modes
            mixture = select_mixture(
                weights,
                positions,
                choice.max_modes,
                choice.penalty,
                iterations=choice.iterations,
                start=choice.start,
            )
        else:
            mixture = fit_mixture(weights, positions, self.modes, start=Regions())
        return self._member.mixture(mixture)

    def extra_repr(self) -> str:
        return f"{self.regularizer}, functions={len(self.basis)}, modes={self.modes}"


class ContinuousAttention1d(_ContinuousAttention):
    """Attention over a sequence as a density over [0, 1].

    >>> layer = fl.nn.ContinuousAttention1d(fl.Tsallis(2.0), functions=32)
    >>> context, density = layer(torch.randn(8, 50, 64), torch.randn(8, 50))
    >>> context.shape
    torch.Size([8, 64])

    regularizer: `Shannon()` a Gaussian, `Tsallis(2.0)` a paraboloid, other alphas as they are.
    functions: how many Gaussians the values are written in, or a basis.
    ridge, padding: of the regression (`fenchel.continuous.ValueFit`).
    modes: 1, K (weighted EM from K regions), or `Select(...)`.
    """

    def __init__(
        self,
        regularizer: Regularizer | None = None,
        functions: int | Basis = 32,
        ridge: float = 0.01,
        padding: bool = True,
        modes: int | Select = 1,
    ) -> None:
        chosen = Shannon() if regularizer is None else regularizer
        super().__init__(chosen, functions, ridge, padding, modes, 1)

    def forward(
        self, features: Tensor, scores: Tensor | Density | Mixture, mask: Tensor | None = None
    ) -> Attended:
        """features (..., L, channels); scores (..., L), or densities (...); mask True = attend."""
        if features.dim() < 2:
            raise ValueError(f"features must be (..., L, channels), got {tuple(features.shape)}")
        return self._attend(features, scores, mask, (features.shape[-2],))


class ContinuousAttention2d(_ContinuousAttention):
    """Attention over an image as a density over [0, 1]^2, (row, column) from the upper left.

    >>> layer = fl.nn.ContinuousAttention2d((14, 14), fl.Tsallis(2.0), functions=100)
    >>> context, density = layer(torch.randn(8, 196, 64), torch.randn(8, 196))
    >>> density.support.level.shape
    torch.Size([8])

    grid: rows and columns of the features; the other arguments as in `ContinuousAttention1d`, but
    `functions` must be a square.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        regularizer: Regularizer | None = None,
        functions: int | Basis = 100,
        ridge: float = 0.01,
        padding: bool = True,
        modes: int | Select = 1,
    ) -> None:
        if len(grid) != 2:
            raise ValueError(f"grid must be (rows, columns), got {grid}")
        for size in grid:
            check_whole(size, "grid", 1)
        self.grid = (int(grid[0]), int(grid[1]))
        chosen = Shannon() if regularizer is None else regularizer
        super().__init__(chosen, functions, ridge, padding, modes, 2)

    def forward(
        self, features: Tensor, scores: Tensor | Density | Mixture, mask: Tensor | None = None
    ) -> Attended:
        """features (..., rows * columns, channels); scores (..., rows * columns), or densities."""
        return self._attend(features, scores, mask, self.grid)


class ContinuousTransformerLayer(Module):
    """A transformer layer whose self-attention sees N coefficients instead of L tokens.

    The tokens of a sequence are written in N functions, V(t) = B psi(t); attention mixes the rows
    of B, N^2 pairs however long the sequence is, and V is read again at the tokens. What N
    functions cannot express passes by on the residual path. (Proposed as future work in paper 004.)

    >>> layer = fl.nn.ContinuousTransformerLayer(64, 4, functions=32)
    >>> layer(torch.randn(2, 1000, 64)).shape
    torch.Size([2, 1000, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        functions: int | Basis = 64,
        regularizer: Regularizer | None = None,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = 4 * embed_dim if hidden is None else hidden
        self.values = ContinuousAttention1d(functions=functions, padding=False)
        chosen = Shannon() if regularizer is None else regularizer
        self.attention = MultiheadAttention(
            embed_dim, num_heads, dropout=dropout, batch_first=True, regularizer=chosen
        )
        self.before_attention, self.before_mlp = LayerNorm(embed_dim), LayerNorm(embed_dim)
        self.widen, self.narrow = Linear(embed_dim, hidden), Linear(hidden, embed_dim)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, L, embed_dim) -> the same"""
        if tokens.dim() != 3:
            raise ValueError(f"tokens must be (batch, L, embed_dim), got {tuple(tokens.shape)}")
        fit = self.values._fit((tokens.shape[1],))
        # In units of the functions' heights, coefficients are as large as tokens.
        height = fit.basis(fit.basis.centers).diagonal().to(tokens)
        coefficients = fit(self.before_attention(tokens)).coefficients * height.unsqueeze(-1)
        mixed, _ = self.attention(coefficients, coefficients, coefficients, need_weights=False)
        read = (fit.at_positions.to(tokens) / height) @ mixed  # (batch, L, embed_dim)
        tokens = tokens + self.dropout(read)
        inner = torch.nn.functional.gelu(self.widen(self.before_mlp(tokens)))
        made: Tensor = tokens + self.dropout(self.narrow(inner))
        return made


class _Member:
    """The density that belongs to a regulariser of the discrete map."""

    def __init__(self, regularizer: Regularizer) -> None:
        if isinstance(regularizer, Shannon):
            self.alpha: float | Tensor = 1.0
        elif isinstance(regularizer, Tsallis):
            self.alpha = regularizer.alpha
        else:
            raise TypeError(
                f"continuous attention knows Shannon() and Tsallis(alpha), got {regularizer!r}"
            )
        if not (isinstance(regularizer.temperature, float | int) and regularizer.temperature == 1):
            raise ValueError("the temperature must be 1: divide the scores by it")

    def matched(self, weights: Tensor, positions: Tensor) -> Density:
        made: Density
        if isinstance(self.alpha, Tensor) or self.alpha not in (1.0, 2.0):
            made = match_moments(weights, positions, TsallisGaussian, alpha=self.alpha)
        else:
            made = match_moments(weights, positions, Gaussian if self.alpha == 1.0 else Paraboloid)
        return made

    def mixture(self, gaussians: Mixture) -> Mixture:
        """The same moments in every mode."""
        if self.alpha == 1.0:
            return gaussians
        mean, covariance = gaussians.components.mean, gaussians.components.covariance_matrix
        if self.alpha == 2.0:
            return Mixture(gaussians.mixing, Paraboloid.from_covariance(mean, covariance))
        made = TsallisGaussian.from_covariance(mean, covariance, self.alpha)
        return Mixture(gaussians.mixing, made)


def _grid_basis(functions: int, dim: int) -> GaussianBasis:
    """Equal Gaussians as wide as they are apart: narrower ones leave holes (CLAIMS F-Tab6.1)."""
    check_whole(functions, "functions", 1)
    count = round(functions ** (1 / dim))
    if count**dim != functions:
        raise ValueError(f"functions must be a {['', '', 'square'][dim]} number, got {functions}")
    return GaussianBasis.grid(count, 1 / count**2, dim)
