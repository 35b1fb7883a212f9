"""How far the output of one softmax attention can move when its tokens change: some dropped, added,
replaced, or all but a few left out.

Weights p, output y = sum_j p_j v_j. Without the tokens of D, and with new ones that together have
m times the old total of exponentials and the mean value u,

    y' - y = [ m (u - y) - sum_{j in D} p_j (v_j - y) ] / (1 - p(D) + m).

With c_j = p_j |v_j - y| and |u - y| <= r, that is at most as long as the least t for which

    sum_{j in D} (c_j + t p_j) + m r <= t (1 + m)    for all D of at most k tokens and m <= M:

the k largest of c_j + t p_j decide, and m = 0 or M. The left side less the right is convex in t,
and Newton's method (Dinkelbach, 1967) finds the root from below in a few steps. Since y' is in the
hull of what is left and of what is new, the move is also at most the largest |v_j - y| and r.

The bounds are absolute, in the l2 norm, for these scores and values. In terms of W1 between the
neighbourhoods there is `contraction.neighbourhood`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import check_tensor, check_whole
from fenchel.bounds.bound import Bound, State, Trials

_STEPS = 100
_LEAST = 1e-290  # below it weights have lost digits


def dropped(scores: Tensor, values: Tensor, count: int) -> Bound:
    """At most `count` of the n tokens are left out: any ones. scores (n), values (n, e).

    >>> scores, values = torch.zeros(4), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    >>> round(dropped(scores, values, 1).value, 6)
    0.25
    """
    weights, values = _prepare(scores, values)
    _check_count(count, len(weights))
    return _bound(f"{count} dropped", count, weights, values, Change(removed=count))


def subsampled(scores: Tensor, values: Tensor, count: int) -> Bound:
    """Any `count` of the n tokens stay."""
    weights, values = _prepare(scores, values)
    check_whole(count, "count", 1)
    if count > len(weights):
        raise ValueError(f"count must be at most the {len(weights)} tokens there are, got {count}")
    return _bound(f"{count} kept", count, weights, values, Change(removed=len(weights) - count))


def added(
    scores: Tensor, values: Tensor, count: int, *, largest_score: float, radius: float
) -> Bound:
    """At most `count` new tokens, with scores up to `largest_score` and values within `radius`."""
    weights, values = _prepare(scores, values)
    check_whole(count, "count", 1)
    change = Change(0, count, _odds(scores, largest_score), _check_radius(radius))
    return _bound(f"{count} added", count, weights, values, change)


def replaced(
    scores: Tensor, values: Tensor, count: int, *, largest_score: float, radius: float
) -> Bound:
    """At most `count` tokens are replaced by new ones, as for `added`."""
    weights, values = _prepare(scores, values)
    check_whole(count, "count", 1)
    if count > len(weights):
        raise ValueError(f"count must be at most the {len(weights)} tokens there are, got {count}")
    change = Change(count, count, _odds(scores, largest_score), _check_radius(radius))
    return _bound(f"{count} replaced", count, weights, values, change)


@dataclass(frozen=True)
class Change:
    """How tokens may change: `removed` of them go, and `new` ones come, with values within `radius`
    and exponentials of their scores of at most `odds` times the old total."""

    removed: int
    new: int = 0
    odds: float = 0.0
    radius: float = 0.0


def _bound(words: str, count: int, weights: Tensor, values: Tensor, change: Change) -> Bound:
    """words: the change, of which the sentence says that it is of any `count` tokens."""
    mass = change.new * change.odds
    bound = move_bound(weights, values, change.removed, mass, change.radius)
    assumptions = ["these scores and values", f"any {count} of {len(weights)} tokens"]
    if change.new:
        assumptions.append(f"new values within {change.radius:g}, new scores up to the given one")
    trials = TokenTrials(weights, values, change)
    return Bound(f"output with tokens {words}", float(bound), 2.0, tuple(assumptions), trials)


def move_bound(
    weights: Tensor, values: Tensor, removed: int, most: float = 0.0, radius: float = 0.0
) -> Tensor:
    """The bound for many queries at once: weights (..., n), values (..., n, e) -> (...)

    removed: number of tokens that may be left out. most: the exponentials of new tokens, relative
    to the total. radius: of new values.
    """
    weights, values = weights.double(), values.double()
    size = values.abs().amax((-2, -1)).clamp_min(radius)
    unit = torch.where(size > 0, size / size.frexp().mantissa, 1.0)  # squares stay in range
    values, most = values / unit[..., None, None], min(most, 1e250)
    heavy = _heaviest(weights, values)
    about = values - heavy.unsqueeze(-2)  # or else the distance of a token with all weight cancels
    output = (weights.unsqueeze(-2) @ about).squeeze(-2)
    away = (about - output.unsqueeze(-2)).norm(dim=-1)
    pull = weights * away
    new = torch.zeros_like(unit)
    if most > 0:
        new = radius / unit + (output + heavy).norm(dim=-1)
    bound = torch.zeros_like(output[..., 0])
    for mass in {0.0, most}:
        bound = torch.maximum(bound, _dinkelbach(weights, pull, new, removed, mass))
    hull = torch.maximum(away.amax(-1), new)
    # all weight may have gone: what is left decides, wherever it is
    return unit * torch.minimum(bound, hull)


def _dinkelbach(weights: Tensor, pull: Tensor, new: Tensor, removed: int, mass: float) -> Tensor:
    """max over D of (sum_D c + m r) / (1 - p(D) + m); inf where nothing need be left. (...)"""
    t = torch.zeros_like(new)
    for _ in range(_STEPS):
        chosen = (pull + t.unsqueeze(-1) * weights).topk(removed, -1).indices
        left = weights.scatter(-1, chosen, 0.0).sum(-1) + mass  # not one less: that would cancel
        better = (pull.gather(-1, chosen).sum(-1) + mass * new) / left
        better = torch.where(left > _LEAST, better, math.inf)
        if bool((better <= t * (1 + 1e-15)).all()):
            break
        t = torch.maximum(t, better)
    return t


def _heaviest(weights: Tensor, values: Tensor) -> Tensor:
    """The value of the token with the largest weight. (..., n), (..., n, e) -> (..., e)"""
    return values.take_along_dim(weights.argmax(-1)[..., None, None], -2).squeeze(-2)


@dataclass(frozen=True, eq=False)
class TokenTrials(Trials):
    """State: ranks (count, n), the largest of which go; scores (count, new) and values of new ones.

    The quotient is the move itself: the change of tokens is what is given, not measured.
    """

    inputs = (
        "ranks (n), the largest of which go",
        "scores of new tokens, less the largest allowed",
        "values of new tokens",
    )

    weights: Tensor
    values: Tensor
    change: Change

    def sample(self, count: int, generator: torch.Generator) -> State:
        n, width = self.values.shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

        new = self.change.new
        return self.project((normal(n), normal(new) + 1, normal(new, width)))

    def suspects(self, count: int, generator: torch.Generator) -> State | None:
        """Those go that pull the output one way, and the new ones stand at the other end."""
        width = self.values.shape[1]
        output = self.weights @ self.values
        ways = torch.randn(count, width, generator=generator, dtype=torch.float64)
        about = self.values - output
        ways[: len(about)] = about[:count]
        ways[-1] = output  # new ones at the other end of the ball
        ways = ways / ways.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        pull = ways @ about.mT
        ranks = self.weights * pull + self.weights * pull.amax(-1, keepdim=True)
        many = self.change.new
        new = (-self.change.radius * ways).unsqueeze(-2).expand(-1, many, -1)
        return ranks, torch.zeros(count, many, dtype=torch.float64), new

    def project(self, state: State) -> State:
        ranks, scores, new = state
        size = new.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        return ranks, scores.clamp(max=0.0), new * (self.change.radius / size).clamp(max=1.0)

    def quotient(self, state: State) -> Tensor:
        ranks, scores, new = state
        mask = torch.ones_like(ranks)
        if self.change.removed:
            mask = mask.scatter(-1, ranks.topk(self.change.removed, -1).indices, 0.0)
        mass = torch.cat([mask * self.weights, self.change.odds * scores.exp()], -1)
        heavy = _heaviest(self.weights, self.values)
        about = self.values - heavy
        values = torch.cat([about.expand(len(ranks), -1, -1), new - heavy], -2)
        total = mass.sum(-1, keepdim=True)
        output = ((mass / torch.where(total > 0, total, 1.0)).unsqueeze(-2) @ values).squeeze(-2)
        # less what rounding may have made of the difference
        rounding = 1e-15 * values.norm(dim=-1).amax(-1)
        moved = ((output - self.weights @ about).norm(dim=-1) - rounding).clamp_min(0)
        return torch.where(total.squeeze(-1) > 0, moved, 0.0)


def _prepare(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    for name, x in (("scores", scores), ("values", values)):
        check_tensor(x, name)
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            raise ValueError(f"{name} must be floating point and finite; leave masked tokens out")
    if scores.dim() != 1 or values.dim() != 2 or len(scores) != len(values) or 0 in values.shape:
        shapes = f"{tuple(scores.shape)} and {tuple(values.shape)}"
        raise ValueError(f"scores must be (n) and values (n, e), not empty, got {shapes}")
    return scores.detach().double().softmax(-1), values.detach().double()


def _check_count(count: int, n: int) -> None:
    check_whole(count, "count", 1)
    if count >= n:
        raise ValueError(f"count must be below the {n} tokens there are, got {count}")


def _odds(scores: Tensor, largest: float) -> float:
    """The exponential of the largest new score, relative to the old total.

    Never zero: where all others go, the smallest new token decides.
    """
    if not math.isfinite(largest):
        raise ValueError(f"largest_score must be finite, got {largest}: new tokens would take all")
    return math.exp(min(700.0, max(-700.0, largest - float(scores.double().logsumexp(-1)))))


def _check_radius(radius: float) -> float:
    if not 0 <= radius < math.inf:
        raise ValueError(f"radius must be finite and >= 0, got {radius}")
    return float(radius)
