"""Continuous attention as modules: scores over a grid become a density, features a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, Module

from fenchel._numerics import check_whole, transformed
from fenchel.continuous import (
    Density,
    Gaussian,
    GaussianBasis,
    Mixture,
    Paraboloid,
    ParaboloidBasis,
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
    start: Start = field(default_factory=Regions)

    def __post_init__(self) -> None:
        check_whole(self.max_modes, "max_modes", 1)
        check_whole(self.iterations, "iterations", 0)


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
        _Member(regularizer)  # says at once what it cannot do
        if not isinstance(modes, Select):
            check_whole(modes, "modes", 1)
        self.modes = modes
        self.basis = _own_basis(functions, dim)
        if not 0 <= ridge < math.inf:
            raise ValueError(f"ridge must be a finite number >= 0, got {ridge}")
        self.ridge, self.padding = ridge, padding
        self._fits: dict[tuple[int, ...], ValueFit] = {}
        if self.basis.centers.shape[1] != dim:
            raise ValueError(f"the basis must have d = {dim}, got {self.basis.centers.shape[1]}")

    def _fit(self, shape: tuple[int, ...]) -> ValueFit:
        """The regression for a grid of that shape, made once where it can serve later calls."""
        if shape in self._fits:
            return self._fits[shape]
        if 0 in shape:
            raise ValueError("features must have at least one position")
        with torch.inference_mode(False):
            positions = cell_centers(*shape).to(self.basis.centers)
            fit = ValueFit(positions, self.basis, self.ridge, self.padding)
        if not transformed() and not fit.operator.requires_grad:
            self._fits[shape] = fit
        return fit

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
            _check_mask(mask, shape)
            features = torch.where(mask.unsqueeze(-1), features, features.new_zeros(()))
        density = what
        if isinstance(what, Tensor):
            density = self.density(what, shape, mask)
        elif not isinstance(what, Density | Mixture):
            raise TypeError(f"scores must be a tensor or a density, got {type(what).__name__}")
        elif mask is not None:
            raise ValueError("a mask goes with scores; a density has its own support")
        context = fit(features).expect(density)
        if mask is not None:  # a row that sees nothing gives zeros, as everywhere
            context = torch.where(mask.any(-1, keepdim=True), context, context.new_zeros(()))
        return Attended(context, density)

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
        if mask is not None:  # where nothing is seen, any density does: its context is dropped
            mask = mask | ~mask.any(-1, keepdim=True)
        weights = solve(scores, Shannon(), base=mask).weights
        member = _Member(self.regularizer)
        if self.modes == 1:
            return member.matched(weights, positions)
        if isinstance(self.modes, Select):
            choice = self.modes
            mixture = select_mixture(
                weights,
                positions,
                min(choice.max_modes, len(positions)),
                choice.penalty,
                iterations=choice.iterations,
                start=choice.start,
            )
        else:
            mixture = fit_mixture(weights, positions, self.modes, start=Regions())
        return member.mixture(mixture)

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
        if not isinstance(grid, tuple | list) or len(grid) != 2:
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
        if isinstance(functions, int):
            # A little narrower than apart: wider ones make large coefficients that cancel.
            check_whole(functions, "functions", 1)
            functions = GaussianBasis.grid(functions, 0.5 / functions**2, 1)
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
        # In units of the functions' heights, coefficients are about as large as tokens.
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
        alpha = self.alpha
        mean, covariance = gaussians.components.mean, gaussians.components.covariance_matrix
        if isinstance(alpha, Tensor):
            alpha = alpha.unsqueeze(-1) if alpha.dim() else alpha  # the axis of modes comes last
        elif alpha == 1.0:
            return gaussians
        elif alpha == 2.0:
            return Mixture(gaussians.mixing, Paraboloid.from_covariance(mean, covariance))
        made = TsallisGaussian.from_covariance(mean, covariance, alpha)
        return Mixture(gaussians.mixing, made)


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool or mask.shape[-1:].numel() != math.prod(shape):
        raise ValueError(
            f"mask must be bool (..., {math.prod(shape)}), True = attend, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def _own_basis(functions: int | Basis, dim: int) -> Basis:
    """Given as a basis it is copied: the regression is made for what it is now.

    A number makes equal Gaussians as wide as they are apart: narrower ones leave holes
    (CLAIMS F-Tab6.1).
    """
    if isinstance(functions, GaussianBasis | ParaboloidBasis):
        if functions.centers.requires_grad:
            return functions
        return functions.to(functions.centers.device, copy=True)
    check_whole(functions, "functions", 1)
    count = round(functions ** (1 / dim))
    if count**dim != functions:
        raise ValueError(f"functions must be a {['', '', 'square'][dim]} number, got {functions}")
    return GaussianBasis.grid(count, 1 / count**2, dim)
