"""Base measures over keys, and priors that make them tile by tile.

A base measure `nu` says how much room each key has before any score is seen; it is used as
given, never normalised. Zero mass is a mask. A *prior* makes the logarithm of a base for any
block of query and key positions, so that a long one is never stored whole and never underflows:

    scores = torch.randn(8, 128, 128)                              # (head, query, key)
    fl.solve(scores, fl.Tsallis(1.5), base=fl.priors.Causal() * fl.priors.ALiBi(heads=8))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, check_tensor, check_whole, expands_to, has, where


@dataclass(frozen=True, eq=False)
class Base:
    """A measure resolved for one tensor of scores: nu = mass * exp(log_mass) where allowed.

    `allowed` marks the keys that can carry weight, in the shape of the scores. `mass` is kept
    as given (not as a logarithm) so that the derivative at zero mass is the one-sided one.
    """

    allowed: Tensor
    mass: Tensor | None = None
    log_mass: Tensor | None = None
    whole: bool = False  # known to allow every key of every row: nothing needs masking

    @classmethod
    def everything(cls, like: Tensor) -> Base:
        """Mass one on every key of scores like these."""
        return cls(
            torch.ones((), dtype=torch.bool, device=like.device).expand(like.shape), whole=True
        )

    def to(self, dtype: torch.dtype) -> Base:
        """The same measure in another precision."""
        mass = None if self.mass is None else self.mass.to(dtype)
        log_mass = None if self.log_mass is None else self.log_mass.to(dtype)
        return Base(self.allowed, mass, log_mass, self.whole)

    def detach(self) -> Base:
        """The same measure without its derivatives."""
        mass = None if self.mass is None else self.mass.detach()
        log_mass = None if self.log_mass is None else self.log_mass.detach()
        return Base(self.allowed, mass, log_mass, self.whole)

    def keep(self, values: Tensor, other: float = 0.0) -> Tensor:
        """`values` on allowed keys, `other` elsewhere."""
        return values if self.whole else where(self.allowed, values, other)

    @property
    def alive(self) -> Tensor:
        """Rows that allow any key at all. (..., 1)"""
        return self.allowed[..., :1] if self.whole else self.allowed.any(-1, keepdim=True)

    @property
    def plain(self) -> bool:
        """Every allowed key has mass one."""
        return self.mass is None and self.log_mass is None

    def log(self) -> Tensor | None:
        """log nu, -inf where nothing is allowed; None for a plain mask."""
        if self.plain:
            return None
        if self.mass is not None:
            logarithm = where(self.allowed, self.mass, 1.0).log()
        else:
            assert self.log_mass is not None
            logarithm = self.log_mass
        return where(self.allowed, logarithm, -math.inf)

    def safe_log(self) -> Tensor | float:
        """log nu where allowed and 0 elsewhere: finite, so that derivatives are too."""
        logarithm = self.log()
        return 0.0 if logarithm is None else where(self.allowed, logarithm, 0.0)


class Prior(ABC):
    """Makes a base measure from positions. Multiply two priors to apply both."""

    @property
    def is_mask(self) -> bool:
        """Every log mass is 0 or -inf: the prior hides keys and does nothing else."""
        return False

    @abstractmethod
    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Log mass of the keys at `columns` for the queries at `rows`.

        Shape (..., len(rows), len(columns)); leading axes broadcast with those of the scores.
        """

    def check(self, shape: torch.Size) -> None:  # noqa: B027  most priors fit any shape
        """Raise if this prior does not fit scores of this shape."""

    def shifted(self, offset: int) -> Prior:
        """The same prior for queries that start at position `offset`: with keys cached before
        them, offset = keys - queries."""
        check_whole(offset, "offset", 0)
        return Shifted(self, offset)

    def __mul__(self, other: Prior) -> Prior:
        if not isinstance(other, Prior):
            return NotImplemented
        return Product(self, other)


@dataclass(frozen=True)
class Product(Prior):
    """Both priors at once: masses multiply. Written `first * second`."""

    first: Prior
    second: Prior

    @property
    def is_mask(self) -> bool:
        return self.first.is_mask and self.second.is_mask

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.first.log_mass(rows, columns) + self.second.log_mass(rows, columns)

    def check(self, shape: torch.Size) -> None:
        self.first.check(shape)
        self.second.check(shape)


