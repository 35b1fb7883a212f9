"""Rows of every family in Triton against float64: weights, offsets, derivatives, odd rows."""

import math

import pytest
import torch

import fenchel as fl
from tests import needs

needs.package("triton", covers="rows of scores in Triton, interpreted")

from fenchel._kernels.gpu import rows  # noqa: E402 - triton is there
from fenchel._kernels.route import against_rows  # noqa: E402
from tests.kernels.gpu import interpreter  # noqa: E402

FAMILIES = [
    fl.Tsallis(1 + 1e-6),
    fl.Tsallis(1.01),
    fl.Tsallis(1.2),
    fl.Tsallis(1.25),
    fl.Tsallis(1.3),
    fl.Tsallis(1.5),
    fl.Tsallis(1.9),
    fl.Tsallis(2.0),
    fl.Norm(1.3),
    fl.Norm(2.0),
    fl.Norm(3.0),
    fl.Budget(0.4),
    fl.Budget(1),
    fl.Budget(2.5),
    fl.Budget(40),
]
KEYS = (1, 3, 32, 100, 1000)
SPREADS = torch.tensor([0.0, 0.1, 1.0, 5.0, 50.0])  # one a row
WRITTEN = ("weigh_rows.weights", "weigh_budget_rows.weights", "differentiate_rows.slopes")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(omega, scores, gradient):
    """Largest errors of weights and of gradients; the latter relative to one more than the largest.

    A gradient made of float32 weights knows a response p (1 - p) to 1e-7 absolutely.
    """
    fast, slow = scores.clone().requires_grad_(), scores.double().requires_grad_()
    with fl.use("gpu"), interpreter.watch(*WRITTEN) as launches:
        weights = fl.solve(fast, omega).weights
        (slope,) = torch.autograd.grad(weights, fast, gradient)
    assert len(launches) == 2, "both passes run in Triton"
    with fl.use("torch"):
        exact = fl.solve(slow, omega).weights
        (exact_slope,) = torch.autograd.grad(exact, slow, gradient.double())
    error = (slope - exact_slope).abs().max() / (1 + exact_slope.abs().max())
    return float((weights - exact).detach().abs().max()), float(error)


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_weights_and_derivatives(omega):
    for keys in KEYS:
        if isinstance(omega, fl.Budget) and omega.k > keys:
            continue
        scores = SPREADS.unsqueeze(-1) * normal(5, keys)
        error, slope_error = compare(omega, scores, normal(5, keys, seed=1))
        assert error <= 1e-6, keys
        assert slope_error <= 1e-5, keys


@needs.kernels("how exact native gradients of steep norms are")
@pytest.mark.parametrize(("alpha", "keys"), [(5.0, 100), (3.0, 8193)])
def test_steep_norms_are_as_exact_as_elsewhere(alpha, keys):
    """For alpha > 2 the slope of normmax grows without bound where a weight vanishes, and float32
    weights determine it badly: natively and in torch's operations too."""
    scores = torch.tensor([0.01, 0.1, 1.0]).unsqueeze(-1) * normal(3, keys)
    gradient = normal(3, keys, seed=1)

    def slope(kernels, dtype):
        leaf = scores.to(dtype).requires_grad_()
        with fl.use(kernels):
            weights = fl.solve(leaf, fl.Norm(alpha)).weights
        return torch.autograd.grad(weights, leaf, gradient.to(dtype))[0]

    exact = slope("torch", torch.float64)
    ours, native, plain = (
        (slope(kernels, torch.float32) - exact).abs().max()
        for kernels in ("gpu", "native", "torch")
    )
    assert ours <= 2 * max(native, plain)


LONG = [
    fl.Tsallis(1.5),
    pytest.param(fl.Tsallis(1.1), marks=pytest.mark.slow),
    pytest.param(fl.Tsallis(1.7), marks=pytest.mark.slow),
    pytest.param(fl.Tsallis(2.0), marks=pytest.mark.slow),
    fl.Norm(2.0),
    pytest.param(fl.Norm(1.5), marks=pytest.mark.slow),
    fl.Budget(100.5),
]


