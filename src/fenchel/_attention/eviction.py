"""Keys that no query of a declared region can ever attend to: `KeyValueCache.evictable`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._numerics import check_tensor
from fenchel.regularizers.contract import Regularizer, resolve_regularizer
from fenchel.regularizers.tsallis import Tsallis


@dataclass(frozen=True, eq=False)
class QueryBall:
    """All queries at most `radius` (Euclidean) from `centre`.

    centre: (d,) or (head, d); radius: a number or (head,).
    """

    centre: Tensor
    radius: float | Tensor

    def __post_init__(self) -> None:
        radius = torch.as_tensor(self.radius)
        if not bool(((radius >= 0) & (radius < torch.inf)).all()):
            raise ValueError(f"radius must be at least 0 and finite, got {self.radius}")
        _check_finite(self.centre, "centre")

    def least(self, direction: Tensor) -> Tensor:
        """The smallest <q, direction> of any query here; direction: (head, ..., d)."""
        centre, radius = _per_head(self.centre, self.radius, direction)
        least: Tensor = (centre * direction).sum(-1) - radius * direction.norm(dim=-1)
        return least


@dataclass(frozen=True, eq=False)
class QueryBox:
    """All queries whose components lie between `low` and `high`: (d,) or (head, d)."""

    low: Tensor
    high: Tensor

    def __post_init__(self) -> None:
        _check_finite(self.low, "low")
        _check_finite(self.high, "high")
        if not bool((self.low <= self.high).all()):
            raise ValueError("low must be at most high, in every component")

    @property
    def centre(self) -> Tensor:
        return (self.low + self.high) / 2

    def least(self, direction: Tensor) -> Tensor:
        """The smallest <q, direction> of any query here; direction: (head, ..., d)."""
        centre, _ = _per_head(self.centre, 0.0, direction)
        half, _ = _per_head((self.high - self.low) / 2, 0.0, direction)
        return (centre * direction - half * direction.abs()).sum(-1)


def _check_finite(part: Tensor, name: str) -> None:
    check_tensor(part, name)
    if not bool(part.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity")


def _per_head(centre: Tensor, radius: float | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, with as many axes as they need to broadcast: (head, ..., d), (head, ...)."""
    heads, between = like.shape[0], like.ndim - 2
    wide = centre.double().expand(heads, like.shape[-1])
    number = torch.as_tensor(radius, dtype=torch.float64).expand(heads)
    return wide.reshape(heads, *[1] * between, -1), number.reshape(heads, *[1] * between)


_RIVALS = 32  # keys that each key is compared with


def evictable(
    key: Tensor,
    region: QueryBall | QueryBox,
    regularizer: Regularizer | Module,
    scale: float | None,
) -> Tensor:
    """bool (kv_head, key): see `KeyValueCache.evictable`. key: (kv_head, key, d).

    Key j has no weight where some other key i scores higher by the room of one key, which is
    temperature / (alpha - 1): the threshold lies at most that far below the largest score. Over the
    region, <q, k_i - k_j> is smallest at a point that is known. The rivals i are the keys that
    score highest at the centre.
    """
    _check(region, key)
    kv_heads, count, d = key.shape
    heads = region.centre.shape[0] if region.centre.ndim > 1 else kv_heads
    if heads % kv_heads:
        raise ValueError(f"the region has {heads} heads, which must be a multiple of {kv_heads}")
    factor = d**-0.5 if scale is None else scale
    if count == 0 or factor == 0:  # with which all keys score the same
        return torch.zeros(kv_heads, count, dtype=torch.bool)
    wide = key.double().repeat_interleave(heads // kv_heads, 0)  # (head, key, d)
    room = _rooms(regularizer, heads) / abs(factor)  # (head, 1)
    sign = 1.0 if factor > 0 else -1.0
    centre = region.centre.double().expand(heads, d)
    at_centre = sign * (wide @ centre.unsqueeze(-1)).squeeze(-1).nan_to_num(-torch.inf)
    rivals = at_centre.topk(min(_RIVALS, count), -1).indices  # (head, rival)
    never = torch.zeros(heads, count, dtype=torch.bool)
    slack, rounding = 1 + 1e-6, (d + 16) * 2.0**-23  # of scores in float32, as in shadow.h
    for rival in rivals.unbind(-1):
        ahead = wide[torch.arange(heads), rival].unsqueeze(1) - wide
        never |= region.least(sign * ahead) > room * slack + rounding * _size(wide, region)
    return never.reshape(kv_heads, -1, count).all(1)


def _size(key: Tensor, region: QueryBall | QueryBox) -> Tensor:
    """The largest |<q, k>| that rounding has to do with, (head, 1)."""
    ones = torch.ones_like(key[:, :1])
    if isinstance(region, QueryBall):
        centre, radius = _per_head(region.centre, region.radius, ones)
        longest = centre.norm(dim=-1) + radius
    else:
        low, _ = _per_head(region.low, 0.0, ones)
        high, _ = _per_head(region.high, 0.0, ones)
        longest = torch.maximum(low.abs(), high.abs()).norm(dim=-1)
    size: Tensor = longest * key.norm(dim=-1).amax(-1, keepdim=True)
    return size


def check_masks(tokens: Sequence[Tensor], lengths: tuple[int, ...]) -> None:
    """One mask per sequence, one truth value per token."""
    if len(tokens) != len(lengths):
        raise ValueError(f"keep needs one mask per sequence, got {len(tokens)}")
    for b, (mask, length) in enumerate(zip(tokens, lengths, strict=True)):
        check_tensor(mask, "tokens")
        if mask.dtype != torch.bool or mask.shape != (length,):
            raise ValueError(
                f"the mask of sequence {b} must be bool of shape ({length},), got {mask.dtype} of "
                f"shape {tuple(mask.shape)}"
            )


def _rooms(regularizer: Regularizer | Module, heads: int) -> Tensor:
    """temperature / (alpha - 1) of each head, (head, 1); one of each, or one per head."""
    regularizer = resolve_regularizer(regularizer)
    if not isinstance(regularizer, Tsallis):
        raise TypeError(
            f"evictable needs Tsallis with alpha > 1, got {regularizer}; under softmax every key "
            "has weight"
        )
    numbers = []
    for name in ("alpha", "temperature"):
        number = torch.as_tensor(getattr(regularizer, name)).detach().double().flatten()
        if number.numel() not in (1, heads):
            raise ValueError(
                f"{name} must be one number or one per head, {heads}, got {number.numel()}"
            )
        numbers.append(number.expand(heads).unsqueeze(-1))
    if bool((numbers[0] <= 1).any()):
        raise ValueError(
            f"every key has a weight under softmax; evictable needs alpha > 1, got {regularizer}"
        )
    return numbers[1] / (numbers[0] - 1)


def _check(region: object, key: Tensor) -> None:
    if not isinstance(region, QueryBall | QueryBox):
        raise TypeError(f"region must be a QueryBall or a QueryBox, got {type(region).__name__}")
    for name in ("centre", "low", "high"):
        part = getattr(region, name, None)
        if part is not None:
            check_tensor(part, name)
            if part.shape[-1] != key.shape[-1]:
                raise ValueError(
                    f"{name} must have {key.shape[-1]} components, got shape {tuple(part.shape)}"
                )
