"""W1 is what a linear program says, proves itself, and has the derivatives it should."""

from __future__ import annotations

import itertools
import math
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.measures import distances
from fenchel.measures.distances import transport_plan, wasserstein1
from fenchel.measures.empirical import Empirical
from fenchel.measures.entropic import entropic_wasserstein1
from tests import needs

ot = needs.package("ot", "Wasserstein distances against a linear program and POT")
NORMS = [1, 2, math.inf, 1.5, 3]


class Cloud(NamedTuple):
    """Anything with points and weights will do."""

    points: Tensor
    weights: Tensor


def cloud(*shape: int, seed: int = 0, even: bool = False, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(*shape, generator=g, dtype=torch.float64)
    weights = torch.rand(shape[:-1], generator=g, dtype=torch.float64) + 0.05
    weights = torch.ones_like(weights) if even else weights
    return Cloud(points.to(dtype), (weights / weights.sum(-1, keepdim=True)).to(dtype))


def costs(mu: Cloud, nu: Cloud, norm: float) -> Tensor:
    apart = mu.points.unsqueeze(-2) - nu.points.unsqueeze(-3)
    return torch.linalg.vector_norm(apart.double(), norm, dim=-1)


def program(mu: Cloud, nu: Cloud, cost: Tensor) -> float:
    """The primal as a linear program, written out."""
    optimize = needs.package("scipy.optimize", "Wasserstein distances against a linear program")
    n, m = cost.shape
    rows = np.kron(np.eye(n), np.ones((1, m)))
    columns = np.kron(np.ones((1, n)), np.eye(m))
    margins = np.concatenate([mu.weights, nu.weights])
    solution = optimize.linprog(
        cost.flatten().numpy(),
        A_eq=np.concatenate([rows, columns]),
        b_eq=margins,
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert solution.status == 0
    return float(solution.fun)


# ---- values


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("n", "m", "d"), [(6, 6, 3), (5, 9, 2), (1, 7, 2), (7, 1, 1), (8, 8, 1)])
def test_value_is_that_of_the_linear_program_and_of_pot(norm, even, n, m, d):
    mu, nu = cloud(n, d, seed=1, even=even), cloud(m, d, seed=2, even=even)
    cost = costs(mu, nu, norm)
    distance = wasserstein1(mu, nu, norm)
    assert distance.shape == ()
    assert abs(distance.item() - program(mu, nu, cost)) < 1e-10
    assert (
        abs(distance.item() - ot.emd2(*(x.numpy() for x in (mu.weights, nu.weights, cost)))) < 1e-10
    )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("even", [False, True])
def test_plan_and_potentials_prove_each_other(norm, even):
    mu, nu = cloud(3, 12, 4, seed=3, even=even), cloud(12 if even else 15, 4, seed=4, even=even)
    plan = transport_plan(mu, nu, norm)
    f, g = plan.potentials
    assert (plan.plan >= 0).all()
    torch.testing.assert_close(plan.plan.sum(-1), mu.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(plan.plan.sum(-2), nu.weights.expand(3, -1), rtol=0, atol=1e-14)
    assert (f.unsqueeze(-1) + g.unsqueeze(-2) - costs(mu, nu, norm)).max() < 1e-13
    assert plan.gap.abs().max() < 1e-13
    torch.testing.assert_close((f * mu.weights).sum(-1), (g * nu.weights).sum(-1))
    torch.testing.assert_close(plan.primal, wasserstein1(mu, nu, norm), rtol=0, atol=1e-13)


def test_a_wrong_plan_shows_in_the_gap():
    mu, nu = cloud(6, 2, seed=5), cloud(6, 2, seed=6)
    plan = transport_plan(mu, nu)
    independent = mu.weights.unsqueeze(-1) * nu.weights
    wrong = plan._replace(primal=(independent * costs(mu, nu, 1)).sum())
    assert wrong.gap > 0.05


@pytest.mark.parametrize("norm", [1, 2])
def test_even_weights_are_the_best_permutation(norm):
    """For equally many points, the best permutation (Birkhoff)."""
    mu, nu = cloud(6, 2, seed=7, even=True), cloud(6, 2, seed=8, even=True)
    cost = costs(mu, nu, norm)
    best = min(
        cost[torch.arange(6), torch.tensor(order)].mean().item()
        for order in itertools.permutations(range(6))
    )
    assert abs(wasserstein1(mu, nu, norm).item() - best) < 1e-14


def test_the_line_agrees_with_the_general_solver():
    for seed in range(20):
        mu, nu = cloud(17, 1, seed=seed), cloud(11, 1, seed=seed + 100)
        general = transport_plan(mu, nu).primal
        torch.testing.assert_close(wasserstein1(mu, nu), general, rtol=0, atol=1e-13)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("d", [1, 2])
def test_leading_axes_broadcast(d, even):
    mu, nu = cloud(3, 1, 5, d, seed=9, even=even), cloud(2, 5, d, seed=10, even=even)
    distance = wasserstein1(mu, nu, 2)
    assert distance.shape == (3, 2)
    for i, j in itertools.product(range(3), range(2)):
        one = wasserstein1(
            Cloud(mu.points[i, 0], mu.weights[i, 0]), Cloud(nu.points[j], nu.weights[j]), 2
        )
        torch.testing.assert_close(distance[i, j], one, rtol=0, atol=1e-14)
    shared = Cloud(mu.points[0, 0], nu.weights)  # points (5, d) under weights (2, 5)
    assert wasserstein1(shared, shared).tolist() == [0.0, 0.0]
    assert wasserstein1(shared, Cloud(mu.points[1, 0], nu.weights)).shape == (2,)


def test_a_function_gives_the_costs():
    mu, nu = cloud(5, 1, seed=11), cloud(7, 1, seed=12)
    squared = wasserstein1(mu, nu, lambda x, y: (x - y.mT).square())
    assert abs(squared.item() - program(mu, nu, costs(mu, nu, 2).square())) < 1e-10
    with pytest.raises(ValueError, match=r"shape \(\.\.\., 5, 7\), got \(7, 5\)"):
        wasserstein1(mu, nu, lambda x, y: (y - x.mT).abs())
    with pytest.raises(ValueError, match="not all finite"):
        wasserstein1(mu, nu, lambda x, y: torch.full((5, 7), torch.inf))


# ---- edges


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("even", [False, True])
def test_a_measure_is_at_no_distance_from_itself(d, even):
    mu = cloud(4, 50, d, seed=13, even=even)
    doubled = Cloud(
        torch.cat([mu.points, mu.points], -2), torch.cat([mu.weights, mu.weights.flip(-1)], -1) / 2
    )
    for same in (mu, doubled, Empirical(mu.points), Empirical(mu.points.float())):
        assert (wasserstein1(same, same) == 0).all()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    moved = Cloud(mu.points[:, order], mu.weights[:, order])
    assert (wasserstein1(mu, moved).abs() < 1e-15).all()


@pytest.mark.parametrize("d", [1, 2])
def test_atoms_without_weight_and_repeated_ones_change_nothing(d):
    mu, nu = cloud(5, d, seed=14), cloud(4, d, seed=15)
    expected = wasserstein1(mu, nu)
    far = torch.full((1, d), 1e9, dtype=torch.float64)
    padded = Cloud(torch.cat([far, mu.points]), torch.cat([torch.zeros(1), mu.weights]).double())
    twice = Cloud(torch.cat([nu.points, nu.points]), torch.cat([nu.weights, nu.weights]) / 2)
    for left, right in ((padded, nu), (mu, twice), (padded, twice)):
        torch.testing.assert_close(wasserstein1(left, right), expected, rtol=0, atol=1e-14)
        plan = transport_plan(left, right)
        f, g = plan.potentials
        assert ((f.unsqueeze(-1) + g - costs(left, right, 1)) / costs(left, right, 1)).max() < 1e-12
        assert plan.gap.abs() < 1e-12


def test_single_atoms_are_as_far_as_their_points():
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, -2.0]])
    distance = [wasserstein1(Empirical(x), Empirical(y), p).item() for p in (1, 2, math.inf)]
    assert distance == [7.0, 5.0, 4.0]


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1e8, 1e150])
def test_scale_of_the_points_does_not_matter(scale):
    mu, nu = cloud(9, 2, seed=16), cloud(11, 2, seed=17)
    big = [Cloud(scale * measure.points, measure.weights) for measure in (mu, nu)]
    torch.testing.assert_close(wasserstein1(*big) / scale, wasserstein1(mu, nu), rtol=1e-12, atol=0)