@pytest.mark.parametrize("omega", LONG, ids=str)
@pytest.mark.parametrize("keys", [8193, pytest.param(65536, marks=pytest.mark.slow)])
def test_long_rows(omega, keys):
    """They are read in blocks."""
    scores = torch.tensor([0.01, 1.0, 20.0]).unsqueeze(-1) * normal(3, keys)
    error, slope_error = compare(omega, scores, normal(3, keys, seed=1))
    assert error <= 1e-6
    assert slope_error <= 1e-5


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_odd_rows_are_those_of_the_general_path(omega):
    inf = math.inf
    odd = [
        [1.0, -inf, 0.5, 0.2] * 12,
        [-inf] * 48,
        [math.nan] + [0.0] * 47,
        [0.0] * 47 + [math.nan],
        [inf] + [0.0] * 47,
        [inf, -inf, math.nan] * 16,
        [1e30, 1e30] + [-1e30] * 46,
        [3e38] + [-3e38] * 47,
        [0.0] * 48,
        [1e-40, -1e-40] * 24,
        [-inf] * 47 + [3.0],
        [1000.5] * 3 + [1000.0] * 45,
    ]
    scores = torch.tensor(odd)
    with fl.use("gpu"):
        leaf = scores.clone().requires_grad_()
        weights = fl.solve(leaf, omega).weights
        (slope,) = torch.autograd.grad(weights, leaf, normal(*scores.shape))
    with fl.use("torch"):
        exact = fl.solve(scores.double(), omega).weights
    torch.testing.assert_close(weights.double(), exact, equal_nan=True, rtol=0, atol=1e-6)
    unsolved = ~(weights > 0).any(-1)
    assert unsolved.sum() >= 5
    assert (slope[unsolved] == 0).all(), "a row without an answer passes nothing on"


def test_long_odd_rows():
    """What is strange may stand in any block."""
    for strange, place in ((math.nan, 0), (math.nan, 8999), (math.inf, 5000)):
        scores = normal(2, 9000)
        scores[0, place] = strange
        with fl.use("gpu"):
            for omega in (fl.Tsallis(1.5), fl.Budget(3)):
                weights = fl.solve(scores, omega).weights
                assert weights[0].isnan().all()
                assert (weights[1].sum() - (3 if omega == fl.Budget(3) else 1)).abs() < 1e-5


def test_offsets_row_by_row():
    """alpha may differ from row to row, on both sides of the two forms of an offset."""
    scores = 3 * normal(7, 200)
    alpha = torch.tensor([1 + 1e-5, 1.1, 1.25, 1.2500001, 1.5, 1.8, 2.0], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (scores, alpha)]
    gradient = normal(7, 200, seed=1)
    with fl.use("gpu"), interpreter.watch("offset_rows.offsets") as launches:
        solution = fl.solve(leaves[0], fl.Tsallis(leaves[1]))
        slopes = torch.autograd.grad(solution.weights, leaves, gradient)
        assert (solution.status == fl.Status.OK).all(), solution.explain()
    assert [launch.kernel for launch in launches] == ["offset_rows"]
    exact_leaves = [x.double().detach().requires_grad_() for x in leaves]
    with fl.use("torch"):
        exact = fl.solve(exact_leaves[0], fl.Tsallis(exact_leaves[1])).weights
        exact_slopes = torch.autograd.grad(exact, exact_leaves, gradient.double())
    assert (solution.weights - exact).abs().max() <= 1e-6
    for slope, exact_slope in zip(slopes, exact_slopes, strict=True):
        assert (slope - exact_slope).abs().max() <= 1e-5 * (1 + exact_slope.abs().max())


