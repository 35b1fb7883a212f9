"""Among the measures with given moments, the one nearest to nu.

    minimise KL(mu | nu) subject to mu(k) = moments

has the solution Psi_{exp<lam, k>}(nu) where the moments are in the relative interior of the convex
hull of k on the support of nu, and lam minimises the dual

    D(lam) = log nu(exp <lam, k - moments>),    D' = mu(k) - moments,    D'' = Cov_mu(k).

On the hull's boundary lam runs to infinity; outside there is no such measure.

Why it converges. Take Newton's direction d = -H^-1 g, and s = max - min of <d, k> on the support.
Along d the third cumulant of <d, k> is at most s times its variance, |phi'''| <= s phi'', so that

    D(lam + t d) <= D(lam) - t v + v (e^{ts} - ts - 1) / s^2,     v = -<g, d> = <d, H d>,

least at t = log(1 + s) / s: a fall of v ((1 + s) log(1 + s) - s) / s^2 > 0 that needs no search.
Longer steps are tried too and kept if they fall as far. In the interior the levels of D are
compact, H is bounded from below on them and s from above, so that v -> 0: the limit is the
minimiser. Near it t -> 1, and the error is squared each time.

How it ends. q = mu (1 + <d, k - mu(k)>) has the moments asked for, exactly. Where s < 1, q > 0 and
it proves that they are in the interior; on the boundary and outside, s >= 1 always. If on the other
hand <u, k - moments> < 0 on the whole support, for u = lam or d, then u separates the moments from
the hull; outside of it D has no bound, and lam is such a u once D < log of the smallest weight.
"""
# Vuckovic et al. (2020), theorem 14; not every value has a solution, as it claims

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._implicit import Solve, attach, tilt
from fenchel._numerics import certificate_dtype, check_finite, check_tensor, check_whole, where
from fenchel._solution import Status
from fenchel.measures.empirical import Empirical
from fenchel.measures.measure import Function, average, values_of
from fenchel.measures.softmatch import check_measure

_NEAR, _POLISH = 1e-5, 2  # of s: two more steps square it twice
_SURE = 1e-3  # of the noise, beside s or 1
_STEEP = 1e-8  # of the slope, in coordinates of unit covariance
_ROOM = 10.0  # that the logarithms of weights have to move in, at first
_LINES = 60  # halvings


class MaximumEntropy(NamedTuple):
    """measure: Psi_{exp<multiplier, k>}(nu), batch (...). Where INFEASIBLE there is no measure with
        these moments, and this is only where the search stopped, perhaps nu itself.
    multiplier: (..., k). Where INFEASIBLE, the separating direction: u with <u, moments> > <u, k>
        at every point with mass.
    divergence: the least KL(mu | nu) of a mu with these moments, (...): KL(measure | nu), and +inf
        where INFEASIBLE.
    residual: largest |measure(k) - moments|, in units of that feature's range on the support, (...)
    status: codes of `fenchel.Status`, (...): OK, INFEASIBLE outside of the hull, MAX_STEPS on its
        boundary (or so close that float64 cannot tell) and where steps ran out. Only with OK are
        the moments met; the measure is then the solution.
    steps: (...)
    """

    measure: Empirical
    multiplier: Tensor
    divergence: Tensor
    residual: Tensor
    status: Tensor
    steps: Tensor


def maximum_entropy(
    nu: Empirical, features: Function | Tensor, moments: Tensor, *, max_steps: int = 200
) -> MaximumEntropy:
    """The measure with mu(features) = moments that is nearest to nu in KL(mu | nu).

    features: k of points, (..., n, d) -> (..., n, k), or its values at the points of nu.
    moments: (..., k). Leading axes broadcast with those of nu.

    Derivatives in moments, features and weights are exact where the status is OK.

    >>> die = Empirical(torch.arange(1.0, 7.0).unsqueeze(-1))
    >>> found = maximum_entropy(die, lambda x: x, torch.tensor([4.5]))  # Jaynes
    >>> found.measure.weights
    tensor([0.0544, 0.0788, 0.1142, 0.1654, 0.2398, 0.3475])
    """
    check_whole(max_steps, "max_steps", 1)
    check_measure(nu, "nu")
    values = features if isinstance(features, Tensor) else values_of(features, nu.points)
    _check(values, moments, nu)
    problem = _Problem.make(nu, values, moments)
    fixed = replace(problem, **{name: x.detach() for name, x in vars(problem).items()})
    lam, status, steps = _minimise(fixed, max_steps)
    solved = (status == Status.OK.value).unsqueeze(-1)
    linearise = partial(_linearise, solved, problem.empty)
    lam = attach(lam, linearise, problem.weights, problem.apart)
    return problem.answer(nu, lam, status, steps, torch.promote_types(values.dtype, moments.dtype))


