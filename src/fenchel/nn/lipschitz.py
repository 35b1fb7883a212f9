"""Layers that cannot change faster than a constant: they divide by the bound of their weights.

The constant is of X -> Y in the l2 norm of all coordinates of a sequence, X (n, d). It holds for
every value of the parameters, hence after every step of any optimiser. It is that of the layer in
exact arithmetic; rounding of the output comes on top, which in half precision is not small.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Identity, Module, Parameter, ReLU, Sigmoid, Tanh
from torch.nn.init import xavier_uniform_

from fenchel._numerics import check_tensor, check_whole, compute_dtype, full_precision, where
from fenchel.bounds.bound import Bound
from fenchel.bounds.modules import (
    BoundedMap,
    feed_forward_bound,
    layer_lipschitz,
    of_size_one,
    shrinking,
)
from fenchel.nn.extra_state import NumberedLayer, as_numbers, check_numbers
from fenchel.nn.lipschitz_heads import DotHeads, GaussianHeads, Heads
from fenchel.nn.preferences import check_positive_number

_SLOPE_ONE = (Identity, ReLU, Sigmoid, Tanh)
_RANGE = 1e30  # of constants, radii and temperatures, and its inverse


# ---- forms of attention


@dataclass(frozen=True)
class GaussianForm:
    """Scores -|z_i - z_j|^2 / temperature, z = W_h x for queries, keys and values: all inputs.

    temperature: that heads start with, and learn; 2 sqrt(head size) if None. The constant does not
        depend on it.
    """

    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            _read_size(self.temperature, "temperature")

    def heads(self, embed_dim: int, num_heads: int) -> Heads:
        """The module of all heads."""
        size = embed_dim // num_heads
        start = 2 * math.sqrt(size) if self.temperature is None else self.temperature
        return GaussianHeads(embed_dim, num_heads, start)


@dataclass(frozen=True)
class DotForm:
    """Scores <Q_h x_i, K_h x_j> / sqrt(head size), of tokens that are first projected onto the ball
    of this radius: dot products on all of R^d have no constant."""

    radius: float

    def __post_init__(self) -> None:
        _read_size(self.radius, "radius")

    def heads(self, embed_dim: int, num_heads: int) -> Heads:
        """The module of all heads."""
        return DotHeads(embed_dim, num_heads, float(self.radius))


# ---- layers


_GAUSSIAN = GaussianForm()


class LipschitzAttention(NumberedLayer):
    """Self-attention X -> Y with |Y - Y'| <= constant |X - X'| for all sequences of n tokens.

    >>> layer = LipschitzAttention(16, 4, constant=0.9)
    >>> layer(torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])
    >>> layer.bound(10).value <= 0.9
    True

    Heads are joined and multiplied by an output matrix, which holds the values of the Gaussian form
    too. With weights whose bound exceeds the constant the output is divided by the
    excess; with a smaller bound the layer is what its weights say: training may use less.

    The bound grows with n, for the Gaussian form a little faster than sqrt(n): the constant holds
    for whatever n the layer is called with, and longer sequences may be divided by more.

    embed_dim, num_heads: width of the model, and into how many heads it is cut.
    constant: > 0.
    form: `GaussianForm()`, or `DotForm(radius)`.
    bias: whether the output has one; it changes no constant.

    It takes one tensor and returns one, unlike torch.nn.MultiheadAttention: queries, keys and
    values are all of x. Inputs are in the dtype of the weights, or autocast is on. The state dict
    holds the constant, the heads and the radius too, and loads into a layer with the same only.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        constant: float = 1.0,
        *,
        form: GaussianForm | DotForm = _GAUSSIAN,
        bias: bool = True,
    ) -> None:
        super().__init__()
        _check_attention(embed_dim, num_heads, form)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.constant, self.form = _read_size(constant, "constant"), form
        self.heads = form.heads(embed_dim, num_heads)
        self.output = Parameter(torch.empty(embed_dim, embed_dim))
        self.bias = Parameter(torch.zeros(embed_dim)) if bias else None
        xavier_uniform_(self.output)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, *others: object) -> Tensor:
        """(batch, n, embed_dim) -> the same shape.

        key_padding_mask: bool (batch, n), True = **ignored**: such tokens give no keys and their
            outputs are zero, so a padded sequence gives what it gives alone. The constant holds
            with any mask: it is that of the number of tokens that are left.
        others: refused.
        """
        _check_alone(key_padding_mask, others)
        check_input(x, self.embed_dim)
        check_dtype(x, self.output)
        check_mask(key_padding_mask, x)
        dtype = working_dtype(x, self.output)
        with full_precision(x):
            output = self.bounded_map(x.shape[1], key_padding_mask, dtype)(x.to(dtype))
        return output.to(x.dtype)

    def bounded_map(self, tokens: int, ignored: Tensor | None, dtype: torch.dtype) -> BoundedMap:
        """The layer with its present weights, whose norms are computed once: to call many times.

        dtype: float32 or float64, of what it takes; ignored: as key_padding_mask.
        """
        counts, which = [max(1, tokens)], None
        if ignored is not None:
            some, which = (~ignored).sum(1).clamp_min(1).unique(return_inverse=True)
            counts = some.tolist() or counts
        scale, constant = self._scale(counts, dtype)
        scale = scale if which is None else scale[which]
        scale = scale.reshape(-1, 1, 1)  # (batch or 1, 1, 1)
        return BoundedMap(lambda x: self._map(x, ignored, scale), constant)

    def bound(self, tokens: int) -> Bound:
        """Of the layer with its present weights, on sequences of so many tokens.

        Its value is the constant, or less where the weights need less.
        """
        check_whole(tokens, "tokens", 1)
        with torch.no_grad():
            scale, constant = self._scale([tokens], compute_dtype(self.output.dtype))
        scale = scale.to("cpu", torch.float64)
        frozen = copy.deepcopy(self).to("cpu", torch.float64).requires_grad_(False)
        layer = BoundedMap(lambda x: frozen._map(x, None, scale), constant)
        unit, radius = self.heads.search_region()
        shape = (tokens, self.embed_dim)
        conditions = (f"{self.form}, these weights",)
        return layer_lipschitz(
            "LipschitzAttention", layer, shape, unit=unit, conditions=conditions, radius=radius
        )

    def extra_repr(self) -> str:
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        return f"{sizes}, constant={self.constant:g}, form={self.form}"

    def get_extra_state(self) -> Tensor:
        """What the weights do not say, as numbers: a tensor, so that any format can hold it."""
        radius = self.form.radius if isinstance(self.form, DotForm) else math.inf
        return as_numbers(self.constant, self.num_heads, radius)

    def set_extra_state(self, state: object) -> None:
        check_numbers(self, state, ("constant", "num_heads", "radius (inf for GaussianForm)"))

    def _scale(self, counts: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, float]:
        """(factor for each count in float64, the largest constant among them)"""
        bounds = self.heads.bound(self.output.to(dtype), counts)
        return _scale(bounds, self.constant, dtype)

    def _map(self, x: Tensor, ignored: Tensor | None, scale: Tensor) -> Tensor:
        """(batch, n, d) -> (batch, n, d), in the dtype of x."""
        allowed = None
        if ignored is not None:
            x = where(~ignored.unsqueeze(-1), x, 0.0)  # where anything may stand
            itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            allowed = (~ignored[:, None, None]) | itself  # (batch, 1, n, n): no row is empty
        heads, size = self.heads(x, allowed)
        matrix, unit = of_size_one(self.output)
        y: Tensor = heads @ matrix.to(x.dtype).mT * (scale * unit * size).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y if ignored is None else where(~ignored.unsqueeze(-1), y, 0.0)