@pytest.mark.parametrize("d", [1, 2])
def test_float32_is_computed_in_float64(d):
    mu, nu = cloud(40, d, seed=18, dtype=torch.float32), cloud(30, d, seed=19, dtype=torch.float32)
    distance = wasserstein1(mu, nu)
    assert distance.dtype == torch.float32
    wide = [
        Cloud(c.points.double(), c.weights.double() / c.weights.double().sum()) for c in (mu, nu)
    ]
    assert distance == wasserstein1(*wide).float()


# ---- derivatives


def slopes(function, at: Tensor, directions: Tensor, step: float = 1e-6) -> Tensor:
    with torch.no_grad():
        return torch.stack(
            [(function(at + step * v) - function(at - step * v)) / (2 * step) for v in directions]
        )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("n", "m", "d"), [(5, 5, 2), (4, 6, 3), (5, 5, 1), (4, 7, 1)])
def test_derivative_in_the_points(norm, even, n, m, d):
    mu, nu = cloud(n, d, seed=20, even=even), cloud(m, d, seed=21, even=even)
    pairs = (
        (mu.points, lambda x: wasserstein1(Cloud(x, mu.weights), nu, norm)),
        (nu.points, lambda y: wasserstein1(mu, Cloud(y, nu.weights), norm)),
    )
    for points, function in pairs:
        x = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x)
        directions = torch.eye(points.numel(), dtype=torch.float64).reshape(-1, *points.shape)
        expected = slopes(function, points, directions)
        torch.testing.assert_close(gradient.flatten(), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
@pytest.mark.parametrize("d", [1, 2])
def test_derivative_in_the_weights_along_directions_that_keep_the_mass(norm, d):
    mu, nu = cloud(5, d, seed=22), cloud(6, d, seed=23)
    directions = torch.eye(5, dtype=torch.float64) - 1 / 5
    weights = mu.weights.clone().requires_grad_()
    for function in (
        lambda a: wasserstein1(Cloud(mu.points, a), nu, norm),
        lambda a: wasserstein1(nu, Cloud(mu.points, a), norm),
    ):
        (gradient,) = torch.autograd.grad(function(weights), weights)
        expected = slopes(function, mu.weights, directions)
        torch.testing.assert_close(directions @ gradient, expected, rtol=0, atol=1e-8)
        assert abs(gradient @ mu.weights) < 1e-14  # more mass everywhere changes nothing


def test_at_even_weights_the_potentials_are_a_subgradient():
    """W1 is convex in the weights, and has a kink there."""
    mu, nu = cloud(6, 2, seed=24, even=True), cloud(6, 2, seed=25, even=True)
    weights = mu.weights.clone().requires_grad_()
    value = wasserstein1(Cloud(mu.points, weights), nu)
    (gradient,) = torch.autograd.grad(value, weights)
    for seed in range(20):
        other = cloud(6, 2, seed=seed).weights
        moved = wasserstein1(Cloud(mu.points, other), nu)
        assert moved >= value + gradient @ (other - mu.weights) - 1e-14


def test_derivatives_of_a_batch_through_a_softmax():
    mu, nu = cloud(3, 5, 2, seed=26), cloud(4, 2, seed=27)
    scores = mu.weights.log().requires_grad_()

    def function(scores: Tensor) -> Tensor:
        return wasserstein1(Empirical(mu.points, scores.softmax(-1)), nu, 2)

    assert torch.autograd.gradcheck(function, scores, atol=1e-7)


# ---- refusals


@pytest.mark.parametrize(
    ("norm", "error", "message"),
    [
        (0.5, ValueError, "norm must be >= 1, got 0.5"),
        (math.nan, ValueError, "norm must be >= 1, got nan"),
        (True, TypeError, "norm must be a number"),
        ("l1", TypeError, "norm must be a number >= 1 or a function, got 'l1'"),
    ],
)
def test_what_is_no_norm_is_refused(norm, error, message):
    mu = cloud(3, 1)
    with pytest.raises(error, match=message):
        wasserstein1(mu, mu, norm)


def test_what_is_no_measure_is_refused():
    x, w = torch.randn(3, 2), torch.full((3,), 1 / 3)
    nan = torch.tensor([[math.nan, 0.0]])
    big = Cloud(torch.full((3, 2), 1e308, dtype=torch.float64), w)  # finite, though its sum is not
    assert wasserstein1(big, big) == 0
    for mu, message in (
        (Cloud(torch.randn(3, 1), w), "coordinates"),
        (Cloud(nan.expand(3, 2), w), r"mu\.points must be finite"),
        (Cloud(x, w[:2]), r"\(3, 2\) and \(2,\)"),
        (Cloud(x, 2 * w), "sum to one"),
        (Cloud(x, torch.tensor([2.0, -0.5, -0.5])), ">= 0"),
        (Cloud(x, torch.tensor([math.nan, 1.0, 0.0])), ">= 0"),
        (Cloud(x, torch.tensor(0.4).expand(3)), "sum to one"),
        (Cloud(torch.randn(2, 3, 2), w), None),
        (Cloud(x[:0], w[:0]), "no atoms"),
    ):
        if message is None:
            with pytest.raises(ValueError, match="broadcast"):
                wasserstein1(mu, Cloud(torch.randn(5, 3, 2), w))
            continue
        with pytest.raises(ValueError, match=message):
            wasserstein1(mu, Cloud(x, w))
    with pytest.raises(TypeError, match="nu must be a measure with points"):
        wasserstein1(Cloud(x, w), x)
    with pytest.raises(TypeError, match="floating"):
        wasserstein1(Cloud(torch.arange(6).reshape(3, 2), w), Cloud(x, w))


def test_vmap_works_on_the_line_and_is_refused_elsewhere():
    mu, nu = cloud(3, 5, 1, seed=40), cloud(4, 1, seed=41)
    mapped = torch.func.vmap(lambda x, a: wasserstein1(Cloud(x, a), nu))(*mu)
    torch.testing.assert_close(mapped, wasserstein1(mu, nu), rtol=0, atol=1e-15)
    mu, nu = cloud(3, 5, 2, seed=40), cloud(4, 2, seed=41)
    with pytest.raises(RuntimeError, match="leading axes serve in place of vmap"):
        torch.func.vmap(lambda x, a: wasserstein1(Cloud(x, a), nu))(*mu)


def test_missing_packages_are_named(monkeypatch):
    even, other = cloud(3, 2, even=True), cloud(3, 2, seed=1)
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ImportError, match=r'pip install -c constraints.txt "\.\[transport\]"'):
        wasserstein1(even, other)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="transport"):
        wasserstein1(even, cloud(3, 2, seed=1, even=True))
    assert wasserstein1(cloud(3, 1), cloud(4, 1)) > 0  # the line needs neither


