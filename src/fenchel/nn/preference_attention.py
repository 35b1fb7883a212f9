"""Attention as estimation: a preference over templates, and evidence that moves their mean.

Fig. 1 of the paper behind `fenchel.dual`: one network says which templates matter before anything
local is known (`preferences`), another what the local evidence is, and the layer returns the
estimated mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn import functional as F

from fenchel._attention import attention
from fenchel._attention.tiled import expectation
from fenchel._numerics import (
    certificate_dtype,
    check_tensor,
    compute_dtype,
    expands_to,
    full_precision,
    where,
)
from fenchel.dual import Estimate
from fenchel.dual.problem import read_positive
from fenchel.nn.heads import join_heads, split_heads
from fenchel.nn.masks import lay_out_attn_mask, lay_out_padding, merge_masks
from fenchel.nn.preferences import (
    LogPreference,
    PositionPreference,
    UniformPreference,
    check_positive_number,
    check_sizes,
)
from fenchel.nn.solvers import Exact, FirstOrder, SecondOrder


class Estimation(NamedTuple):
    """output (batch, query, embed_dim), and the `fenchel.dual.Estimate` of every (batch, head,
    query) that it is made of."""

    output: Tensor
    estimate: Estimate


@dataclass(frozen=True)
class HeadForm:
    """What the heads of a `PreferenceAttention` are made of.

    template_dim: width of templates; embed_dim if None.
    head_dim: width of t, z and values in a head; embed_dim / num_heads if None.
    scale: absorbed by the templates; 1 / sqrt(head_dim) if None. To first order only scale *
        reliability counts. Beyond it the size of the templates does.
    bias: of evidence, values and output. Templates have none: shifting all changes no weight.
    dropout: share of weights set to zero in training.
    """

    template_dim: int | None = None
    head_dim: int | None = None
    scale: float | None = None
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("template_dim", "head_dim"):
            if getattr(self, name) is not None:
                check_sizes(**{name: getattr(self, name)})
        if self.scale is not None:
            check_positive_number(self.scale, "scale")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, got {self.dropout}")


_FIRST_ORDER, _FORM = FirstOrder(), HeadForm()


@dataclass(frozen=True, eq=False)
class _Heads:
    """Evidence z, templates t and values v (batch, head, token, head_dim) of all heads.

    bias: log-preferences, -inf where masked, or a bool mask, True = takes part; both broadcast to
    (batch, head, query, template). causal: query i sees templates 0 .. i.
    """

    z: Tensor
    t: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool

    def with_hidden_template(self) -> _Heads:
        """For heads without templates: as with one that no query may see."""
        t, v = (
            torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (self.t, self.v)
        )
        hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=t.device)
        return replace(self, t=t, v=v, bias=hidden)


class PreferenceAttention(Module):  # Deciphering Attention, eqs. 16 to 19
    """concat_h(sum_i p_i V_h x_i) W + b, with the weights of an estimation problem in every head:

        p = argmin_p  reliability / 2 |mean_u + z - sum_i p_i t_i|^2 + KL(p, u)

    of templates t_i = scale K_h x_i, evidence z = Q_h y, preference u. To first order, which is the
    default, p = softmax(log u + reliability <t, z>): with an even preference and reliability 1
    torch's scaled dot-product attention, with a `PositionPreference` T5's.

    >>> layer = PreferenceAttention(16, 2, preference=PositionPreference(2))
    >>> x = torch.randn(3, 5, 16)
    >>> layer(x, x).shape
    torch.Size([3, 5, 16])
    >>> layer.solver = Exact()
    >>> output, estimate = layer.estimate(x, x)
    >>> estimate.weights.shape, bool(estimate.gap.max() < 1e-12)
    (torch.Size([3, 2, 5, 5]), True)

    embed_dim, num_heads: width of query and output, and how many heads.
    preference: `UniformPreference()` if None, `PositionPreference`, `ContentPreference`, a product
        of them, or any callable (query, templates) -> log-preferences. A module becomes part of
        the layer, and moves with it.
    reliability: a number > 0, or a module whose `forward()` returns what broadcasts to (batch,
        head, query), such as `LearnedReliability(num_heads)`.
    solver: `FirstOrder()` never stores weights whole; `SecondOrder()` and `Exact()`, in float64,
        do, and are for small layers or for looking at a trained one. It may be changed at any time.
    form: widths, scale, biases and dropout of the heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        preference: LogPreference | None = None,
        reliability: float | Module = 1.0,
        solver: FirstOrder | SecondOrder | Exact = _FIRST_ORDER,
        form: HeadForm = _FORM,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        _check_choices(solver, reliability)
        self.embed_dim, self.num_heads, self.solver = embed_dim, num_heads, solver
        self._take_form(form)
        inner = num_heads * self.head_dim
        self.evidence_proj = Linear(embed_dim, inner, bias=form.bias)
        self.template_proj = Linear(self.template_dim, inner, bias=False)
        self.value_proj = Linear(self.template_dim, inner, bias=form.bias)
        self.out_proj = Linear(inner, embed_dim, bias=form.bias)
        preference = UniformPreference() if preference is None else preference
        if isinstance(preference, type) or not callable(preference):
            shown = f"such as PositionPreference(num_heads), got {preference!r}"
            raise TypeError(f"preference must be a callable (query, templates) -> logs, {shown}")
        self.preference: LogPreference = preference
        self.reliability: float | Module = reliability

    def _take_form(self, form: HeadForm) -> None:
        if not isinstance(form, HeadForm):
            raise TypeError(f"form must be a HeadForm, got {form!r}")
        self.template_dim = self.embed_dim if form.template_dim is None else form.template_dim
        self.head_dim = (
            _head_dim(self.embed_dim, self.num_heads) if form.head_dim is None else form.head_dim
        )
        self.scale = self.head_dim**-0.5 if form.scale is None else form.scale
        self.dropout = form.dropout

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
            preference=_t5_preference(t5) if t5.has_relative_attention_bias else preference,
            form=HeadForm(
                head_dim=t5.key_value_proj_dim,
                scale=1.0,  # T5 leaves it to its initial weights
                bias=False,
                dropout=t5.dropout,
            ),
        ).to(t5.q.weight)
        ours = (layer.evidence_proj, layer.template_proj, layer.value_proj, layer.out_proj)
        with torch.no_grad():
            for our, their in zip(ours, (t5.q, t5.k, t5.v, t5.o), strict=True):
                our.weight.copy_(their.weight)
        return layer.train(t5.training)

    def forward(
        self,
        query: Tensor,
        templates: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """(batch, query, embed_dim)

        query: (batch, query, embed_dim). templates: (batch, template, template_dim).
        attn_mask: (query, template) or (batch * head, query, template), as in
            `torch.nn.MultiheadAttention`: bool with True = **not allowed**, or float, added to the
            log-preferences.
        key_padding_mask: (batch, template): bool with True = **ignored**, or float, likewise.
        is_causal: query i sees templates 0 .. i; together with a mask both apply.
        A query that may see no template gets zeros, then the output projection.
        """
        heads = self._heads(query, templates, attn_mask, key_padding_mask, is_causal)
        if isinstance(self.solver, FirstOrder):
            return self._leave(self._attend(heads))
        return self._leave(self._solve(heads)[0])

    def estimate(
        self,
        query: Tensor,
        templates: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Estimation:
        """The output together with its estimates; arguments as in `forward`."""
        heads = self._heads(query, templates, attn_mask, key_padding_mask, is_causal)
        output, estimate = self._solve(heads)
        return Estimation(self._leave(output), estimate)

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if not isinstance(self.reliability, Module):
            parts.append(f"reliability={self.reliability:g}")
        return ", ".join([*parts, f"solver={self.solver}", f"scale={self.scale:g}"])

    def _heads(
        self,
        query: Tensor,
        templates: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> _Heads:
        _check_choices(self.solver, self.reliability)
        _check_operands(self, query, templates)
        shape = torch.Size((len(query), self.num_heads, query.shape[1], templates.shape[1]))
        padding = lay_out_padding(key_padding_mask, shape, batched=True)
        if padding is not None and padding.dtype == torch.bool:  # where anything may stand
            templates = where(~padding[:, 0].mT, templates, 0.0)
        z = split_heads(self.evidence_proj(query), self.num_heads)
        t = split_heads(self.template_proj(templates), self.num_heads)
        v = split_heads(self.value_proj(templates), self.num_heads)
        mask = merge_masks(lay_out_attn_mask(attn_mask, shape), padding, z, 0)
        logs = self._log_preference(query, templates, shape)
        return _Heads(z, t, v, _mask_preferences(logs, mask), is_causal)

    def _leave(self, heads: Tensor) -> Tensor:
        """(batch, head, query, head_dim) -> (batch, query, embed_dim)"""
        output: Tensor = self.out_proj(join_heads(heads))
        return output

    def _log_preference(self, query: Tensor, templates: Tensor, shape: torch.Size) -> Tensor | None:
        """(batch, head, query, template), each full or 1; None if even."""
        if isinstance(self.preference, UniformPreference):
            return None
        logs = self.preference(query, templates)
        check_tensor(logs, "what preference returns")
        if logs.ndim != 4 or not expands_to(logs.shape, shape) or not logs.is_floating_point():
            raise ValueError(
                "preference must return floating-point log-preferences of four axes, (batch, head, "
                f"query, template) = {tuple(shape)}, each full or 1; got {logs.dtype} of shape "
                f"{tuple(logs.shape)}"
            )
        return logs.to(compute_dtype(logs.dtype)).expand(*logs.shape[:3], shape[3])

    def _strength(self, shape: torch.Size) -> float | Tensor:
        """The reliability: a number, or what broadcasts to shape = (batch, head, query)."""
        if not isinstance(self.reliability, Module):
            return float(self.reliability)
        strength: Tensor = self.reliability()
        if strength.ndim == 1 or not expands_to(
            strength.shape, shape
        ):  # one axis: heads or queries?
            raise ValueError(
                f"reliability must return (head, 1) = {(shape[1], 1)}, or (batch, head, query) = "
                f"{tuple(shape)} with axes full or 1, got shape {tuple(strength.shape)}"
            )
        return read_positive(strength, "reliability", strength)

    def _attend(self, heads: _Heads) -> Tensor:
        """To first order, without the weights. (batch, head, query, head_dim)"""
        z, scale, strength = heads.z, self.scale, self._strength(heads.z.shape[:3])
        if isinstance(strength, Tensor):
            wide = compute_dtype(z.dtype)
            z = (z.to(wide) * strength.to(wide).unsqueeze(-1)).to(z.dtype)
        else:
            scale = scale * strength
        return attention(
            z,
            heads.t,
            heads.v,
            attn_mask=heads.bias,
            is_causal=heads.causal,
            scale=scale,
            dropout_p=self.dropout if self.training else 0.0,
        )

    def _solve(self, heads: _Heads) -> tuple[Tensor, Estimate]:
        """(batch, head, query, head_dim), and the estimates of its rows."""
        if not heads.t.shape[2]:
            output, estimate = self._solve(heads.with_hidden_template())
            assert estimate.weights is not None
            return output, replace(estimate, weights=estimate.weights[..., :0])
        z, v, dtype = heads.z, heads.v, compute_dtype(heads.z.dtype)
        with full_precision(z):
            allowed, preference = _split_preference(heads)
            t = (self.scale * heads.t.to(dtype)).unsqueeze(
                2
            )  # (batch, head, 1, template, head_dim)
            strength = self._strength(z.shape[:3])
            estimate = self.solver.estimate(t, preference, z.to(dtype), strength, mask=allowed)
            assert estimate.weights is not None
            weights = F.dropout(estimate.weights.to(dtype), self.dropout, self.training)
        return expectation(weights, v.to(dtype)).to(z.dtype), estimate


def _mask_preferences(logs: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Log-preferences, -inf where masked; without any the mask itself, True = takes part."""
    if logs is None or mask is None:
        return mask if logs is None else logs
    return where(mask, logs, -torch.inf) if mask.dtype == torch.bool else logs + mask


def _split_preference(heads: _Heads) -> tuple[Tensor | None, Tensor | None]:
    """(takes part, preference): what `fenchel.dual` takes, up to a factor per row."""
    t, bias = heads.t, heads.bias
    allowed = logs = None
    if bias is not None:
        is_mask = bias.dtype == torch.bool
        allowed, logs = (bias, None) if is_mask else (bias != -torch.inf, bias)
    if heads.causal:
        rows, columns = (torch.arange(x.shape[2], device=t.device) for x in (heads.z, t))
        past = columns <= rows.unsqueeze(-1)
        allowed = past if allowed is None else allowed & past
    if logs is None or allowed is None:
        return allowed, None
    logs = where(allowed, logs.to(certificate_dtype(t.device)), 0.0)
    top = where(allowed, logs.detach(), -torch.inf).amax(-1, keepdim=True)
    return allowed, where(allowed, (logs - where(top != -torch.inf, top, 0.0)).exp(), 0.0)


# ---- checks


def _head_dim(embed_dim: int, num_heads: int) -> int:
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}; "
            "or pass form=HeadForm(head_dim=...)"
        )
    return embed_dim // num_heads


def _check_choices(solver: object, reliability: object) -> None:
    if not isinstance(solver, FirstOrder | SecondOrder | Exact):
        raise TypeError(f"solver must be FirstOrder(), SecondOrder() or Exact(), got {solver!r}")
    if not isinstance(reliability, Module):
        check_positive_number(reliability, "reliability", ", or a LearnedReliability(num_heads)")


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
    preference = PositionPreference(t5.n_heads, table.shape[0], distance, not t5.is_decoder)
    preference.table = Parameter(table.detach().clone())
    return preference