class _Step(NamedTuple):
    direction: Tensor  # (..., k)
    slope: Tensor  # the length of g, (...)
    fall: Tensor  # v of the module's text, (...)
    reach: Tensor  # s, (...)
    noise: Tensor  # what rounding may add to s, +inf where the curvature is lost, (...)


@dataclass(frozen=True, eq=False)
class _Problem:
    """In coordinates z in which the points of the support have covariance I.

    z = (k - moments) basis; directions in which the features do not vary have columns of zero.
    """

    weights: Tensor  # (..., n)
    differences: Tensor  # k - moments, (..., n, k)
    apart: Tensor  # z, (..., n, k)
    grain: Tensor  # sizes of what is summed to z, (..., n, k): rounding is eps times this
    basis: Tensor  # (..., k, k)
    empty: Tensor  # 1 for the directions without variation, (..., k)
    off: Tensor  # of the moments, from the features' affine span, in units of scale, (..., k)
    scale: Tensor  # the features' range, (..., k)
    outside: Tensor  # whether off is beyond rounding, (...)

    @classmethod
    def make(cls, nu: Empirical, values: Tensor, moments: Tensor) -> _Problem:
        dtype = torch.promote_types(values.dtype, moments.dtype)
        inner = certificate_dtype(values.device)
        weights, values, moments = (x.to(inner) for x in (nu.weights, values, moments))
        live = (weights.detach() > 0).unsqueeze(-1).to(inner)  # (..., n, 1)
        count = live.sum(-2)  # (..., 1)
        centre = (live * values.detach()).sum(-2) / count  # (..., k)
        spread = live * (values.detach() - centre.unsqueeze(-2))
        scale = spread.abs().amax(-2)
        scale = where(scale > 0, scale, 1.0)
        # Features far from zero beside their range carry that much rounding, as moments do.
        far = (centre / scale).abs().amax(-1, keepdim=True)  # (..., 1)
        eps = torch.finfo(dtype).eps * (1 + far)
        turn, size = _right_vectors(spread / scale.unsqueeze(-2))
        on = size > eps * max(spread.shape[-2:]) * size.amax(-1, keepdim=True)  # (..., k)
        stretch = where(on, count.sqrt() / where(on, size, 1.0), 0.0)
        basis = turn.mT * stretch.unsqueeze(-2) / scale.unsqueeze(-1)
        target = (moments.detach() - centre) / scale
        off = _apply(turn.mT, where(~on, _apply(turn, target), 0.0))
        outside = (off.abs() > 64 * on.shape[-1] * eps).any(-1)
        # Differences first: near a vertex they are exact, and products with the basis are not.
        differences = values - moments.unsqueeze(-2)
        grain = differences.detach().abs() @ basis.abs()
        apart = differences @ basis
        return cls(weights, differences, apart, grain, basis, (~on).to(inner), off, scale, outside)

    def tilt(self, lam: Tensor) -> Tensor:
        return tilt(_dot(lam, self.apart), self.weights)[0]

    def value(self, lam: Tensor) -> Tensor:
        """D"""
        return tilt(_dot(lam, self.apart), self.weights)[1].squeeze(-1)

    def newton(self, lam: Tensor, ridge: Tensor | None = None) -> _Step:
        """The step of Newton's method, for the curvature H + ridge I."""
        p = self.tilt(lam)
        empty = self.empty if ridge is None else self.empty + ridge.unsqueeze(-1)
        slope, about, inverse, lost = _quadratic(p, self.apart, empty)
        direction = -_apply(inverse, slope)
        moved = where(self.weights > 0, _dot(direction, about), 0.0)
        reach = moved.amax(-1) - moved.amin(-1)
        rounding = 4 * torch.finfo(lam.dtype).eps * average(p, self.grain)
        noise = _dot(_apply(inverse.abs(), rounding), about.abs()).amax(-1)
        noise = where(~lost & noise.isfinite(), noise, math.inf)
        fall = -(slope * direction).sum(-1)
        return _Step(direction, slope.square().sum(-1).sqrt(), fall, reach, noise)

    def separated(self, lam: Tensor) -> Tensor:
        """Whether <lam, k - moments> < 0 at every point, beyond rounding. (...)"""
        slack = 64 * torch.finfo(lam.dtype).eps * _dot(lam.abs(), self.grain)
        below = _dot(lam, self.apart) < -slack
        return (below | (self.weights == 0)).all(-1)

    def answer(
        self, nu: Empirical, lam: Tensor, status: Tensor, steps: Tensor, dtype: torch.dtype
    ) -> MaximumEntropy:
        p = self.tilt(lam)
        missed = (average(p, self.differences) / self.scale).abs().amax(-1)
        multiplier = _apply(self.basis, lam)
        apart = self.outside.unsqueeze(-1)
        multiplier = torch.where(apart, self.off / self.scale, multiplier)
        divergence = (lam * average(p, self.apart)).sum(-1) - self.value(lam)
        divergence = where(status != Status.INFEASIBLE.value, divergence, math.inf)
        multiplier, divergence, missed = (x.to(dtype) for x in (multiplier, divergence, missed))
        measure = Empirical._unchecked(nu.points, p.to(dtype))
        return MaximumEntropy(measure, multiplier, divergence, missed, status, steps)


