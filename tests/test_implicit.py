"""The derivative of a root is right to every order that is asked for, or asking raises."""

import math

import pytest
import torch

import fenchel as fl
from fenchel import dual, measures
from fenchel._implicit import attach, tilt, without_derivative
from fenchel.continuous import Gaussian, Mixture

DOUBLE = torch.float64


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=DOUBLE, generator=generator)


# ---- every solver along a line through all of its operands: a number -> a number

SCORES, SLOPE, SIDE = draw(6) / 3, draw(6, seed=1), draw(6, seed=2)
TEMPLATES, MOVED = draw(6, 2), draw(6, 2, seed=3)
PREFERENCE = 0.2 + draw(6, seed=4).abs()
EVIDENCE = draw(2, seed=5) / 3
COST = torch.cdist(TEMPLATES, TEMPLATES)
READ = draw(2, seed=6)


def solved(regularizer, base=None):
    def along(t):
        measure = None if base is None else base * (1 + t * SIDE / 4)
        return fl.solve(SCORES + t * SLOPE, regularizer(t), base=measure).weights @ SIDE

    return along


def problem(t):
    return TEMPLATES + t * MOVED / 4, PREFERENCE * (1 + t * SIDE / 4), EVIDENCE + t * READ / 2


def estimated(t):
    return dual.estimate(*problem(t), 2.0 + t).mean @ READ


def transported(t):
    templates, preference, evidence = problem(t)
    cost = COST * (1 + t / 5)
    return dual.transport(templates, preference, cost, evidence, 2.0 + t, 0.7 - t / 5).mean @ READ


def estimated_from_few(t):
    templates, preference, _ = problem(t)
    return dual.estimate(templates.mT, preference[:2], draw(6, seed=7) * (1 + t), 1.0).mean @ SIDE


def transported_from_few(t):
    operands = (TEMPLATES.mT + t * MOVED.mT, PREFERENCE[:2], None, SIDE * (1 + t) / 3)
    return dual.transport(*operands, 1.0, 0.7 - t / 5).mean @ SIDE


def gaussian(t):
    covariance = torch.eye(2, dtype=DOUBLE) * (1 + t / 2) + torch.outer(READ, READ)
    return dual.gaussian(READ * t, covariance, EVIDENCE, 2.0 + t).multiplier @ READ


def mixture(t):
    means = TEMPLATES[:3] + t * MOVED[:3] / 4
    covariances = torch.eye(2, dtype=DOUBLE).expand(3, 2, 2) * (0.5 + t / 4)
    density = Mixture(torch.softmax(SCORES[:3] + t, -1), Gaussian(means, covariances))
    return dual.gaussian_mixture(density, EVIDENCE * (1 + t), 2.0 + t).multiplier @ READ


def within(t):
    radius = 0.1 + t / 20
    return dual.within_radius(TEMPLATES, PREFERENCE, EVIDENCE + t * READ / 8, radius).reliability


def nearest(t):
    weights = PREFERENCE * (1 + t * SIDE / 4)
    nu = measures.Empirical(TEMPLATES, weights / weights.sum())
    moments = TEMPLATES.mean(-2) + READ * (0.1 + t / 4)
    return measures.maximum_entropy(nu, lambda x: x, moments).divergence


LINES = {
    "tsallis": solved(lambda t: fl.Tsallis(1.5)),
    "tsallis, all parameters": solved(lambda t: fl.Tsallis(1.4 + t / 3, 1 - t / 4), PREFERENCE),
    "norm": solved(lambda t: fl.Norm(1.3 + t / 3)),
    "shannon": solved(lambda t: fl.Shannon(1 - t / 4), PREFERENCE),
    "estimate": estimated,
    "estimate, n < d": estimated_from_few,
    "transport": transported,
    "transport, n < d": transported_from_few,
    "gaussian": gaussian,
    "mixture": mixture,
    "radius": within,
    "maximum entropy": nearest,
}
ZERO = torch.zeros((), dtype=DOUBLE)


def reverse(function):
    """Its derivative, by autograd; may be taken again."""

    def slope(t):
        t = t if t.requires_grad else t.clone().requires_grad_()
        return torch.autograd.grad(function(t), t, create_graph=True)[0]

    return slope


def forward(function):
    return lambda t: torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]


def times(count, derive, function):
    for _ in range(count):
        function = derive(function)
    return function


