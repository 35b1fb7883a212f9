"""Continuous attention as modules: scores over a grid become a density, features a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, Module

from fenchel._numerics import at_hand, check_whole, compute_dtype, has, transformed
from fenchel.continuous import (
    Density,
    GaussianBasis,
    Mixture,
    ParaboloidBasis,
    ValueFit,
    cell_centers,
)
from fenchel.continuous.values import average_features
from fenchel.nn.continuous_density import Member, even_where_empty
from fenchel.nn.modes import Modes, ModeSelection
from fenchel.nn.multihead import MultiheadAttention
from fenchel.nn.regularizer import as_module
from fenchel.regularizers import Regularizer, Shannon

AnyBasis = GaussianBasis | ParaboloidBasis


class Expectation(NamedTuple):
    """context (..., channels), in the features' dtype, and the density it is an expectation under.

    Where nothing is visible the context is zero and the density that of even weights.
    """

    context: Tensor
    density: Density | Mixture


class _ContinuousAttention(Module):
    """What one and two dimensions share."""

    regularizer: Module  # calling it gives the Regularizer in use
    modes: Modes | ModeSelection

    def __init__(
        self,
        regularizer: Regularizer | Module,
        functions: int | AnyBasis,
        ridge: float,
        padding: bool,
        modes: int | Modes | ModeSelection,
        dim: int,
    ) -> None:
        super().__init__()
        if not 0 <= ridge < math.inf:
            raise ValueError(f"ridge must be a finite number >= 0, got {ridge}")
        self.ridge, self.padding, self._dim = ridge, padding, dim
        self.modes = modes  # type: ignore[assignment]
        self.basis = _make_basis(functions, dim)
        if isinstance(functions, int):
            self._place(torch.get_default_device(), self.basis.centers.dtype)
        self.regularizer = regularizer  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "regularizer":  # a module, as in MultiheadAttention: what it holds trains
            value = as_module(value).to(self.basis.centers.device)
            Member(value())  # says at once what it cannot do
        if name == "modes" and not isinstance(value, Modes | ModeSelection):
            value = Modes(value)
        super().__setattr__(name, value)

    @property
    def basis(self) -> AnyBasis:
        """What the values are written in, on the module's device and in float32 or float64."""
        return self._basis

    @basis.setter
    def basis(self, basis: AnyBasis) -> None:
        if basis.centers.shape[1] != self._dim:
            raise ValueError(f"the basis must have d = {self._dim}, got {basis.centers.shape[1]}")
        self._original = basis  # neither a cast nor the meta device can spoil it
        self._place(basis.centers.device, basis.centers.dtype)

    def _place(self, device: torch.device, dtype: torch.dtype) -> None:
        if self._original.centers.is_meta and device.type != "meta":
            raise ValueError(
                "the basis is on the meta device and has no values; pass a number of "
                "functions, or set layer.basis to one that has some before moving the layer"
            )
        self._basis = self._original.to(device=device, dtype=compute_dtype(dtype))
        self._fits: dict[Any, ValueFit] = {}

    def _fit(self, shape: tuple[int, ...]) -> ValueFit:
        """The regression for a grid of that shape, kept where it can serve later calls."""
        key = (shape, self.ridge, self.padding)
        if key in self._fits:
            return self._fits[key]
        if 0 in shape:
            raise ValueError("features must have at least one position")
        with torch.inference_mode(False):
            positions = cell_centers(
                *shape, dtype=self.basis.centers.dtype, device=self.basis.centers.device
            )
            fit = ValueFit(positions, self.basis, self.ridge, self.padding)
        if not transformed() and not fit.operator.requires_grad:
            self._fits[key] = fit
        return fit

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The basis moves with the module, never below float32; regressions are computed again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        now = self.basis.centers
        target = fn(now)
        if target.device != now.device or compute_dtype(target.dtype) != now.dtype:
            self._place(target.device, target.dtype)
        return self

    def _attend(
        self, features: Tensor, scores: Any, mask: Tensor | None, shape: tuple[int, ...]
    ) -> Expectation:
        fit = self._fit(shape)
        values = fit(features)
        self._check_precision(features, "features")
        density, visible = scores, None
        if isinstance(scores, Tensor):
            visible = self._visible(scores, mask, shape)
            density = self._density(scores, visible, shape)
        elif not isinstance(scores, Density | Mixture):
            raise TypeError(f"scores must be a tensor or a density, got {type(scores).__name__}")
        elif mask is not None:
            raise ValueError("a mask goes with scores; a density says itself where it is zero")
        self._check_precision(density.mean, "density")
        _check_batches(features, density.batch_shape)
        if visible is None:
            return Expectation(values.expect(density), density)
        values = fit(torch.where(visible.unsqueeze(-1), features, features.new_zeros(())))
        context = values.expect(density)
        # a row that sees nothing gives zeros, as everywhere
        context = torch.where(visible.any(-1, keepdim=True), context, context.new_zeros(()))
        return Expectation(context, density)

    def density(
        self, scores: Tensor, shape: tuple[int, ...], mask: Tensor | None = None
    ) -> Density | Mixture:
        """From scores (..., L) over the cells of a grid: weights by softmax, then moments.

        mask: bool (..., L), True = attend; a score of -inf is masked too. A row that sees nothing
        gets the density of even weights over all positions.
        """
        return self._density(scores, self._visible(scores, mask, shape), shape)

    def _density(
        self, scores: Tensor, visible: Tensor | None, shape: tuple[int, ...]
    ) -> Density | Mixture:
        positions = self._fit(shape).positions
        weights = even_where_empty(scores, visible)
        member = Member(self.regularizer())
        if isinstance(self.modes, Modes) and self.modes.count == 1:
            return member.match(weights, positions)
        return member.mixture(self.modes.fit(weights, positions))

    def _visible(
        self, scores: Tensor, mask: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor | None:
        """Which positions each row may attend to; None where it is certain to be all of them."""
        cells = math.prod(shape)
        if scores.shape[-1:].numel() != cells or scores.dim() == 0:
            raise ValueError(
                f"scores must be (..., {cells}) for a grid of {shape}, got {tuple(scores.shape)}"
            )
        self._check_precision(scores, "scores")
        if mask is not None and (mask.dtype != torch.bool or mask.shape[-1:] != (cells,)):
            raise ValueError(
                f"mask must be bool (..., {cells}), True = attend, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        allowed = scores.detach() != -math.inf
        if mask is not None:
            return mask & allowed
        return allowed if not at_hand(scores) or has(~allowed) else None

    def _check_precision(self, tensor: Tensor, name: str) -> None:
        dtype = self.basis.centers.dtype
        if tensor.dtype == torch.float64 and dtype != torch.float64:
            raise TypeError(
                f"{name} in torch.float64 but the layer in {dtype}, which would be the precision "
                f"of the answer; call layer.double(), or pass {name} in float32"
            )

    def extra_repr(self) -> str:
        return f"functions={len(self.basis)}, modes={self.modes}"


class ContinuousAttention1d(_ContinuousAttention):
    """Attention over a sequence as a density over [0, 1].

    >>> layer = fl.nn.ContinuousAttention1d(fl.Tsallis(2.0), functions=32)
    >>> context, density = layer(torch.randn(8, 50, 64), torch.randn(8, 50))
    >>> context.shape
    torch.Size([8, 64])

    The weights are the softmax of the scores, whatever the regulariser: that chooses the family of
    the density which has their mean and covariance.

    regularizer: `Shannon()` a Gaussian, `Tsallis(2.0)` a paraboloid, other alphas as they are; or a
        module whose `forward()` returns one, such as `LearnedTsallis(1)`. What it learns is the
        layer's.
    functions: how many Gaussians the values are written in, or a basis.
    ridge, padding: of the regression (`fenchel.continuous.ValueFit`).
    modes: a number K (one, or weighted EM from K regions with the default iterations),
        `Modes(K, iterations)`, or `ModeSelection(...)`.
    """

    def __init__(
        self,
        regularizer: Regularizer | Module | None = None,
        functions: int | AnyBasis = 32,
        ridge: float = 0.01,
        padding: bool = True,
        modes: int | Modes | ModeSelection = 1,
    ) -> None:
        chosen = Shannon() if regularizer is None else regularizer
        super().__init__(chosen, functions, ridge, padding, modes, 1)

    def forward(
        self, features: Tensor, scores: Tensor | Density | Mixture, mask: Tensor | None = None
    ) -> Expectation:
        """features (..., L, channels); scores (..., L), or densities (...) -> context, density.

        mask: bool (..., L), True = attend; a score of -inf is masked too. Features at masked
        positions count as zero. Positions are those of the length that is passed, L.
        For several queries of each example: features[:, None], scores (batch, queries, L).
        """
        if features.dim() < 2:
            raise ValueError(f"features must be (..., L, channels), got {tuple(features.shape)}")
        return self._attend(features, scores, mask, (features.shape[-2],))


class ContinuousAttention2d(_ContinuousAttention):
    """Attention over an image as a density over [0, 1]^2, (row, column) from the upper left.

    >>> layer = fl.nn.ContinuousAttention2d((14, 14), fl.Tsallis(2.0), functions=100)
    >>> context, density = layer(torch.randn(8, 196, 64), torch.randn(8, 196))
    >>> density.support.level.shape
    torch.Size([8])

    grid: rows and columns of the features, which come row by row: `maps.flatten(2).mT` for maps
    (batch, channels, rows, columns). The other arguments as in `ContinuousAttention1d`, but
    `functions` must be a square.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        regularizer: Regularizer | Module | None = None,
        functions: int | AnyBasis = 100,
        ridge: float = 0.01,
        padding: bool = True,
        modes: int | Modes | ModeSelection = 1,
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
    ) -> Expectation:
        """features (..., L, channels); scores (..., L), or densities (...) -> context, density.

        L = rows * columns; mask and further axes as in `ContinuousAttention1d`.
        """
        return self._attend(features, scores, mask, self.grid)


class ContinuousTransformerLayer(Module):
    """A transformer layer whose self-attention sees N coefficients instead of L tokens.

    The tokens of a sequence are written in N functions, V(t) = B psi(t); attention mixes the rows
    of B, N^2 pairs however long the sequence is, and V is read again at the tokens. What N
    functions cannot express passes by on the residual path. (Future work of Farinhas' *Visual
    Attention with Sparse and Continuous Transformations*, 2021.)

    >>> layer = fl.nn.ContinuousTransformerLayer(64, 4, functions=32)
    >>> layer(torch.randn(2, 1000, 64)).shape
    torch.Size([2, 1000, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        functions: int | AnyBasis = 64,
        regularizer: Regularizer | Module | None = None,
        *,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = 4 * embed_dim if hidden is None else hidden
        if isinstance(functions, int):
            # A little narrower than apart: wider ones make large coefficients that cancel.
            check_whole(functions, "functions", 1)
            basis = _grid(functions, 0.5 / functions**2, 1)
            values = ContinuousAttention1d(functions=basis, padding=False)
            self.values = values.to(torch.get_default_device())
        else:
            self.values = ContinuousAttention1d(functions=functions, padding=False)
        chosen = Shannon() if regularizer is None else regularizer
        self.attention = MultiheadAttention(
            embed_dim, num_heads, dropout=dropout, batch_first=True, regularizer=chosen
        )
        self.before_attention, self.before_mlp = LayerNorm(embed_dim), LayerNorm(embed_dim)
        self.widen, self.narrow = Linear(embed_dim, hidden), Linear(hidden, embed_dim)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, L, embed_dim) -> the same.

        mask: bool (batch, L), True = attend. Masked tokens take no part in the regression and
        reach no other; what comes out at them means nothing. Positions are those of the padded
        length: the same tokens lie elsewhere in [0, 1] when they are padded further.
        """
        if tokens.dim() != 3:
            raise ValueError(f"tokens must be (batch, L, embed_dim), got {tuple(tokens.shape)}")
        fit = self.values._fit((tokens.shape[1],))
        operator = fit.operator
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
                raise ValueError(
                    f"mask must be bool {tuple(tokens.shape[:2])}, True = attend, "
                    f"got {mask.dtype} {tuple(mask.shape)}"
                )
            tokens = torch.where(mask.unsqueeze(-1), tokens, tokens.new_zeros(()))
            operator = fit.masked(mask)
        # In units of the functions' heights, coefficients are about as large as tokens.
        height = fit.basis(fit.basis.centers).diagonal()
        rows = average_features(operator.mT * height.unsqueeze(-1), self.before_attention(tokens))
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        read = average_features(fit.at_positions / height, mixed)  # (batch, L, embed_dim)
        tokens = tokens + self.dropout(read)
        inner = torch.nn.functional.gelu(self.widen(self.before_mlp(tokens)))
        output: Tensor = tokens + self.dropout(self.narrow(inner))
        return output


def _check_batches(features: Tensor, batch: torch.Size) -> None:
    """Fewer axes would be matched from the right, queries against examples."""
    lead = features.shape[:-2]
    if lead.numel() != 1 and len(lead) < len(batch):
        raise ValueError(
            f"features {tuple(features.shape)} have fewer axes in front than the scores or "
            f"densities, {tuple(batch)}; for several queries of each example pass features[:, None]"
        )


def _make_basis(functions: int | AnyBasis, dim: int) -> AnyBasis:
    """Given as a basis it is copied: the regression is that of what it is now.

    A number makes equal Gaussians as wide as they are apart: narrower ones leave holes
    (Farinhas, 2021, table 6.1).
    """
    if isinstance(functions, GaussianBasis | ParaboloidBasis):
        if functions.centers.requires_grad:
            return functions
        return functions.to(functions.centers.device, copy=True)
    check_whole(functions, "functions", 1)
    count = round(functions ** (1 / dim))
    if count**dim != functions:
        raise ValueError(f"functions must be a {['', '', 'square'][dim]} number, got {functions}")
    return _grid(count, 1 / count**2, dim)


def _grid(count: int, variance: float, dim: int) -> GaussianBasis:
    """With values, whatever the default device is: on meta there are none to move later."""
    with torch.device("cpu"):
        return GaussianBasis.grid(count, variance, dim)
