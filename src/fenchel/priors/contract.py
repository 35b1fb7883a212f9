"""What a prior is: log masses by position, and the same in numbers that a kernel can read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import check_whole, has


@dataclass(frozen=True, eq=False)
class Structure:
    """A prior in numbers: which keys query i sees, and what is added to their logarithm.

    Query i sees key j where lowest <= j - i <= highest and start[i] <= j < stop[i]. Added is
    relative[j - i + queries - 1] + of_key[j]. What is None does not restrict or adds nothing.
    Leading axes are those of the scores, without query and key. sink: score of a null key.
    """

    queries: int
    keys: int
    lowest: int | None = None
    highest: int | None = None
    start: Tensor | None = None  # int64 (..., query)
    stop: Tensor | None = None
    relative: Tensor | None = None  # (..., queries + keys - 1)
    of_key: Tensor | None = None  # (..., key)
    sink: Tensor | None = None  # (...)

    def __mul__(self, other: Structure) -> Structure:
        """Both at once."""
        both = {
            "lowest": _join(max, self.lowest, other.lowest),
            "highest": _join(min, self.highest, other.highest),
            "start": _join(torch.maximum, self.start, other.start),
            "stop": _join(torch.minimum, self.stop, other.stop),
            "relative": _join(torch.add, self.relative, other.relative),
            "of_key": _join(torch.add, self.of_key, other.of_key),
            "sink": _join(_refuse_second_sink, self.sink, other.sink),
        }
        return Structure(self.queries, self.keys, **both)

    @property
    def says_nothing(self) -> bool:
        """Every key is seen, and nothing is added."""
        return all(getattr(self, field.name) is None for field in fields(self)[2:])


def _join(both: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Of what is not None."""
    if first is None or second is None:
        return second if first is None else first
    return both(first, second)


def _refuse_second_sink(first: Tensor, second: Tensor) -> Tensor:
    raise ValueError("a product of priors can have one Sink; add their logits up by logaddexp")


