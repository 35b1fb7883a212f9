"""The priors: masks over positions, biases by position and by key, and a null key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import at_hand, certificate_dtype, check_tensor, check_whole, has, readable
from fenchel.priors.contract import (
    Prior,
    Structure,
    diagonals,
    distance,
    extents,
    for_every_row,
)


def _mask(keep: Tensor) -> Tensor:
    return torch.zeros((), device=keep.device).masked_fill(~keep, -math.inf)


def _check_axes(of_key: Tensor, name: str, shape: torch.Size) -> None:
    # Broadcasting alone would take a batch for heads where both are as many.
    if of_key.ndim not in (1, len(shape) - 1):
        raise ValueError(
            f"{name} of shape {tuple(of_key.shape)} must be one per key, or have every leading "
            f"axis of the scores {tuple(shape)} but the query; for (batch, head, query, key) pass "
            f"{name}[:, None]"
        )


@dataclass(frozen=True)
class Causal(Prior):
    """Query i sees keys 0 .. i + offset. With cached keys: `Causal(offset=keys - queries)`."""

    offset: int | None = None

    def __post_init__(self) -> None:
        offset = self.offset
        if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int)):
            raise TypeError(f"offset must be a whole number or None, got {offset!r}")

    @property
    def is_mask(self) -> bool:
        return True

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return _mask(distance(rows, columns) <= (self.offset or 0))

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        return Structure(queries, keys, highest=offset + (self.offset or 0))


@dataclass(frozen=True)
class SlidingWindow(Prior):
    """Query i sees keys at most `width` positions away, on both sides; 0: only itself.

    right: as many positions ahead, where that differs: `SlidingWindow(255, right=0)` sees itself
        and the 255 keys before it.
    """

    width: int
    right: int | None = None

    def __post_init__(self) -> None:
        check_whole(self.width, "width", 0)
        if self.right is not None:
            check_whole(self.right, "right", 0)

    @property
    def is_mask(self) -> bool:
        return True

    @property
    def _ahead(self) -> int:
        return self.width if self.right is None else self.right

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        ahead = distance(rows, columns)
        return _mask((ahead >= -self.width) & (ahead <= self._ahead))

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        return Structure(queries, keys, lowest=offset - self.width, highest=offset + self._ahead)


@dataclass(frozen=True, eq=False)
class Documents(Prior):
    """Several documents in one row: a query sees the keys of its own document.

    >>> ids = torch.tensor([0, 0, 0, 1, 1])                  # two documents, of 3 and 2 tokens
    >>> fl.attention(q, k, v, fl.Tsallis(1.5), base=Documents(ids) * Causal())

    ids: whole numbers (..., key), one per token; leading axes are those of the scores without the
        query: for (batch, head, query, key) pass `ids[:, None]`. Documents whose tokens stand
        together are fast. Query i is token i, or token i + offset.
    """

    ids: Tensor

    def __post_init__(self) -> None:
        check_tensor(self.ids, "ids")
        if self.ids.is_floating_point() or self.ids.dtype == torch.bool or self.ids.ndim == 0:
            raise TypeError(
                f"ids must be whole numbers, one per token on the last axis, got "
                f"{self.ids.dtype} of shape {tuple(self.ids.shape)}"
            )

    @property
    def is_mask(self) -> bool:
        return True

    def check(self, shape: torch.Size) -> None:
        tokens = self.ids.shape[-1]
        if tokens != shape[-1] or shape[-2] > tokens:
            raise ValueError(
                f"Documents has {tokens} ids, the scores {tuple(shape)} have {shape[-1]} keys and "
                f"{shape[-2]} queries"
            )
        _check_axes(self.ids, "ids", shape)

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        self._check_rows(rows)
        return _mask(self.ids[..., rows].unsqueeze(-1) == self.ids[..., columns].unsqueeze(-2))

    def _check_rows(self, rows: Tensor) -> None:
        tokens = self.ids.shape[-1]
        if has((rows >= tokens) | (rows < 0)):
            raise ValueError(
                f"query {int(rows.max())} is beyond the {tokens} tokens of Documents; with an "
                "offset, the queries are the last of the tokens"
            )

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        if not readable(self.ids):
            return None
        start, stop, together = extents(self.ids)
        if not together:
            return None
        rows = torch.arange(offset, offset + queries, device=device)
        self._check_rows(rows)
        return Structure(queries, keys, start=start[..., rows], stop=stop[..., rows])


@dataclass(frozen=True, eq=False)
class KeyPadding(Prior):
    """Only some keys are real: the first `real` ones, or those that `real` marks.

    >>> KeyPadding(lengths[:, None])             # for scores (batch, head, query, key)
    >>> KeyPadding(attention_mask.bool()[:, None])

    real: whole numbers with the leading axes of the scores, without query and key; or bool, with
        the keys as one axis more. Real keys that stand together are fast.
    """

    real: Tensor

    def __post_init__(self) -> None:
        check_tensor(self.real, "real")
        if self.real.is_floating_point() or (self._marks and self.real.ndim == 0):
            raise TypeError(
                f"real must be lengths, or bool with one entry per key, got {self.real.dtype} of "
                f"shape {tuple(self.real.shape)}"
            )

    @property
    def is_mask(self) -> bool:
        return True

    @property
    def _marks(self) -> bool:
        return self.real.dtype == torch.bool

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        if self._marks:
            keep = self.real[..., None, columns]
        else:
            keep = columns < self.real[..., None, None]  # (..., 1, columns)
        return _mask(keep.expand(*keep.shape[:-2], len(rows), -1))

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        real = self.real.to(device)
        if not self._marks:
            return Structure(queries, keys, stop=for_every_row(real.to(torch.int64), queries))
        first, count = real.to(torch.int8).argmax(-1), real.sum(-1)
        last = keys - real.flip(-1).to(torch.int8).argmax(-1)
        if not at_hand(real) or has((count > 0) & (last - first != count)):
            return Structure(queries, keys, of_key=_mask(real))
        stop = torch.where(count > 0, last, 0)
        return Structure(
            queries, keys, start=for_every_row(first, queries), stop=for_every_row(stop, queries)
        )

    def check(self, shape: torch.Size) -> None:
        if self._marks and self.real.shape[-1] != shape[-1]:
            raise ValueError(
                f"KeyPadding marks {self.real.shape[-1]} keys, the scores have {shape[-1]}"
            )
        axes = self.real.ndim - self._marks
        if axes not in (0, len(shape) - 2):  # as in _check_axes
            raise ValueError(
                f"real of shape {tuple(self.real.shape)} must have one axis for each leading "
                f"axis of the scores {tuple(shape)}, without query and key; for (batch, head, "
                "query, key) pass lengths[:, None] or mask[:, None]"
            )


def _check_heads(prior: Prior, heads: int, shape: torch.Size) -> None:
    there = shape[-3] if len(shape) > 2 else 1
    if heads != 1 and heads != there:  # the compiler does not look for a length in a tuple
        raise ValueError(
            f"{type(prior).__name__} has {heads} heads, the scores {tuple(shape)} have {there}"
        )


@dataclass(frozen=True)
class ALiBi(Prior):
    """Mass exp(-slope |distance|), one slope per head (Press, Smith and Lewis, 2022).

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

    def check(self, shape: torch.Size) -> None:
        _check_heads(self, self.heads, shape)

    def _slopes(self, device: torch.device) -> Tensor:
        if self.slopes is not None:
            return self.slopes
        exact = certificate_dtype(device)
        return torch.tensor(alibi_slopes(self.heads), dtype=exact, device=device)

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return -self._slopes(rows.device)[:, None, None] * distance(rows, columns).abs()

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        distance = diagonals(queries, keys, offset, device).abs()
        return Structure(queries, keys, relative=-self._slopes(device)[:, None] * distance)


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

    def check(self, shape: torch.Size) -> None:
        _check_heads(self, self.table.shape[1], shape)

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.table[self.buckets(distance(rows, columns))].movedim(-1, 0)

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        buckets = self.buckets(diagonals(queries, keys, offset, device))
        return Structure(queries, keys, relative=self.table[buckets].mT)

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
        _check_axes(self.logits, "logits", shape)

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        picked = self.logits[..., columns]
        return picked[..., None, :].expand(*picked.shape[:-1], len(rows), -1)

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        return Structure(queries, keys, of_key=self.logits)


