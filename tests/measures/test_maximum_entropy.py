"""Maximum entropy: the theorem's own tests, linear programs for the hull, and its boundary."""

import math

import pytest
import torch
from scipy.optimize import linprog

from fenchel._solution import Status
from fenchel.measures import Empirical, maximum_entropy

from .draws import F64, close, generator, measure, normal, shares

OK, INFEASIBLE, MAX_STEPS = Status.OK.value, Status.INFEASIBLE.value, Status.MAX_STEPS.value


def identity(x):
    return x


def powers(x):
    return torch.cat([x, x.square()], -1)


def assert_solved(actual, nu, values, moments, tolerance=1e-12):
    """The moments are met, and the measure is an exponential tilt of nu by the multiplier."""
    assert actual.status == OK
    scale = values.abs().max()
    assert ((actual.measure.weights @ values - moments).abs() <= tolerance * scale).all()
    tilt = torch.softmax(nu.weights.log() + values @ actual.multiplier, -1)
    assert close(actual.measure.weights, tilt, 1e-9)
    assert close(actual.divergence, actual.measure.kl(nu), 1e-9)


def test_random_problems():
    for seed in range(60):
        g = generator(seed)
        n, k = int(torch.randint(3, 40, (), generator=g)), int(torch.randint(1, 6, (), generator=g))
        nu = Empirical(normal(n, 2, seed=seed), shares(n, seed=seed + 1))
        values = normal(n, k, seed=seed + 2) * 10 ** (4 * torch.rand(k, generator=g) - 2)
        moments = shares(n, seed=seed + 3) @ values  # inside, by construction
        assert_solved(maximum_entropy(nu, values, moments), nu, values, moments)


def test_the_checker_can_fail():
    nu, values = measure(6, 2), normal(6, 2, seed=3)
    moments = shares(6, seed=4) @ values
    solution = maximum_entropy(nu, values, moments)
    assert_solved(solution, nu, values, moments)
    moved = solution.measure.weights + 1e-6 * (normal(6) - normal(6).mean())
    for wrong in (
        solution._replace(measure=Empirical._unchecked(nu.points, moved)),
        solution._replace(multiplier=solution.multiplier + 1e-6),
        solution._replace(divergence=solution.divergence + 1e-6),
        solution._replace(status=torch.tensor(MAX_STEPS)),
    ):
        with pytest.raises(AssertionError):
            assert_solved(wrong, nu, values, moments)


def test_no_feasible_measure_is_nearer():
    """Vuckovic et al., 2020, theorem 14, and the identity of Pythagoras for each of 5000 rivals."""
    nu, values = measure(7, 2), normal(7, 2, seed=3)
    moments = shares(7, seed=4) @ values
    best = maximum_entropy(nu, values, moments)
    ones = torch.cat([values, torch.ones(7, 1, dtype=F64)], -1)
    kernel = torch.linalg.svd(ones.mT)[2][3:]  # directions that keep the moments and the mass
    steps = normal(5000, 4, seed=5) @ kernel
    p = best.measure.weights
    room = (-p / steps).where(steps < 0, math.inf).amin(-1, keepdim=True)  # until a weight is zero
    rivals = p + steps * room * torch.rand(5000, 1, generator=generator(6), dtype=F64)
    rivals = Empirical.of_masses(nu.points, rivals.clamp_min(0))
    assert close(rivals.weights @ values, moments.expand(5000, 2), 1e-13)
    assert (rivals.kl(nu) >= best.divergence).all()
    gap = rivals.kl(nu) - rivals.kl(best.measure) - best.divergence
    assert gap.abs().max() < 1e-13
    unrelated = Empirical(nu.points, shares(7, seed=8))  # other moments: no identity
    assert abs(float(unrelated.kl(nu) - unrelated.kl(best.measure) - best.divergence)) > 1e-3


def test_the_boundary_of_two_points():
    """Against theorem 14: the multiplier is log(f / (1 - f)), and for f = 0 there is none."""
    nu = Empirical(torch.tensor([[0.0], [1.0]], dtype=F64))
    for f in (0.5, 0.1, 1e-3, 1e-6, 1e-9, 1e-12):
        solution = maximum_entropy(nu, identity, torch.tensor([f], dtype=F64))
        assert solution.status == OK
        assert float(solution.multiplier) == pytest.approx(math.log(f / (1 - f)), abs=1e-12)
        assert float(solution.measure.weights[1]) == pytest.approx(f, rel=1e-12)
    limit = maximum_entropy(nu, identity, torch.zeros(1, dtype=F64))
    assert limit.status == MAX_STEPS
    assert limit.multiplier < -100
    assert limit.measure.weights[0] == 1  # what the multiplier runs to
    assert limit.steps == 200
    assert maximum_entropy(nu, identity, torch.zeros(1, dtype=F64), max_steps=9).steps == 9