@dataclass(frozen=True)
class Shifted(Prior):
    """A prior whose queries start later. Written `prior.shifted(offset)`."""

    prior: Prior
    offset: int

    @property
    def is_mask(self) -> bool:
        return self.prior.is_mask

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.prior.log_mass(rows + self.offset, columns)

    def check(self, shape: torch.Size) -> None:
        self.prior.check(shape)


def _mask(keep: Tensor) -> Tensor:
    return torch.zeros((), device=keep.device).masked_fill(~keep, -math.inf)


def _distance(rows: Tensor, columns: Tensor) -> Tensor:
    """key position minus query position, (rows, columns)."""
    return columns[None, :] - rows[:, None]


@dataclass(frozen=True)
class Causal(Prior):
    """Query i sees keys 0 .. i. With cached keys: `Causal().shifted(keys - queries)`."""

    @property
    def is_mask(self) -> bool:
        return True

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return _mask(_distance(rows, columns) <= 0)


@dataclass(frozen=True)
class SlidingWindow(Prior):
    """Query i sees keys at most `width` positions away, on both sides; 0: only itself."""

    width: int

    def __post_init__(self) -> None:
        check_whole(self.width, "width", 0)

    @property
    def is_mask(self) -> bool:
        return True

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return _mask(_distance(rows, columns).abs() <= self.width)


@dataclass(frozen=True)
class KeyPadding(Prior):
    """Only the first `lengths` keys are real.

    `lengths` has the leading axes of the scores, without query and key: for scores
    (batch, head, query, key) pass `lengths[:, None]`, shape (batch, 1).
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        check_tensor(self.lengths, "lengths")
        if self.lengths.is_floating_point() or self.lengths.dtype == torch.bool:
            raise TypeError(
                f"lengths must be integers, got {self.lengths.dtype}; "
                "for a mask of real keys pass it as base= directly (True = attend)"
            )

    @property
    def is_mask(self) -> bool:
        return True

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        keep = columns < self.lengths[..., None, None]  # (..., 1, columns)
        return _mask(keep.expand(*keep.shape[:-2], len(rows), -1))

    def check(self, shape: torch.Size) -> None:
        # Broadcasting alone would take a batch of lengths for heads where both are as many.
        if self.lengths.ndim not in (0, len(shape) - 2):
            raise ValueError(
                f"lengths of shape {tuple(self.lengths.shape)} must have one axis for each leading "
                f"axis of the scores {tuple(shape)}, without query and key; for (batch, head, "
                "query, key) pass lengths[:, None]"
            )


@dataclass(frozen=True)
class ALiBi(Prior):
    """Mass exp(-slope |distance|), one slope a head (Press, Smith and Lewis, 2022).

    `slopes` defaults to their geometric sequence; pass a tensor (a `Parameter` trains).
    Log mass has shape (head, query, key).
    """

    heads: int
    slopes: Tensor | None = None

    def __post_init__(self) -> None:
        check_whole(self.heads, "heads", 1)
        if self.slopes is not None:
            check_tensor(self.slopes, "slopes")
        if self.slopes is not None and self.slopes.shape != (self.heads,):
            raise ValueError(
                f"slopes must have shape ({self.heads},), one per head, "
                f"got {tuple(self.slopes.shape)}"
            )

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        slopes = self.slopes
        if slopes is None:
            exact = certificate_dtype(rows.device)
            slopes = torch.tensor(alibi_slopes(self.heads), dtype=exact, device=rows.device)
        return -slopes[:, None, None] * _distance(rows, columns).abs()


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / heads); where heads is no power of two, every other slope of twice as many."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)]
    return slopes + between


@dataclass(frozen=True)
class RelativeBuckets(Prior):
    """T5's relative position bias: log mass = table[bucket(distance), head].

    `table` has shape (buckets, heads) and trains if it is a `Parameter`. The first half of the
    buckets of a side are exact distances, the rest grow logarithmically up to `max_distance`
    (Raffel et al., 2020). Log mass has shape (head, query, key).
    """

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        check_tensor(self.table, "table")
        if self.table.ndim != 2:
            raise ValueError(
                f"table must have shape (buckets, heads), got {tuple(self.table.shape)}"
            )
        per_side = self.table.shape[0] // (2 if self.bidirectional else 1)
        if per_side < 2 or self.max_distance <= per_side // 2:
            raise ValueError(
                f"{self.table.shape[0]} buckets do not fit max_distance={self.max_distance}; "
                "need at least 2 buckets a side, and max_distance above half of them"
            )

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.table[self.buckets(_distance(rows, columns))].movedim(-1, 0)

    def buckets(self, distance: Tensor) -> Tensor:
        """Bucket of each key-minus-query distance."""
        per_side = self.table.shape[0]
        first = torch.zeros_like(distance)
        if self.bidirectional:
            per_side //= 2
            first = torch.where(distance > 0, per_side, 0)
            far = distance.abs()
        else:
            far = (-distance).clamp(min=0)
        exact = per_side // 2
        ratio = (far.clamp(min=exact) / exact).log() / math.log(self.max_distance / exact)
        coarse = (exact + (ratio * (per_side - exact)).long()).clamp(max=per_side - 1)
        return first + torch.where(far < exact, far, coarse)


@dataclass(frozen=True)
class Preference(Prior):
    """A learned preference over keys: log mass = logits[..., key], the same for every query.

    `logits` has shape (..., keys); leading axes are those of the scores without the query.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        check_tensor(self.logits, "logits")
        if not self.logits.is_floating_point() or self.logits.ndim == 0:
            raise TypeError(
                f"logits must be real, one per key on the last axis, got {self.logits.dtype} of "
                f"shape {tuple(self.logits.shape)}; a mask is passed as base= directly"
            )

    def check(self, shape: torch.Size) -> None:
        if self.logits.shape[-1] != shape[-1]:
            raise ValueError(
                f"Preference has {self.logits.shape[-1]} logits, the scores have {shape[-1]} keys"
            )
        if self.logits.ndim not in (1, len(shape) - 1):  # as for KeyPadding
            raise ValueError(
                f"logits of shape {tuple(self.logits.shape)} must be one per key, or have every "
                f"leading axis of the scores {tuple(shape)} but the query; for (batch, head, "
                "query, key) pass logits[:, None]"
            )

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        picked = self.logits[..., columns]
        return picked[..., None, :].expand(*picked.shape[:-1], len(rows), -1)


