"""Attention by transport as a module: similar templates share what one of them is preferred for."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.init import xavier_uniform_, zeros_

from fenchel._numerics import check_positive, check_tensor, check_whole
from fenchel.dual.transport import dot_product_transport
from fenchel.nn.heads import join_heads, split_heads
from fenchel.nn.solvers import Exact, FirstOrder

_FIRST_ORDER = FirstOrder()


class TransportAttention(Module):
    """The output projection of concat_h(sum_t p_t values_h,t); in every head p solves, with
    templates t, their preference u and evidence z,

        min over p of  reliability / 2 |b - sum_t p_t t|^2 + W_gamma(p, u),
        W_gamma(p, u) = min over plans X with row sums p and column sums u of  <M, X> - gamma H(X),

    where M[t, j] = C - <t, t_j> is the cost, H the entropy, and the target b = m + z, m the mean of
    argmin_p W_gamma(p, u), which is what no evidence gives (`fenchel.dual.transport`).
    By default to first order in the reliability, as in the paper: p = sum_j u_j softmax_t(
    <t, reliability z + t_j> / gamma), the average over templates j of attentions whose query is
    moved by t_j; N times the work of attention, in memory linear in N.

    Weights are never whole in memory, so the output is a tensor alone, and there is neither dropout
    of weights (N independent ones would average out) nor a mask for each query.

    >>> layer = TransportAttention(16, 4)
    >>> image, other = torch.randn(2, 9, 16), torch.randn(2, 9, 16)    # of the same classes
    >>> query = torch.zeros(2, 1, 16)                                  # (batch, query, width)
    >>> layer(query, image, extra=other).shape
    torch.Size([2, 1, 16])

    embed_dim, num_heads: width of the model, and into how many heads it is cut.
    gamma: of the entropy of the plan; None: sqrt(embed_dim / num_heads).
    reliability: of the evidence, which is the projected query: a number > 0, or a module whose
        `forward()` returns (head, 1), such as `LearnedReliability(num_heads)`.
    solver: `FirstOrder()`, or `Exact()`: in float64, and slower.
    bias: whether projections have one.
    """

    gamma: float

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        gamma: float | None = None,
        reliability: float | Module = 1.0,
        solver: FirstOrder | Exact = _FIRST_ORDER,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_whole(embed_dim, "embed_dim", 1)
        check_whole(num_heads, "num_heads", 1)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.gamma = math.sqrt(self.head_dim) if gamma is None else _positive(gamma, "gamma")
        _check_solver(solver)
        self.solver = solver
        self.query_proj = Linear(embed_dim, embed_dim, bias=bias)
        self.template_proj = Linear(embed_dim, embed_dim, bias=bias)
        self.value_proj = Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias)
        self.reliability: float | Module = (
            reliability
            if isinstance(reliability, Module)
            else _positive(reliability, "reliability", ", or a LearnedReliability(num_heads)")
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's multi-head attention: Xavier's weights, no bias."""
        for layer in (self.query_proj, self.template_proj, self.value_proj, self.out_proj):
            xavier_uniform_(layer.weight)
            if layer.bias is not None:
                zeros_(layer.bias)

    def forward(
        self,
        query: Tensor,
        templates: Tensor,
        *,
        extra: Tensor | None = None,
        partner: Tensor | None = None,
        preference: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, query, embed_dim), of query (batch, query, embed_dim), templates (batch, N, ...).

        extra: (batch, N', embed_dim) templates that join for this call, such as those of another
            image of the same class, in half of the steps of training (the paper's OT-ViT).
        partner: (batch), places in the batch. As extra = templates[partner], projected only once.
        preference: (batch, N + N') >= 0, of the templates, then of the extra ones. None: even over
            all, as in the paper, where both make up the set T. With zeros for the extra ones they
            get no more than what similar templates share with them.
        key_padding_mask: bool (batch, N + N') with True = **ignored**, as in torch's modules. A
            batch entry in which all are gets zeros, then the output projection.
        """
        self._check(query, templates, extra)
        if partner is not None:
            _check_partner(partner, extra, len(templates))
            if key_padding_mask is not None:  # what one sees of the other is not what that one sees
                extra, partner = templates[partner], None
        if extra is not None:
            templates = torch.cat([templates, extra], 1)
        batch, count = len(templates), templates.shape[1] * (1 if partner is None else 2)
        mask = _lay_out(key_padding_mask, "key_padding_mask", batch, count)
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"key_padding_mask must be bool, True = ignored, got {mask.dtype}")
        if mask is not None:  # what is ignored may hold anything
            lost = mask.reshape(batch, count, 1)
            templates = torch.where(lost, templates.new_zeros(()), templates)
        evidence = split_heads(
            self.query_proj(query), self.num_heads
        )  # (batch, head, query, head_dim)
        # (batch, head, 1, N, head_dim): all queries share them
        keys, values = (
            split_heads(_append_partner(project(templates), partner), self.num_heads).unsqueeze(2)
            for project in (self.template_proj, self.value_proj)
        )
        share = _lay_out(preference, "preference", batch, count)
        heads = self._estimate(keys, values, share, evidence, None if mask is None else ~mask)
        output: Tensor = self.out_proj(join_heads(heads.to(query.dtype)))
        return output

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        parts.append(f"gamma={self.gamma:g}")
        if not isinstance(self.reliability, Module):
            parts.append(f"reliability={self.reliability:g}")
        return ", ".join([*parts, f"solver={self.solver}"])

    def _estimate(
        self,
        keys: Tensor,
        values: Tensor,
        preference: Tensor | None,
        evidence: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """(batch, head, query, head_dim)"""
        _check_solver(self.solver)
        strength = (self._strength(), self.gamma)
        if isinstance(self.solver, FirstOrder):
            return dot_product_transport(
                keys, preference, evidence, *strength, mask=mask, values=values
            )
        problem = (keys, preference, None, evidence, *strength)
        weights = self.solver.transport(*problem, mask=mask).weights
        assert weights is not None
        return (weights.unsqueeze(-2) @ values.to(weights.dtype)).squeeze(-2)

    def _strength(self) -> float | Tensor:
        """A number, or (head, 1): the same for all queries."""
        if not isinstance(self.reliability, Module):
            return self.reliability
        strength: Tensor = self.reliability()
        if strength.shape != (self.num_heads, 1):
            raise ValueError(
                f"reliability must return (head, 1) = {(self.num_heads, 1)}, got shape "
                f"{tuple(strength.shape)}"
            )
        return strength

    def _check(self, query: Tensor, templates: Tensor, extra: Tensor | None) -> None:
        named = {"query": query, "templates": templates}
        if extra is not None:
            named["extra"] = extra
        for name, x in named.items():
            check_tensor(x, name)
            if x.dim() != 3 or x.shape[-1] != self.embed_dim or x.shape[0] != query.shape[0]:
                raise ValueError(
                    f"{name} must be (batch, token, {self.embed_dim}) with the batch of the "
                    f"query, got {tuple(x.shape)} and a query {tuple(query.shape)}"
                )
        if templates.shape[1] == 0:
            raise ValueError("templates must hold at least one token")


def _check_solver(solver: object) -> None:
    if not isinstance(solver, FirstOrder | Exact):
        raise TypeError(f"solver must be FirstOrder() or Exact() for transport, got {solver!r}")


def _check_partner(partner: Tensor, extra: Tensor | None, batch: int) -> None:
    check_tensor(partner, "partner")
    if extra is not None:
        raise ValueError("give extra or partner, not both: partner stands for templates[partner]")
    if partner.shape != (batch,) or partner.dtype != torch.int64:
        raise ValueError(
            f"partner must be int64 (batch) = {(batch,)}, places in the batch, got {partner.dtype} "
            f"{tuple(partner.shape)}"
        )


def _append_partner(x: Tensor, partner: Tensor | None) -> Tensor:
    """(batch, N, width) -> (batch, 2 N, width), those of the partner last"""
    return x if partner is None else torch.cat([x, x[partner]], 1)


def _lay_out(x: Tensor | None, name: str, batch: int, count: int) -> Tensor | None:
    """(batch, N) -> (batch, 1, 1, N)"""
    if x is None:
        return None
    check_tensor(x, name)
    if x.shape != (batch, count):
        raise ValueError(
            f"{name} must be (batch, N) = {(batch, count)}, extra templates included, "
            f"got {tuple(x.shape)}"
        )
    return x.reshape(batch, 1, 1, count)


def _positive(value: float, name: str, other: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number{other}, got {type(value).__name__}")
    check_positive(value, name)
    return float(value)
