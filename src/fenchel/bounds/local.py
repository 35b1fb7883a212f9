"""The Lipschitz constant at a point: the operator norm of the Jacobian there.

It bounds nothing beyond the point, and is what every bound must exceed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fenchel._numerics import check_tensor, check_whole

_COLUMNS = 2**22  # numbers of the Jacobian that are held at once


@dataclass(frozen=True)
class LocalConstant:
    """value: the norm. error: a singular value lies within this of it, for norm 2; zero else.
    products: with the Jacobian or its transpose. direction: the input that is stretched most."""

    value: float
    error: float
    products: int
    direction: Tensor


def local_lipschitz(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    norm: float = 2.0,
    *,
    tolerance: float | None = None,
    max_products: int | None = None,
    generator: torch.Generator | None = None,
) -> LocalConstant:
    """sup |J b| / |b| at x, J the Jacobian of `function`: any shapes, norms 1, 2 or inf.

    norm 2: Golub and Kahan's bidiagonalisation with a random start, until the residual is at most
    tolerance * value (1e-10 if None) or max_products (200 if None) are used. The residual is a
    proven distance to a singular value, and with a random start almost surely the largest.
    norm 1: all columns; inf: all rows. These are exact, and take none of the three.

    >>> matrix = torch.tensor([[3.0, 0.0], [4.0, 5.0]], dtype=torch.float64)
    >>> x = torch.zeros(2, dtype=torch.float64)
    >>> round(local_lipschitz(lambda x: matrix @ x, x).value, 6)
    6.708204
    >>> local_lipschitz(lambda x: matrix @ x, x, norm=1).value
    7.0
    """
    check_tensor(x, "x")
    if not x.is_floating_point() or not x.numel():
        raise ValueError(f"x must be floating point and not empty, got {x.dtype} {tuple(x.shape)}")
    if norm not in (1, 2, math.inf):
        raise ValueError(f"norm must be 1, 2 or inf, got {norm!r}")
    x = x.detach()
    if norm != 2:
        _refuse_search(norm, tolerance=tolerance, max_products=max_products, generator=generator)
        with torch.no_grad(), _differentiable():
            return _sum_lines(function, x, norm)
    tolerance = 1e-10 if tolerance is None else tolerance
    max_products = 200 if max_products is None else max_products
    check_whole(max_products, "max_products", 2)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    with torch.no_grad(), _differentiable():
        return _bidiagonalise(_Products(function, x), tolerance, max_products, generator)


def _refuse_search(norm: float, **settings: object) -> None:
    """Norms 1 and inf are sums: nothing is searched for."""
    names = [name for name, setting in settings.items() if setting is not None]
    if names:
        raise ValueError(
            f"{', '.join(names)} belong to the search for norm 2, got norm {norm}, which is "
            "computed exactly; leave them out"
        )


@contextmanager
def _differentiable() -> Iterator[None]:
    """torch's fused attention and its fast path of whole layers have no forward derivatives."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Products:
    """J b and J' a, as flat vectors."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function, self.x, self.count, self.unit = function, x, 0, 1.0
        output, self.pull = torch.func.vjp(function, x)  # type: ignore[misc]
        self.shape = output.shape

    def forward(self, b: Tensor) -> Tensor:
        self.count += 1
        image: Tensor = torch.func.jvp(self.function, (self.x,), (b.view_as(self.x),))[1]
        if self.count == 1:  # in units of the first image, squares stay in range
            largest = float(image.abs().max()) if image.numel() else 0.0
            self.unit = 2.0 ** math.frexp(largest)[1] if 0 < largest < math.inf else 1.0
        return image.flatten() / self.unit

    def backward(self, a: Tensor) -> Tensor:
        self.count += 1
        pulled: Tensor = self.pull(a.reshape(self.shape))[0]
        return pulled.flatten() / self.unit


def _bidiagonalise(
    products: _Products, tolerance: float, most: int, generator: torch.Generator | None
) -> LocalConstant:
    """J V = U B with U, V orthonormal and B upper bidiagonal; B's largest singular value."""
    x = products.x
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    start = torch.randn(x.numel(), generator=generator, dtype=torch.float64).to(x)
    right, left = [start / start.norm()], [products.forward(start / start.norm())]
    diagonal, above = [float(left[0].norm())], list[float]()
    value, error, direction = diagonal[0], math.inf, right[0]
    while diagonal[-1] > 0:
        left[-1] = left[-1] / diagonal[-1]
        remainder = _remove_along(products.backward(left[-1]) - diagonal[-1] * right[-1], right)
        beta = float(remainder.norm())
        u, singular, vh = _decompose(diagonal, above)
        value, error = float(singular[0]), beta * abs(float(u[-1, 0]))
        direction = torch.stack(right, 1) @ vh[0].to(x)
        small = error <= tolerance * value or beta <= 1e-15 * value
        if small or len(right) == x.numel() or products.count + 2 > most:
            break
        right.append(remainder / beta)
        above.append(beta)
        left.append(_remove_along(products.forward(right[-1]) - beta * left[-1], left))
        diagonal.append(float(left[-1].norm()))
    if diagonal[-1] == 0:  # the image is exhausted: B is exact, with its last column
        _, singular, vh = _decompose(diagonal, above)
        value, error, direction = float(singular[0]), 0.0, torch.stack(right, 1) @ vh[0].to(x)
    unit = products.unit
    return LocalConstant(unit * value, unit * error, products.count, direction.view_as(x))


def _decompose(diagonal: list[float], above: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """u, singular values and v' of the bidiagonal matrix."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    u, singular, vh = torch.linalg.svd(
        matrix + torch.diag(torch.tensor(above, dtype=torch.float64), 1)
    )
    return u, singular, vh


def _remove_along(x: Tensor, basis: list[Tensor]) -> Tensor:
    """Less its part along the basis, twice, for what rounding leaves."""
    stacked = torch.stack(basis, 1)
    for _ in range(2):
        x = x - stacked @ (stacked.mT @ x)
    return x


def _sum_lines(function: Callable[[Tensor], Tensor], x: Tensor, norm: float) -> LocalConstant:
    """Norm 1: the largest column's sum of sizes; inf: the largest row's."""
    output, pull = torch.func.vjp(function, x)  # type: ignore[misc]
    count, across = (x.numel(), output) if norm == 1 else (output.numel(), x)
    some = max(1, _COLUMNS // max(1, across.numel()))
    best, place, row = -1.0, 0, x.new_zeros(x.shape)
    for start in range(0, count, some):
        units = torch.zeros(min(some, count - start), count, dtype=x.dtype, device=x.device)
        units[torch.arange(len(units)), start + torch.arange(len(units))] = 1
        if norm == 1:
            push = lambda b: torch.func.jvp(function, (x,), (b.view_as(x),))[1]  # noqa: E731
            lines = torch.vmap(push)(units)
        else:
            lines = torch.vmap(lambda a: pull(a.view_as(output))[0])(units)
        sums = lines.reshape(len(units), -1).abs().sum(-1)
        if float(sums.max()) > best:
            best, place = float(sums.max()), start + int(sums.argmax())
            row = lines[int(sums.argmax())]
    direction = row.sign()
    if norm == 1:
        direction = torch.zeros(count, dtype=x.dtype, device=x.device)
        direction[place] = 1
    return LocalConstant(best, 0.0, count, direction.view_as(x))
