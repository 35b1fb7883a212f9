"""The offset that normalises Tsallis weights: a monotone Newton search, row by row.

With eps = alpha - 1 the weights are p = nu y^(1/eps), y = [1 + eps (s - a)/tau]_+, and the offset
`a` solves F(a) = sum p = 1. Two forms of y are used. For alpha <= 2 the one above: it is smooth
through alpha = 1, where y^(1/eps) = exp((s - a)/tau). For alpha > 2 a key next to the edge of the
support has unbounded slope, and one ulp of `a` would move its weight by ulp^(1/eps); there
y = eps (s - t)/tau with the threshold t = a - tau/eps written as `centre + rest`, the centre being
the score of the key nearest to the edge: s - centre is exact for the keys that matter, and `rest`
keeps its own relative precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.kernels.operators import row_operator

_MAX_STEPS = 400  # bisection alone needs ~60 halvings a stage; Newton makes it about eight


def power_ratio(log_x: Tensor, eps: Tensor | float) -> Tensor:
    """(x^eps - 1) / eps, which is log x at eps = 0."""
    if isinstance(eps, float):
        return torch.expm1(eps * log_x) / eps if eps else log_x
    return torch.where(eps > 0, torch.expm1(eps * log_x) / torch.where(eps > 0, eps, 1.0), log_x)


@row_operator("tsallis_offset", columns=2)
def tsallis_offset(
    scores: Tensor, log_mass: Tensor | None, eps: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """(centre, rest) of the offset (of the threshold where alpha > 2), each (..., 1).

    Scores have row maximum 0 and dead keys at -inf; eps and tau are columns (..., 1).
    """
    rows = torch.broadcast_shapes(scores.shape[:-1], eps.shape[:-1], tau.shape[:-1])
    s = scores.expand(*rows, -1)
    log_mass = None if log_mass is None else log_mass.expand_as(s)
    family = _Family(log_mass, eps.expand(*rows, 1), tau.expand(*rows, 1))
    alive = (s > -torch.inf).any(-1, keepdim=True)
    centre, low, high = _bracket(s, family, alive)
    s, family = _within_reach(s, family, centre, low)
    rest = _search(s - centre, family, (low, high), alive, edge_form=False)
    steep = alive & (family.eps > 1)
    if not bool(steep.any()):
        return centre, rest
    edge_centre, edge_rest = _refine_edge(s, family, (centre, rest), steep)
    return torch.where(steep, edge_centre, centre), torch.where(steep, edge_rest, rest)


class _Family(NamedTuple):
    log_mass: Tensor | None  # (..., n)
    eps: Tensor  # (..., 1)
    tau: Tensor  # (..., 1)


def _bracket(s: Tensor, family: _Family, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A centre for the scores, and bounds on the offset measured from it.

    Low: some key alone already carries the whole mass; its score is the centre, since the offset
    may lie closer to it than an ulp of either. High: all keys at the maximum carry the mass.
    """
    log_mass, eps, tau = family
    live = s > -torch.inf
    if log_mass is None:
        total = live.sum(-1, keepdim=True).to(s.dtype).log()
        centre = low = torch.zeros_like(total)
    else:
        total = torch.logsumexp(torch.where(live, log_mass, -torch.inf), -1, True)
        room = (tau * power_ratio(-log_mass, eps)).clamp(max=torch.finfo(s.dtype).max / 16)
        best = torch.where(live, s - room, -torch.inf).argmax(-1, keepdim=True)
        centre, low = s.gather(-1, best), -room.gather(-1, best)
    high = -tau * power_ratio(-total, eps) - centre
    centre, low, high = (torch.where(alive, x, 0.0) for x in (centre, low, high))
    return centre, torch.minimum(low, high), high


def _within_reach(
    s: Tensor, family: _Family, centre: Tensor, low: Tensor
) -> tuple[Tensor, _Family]:
    """Only the keys that can carry weight, where that leaves few: the offset is at least
    centre + low, so that a key tau/eps or more below it gets nothing. Of thousands of keys a few
    dozen remain. Distances are taken from the centre, which may be nearer than an ulp."""
    n = s.shape[-1]
    keep = (s - centre) > low - family.tau / family.eps  # eps = 0: everything
    most = int(keep.sum(-1).max()) if keep.numel() else 0
    if not 0 < most <= n // 3:
        return s, family
    kept, index = torch.where(keep, s, -torch.inf).topk(most, -1, sorted=False)
    log_mass = None if family.log_mass is None else family.log_mass.gather(-1, index)
    return kept, family._replace(log_mass=log_mass)


def _mass_and_slope(
    s: Tensor, family: _Family, offset: Tensor, edge_form: bool
) -> tuple[Tensor, Tensor]:
    """F and -tau dF/da = sum nu y^(1/eps - 1)."""
    log_mass, eps, tau = family
    distance = (s - offset) / tau
    x = eps * distance
    y = x if edge_form else 1.0 + x
    on = (y > 0) & (s > -torch.inf)
    y = torch.where(on, y, 1.0)
    log_y = y.log() if edge_form else torch.log1p(torch.where(on, x, 0.0))
    log_p = torch.where(eps > 0, log_y / torch.where(eps > 0, eps, 1.0), distance)
    if log_mass is not None:
        log_p = log_p + log_mass
    p = torch.where(on, log_p.exp(), 0.0)
    return p.sum(-1, keepdim=True), (p / y).sum(-1, keepdim=True)


def _search(
    s: Tensor, family: _Family, bracket: tuple[Tensor, Tensor], active: Tensor, edge_form: bool
) -> Tensor:
    """Root of F = 1 in the bracket, for the active rows. Newton on (F^eps - 1)/eps, a norm of y:
    convex for alpha <= 2, so that the steps from the left never pass the root and need no
    safeguard; for alpha > 2 it is not, and every third step halves the bracket instead."""
    accuracy = 2 * torch.finfo(s.dtype).eps
    steep = family.eps > 1
    low, high = bracket
    a = low
    for step in range(_MAX_STEPS):
        mass, slope = _mass_and_slope(s, family, a, edge_form)
        low, high = torch.where(mass >= 1, a, low), torch.where(mass <= 1, a, high)
        newton = a - family.tau * mass * power_ratio(-mass.log(), family.eps) / slope
        middle = low + (high - low) / 2
        halve = ~((newton > low) & (newton < high)) | (step % 3 == 2)
        following = torch.where(halve & steep, middle, newton)
        done = ((mass - 1).abs() <= accuracy) | torch.where(
            steep, (middle <= low) | (middle >= high), ~(newton > a)
        )
        if bool((done | ~active).all()):
            break
        a = torch.where(done, a, following)
    return a


def _refine_edge(
    s: Tensor, family: _Family, offset: tuple[Tensor, Tensor], active: Tensor
) -> tuple[Tensor, Tensor]:
    """The threshold as (score of the key nearest to it) + rest, solved for the rest."""
    centre, rest = offset
    width = family.tau / family.eps
    threshold = rest - width
    nearest = ((s - centre) - threshold).abs().argmin(-1, keepdim=True)
    key = s.gather(-1, nearest)
    guess = threshold - (key - centre)
    reach = 16 * torch.finfo(s.dtype).eps * (rest.abs() + width)
    bracket = (guess - reach, guess + reach)
    return key, _search(s - key, family, bracket, active, edge_form=True)