@dataclass(frozen=True, eq=False)
class Sink(Prior):
    """A null key per head, with value zero, that takes weight from the others (gpt-oss).

    >>> fl.attention(q, k, v, fl.Tsallis(1.5), attn_mask=Sink(torch.zeros(8)))

    logits: (heads,), or one number for all. As attn_mask the null key has these scores; as base it
        has score 0 and mass exp(logits). With softmax both are the same.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        check_tensor(self.logits, "logits")
        if not self.logits.is_floating_point() or self.logits.ndim > 1:
            raise TypeError(
                f"logits must be real, one per head, got {self.logits.dtype} of shape "
                f"{tuple(self.logits.shape)}"
            )
        if has(~self.logits.isfinite()):
            raise ValueError("the logits of a Sink must be finite; without a null key leave it out")

    @property
    def is_mask(self) -> bool:
        return True  # of the keys that are there

    @property
    def sink(self) -> Tensor:
        return self.logits

    def check(self, shape: torch.Size) -> None:
        if self.logits.ndim == 1:
            _check_heads(self, len(self.logits), shape)

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return torch.zeros((len(rows), len(columns)), device=rows.device)

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        return Structure(queries, keys, sink=self.logits)


ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Custom(Prior):
    """Any function of batch, head, query and key: the general way, computed in blocks, slower.

    >>> slope = torch.nn.Parameter(torch.ones(8))
    >>> near = Custom(lambda b, h, i, j: -slope[h] * (i - j).abs().sqrt())
    >>> fl.attention(q, k, v, fl.Tsallis(1.5), attn_mask=near)

    function: gets four whole-number tensors that broadcast to (batch, head, query, key) and returns
        the log mass or bias there; -inf hides a key. What it closes over trains.
    """

    function: ScoreFunction
    shape: torch.Size | None = None  # of the scores, once they are known

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom takes a function, got {type(self.function).__name__}")

    def bind(self, shape: torch.Size) -> Prior:
        if len(shape) > 4:
            raise ValueError(f"Custom takes scores (batch, head, query, key), got {tuple(shape)}")
        return Custom(self.function, shape)

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        lead = () if self.shape is None else tuple(self.shape[:-2])
        batch, heads = (1, 1, *lead)[-2:]
        device = rows.device
        made = self.function(
            torch.arange(batch, device=device)[:, None, None, None],
            torch.arange(heads, device=device)[:, None, None],
            rows[:, None],
            columns,
        )
        if not isinstance(made, Tensor) or not made.is_floating_point():
            raise TypeError(
                "the function of Custom must return a float tensor (batch, head, query, key), got "
                f"{made.dtype if isinstance(made, Tensor) else type(made).__name__}"
            )
        made = made.expand(torch.broadcast_shapes(made.shape, (len(rows), len(columns))))
        return made.reshape(made.shape[max(0, made.ndim - 2 - len(lead)) :])
