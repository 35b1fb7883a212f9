"""How fast a whole self-attention X -> Y can change, X (n, d): all tokens are queries and keys.

**Dot products, tokens in a ball.** Scores <W_q x_i + b, W_k x_j> / tau, values W_v x_j, |x_i| <= R,
A = W_k' W_q, and u_i = W_k'(W_q x_i + b) / tau with |u_i| <= g = (|A| R + |W_k' b|) / tau. Then

    dY_i = W_v [ sum_j p_ij (dx_j + (x_j - m_i) <u_i, dx_j>) ]  +  W_v Cov_i(x) A / tau dx_i.

For a unit vector a and y_j = <a, x_j - m_i>, whose mean under p_i is zero, the bracket is
E <a + y u_i, dx> <= sqrt(1 + |u_i|^2 Var y) sqrt(E |dx|^2), and Var y <= R^2. Scores of one row
differ by at most 2 g R, so p_ij <= 1 / (1 + (n - 1) e^(-2 g R)) and sum_i p_ij <= N, n times that:

    |dY| <= |W_v| [ sqrt(N (1 + g^2 R^2)) + |A| R^2 / tau ] |dX|                       (l2)

and, with the longest token as the norm, N = 1. Nothing holds on all of R^d: with dot products
self-attention is not Lipschitz there (Kim, Papamakarios and Mnih, 2021).

**Distances, everywhere.** Scores -|z_i - z_j|^2 / tau, z = W x, values V z_j (the same projection
for queries, keys and values). With r_ij = |z_i - z_j|^2 / tau and r_ii = 0,

    E_i r <= w(n) := W((n - 1) / e), Lambert's function,

since with p_ii = p the entropy gives E_i r = H(p_i) + log p <= (1 - p) log((n - 1) p / (1 - p)),
whose maximum over p is w(n). Hence Var_i and E_i |z - z_i|^2 are at most tau w(n). For g_i = E_i z,

    dg_i = E_i dz + 2 / tau Cov_i(z) dz_i - 2 / tau sum_j p_ij (z_j - m_i) <z_j - z_i, dz_j>.

The last sum is at most 2 / tau sqrt(tau w) sqrt(sum_j p_ij |z_j - z_i|^2 |dz_j|^2), and
p_ij r_ij <= r e^-r / (1 + e^-r) <= w(2); and p_ij <= p_ii, so a column sums to (n + 1) / 2 at most:

    |dg| <= [ sqrt((n + 1) / 2) + 2 w(n) + 2 sqrt((n - 1) w(2) w(n)) ] |dz|            (l2)
    |dg| <= [ 1 + 4 w(n) ] |dz|                                                   (tokens)

whatever the temperature, times |V| |W|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_positive, check_tensor, check_whole
from fenchel.bounds.bound import Bound
from fenchel.bounds.domain import Ball, Everywhere
from fenchel.bounds.maps import Guesses, MapTrials, TrialStart, VectorMap
from fenchel.bounds.norms import LongestToken, VectorNorm, check_token_norm
from fenchel.scores import negative_squared_distance


@dataclass(frozen=True, eq=False)
class Head:
    """One head: scores <query x_i + query_bias, key x_j> / temperature, values value x_j + bias.

    query, key (m, d), value (e, d). A bias of the keys moves all scores of a row alike: leave it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    temperature: float
    query_bias: Tensor | None = None
    value_bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query", "key", "value"):
            matrix = getattr(self, name)
            check_tensor(matrix, name)
            if matrix.dim() != 2 or not bool(matrix.isfinite().all()):
                raise ValueError(f"{name} must be a finite matrix, got {tuple(matrix.shape)}")
        widths = [self.query.shape[1], self.key.shape[1], self.value.shape[1]]
        if len(set(widths)) > 1 or self.query.shape[0] != self.key.shape[0]:
            shapes = [tuple(x.shape) for x in (self.query, self.key, self.value)]
            raise ValueError(f"query (m, d), key (m, d) and value (e, d) do not fit: {shapes}")
        for name in ("query", "value"):
            _check_bias(getattr(self, f"{name}_bias"), f"{name}_bias", len(getattr(self, name)))
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, int | float):
            kind = type(self.temperature).__name__
            raise TypeError(f"temperature must be a number, got {kind}; softmax only, use .item()")
        check_positive(self.temperature, "temperature")
        for name in ("query", "key", "value", "query_bias", "value_bias"):
            matrix = getattr(self, name)
            object.__setattr__(self, name, None if matrix is None else matrix.detach())

    def bound(self, tokens: int, radius: float, norm: VectorNorm = 2.0) -> float:
        form = self.key.mT.double() @ self.query.double()  # A
        pull = spectral(form) * radius
        if self.query_bias is not None:
            pull += float((self.key.mT.double() @ self.query_bias.double()).norm())
        reach = pull / self.temperature * radius  # g R
        often = tokens / (1 + (tokens - 1) * math.exp(-2 * reach)) if norm == 2 else 1.0
        as_query = spectral(form) * radius * radius / self.temperature
        return spectral(self.value) * (math.sqrt(often) * math.hypot(1, reach) + as_query)

    def output(self, x: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, e)"""
        query, key, value = (m.to(x) for m in (self.query, self.key, self.value))
        queries = x @ query.mT
        if self.query_bias is not None:
            queries = queries + self.query_bias.to(x)
        weights = (queries @ (x @ key.mT).mT / self.temperature).softmax(-1)
        output = weights @ (x @ value.mT)
        return output if self.value_bias is None else output + self.value_bias.to(x)

    def reach(self, radius: float) -> float:
        """No output is longer, for tokens within the radius."""
        return spectral(self.value) * radius + size_of(self.value_bias)


def self_attention_lipschitz(
    heads: Head | Sequence[Head],
    tokens: int,
    radius: float | None,
    *,
    output: Tensor | None = None,
    output_bias: Tensor | None = None,
    norm: VectorNorm = 2.0,
) -> Bound:
    """Of X -> Y for X (tokens, d) with every token within `radius`.

    Without masks: for `LongestToken()` the bound holds under any mask, in l2 it does not. n queries
    that all see one key alone have the constant sqrt(n), whatever the scores.

    heads: one, or all of a multi-head attention, joined and multiplied by `output` (e, sum of the
    heads' sizes), then `output_bias` (e).
    norm: 2, of all coordinates together, or `LongestToken()`.

    >>> eye = torch.eye(2)
    >>> self_attention_lipschitz(Head(eye, eye, eye, temperature=1e9), 8, radius=1.0).value < 1.0001
    True
    """
    if isinstance(heads, torch.nn.Module):
        raise TypeError("heads must be Heads; heads_of(attention) makes them of torch's module")
    heads = [heads] if isinstance(heads, Head) else list(heads)
    check_whole(tokens, "tokens", 1)
    check_token_norm(norm)
    if not heads:
        raise ValueError("heads must not be empty")
    if radius is None or not 0 < radius < math.inf:
        raise ValueError(
            f"radius must be finite and > 0, got {radius}: with dot products self-attention is not "
            "Lipschitz on all of R^d; give the largest token length (after a layer norm with "
            "weight w and bias b at most sqrt(d) max|w| + |b|), or use gaussian_attention_lipschitz"
        )
    single = [head.bound(tokens, radius, norm) for head in heads]
    bound, reach = _bound_and_reach(heads, single, radius, output)
    _check_bias(output_bias, "output_bias", _width(heads) if output is None else len(output))
    reach += size_of(output_bias)

    def function(x: Tensor) -> Tensor:
        y = torch.cat([head.output(x) for head in heads], -1)
        if output is not None:
            y = y @ output.to(x).mT
        return y if output_bias is None else y + output_bias.to(x)

    shape, ball = (tokens, heads[0].query.shape[1]), Ball(float(radius))
    guesses = _clusters(shape, ball) if norm == 2 else None
    trials = MapTrials(VectorMap(function, shape, ball, norm, reach), TrialStart(radius, guesses))
    assumptions = (f"{ball}", f"{tokens} tokens", "softmax of dot products, these matrices")
    return Bound("self-attention", bound, norm, assumptions, trials)


def _bound_and_reach(
    heads: Sequence[Head], single: Sequence[float], radius: float, output: Tensor | None
) -> tuple[float, float]:
    """Of all heads together, whose single bounds are given, after the output matrix."""
    bound = math.hypot(*single)
    reach = math.hypot(*(head.reach(radius) for head in heads))
    if output is None:
        return bound, reach
    if output.dim() != 2 or output.shape[1] != _width(heads):
        shape = f"(e, {_width(heads)}), for all heads joined, got {tuple(output.shape)}"
        raise ValueError(f"output must be {shape}")
    parts = output.double().split([len(head.value) for head in heads], 1)
    # head by head with the product of its matrices, or all at once: whichever is less
    apart = sum(
        one * spectral(part @ head.value.double()) / max(spectral(head.value), 1e-300)
        for part, head, one in zip(parts, heads, single, strict=True)
    )
    return min(spectral(output) * bound, apart), spectral(output) * reach


def _width(heads: Sequence[Head]) -> int:
    return sum(len(head.value) for head in heads)


def lambert(x: float) -> float:
    """W(x) with W e^W = x, x >= 0: Newton's method, from above the root of a convex function."""
    w = math.log1p(x)
    for _ in range(60):
        step = (w * math.exp(w) - x) / (math.exp(w) * (1 + w))
        w -= step
        if abs(step) <= 1e-16 * (1 + w):
            break
    return w


def gaussian_constant(tokens: int, norm: VectorNorm = 2.0) -> float:
    """Of z -> softmax(-|z_i - z_j|^2 / tau) z, on all of R^d, for any tau."""
    check_whole(tokens, "tokens", 1)
    check_token_norm(norm)
    if tokens > 2**53:
        raise ValueError("tokens must be at most 2^53")
    most, pair = lambert((tokens - 1) / math.e), lambert(1 / math.e)
    if isinstance(norm, LongestToken):
        return 1 + 4 * most
    return math.sqrt((tokens + 1) / 2) + 2 * most + 2 * math.sqrt((tokens - 1) * pair * most)


def gaussian_attention_lipschitz(
    projection: Tensor,
    value: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    norm: VectorNorm = 2.0,
) -> Bound:
    """Of X -> Y with scores -|z_i - z_j|^2 / temperature, z = projection x, values value z: all X.

    projection (m, d), value (e, m); tokens: how many. The bound does not depend on the temperature.

    >>> round(gaussian_attention_lipschitz(torch.eye(3), torch.eye(3), 1).value, 9)
    1.0
    """
    for name, matrix in (("projection", projection), ("value", value)):
        check_tensor(matrix, name)
        if matrix.dim() != 2 or not bool(matrix.isfinite().all()):
            raise ValueError(f"{name} must be a finite matrix, got {tuple(matrix.shape)}")
    if value.shape[1] != projection.shape[0]:
        raise ValueError(
            f"value must be (e, {projection.shape[0]}), applied to the projected tokens, "
            f"got {tuple(value.shape)}"
        )
    check_positive(temperature, "temperature")
    bound = gaussian_constant(tokens, norm) * spectral(projection) * spectral(value)

    def function(x: Tensor) -> Tensor:
        z = x @ projection.to(x).mT
        scores = negative_squared_distance(z, z, 1 / temperature)
        return scores.softmax(-1) @ z @ value.to(x).mT

    unit = math.sqrt(temperature) / (spectral(projection) or 1.0)
    shape = (tokens, projection.shape[1])
    trials = MapTrials(VectorMap(function, shape, Everywhere(), norm), TrialStart(unit, far=1e3))
    assumptions = ("all inputs", f"{tokens} tokens", "one projection for queries, keys and values")
    return Bound("Gaussian self-attention", bound, norm, assumptions, trials)


def _clusters(shape: tuple[int, int], ball: Ball) -> Guesses:
    """Some tokens near one point, the others near another: where columns have large sums."""
    n, d = shape

    def guesses(count: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(count, n + 1, d, generator=generator, dtype=torch.float64)
        share, apart, middle = torch.rand(3, count, 1, 1, generator=generator, dtype=torch.float64)
        way = noise[:, n:] / noise[:, n:].norm(dim=-1, keepdim=True)
        # half of the time a single token on one side
        some = ((2 * share - 1) * n).clamp_min(1.0)
        side = (torch.arange(n).unsqueeze(-1) < some).double() - middle
        return ball.project(ball.radius * (3 * apart * side * way + 0.01 * noise[:, :n]))

    return guesses


def spectral(matrix: Tensor) -> float:
    """The largest singular value, rounded up."""
    if not matrix.numel():
        return 0.0
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2)) * (1 + 1e-14)


def size_of(bias: Tensor | None) -> float:
    """Its length; a norm in float32 may come out too small."""
    return 0.0 if bias is None else float(bias.detach().double().norm())


def _check_bias(bias: Tensor | None, name: str, width: int) -> None:
    if bias is None:
        return
    check_tensor(bias, name)
    if bias.shape != (width,) or not bool(bias.isfinite().all()):
        raise ValueError(f"{name} must be ({width},) and finite, got {tuple(bias.shape)}")
