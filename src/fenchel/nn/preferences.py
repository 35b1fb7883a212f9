"""Which templates matter before anything local is known, and how reliable the evidence is.

A *preference* is any callable (query, templates) -> log-preferences of four axes (batch, head,
query, template), each full or 1; -inf hides a template. What is not normalised is normalised by
`PreferenceAttention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn import functional as F

from fenchel._numerics import check_whole
from fenchel.priors import RelativeBuckets

LogPreference = Callable[[Tensor, Tensor], Tensor]


class _Preference(Module):
    """first * second prefers by both: their preferences multiply."""

    def __mul__(self, other: LogPreference) -> _Product:
        return _Product(self, other) if callable(other) else NotImplemented


class _Product(_Preference):
    def __init__(self, first: LogPreference, second: LogPreference) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, query: Tensor, templates: Tensor) -> Tensor:
        return self.first(query, templates) + self.second(query, templates)


class UniformPreference(_Preference):
    """All templates alike: ordinary attention."""

    def forward(self, query: Tensor, templates: Tensor) -> Tensor:
        """(1, 1, 1, 1), zero."""
        return query.new_zeros(1, 1, 1, 1)


class PositionPreference(_Preference):
    """By how far a template is from the query: T5's relative bias, u = exp(table[bucket, head]).

    >>> preference = PositionPreference(num_heads=2)
    >>> preference(torch.zeros(1, 5, 8), torch.zeros(1, 7, 8)).shape
    torch.Size([1, 2, 5, 7])

    buckets, max_distance, bidirectional: as in `fenchel.priors.RelativeBuckets`; a causal decoder
        needs no second direction. The table starts even.
    """

    def __init__(
        self, num_heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads, buckets=buckets, max_distance=max_distance)
        self.table = Parameter(torch.zeros(buckets, num_heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self._prior()  # refuses buckets that do not fit the distance

    def forward(self, query: Tensor, templates: Tensor) -> Tensor:
        """(1, head, query, template)"""
        rows, columns = (torch.arange(x.shape[1], device=x.device) for x in (query, templates))
        return self._prior().log_mass(rows, columns).unsqueeze(0)

    def extra_repr(self) -> str:
        buckets, heads = self.table.shape
        return f"num_heads={heads}, buckets={buckets}, bidirectional={self.bidirectional}"

    def _prior(self) -> RelativeBuckets:
        return RelativeBuckets(self.table, self.max_distance, self.bidirectional)


class ContentPreference(_Preference):
    """By what a template holds: a network of the template alone, before any evidence is seen.

    The generalisation of T5 that the paper proposes in section 7; both at once are
    `PositionPreference(heads) * ContentPreference(width, heads)`.

    embed_dim: width of the templates. hidden: of the network's one hidden layer; embed_dim if None.
    """

    def __init__(self, embed_dim: int, num_heads: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = embed_dim if hidden is None else hidden
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, hidden=hidden)
        self.inner = Linear(embed_dim, hidden)
        # No bias: the same for every template, it would change no preference.
        self.outer = Linear(hidden, num_heads, bias=False)

    def forward(self, query: Tensor, templates: Tensor) -> Tensor:
        """(batch, head, 1, template)"""
        logs: Tensor = self.outer(F.gelu(self.inner(templates)))  # (batch, template, head)
        return logs.mT.unsqueeze(2)


class LearnedReliability(Module):
    """One reliability per head, trained: exp(raw).

    >>> layer = PreferenceAttention(16, 2, reliability=LearnedReliability(2, init=0.5))
    >>> layer.reliability().shape
    torch.Size([2, 1])
    """

    def __init__(self, heads: int, init: float = 1.0) -> None:
        super().__init__()
        check_whole(heads, "heads", 1)
        check_positive_number(init, "init")
        self.raw = Parameter(torch.full((heads, 1), math.log(init)))

    def forward(self) -> Tensor:
        """(head, 1), positive."""
        return self.raw.exp()


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check_whole(size, name, 1)


def check_positive_number(value: object, name: str, alternative: str = "") -> None:
    """Refuse anything but a finite number > 0; alternative: what else would do."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number > 0{alternative}, got {value!r}")
