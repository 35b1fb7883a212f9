"""Mixtures fitted to weights at positions by expectation and maximisation.

Farinhas (2021), eqs. 5.12 to 5.16:

    share_kl = w_l mixing_k N(t_l; mean_k, covariance_k) / sum over k
    mass_k = sum_l share_kl,   mean_k, covariance_k = the moments under share_kl / mass_k

Everything is batched and in the log domain; a mode without mass keeps what it had and weight 0.
A fixed number of iterations is differentiable in the weights and the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._kernels import continuous as kernels
from fenchel._kernels.route import against_continuous
from fenchel._numerics import check_whole, transformed, where
from fenchel._solve import solve
from fenchel.continuous import matrices
from fenchel.continuous.densities import Gaussian, Paraboloid
from fenchel.continuous.mixture import Mixture, log_mixing
from fenchel.continuous.moments import (
    FLOOR,
    checked_weights,
    least_variance,
    moments_with_floor,
    normalise,
)
from fenchel.regularizers import Regularizer, Shannon
from fenchel.regularizers.contract import resolve_regularizer

Family = type[Gaussian] | type[Paraboloid]


class Parameters(NamedTuple):
    """Of Gaussians in batch: (..., K), (..., K, d), (..., K, d, d)."""

    mixing: Tensor
    mean: Tensor
    covariance: Tensor


class Data(NamedTuple):
    """Weights that sum to one (..., L), positions (L, d) from an origin, the least variance."""

    weights: Tensor
    positions: Tensor
    origin: Tensor
    least: Tensor


# ---- where to start


class Start(Protocol):
    """Makes one or more starting points, the axis of restarts in front."""

    def parameters(self, data: Data, modes: int) -> Parameters: ...


@dataclass(frozen=True)
class Regions:
    """The box of the positions cut into equal pieces, one mode in each (the thesis' start).

    2 modes: halves of the first coordinate; 4: quarters; K: rows times columns as even as can be.
    """

    def parameters(self, data: Data, modes: int) -> Parameters:
        inside = _pieces(data.positions, modes)  # (K, L)
        share = data.weights.unsqueeze(-2) * inside.to(data.weights.dtype)
        # A piece that has no weight gets the moments of its positions, and mixing weight 0.
        even = inside.to(share.dtype).expand(share.shape)
        mass = share.sum(-1)
        used = where(mass > 0, mass, 1.0).unsqueeze(-1)
        rule = torch.where(
            (mass > 0).unsqueeze(-1), share / used, even / even.sum(-1, keepdim=True).clamp_min(1)
        )
        mean, covariance = moments_with_floor(rule, data.positions, data.least)
        return Parameters(*(x.unsqueeze(0) for x in (mass, mean, covariance)))


@dataclass(frozen=True)
class Random:
    """Means drawn from the weighted positions, all with the covariance of the whole."""

    restarts: int = 3
    generator: torch.Generator | None = None

    def parameters(self, data: Data, modes: int) -> Parameters:
        check_whole(self.restarts, "restarts", 1)
        batch = data.weights.shape[:-1]
        flat = data.weights.detach().reshape(-1, data.weights.shape[-1])
        # Without replacement where enough positions carry weight: equal means would stay equal.
        chances = (flat + 1e-12 * flat.amax(-1, keepdim=True)).repeat(self.restarts, 1)
        drawn = torch.multinomial(chances, modes, generator=self.generator)
        shape = (self.restarts, *batch, modes)
        mean = data.positions[drawn.reshape(shape)]
        every = data.weights.unsqueeze(-2)
        _, whole = moments_with_floor(every, data.positions, data.least)
        covariance = whole.expand(*shape, *whole.shape[-2:])
        return Parameters(data.weights.new_full(shape, 1 / modes), mean, covariance)


# ---- the algorithm


def fit_mixture(
    weights: Tensor,
    positions: Tensor,
    modes: int = 2,
    *,
    iterations: int = 20,
    tolerance: float | None = None,
    start: Start | Mixture | None = None,
    regularizer: Regularizer | Module | None = None,
    family: Family = Gaussian,
    floor: float = FLOOR,
) -> Mixture:
    """A mixture of `modes` Gaussians that maximises sum_l w_l log p(t_l).

    weights (..., L) >= 0, positions (L, d) -> batch (...).

    iterations: all of them are done, and differentiated; with a `tolerance`, at most so many,
        until the log-likelihood of every member of the batch gains less.
    start: `Regions()` by default, `Random(restarts)` (the best is kept), or a mixture. `Random` is
        random from call to call unless it has a generator.
    regularizer: mixing = argmax <log mass, p> - Omega(p). Shannon, the default, is ordinary EM;
        with `Tsallis(2.0)` a mode whose log mass falls 1 or more behind the largest gets nothing.
    family: `Paraboloid` gives sparse modes with the moments of the Gaussian ones.

    >>> import fenchel.continuous as fc
    >>> positions = fc.cell_centers(8)
    >>> weights = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0])
    >>> fit_mixture(weights, positions, 2).mixing
    tensor([0.2500, 0.7500])
    """
    _check_tolerance(tolerance)
    data = _data(weights, positions, iterations, floor, modes=modes)
    regularizer = Shannon() if regularizer is None else resolve_regularizer(regularizer)
    initial = _begin(start, data, modes)
    fits = _iterate(initial, data, iterations, tolerance, regularizer)
    best = _best(fits, data)
    if family is Gaussian:
        return Mixture(best.mixing, Gaussian(best.mean + data.origin, best.covariance))
    if family is Paraboloid:
        components = Paraboloid.from_covariance(best.mean + data.origin, best.covariance)
        return Mixture(best.mixing, components)
    raise TypeError(f"family must be Gaussian or Paraboloid, got {family!r}")


def log_likelihood(parameters: Parameters, data: Data) -> Tensor:
    """sum_l w_l log p(t_l). (...)"""
    joint = _joint(parameters, data)
    return (data.weights * torch.logsumexp(joint, -2)).sum(-1)


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a finite number >= 0 or None, got {tolerance}")


def _data(weights: Tensor, positions: Tensor, iterations: int, floor: float, **most: int) -> Data:
    """most: the number of modes, under the name that the caller gave it."""
    check_whole(iterations, "iterations", 0)
    weights, positions = checked_weights(weights, positions)
    for name, modes in most.items():
        check_whole(modes, name, 1)
        if modes > len(positions):
            raise ValueError(
                f"{name} must be at most the number of positions, {len(positions)}, got {modes}"
            )
    least = least_variance(positions, floor)
    origin = positions.detach().mean(0)  # far from zero, squares would lose the digits
    return Data(normalise(weights), positions - origin, origin, least)


def _starting(start: Start | None, usual: Start, allowed: str) -> Start:
    start = usual if start is None else start
    if isinstance(start, type) or not hasattr(start, "parameters"):
        raise TypeError(f"start must be {allowed}, got {start!r}")
    return start


def _begin(start: Start | Mixture | None, data: Data, modes: int) -> Parameters:
    if not isinstance(start, Mixture):
        allowed = "Regions(), Random() or a mixture"
        return _starting(start, Regions(), allowed).parameters(data, modes)
    if start.mixing.shape[-1] != modes:
        raise ValueError(f"the start has {start.mixing.shape[-1]} modes, asked for {modes}")
    if start.dim != data.positions.shape[-1]:
        raise ValueError(f"the start has d = {start.dim}, positions d = {data.positions.shape[-1]}")
    batch, like = torch.broadcast_shapes(start.batch_shape, data.weights.shape[:-1]), data.positions
    parts = (
        start.mixing,
        start.components.mean - data.origin.to(start.mixing),
        start.components.covariance_matrix,
    )
    shapes = (part.shape[len(start.batch_shape) :] for part in parts)
    spread = (
        part.to(like).expand(*batch, *shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return Parameters(*(part.unsqueeze(0) for part in spread))


def _iterate(
    now: Parameters, data: Data, most: int, tolerance: float | None, regularizer: Regularizer
) -> Parameters:
    if tolerance is None:
        return _advance(now, data, most, regularizer)
    reached = None
    for _ in range(most):
        now = _advance(now, data, 1, regularizer)
        before, reached = reached, log_likelihood(now, data).detach()
        if before is not None and bool((reached - before <= tolerance).all()):
            break
    return now


def _advance(now: Parameters, data: Data, steps: int, regularizer: Regularizer) -> Parameters:
    """So many iterations, in native code where no derivative is asked for."""
    if _is_ordinary(regularizer) and _is_native(now, data):
        weights = data.weights.expand(*now.mixing.shape[1:-1], -1)
        operands = (weights, data.positions, data.least, *now)
        return Parameters(*kernels.mixture_iterations(*operands, steps))
    for _ in range(steps):
        now = _step(now, data, regularizer)
    return now


def _is_ordinary(regularizer: Regularizer) -> bool:
    """Softmax of the logarithms of the masses is the masses themselves."""
    if not isinstance(regularizer, Shannon) or isinstance(regularizer.temperature, Tensor):
        return False
    return regularizer.temperature == 1.0


def _is_native(now: Parameters, data: Data) -> bool:
    if transformed() or data.positions.shape[1] > kernels.MOST_MIXTURE_AXES:
        return False
    operands = (data.weights, data.positions, *now)
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return not followed and against_continuous(data.weights) is None


def _step(now: Parameters, data: Data, regularizer: Regularizer) -> Parameters:
    joint = _joint(now, data)
    share = torch.softmax(joint, -2) * data.weights.unsqueeze(-2)  # (..., K, L)
    mass = share.sum(-1)
    alive = mass > torch.finfo(mass.dtype).tiny
    rule = share / where(alive, mass, 1.0).unsqueeze(-1)
    mean, covariance = moments_with_floor(rule, data.positions, data.least)
    mean = torch.where(alive.unsqueeze(-1), mean, now.mean)
    covariance = torch.where(alive[..., None, None], covariance, now.covariance)
    if _is_ordinary(regularizer):
        return Parameters(mass, mean, covariance)
    return Parameters(solve(log_mixing(mass), regularizer).weights, mean, covariance)


def _joint(now: Parameters, data: Data) -> Tensor:
    """log mixing_k N(t_l; mean_k, covariance_k). (..., K, L)"""
    factor = matrices.cholesky(now.covariance).unsqueeze(-3)
    # The coordinate axis last in shape but first in memory: sums run along L.
    lines = [line - now.mean[..., i, None] for i, line in enumerate(data.positions.mT)]
    apart = torch.stack(lines).movedim(0, -1)  # (..., K, L, d)
    return log_mixing(now.mixing).unsqueeze(-1) + matrices.normal_log_density(apart, factor)


def _best(fits: Parameters, data: Data) -> Parameters:
    """Of the restarts, for each member of the batch. (R, ..., K) -> (..., K)"""
    if fits.mixing.shape[0] == 1:
        return Parameters(*(x[0] for x in fits))
    return _choose(fits, _leading(log_likelihood(fits, data)))


def _leading(likelihood: Tensor) -> Tensor:
    """The first restart that no other surpasses by more than rounding. (R, ...) -> (...)

    Several may reach one solution with its modes in another order; which of them is ahead in the
    last digits differs from processor to processor.
    """
    best = likelihood.amax(0)
    rounding = 1024 * torch.finfo(best.dtype).eps * (1 + best.abs())
    return (likelihood >= best - rounding).to(torch.int8).argmax(0)


def _choose(candidates: Parameters, index: Tensor) -> Parameters:
    """candidates (R, ..., K), index (...)"""

    def pick(x: Tensor) -> Tensor:
        where_to = index.reshape(1, *index.shape, *(1,) * (x.dim() - 1 - index.dim()))
        return x.gather(0, where_to.expand(1, *x.shape[1:])).squeeze(0)

    return Parameters(*(pick(x) for x in candidates))


def _pieces(positions: Tensor, modes: int) -> Tensor:
    """Which of `modes` equal pieces of the box holds a position. bool (K, L)"""
    where_to = positions.detach()
    lines = where_to.unbind(-1)
    wide = [line for line in lines if line.is_meta or bool(line.max() > line.min())][:2]
    columns = 1
    if len(wide) > 1:
        columns = max(k for k in range(1, math.isqrt(modes) + 1) if modes % k == 0)
    rows = modes // columns
    number = _cell(wide[0] if wide else where_to[:, 0], rows) * columns
    if columns > 1:
        number = number + _cell(wide[1], columns)
    return number == torch.arange(modes, device=positions.device).unsqueeze(-1)


def _cell(line: Tensor, count: int) -> Tensor:
    low, high = line.min(), line.max()
    size = torch.where(high > low, high - low, torch.ones_like(high))
    return ((line - low) / size * count).long().clamp(max=count - 1)


# ---- how many modes


@dataclass(frozen=True)
class PerMode:
    """price times the number of modes (the criterion of Farinhas, 2021, table 6.4)."""

    price: float = 10.0

    def __call__(self, modes: int, dim: int, positions: int) -> float:
        return self.price * modes


@dataclass(frozen=True)
class AIC:
    """Twice the number of free parameters."""

    def __call__(self, modes: int, dim: int, positions: int) -> float:
        return 2.0 * free_parameters(modes, dim)


@dataclass(frozen=True)
class BIC:
    """log(positions) for each free parameter."""

    def __call__(self, modes: int, dim: int, positions: int) -> float:
        return math.log(positions) * free_parameters(modes, dim)


@dataclass(frozen=True)
class MDL:
    """Rissanen's two-part code, half a log(positions) for each parameter: twice it is BIC."""

    def __call__(self, modes: int, dim: int, positions: int) -> float:
        return BIC()(modes, dim, positions)


