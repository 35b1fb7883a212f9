"""What an audit learns of a head on a few texts: the Fisher information of its weights, and how far
its output moves with its query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel.lens.heads.counting import CountedCall, text_bounds
from fenchel.lens.heads.tallies import FisherTally, LocalTally

_ENTRIES = 2**24  # numbers of the Jacobians that are held at once


def count_fisher(counted: CountedCall) -> FisherTally:
    """The Fisher information of p = softmax(scaling K q), summed over queries.

    In the scores its trace is 1 - |p|^2. In the query it is scaling^2 Cov_p(k), (H, f, f): which
    directions of a query change whom it looks at.
    """
    p = where(counted.counts.unsqueeze(-1), counted.weights, 0.0)
    keys, _ = counted.call.repeat_groups()
    received = p.sum(2)  # (B, H, n)
    means = p @ keys  # (B, H, Q, f)
    second = (keys * received.unsqueeze(-1)).mT @ keys
    return FisherTally(
        queries=counted.queries(),
        scores=counted.total(1 - p.square().sum(-1)),
        query=(second - means.mT @ means).sum(0) * counted.call.scaling**2,
    )


def count_local(counted: CountedCall) -> LocalTally:
    """The operator norm of the Jacobian of query -> output at the queries of the texts."""
    keys, values = counted.call.repeat_groups()
    norms = torch.stack(
        [
            _norms(counted.weights[text], keys[text], values[text], counted.call.scaling)
            for text in range(len(keys))
        ]
    )  # (B, H, Q)
    norms = where(counted.counts, norms, 0.0)
    largest = norms.amax(-1)  # (B, H)
    bounds = text_bounds(counted)
    share = where(bounds > 0, largest / where(bounds > 0, bounds, 1.0), 0.0)
    return LocalTally(
        queries=counted.queries(),
        texts=torch.full_like(share[0], len(share)),
        constant=norms.sum((0, 2)),
        share=share.sum(0),
        largest=largest.amax(0),
    )


def _norms(weights: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """|scaling Cov_p(v, k)| for every query. weights (H, Q, n) -> (H, Q)"""
    pairs = (values.unsqueeze(-1) * keys.unsqueeze(-2)).flatten(-2)  # (H, n, e f)
    sizes = (values.shape[-1], keys.shape[-1])
    norms = []
    for p in weights.split(max(1, _ENTRIES // (len(keys) * math.prod(sizes))), dim=1):
        second = (p @ pairs).unflatten(-1, sizes)  # (H, Q, e f) -> (H, Q, e, f)
        jacobian = scaling * (second - (p @ values).unsqueeze(-1) * (p @ keys).unsqueeze(-2))
        if sizes[0] < sizes[1]:
            jacobian = jacobian.mT
        top: Tensor = torch.linalg.eigvalsh(jacobian.mT @ jacobian)[..., -1]
        norms.append(top.clamp_min(0).sqrt())
    return torch.cat(norms, dim=1)
