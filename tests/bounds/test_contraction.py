"""Constants of attention between measures: the paper's, brute force over the space, refusals."""

import itertools
import math

import pytest
import torch

from fenchel.bounds import Ball, Box, Everywhere, PotentialBounds, Setting, attack
from fenchel.bounds.contraction import (
    attention,
    attention_query,
    in_measure,
    in_query,
    neighbourhood,
    potential_bounds,
    projection,
)
from fenchel.measures import Dot, GaussianPotential, Potential, ScaledDot
from tests.bounds.draws import F64, generator, normal, shrunk

ALL = [in_query, in_measure, projection, attention, attention_query, neighbourhood]
POTENTIALS = [Dot(0.7), Dot(50.0), ScaledDot(), GaussianPotential(0.8)]
# Vuckovic et al., 2020, theorem 23: G = exp(<x, y> / 50) on [-1, 1]^2
CLAIM = Setting(Dot(50.0), Box(1.0), 2, 3)


def name(x):
    return x.__name__ if callable(x) else type(x).__name__


# ---- known numbers


def test_the_corrected_example_of_the_claims():
    """eps = exp(-2/50), top = exp(2/50), Lx = Ly = top / 50, D = 4, K = 1."""
    top, eps = math.exp(0.04), math.exp(-0.04)
    slope = top / 50
    known = CLAIM.potential_bounds()
    assert known.log_least == pytest.approx(-0.04)
    assert known.log_most == pytest.approx(0.04)
    assert math.exp(known.log_query_slope) == pytest.approx(slope)
    assert CLAIM.diameter == 4
    assert in_query(CLAIM).value == pytest.approx(slope * 4 / (2 * eps))
    assert in_measure(CLAIM).value == pytest.approx((slope * 4 + top) / eps)
    assert projection(CLAIM).value == 1
    whole = ((slope / 2 + slope) * 4 + top) / eps
    assert attention(CLAIM).value == pytest.approx(whole)
    assert attention_query(CLAIM).value == pytest.approx(math.sqrt(2) * slope * 2 / eps)
    assert neighbourhood(CLAIM).value == pytest.approx((slope * 4 + top) / eps)


def test_the_printed_bound_of_the_claims_is_below_the_truth():
    """Theorem 23: .693 as printed, but two Diracs keep their distance: tau(A) >= 1."""
    printed = 2 * 4 * CLAIM.query_term()
    assert printed == pytest.approx(0.693, abs=5e-4)
    here, there = torch.zeros(3, 2, dtype=F64), torch.full((3, 2), 0.5, dtype=F64)
    even, x = torch.zeros(3, dtype=F64), torch.zeros(1, 2, dtype=F64)
    actual = attention(CLAIM).check(here, even, there, even, x, x)
    assert actual.quotient == pytest.approx(1)
    assert actual.holds


def test_the_hypothesis_of_the_fixed_point_can_be_proved():
    """Proposition 26: lookup x / 2 and a feed-forward of slope 1/2: tau(T) <= .303 < 1."""
    step = attention(CLAIM, torch.eye(2) / 2)
    assert 0.5 * step.value == pytest.approx(0.303, abs=5e-4)


def test_a_constant_potential_contracts_nothing():
    """Psi_G is the identity: the term with the size of G stays (proposition 19 lost it)."""
    flat = Setting(Dot(1e9), Ball(1.0), 2, 3)
    assert in_measure(flat).value == pytest.approx(1)
    assert in_query(flat).value < 1e-8
    assert attack(in_measure(flat), 400).ratio == pytest.approx(1, rel=1e-6)
    assert not attack(shrunk(in_measure(flat)), 400).holds


@pytest.mark.parametrize("potential", POTENTIALS, ids=name)
@pytest.mark.parametrize("space", [Ball(0.8), Box(0.8)], ids=name)
@pytest.mark.parametrize("dim", [1, 3])
def test_potentials_stay_within_their_bounds(potential, space, dim):
    """Values and slopes in l1 (the largest partial derivative) at many points, corners included."""
    known = potential_bounds(potential, space, dim)
    x, y = (space.sample(3000, torch.Size((1, dim)), 1.0, generator(s)) for s in (0, 1))
    ends = space.project(10 * torch.ones(1, 1, dim, dtype=F64))
    x = torch.cat([x, ends, ends, y[:500]]).requires_grad_()
    y = torch.cat([y, ends, -ends, y[:500]]).requires_grad_()
    logs = potential.log(x, y).flatten()
    assert known.log_least <= float(logs.detach().min()) + 1e-12
    assert float(logs.detach().max()) <= known.log_most + 1e-12
    slopes = torch.autograd.grad(logs.exp().sum(), (x, y))
    for slope, log_bound in zip(slopes, (known.log_query_slope, known.log_key_slope), strict=True):
        assert float(slope.abs().max()) <= math.exp(log_bound) * (1 + 1e-12)
    # attained at the ends
    assert float(logs.detach().min()) == pytest.approx(known.log_least, rel=1e-9)