MODES = {
    "reverse": lambda f: times(4, reverse, f),
    "grad": lambda f: times(4, torch.func.grad, f),
    "jvp": lambda f: times(4, forward, f),
    "jvp of grad": lambda f: times(2, forward, times(2, torch.func.grad, f)),
    "reverse of grad": lambda f: reverse(times(3, torch.func.grad, f)),
}


def fourth_by_differences(function, h=0.003):
    """The third difference of first derivatives, which gradcheck vouches for; of order h^6."""
    ends = [7 / 240, -3 / 10, 169 / 120, -61 / 30]
    total = 0.0
    for k, factor in zip((4, 3, 2, 1), ends, strict=True):
        slopes = (reverse(function)(ZERO + sign * k * h).detach() for sign in (1, -1))
        total += factor * float(next(slopes) - next(slopes))
    return total / h**3


def marks(name, mode):
    """Nested forward mode is the dearest; two of the solvers stand for the others of their kind."""
    return pytest.mark.slow if mode == "jvp" and name not in ("tsallis", "estimate") else ()


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(name, mode, marks=marks(name, mode)) for name in LINES for mode in MODES],
)
def test_fourth_derivatives_are_right(name, mode):
    expected = fourth_by_differences(LINES[name])
    assert abs(expected) > 1e-3
    value = float(MODES[mode](LINES[name])(ZERO).detach())
    assert abs(value - expected) <= 2e-5 * abs(expected) + 1e-7


@pytest.mark.parametrize("name", [name for name in LINES if name != "shannon"])
def test_reverse_mode_of_transforms_is_right_to_the_third_order_and_raises_beyond(name):
    twice = times(2, torch.func.grad, LINES[name])
    third = times(3, reverse, LINES[name])(ZERO).detach()
    assert (reverse(twice)(ZERO).detach() - third).abs() <= 1e-8 * third.abs()
    with pytest.raises(NotImplementedError, match="take all derivatives by"):
        times(2, reverse, twice)(ZERO)


# ---- one equation, whose root is known: x^3 + x = t


def cubic(t):
    root = 2 * torch.sinh(torch.asinh(1.5 * math.sqrt(3) * t.detach()) / 3) / math.sqrt(3)

    def linearise(x, t):
        return t - x**3 - x, lambda right: right / (3 * x**2 + 1)

    return attach(root, linearise, t)


def cubic_derivatives(count):
    """At t = 2, where x = 1: x' = 1 / (3 x^2 + 1) is a function of x, differentiated by x x'."""
    x = torch.ones((), dtype=DOUBLE, requires_grad=True)
    value, actual = x, []
    for _ in range(count):
        slope = torch.autograd.grad(value, x, create_graph=True)[0]
        value = slope / (3 * x**2 + 1)
        actual.append(float(value.detach()))
    return actual


TWO = torch.tensor(2.0, dtype=DOUBLE)


@pytest.mark.parametrize("derive", [reverse, torch.func.grad, forward])
def test_every_order_of_a_known_root(derive):
    for order, expected in enumerate(cubic_derivatives(6), start=1):
        value = float(times(order, derive, cubic)(TWO).detach())
        assert value == pytest.approx(expected, rel=1e-12)


def test_the_value_is_the_root_that_was_given():
    for function in (cubic, lambda t: torch.func.vmap(cubic)(t.expand(2))):
        assert (function(TWO) == cubic(TWO).detach()).all()


def test_without_a_derivative_there_is_no_graph():
    assert not cubic(TWO).requires_grad
    with torch.no_grad():
        assert not cubic(TWO.clone().requires_grad_()).requires_grad


def test_batched_derivatives():
    points = torch.tensor([0.5, 2.0, -1.0], dtype=DOUBLE)
    alone = torch.stack([times(2, reverse, cubic)(t).detach() for t in points])
    together = torch.func.vmap(times(2, torch.func.grad, cubic))(points)
    assert (together - alone).abs().max() <= 1e-14
    jacobian = torch.autograd.functional.jacobian(cubic, points, vectorize=True)
    slopes = torch.func.vmap(torch.func.grad(cubic))(points)
    assert (jacobian.diagonal() - slopes).abs().max() <= 1e-15


def test_compiled_derivatives_are_right_or_nan():
    expected = cubic_derivatives(4)
    torch._dynamo.reset()
    inside = torch.compile(times(4, torch.func.grad, cubic), backend="aot_eager", fullgraph=True)
    assert float(inside(TWO)) == pytest.approx(expected[3], rel=1e-12)
    torch._dynamo.reset()
    plain = torch.compile(cubic, backend="eager", fullgraph=True)
    third = float(times(3, reverse, plain)(TWO).detach())
    assert third == pytest.approx(expected[2], rel=1e-12)
    assert times(4, reverse, plain)(TWO).isnan()


