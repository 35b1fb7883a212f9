"""The Wasserstein distance of order one between measures with finitely many atoms, exactly.

    W1(mu, nu) = min over plans P >= 0 with P 1 = a, P' 1 = b of  sum_ij P_ij cost(x_i, y_j)
               = max over f_i + g_j <= cost(x_i, y_j) of          <f, a> + <g, b>

The minimum is a plan, the maximum its potentials; where both values agree, both are right.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fenchel._numerics import (
    NonFiniteError,
    certificate_dtype,
    check_tensor,
    expands_to,
    has,
    readable,
    where,
)
from fenchel.measures.norms import between

Norm = float | Callable[[Tensor, Tensor], Tensor]
_Array = NDArray[np.float64]

_INSTALL = 'pip install -c constraints.txt ".[transport]"'
_GAP = 1e-9  # of the largest cost: what the network simplex may leave between plan and potentials
_OPTIMAL = 1  # POT's result code


class Atoms(Protocol):
    """What `Empirical` is: `points` (..., n, d) with `weights` (..., n) that sum to one."""

    @property
    def points(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


class TransportPlan(NamedTuple):
    """An optimal plan with its certificate, in float64 and without derivatives.

    plan (..., n, m); potentials f (..., n) and g (..., m) with f_i + g_j <= cost_ij, of equal share
    in the dual value: <f, a> = <g, b>; primal and dual (...), whose difference is the gap.
    """

    plan: Tensor
    potentials: tuple[Tensor, Tensor]
    primal: Tensor
    dual: Tensor

    @property
    def gap(self) -> Tensor:
        """At least W1 of the plan minus W1: zero, up to rounding, proves the plan optimal."""
        return self.primal - self.dual


def wasserstein1(mu: Atoms, nu: Atoms, norm: Norm = 1) -> Tensor:
    """W1 with the cost |x - y|_norm, exactly: (...).

        mu = Empirical(torch.randn(5, 2))
        wasserstein1(mu, Empirical(torch.randn(7, 2)), norm=2)

    mu, nu: points (..., n, d) and (..., m, d), weights (..., n) and (..., m) that sum to one;
    leading axes broadcast, so that (A, 1, n, d) and (B, m, d) give all pairs.
    norm: 1, 2, math.inf or any p >= 1; or a function (x (..., n, d), y (..., m, d)) -> costs
    (..., n, m).

    On the line, where all norms agree, by sorting; with even weights on as many atoms on both
    sides by assignment (scipy); otherwise by the network simplex of POT. The last two run on the
    CPU, one problem after the other, with the costs of all in memory.

    Computed in float64, returned in the precision of the operands. Derivatives in the points hold
    the optimal plan fixed, those in the weights are the potentials. Weights are divided by their
    sum, so only directions that keep the mass have one. Where the plan or the potentials are not
    unique (atoms that meet; weights some of which have equal sums, as even ones do) W1 has a kink
    and the derivative is one of several.
    """
    pair = make_pair(mu, nu, norm)
    if pair.x.shape[-1] == 1 and not callable(norm):
        return _on_the_line(pair).to(pair.dtype)
    cost = pair.costs()
    moved = pair.a.requires_grad or pair.b.requires_grad
    plan, f, g = _solve_all(pair, cost, certified=moved)
    value = (plan * cost).sum((-2, -1))
    if moved:  # adds nothing to the value, and the potentials to its derivative
        value = value + _dual(pair.a - pair.a.detach(), pair.b - pair.b.detach(), f, g)
    return value.to(pair.dtype)


def transport_plan(mu: Atoms, nu: Atoms, norm: Norm = 1) -> TransportPlan:
    """An optimal plan between two measures, and the potentials that prove it optimal.

        found = transport_plan(mu, nu)
        found.plan, found.gap

    Operands as for `wasserstein1`; solved by assignment or the network simplex, on the line too.
    """
    with torch.no_grad():
        pair = make_pair(mu, nu, norm)
        cost = pair.costs()
        plan, f, g = _solve_all(pair, cost, certified=True)
        half = ((pair.a * f).sum(-1, keepdim=True) - (pair.b * g).sum(-1, keepdim=True)) / 2
        f, g = f - half, g + half
        primal = (plan * cost).sum((-2, -1))
        return TransportPlan(plan, (f, g), primal, _dual(pair.a, pair.b, f, g))


def _dual(a: Tensor, b: Tensor, f: Tensor, g: Tensor) -> Tensor:
    return (a * f).sum(-1) + (b * g).sum(-1)


# ---- the operands


@dataclass(frozen=True, eq=False)
class Pair:
    """x (..., n, d), y (..., m, d), weights a (..., n) and b (..., m) of sum one, in float64."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    norm: Norm
    batch: torch.Size
    dtype: torch.dtype  # of the operands
    even: bool  # constants, alike in all of the batch on either side
    positive: bool  # no weight is zero; both are False where Python may not look

    def costs(self) -> Tensor:
        """(..., n, m) with the whole batch in front."""
        shape = (*self.batch, self.a.shape[-1], self.b.shape[-1])
        if callable(self.norm):
            cost = self.norm(self.x, self.y)
            check_tensor(cost, "the costs that norm(x, y) returns")
            if cost.shape[-2:] != shape[-2:]:
                raise ValueError(
                    f"norm(x, y) must return costs of shape (..., {shape[-2]}, {shape[-1]}), "
                    f"got {tuple(cost.shape)}"
                )
            if not expands_to(cost.shape[:-2], self.batch):
                raise ValueError(
                    f"norm(x, y) must return costs with leading axes that broadcast to those of the"
                    f" measures, {tuple(self.batch)}, got {tuple(cost.shape)}"
                )
            cost = cost.to(self.a.dtype)
        else:
            cost = between(self.x, self.y, float(self.norm))
        if not _finite(cost):
            raise ValueError("the costs between the points are not all finite; scale the points")
        return cost.expand(shape)


