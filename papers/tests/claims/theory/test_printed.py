"""Four constants as printed are false: each witness computed anew, with POT and plain formulas."""

import math

import numpy as np
import ot
import pytest
import torch

from fenchel.bounds import Box, Setting, attack, contraction
from fenchel.measures import Dot
from papers.claims.theory.printed import (
    GaussianTrials,
    printed_attention,
    printed_gaussian,
    printed_measure,
    printed_neighbourhood,
    refute,
)

SETTING = Setting(Dot(50.0), Box(1.0), 2, 3)
PRINTED = [
    *(make(SETTING) for make in (printed_measure, printed_attention, printed_neighbourhood)),
    printed_gaussian(1, 9),
]
NAMES = [bound.name for bound in PRINTED]


@pytest.fixture(scope="module")
def refuted():
    return refute()


def w1(x, a, y, b):
    """Of weighted points, in the l1 norm, by POT."""
    cost = np.abs(x[:, None] - y[None]).sum(-1)
    return float(ot.emd2(a / a.sum(), b / b.sum(), cost))


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reweighted(x, points, weights, temperature):
    """Psi_{G(x, .)} of the measure, G = exp(<x, y> / temperature)."""
    g = weights * np.exp(points @ x / temperature)
    return g / g.sum()


def read(words):
    """d, the number of points and the temperature of a setting's description."""
    parts = dict(part.strip().split(" = ") for part in words.split(",") if " = " in part)
    points = [p.split()[0] for p in words.split(",") if "points" in p]
    heat = [p.split()[-1] for p in words.split(",") if "temperature" in p]
    return int(parts["d"]), int(points[0] if points else parts["N"]), float(heat[0]) if heat else 1


def test_all_four_are_refuted(refuted):
    assert list(refuted) == NAMES
    for words, outcome in refuted.values():
        assert not outcome.holds, words
        assert outcome.ratio > 1 + 1e-6
        assert outcome.observed == pytest.approx(outcome.ratio * outcome.bound.value)


def measures(outcome):
    mu, log_mu, nu, log_nu, x, _ = (z.numpy() for z in outcome.witness)
    return mu, softmax(log_mu), nu, softmax(log_nu), x[0]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_witnesses_of_the_first_three(refuted, index):
    words, outcome = refuted[NAMES[index]]
    dim, _, heat = read(words)  # the temperature to three digits
    mu, a, nu, b, x = measures(outcome)
    assert max(np.abs(z).max() for z in (mu, nu, x)) <= 1  # in the unit box
    apart = w1(mu, a, nu, b)
    if index == 0:
        moved = w1(mu, reweighted(x, mu, a, heat), nu, reweighted(x, nu, b, heat))
    elif index == 1:
        outputs = [
            np.stack([reweighted(p, points, weights, heat) @ points for p in points])
            for points, weights in ((mu, a), (nu, b))
        ]
        moved = w1(outputs[0], a, outputs[1], b)
    else:
        one, other = reweighted(x, mu, a, heat) @ mu, reweighted(x, nu, b, heat) @ nu
        moved = np.abs(one - other).sum()
    # eps = exp(-d / heat), Lx = Ly = exp(d / heat) / heat, D = 2 d
    term = math.exp(2 * dim / heat) / heat * 2 * dim
    printed = [2 * term, 4 * dim * term, 2 * dim * term][index]
    assert printed == pytest.approx(outcome.bound.value, rel=0.05)  # digits of the temperature
    assert moved / apart == pytest.approx(outcome.observed, rel=0.02)
    assert moved / apart > printed


def test_witness_of_the_fourth(refuted):
    words, outcome = refuted[NAMES[3]]
    dim, tokens, _ = read(words)
    x, y = (z.numpy() for z in outcome.witness)
    assert x.shape == y.shape == (tokens, dim)
    even = np.full(tokens, 1 / tokens)
    moved = w1(x, softmax(-((x - x[0]) ** 2).sum(-1)), y, softmax(-((y - y[0]) ** 2).sum(-1)))
    apart = np.abs(x[0] - y[0]).sum() + w1(x, even, y, even)
    slope = math.sqrt(dim) * math.sqrt(math.log(tokens) + 1 / (2 * math.e)) * math.sqrt(2 / math.e)
    printed = slope + 1 + math.sqrt(dim) + 2
    assert printed == pytest.approx(outcome.bound.value, rel=1e-12)
    assert moved / apart == pytest.approx(outcome.observed, rel=1e-6)
    assert moved / apart > printed


def test_the_claims_own_counterexample():
    """CLAIMS M-P28: x = y = 0, a neighbour at z, the others far: rate N (p + 2 z^2 p (1 - p))."""
    for tokens, holds in ((8, True), (9, False), (40, False)):
        x = torch.full((1, tokens, 1), 30.0, dtype=torch.float64)
        x[:, :2, 0] = torch.tensor([0.0, 0.8])
        y = x.clone()
        y[:, 1] += 1e-6
        quotient = float(GaussianTrials(1, tokens).quotient((x, y)))
        assert quotient == pytest.approx(0.6346 * tokens, rel=1e-4)
        assert (quotient <= printed_gaussian(1, tokens).value) == holds


def test_a_nearly_constant_potential_refutes_three_at_once():
    """The right sides go to zero with the slope of G, the left sides stay at one."""
    setting = Setting(Dot(1e4), Box(1.0), 1, 2)
    for make in (printed_measure, printed_attention, printed_neighbourhood):
        assert make(setting).value < 0.01
        assert attack(make(setting), 300).ratio > 100
    for make in (contraction.in_measure, contraction.attention, contraction.neighbourhood):
        assert attack(make(setting), 300).holds


def test_where_the_printed_constants_happen_to_hold():
    """A steep potential: the attack must not call everything false."""
    steep = Setting(Dot(0.5), Box(1.0), 2, 3)
    for make in (printed_measure, printed_attention, printed_neighbourhood):
        assert attack(make(steep), 300).holds
    assert attack(printed_gaussian(2, 3), 300).holds


def test_a_budget_that_is_used_up():
    """The strongest attack is reported, whether it refutes or not."""
    refutations = refute(1)
    assert list(refutations) == NAMES
    assert all(tried.trials == 1 for _, tried in refutations.values())