@pytest.mark.parametrize(("space", "known"), [(Ball(1.5), 3 * math.sqrt(4)), (Box(1.5), 12.0)])
def test_diameters_in_l1(space, known):
    assert Setting(Dot(), space, 4).diameter == pytest.approx(known)
    ends = space.project(10 * torch.ones(1, 4, dtype=F64))
    assert float((2 * ends).abs().sum()) == pytest.approx(known)


def test_potentials_of_your_own_need_their_bounds():
    potential = Potential(lambda x, y: -0.1 * torch.cdist(x, y, 1.0))
    with pytest.raises(TypeError, match=r"got Potential; give `bounds=PotentialBounds"):
        in_query(Setting(potential, Box(1.0), 2))
    bounds = PotentialBounds(-0.4, 0.0, math.log(0.1), math.log(0.1))
    setting = Setting(potential, Box(1.0), 2, 3, bounds)
    assert in_query(setting).value == pytest.approx(0.1 * 4 / 2 * math.exp(0.4))
    for make in (in_query, in_measure, attention, neighbourhood):
        assert attack(make(setting), 200).holds


# ---- attacks


@pytest.mark.parametrize("make", ALL, ids=name)
@pytest.mark.parametrize("potential", [Dot(2.0), GaussianPotential(1.0)], ids=name)
@pytest.mark.parametrize("dim", [1, 3])
def test_nothing_exceeds_the_corrected_constants(make, potential, dim):
    for space, size in itertools.product((Ball(0.7), Box(0.7)), (1, 4)):
        assert attack(make(Setting(potential, space, dim, size)), 120).holds


def test_the_projection_is_exact():
    bound = projection(CLAIM)
    assert attack(bound, 400).ratio == pytest.approx(1, rel=1e-9)
    assert not attack(shrunk(bound), 400).holds


def test_the_constant_one_half_is_sharp():
    """Proposition 19: two points, equal weights, a potential of small relative slope."""
    setting = Setting(Dot(1e4), Box(1.0), 1, 2)
    bound = in_query(setting)
    assert attack(bound, 600).ratio > 0.99
    assert not attack(shrunk(bound), 600).holds


@pytest.mark.parametrize("make", [attention, attention_query, neighbourhood], ids=name)
def test_the_lookup_enters_by_its_l1_norm(make):
    value = normal(3, 2)
    steep = float(torch.linalg.matrix_norm(value, 1))
    assert make(CLAIM, value).value == pytest.approx(steep * make(CLAIM).value)
    assert attack(make(CLAIM, value), 200).holds
    still = make(CLAIM, 0 * value)
    assert still.value == 0
    assert attack(still, 100).ratio == 0


def test_the_identity_lookup_keeps_diracs_apart():
    """tau(A) >= K always: so no attention with the identity contracts."""
    for setting in (CLAIM, Setting(Dot(0.7), Ball(1.0), 2, 3)):
        assert attention(setting).value >= 1


def test_bounds_that_overflow_are_infinite():
    huge = Setting(Dot(1e-3), Ball(10.0), 4, 3)
    for make in (in_query, in_measure, attention, neighbourhood):
        assert make(huge).value == math.inf
    assert attention(huge, torch.zeros(4, 4)).value == 0
    assert attack(in_query(huge), 100).holds


# ---- refusals


def test_an_unbounded_space_is_refused():
    with pytest.raises(TypeError, match="as near to zero as one likes; give the radius"):
        Setting(Dot(), Everywhere(), 2)


def test_bad_settings():
    with pytest.raises(ValueError, match="space must be centred at zero"):
        Setting(Dot(), Ball(1.0, torch.ones(2)), 2)
    with pytest.raises(ValueError, match="dim must be >= 1, got 0"):
        Setting(Dot(), Ball(1.0), 0)
    with pytest.raises(TypeError, match="size must be a whole number"):
        Setting(Dot(), Ball(1.0), 2, 1.5)
    with pytest.raises(ValueError, match="potentials without projections; project the points"):
        in_query(Setting(Dot(query=torch.eye(2)), Ball(1.0), 2))
    with pytest.raises(ValueError, match=r"value must be \(e, 2\), got \(3, 3\)"):
        attention(CLAIM, torch.eye(3))
