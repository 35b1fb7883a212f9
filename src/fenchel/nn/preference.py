"""Attention as estimation: a preference over templates, and evidence that moves their mean.

Fig. 1 of the paper behind `fenchel.dual`: one network says which templates matter before anything
local is known, another what the local evidence is, and the layer returns the estimated mean.

A *preference* is any callable (query, templates) -> log-preferences of four axes (batch, head,
query, template), each full or 1; -inf hides a template. What is not normalised is normalised here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn import functional as F

from fenchel import dual
from fenchel._attention import attention
from fenchel._attention.tiled import expectation
from fenchel._numerics import (
    certificate_dtype,
    check_tensor,
    check_whole,
    compute_dtype,
    full_precision,
    where,
)
from fenchel.dual import Estimate
from fenchel.dual.problem import checked_reliability
from fenchel.nn.masks import lay_out_attn_mask, lay_out_padding, merge_masks
from fenchel.priors import RelativeBuckets

Solution = Literal["first_order", "second_order", "exact"]
LogPreference = Callable[[Tensor, Tensor], Tensor]
_SOLUTIONS: dict[str, Callable[..., Estimate]] = {
    "first_order": dual.first_order,
    "second_order": dual.second_order,
    "exact": dual.estimate,
}


# ---- preferences


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
        _check_sizes(num_heads=num_heads, buckets=buckets, max_distance=max_distance)
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
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, hidden=hidden)
        self.inner = Linear(embed_dim, hidden)
        # No bias: the same for every template, it would change no preference.
        self.outer = Linear(hidden, num_heads, bias=False)

    def forward(self, query: Tensor, templates: Tensor) -> Tensor:
        """(batch, head, 1, template)"""
        logs: Tensor = self.outer(F.gelu(self.inner(templates)))  # (batch, template, head)
        return logs.mT.unsqueeze(2)


class LearnedReliability(Module):
    """One reliability a head, trained: exp(raw).

    >>> layer = PreferenceAttention(16, 2, reliability=LearnedReliability(2, init=0.5))
    >>> layer.reliability().shape
    torch.Size([2, 1])
    """

    def __init__(self, heads: int, init: float = 1.0) -> None:
        super().__init__()
        check_whole(heads, "heads", 1)
        _check_positive(init, "init")
        self.raw = Parameter(torch.full((heads, 1), math.log(init)))

    def forward(self) -> Tensor:
        """(head, 1), positive."""
        return self.raw.exp()


# ---- the layer


class PreferenceAttention(Module):  # CLAIMS D-E16 to D-E19, D-Fig4
    """concat_h(sum_i p_i V_h x_i) W + b, with the weights of an estimation problem in every head:

        p = argmin_p  reliability / 2 |mean_u + z - sum_i p_i t_i|^2 + KL(p, u)

    of templates t_i = scale K_h x_i, evidence z = Q_h y, preference u. To first order, which is the
    default, p = softmax(log u + reliability <t, z>): with an even preference and reliability 1
    torch's scaled dot-product attention, with a `PositionPreference` T5's.

    >>> layer = PreferenceAttention(16, 2, preference=PositionPreference(2))
    >>> x = torch.randn(3, 5, 16)
    >>> output, _ = layer(x, x)                     # (3, 5, 16)
    >>> layer.solution = "exact"
    >>> output, estimate = layer(x, x, need_estimate=True)
    >>> estimate.weights.shape, bool(estimate.gap.max() < 1e-12)
    (torch.Size([3, 2, 5, 5]), True)

    embed_dim, num_heads: width of query and output, and how many heads.
    template_dim: width of templates; embed_dim if None.
    head_dim: width of t, z and values in a head; embed_dim / num_heads if None.
    preference: `UniformPreference()` if None, `PositionPreference`, `ContentPreference`, a product
        of them, or any callable as above. A module becomes part of the layer, and is moved to its
        device and dtype.
    reliability: a number > 0, or a module whose `forward()` returns what broadcasts to (batch,
        head, query), such as `LearnedReliability(num_heads)`.
    solution: "first_order" never stores weights whole; "second_order" and "exact", in float64, do,
        and are for small layers or for looking at a trained one. It may be changed at any time.
    scale: absorbed by the templates; 1 / sqrt(head_dim) if None. To first order only scale *
        reliability counts. Beyond it the size of the templates does.
    bias: of evidence, values and output. Templates have none: shifting all changes no weight.
    dropout: share of weights set to zero in training.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        template_dim: int | None = None,
        head_dim: int | None = None,
        preference: LogPreference | None = None,
        reliability: float | Module = 1.0,
        solution: Solution = "first_order",
        scale: float | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        self.template_dim = embed_dim if template_dim is None else template_dim
        self.head_dim = _head_dim(embed_dim, num_heads) if head_dim is None else head_dim
        _check_sizes(template_dim=self.template_dim, head_dim=self.head_dim)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        _check_positive(self.scale, "scale")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, got {dropout}")
        _check_choices(solution, reliability)
        self.solution = solution
        inner, like = num_heads * self.head_dim, {"device": device, "dtype": dtype}
        self.evidence_proj = Linear(embed_dim, inner, bias=bias, **like)
        self.template_proj = Linear(self.template_dim, inner, bias=False, **like)
        self.value_proj = Linear(self.template_dim, inner, bias=bias, **like)
        self.out_proj = Linear(inner, embed_dim, bias=bias, **like)
        preference = UniformPreference() if preference is None else preference
        if isinstance(preference, type) or not callable(preference):
            shown = f"such as PositionPreference(num_heads), got {preference!r}"
            raise TypeError(f"preference must be a callable (query, templates) -> logs, {shown}")
        self.preference: LogPreference = self._moved(preference)
        self.reliability: float | Module = self._moved(reliability)

    @classmethod
    def from_t5(cls, t5: Any, *, preference: LogPreference | None = None) -> Self:
        """With a copy of the weights of `transformers`' T5Attention: the same output.

        A decoder's self-attention is called with is_causal=True. Only the first block of a T5 has
        a relative bias, which later self-attentions are handed: give those
        `preference=first.preference`. Without either, as in cross-attention, it is even.
        """
        _check_t5(t5, preference)
        layer = cls(
            t5.d_model,
            t5.n_heads,
            head_dim=t5.key_value_proj_dim,
            preference=_t5_preference(t5) if t5.has_relative_attention_bias else preference,
            scale=1.0,  # T5 leaves it to its initial weights
            bias=False,
            dropout=t5.dropout,
            device=t5.q.weight.device,
            dtype=t5.q.weight.dtype,
        )
        ours = (layer.evidence_proj, layer.template_proj, layer.value_proj, layer.out_proj)
        with torch.no_grad():
            for mine, theirs in zip(ours, (t5.q, t5.k, t5.v, t5.o), strict=True):
                mine.weight.copy_(theirs.weight)
        return layer.train(t5.training)

    def forward(
        self,
        query: Tensor,
        templates: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        need_estimate: bool = False,
    ) -> tuple[Tensor, Estimate | None]:
        """(output, estimate): (batch, query, embed_dim), and None unless needed.

        query: (batch, query, embed_dim). templates: (batch, template, template_dim).
        attn_mask: (query, template) or (batch * head, query, template), as in
            `torch.nn.MultiheadAttention`: bool with True = **not allowed**, or float, added to the
            log-preferences.
        key_padding_mask: (batch, template): bool with True = **ignored**, or float, likewise.
        is_causal: query i sees templates 0 .. i; together with a mask both apply.
        need_estimate: also the `fenchel.dual.Estimate` of every (batch, head, query).
        A query that may see no template gets zeros, then the output projection.
        """
        _check_choices(self.solution, self.reliability)
        _check_operands(self, query, templates)
        shape = torch.Size((len(query), self.num_heads, query.shape[1], templates.shape[1]))
        padding = lay_out_padding(key_padding_mask, shape, batched=True)
        if padding is not None and padding.dtype == torch.bool:  # where anything may stand
            templates = where(~padding[:, 0].mT, templates, 0.0)
        made = self.evidence_proj(query), self.template_proj(templates), self.value_proj(templates)
        z, t, v = (self._by_head(x) for x in made)
        mask = merge_masks(lay_out_attn_mask(attn_mask, shape), padding, z, 0)
        bias = _joined(self._log_preference(query, templates, shape), mask)
        if self.solution == "first_order" and not need_estimate:
            return self._leave(self._attend(z, t, v, bias, is_causal)), None
        heads, found = self._solve(z, t, v, bias, is_causal)
        return self._leave(heads), found if need_estimate else None

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if not isinstance(self.reliability, Module):
            parts.append(f"reliability={self.reliability:g}")
        return ", ".join([*parts, f"solution={self.solution!r}", f"scale={self.scale:g}"])

    def _moved(self, choice: Any) -> Any:
        return choice.to(self.out_proj.weight) if isinstance(choice, Module) else choice

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, token, head * head_dim) -> (batch, head, token, head_dim)"""
        by_head: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))
        return by_head.transpose(1, 2)

    def _leave(self, heads: Tensor) -> Tensor:
        """(batch, head, query, head_dim) -> (batch, query, embed_dim)"""
        output: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return output

    def _log_preference(self, query: Tensor, templates: Tensor, shape: torch.Size) -> Tensor | None:
        """(batch, head, query, template), each full or 1; None if even."""
        if isinstance(self.preference, UniformPreference):
            return None
        logs = self.preference(query, templates)
        check_tensor(logs, "what preference returns")
        if logs.ndim != 4 or not _fits(logs.shape, shape) or not logs.is_floating_point():
            raise ValueError(
                "preference must return floating-point log-preferences of four axes, (batch, head, "
                f"query, template) = {tuple(shape)}, each full or 1; got {logs.dtype} of shape "
                f"{tuple(logs.shape)}"
            )
        return logs.to(compute_dtype(logs.dtype)).expand(*logs.shape[:3], shape[3])

    def _strength(self, shape: torch.Size) -> float | Tensor:
        """A number, or what broadcasts to shape = (batch, head, query)."""
        if not isinstance(self.reliability, Module):
            return float(self.reliability)
        made: Tensor = self.reliability()
        if made.ndim == 1 or not _fits(made.shape, shape):  # one axis: of heads, or of queries?
            raise ValueError(
                f"reliability must return (head, 1) = {(shape[1], 1)}, or (batch, head, query) = "
                f"{tuple(shape)} with axes full or 1, got shape {tuple(made.shape)}"
            )
        return checked_reliability(made, "reliability", made)

    def _attend(self, z: Tensor, t: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        """To first order, without the weights. (batch, head, query, head_dim)"""
        scale, strength = self.scale, self._strength(z.shape[:3])
        if isinstance(strength, Tensor):
            wide = compute_dtype(z.dtype)
            z = (z.to(wide) * strength.to(wide).unsqueeze(-1)).to(z.dtype)
        else:
            scale = scale * strength
        p = self.dropout if self.training else 0.0
        return attention(z, t, v, attn_mask=bias, is_causal=causal, scale=scale, dropout_p=p)

    def _solve(
        self, z: Tensor, t: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Estimate]:
        """(batch, head, query, head_dim), and the estimates of its rows."""
        if not t.shape[2]:  # no template: as one that no query may see
            t, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (t, v))
            hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=t.device)
            heads, found = self._solve(z, t, v, hidden, causal)
            assert found.weights is not None
            return heads, replace(found, weights=found.weights[..., :0])
        dtype = compute_dtype(z.dtype)
        with full_precision(z):
            allowed, preference = _as_preference(bias, causal, z.shape[2], t)
            t = (self.scale * t.to(dtype)).unsqueeze(2)  # (batch, head, 1, template, head_dim)
            solve = _SOLUTIONS[self.solution]
            found = solve(t, preference, z.to(dtype), self._strength(z.shape[:3]), mask=allowed)
            assert found.weights is not None
            weights = F.dropout(found.weights.to(dtype), self.dropout, self.training)
        return expectation(weights, v.to(dtype)).to(z.dtype), found


def _joined(logs: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Log-preferences, -inf where masked; without any the mask itself, True = takes part."""
    if logs is None or mask is None:
        return mask if logs is None else logs
    return where(mask, logs, -torch.inf) if mask.dtype == torch.bool else logs + mask


