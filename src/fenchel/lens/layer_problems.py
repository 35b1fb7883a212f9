"""Every attention layer of a model as an estimation problem.

The scores of a head are sigma <K x_i + b_K, Q y_k + b_Q> + bias_ik; sigma is 1 / sqrt(d') in BERT
and 1 in T5. With templates t_i = c x_i, the inputs of the key projection, and

    reliability z_k = (sigma / c) K^T (Q y_k + b_Q),     u_ik proportional to exp(bias_ik),

they are <t_i, reliability z_k> + log u_ik but for constants in i: <b_K, .> is one. So `first_order`
is the layer itself, and `estimate` the problem that it approximates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import certificate_dtype, where
from fenchel.dual import Estimate, estimate, first_order
from fenchel.lens.capture.calls import Call, capture_attentions
from fenchel.lens.families import Attention, Kind, find_attentions
from fenchel.lens.inputs import Batch


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """The estimation problems of one layer, one for each sentence, head and query; float64.

    templates (B, 1, 1, n, d): shared by heads and queries. preference (1 or B, H, Q, n), or None
    for an even one. evidence (B, H, Q, d). mask (1 or B, 1, 1 or Q, n): True = may be seen.
    """

    templates: Tensor
    preference: Tensor | None
    evidence: Tensor
    mask: Tensor
    reliability: float

    def exact(self) -> Estimate:
        return estimate(*self._operands(), mask=self.mask)

    def first_order(self) -> Estimate:
        """The layer itself: `weights` are the model's attention."""
        return first_order(*self._operands(), mask=self.mask)

    def _operands(self) -> tuple[Tensor, Tensor | None, Tensor, float]:
        return self.templates, self.preference, self.evidence, self.reliability

    def reduce(self) -> LayerProblem:
        """The same in n + 1 coordinates, where they are fewer: the span of the templates, and what
        of the evidence is orthogonal to it, which passes into every multiplier unchanged.

        An isometry, so that lengths of multipliers, means and their differences stay.
        """
        n, d = self.templates.shape[-2:]
        if n + 1 >= d:
            return self
        axes, lower = torch.linalg.qr(self.templates.mT)  # (B, 1, 1, d, n), (B, 1, 1, n, n)
        inside = self.evidence @ axes[:, 0]
        square = self.evidence.square().sum(-1, keepdim=True)
        outside = (square - inside.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
        templates = torch.nn.functional.pad(lower.mT, (0, 1))
        return replace(self, templates=templates, evidence=torch.cat([inside, outside], -1))

    def parameter(self) -> Tensor:
        """reliability |Sigma z| / |z|, Sigma the covariance of the templates under u. (B, H, Q)

        The deviation of the multiplier to leading order in the templates and the scores.
        """
        preference = self._normalise_preference()
        scores = self.evidence @ self.templates[:, 0].mT  # (B, H, Q, n)
        centred = preference * (scores - (preference * scores).sum(-1, keepdim=True))
        moved = (centred @ self.templates[:, 0]).norm(dim=-1)
        length = self.evidence.norm(dim=-1)
        parameter: Tensor = self.reliability * moved / where(length > 0, length, 1.0)
        return parameter

    def _normalise_preference(self) -> Tensor:
        even = self.evidence.new_ones(())
        mass = where(self.mask, even if self.preference is None else self.preference, 0.0)
        return mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)


def problems(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    attention: Kind = "encoder",
    reliability: float = 1.0,
    scaling: float | None = None,
) -> list[LayerProblem]:
    """The estimation problem of each layer, whose first-order solution is the model's attention.

    Arguments as of `deviation`; all sentences in one pass of the model, so that memory grows with
    their number.
    """
    attentions = find_attentions(model, attention)  # Deciphering Attention, eq. 19
    batch = Batch.of(model, inputs, attention)
    return list(layer_problems(model, attentions, batch, reliability, scaling))


def layer_problems(
    model: Any,
    attentions: list[Attention],
    batch: Batch,
    reliability: float,
    scaling: float | None,
) -> Iterator[LayerProblem]:
    """After one pass of the model; made one at a time, since evidence is large."""
    template_scale = check_scaling(scaling, attentions[0])
    calls = capture_attentions(model, attentions, lambda: batch.run(model))
    for attention, call in zip(attentions, calls, strict=True):
        yield _problem(attention, call, reliability, template_scale)


def check_scaling(scaling: float | None, attention: Attention) -> float:
    """None: 1 / sqrt(d'), d' the size of a head."""
    if scaling is None:
        return 1 / math.sqrt(attention.head_size)
    if isinstance(scaling, bool) or not isinstance(scaling, int | float):
        raise TypeError(f"scaling must be a number or None, got {type(scaling).__name__}")
    if not 0 < scaling < float("inf"):
        raise ValueError(f"scaling must be finite and > 0, got {scaling}")
    return float(scaling)


def _problem(
    attention: Attention, call: Call, reliability: float, template_scale: float
) -> LayerProblem:
    tokens = call.tokens
    assert tokens is not None  # `capture_attentions` records them
    inner = certificate_dtype(tokens.keys.device)
    query, key = (
        attention.per_head(projection.weight.detach().to(inner))
        for projection in (attention.query, attention.key)
    )
    # Projected anew in float64: the model's queries are rounded to its own dtype.
    queries = torch.einsum("hfd,bqd->bhqf", query, tokens.queries.to(inner))
    if attention.query.bias is not None:
        offset = attention.per_head(attention.query.bias.detach().to(inner))
        queries = queries + offset.unsqueeze(-2)  # (H, 1, f)
    strength = attention.scaling / (template_scale * reliability)
    return LayerProblem(
        templates=(template_scale * tokens.keys.to(inner))[:, None, None],
        preference=_preference(call),
        evidence=strength * (queries @ key),  # (B, H, Q, f) @ (H, f, d)
        mask=_mask(call),
        reliability=reliability,
    )


def _preference(call: Call) -> Tensor | None:
    """From the position bias; that of cross-attention is zero. (1, H, Q, n)"""
    if call.bias is None or call.kind == "cross":
        return None
    bias = call.bias.detach().to(certificate_dtype(call.bias.device))
    return (bias - bias.amax(-1, keepdim=True)).exp()


def _mask(call: Call) -> Tensor:
    """True = may be seen; without a mask, everything. (1 or B, 1, 1 or Q, n)"""
    if call.visible is not None:
        return call.visible
    queries, keys = call.query.shape[2], call.key.shape[2]
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.query.device)