class LipschitzFeedForward(NumberedLayer):
    """W_2 activation(W_1 x + b_1) + b_2 token by token, with |y - y'| <= constant |x - x'|.

    >>> layer = LipschitzFeedForward(16, constant=0.5)
    >>> layer(torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])

    embed_dim, hidden: widths; hidden is 4 embed_dim if None.
    constant: > 0; the output is divided by what |W_2| |W_1| has in excess of it.
    activation: `Tanh()` if None, `ReLU()`, `Sigmoid()` or `Identity()`: no slope above one.

    The state dict holds constant and activation too, and loads into a layer with the same only.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden: int | None = None,
        constant: float = 1.0,
        *,
        activation: Module | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * embed_dim if hidden is None else hidden
        check_whole(embed_dim, "embed_dim", 1)
        check_whole(hidden, "hidden", 1)
        self.embed_dim, self.constant = embed_dim, _read_size(constant, "constant")
        self.activation = Tanh() if activation is None else activation
        if not isinstance(self.activation, _SLOPE_ONE):
            raise TypeError(
                "activation must be Tanh(), ReLU(), Sigmoid() or Identity(), whose slopes are at "
                f"most one, got {self.activation}; GELU's and SiLU's reach 1.13 and 1.10"
            )
        self.inner = Parameter(torch.empty(hidden, embed_dim))
        self.outer = Parameter(torch.empty(embed_dim, hidden))
        self.inner_bias = Parameter(torch.zeros(hidden))
        self.outer_bias = Parameter(torch.zeros(embed_dim))
        xavier_uniform_(self.inner)
        xavier_uniform_(self.outer)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, embed_dim) -> the same shape."""
        check_input(x, self.embed_dim)
        check_dtype(x, self.inner)
        dtype = working_dtype(x, self.inner)
        with full_precision(x):
            output = self.bounded_map(dtype)(x.to(dtype))
        return output.to(x.dtype)

    def bounded_map(self, dtype: torch.dtype) -> BoundedMap:
        """The layer with its present weights, whose norms are computed once: to call many times."""
        scale, constant = self._scale(dtype)
        return BoundedMap(lambda x: self._map(x, scale), constant)

    def bound(self, tokens: int) -> Bound:
        """Of the layer with its present weights, on sequences of so many tokens."""
        check_whole(tokens, "tokens", 1)
        with torch.no_grad():
            scale, constant = self._scale(compute_dtype(self.inner.dtype))
        scale = scale.to("cpu", torch.float64)
        frozen = copy.deepcopy(self).to("cpu", torch.float64).requires_grad_(False)
        layer = BoundedMap(lambda x: frozen._map(x, scale), constant)
        shape, conditions = (tokens, self.embed_dim), ("these weights",)
        return layer_lipschitz(
            "LipschitzFeedForward", layer, shape, unit=1.0, conditions=conditions
        )

    def extra_repr(self) -> str:
        hidden = len(self.inner)
        return f"embed_dim={self.embed_dim}, hidden={hidden}, constant={self.constant:g}"

    def get_extra_state(self) -> Tensor:
        """What the weights do not say, as numbers."""
        number = [isinstance(self.activation, kind) for kind in _SLOPE_ONE].index(True)
        return as_numbers(self.constant, number)

    def set_extra_state(self, state: object) -> None:
        names = ", ".join(f"{number} {kind.__name__}" for number, kind in enumerate(_SLOPE_ONE))
        check_numbers(self, state, ("constant", f"activation ({names})"))

    def _scale(self, dtype: torch.dtype) -> tuple[Tensor, float]:
        bound = feed_forward_bound(self.inner, self.outer)
        return _scale(bound, self.constant, dtype)

    def _map(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.activation(x @ self.inner.to(x.dtype).mT + self.inner_bias.to(x.dtype))
        outer, unit = of_size_one(self.outer)
        y: Tensor = hidden @ outer.to(x.dtype).mT * (scale * unit).to(x.dtype)
        return y + self.outer_bias.to(x.dtype)


def _scale(bounds: Tensor, constant: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(factors, the largest constant), of a layer that multiplies by the factors in that dtype."""
    largest = float(bounds.detach().max())
    if not math.isfinite(largest):
        raise ValueError(
            f"the norms of the layer's weights overflow float64, their bound is {largest}; were "
            "they to be so large? Lower the learning rate, or scale them"
        )
    scale = shrinking(bounds, constant) * (1 - 64 * torch.finfo(dtype).eps)
    return scale, min(constant, largest)


def working_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Of both, float32 at least."""
    return compute_dtype(torch.promote_types(x.dtype, weight.dtype))


# ---- checks


def check_dtype(x: Tensor, weight: Tensor, name: str = "x") -> None:
    """As torch's own layers do: one dtype, unless autocast chooses."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name} is {x.dtype} and the layer's weights are {weight.dtype}; bring both to one "
            f"dtype, with layer.to({x.dtype}) or {name}.to({weight.dtype})"
        )


def _check_alone(mask: object, others: tuple[object, ...]) -> None:
    """Refuse (query, key, value)."""
    if others or (isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 3):
        raise TypeError(
            "LipschitzAttention is self-attention and takes one tensor: use layer(x), or layer(x, "
            f"key_padding_mask), instead of {2 + len(others)} tensors such as query, key and value"
        )


def _read_size(value: object, name: str) -> float:
    check_positive_number(value, name)
    if not 1 / _RANGE <= value <= _RANGE:  # type: ignore[operator]
        raise ValueError(
            f"{name} must be within {1 / _RANGE:g} and {_RANGE:g}, where float32 has room for what "
            f"is computed from it, got {value!r}; scale the tokens instead"
        )
    return float(value)  # type: ignore[arg-type]


def _check_attention(embed_dim: int, num_heads: int, form: object) -> None:
    check_whole(embed_dim, "embed_dim", 1)
    check_whole(num_heads, "num_heads", 1)
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}"
        )
    if not isinstance(form, GaussianForm | DotForm):
        raise TypeError(f"form must be GaussianForm() or DotForm(radius), got {form!r}")


def check_input(x: object, width: int, name: str = "x") -> None:
    check_tensor(x, name)
    assert isinstance(x, Tensor)
    if x.dim() != 3 or x.shape[-1] != width or not x.is_floating_point():
        raise ValueError(
            f"{name} must be floating point (batch, n, {width}), got {x.dtype} of shape "
            f"{tuple(x.shape)}; for one sequence use unsqueeze(0)"
        )


def check_mask(mask: object, x: Tensor) -> None:
    if mask is None:
        return
    check_tensor(mask, "key_padding_mask")
    assert isinstance(mask, Tensor)
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(
            f"key_padding_mask must be bool, True = ignored, of shape (batch, n) = "
            f"{tuple(x.shape[:2])}, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