def test_a_value_without_derivative_says_so_when_asked():
    x = TWO.clone().requires_grad_()
    value = without_derivative(3 * x, x, refusal="not this one")
    assert float(value.detach()) == 6
    with pytest.raises(NotImplementedError, match="not this one"):
        torch.autograd.grad(value, x)


# ---- the softmax with mass


def test_tilt_is_softmax_with_log_masses():
    log_g, mass = draw(3, 6), PREFERENCE
    weights, log_total = tilt(log_g, mass)
    joint = log_g + mass.log()
    assert (weights - joint.softmax(-1)).abs().max() <= 1e-15
    assert (log_total - joint.logsumexp(-1, keepdim=True)).abs().max() <= 1e-14


def test_tilt_of_an_even_function_leaves_the_masses_as_they_are():
    mass = torch.tensor([0.5, 0.375, 0.125, 0.0])
    assert torch.equal(tilt(torch.zeros(4), mass)[0], mass)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_tilt_holds_where_a_factor_alone_would_overflow_or_vanish(dtype):
    most = math.log(torch.finfo(dtype).max)
    log_mass = torch.tensor([-0.9 * most, 0.9 * most, 0.0], dtype=DOUBLE)
    mass = log_mass.exp().to(dtype).requires_grad_()
    log_g = (-log_mass).to(dtype).requires_grad_()
    weights, log_total = tilt(log_g, mass)
    # Each factor is the other's inverse, up to rounding of numbers of that size.
    slack = 4 * torch.finfo(dtype).eps * most
    assert (weights - 1 / 3).abs().max() <= slack
    assert (log_total - math.log(3)).abs().max() <= 3 * slack
    slopes = torch.autograd.grad((weights * torch.arange(3)).sum(), (log_g, mass))
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[0] - torch.tensor([-1 / 3, 0, 1 / 3], dtype=DOUBLE)).abs().max() <= slack


def test_tilt_has_one_sided_derivatives_at_zero_mass():
    mass = PREFERENCE.clone()
    mass[2] = 0
    leaf = mass.clone().requires_grad_()

    def value(m):
        weights, log_total = tilt(SCORES, m)
        return (weights * SIDE).sum() + log_total.squeeze(-1)

    slope = torch.autograd.grad(value(leaf), leaf)[0]
    h = 1e-7
    bumped = mass.clone()
    bumped[2] = h
    one_sided = (value(bumped) - value(mass)) / h
    assert one_sided.abs() > 1e-2
    assert (slope[2] - one_sided).abs() <= 1e-5 * one_sided.abs()


def test_tilt_of_a_towering_score_without_mass_is_finite():
    log_g = torch.tensor([0.0, 5000.0], dtype=DOUBLE, requires_grad=True)
    mass = torch.tensor([1.0, 0.0], dtype=DOUBLE, requires_grad=True)
    weights, log_total = tilt(log_g, mass)
    assert weights.tolist() == [1.0, 0.0]
    slopes = torch.autograd.grad(weights[1] + log_total.sum(), (log_g, mass))
    assert all(slope.isfinite().all() for slope in slopes)


def test_tilt_gives_nothing_to_rows_and_points_without_any():
    log_g = torch.tensor([[0.0, -math.inf, 1.0], [0.0, 1.0, 2.0]], dtype=DOUBLE, requires_grad=True)
    mass = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=DOUBLE, requires_grad=True)
    weights, log_total = tilt(log_g, mass)
    assert weights[0, 1] == 0
    assert weights[1].tolist() == [0, 0, 0]
    assert log_total[1] == 0
    slopes = torch.autograd.grad((weights * draw(2, 3)).sum(), (log_g, mass))
    assert all(slope.isfinite().all() for slope in slopes)


def test_the_divergence_of_maximum_entropy_knows_points_without_mass():
    points = torch.arange(1.0, 7.0, dtype=DOUBLE).unsqueeze(-1)

    def divergence(weights):
        nu = measures.Empirical(points, weights / weights.sum())
        return measures.maximum_entropy(nu, lambda x: x, points.new_tensor([4.5])).divergence

    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=DOUBLE)
    slope = torch.autograd.functional.jacobian(divergence, weights)
    bumped = weights.clone()
    bumped[2] = 1e-6
    one_sided = (divergence(bumped) - divergence(weights)) / 1e-6
    assert (slope[2] - one_sided).abs() <= 1e-5 * one_sided.abs()
