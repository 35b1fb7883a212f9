"""The total-variation kernels against textbook algorithms, optimality certificates and loops."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel._kernels.total_variation import (
    chain_dual,
    chain_solution,
    components,
    grid_solution,
    group_means,
    tv_chain,
    tv_grid,
)

F64 = torch.float64
EPS = torch.finfo(F64).eps


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def lam(value: float, axes: int = 1) -> Tensor:
    return torch.full((1,) * axes, value, dtype=F64)


# ------------------------------------------------------------------ oracles and certificates


def condat(y: np.ndarray, lam: float) -> np.ndarray:
    """Condat's direct algorithm (2013), one node at a time; needs lam > 0."""
    n, x = len(y), np.zeros(len(y))
    k = k0 = km = kp = 0
    vmin, vmax, umin, umax = y[0] - lam, y[0] + lam, lam, -lam
    while True:
        if k == n - 1:
            if umin < 0:
                x[k0 : km + 1] = vmin
                k = k0 = km = km + 1
                vmin, umin, umax = y[k], lam, y[k] + lam - vmax
            elif umax > 0:
                x[k0 : kp + 1] = vmax
                k = k0 = kp = kp + 1
                vmax, umax, umin = y[k], -lam, y[k] - lam - vmin
            else:
                x[k0:] = vmin + umin / (k - k0 + 1)
                return x
        elif y[k + 1] + umin < vmin - lam:
            x[k0 : km + 1] = vmin
            k = k0 = km = kp = km + 1
            vmin, vmax, umin, umax = y[k], y[k] + 2 * lam, lam, -lam
        elif y[k + 1] + umax > vmax + lam:
            x[k0 : kp + 1] = vmax
            k = k0 = km = kp = kp + 1
            vmin, vmax, umin, umax = y[k] - 2 * lam, y[k], lam, -lam
        else:
            k += 1
            umin, umax = umin + y[k] - vmin, umax + y[k] - vmax
            if umin >= lam:
                vmin, umin, km = vmin + (umin - lam) / (k - k0 + 1), lam, k
            if umax <= -lam:
                vmax, umax, kp = vmax + (umax + lam) / (k - k0 + 1), -lam, k


def slow_grid(s: Tensor, lam: float, steps: int) -> Tensor:
    """Plain projected gradient on the dual with an explicit incidence matrix. s: (h, w)."""
    h, w = s.shape
    node = torch.arange(h * w).view(h, w)
    tails = torch.cat((node[:, :-1].flatten(), node[:-1].flatten()))
    heads = torch.cat((node[:, 1:].flatten(), node[1:].flatten()))
    d = torch.zeros(len(tails), h * w, dtype=F64)
    d[torch.arange(len(tails)), heads] = 1
    d[torch.arange(len(tails)), tails] = -1
    dual = torch.zeros(len(tails), dtype=F64)
    for _ in range(steps):
        dual = (dual + d @ (s.flatten() - d.T @ dual) / 8).clamp(-lam, lam)
    return (s.flatten() - d.T @ dual).view(h, w)


def relative_gap(s: Tensor, x: Tensor, strength: Tensor, duals: list[Tensor]) -> Tensor:
    """gap(x, w) / |s - mean|^2; `duals` along the last axis, then the one before it."""
    axes = tuple(range(-len(duals), 0))
    gap, residual = torch.zeros_like(s), x - s
    for axis, dual in zip((-1, -2), duals, strict=False):
        assert (dual.abs() <= strength).all()
        slope = x.roll(-1, axis) - x
        has_edge = torch.arange(s.shape[axis]) < s.shape[axis] - 1
        has_edge = has_edge if axis == -1 else has_edge.unsqueeze(-1)
        gap = gap + torch.where(has_edge, strength * slope.abs() - dual * slope, 0)
        residual = residual + dual.roll(1, axis) - dual
    scale = (s - s.mean(axes, keepdim=True)).square().sum(axes).clamp(min=EPS)
    return (gap + residual.square() / 2).sum(axes) / scale


