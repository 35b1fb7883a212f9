"""The offset that normalises Tsallis weights: a monotone Newton search, row by row.

With eps = alpha - 1 the weights are p = nu y^(1/eps), y = [1 + eps (s - a)/tau]_+, and the offset
`a` solves F(a) = sum p = 1. Two forms of y are used:

- gentle rows, eps <= 1/4: the one above, which is smooth through alpha = 1, where
  y^(1/eps) = exp((s - a)/tau);
- edge rows: y = eps (s - t)/tau with the threshold t = a - tau/eps. A small y is then a small
  difference of scores, and no 1 + x rounds it away (in a flat row of a million keys y is 1e-6).

The offset (or threshold) comes as `centre + rest`, the centre being a score, so that s - centre is
exact for the keys next to it and `rest` keeps its own relative precision. For alpha > 2 a key next
to the edge has unbounded slope, one ulp would move its weight by ulp^(1/eps), and the centre is
chosen as the key nearest to the edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.operators import row_operator

EDGE_ABOVE = 0.25  # eps of the edge form
_MAX_STEPS = 400  # bisection alone needs ~60 halvings a stage; Newton makes it about eight
_CLIMBS, _HALVINGS = 20, 60  # steps of searches that cannot stop by themselves


def power_ratio(log_x: Tensor, eps: Tensor | float) -> Tensor:
    """(x^eps - 1) / eps, which is log x at eps = 0."""
    if isinstance(eps, float):
        return torch.expm1(eps * log_x) / eps if eps else log_x
    return torch.where(eps > 0, torch.expm1(eps * log_x) / torch.where(eps > 0, eps, 1.0), log_x)


@row_operator("tsallis_offset", columns=2)
def tsallis_offset(
    scores: Tensor, log_mass: Tensor | None, eps: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """(centre, rest) of the offset (of the threshold where eps > EDGE_ABOVE), each (..., 1).

    Dead keys are at -inf, the others finite and of moderate size; eps and tau are columns (..., 1).
    """
    s, family = _together(scores, log_mass, eps, tau)
    alive = (s > -torch.inf).any(-1, keepdim=True)
    if s.shape[-1] == 0:
        nothing = torch.zeros_like(alive, dtype=s.dtype)
        return nothing, nothing.clone()
    centre, low, high = _bracket(s, family, alive)
    s, family = _within_reach(s, family, centre, low)
    rest = torch.where(alive, _search(s - centre, family, (low, high), alive), 0.0)
    steep = alive & family.steep
    if not bool(steep.any()):
        return centre, rest
    edge_centre, edge_rest = _refine_edge(s, family, (centre, rest), steep)
    return torch.where(steep, edge_centre, centre), torch.where(steep, edge_rest, rest)


def unrolled_offset(
    scores: Tensor, log_mass: Tensor | None, eps: Tensor, tau: Tensor, static_eps: float | None
) -> tuple[Tensor, Tensor]:
    """`tsallis_offset` in steps whose number no value decides, for graphs that know only torch's
    operations. static_eps: eps where it is one number."""
    s, family = _together(scores, log_mass, eps, tau)
    alive = (s > -torch.inf).any(-1, keepdim=True)
    centre, low, high = _bracket(s, family, alive)
    if static_eps is not None and static_eps <= 1:
        rest = _climb(s - centre, family, low, static_eps)
    else:
        rest = _halve(s - centre, family, low, high)
    return centre, torch.where(alive, rest, 0.0)


def _climb(s: Tensor, family: _Family, a: Tensor, eps: float) -> Tensor:
    """Newton's steps of `_search` for alpha <= 2, which only grow."""
    cheap = {0.5: _squares, 1.0: _ramps} if family.log_mass is None else {}
    moments = cheap.get(eps, _mass_and_slope)
    for _ in range(_CLIMBS):
        mass, slope = moments(s, family, a)
        a = torch.maximum(a, a - family.tau * mass * power_ratio(-mass.log(), eps) / slope)
    return a


def _halve(s: Tensor, family: _Family, low: Tensor, high: Tensor) -> Tensor:
    """Bisection, for any alpha."""
    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        above = _mass_and_slope(s, family, middle)[0] >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return low


def _together(
    scores: Tensor, log_mass: Tensor | None, eps: Tensor, tau: Tensor
) -> tuple[Tensor, _Family]:
    """All operands with all rows."""
    rows = torch.broadcast_shapes(scores.shape[:-1], eps.shape[:-1], tau.shape[:-1])
    s = scores.expand(*rows, -1)
    log_mass = None if log_mass is None else log_mass.expand_as(s)
    return s, _Family(log_mass, eps.expand(*rows, 1), tau.expand(*rows, 1))


class _Family(NamedTuple):
    log_mass: Tensor | None  # (..., n)
    eps: Tensor  # (..., 1)
    tau: Tensor  # (..., 1)

    @property
    def gentle(self) -> Tensor:
        return self.eps <= EDGE_ABOVE

    @property
    def steep(self) -> Tensor:
        return self.eps > 1

    @property
    def width(self) -> Tensor:
        """From the threshold to the offset; infinite at eps = 0."""
        return self.tau / self.eps