SQUARE = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0.3, 0.4]], dtype=F64)


@pytest.mark.parametrize("turn", ["axes", "turned", "stretched"])
def test_faces_and_corners(turn):
    rotation = torch.linalg.qr(normal(2, 2))[0]
    stretch = torch.diag(torch.tensor([1.0, 1e5], dtype=F64))
    form = {"axes": torch.eye(2, dtype=F64), "turned": rotation, "stretched": rotation @ stretch}
    cases = [
        ((0.3, 0.3), OK), ((1e-9, 0.3), OK), ((0.9999, 0.9999), OK),
        ((0.0, 0.3), MAX_STEPS), ((0.5, 1.0), MAX_STEPS), ((0.0, 0.0), MAX_STEPS),
        ((-1e-9, 0.3), INFEASIBLE), ((-0.01, 0.5), INFEASIBLE), ((2.0, 2.0), INFEASIBLE),
    ]  # fmt: skip
    points = SQUARE @ form[turn]
    moments = torch.tensor([m for m, _ in cases], dtype=F64) @ form[turn]
    solution = maximum_entropy(Empirical(points), identity, moments)
    assert solution.status.tolist() == [status for _, status in cases]
    assert (solution.residual[:3] < 1e-12).all()
    apart = solution.multiplier[6:]  # separating directions, each a proof
    assert ((apart * moments[6:]).sum(-1, keepdim=True) > apart @ points.mT).all()


def test_the_hull_is_that_of_a_linear_program():
    """Random moments, near and far: OK where they are a convex combination, else a proof."""
    seen = set()
    for seed in range(40):
        values = normal(9, 3, seed=seed)
        moments = 0.8 * normal(3, seed=100 + seed)
        solution = maximum_entropy(Empirical(normal(9, 1)), values, moments)
        equal = torch.cat([values, torch.ones(9, 1, dtype=F64)], -1).mT
        right = torch.cat([moments, torch.ones(1, dtype=F64)])
        inside = (
            linprog([0.0] * 9, A_eq=equal.numpy(), b_eq=right.numpy(), bounds=(0, None)).status == 0
        )
        assert solution.status == (OK if inside else INFEASIBLE)
        seen.add(inside)
        if not inside:
            assert (values @ solution.multiplier < moments @ solution.multiplier).all()
    assert seen == {True, False}


def test_features_that_depend_on_each_other():
    nu = measure(6, 2)
    values = torch.cat([nu.points, nu.points.sum(-1, keepdim=True), torch.ones(6, 1)], -1)
    p = shares(6, seed=4)
    solution = maximum_entropy(nu, values, p @ values)
    plain = maximum_entropy(nu, identity, p @ nu.points)
    assert solution.status == OK
    assert close(solution.measure.weights, plain.measure.weights, 1e-13)
    off = p @ values + torch.tensor([0.0, 0.0, 1e-6, 0.0], dtype=F64)
    lost = maximum_entropy(nu, values, off)
    assert lost.status == INFEASIBLE
    assert lost.divergence == torch.inf
    assert (values @ lost.multiplier < off @ lost.multiplier).all()


def test_more_features_than_points():
    nu, values = measure(3, 1), normal(3, 8)
    p = shares(3, seed=5)
    solution = maximum_entropy(nu, values, p @ values)
    assert solution.status == OK
    assert close(solution.measure.weights, p, 1e-12)  # a simplex: the moments say all


def test_points_without_mass_stay_without():
    points = normal(5, 1)
    nu = Empirical(points, torch.tensor([0.5, 0.25, 0.0, 0.25, 0.0], dtype=F64))
    few = Empirical(points[[0, 1, 3]], torch.tensor([0.5, 0.25, 0.25], dtype=F64))
    moments = torch.tensor([0.3, 0.3, 0.4], dtype=F64) @ points[[0, 1, 3]]
    actual, expected = (maximum_entropy(m, identity, moments) for m in (nu, few))
    assert actual.status == OK
    assert close(actual.measure.weights[[0, 1, 3]], expected.measure.weights, 1e-14)
    assert actual.measure.weights[[2, 4]].tolist() == [0.0, 0.0]


