"""What an audit counts of an attention call: sums over queries, a number a head, so that texts can
be added in any chunks and forgotten.

Every tally is a tensor in float64 whose first axis is the head. `count` is the number of queries
that were counted; a mean is a sum over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel.certificates.query import query_bound
from fenchel.dual import estimate, first_order
from fenchel.lens.capture import Call
from fenchel.regularizers import Shannon, Tsallis
from fenchel.solution import Status
from fenchel.solve import solve

BINS = 20
Tallies = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Of the sequence that asks or of the one that is asked: real (B, n), special (B, n)."""

    real: Tensor
    special: Tensor


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

    def __init__(self, call: Call, asking: Tokens, asked: Tokens) -> None:
        self.call, self.asking, self.asked = call, asking, asked
        self.scores = call.scores()
        self.weights = call.weights()  # (B, H, Q, n)
        live = self.scores.amax(-1) > -torch.inf
        self.counts = live & asking.real[:, None]  # (B, H, Q)

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
    p, call = counted.weights, counted.call
    entropy = -torch.xlogy(p, p).sum(-1)
    most = counted.scores.isfinite().sum(-1).clamp_min(2).log()
    share = (entropy / most).clamp(0, 1)
    made = {
        "count": counted.counts.double().sum((0, 2)),
        "entropy": counted.total(entropy),
        "entropy_share": counted.total(share),
        "entropy_share_histogram": counted.histogram(share),
        "effective_support": counted.total(entropy.exp()),
        "top_weight_histogram": counted.histogram(p.amax(-1)),
        "mass_first": counted.total(_at(p, _first(counted.asked.real))),
        "mass_special": counted.total((p * counted.asked.special[:, None, None]).sum(-1)),
        "agreement": _agreement(counted),
    }
    if call.kind != "cross":
        made |= _places(counted)
    return made


def _places(counted: Counted) -> Tallies:
    """Where queries and keys are the same tokens: self, neighbours, distance."""
    p = counted.weights
    queries, keys = p.shape[-2:]
    row = torch.arange(queries, device=p.device) + keys - queries  # a cache comes first
    apart = (torch.arange(keys, device=p.device) - row[:, None]).double()  # (Q, n)
    made = {"distance": counted.total((p * apart.abs()).sum(-1))}
    for name, offset in (("self", 0), ("previous", -1), ("next", 1)):
        made[f"mass_{name}"] = counted.total((p * (apart == offset)).sum(-1))
    return made


def _first(real: Tensor) -> Tensor:
    """The place of the first real token. (B)"""
    return real.to(torch.int8).argmax(-1)


def _at(p: Tensor, place: Tensor) -> Tensor:
    """(B, H, Q, n) at one key for each text. (B, H, Q)"""
    index = place[:, None, None, None].expand(*p.shape[:3], 1)
    return p.gather(-1, index).squeeze(-1)


def _agreement(counted: Counted) -> Tensor:
    """Cosine of the weights of two heads, summed over queries. (H, H)"""
    p = counted.weights / counted.weights.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    p = where(counted.counts.unsqueeze(-1), p, 0.0)
    flat = p.transpose(0, 1).flatten(1)  # (H, B Q n)
    return flat @ flat.mT


def what_if_tallies(counted: Counted, alphas: tuple[float, ...]) -> Tallies:
    """Of every alpha: how far a head's output would move, relative to its length, and its support.

    change_2: the sum over queries of |y' - y| / |y|; square_2 and square: of |y' - y|^2 and |y|^2.
    """
    _, values = counted.call.repeated()
    output = counted.weights @ values
    length = output.norm(dim=-1)
    made = {"square": counted.total(length.square())}
    scores = where(counted.scores.isfinite(), counted.scores, 0.0)
    for alpha in alphas:
        weights = solve(scores, Tsallis(alpha), base=counted.scores.isfinite()).weights
        moved = (weights @ values - output).norm(dim=-1)
        made[f"change_{alpha:g}"] = counted.total(moved / length.clamp_min(1e-300))
        made[f"square_{alpha:g}"] = counted.total(moved.square())
        made[f"support_{alpha:g}"] = counted.total((weights > 0).double().sum(-1))
    return made


def certificate_tallies(counted: Counted) -> Tallies:
    """The certified constant of query -> output, text by text: its sum, and the largest. (H)"""
    keys, values = counted.call.repeated()
    real = counted.asked.real
    bounds = []
    for text in range(len(keys)):
        chosen = real[text]
        regularizer = Shannon(1 / counted.call.scaling)
        bounds.append(query_bound(keys[text][:, chosen], values[text][:, chosen], regularizer))
    stacked = torch.stack(bounds)  # (B, H)
    return {
        "bound": stacked.sum(0),
        "largest_bound": stacked.amax(0),
        "texts": torch.full_like(stacked[0], len(stacked)),
    }


def head_deviation_tallies(counted: Counted) -> Tallies:
    """How far attention is from the estimate that it approximates, in the head's own space.

    Templates scaling k_i, evidence q, reliability 1, preference by the bias: the scores are
    <t_i, z> + log u_i, so ordinary attention is the first-order solution.
    """
    call = counted.call
    keys, _ = call.repeated()
    templates = (call.scaling * keys).unsqueeze(2)  # (B, H, 1, n, f)
    seen, preference = counted.scores.isfinite(), None
    if call.bias is not None:
        bias = where(seen, call.bias.double().expand_as(counted.scores), -torch.inf)
        top = where(seen.any(-1, keepdim=True), bias.amax(-1, keepdim=True), 0.0)
        preference = (bias - top).exp()
    problem = (templates, preference, call.query.to(keys.dtype), 1.0)
    exact = estimate(*problem, mask=seen)
    off = first_order(*problem, mask=seen).compare(exact)
    solved = counted.counts & (exact.status == int(Status.OK))
    made = {"deviation_count": solved.double().sum((0, 2))}
    for name in ("multiplier", "mean", "mean_shift"):
        values = where(solved & getattr(off, name).isfinite(), getattr(off, name), 0.0)
        made[f"deviation_{name}"] = values.sum((0, 2))
    return made