def _linearise(
    solved: Tensor, empty: Tensor, lam: Tensor, weights: Tensor, apart: Tensor
) -> tuple[Tensor, Solve]:
    """-D', with solutions for D''; nothing moves the rows that are not solved. (..., k)"""
    p = tilt(_dot(where(solved, lam, 0.0), apart), weights)[0]
    slope, _, inverse, _ = _quadratic(p, apart, empty)
    return -slope, lambda right: where(solved, _apply(inverse, right), 0.0)


def _quadratic(p: Tensor, apart: Tensor, empty: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(D', z - D', the inverse of D'' + diag(empty), whether it is lost in rounding)."""
    slope = average(p, apart)
    about = apart - slope.unsqueeze(-2)
    curvature = (p.unsqueeze(-1) * about).mT @ about + torch.diag_embed(empty)
    # Scaled to a diagonal of one: near a vertex the curvature spans many decades.
    size = curvature.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(p.dtype).tiny).sqrt()
    sizes = size.unsqueeze(-1) * size.unsqueeze(-2)
    even = curvature / sizes
    factor, info = torch.linalg.cholesky_ex(even)
    lost = (info != 0) | ~(factor.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    eye = torch.eye(*even.shape[-2:]).to(even)
    factor = torch.where(lost[..., None, None], eye, factor)
    # Not cholesky_inverse, whose third derivative is wrong in forward mode.
    inverse = torch.cholesky_solve(eye.expand_as(factor), factor)
    return slope, about, inverse / sizes, lost


def _minimise(problem: _Problem, max_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """lam, status and steps."""
    batch = torch.broadcast_shapes(problem.weights.shape[:-1], problem.apart.shape[:-2])
    lam = problem.apart.new_zeros(*batch, problem.apart.shape[-1])
    steps = torch.zeros(batch, dtype=torch.int64, device=lam.device)
    live = ~problem.outside.expand(batch)
    status = torch.where(live, Status.MAX_STEPS.value, Status.INFEASIBLE.value)
    for _ in range(max_steps):
        step = problem.newton(lam)
        sure = step.noise <= _SURE * step.reach.clamp_min(1.0)
        is_solved = live & sure & (step.reach <= (10 * step.noise).clamp_min(_NEAR))
        along = live & problem.separated(step.direction)
        size = step.direction.abs().amax(-1, keepdim=True)
        lam = torch.where(along.unsqueeze(-1), step.direction / size, lam)
        apart = live & (along | problem.separated(lam))
        status = torch.where(is_solved, Status.OK.value, status)
        status = torch.where(apart, Status.INFEASIBLE.value, status)
        # Where curvature is lost in rounding and nothing is left to gain, the moments are on the
        # boundary, as far as these numbers can tell.
        live = live & ~is_solved & ~apart & (sure | (step.slope > _STEEP))
        if not bool(live.any()):
            break
        if bool((live & ~sure).any()):  # d' H d <= v, and so the proof, hold with a ridge too
            step = problem.newton(lam, where(~sure, step.slope, 0.0))
        length = where(live, _length(problem, lam, step, live), 0.0)
        lam = lam + length.unsqueeze(-1) * where(live.unsqueeze(-1), step.direction, 0.0)
        steps = steps + live
    solved = (status == Status.OK.value).unsqueeze(-1)
    for _ in range(_POLISH):
        step = problem.newton(where(solved, lam, 0.0))
        lam = torch.where(solved, lam + step.direction, lam)
    return lam, status, steps


def _length(problem: _Problem, lam: Tensor, step: _Step, live: Tensor) -> Tensor:
    """The best of a long step and its halves, or the safe step where none of them falls as far.

    The best, and not the first that falls enough; and at first not too long: where all mass is on
    one point, there is no curvature to go on with.
    """
    reach = step.reach.clamp_min(torch.finfo(lam.dtype).eps)
    safe = reach.log1p() / reach
    promised = step.fall * ((1 + reach) * reach.log1p() - reach) / reach.square()
    far = live & (reach > 1)  # below, the whole step falls by the same proof
    now = _dot(lam, problem.apart)
    room = _ROOM + 2 * (now.amax(-1) - now.amin(-1))
    length = torch.maximum((room / reach).clamp(max=1.0), safe)
    if not bool(far.any()):
        return length

    def value(t: Tensor) -> Tensor:
        return problem.value(lam + t.unsqueeze(-1) * step.direction)

    least, going = value(length), far
    for _ in range(_LINES):
        half = value(length / 2)
        going = going & (half < least) & (length / 2 > safe)  # convex: once it rises, it is done
        if not bool(going.any()):
            break
        length, least = torch.where(going, length / 2, length), torch.where(going, half, least)
    short = far & ~(least <= problem.value(lam) - promised)
    return torch.where(short, safe, length)


def _dot(lam: Tensor, z: Tensor) -> Tensor:
    """<lam, z_i>, (..., k) and (..., n, k) -> (..., n)"""
    return (lam.unsqueeze(-2) @ z.mT).squeeze(-2)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _right_vectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """All k right singular vectors, as rows, with their singular values. (..., k, k), (..., k)"""
    n, k = matrix.shape[-2:]
    _, size, turn = torch.linalg.svd(matrix, full_matrices=n < k)
    return turn, torch.nn.functional.pad(size, (0, k - size.shape[-1]))


def _check(values: Tensor, moments: Tensor, nu: Empirical) -> None:
    check_tensor(moments, "moments")
    if values.dim() < 2 or values.shape[-2] != nu.size or not values.is_floating_point():
        raise ValueError(
            f"features must give (..., {nu.size}, k), floating point, got {values.dtype} "
            f"{tuple(values.shape)}; for one feature let k be 1"
        )
    k = values.shape[-1]
    if k == 0:
        raise ValueError(
            f"there must be a feature, got {tuple(values.shape)}; without any, nu itself is nearest"
        )
    if moments.dim() < 1 or moments.shape[-1] != k or not moments.is_floating_point():
        raise ValueError(
            f"moments must be (..., {k}), one for each feature, floating point, got "
            f"{moments.dtype} {tuple(moments.shape)}"
        )
    for tensor, name in ((values, "features"), (moments, "moments")):
        check_finite(tensor, name)