def test_a_solver_that_stops_early_is_refused(monkeypatch):
    mu, nu = cloud(30, 2, seed=28), cloud(40, 2, seed=29)
    emd = ot.emd
    monkeypatch.setattr(ot, "emd", lambda *x, numItermax, **k: emd(*x, numItermax=3, **k))
    with pytest.raises(RuntimeError, match="no proven optimum on 30 x 40 atoms"):
        wasserstein1(mu, nu)


def test_a_solver_that_claims_too_much_is_refused(monkeypatch):
    """The check does not rest on the solver's word."""
    mu, nu = cloud(5, 2, seed=30), cloud(6, 2, seed=31)
    independent = (mu.weights.unsqueeze(-1) * nu.weights).numpy()

    def wrong(a, b, cost, **options):
        return independent, {"u": np.zeros(5), "result_code": distances._OPTIMAL, "warning": None}

    monkeypatch.setattr(ot, "emd", wrong)
    with pytest.raises(RuntimeError, match="it reports success, relative gap"):
        wasserstein1(mu, nu)


# ---- bounds


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize("regularization", [1.0, 1e-2, 1e-5])
def test_bounds_hold_after_any_number_of_steps(steps, regularization):
    mu, nu = cloud(6, 20, 2, seed=32), cloud(15, 2, seed=33)
    mu.weights[..., 3] = 0
    mu.weights.div_(mu.weights.sum(-1, keepdim=True))
    for norm in (1, 2):
        exact = wasserstein1(mu, nu, norm)
        distance = entropic_wasserstein1(
            mu, nu, norm, regularization=regularization, max_steps=steps, tolerance=0.0
        )
        assert distance.steps == steps
        assert (distance.lower <= exact + 1e-13).all()
        assert (exact <= distance.upper + 1e-13).all()
        torch.testing.assert_close(distance.error, distance.upper - distance.lower)


