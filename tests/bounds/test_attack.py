"""The attack finds what is false, and reports what it did."""

import math

import pytest
import torch

from fenchel.bounds import (
    Ball,
    Bound,
    Everywhere,
    VectorMap,
    attack,
    layer_norm_lipschitz,
    query_lipschitz,
    token_map_lipschitz,
)
from fenchel.bounds.maps import MapTrials
from tests.bounds.draws import F64, generator, normal, shrunk


def line(function, bound, domain=None):
    return token_map_lipschitz("line", bound, VectorMap(function, (1, 1), domain or Everywhere()))


def test_a_true_bound_holds_and_a_smaller_one_does_not():
    for factor, holds in ((1.0, True), (0.9, False), (0.999, False)):
        result = attack(line(torch.tanh, factor), 2000)
        assert result.holds == holds
        assert result.observed <= 1 + 1e-12


def test_it_stops_at_the_first_that_exceeds():
    result = attack(line(lambda x: x, 0.5), 10_000)
    assert result.ratio == pytest.approx(2)
    assert result.trials <= 256


def test_the_witness_is_the_best_trial():
    bound = query_lipschitz(normal(6, 3), normal(6, 2, seed=1))
    result = attack(bound, 1000)
    again = bound.check(*result.witness)
    assert again.quotient == pytest.approx(result.observed, rel=1e-6)
    assert again.ratio == pytest.approx(result.ratio, rel=1e-6)
    assert result.tightness == pytest.approx(1 / result.ratio)


@pytest.mark.parametrize("budget", [1, 31, 33, 257, 600])
def test_no_more_trials_than_the_budget(budget):
    seen = 0

    def counted(x):
        nonlocal seen
        seen += len(x)
        return 0.5 * x

    result = attack(line(counted, 1.0), budget)
    assert result.trials == budget
    assert seen <= 5 * budget + 4  # two for a quotient, the aim's, and the witness's


def test_it_climbs_to_a_narrow_peak():
    """Slope one in a neighbourhood of 0.3 that random inputs seldom hit."""
    peak = line(lambda x: 1e-3 * torch.tanh((x - 0.3) * 1e3), 1.0)
    assert attack(peak, 3000).ratio > 0.99
    assert not attack(shrunk(peak), 3000).holds


def test_it_finds_a_layer_norms_steepest_point():
    layer = torch.nn.LayerNorm(8, eps=1e-3, dtype=F64)
    bound = layer_norm_lipschitz(layer, 2, Everywhere())
    assert attack(bound, 3000).ratio > 0.98
    assert not attack(shrunk(bound), 3000).holds


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_it_finds_the_norm_of_a_matrix(norm):
    """By aiming: steps alone do not find the one coordinate, or the signs, of many."""
    matrix = normal(60, 60)
    trials = MapTrials(VectorMap(lambda x: x @ matrix.mT, (60,), Everywhere(), norm))
    known = float(torch.linalg.matrix_norm(matrix, 2 if norm == 2 else norm))
    bound = Bound("matrix", known, norm, (), trials)
    assert attack(bound, 2000).holds
    assert not attack(shrunk(bound), 2000).holds


def test_it_repeats_itself_and_takes_another_seed():
    bound = line(torch.sin, 2.0)
    one, same = attack(bound, 300), attack(bound, 300)
    assert one.observed == same.observed
    other = attack(bound, 300, generator=generator(7))
    assert not torch.equal(one.witness[0], other.witness[0])


def test_it_stays_in_the_domain():
    """x^2 has slope 2 on the unit ball, and no bound outside."""
    result = attack(line(lambda x: x**2, 2.0, Ball(1.0)), 2000)
    assert result.holds
    assert result.ratio == pytest.approx(1, rel=1e-6)
    assert float(result.witness[0].abs()) <= 1


# ---- deliberately


def test_constant_functions_have_the_bound_zero():
    result = attack(line(lambda x: 0 * x + 1, 0.0), 500)
    assert (result.ratio, result.observed, result.holds) == (0.0, 0.0, True)
    assert result.tightness == math.inf
    assert result.trials == 500


def test_a_bound_of_zero_is_refuted_by_anything_that_moves():
    result = attack(line(lambda x: 1e-9 * x, 0.0), 500)
    assert result.ratio == math.inf
    assert not result.holds


def test_an_infinite_bound_holds_and_says_nothing():
    result = attack(line(lambda x: x**3, math.inf), 500)
    assert (result.ratio, result.holds, result.trials) == (0.0, True, 500)


def test_a_bound_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="must be a number >= 0"):
        line(lambda x: x, math.nan)


def test_some_nan_is_no_trial_and_does_not_hide_the_rest():
    def half(x):
        return torch.where(x > 0, x, math.nan)

    assert attack(line(half, 1.0), 500).ratio == pytest.approx(1)
    assert not attack(line(half, 0.9), 500).holds


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nothing_but_nan_is_no_attack(wrong):
    with pytest.raises(ValueError, match="not one trial of line gave a finite number"):
        attack(line(lambda x: x * wrong, 1.0), 100)


def test_rounding_of_large_outputs_is_no_violation():
    """Differences of outputs near 1e12 have no digits left at distances of 1e-5."""
    trials = MapTrials(VectorMap(lambda x: 0.5 * x + 1e12, (2,), Everywhere()))
    assert attack(Bound("far", 0.5, 2.0, (), trials), 1000).holds


@pytest.mark.parametrize(("budget", "kind"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_budget(budget, kind):
    with pytest.raises(kind, match="budget must be"):
        attack(line(torch.tanh, 1.0), budget)