def _as_preference(
    bias: Tensor | None, causal: bool, queries: int, t: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(takes part, preference): what `fenchel.dual` takes, up to a factor a row."""
    allowed = logs = None
    if bias is not None:
        given = bias.dtype == torch.bool
        allowed, logs = (bias, None) if given else (bias != -torch.inf, bias)
    if causal:
        rows, columns = (torch.arange(n, device=t.device) for n in (queries, t.shape[2]))
        past = columns <= rows.unsqueeze(-1)
        allowed = past if allowed is None else allowed & past
    if logs is None or allowed is None:
        return allowed, None
    logs = where(allowed, logs.to(certificate_dtype(t.device)), 0.0)
    top = where(allowed, logs.detach(), -torch.inf).amax(-1, keepdim=True)
    return allowed, where(allowed, (logs - where(top != -torch.inf, top, 0.0)).exp(), 0.0)


# ---- checks


def _check_positive(value: object, name: str, other: str = "") -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number > 0{other}, got {value!r}")


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    """Broadcasts, each axis from the right full or 1."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, full) for size, full in pairs)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check_whole(size, name, 1)


def _head_dim(embed_dim: int, num_heads: int) -> int:
    if embed_dim % num_heads:
        shown = f"{embed_dim} and {num_heads}"
        raise ValueError(f"embed_dim must be divisible by num_heads, got {shown}; or pass head_dim")
    return embed_dim // num_heads


def _check_choices(solution: object, reliability: object) -> None:
    if solution not in tuple(_SOLUTIONS):
        raise ValueError(f"solution must be one of {', '.join(_SOLUTIONS)}; got {solution!r}")
    if not isinstance(reliability, Module):
        _check_positive(reliability, "reliability", ", or a LearnedReliability(num_heads)")


def _check_operands(layer: PreferenceAttention, query: Tensor, templates: Tensor) -> None:
    widths = {"query": (query, layer.embed_dim), "templates": (templates, layer.template_dim)}
    for name, (x, width) in widths.items():
        check_tensor(x, name)
        if x.ndim != 3 or x.shape[2] != width:
            raise ValueError(f"{name} must be (batch, token, {width}), got {tuple(x.shape)}")
    if query.shape[0] != templates.shape[0]:
        shapes = f"{tuple(query.shape)} and {tuple(templates.shape)}"
        raise ValueError(f"query and templates must have the same batch, got {shapes}")


def _check_t5(t5: Any, preference: LogPreference | None) -> None:
    # By name: LongT5's and others' have the same parts and compute something else.
    if type(t5).__name__ not in ("T5Attention", "MT5Attention"):
        raise TypeError(
            f"from_t5 takes a T5Attention of transformers, got {type(t5).__name__}; in a block it "
            "is .layer[0].SelfAttention or .layer[1].EncDecAttention"
        )
    if t5.has_relative_attention_bias and preference is not None:
        raise ValueError("this T5Attention has a relative bias of its own; leave out preference")


def _t5_preference(t5: Any) -> PositionPreference:
    table, distance = t5.relative_attention_bias.weight, t5.relative_attention_max_distance
    made = PositionPreference(t5.n_heads, table.shape[0], distance, not t5.is_decoder)
    made.table = Parameter(table.detach().clone())
    return made
