"""How fast the output of one attention can change with its query.

It sharpens corollary 24 of Vuckovic et al. (2020).

With scores <q, k_i> / tau and output y(q) = sum_i p_i(q) v_i, the Jacobian is r / tau times a
covariance of values and keys,

    J = r / tau Cov_w(v, k),    w_i = s_i / r,  r = sum_i s_i,  s_i = p_i^(2 - alpha) on the support

(s = p and r = 1 for Shannon). Three facts bound it, for unit vectors a and b and with
x = <a, v>, y = <b, k>:

**Pairs.** max over all distributions w of Cov_w(x, y) is the largest of (x_i - x_j)(y_i - y_j) / 4.
For a fixed mean m of x the covariance is E_w[(x - m) y], linear in w under two linear constraints:
some optimal w has at most two points, where Cov = w_1 w_2 (x_1 - x_2)(y_1 - y_2). The supremum over
a and b of that is the product of the lengths of the differences, in the dual norm for keys:

    |J| <= r / (4 tau) max_ij |v_i - v_j| |k_i - k_j|*.                          (1)

It is attained in the limit, for softmax, whenever the best pair is an edge of the keys' hull; and
it is at most diam(V) diam(K) / (4 tau).

**Scatter**, for alpha > 1, where r may reach n^(alpha - 1). F_x = r Var_w(x), which is at most
sum_i s_i (x_i - c)^2 for every c, and sum_i s_i^(1 / (2 - alpha)) = 1; so by Hölder, and then by
log-convexity of norms,

    F_x <= (sum_i |x_i - c|^(2 / (alpha - 1)))^(alpha - 1)
        <= (largest eigenvalue of the scatter about c)^(alpha - 1) (max |v_i - c|)^(4 - 2 alpha).

With z = (t v, k / t) for any t > 0 and r Cov(x, y) = (F_{tx + y/t} - F_{tx - y/t}) / 4,

    |J| <= 1 / (2 tau) * that bound of F for the points z.                           (2)

**A ball of queries.** The derivative of J is a third cumulant, at most
diam(V) diam(K)^2 / (2 sqrt(12) tau^2) (Cauchy and Schwarz; a fourth central moment on an interval
of length R is at most R^4 / 12), so for softmax and |q - q0| <= radius

    |J(q)| <= |J(q0)| + radius diam(V) diam(K)^2 / (2 sqrt(12) tau^2).               (3)
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._numerics import check_finite, check_tensor
from fenchel._solve import solve
from fenchel.bounds.bound import Bound
from fenchel.bounds.domain import Ball, Everywhere
from fenchel.bounds.maps import Guesses, MapTrials, TrialStart, VectorMap
from fenchel.regularizers import Regularizer, Shannon, Tsallis
from fenchel.regularizers.contract import resolve_regularizer

DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}
_THIRD = 1 / (2 * math.sqrt(12))
_SHARES = torch.logspace(-2, 2, 41, dtype=torch.float64)  # t^2, relative to the spreads' ratio


def query_lipschitz(
    keys: Tensor,
    values: Tensor,
    regularizer: Regularizer | Module | None = None,
    *,
    norm: float = 2.0,
    around: Tensor | None = None,
    radius: float | None = None,
) -> Bound:
    """Of q -> sum_i p_i v_i with p = solve(<q, k_i>): keys (n, d), values (n, e).

    The scores are divided by the regulariser's temperature alone: for an attention layer that
    divides by sqrt(d) as well, give the product of the two. What is added to the scores (masks,
    position biases) changes nothing for Shannon. The bound holds for all queries, or, tighter, for
    those within `radius` of `around`.

    >>> keys, values = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [3.0]])
    >>> query_lipschitz(keys, values, fl.Shannon(0.5)).value
    3.0

    regularizer: Shannon, or Tsallis with alpha up to 2, or a module that makes one; Shannon() if
    None.
    norm: of queries and outputs, 1, 2 or inf. around: (d), with radius, for Shannon and norm 2.
    """
    keys, values = _prepare(keys, values)
    omega = _with_numbers(regularizer)
    temperature = _parameters(omega)[1]
    # Only differences matter; taken first, they are exactly zero where keys or values agree.
    reach, start = float(values.norm(dim=-1).max()), values[0]
    keys, values = keys - keys[0], values - start
    bound = float(query_bound(keys, values, omega, norm))
    domain: Everywhere | Ball = Everywhere()
    if around is not None or radius is not None:
        domain = _ball(keys, omega, norm, around, radius)
        bound = min(bound, _near(keys, values, omega, domain))
    attention = VectorMap(
        function=lambda q: solve(q @ keys.mT, omega).weights @ values + start,
        shape=keys.shape[1:],
        domain=domain,
        norm=norm,
        reach=reach,
    )
    begin = TrialStart(
        unit=temperature / (float(distances(keys).max()) or 1.0),
        guesses=_edges(keys, values, temperature, norm, domain),
    )
    assumption = f"{domain}; these keys and values; scores <q, k> / {temperature:g}, {omega}"
    return Bound("query to output", bound, norm, (assumption,), MapTrials(attention, begin))


def query_bound(
    keys: Tensor,
    values: Tensor,
    regularizer: Regularizer | Module | None = None,
    norm: float = 2.0,
) -> Tensor:
    """The bound of `query_lipschitz` alone, in float64, for many sets at once.

    keys (..., n, d), values (..., n, e) -> (...)
    """
    alpha, temperature = _parameters(_with_numbers(regularizer))
    if isinstance(norm, bool) or not isinstance(norm, int | float) or norm not in DUAL:
        raise ValueError(f"norm must be 1, 2 or inf, got {norm!r}")
    for name, x in (("keys", keys), ("values", values)):
        _check_vectors(name, x)
    if keys.shape[:-1] != values.shape[:-1]:
        shapes = f"{tuple(keys.shape)} and {tuple(values.shape)}"
        raise ValueError(f"keys (..., n, d) and values (..., n, e) do not fit: {shapes}")
    keys, values = keys.to(torch.float64), values.to(torch.float64)
    # the temperature first: it often undoes the size of the keys
    pairs = distances(values, norm) * (distances(keys, DUAL[norm]) / temperature)
    n = keys.shape[-2]
    bound: Tensor = n ** (alpha - 1) * pairs.flatten(-2).amax(-1) / 4
    if alpha > 1 and norm == 2:
        bound = torch.minimum(bound, _scatter_bound(keys, values, alpha, temperature))
    return bound


def distances(x: Tensor, norm: float = 2.0) -> Tensor:
    """(..., n, d) -> (..., n, n), by differences: from products they may come out too small."""
    size = x.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(size > 0, size / size.frexp().mantissa, 1.0)  # squares stay in range
    x = x / unit  # a power of two: without rounding
    apart: Tensor = torch.cdist(x, x, norm, compute_mode="donot_use_mm_for_euclid_dist")
    return apart * unit


def _scatter_bound(keys: Tensor, values: Tensor, alpha: float, temperature: float) -> Tensor:
    """(2), for the best t of a grid. (...)"""
    about = [x - x.mean(-2, keepdim=True) for x in (values, keys)]
    units = [x.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300) for x in about]
    scaled = [x / unit for x, unit in zip(about, units, strict=True)]  # squares stay in range
    norms = [x.square().sum((-2, -1), keepdim=True).sqrt().clamp_min(1e-300) for x in scaled]
    value, key = (x / size for x, size in zip(scaled, norms, strict=True))
    best = torch.full(keys.shape[:-2], math.inf, dtype=torch.float64, device=keys.device)
    for share in _SHARES.tolist():
        z = torch.cat([value * share**0.5, key * share**-0.5], -1)  # centred already
        largest = z.square().sum(-1).amax(-1)
        spread = torch.linalg.matrix_norm(z, 2).square()
        best = torch.minimum(best, spread ** (alpha - 1) * largest ** (2 - alpha) / 2)
    sizes = units[0] * norms[0] * (units[1] / temperature * norms[1])
    return best * sizes[..., 0, 0]


def _near(keys: Tensor, values: Tensor, omega: Shannon | Tsallis, ball: Ball) -> float:
    """(3)"""
    temperature = _parameters(omega)[1]
    assert ball.centre is not None
    weights = solve(ball.centre @ keys.mT, omega).weights
    about = keys - weights @ keys
    here = float(torch.linalg.matrix_norm((values * weights.unsqueeze(-1)).mT @ about, 2))
    wide, far = (float(distances(x).max()) for x in (values, keys))
    return here / temperature + ball.radius * _THIRD * wide * far**2 / temperature**2


def _with_numbers(choice: Regularizer | Module | None) -> Shannon | Tsallis:
    """The regulariser, if it has a bound, with numbers where it held tensors of one."""
    omega = Shannon() if choice is None else resolve_regularizer(choice)
    if not isinstance(omega, Shannon | Tsallis):
        kind = type(omega).__name__
        raise TypeError(f"these bounds are for Shannon and Tsallis, got {kind}")
    settings = {name: x for name, x in vars(omega).items() if isinstance(x, Tensor)}
    if any(x.numel() != 1 for x in settings.values()):
        raise TypeError(
            "alpha and temperature must be numbers here, not tensors with one for each head: every "
            "head has a bound of its own; bound head by head, with Tsallis(alpha[head].item())"
        )
    numbers = {name: x.item() for name, x in settings.items()}
    return replace(omega, **numbers)  # type: ignore[arg-type]


def _parameters(omega: Shannon | Tsallis) -> tuple[float, float]:
    """(alpha, temperature)"""
    alpha = float(omega.alpha) if isinstance(omega, Tsallis) else 1.0
    if alpha > 2:
        raise ValueError(
            f"alpha must be at most 2, got {alpha:g}: beyond it the map is not Lipschitz, since "
            "p^(2 - alpha) has no bound where a weight leaves the support"
        )
    return alpha, float(omega.temperature)


def _check_vectors(name: str, x: object) -> None:
    check_tensor(x, name)
    assert isinstance(x, Tensor)
    if x.dim() < 2 or 0 in x.shape[-2:] or not x.is_floating_point():
        shown = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"{name} must be (n, d), floating point, not empty; got {shown}")
    check_finite(x, name)


def _prepare(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    for name, x in (("keys", keys), ("values", values)):
        _check_vectors(name, x)
        if x.dim() != 2:
            raise ValueError(f"{name} must be (n, d), got {tuple(x.shape)}; query_bound takes many")
    if len(keys) != len(values):
        raise ValueError(f"one value per key is needed, got {len(keys)} keys, {len(values)} values")
    return keys.detach().to(torch.float64), values.detach().to(torch.float64)


def _ball(
    keys: Tensor,
    omega: Shannon | Tsallis,
    norm: float,
    around: Tensor | None,
    radius: float | None,
) -> Ball:
    if around is None or radius is None:
        raise ValueError("around and radius go together: the ball of queries that the bound is for")
    if norm != 2 or not isinstance(omega, Shannon):
        raise ValueError("a ball of queries is for Shannon and norm 2; leave out around and radius")
    check_tensor(around, "around")
    check_finite(around, "around")
    if around.shape != keys.shape[1:]:
        shapes = f"({keys.shape[1]},), got {tuple(around.shape)}"
        raise ValueError(f"around must be one query, {shapes}")
    return Ball(float(radius), around.detach().to(torch.float64))


# ---- where the bound is nearly attained


def _edges(
    keys: Tensor, values: Tensor, temperature: float, norm: float, domain: Everywhere | Ball
) -> Guesses:
    """Queries that share all weight evenly between two keys, for the best pairs.

    log p_i + log p_j is concave in the query: Newton's method, its steps shortened so that no score
    moves by more than about one.
    """

    def guesses(count: int, generator: torch.Generator) -> Tensor:
        pairs = distances(values, norm) * distances(keys, DUAL[norm])
        top = pairs.triu().flatten().topk(min(count, pairs.numel())).indices
        first, second = keys[top // len(keys)], keys[top % len(keys)]
        query = torch.zeros_like(first)
        eye = torch.eye(keys.shape[1], dtype=torch.float64)
        for _ in range(80):
            weights = (query @ keys.mT / temperature).softmax(-1)
            mean = weights @ keys
            about = keys - mean.unsqueeze(-2)
            spread = about.mT @ (weights.unsqueeze(-1) * about)
            trace = spread.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
            step = torch.linalg.solve(
                spread + (1e-12 * trace + 1e-300) * eye, (first + second) / 2 - mean
            )
            moved = (step.unsqueeze(-2) @ about.mT).abs().amax((-2, -1)).unsqueeze(-1)
            query = query + temperature * step / (1 + moved)
        return domain.project(torch.where(query.isfinite(), query, 0.0))

    return guesses