class Prior(ABC):
    """Makes a base measure, or a bias, from positions. Multiply two priors to apply both."""

    @property
    def offset(self) -> int | None:
        """Position of the first query where this prior fixes one; None: as the others say, or 0."""
        return None

    @property
    def is_mask(self) -> bool:
        """Every log mass is 0 or -inf: the prior hides keys and does nothing else."""
        return False

    @property
    def sink(self) -> Tensor | None:
        """Logits of a null key that attention adds, one per head."""
        return None

    @abstractmethod
    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Log mass of the keys at `columns` for the queries at `rows`.

        Shape (..., len(rows), len(columns)); leading axes broadcast with those of the scores.
        """

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        """The same in numbers, query i at position i + offset; None if that cannot be said.

        With numbers the fused kernels run; without, blocks of `log_mass`, which is slower.
        """
        return None

    def check(self, shape: torch.Size) -> None:  # noqa: B027  most priors fit any shape
        """Raise if this prior does not fit scores of this shape."""

    def bind(self, shape: torch.Size) -> Prior:
        """This prior for scores of one shape, checked."""
        self.check(shape)
        return self

    def shifted(self, offset: int) -> Prior:
        """The same prior for queries that start `offset` positions later: with keys cached before
        them, offset = keys - queries."""
        check_whole(offset, "offset", 0)
        return Shifted(self, offset)

    def __mul__(self, other: Prior) -> Prior:
        """Both at once. An offset that one of them fixes holds for the other, too."""
        if not isinstance(other, Prior):
            return NotImplemented
        first, second = self, other
        if first.offset is None and second.offset is not None:
            first = Shifted(first, second.offset)
        elif second.offset is None and first.offset is not None:
            second = Shifted(second, first.offset)
        if first.offset != second.offset:
            raise ValueError(
                f"the queries of one product start at one position, got offsets {first.offset} "
                f"and {second.offset}"
            )
        if first.sink is not None and second.sink is not None:
            _refuse_second_sink(first.sink, second.sink)
        return Product(first, second)


@dataclass(frozen=True)
class Product(Prior):
    """Both priors at once: masses multiply. Written `first * second`."""

    first: Prior
    second: Prior

    @property
    def offset(self) -> int | None:
        return self.first.offset

    @property
    def is_mask(self) -> bool:
        return self.first.is_mask and self.second.is_mask

    @property
    def sink(self) -> Tensor | None:
        return self.second.sink if self.first.sink is None else self.first.sink

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.first.log_mass(rows, columns) + self.second.log_mass(rows, columns)

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        first = self.first.structure(queries, keys, offset, device)
        second = self.second.structure(queries, keys, offset, device)
        return None if first is None or second is None else first * second

    def check(self, shape: torch.Size) -> None:
        self.first.check(shape)
        self.second.check(shape)

    def bind(self, shape: torch.Size) -> Prior:
        return Product(self.first.bind(shape), self.second.bind(shape))


@dataclass(frozen=True)
class Shifted(Prior):
    """A prior whose queries start later. Written `prior.shifted(offset)`."""

    prior: Prior
    by: int

    @property
    def offset(self) -> int:
        return (self.prior.offset or 0) + self.by

    @property
    def is_mask(self) -> bool:
        return self.prior.is_mask

    @property
    def sink(self) -> Tensor | None:
        return self.prior.sink

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.prior.log_mass(rows + self.by, columns)

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        return self.prior.structure(queries, keys, offset + self.by, device)

    def check(self, shape: torch.Size) -> None:
        self.prior.check(shape)

    def bind(self, shape: torch.Size) -> Prior:
        return Shifted(self.prior.bind(shape), self.by)


def factors(prior: Prior) -> list[Prior]:
    """What a product is made of, without its shifts."""
    if isinstance(prior, Product):
        return [*factors(prior.first), *factors(prior.second)]
    return factors(prior.prior) if isinstance(prior, Shifted) else [prior]


@dataclass(frozen=True, eq=False)
class Structured(Prior):
    """The prior that a structure describes."""

    numbers: Structure

    @property
    def is_mask(self) -> bool:
        return self.numbers.relative is None and self.numbers.of_key is None

    @property
    def sink(self) -> Tensor | None:
        return self.numbers.sink

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        x, distance = self.numbers, columns[None, :] - rows[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if x.lowest is not None:
            seen = seen & (distance >= x.lowest)
        if x.highest is not None:
            seen = seen & (distance <= x.highest)
        if x.start is not None:
            seen = seen & (columns >= x.start[..., rows].unsqueeze(-1))
        if x.stop is not None:
            seen = seen & (columns < x.stop[..., rows].unsqueeze(-1))
        total = torch.zeros((), device=rows.device)
        if x.relative is not None:
            total = total + x.relative[..., distance + x.queries - 1]
        if x.of_key is not None:
            total = total + x.of_key[..., columns].unsqueeze(-2)
        return total.masked_fill(~seen, -math.inf)

    def structure(
        self, queries: int, keys: int, offset: int, device: torch.device
    ) -> Structure | None:
        same = (queries, keys, offset) == (self.numbers.queries, self.numbers.keys, 0)
        return self.numbers if same else None


# ---- numbers of positions


def distance(rows: Tensor, columns: Tensor) -> Tensor:
    """key position minus query position, (rows, columns)."""
    return columns[None, :] - rows[:, None]


def diagonals(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """key position minus query position of every diagonal, (queries + keys - 1,)."""
    count = max(0, queries + keys - 1)
    return torch.arange(count, device=device) + (1 - queries - offset)


def extents(ids: Tensor) -> tuple[Tensor, Tensor, bool]:
    """First and last + 1 token of each token's document; whether its tokens stand together."""
    flat = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1]).to(torch.int64)
    count = flat.shape[-1]
    _, names = flat.unique(return_inverse=True)
    kinds = int(names.max()) + 1 if names.numel() else 0
    names = names + kinds * torch.arange(len(flat), device=ids.device).unsqueeze(-1)
    place = torch.arange(count, device=ids.device).expand_as(flat)
    size = len(flat) * kinds
    start = names.new_full((size,), count).scatter_reduce(
        0, names.flatten(), place.flatten(), "amin"
    )
    stop = names.new_zeros(size).scatter_reduce(0, names.flatten(), place.flatten() + 1, "amax")
    members = names.flatten().bincount(minlength=size)
    together = not has((members > 0) & (stop - start != members))
    return start[names].reshape(ids.shape), stop[names].reshape(ids.shape), together


def for_every_row(numbers: Tensor, queries: int) -> Tensor:
    """The same for every query."""
    return numbers.unsqueeze(-1).expand(*numbers.shape, queries)