def assert_optimal_chain(s: Tensor, x: Tensor, strength: Tensor) -> None:
    gap = relative_gap(s, x, strength, [chain_dual(s, x, strength)])
    assert (gap.abs() <= 1e-24 * s.shape[-1]).all(), f"relative gap {gap.max():.1e}"


# ------------------------------------------------------------------ the chain


@pytest.mark.parametrize("kind", ["real", "integer"])
def test_stress_against_condat(kind: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(160):
        n, strength = int(rng.integers(1, 201)), float(10 ** rng.uniform(-3, 2))
        y = rng.normal(size=n) * 3
        if kind == "integer":
            y, strength = y.round(), max(round(strength * 2) / 2, 0.5)
        s = torch.from_numpy(y)
        x = chain_solution(s, lam(strength))
        np.testing.assert_allclose(x.numpy(), condat(y, strength), rtol=0, atol=EPS * 64 * n)
        assert_optimal_chain(s, x, lam(strength))


def test_batched_rows_are_the_single_rows() -> None:
    s, strength = rows(3, 4, 50), rows(3, 1, 1, seed=1).exp()
    together = chain_solution(s, strength)
    for i in range(3):
        for j in range(4):
            assert torch.equal(together[i, j], chain_solution(s[i, j], strength[i, 0]))


@pytest.mark.parametrize("strength", [0.0, 1e-3, 0.5, 30.0, 1e30])
def test_long_rows_are_certified(strength: float) -> None:
    s = torch.cat((rows(2, 4096), rows(2, 4096, seed=1).cumsum(-1)))
    assert_optimal_chain(s, chain_solution(s, lam(strength)), lam(strength))


def test_the_certificate_rejects_wrong_answers() -> None:
    s = rows(40)
    x = chain_solution(s, lam(0.5))
    bump = torch.zeros_like(x)
    bump[17] = 1e-9
    for wrong in (x + bump, x + 1e-9, chain_solution(s, lam(0.5 + 1e-9))):
        with pytest.raises(AssertionError, match="relative gap"):
            assert_optimal_chain(s, wrong, lam(0.5))


def test_dual_convention() -> None:
    """s - x = D^T w with (D x)_i = x_{i+1} - x_i, and w = lam sign(Dx) where x jumps."""
    s = rows(30)
    x = chain_solution(s, lam(0.4))
    w, slope = chain_dual(s, x, lam(0.4)), x.diff()
    incidence = torch.eye(30, dtype=F64).diff(dim=0)  # (29, 30)
    torch.testing.assert_close(incidence.T @ w[:-1], s - x, rtol=0, atol=100 * EPS)
    assert w[-1] == 0
    jumps = slope != 0
    assert jumps.any()
    assert not jumps.all()
    assert torch.equal(w[:-1][jumps], 0.4 * slope[jumps].sign())


def test_labels_and_signs_describe_the_solution() -> None:
    s = rows(20, 60)
    labels, signs = tv_chain(s, lam(0.3), torch.ones_like(s, dtype=torch.bool))
    x = group_means(s - 0.3 * signs, labels)
    jump = x.diff().sign()
    edge = torch.zeros(20, 1, dtype=F64)
    assert torch.equal(signs, torch.cat((edge, jump), -1) - torch.cat((jump, edge), -1))
    assert torch.equal(x.gather(-1, labels), x)
    first = torch.cat((edge == 0, jump != 0), -1)
    assert torch.equal(labels[first], torch.arange(60).expand(20, -1)[first])


def test_masks_cut_the_chain() -> None:
    s, allowed = rows(12), torch.ones(12, dtype=torch.bool)
    allowed[[4, 5, 9]] = False
    s[[4, 5, 9]] = torch.tensor([-torch.inf, torch.nan, 1e300], dtype=F64)
    x = chain_solution(s, lam(0.7), allowed)
    for part in (slice(0, 4), slice(6, 9), slice(10, 12)):
        torch.testing.assert_close(x[part], chain_solution(s[part], lam(0.7)), rtol=0, atol=EPS)
    torch.testing.assert_close(x[~allowed], s[~allowed], rtol=0, atol=0, equal_nan=True)
    w = chain_dual(s, x, lam(0.7), allowed)
    assert (w[[3, 4, 5, 8, 9, 11]] == 0).all()
    assert (w[[0, 6]] != 0).all()


def test_a_non_finite_score_spoils_its_run_and_no_other_row() -> None:
    s = rows(3, 10)
    spoiled = s.clone()
    spoiled[1, 3] = torch.nan
    x = chain_solution(spoiled, lam(0.2))
    assert x[1].isnan().all()
    assert torch.equal(x[[0, 2]], chain_solution(s, lam(0.2))[[0, 2]])


@pytest.mark.parametrize("shape", [(0,), (1,), (0, 5), (3, 0), (2, 1)])
def test_degenerate_shapes(shape: tuple[int, ...]) -> None:
    s = rows(*shape)
    assert torch.equal(chain_solution(s, lam(1.0)), s)
    assert chain_dual(s, s, lam(1.0)).shape == s.shape
    assert torch.equal(grid_solution(s.unsqueeze(-2), lam(1.0, 2)), s.unsqueeze(-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_inputs(dtype: torch.dtype) -> None:
    s = rows(50).to(dtype)
    mean = s.mean().expand_as(s)
    close: dict[str, Any] = {"rtol": 8 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(chain_solution(s, lam(0.0).to(dtype)), s, **close)
    torch.testing.assert_close(chain_solution(s, lam(1e30).to(dtype)), mean, **close)
    constant = torch.full_like(s, 0.1)
    torch.testing.assert_close(chain_solution(constant, lam(0.3).to(dtype)), constant, **close)
    huge = torch.tensor([1e30, 1e30, 0, 1, 5, -1e30], dtype=dtype)
    small = torch.tensor([1e30, 1e30, 1.5, 1.5, 3, -1e30], dtype=dtype)  # lam = 1
    torch.testing.assert_close(chain_solution(huge, lam(1.0).to(dtype)), small, **close)


def test_float32_follows_float64() -> None:
    s = rows(20, 300).float()
    exact = chain_solution(s.double(), lam(0.8))
    torch.testing.assert_close(
        chain_solution(s, lam(0.8).float()).double(), exact, rtol=0, atol=1e-6
    )


def test_equal_scores_are_one_group() -> None:
    labels, signs = tv_chain(torch.full((7, 99), 0.1), lam(0.3), torch.ones(7, 99) > 0)
    assert (labels == 0).all()
    assert (signs == 0).all()


# ------------------------------------------------------------------ the grid


def grid_gap(s: Tensor, strength: Tensor, tolerance: float, max_steps: int = 20_000) -> Tensor:
    everywhere = torch.ones_like(s, dtype=torch.bool)
    labels, signs, right, down, converged = tv_grid(s, strength, everywhere, tolerance, max_steps)
    x = group_means((s - strength * signs).flatten(-2), labels.flatten(-2)).view_as(s)
    gap = relative_gap(s, x, strength, [right, down])
    assert torch.equal(gap <= 2 * max(tolerance, EPS), converged)
    return gap


@pytest.mark.parametrize("strength", [0.0, 0.05, 0.5, 3.0, 1e30])
@pytest.mark.parametrize("kind", ["real", "integer"])
def test_grid_reaches_its_gap(strength: float, kind: str) -> None:
    s = rows(24, 9, 13)
    s[:, :4, :6] += 2
    s = 100 * (s.round() if kind == "integer" else s)
    gap = grid_gap(s, lam(100 * strength, 2), 1e-12)
    assert (gap <= 2e-12).all()


@pytest.mark.parametrize("strength", [0.1, 1.0])
def test_grid_against_plain_projected_gradient(strength: float) -> None:
    for s in (rows(5, 6), rows(6, 4, seed=3).round()):
        x = grid_solution(s, lam(strength, 2), tolerance=1e-15)
        torch.testing.assert_close(x, slow_grid(s, strength, 8_000), rtol=0, atol=1e-6)


def test_a_large_flat_grid_converges() -> None:
    s = rows(2, 64, 64)
    s[:, 10:30, 10:30] += 3
    assert (grid_gap(s, lam(1.0, 2), 1e-8) <= 2e-8).all()


def test_a_thin_grid_is_a_chain() -> None:
    s, strength = rows(6, 80), rows(6, 1, seed=1).exp()
    chain = chain_solution(s, strength)
    flat = grid_solution(s.unsqueeze(-2), strength.unsqueeze(-1), tolerance=1e-15)
    tall = grid_solution(s.unsqueeze(-1), strength.unsqueeze(-1), tolerance=1e-15)
    torch.testing.assert_close(flat.squeeze(-2), chain, rtol=0, atol=1e-12)
    torch.testing.assert_close(tall.squeeze(-1), chain, rtol=0, atol=1e-12)


def test_too_few_steps_are_reported() -> None:
    assert (grid_gap(rows(5, 20, 20), lam(0.8, 2), 1e-14, max_steps=3) > 1e-6).all()


def test_grid_masks_cut_the_grid() -> None:
    s, allowed = rows(6, 9), torch.ones(6, 9, dtype=torch.bool)
    allowed[:, 4], allowed[0, 0] = False, False
    s[~allowed] = torch.nan
    x = grid_solution(s, lam(0.4, 2), allowed, tolerance=1e-14)
    right = grid_solution(s[:, 5:], lam(0.4, 2), tolerance=1e-14)
    torch.testing.assert_close(x[:, 5:], right, rtol=0, atol=1e-6)
    left = grid_solution(s[:, :4], lam(0.4, 2), allowed[:, :4], tolerance=1e-14)
    torch.testing.assert_close(x[:, :4], left, rtol=0, atol=1e-6, equal_nan=True)
    assert x[~allowed].isnan().all()
    assert x[allowed].isfinite().all()


def test_grid_units_and_offsets_do_not_matter() -> None:
    s = rows(4, 8, 8)
    x = grid_solution(s, lam(0.5, 2), tolerance=1e-14)
    for unit, shift in ((1e-20, 0.0), (1e30, 0.0), (1.0, 1e6)):
        moved = grid_solution(unit * s + shift, lam(0.5 * unit, 2), tolerance=1e-14)
        torch.testing.assert_close((moved - shift) / unit, x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("solution", "axes"), [(chain_solution, 1), (grid_solution, 2)])
def test_signs_at_strength_zero_are_those_of_a_tiny_strength(
    solution: Callable[..., Tensor], axes: int
) -> None:
    s, zero = rows(5, 6), lam(0.0, axes)
    _, slope = torch.func.jvp(lambda a: solution(s, a), (zero,), (torch.ones_like(zero),))
    tiny = lam(1e-6, axes)
    torch.testing.assert_close(slope, (solution(s, tiny) - s) / 1e-6, rtol=0, atol=1e-8)
    assert slope.abs().max() >= 2


def test_components_follow_a_snake() -> None:
    """One long path: the worst case for spreading labels."""
    h, w = 9, 8
    joined = torch.zeros(2, h, w, dtype=torch.bool)
    joined[0, ::2, :-1] = True
    for row in range(1, h - 1, 2):
        column = -1 if row % 4 == 1 else 0
        joined[1, row - 1, column] = joined[1, row, column] = True
    labels = components(joined, True).view(h, w)
    assert (labels[::2] == 0).all()
    assert (labels == 0).sum() == 5 * w + 4
    line = components(torch.tensor([[[True, False, True, True, False]]]), False)
    assert line.tolist() == [[0, 0, 2, 2, 2]]


# ------------------------------------------------------------------ derivatives and transforms

SOLUTIONS: list[Any] = [
    pytest.param(chain_solution, (3, 7), 1, id="chain"),
    pytest.param(grid_solution, (2, 4, 3), 2, id="grid"),
]
Solution = Callable[..., Tensor]


@pytest.mark.parametrize(("solution", "shape", "axes"), SOLUTIONS)
def test_gradients(solution: Solution, shape: tuple[int, ...], axes: int) -> None:
    s = rows(*shape).requires_grad_()
    strength = torch.full((shape[0], *[1] * axes), 0.3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(solution, (s, strength), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda a, b: solution(a, b) ** 3, (s, strength))


def test_the_gradient_in_strength_is_not_trivially_zero() -> None:
    s, strength = rows(20), lam(0.1).requires_grad_()
    total = chain_solution(s, strength).square().sum()
    (slope,) = torch.autograd.grad(total, strength)
    assert slope < -0.1


@pytest.mark.parametrize(("solution", "shape", "axes"), SOLUTIONS)
def test_jvp_is_the_difference_quotient(
    solution: Solution, shape: tuple[int, ...], axes: int
) -> None:
    s, move, strength = rows(*shape), rows(*shape, seed=5), lam(0.3, axes)
    _, tangent = torch.func.jvp(lambda a: solution(a, strength), (s,), (move,))
    step = 1e-6
    forward, back = solution(s + step * move, strength), solution(s - step * move, strength)
    torch.testing.assert_close(tangent, (forward - back) / (2 * step), rtol=0, atol=1e-8)
    assert (tangent - move).abs().max() > 0.1


@pytest.mark.parametrize(("solution", "shape", "axes"), SOLUTIONS)
@pytest.mark.parametrize("in_dims", [(0, 0, None), (1, None, None), (None, 0, None), (0, 0, 0)])
def test_vmap_is_a_loop(
    solution: Solution, shape: tuple[int, ...], axes: int, in_dims: tuple[int | None, ...]
) -> None:
    s = rows(5, *shape) if in_dims[0] is not None else rows(*shape)
    strength = torch.linspace(0.1, 0.6, 5, dtype=F64).view(5, *[1] * axes)
    strength = strength if in_dims[1] is not None else strength[2]
    allowed = rows(5, *shape, seed=2) > -1.0
    allowed = allowed if in_dims[2] is not None else allowed[0]
    looped = [
        solution(
            s if in_dims[0] is None else s[i],
            strength if in_dims[1] is None else strength[i],
            allowed if in_dims[2] is None else allowed[i],
        )
        for i in range(5)
    ]
    moved = s.movedim(0, 1) if in_dims[0] == 1 else s
    mapped = torch.vmap(solution, in_dims)(moved, strength, allowed)
    torch.testing.assert_close(mapped, torch.stack(looped), rtol=0, atol=8 * EPS)


def test_per_sample_gradients() -> None:
    s, strength = rows(6, 15), rows(6, 1, seed=1).exp()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return (chain_solution(a, b) ** 3).sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(s, strength)
    looped = [torch.func.grad(loss, argnums=(0, 1))(s[i], strength[i]) for i in range(6)]
    for k in (0, 1):
        torch.testing.assert_close(mapped[k], torch.stack([g[k] for g in looped]))


@pytest.mark.parametrize(("solution", "shape", "axes"), SOLUTIONS)
def test_compiled_is_eager(solution: Solution, shape: tuple[int, ...], axes: int) -> None:
    compiled = torch.compile(solution, fullgraph=True, backend="aot_eager")
    results = []
    for run in (solution, compiled):
        s, strength = rows(*shape).requires_grad_(), lam(0.3, axes).requires_grad_()
        x = run(s, strength)
        results.append((x.detach(), *torch.autograd.grad((x**3).sum(), (s, strength))))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=32 * EPS)


def test_compiled_and_mapped_dual() -> None:
    s = rows(4, 33)
    x = chain_solution(s, lam(0.3))
    single = torch.stack([chain_dual(s[i], x[i], lam(0.3)) for i in range(4)])
    compiled = torch.compile(chain_dual, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(s, x, lam(0.3)), single)
    mapped = torch.vmap(chain_dual, in_dims=(0, 0, None))(s, x, lam(0.3))
    torch.testing.assert_close(mapped, single)


def test_group_means() -> None:
    labels = torch.tensor([[0, 0, 2, 2, 2], [4, 0, 4, 0, 4]])
    values = torch.arange(10, dtype=F64).view(2, 5)
    expected = [[0.5, 0.5, 3, 3, 3], [7, 7, 7, 7, 7]]
    assert group_means(values, labels).tolist() == expected
    assert group_means(values[:, :0], labels[:, :0]).shape == (2, 0)
    mapped = torch.vmap(group_means, in_dims=(None, 0))(values[0], labels)
    torch.testing.assert_close(mapped[1], torch.tensor([2.0] * 5, dtype=F64))