def free_parameters(modes: int, dim: int) -> int:
    """Means, covariances and mixing weights: 6 K - 1 in the plane."""
    return modes * (dim + dim * (dim + 1) // 2) + modes - 1


Penalty = Callable[[int, int, int], float]


def select_mixture(
    weights: Tensor,
    positions: Tensor,
    max_modes: int = 5,
    penalty: float | Penalty = 10.0,
    *,
    iterations: int = 20,
    tolerance: float | None = None,
    start: Start | None = None,
    floor: float = FLOOR,
) -> Mixture:
    """The mixture of 1 to `max_modes` modes with the least -2 L sum_l w_l log p(t_l) + penalty.

    L is the number of positions, weights sum to one. `penalty`: a price for each mode, `AIC()`,
    `BIC()`, `MDL()`, or a function of (modes, dim, positions). start: `Random(3)` by default, which
    differs from call to call; `Random(3, generator)` or `Regions()` do not.
    Each member of the batch has its own number, `mixture.modes`; mixing weights beyond it are 0.

    >>> import fenchel.continuous as fc
    >>> positions = fc.cell_centers(20)
    >>> weights = torch.where((positions[:, 0] - 0.5).abs() > 0.4, 1.0, 0.0)
    >>> int(fc.select_mixture(weights, positions, start=fc.Regions()).modes)
    2
    """
    _check_tolerance(tolerance)
    if isinstance(penalty, int | float) and not math.isfinite(penalty):
        raise ValueError(f"penalty must be finite, got {penalty}")
    price = PerMode(float(penalty)) if isinstance(penalty, int | float) else penalty
    if isinstance(price, type) or not callable(price):
        raise TypeError(
            f"penalty must be a number, AIC(), BIC(), MDL() or a function, got {price!r}"
        )
    data = _data(weights, positions, iterations, floor, max_modes=max_modes)
    allowed = "Regions() or Random(), which start any number of modes"
    start = _starting(start, Random(), allowed)
    fits, criteria = [], []
    for modes in range(1, max_modes + 1):
        initial = (Regions() if modes == 1 else start).parameters(data, modes)
        fit = _best(_iterate(initial, data, iterations, tolerance, Shannon()), data)
        cost = price(modes, positions.shape[1], len(positions))
        criteria.append(-2 * len(positions) * log_likelihood(fit, data).detach() + cost)
        fits.append(_pad(fit, max_modes))
    stacked = Parameters(*(torch.stack(x) for x in zip(*fits, strict=True)))
    best = _choose(stacked, torch.stack(criteria).argmin(0))
    return Mixture(best.mixing, Gaussian(best.mean + data.origin, best.covariance))


def _pad(parameters: Parameters, modes: int) -> Parameters:
    """Copies of the first component with mixing weight 0 up to so many."""
    mixing, mean, covariance = parameters
    missing = modes - mixing.shape[-1]
    zero = torch.zeros_like(mixing[..., :1]).expand(*mixing.shape[:-1], missing)
    means = mean[..., :1, :].expand(*mean.shape[:-2], missing, -1)
    covariances = covariance[..., :1, :, :].expand(*covariance.shape[:-3], missing, -1, -1)
    return Parameters(
        torch.cat([mixing, zero], -1),
        torch.cat([mean, means], -2),
        torch.cat([covariance, covariances], -3),
    )