def make_pair(mu: Atoms, nu: Atoms, norm: Norm) -> Pair:
    """Check the operands and bring them to float64."""
    _check_norm(norm)
    for measure, name in ((mu, "mu"), (nu, "nu")):
        _check_measure(measure, name)
    if mu.points.shape[-1] != nu.points.shape[-1]:
        raise ValueError(
            f"mu has points of {mu.points.shape[-1]} coordinates and nu of {nu.points.shape[-1]}; "
            "both must lie in the same space"
        )
    operands = (mu.points, nu.points, mu.weights, nu.weights)
    dtype = operands[0].dtype
    for operand in operands[1:]:
        dtype = torch.promote_types(dtype, operand.dtype)
    inner = certificate_dtype(mu.points.device)
    x, y, a, b = (operand.to(inner) for operand in operands)
    a, *of_a = _normalise(a, "mu", dtype)
    b, *of_b = _normalise(b, "nu", dtype)
    even = of_a[0] == of_a[1] and of_b[0] == of_b[1] and not (a.requires_grad or b.requires_grad)
    batch = _broadcast(x.shape[:-2], y.shape[:-2], a.shape[:-1], b.shape[:-1])
    return Pair(x, y, a, b, norm, batch, dtype, even, min(of_a[0], of_b[0]) > 0)


def _broadcast(*leading: torch.Size) -> torch.Size:
    if len(set(leading)) == 1:  # at a tenth of the time
        return leading[0]
    try:
        shape: torch.Size = torch.broadcast_shapes(*leading)
    except RuntimeError:
        shown = ", ".join(str(tuple(shape)) for shape in leading)
        raise ValueError(f"leading axes of the measures must broadcast, got {shown}") from None
    return shape


def _check_norm(norm: object) -> None:
    if callable(norm):
        return
    if isinstance(norm, bool) or not isinstance(norm, (int, float)):
        raise TypeError(f"norm must be a number >= 1 or a function, got {norm!r}")
    if not norm >= 1:
        raise ValueError(f"norm must be >= 1, got {norm}; below one it is no norm")


def _check_measure(measure: Atoms, name: str) -> None:
    for part in ("points", "weights"):
        if not hasattr(measure, part):
            raise TypeError(
                f"{name} must be a measure with points and weights, got {type(measure).__name__}; "
                "use Empirical(points)"
            )
        value = getattr(measure, part)
        check_tensor(value, f"{name}.{part}")
        if not value.is_floating_point():
            raise TypeError(f"{name}.{part} must be floating-point, got {value.dtype}")
    points, weights = measure.points, measure.weights
    if points.dim() < 2 or weights.dim() < 1 or points.shape[-2] != weights.shape[-1]:
        raise ValueError(
            f"{name} must have points (..., n, d) and weights (..., n), "
            f"got {tuple(points.shape)} and {tuple(weights.shape)}"
        )
    if points.shape[-2] == 0:
        raise ValueError(f"{name} has no atoms")
    if not _finite(points):
        raise NonFiniteError(f"{name}.points must be finite; they hold NaN or infinity")