def test_weights_over_many_decades():
    nu = Empirical(torch.tensor([[0.0], [1.0]], dtype=F64), torch.tensor([1.0, 1e-25], dtype=F64))
    solution = maximum_entropy(nu, identity, torch.tensor([0.5], dtype=F64))
    assert solution.status == OK
    assert float(solution.multiplier) == pytest.approx(25 * math.log(10), rel=1e-14)


# The first five once ended early: overshoot into a corner, and rounding taken for a dimension.
@pytest.mark.parametrize("seed", [157, 447, 1057, 4977, 5933, *range(60)])
def test_hard_numbers(seed):
    """Base weights over 12 decades, features over 6, moments near corners, means far from zero."""
    g = generator(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=F64)

    n, k = (int(torch.randint(*bounds, (), generator=g)) for bounds in ((2, 60), (1, 7)))
    values = torch.randn(n, k, generator=g, dtype=F64) * 10 ** (6 * uniform(k) - 3)
    if seed % 3 == 0:
        values = values + 100 * torch.randn(k, generator=g, dtype=F64)
    base = 10 ** (-12 * uniform(n)) if seed % 2 else torch.ones(n, dtype=F64)
    p = uniform(n) ** (1 + 6 * torch.rand((), generator=g)) + 1e-9
    moments = p / p.sum() @ values
    solution = maximum_entropy(Empirical.of_masses(normal(n, 1), base), values, moments)
    assert solution.status == OK
    assert solution.steps < 40
    spread = (values - values.mean(0)).abs().amax(0)
    # moments carry the rounding of features far from zero
    assert solution.residual <= 1e-14 * (1 + (values.mean(0) / spread).abs().max())


def test_batches_are_many_at_once():
    nu = measure(6, 1, batch=(3,))
    moments = 0.2 * normal(2, 3, 1, seed=9)  # (2, 3): three measures, two rows of moments
    solution = maximum_entropy(nu, identity, moments)
    assert solution.status.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = Empirical(nu.points[j], nu.weights[j])
            single = maximum_entropy(one, identity, moments[i, j])
            assert single.status == solution.status[i, j]
            assert close(single.measure.weights, solution.measure.weights[i, j], 1e-13)


def test_a_fine_grid_takes_few_steps():
    grid = torch.linspace(0, 1, 1001, dtype=F64).unsqueeze(-1)
    for mean in (0.5, 0.9, 0.999, 0.9999):
        solution = maximum_entropy(Empirical(grid), identity, torch.tensor([mean], dtype=F64))
        assert solution.status == OK
        assert solution.steps < 30
        assert solution.residual < 1e-13


def test_single_precision():
    nu = Empirical(torch.linspace(-1, 1, 9).unsqueeze(-1))
    solution = maximum_entropy(nu, powers, torch.tensor([0.1, 0.2]))
    assert solution.status == OK
    assert solution.measure.weights.dtype == solution.multiplier.dtype == torch.float32
    assert solution.residual < 1e-6


def test_derivatives():
    """In moments, features and weights, to the second order."""
    points, base, p = normal(5, 2), shares(5), shares(5, seed=3)

    def solution(moments, values, masses):
        actual = maximum_entropy(Empirical.of_masses(points, masses), values, moments)
        assert actual.status == OK
        return actual.measure.weights, actual.multiplier, actual.divergence

    values = normal(5, 2, seed=7)
    leaves = ((p @ values), values.clone(), base)
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    assert torch.autograd.gradcheck(solution, leaves, atol=1e-6)
    assert torch.autograd.gradgradcheck(solution, leaves, atol=1e-5)


def test_a_row_that_fails_does_not_spoil_the_derivatives_of_others():
    nu = Empirical(torch.tensor([[0.0], [1.0]], dtype=F64))
    moments = torch.tensor([[0.3], [0.0], [-1.0]], dtype=F64, requires_grad=True)
    solution = maximum_entropy(nu, identity, moments)
    solution.multiplier[0].sum().backward()
    assert float(moments.grad[0]) == pytest.approx(1 / (0.3 * 0.7), rel=1e-12)
    assert moments.grad[1:].tolist() == [[0.0], [0.0]]


def test_a_single_point_has_no_choice():
    nu = Empirical(torch.tensor([[2.0]], dtype=F64))
    solution = maximum_entropy(nu, identity, torch.tensor([[2.0], [2.1]], dtype=F64))
    assert solution.status.tolist() == [OK, INFEASIBLE]
    assert solution.divergence.isinf().tolist() == [False, True]
