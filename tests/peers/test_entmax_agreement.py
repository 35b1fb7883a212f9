"""Our numbers against the entmax package's own, and the places where it has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fenchel as fl
from tests import needs

from . import entmax_shim as ours

entmax = needs.package("entmax", "agreement with the package entmax")

# Facts about one version; another may have mended them.
version_13 = needs.unless(
    entmax.__version__ == "1.3",
    f"entmax is {entmax.__version__}, not 1.3",
    "what that version of the package gets wrong",
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
SEEDS = pytest.mark.parametrize("seed", range(3))
N = 12


def scores(seed: int, dtype: torch.dtype, rows: int = 16, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, N, generator=generator, dtype=torch.float64)).to(dtype)


def accuracy(x: Tensor, alpha: float = 2.0) -> float:
    """Of entmax's bisection: 50 halvings of a bracket of length one leave the threshold exact to
    rounding, of scores times alpha - 1; the weights y^(1/(alpha-1)) answer with a slope of at most
    1/(alpha-1) up to alpha = 2, and with the power 1/(alpha-1) of the error beyond."""
    size = max(1.0, float(x.detach().abs().max()))
    threshold = 8 * torch.finfo(x.dtype).eps * size
    if alpha <= 2:
        return N * threshold / min(1.0, alpha - 1)
    return 4 * threshold ** (1 / (alpha - 1))


def assert_agree(actual: Tensor, expected: Tensor, limit: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit)


def both(function: str, x: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    return getattr(ours, function)(x, *arguments), getattr(entmax, function)(x, *arguments)


@SEEDS
@DTYPES
@pytest.mark.parametrize("function", ["sparsemax", "entmax15", "sparsemax_bisect"])
def test_weights(function: str, dtype: torch.dtype, seed: int) -> None:
    """entmax15 takes mean_sq - mean^2, an error of eps |x|^2 in a square root of at least 1/n."""
    x = scores(seed, dtype)
    size = max(1.0, float((x.amax(-1) - x.amin(-1)).max()))
    assert_agree(*both(function, x), accuracy(x) * size)


@SEEDS
@DTYPES
@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 1.75, 2.0, 2.25, 3.0])
def test_entmax_weights(alpha: float, dtype: torch.dtype, seed: int) -> None:
    x = scores(seed, dtype)
    assert_agree(*both("entmax_bisect", x, alpha), accuracy(x, alpha))


@SEEDS
@DTYPES
@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_normmax_weights(alpha: float, dtype: torch.dtype, seed: int) -> None:
    """entmax brackets the threshold from above by (1/n)^(alpha-1), which for alpha < 2 may lie left
    of the root: only rows whose root is inside can agree."""
    x = scores(seed, dtype)
    mine, theirs = both("normmax_bisect", x, alpha)
    inside = _normmax_bracketed(x, alpha)
    assert bool(inside.any())
    assert_agree(mine[inside], theirs[inside], accuracy(x, alpha))


def _normmax_bracketed(x: Tensor, alpha: float) -> Tensor:
    high = x.amax(-1) - (1 / N) ** (alpha - 1)
    return fl.solve(x, fl.Norm(alpha)).threshold < high


@SEEDS
@DTYPES
@pytest.mark.parametrize("budget", [1.0, 2.0, 4.5, 11.0])
def test_budget_weights(budget: float, dtype: torch.dtype, seed: int) -> None:
    x = scores(seed, dtype)
    assert_agree(*both("budget_bisect", x, budget), accuracy(x))


@SEEDS
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("sparsemax", ()),
        ("entmax15", ()),
        ("entmax_bisect", (1.2,)),
        ("entmax_bisect", (1.75,)),
        ("normmax_bisect", (2.0,)),
        ("budget_bisect", (2.5,)),
    ],
)
def test_gradients(function: str, arguments: tuple[float, ...], seed: int) -> None:
    """Random scores keep the weights of the support well above rounding, so that the slopes
    p^(2 - alpha) differ by no more than the weights do, up to the factor below."""
    x = scores(seed, torch.float64).requires_grad_()
    cotangent = scores(seed + 100, torch.float64)
    mine, theirs = (
        torch.autograd.grad((p * cotangent).sum(), x)[0] for p in both(function, x, *arguments)
    )
    assert_agree(mine, theirs, 1e3 * accuracy(x))


@SEEDS
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_gradient_in_alpha(alpha: float, seed: int) -> None:
    """entmax divides differences of weights by (alpha - 1)^2 = 0.04 at the least."""
    x, cotangent = scores(seed, torch.float64), scores(seed + 100, torch.float64)
    a = torch.full((16, 1), alpha, dtype=torch.float64, requires_grad=True)
    mine, theirs = (
        torch.autograd.grad((p * cotangent).sum(), a)[0] for p in both("entmax_bisect", x, a)
    )
    assert_agree(mine, theirs, 1e3 * accuracy(x) / (alpha - 1) ** 2)


@SEEDS
@DTYPES
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("sparsemax_loss", ()),
        ("entmax15_loss", ()),
        ("sparsemax_bisect_loss", ()),
        ("entmax_bisect_loss", (1.3,)),
        ("normmax_bisect_loss", (2.0,)),
    ],
)
def test_losses(function: str, arguments: tuple[float, ...], dtype: torch.dtype, seed: int) -> None:
    """The loss is linear in the scores, so that their size multiplies the weights' error."""
    x = scores(seed, dtype)
    y = torch.randint(N, (len(x),), generator=torch.Generator().manual_seed(seed))
    assert_agree(*both(function, x, y, *arguments), 10 * accuracy(x) * float(x.abs().max()))