@pytest.mark.parametrize("omega", FAMILIES, ids=str)
def test_the_certificate_of_the_weights(omega):
    with fl.use("gpu"):
        solution = fl.solve(3 * normal(20, 64), omega)
        assert (solution.status == fl.Status.OK).all(), solution.explain()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    scores = (3 * normal(4, 50)).to(dtype)
    with fl.use("gpu"), interpreter.watch() as launches:
        weights = fl.entmax(scores, 1.5)
    assert len(launches) == 1
    assert weights.dtype == dtype
    assert weights.equal(fl.entmax(scores.float(), 1.5).to(dtype))


def test_axes_and_layouts():
    scores = normal(4, 50, 6)
    with fl.use("gpu"), interpreter.watch() as launches:
        weights = fl.sparsemax(scores, dim=1)
    assert len(launches) == 1
    assert (weights - fl.sparsemax(scores.double(), dim=1)).abs().max() <= 1e-6
    mask = torch.rand(50, 1, generator=torch.Generator().manual_seed(1)) < 0.5
    with fl.use("gpu"):
        masked = fl.sparsemax(scores, base=mask, dim=1)
    assert (masked - fl.sparsemax(scores.double(), base=mask, dim=1)).abs().max() <= 1e-6


def test_second_derivatives():
    """In torch's operations, from the weights of the kernel."""
    scores, direction = normal(2, 6).requires_grad_(), normal(2, 6, seed=1)

    def second(kernels, x):
        with fl.use(kernels):
            weights = fl.entmax(x, 1.5)
            (slope,) = torch.autograd.grad((weights * direction).sum(), x, create_graph=True)
            return torch.autograd.grad(slope.square().sum(), x)[0]

    exact = second("torch", scores.detach().double().requires_grad_())
    assert (second("gpu", scores) - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())


def test_the_backward_pass_stays_in_triton():
    scores = normal(3, 20).requires_grad_()
    with fl.use("gpu"):
        weights = fl.entmax(scores)
    with interpreter.watch() as launches:
        weights.square().sum().backward()
    assert [launch.kernel for launch in launches] == ["differentiate_rows"]


def test_what_rows_cannot_do_runs_in_torch():
    with fl.use("gpu"), interpreter.watch() as launches:
        fl.entmax(normal(3, 20).double())
        fl.entmax(normal(3, 20), 2.5)
        torch.func.vmap(fl.entmax)(normal(3, 20))
    assert launches == []
    with fl.use("gpu"), interpreter.watch() as launches:
        fl.solve(normal(3, 20), fl.Fused(0.1))
    assert {launch.kernel for launch in launches} <= {"offset_rows"}  # of the smoothed scores
    with fl.use("gpu"):
        assert "runs of equal weight" in against_rows(normal(3, 20), "fused")


def test_operands_are_checked():
    with pytest.raises(ValueError, match="dtype float32"):
        rows.row_weights(normal(3, 20).double(), "tsallis", 0.5)


def test_operators_pass_the_checks_of_torch():
    scores, operators = normal(3, 20), torch.ops.fenchel
    leaf, weights = scores.clone().requires_grad_(), scores.softmax(-1)
    calls = [
        (operators.row_weights.default, (leaf, "tsallis", 0.5)),
        (operators.row_weights.default, (leaf, "norm", 1.0)),
        (operators.row_weights_backward.default, (scores, weights, "tsallis", 0.5)),
        (operators.row_offsets.default, (scores, torch.full((3,), 0.3).double())),
    ]
    for operator, arguments in calls:
        plain = [
            x.detach() if torch.is_tensor(x) and operator != calls[0][0] else x for x in arguments
        ]
        with fl.use("gpu"):
            verdicts = torch.library.opcheck(operator, tuple(plain))
        assert set(verdicts.values()) == {"SUCCESS"}, verdicts


@pytest.mark.parametrize("keys", [100, 3000])
@pytest.mark.parametrize("budget", [1.0, 2.5])
def test_flat_rows_spend_their_budget(keys, budget):
    with fl.use("gpu"):
        weights = fl.solve(torch.zeros(1, keys), fl.Budget(budget)).weights
    torch.testing.assert_close(weights, torch.full((1, keys), budget / keys), rtol=1e-6, atol=0.0)
