"""What an audit counts of one attention call, on all texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status
from fenchel._solve import solve
from fenchel.bounds.query import query_bound
from fenchel.dual import estimate, first_order
from fenchel.lens.capture.calls import Call, masked_softmax
from fenchel.lens.capture.output_projections import Projection
from fenchel.lens.heads.datasets import Tokens
from fenchel.lens.heads.tallies import (
    BoundTally,
    DeviationTally,
    OffsetTally,
    PreferenceTally,
    SwitchTally,
    WeightTally,
    WhatIfTally,
)
from fenchel.regularizers import Shannon, Tsallis

BINS = 20
REACH = 16  # tokens to either side, of the mass by offset


class CountedCall:
    """One call, its weights once, and which of its queries count."""

    def __init__(
        self, call: Call, asking: Tokens, asked: Tokens, heads: Sequence[int] | None = None
    ) -> None:
        self.whole = call
        self.heads = list(range(call.heads)) if heads is None else list(heads)
        self.call = call if heads is None else call.select(heads)
        self.asking, self.asked = asking, asked
        self.mask = self.call.mask()  # (B, H, Q, n)
        self.scores = self.call.scores()
        self.weights = masked_softmax(self.scores)
        self.counts = self.mask.any(-1) & asking.real[:, None]  # (B, H, Q)
        self._check_finite()

    def _check_finite(self) -> None:
        """A NaN would pass for a row that sees nothing."""
        scores = ~self.scores.isfinite() & self.mask & self.counts.unsqueeze(-1)
        output = ~self.call.output.isfinite().all(-1).transpose(1, 2) & self.counts  # (B, H, Q)
        wrong = (scores.any(-1) | output).any(2).any(0)  # (H)
        if bool(wrong.any()):
            head = self.heads[int(wrong.nonzero()[0])]
            raise ValueError(
                f"attention is NaN or infinite in {self.call.kind} layer {self.call.layer}, head "
                f"{head}: the weights are damaged, or the precision is too low for them; use "
                "float32 or float64"
            )

    def layer_output(self, projection: Projection) -> Tensor:
        """Of all heads, chosen or not. (B, Q, width)"""
        return projection.apply(self.whole.output.double().transpose(1, 2))

    def weights_at(self, alpha: float | Tensor) -> Tensor:
        """The weights of entmax at this alpha, a number or (H, 1). (B, H, Q, n)"""
        scores = where(self.mask, self.scores, 0.0)
        return solve(scores, Tsallis(alpha), base=self.mask).weights

    def queries(self) -> Tensor:
        """How many count. (H)"""
        return self.counts.double().sum((0, 2))

    def visible_share(self, weights: Tensor) -> Tensor:
        """Links with a weight over the links that are possible. (B, H, Q, n) -> (B, H, Q)"""
        return (weights > 0).double().sum(-1) / self.mask.sum(-1).clamp_min(1)

    def total(self, values: Tensor) -> Tensor:
        """(B, H, Q) -> (H), over the queries that count."""
        return where(self.counts, values, 0.0).sum((0, 2))

    def histogram(self, shares: Tensor) -> Tensor:
        """(B, H, Q) in [0, 1] -> (H, BINS): how many queries in each."""
        place = (shares * BINS).long().clamp(0, BINS - 1)
        marks = torch.nn.functional.one_hot(place, BINS).double()
        return (marks * self.counts.unsqueeze(-1)).sum((0, 2))


def count_weights(counted: CountedCall) -> WeightTally:
    """Entropy, effective support, where the mass is, agreement of heads."""
    p = counted.weights
    entropy = -torch.xlogy(p, p).sum(-1)
    most = counted.mask.sum(-1).clamp_min(2).log()
    share = (entropy / most).clamp(0, 1)
    received = where(counted.counts.unsqueeze(-1), p, 0.0).sum(2)  # (B, H, n)
    first = _first(counted.asked.real)
    return WeightTally(
        queries=counted.queries(),
        entropy=counted.total(entropy),
        entropy_share=counted.total(share),
        entropy_share_histogram=counted.histogram(share),
        effective_support=counted.total(entropy.exp()),
        top_weight_histogram=counted.histogram(p.amax(-1)),
        mass_first=(received * first[:, None]).sum((0, 2)),
        mass_special=(received * counted.asked.special[:, None]).sum((0, 2)),
        mass_separator=(received * (counted.asked.special & ~first)[:, None]).sum((0, 2)),
        agreement=_agreement(counted),
    )


def count_offsets(counted: CountedCall) -> OffsetTally | None:
    """How far a head looks; None for cross-attention, whose keys are other tokens."""
    if counted.call.kind == "cross":
        return None
    p = where(counted.counts.unsqueeze(-1), counted.weights, 0.0).sum(0)  # (H, Q, n)
    distance = (p * offsets(p).abs()).sum((1, 2))
    return OffsetTally(counted.queries(), distance, sum_by_offset(p))


def _first(real: Tensor) -> Tensor:
    """True at the first real token. (B, n)"""
    return real & (real.cumsum(-1) == 1)


def _agreement(counted: CountedCall) -> Tensor:
    """Cosine of the weights of two heads, summed over queries. (H, H)"""
    p = counted.weights / counted.weights.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    p = where(counted.counts.unsqueeze(-1), p, 0.0)
    flat = p.transpose(0, 1).flatten(1)  # (H, B Q n)
    return flat @ flat.mT


def count_what_if(
    counted: CountedCall, alphas: tuple[float, ...], projection: Projection | None
) -> WhatIfTally:
    """Of every alpha: how far the head's and the layer's output would move, and the support."""
    _, values = counted.call.repeat_groups()
    output = counted.weights @ values
    chosen = None if projection is None else projection.select(counted.heads)
    layer = None
    if projection is not None:
        layer = _layer_square(counted, counted.layer_output(projection))
    return WhatIfTally(
        queries=counted.queries(),
        square=counted.total(output.norm(dim=-1).square()),
        by_alpha={
            f"{alpha:g}": _count_switch(counted, alpha, values, output, chosen) for alpha in alphas
        },
        layer_square=layer,
    )


def _count_switch(
    counted: CountedCall,
    alpha: float,
    values: Tensor,
    output: Tensor,
    projection: Projection | None,
) -> SwitchTally:
    """values (B, H, n, e); output (B, H, Q, e). projection: of the heads that are counted."""
    weights = counted.weights_at(alpha)
    moved = weights @ values - output  # (B, H, Q, e)
    size, length = moved.norm(dim=-1), output.norm(dim=-1)
    alone = together = None
    if projection is not None:
        alone = counted.total(((moved @ projection.grams()) * moved).sum(-1))
        whole = torch.einsum("bhqe,hew->bqw", moved, projection.weight)
        together = _layer_square(counted, whole)
    return SwitchTally(
        change=counted.total(size / length.clamp_min(1e-300)),
        square=counted.total(size.square()),
        support_size=counted.total((weights > 0).double().sum(-1)),
        kept=counted.total(counted.visible_share(weights)),
        layer_square=alone,
        layer_all=together,
    )


def _layer_square(counted: CountedCall, outputs: Tensor) -> Tensor:
    """(B, Q, width) -> the sum of squares over the queries that count, for every head. (H)"""
    return counted.total(outputs.square().sum(-1)[:, None].expand(counted.counts.shape))


def count_bounds(counted: CountedCall) -> BoundTally:
    """The certified constant of query -> output, text by text."""
    bounds = text_bounds(counted)
    texts = torch.full_like(bounds[0], len(bounds))
    return BoundTally(texts, bounds.sum(0), bounds.amax(0))


def text_bounds(counted: CountedCall) -> Tensor:
    """The certified constant of query -> output, with the keys of each text. (B, H)"""
    keys, values = counted.call.repeat_groups()
    temperature = Shannon(1 / counted.call.scaling)
    bounds = [
        query_bound(keys[text][:, real], values[text][:, real], temperature)
        for text, real in enumerate(counted.asked.real)
    ]
    return torch.stack(bounds)


def count_head_deviation(counted: CountedCall) -> DeviationTally:
    """How far attention is from the estimate that it approximates, in the space of the head's keys.

    Templates scaling k_i, evidence q, reliability 1, preference by the bias: the scores are
    <t_i, z> + log u_i, so ordinary attention is the first-order solution.
    """
    call, mask = counted.call, counted.mask
    keys, _ = call.repeat_groups()
    templates = (call.scaling * keys).unsqueeze(2)  # (B, H, 1, n, f)
    preference = None
    if call.bias is not None:
        bias = _bias(counted, call.bias)
        top = where(mask.any(-1, keepdim=True), bias.amax(-1, keepdim=True), 0.0)
        preference = (bias - top).exp()
    problem = (templates, preference, call.query.to(keys.dtype), 1.0)
    exact = estimate(*problem, mask=mask)
    apart = first_order(*problem, mask=mask).compare(exact)
    solved = counted.counts & (exact.status == int(Status.OK))

    def total(values: Tensor) -> Tensor:
        return where(solved & values.isfinite(), values, 0.0).sum((0, 2))

    count = solved.double().sum((0, 2))
    return DeviationTally(
        count, total(apart.multiplier), total(apart.mean), total(apart.mean_shift)
    )


def count_preference(counted: CountedCall) -> PreferenceTally | None:
    """The preference u ~ exp(bias) over keys that a position bias implies, before any content."""
    call = counted.call
    if call.bias is None or call.kind == "cross" or not _varies(call.bias):
        return None
    bias = _bias(counted, call.bias)  # (B, H, Q, n)
    u = masked_softmax(bias)
    pairs = counted.mask & counted.counts.unsqueeze(-1)
    return PreferenceTally(
        queries=counted.queries(),
        effective_support=counted.total((-torch.xlogy(u, u).sum(-1)).exp()),
        by_offset=sum_by_offset(where(pairs, bias, 0.0).sum(0)),
        pairs=sum_by_offset(pairs.double().sum(0)),
    )


def _bias(counted: CountedCall, bias: Tensor) -> Tensor:
    """-inf where hidden. (B, H, Q, n)"""
    return where(counted.mask, bias.double().expand_as(counted.scores), -torch.inf)


def _varies(bias: Tensor) -> bool:
    """Not only a mask in the guise of a bias: zero wherever it is finite."""
    finite = bias[bias.isfinite()]
    return bool((finite != 0).any())


def sum_by_offset(pairs: Tensor) -> Tensor:
    """(H, Q, n) -> (H, 2 REACH + 1): the sums over key - query = -REACH .. REACH."""
    offset = offsets(pairs)
    near = offset.abs() <= REACH
    sums = pairs.new_zeros(len(pairs), 2 * REACH + 1)
    return sums.index_add_(1, offset[near] + REACH, pairs[:, near])


def offsets(pairs: Tensor) -> Tensor:
    """key - query; where a cache comes first, queries are the last of the keys. (Q, n)"""
    queries, keys = pairs.shape[-2:]
    row = torch.arange(queries, device=pairs.device) + keys - queries
    return torch.arange(keys, device=pairs.device) - row[:, None]