@pytest.mark.parametrize("reduction", ["sum", "elementwise_mean", "none"])
@pytest.mark.parametrize("ignore", [-100, 3])
def test_reductions(reduction: str, ignore: int) -> None:
    x = scores(0, torch.float64)
    y = torch.arange(len(x)) % 5
    mine, theirs = (
        library.SparsemaxLoss(reduction=reduction, ignore_index=ignore)(x, y)
        for library in (ours, entmax)
    )
    assert_agree(mine, theirs, 10 * len(x) * accuracy(x))


def test_a_wrong_number_is_seen() -> None:
    x = scores(0, torch.float32)
    mine, theirs = both("entmax15", x)
    with pytest.raises(AssertionError):
        assert_agree(mine + 1e-3, theirs, accuracy(x))


# -- what entmax does not do


def _second_derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def _with_zeros() -> Tensor:
    """The last key of the first row has no weight under any of the maps below."""
    row = [[1.0, 0.5, -3.0], [0.0, 0.0, -1.0]]
    return torch.tensor(row, dtype=torch.float64, requires_grad=True)


@version_13
def test_second_derivatives_at_zero_weights() -> None:
    x = _with_zeros()
    assert bool(_second_derivative(entmax.entmax15, x)[0].isnan().all())
    assert bool(_second_derivative(entmax.entmax_bisect, x)[0].isnan().all())
    mine = _second_derivative(ours.entmax15, x)
    alone = x.detach()[:1, :2].requires_grad_()
    assert_agree(mine[:1, :2], _second_derivative(ours.entmax15, alone), 1e-12)
    assert float(mine[0, 2]) == 0.0
    # Away from zeros both have one, and it is the same.
    assert_agree(mine[1], _second_derivative(entmax.entmax15, x)[1], 1e-12)


@version_13
def test_vmap() -> None:
    x = scores(0, torch.float64)
    for name in ("sparsemax", "entmax15", "entmax_bisect", "normmax_bisect", "budget_bisect"):
        with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch"):
            torch.vmap(getattr(entmax, name))(x)
    assert_agree(torch.vmap(fl.entmax)(x), fl.entmax(x), accuracy(x))
    assert_agree(torch.vmap(fl.sparsemax)(x), fl.sparsemax(x), accuracy(x))


def test_compile_in_one_graph() -> None:
    x = scores(0, torch.float64)
    compiled = torch.compile(fl.entmax, fullgraph=True, backend="eager")
    assert_agree(compiled(x), fl.entmax(x), accuracy(x))


@version_13
def test_alpha_one() -> None:
    """entmax documents that alpha = 1 does not work: its answer is uniform whatever the scores."""
    x = scores(0, torch.float64)
    assert_agree(entmax.entmax_bisect(x, 1.0), torch.full_like(x, 1 / N), accuracy(x))
    assert_agree(ours.entmax_bisect(x, 1.0), x.softmax(-1), accuracy(x))


@version_13
def test_masks_in_the_budget_and_in_losses() -> None:
    x, y = scores(0, torch.float64), torch.zeros(16, dtype=torch.long)
    masked = x.clone()
    masked[:, 6:] = -math.inf
    assert bool(entmax.budget_bisect(masked, 2).isnan().all())
    assert bool(entmax.sparsemax_loss(masked, y).isnan().all())
    assert_agree(ours.budget_bisect(masked, 2)[:, :6], ours.budget_bisect(x[:, :6], 2), accuracy(x))
    assert_agree(ours.sparsemax_loss(masked, y), ours.sparsemax_loss(x[:, :6], y), 10 * accuracy(x))


@version_13
def test_rows_without_a_key() -> None:
    empty = torch.full((1, 3), -math.inf)
    with pytest.raises(RuntimeError, match="out of bounds"):
        entmax.entmax15(empty)
    solution = fl.solve(empty, fl.Tsallis(1.5))
    assert int(solution.status) == fl.Status.EMPTY
    assert torch.equal(solution.weights, torch.zeros(1, 3))


@version_13
def test_partial_sorting_along_a_negative_axis() -> None:
    x = scores(0, torch.float64).view(4, 4, N)
    with pytest.raises(RuntimeError, match="dimensions"):
        entmax.sparsemax(x, dim=-2, k=1)
    assert_agree(ours.sparsemax(x, dim=-2, k=1), entmax.sparsemax(x, dim=1), accuracy(x))


@version_13
def test_gradients_that_entmax_leaves_out() -> None:
    """entmax differentiates normmax and the budget in the scores only."""
    x = scores(0, torch.float64)
    for name, value in (("normmax_bisect", 2.0), ("budget_bisect", 2.5)):
        parameter = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        mine, theirs = both(name, x, parameter)
        assert _gradient(theirs, parameter) is None
        assert float(_gradient(mine, parameter)) != 0.0


def _gradient(weights: Tensor, parameter: Tensor) -> Tensor | None:
    return torch.autograd.grad(weights.square().sum(), parameter, allow_unused=True)[0]