def resolve(base: Tensor | Prior | None, shape: torch.Size, like: Tensor) -> Base:
    """The measure over keys (last axis) for scores of `shape`; dtype and device of `like`."""
    if base is None:
        return Base(torch.ones((), dtype=torch.bool, device=like.device).expand(shape))
    check_base(base)
    if isinstance(base, Prior):
        return _from_prior(base, shape, like)
    return _from_tensor(base, shape, like)


def check_base(base: object) -> None:
    """Refuse what is neither a measure nor makes one."""
    if base is None or isinstance(base, Prior):
        return
    if not isinstance(base, Tensor):
        remedy = (
            f"call it: {base.__name__}(...)" if isinstance(base, type) else "use torch.tensor(...)"
        )
        raise TypeError(
            f"base must be a tensor or a fenchel prior, got {type(base).__name__}; {remedy}"
        )
    if base.is_complex():
        raise TypeError("base must be real and non-negative, got complex numbers")


def _from_prior(prior: Prior, shape: torch.Size, like: Tensor) -> Base:
    prior.check(shape if len(shape) > 1 else torch.Size((1, *shape)))
    queries = shape[-2] if len(shape) > 1 else 1
    rows = torch.arange(queries, device=like.device)
    columns = torch.arange(shape[-1], device=like.device)
    log_mass = prior.log_mass(rows, columns).to(like.dtype)
    if len(shape) == 1:
        log_mass = log_mass.squeeze(-2)
    log_mass = expand_to(log_mass, shape, f"{type(prior).__name__}.log_mass")
    allowed = log_mass != -math.inf  # NaN is no mask: it spoils its row
    return Base(allowed) if prior.is_mask else Base(allowed, log_mass=log_mass)


def _from_tensor(base: Tensor, shape: torch.Size, like: Tensor) -> Base:
    if base.device != like.device:
        raise ValueError(
            f"base is on {base.device} and the scores on {like.device}; move one of them"
        )
    base = expand_to(base, shape, "base")
    if base.dtype == torch.bool:
        return Base(allowed=base)
    if has(base < 0):
        raise ValueError(
            f"base must be non-negative, got {base.min().item():g}; 0 masks a key, and a bias "
            "on a logarithmic scale is passed as base=bias.exp() or as a prior"
        )
    mass = base.to(like.dtype)
    return Base(allowed=mass > 0, mass=mass)


def expand_to(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """The tensor in the scores' shape, or an error that names both."""
    if not expands_to(tensor.shape, shape):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} does not broadcast to the scores' shape "
            f"{tuple(shape)}; keys are the last axis (or the axis given as dim)"
        )
    return tensor.expand(shape)