def test_bounds_close_in():
    mu, nu = cloud(4, 30, 3, seed=34), cloud(25, 3, seed=35)
    distance = entropic_wasserstein1(mu, nu, regularization=1e-3, max_steps=5000, tolerance=1e-3)
    assert distance.steps < 5000
    assert (distance.error <= 1e-3 * distance.upper).all()
    assert (distance.error > 0).all()
    loose = entropic_wasserstein1(mu, nu, tolerance=0.1)
    assert loose.steps < distance.steps
    assert (loose.regularization >= distance.regularization).all()


def test_bounds_of_float32_are_not_rounded():
    mu, nu = cloud(9, 2, seed=36, dtype=torch.float32), cloud(8, 2, seed=37, dtype=torch.float32)
    assert entropic_wasserstein1(mu, nu).upper.dtype == torch.float64


def test_bounds_of_points_that_coincide_are_zero():
    mu = Cloud(torch.ones(3, 2), torch.full((3,), 1 / 3))
    distance = entropic_wasserstein1(mu, mu)
    assert distance.lower == distance.upper == 0


@pytest.mark.parametrize(
    "options", [{"regularization": 0.0}, {"max_steps": 0}, {"tolerance": -1.0}]
)
def test_options_out_of_range_are_refused(options):
    mu = cloud(3, 2)
    with pytest.raises(ValueError, match=next(iter(options))):
        entropic_wasserstein1(mu, mu, **options)


def test_bounds_say_whether_they_came_near_enough():
    near, far = cloud(2, 40, 2, seed=38), cloud(2, 40, 2, seed=39)
    far = Cloud(far.points + torch.tensor([0.0, 9.0]).reshape(2, 1, 1), far.weights)
    distance = entropic_wasserstein1(near, far, max_steps=40)
    assert distance.converged.tolist() == [False, True]
    assert torch.equal(distance.converged, distance.error <= 0.01 * distance.upper)
    assert distance.steps == 40
    assert entropic_wasserstein1(near, far, tolerance=0.5).converged.all()