def _finite(x: Tensor) -> bool:
    """As far as Python may look. The sum, which is quick, most often says all."""
    if not readable(x) or math.isfinite(x.detach().sum().item()):
        return True
    return bool(x.isfinite().all())


def _normalise(weights: Tensor, name: str, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """Weights of sum one, and the least and the greatest; -inf and inf if Python may not look."""
    n = weights.shape[-1]
    alike = n > 1 and weights.stride(-1) == 0  # one number, expanded: nothing to add up
    total = weights[..., :1] if alike else weights.sum(-1, keepdim=True)
    least, greatest = -math.inf, math.inf
    if readable(weights) and weights.numel():
        least, greatest = _edges(total if alike else weights)
        if not least >= 0:  # nan, too
            raise ValueError(f"{name}.weights must be finite and >= 0")
        whole = 1 / n if alike else 1.0
        rounding = max(1e-3, 4 * torch.finfo(dtype).eps) * whole
        if not all(abs(edge - whole) <= rounding for edge in _edges(total)):
            raise ValueError(f"{name}.weights must sum to one; divide them by their sum")
    if alike:
        return total.new_full(total.shape, 1 / n).expand(weights.shape), 1 / n, 1 / n
    return weights / total, least, greatest


def _edges(x: Tensor) -> tuple[float, float]:
    if x.numel() == 1:
        return x.item(), x.item()
    least, greatest = x.detach().aminmax()
    return least.item(), greatest.item()


# ---- on the line


def _on_the_line(pair: Pair) -> Tensor:
    """int |F - G| of the distribution functions; where weights are even, of their inverses."""
    x, y = pair.x.squeeze(-1), pair.y.squeeze(-1)  # (..., n), (..., m)
    if pair.even and x.shape[-1] == y.shape[-1]:
        apart = x.sort(-1).values - y.sort(-1).values
        return apart.abs().mean(-1).expand(pair.batch)
    a, b, x, y = (part.expand(*pair.batch, -1) for part in (pair.a, pair.b, x, y))
    value = _area(x, y, a, b) if pair.positive else _area(_with_mass(x, a), _with_mass(y, b), a, b)
    if not pair.positive and _moving(a, b):
        # but the slope in a weight that is zero is that of its atom where it is
        there = _area(x, y, a, b)
        value = value.detach() + (there - there.detach())
    if x.shape[-1] != y.shape[-1] or not has(same := (x == y).all(-1)):
        return value
    return where(~(same & (a == b).all(-1)), value, 0.0)  # sums could differ by rounding


def _moving(*weights: Tensor) -> bool:
    return torch.is_grad_enabled() and any(part.requires_grad for part in weights)


def _area(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """int |F - G|, all with the whole batch in front."""
    points, order = torch.cat([x, y], -1).sort(-1)  # (..., n + m)
    difference = torch.cat([a, -b], -1).gather(-1, order).cumsum(-1)  # F - G from a point on
    return (difference[..., :-1].abs() * points.diff(dim=-1)).sum(-1)


def _with_mass(points: Tensor, weights: Tensor) -> Tensor:
    """Atoms without mass go to the heaviest: left far away they multiply the sums' rounding."""
    heaviest = points.gather(-1, weights.argmax(-1, keepdim=True))
    return torch.where(weights > 0, points, heaviest)


# ---- anywhere


def _solve_all(pair: Pair, cost: Tensor, *, certified: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Plans (..., n, m) and potentials (..., n), (..., m); these are zero if not `certified`."""
    if not readable(cost, pair.a, pair.b):
        raise RuntimeError(
            "off the line wasserstein1 must see its numbers: not under vmap or torch.compile; "
            "leading axes serve in place of vmap"
        )
    *batch, n, m = cost.shape
    count = math.prod(batch)
    costs = cost.detach().cpu().numpy().reshape(count, n, m)
    a, b = (
        weights.detach().expand(*batch, -1).cpu().numpy().reshape(count, size)
        for weights, size in ((pair.a, n), (pair.b, m))
    )
    plan, f, g = np.zeros_like(costs), np.zeros_like(a), np.zeros_like(b)
    for k in range(count):
        _solve_one(costs[k], a[k], b[k], (plan[k], f[k], g[k]), certified)
    parts = (torch.from_numpy(part).to(cost) for part in (plan, f, g))
    shapes = ((n, m), (n,), (m,))
    p, q, r = (part.reshape(*batch, *s) for part, s in zip(parts, shapes, strict=True))
    return p, q, r


def _solve_one(
    cost: _Array, a: _Array, b: _Array, out: tuple[_Array, _Array, _Array], certified: bool
) -> None:
    """Fill plan (n, m), f (n), g (m), which come as zeros."""
    plan, f, g = out
    if _same(cost, a, b):
        np.fill_diagonal(plan, a)  # costs nothing, as f = g = 0 prove
        return
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)
    inner, left, right = cost[np.ix_(rows, columns)], a[rows], b[columns]
    alike = len(left) == len(right) and np.ptp(left) == 0 and np.ptp(right) == 0
    solver = _assignment if alike else _network_simplex
    part, potential = solver(inner, left, right, certified)
    plan[np.ix_(rows, columns)] = part
    if potential is not None:  # the largest that are feasible, also where there is no mass
        g[columns] = (inner - potential[:, None]).min(0)
        f[:] = (cost[:, columns] - g[columns]).min(1)
        g[b == 0] = (cost[:, b == 0] - f[:, None]).min(0)


def _same(cost: _Array, a: _Array, b: _Array) -> bool:
    """Atom by atom, so that a measure is at distance zero from itself without rounding."""
    if len(a) != len(b) or np.diagonal(cost).any() or not np.array_equal(a, b):
        return False
    return bool(cost.min() >= 0)


def _assignment(
    cost: _Array, a: _Array, b: _Array, certified: bool
) -> tuple[_Array, _Array | None]:
    """Even weights: some permutation is an optimal plan."""
    # equal sizes: the best permutation (Birkhoff)
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ImportError(f"equal weights need scipy; run {_INSTALL}", name="scipy") from None
    rows, columns = linear_sum_assignment(cost)
    plan = np.zeros_like(cost)
    plan[rows, columns] = a
    return plan, _assignment_potential(cost, columns) if certified else None


def _assignment_potential(cost: _Array, columns: NDArray[np.intp]) -> _Array:
    """f with f_i <= f_k + cost_i,s(k) - cost_k,s(k): shortest paths, as no cycle gains.

    Row k hands its column s(k) to row i. Each round is exact for one more handing over.
    """
    handed = cost[:, columns]  # (i, k)
    handed = handed - np.diagonal(handed)
    f = np.zeros(len(cost))
    for _ in range(len(cost)):
        better = np.minimum(f, (handed + f).min(1))
        if np.array_equal(better, f):
            break
        f = better
    return f


def _network_simplex(
    cost: _Array, a: _Array, b: _Array, certified: bool
) -> tuple[_Array, _Array | None]:
    """POT's, on costs of size one; refused unless its potentials prove its plan."""
    try:
        import ot
    except ImportError:
        raise ImportError(
            f"measures in several dimensions with weights that differ need POT; run {_INSTALL}",
            name="ot",
        ) from None
    scale = float(np.abs(cost).max()) or 1.0
    scaled = cost / scale
    pivots = 1_000_000 + 1_000 * sum(cost.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its warning says less than the error below
        plan, log = ot.emd(a, b, scaled, numItermax=pivots, log=True)
    _check_simplex(plan, log, scaled, a, b)
    return plan, log["u"] * scale


def _check_simplex(plan: _Array, log: dict[str, Any], cost: _Array, a: _Array, b: _Array) -> None:
    """Optimal by its own word, by its margins, and by the gap to its potentials."""
    g = (cost - log["u"][:, None]).min(0)
    gap = float((plan * cost).sum() - log["u"] @ a - g @ b)
    margins = max(np.abs(plan.sum(1) - a).max(), np.abs(plan.sum(0) - b).max())
    if log["result_code"] == _OPTIMAL and abs(gap) <= _GAP and margins <= _GAP:
        return
    raise RuntimeError(
        f"POT's network simplex gave no proven optimum on {cost.shape[0]} x {cost.shape[1]} "
        f"atoms: {log['warning'] or 'it reports success'}, relative gap {gap:.1e}, margins off by "
        f"{margins:.1e}; entropic_wasserstein1 bounds the distance from both sides"
    )
