"""What an audit counts of an attention call: sums over queries, a number a head, so that texts can
be added in any chunks and forgotten.

Every tally is a tensor in float64 whose first axis is the head. `count` is the number of queries
that were counted; a mean is a sum over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from fenchel.regularizers import Shannon, Tsallis

BINS = 20
REACH = 16  # tokens to either side, of the mass by offset
Tallies = dict[str, Tensor]


def added(total: Tallies, more: Mapping[str, Tensor]) -> Tallies:
    """The sum, name by name; maxima where the name says so."""
    joined = dict(total)
    for name, value in more.items():
        if name not in joined:
            joined[name] = value
        elif name.rpartition("/")[2].startswith("largest_"):
            joined[name] = torch.maximum(joined[name], value)
        else:
            joined[name] = joined[name] + value
    return joined


class Counted:
    """One call, its weights once, and which of its queries count."""

    def __init__(
        self, call: Call, asking: Tokens, asked: Tokens, heads: Sequence[int] | None = None
    ) -> None:
        self.whole = call
        self.heads = list(range(call.heads)) if heads is None else list(heads)
        self.call = call if heads is None else call.select(heads)
        self.asking, self.asked = asking, asked
        self.seen = self.call.mask()  # (B, H, Q, n)
        self.scores = self.call.scores()
        self.weights = masked_softmax(self.scores)
        self.counts = self.seen.any(-1) & asking.real[:, None]  # (B, H, Q)
        self._check_finite()

    def _check_finite(self) -> None:
        """A NaN would pass for a row that sees nothing."""
        scores = ~self.scores.isfinite() & self.seen & self.counts.unsqueeze(-1)
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

    def switched(self, alpha: float | Tensor) -> Tensor:
        """The weights of entmax at this alpha, a number or (H, 1). (B, H, Q, n)"""
        scores = where(self.seen, self.scores, 0.0)
        return solve(scores, Tsallis(alpha), base=self.seen).weights

    def total(self, values: Tensor) -> Tensor:
        """(B, H, Q) -> (H), over the queries that count."""
        return where(self.counts, values, 0.0).sum((0, 2))

    def histogram(self, shares: Tensor) -> Tensor:
        """(B, H, Q) in [0, 1] -> (H, BINS): how many queries in each."""
        place = (shares * BINS).long().clamp(0, BINS - 1)
        marks = torch.nn.functional.one_hot(place, BINS).double()
        return (marks * self.counts.unsqueeze(-1)).sum((0, 2))


def weight_tallies(counted: Counted) -> Tallies:
    """Entropy, effective support, where the mass is, how far it reaches, agreement of heads."""
    p = counted.weights
    entropy = -torch.xlogy(p, p).sum(-1)
    most = counted.seen.sum(-1).clamp_min(2).log()
    share = (entropy / most).clamp(0, 1)
    received = where(counted.counts.unsqueeze(-1), p, 0.0).sum(2)  # (B, H, n)
    first = _first(counted.asked.real)
    made = {
        "entropy": counted.total(entropy),
        "entropy_share": counted.total(share),
        "entropy_share_histogram": counted.histogram(share),
        "effective_support": counted.total(entropy.exp()),
        "top_weight_histogram": counted.histogram(p.amax(-1)),
        "mass_first": (received * first[:, None]).sum((0, 2)),
        "mass_special": (received * counted.asked.special[:, None]).sum((0, 2)),
        "mass_separator": (received * (counted.asked.special & ~first)[:, None]).sum((0, 2)),
        "agreement": _agreement(counted),
    }
    if counted.call.kind != "cross":
        made |= _places(counted)
    return made


def _places(counted: Counted) -> Tallies:
    """Where queries and keys are the same tokens: how far, and the mass by key - query."""
    p = where(counted.counts.unsqueeze(-1), counted.weights, 0.0).sum(0)  # (H, Q, n)
    return {
        "distance": (p * offsets(p).abs()).sum((1, 2)),
        "mass_by_offset": by_offset(p),
    }


def _first(real: Tensor) -> Tensor:
    """True at the first real token. (B, n)"""
    return real & (real.cumsum(-1) == 1)


def _agreement(counted: Counted) -> Tensor:
    """Cosine of the weights of two heads, summed over queries. (H, H)"""
    p = counted.weights / counted.weights.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    p = where(counted.counts.unsqueeze(-1), p, 0.0)
    flat = p.transpose(0, 1).flatten(1)  # (H, B Q n)
    return flat @ flat.mT


def what_if_tallies(
    counted: Counted, alphas: tuple[float, ...], projection: Projection | None
) -> Tallies:
    """Of every alpha: how far the head's and the layer's output would move, and the support.

    change_2: the sum over queries of |y' - y| / |y|; square_2 and square: of |y' - y|^2 and |y|^2;
    layer_square_2, layer_all_2 and layer_square: the same of the layer's output, this head switched
    alone or with all the others.
    """
    _, values = counted.call.repeat_groups()
    output = counted.weights @ values
    length = output.norm(dim=-1)
    made = {"square": counted.total(length.square())}
    own = None if projection is None else projection.select(counted.heads)
    if projection is not None:
        made["layer_square"] = _layer_square(counted, counted.layer_output(projection))
    for alpha in alphas:
        weights = counted.switched(alpha)
        moved = weights @ values - output  # (B, H, Q, e)
        size, kept = moved.norm(dim=-1), (weights > 0).double().sum(-1)
        made[f"change_{alpha:g}"] = counted.total(size / length.clamp_min(1e-300))
        made[f"square_{alpha:g}"] = counted.total(size.square())
        made[f"support_{alpha:g}"] = counted.total(kept)
        made[f"kept_{alpha:g}"] = counted.total(kept / counted.seen.sum(-1).clamp_min(1))
        if own is not None:
            alone = ((moved @ own.grams()) * moved).sum(-1)
            made[f"layer_square_{alpha:g}"] = counted.total(alone)
            together = torch.einsum("bhqe,hew->bqw", moved, own.weight)
            made[f"layer_all_{alpha:g}"] = _layer_square(counted, together)
    return made


def _layer_square(counted: Counted, outputs: Tensor) -> Tensor:
    """(B, Q, width) -> the sum of squares over the queries that count, for every head. (H)"""
    return counted.total(outputs.square().sum(-1)[:, None].expand(counted.counts.shape))


def certificate_tallies(counted: Counted) -> Tallies:
    """The certified constant of query -> output, text by text: its sum, and the largest. (H)"""
    bounds = text_bounds(counted)
    return {
        "bound": bounds.sum(0),
        "largest_bound": bounds.amax(0),
        "texts": torch.full_like(bounds[0], len(bounds)),
    }


def text_bounds(counted: Counted) -> Tensor:
    """The certified constant of query -> output, with the keys of each text. (B, H)"""
    keys, values = counted.call.repeat_groups()
    temperature = Shannon(1 / counted.call.scaling)
    bounds = [
        query_bound(keys[text][:, real], values[text][:, real], temperature)
        for text, real in enumerate(counted.asked.real)
    ]
    return torch.stack(bounds)


def head_deviation_tallies(counted: Counted) -> Tallies:
    """How far attention is from the estimate that it approximates, in the head's own space.

    Templates scaling k_i, evidence q, reliability 1, preference by the bias: the scores are
    <t_i, z> + log u_i, so ordinary attention is the first-order solution.
    """
    call = counted.call
    keys, _ = call.repeat_groups()
    templates = (call.scaling * keys).unsqueeze(2)  # (B, H, 1, n, f)
    seen, preference = counted.seen, None
    if call.bias is not None:
        bias = _bias(counted, call.bias)
        top = where(seen.any(-1, keepdim=True), bias.amax(-1, keepdim=True), 0.0)
        preference = (bias - top).exp()
    problem = (templates, preference, call.query.to(keys.dtype), 1.0)
    exact = estimate(*problem, mask=seen)
    off = first_order(*problem, mask=seen).compare(exact)
    solved = counted.counts & (exact.status == int(Status.OK))
    made = {"head_deviation_count": solved.double().sum((0, 2))}
    for name in ("multiplier", "mean", "mean_shift"):
        values = where(solved & getattr(off, name).isfinite(), getattr(off, name), 0.0)
        made[f"head_deviation_{name}"] = values.sum((0, 2))
    return made


def preference_tallies(counted: Counted) -> Tallies:
    """The preference u ~ exp(bias) over keys that a position bias implies, before any content.

    preference_support: the sum over queries of the exponential of its entropy. by offset: the sum
    of the bias over pairs at key - query, and how many there were.
    """
    call = counted.call
    if call.bias is None or call.kind == "cross" or not _varies(call.bias):
        return {}
    bias = _bias(counted, call.bias)  # (B, H, Q, n)
    u = masked_softmax(bias)
    support = (-torch.xlogy(u, u).sum(-1)).exp()
    pairs = counted.seen & counted.counts.unsqueeze(-1)
    return {
        "preference_support": counted.total(support),
        "preference_by_offset": by_offset(where(pairs, bias, 0.0).sum(0)),
        "preference_pairs": by_offset(pairs.double().sum(0)),
    }


def _bias(counted: Counted, bias: Tensor) -> Tensor:
    """-inf where not seen. (B, H, Q, n)"""
    return where(counted.seen, bias.double().expand_as(counted.scores), -torch.inf)


def _varies(bias: Tensor) -> bool:
    """Not only a mask in the guise of a bias: zero wherever it is finite."""
    finite = bias[bias.isfinite()]
    return bool((finite != 0).any())


def by_offset(pairs: Tensor) -> Tensor:
    """(H, Q, n) -> (H, 2 REACH + 1): the sums over key - query = -REACH .. REACH."""
    apart = offsets(pairs)
    near = apart.abs() <= REACH
    made = pairs.new_zeros(len(pairs), 2 * REACH + 1)
    return made.index_add_(1, apart[near] + REACH, pairs[:, near])


def offsets(pairs: Tensor) -> Tensor:
    """key - query; where a cache comes first, queries are the last of the keys. (Q, n)"""
    queries, keys = pairs.shape[-2:]
    row = torch.arange(queries, device=pairs.device) + keys - queries
    return torch.arange(keys, device=pairs.device) - row[:, None]