def _bracket(s: Tensor, family: _Family, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A centre for the scores, and bounds measured from it.

    Low: some key alone already carries the whole mass; its score is the centre, since the offset
    may lie closer to it than an ulp of either. High: all keys at the maximum carry the mass.
    """
    live = s > -torch.inf
    top = torch.where(alive, s.amax(-1, keepdim=True), 0.0)
    if family.log_mass is None:
        total = live.sum(-1, keepdim=True).to(s.dtype).log()
        centre = top
        low = -threshold_room(torch.zeros_like(total), family.eps, family.tau)
    else:
        total = torch.logsumexp(torch.where(live, family.log_mass, -torch.inf), -1, True)
        room = threshold_room(family.log_mass, family.eps, family.tau)
        best = torch.where(live, s - room, -torch.inf).argmax(-1, keepdim=True)
        centre, low = s.gather(-1, best), -room.gather(-1, best)
    high = (top - centre) - threshold_room(total, family.eps, family.tau)
    centre, low, high = (torch.where(alive, x, 0.0) for x in (centre, low, high))
    return centre, torch.minimum(low, high), high


def threshold_room(log_mass: Tensor, eps: Tensor, tau: Tensor) -> Tensor:
    """Distance from a key of this mass, carrying everything, down to the offset or threshold."""
    to_threshold = tau / eps * (-eps * log_mass).exp()
    room = torch.where(eps <= EDGE_ABOVE, tau * power_ratio(-log_mass, eps), to_threshold)
    return room.clamp(max=torch.finfo(room.dtype).max / 16)


def _within_reach(
    s: Tensor, family: _Family, centre: Tensor, low: Tensor
) -> tuple[Tensor, _Family]:
    """Only the keys that can carry weight, where that leaves few: the offset is at least
    centre + low, so that a key tau/eps or more below it gets nothing. Of thousands of keys a few
    dozen remain. Distances are taken from the centre, which may be nearer than an ulp."""
    n = s.shape[-1]
    floor = torch.where(family.gentle, low - family.width, low)  # -inf at eps = 0: everything
    keep = (s - centre) > floor
    most = int(keep.sum(-1).max()) if keep.numel() else 0
    if not 0 < most <= n // 3:
        return s, family
    candidates, index = torch.where(keep, s, -torch.inf).topk(most, -1, sorted=False)
    log_mass = None if family.log_mass is None else family.log_mass.gather(-1, index)
    return candidates, family._replace(log_mass=log_mass)


def _moments(family: _Family) -> Callable[[Tensor, _Family, Tensor], tuple[Tensor, Tensor]]:
    """The cheapest way to F and its slope: alpha = 1.5 and 2 without a base need no logarithm."""
    if family.log_mass is None and bool((family.eps == 0.5).all()):
        return _squares
    if family.log_mass is None and bool((family.eps == 1).all()):
        return _ramps
    return _mass_and_slope


def _squares(s: Tensor, family: _Family, threshold: Tensor) -> tuple[Tensor, Tensor]:
    y = ((s - threshold) * (0.5 / family.tau)).clamp_(min=0)
    slope = y.sum(-1, keepdim=True)
    return y.square_().sum(-1, keepdim=True), slope


def _ramps(s: Tensor, family: _Family, threshold: Tensor) -> tuple[Tensor, Tensor]:
    y = ((s - threshold) / family.tau).clamp_(min=0)
    return y.sum(-1, keepdim=True), (y > 0).sum(-1, keepdim=True).to(y.dtype)


def _mass_and_slope(s: Tensor, family: _Family, offset: Tensor) -> tuple[Tensor, Tensor]:
    """F and -tau dF/da = sum nu y^(1/eps - 1)."""
    log_mass, eps, tau = family
    gentle = family.gentle
    distance = (s - offset) / tau
    x = eps * distance
    y = torch.where(gentle, 1.0 + x, x)
    on = (y > 0) & (s > -torch.inf)
    y = torch.where(on, y, 1.0)
    log_y = torch.where(gentle, torch.log1p(torch.where(on & gentle, x, 0.0)), y.log())
    log_p = torch.where(eps > 0, log_y / torch.where(eps > 0, eps, 1.0), distance)
    if log_mass is not None:
        log_p = log_p + log_mass
    p = torch.where(on, log_p.exp(), 0.0)
    return p.sum(-1, keepdim=True), (p / y).sum(-1, keepdim=True)


def _search(s: Tensor, family: _Family, bracket: tuple[Tensor, Tensor], active: Tensor) -> Tensor:
    """Root of F = 1 in the bracket, for the active rows. Newton on (F^eps - 1)/eps, a norm of y:
    convex for alpha <= 2, so that the steps from the left never pass the root and need no
    safeguard; for alpha > 2 it is not, and every third step halves the bracket instead."""
    accuracy = 2 * torch.finfo(s.dtype).eps
    steep = family.steep
    low, high = bracket
    a, turned, moments = low, torch.zeros_like(active), _moments(family)
    for step in range(_MAX_STEPS):
        mass, slope = moments(s, family, a)
        low, high = torch.where(mass >= 1, a, low), torch.where(mass <= 1, a, high)
        newton = a - family.tau * mass * power_ratio(-mass.log(), family.eps) / slope
        middle = low + (high - low) / 2
        halve = ~((newton > low) & (newton < high)) | (step % 3 == 2)
        following = torch.where(halve & steep, middle, newton)
        # A step back is rounding. The first one is taken (it may be the rounding of a long step
        # that is mended), the second one ends the row.
        back = ~(newton > a)
        done = ((mass - 1).abs() <= accuracy) | torch.where(
            steep, (middle <= low) | (middle >= high), back & turned
        )
        turned = turned | back
        if bool((done | ~active).all()):
            break
        a = torch.where(done, a, following)
    return a


def _refine_edge(
    s: Tensor, family: _Family, threshold: tuple[Tensor, Tensor], active: Tensor
) -> tuple[Tensor, Tensor]:
    """The threshold measured from the score nearest to it, and solved once more from there."""
    centre, rest = threshold
    nearest = ((s - centre) - rest).abs().argmin(-1, keepdim=True)
    key = s.gather(-1, nearest)
    guess = rest - (key - centre)
    reach = 16 * torch.finfo(s.dtype).eps * (rest.abs() + guess.abs())
    return key, _search(s - key, family, (guess - reach, guess + reach), active)
