"""Potentials against the formulas, pair by pair."""

import math

import pytest
import torch

from fenchel.measures import Dot, GaussianPotential, Potential, ScaledDot

from .draws import F64, close, normal


def pairs(function, x, y):
    return torch.stack([torch.stack([function(a, b) for b in y]) for a in x])


@pytest.mark.parametrize("maps", [False, True])
def test_they_are_what_they_say(maps):
    x, y = normal(4, 3), normal(5, 3, seed=1)
    q, k = (normal(2, 3, seed=2), normal(2, 3, seed=3)) if maps else (None, None)
    a, b = (x @ q.mT, y @ k.mT) if maps else (x, y)
    size = 2 if maps else 3
    assert close(Dot(2.5, q, k).log(x, y), pairs(torch.dot, a, b) / 2.5, 1e-14)
    assert close(ScaledDot(None, q, k).log(x, y), pairs(torch.dot, a, b) / math.sqrt(size), 1e-14)
    assert close(ScaledDot(3.0, q, k).log(x, y), pairs(torch.dot, a, b) / 3, 1e-14)
    square = pairs(lambda s, t: -(s - t).square().sum(), a, b)
    assert close(GaussianPotential(1.0, q, k).log(x, y), square, 1e-13)
    assert close(GaussianPotential(0.5, q, k).log(x, y), 2 * square, 1e-13)


def test_any_function_will_do():
    x, y = normal(2, 4, 3), normal(5, 3, seed=1)
    log_potential = Potential(lambda s, t: -torch.cdist(s, t, p=1)).log(x, y)
    assert close(log_potential, -torch.cdist(x, y, p=1), 0.0)


def test_batches():
    x, y = normal(2, 4, 3), normal(5, 3, seed=1)
    for potential in (Dot(), ScaledDot(), GaussianPotential()):
        each = torch.stack([potential.log(part, y) for part in x])
        assert close(potential.log(x, y), each, 1e-13)


def test_distances_keep_their_digits_far_from_zero():
    x, y = normal(4, 2), normal(4, 2, seed=1)
    near, far = GaussianPotential().log(x, y), GaussianPotential().log(x + 1000, y + 1000)
    assert close(far, near, 1e-11)


def test_second_derivatives_where_points_meet():
    """A distance clamped at zero loses them wherever rounding makes it negative."""
    x = normal(50, 16)
    potential = GaussianPotential()

    def total(query):
        return potential.log(query, x).diagonal().sum()

    hessian = torch.autograd.functional.hessian(total, x).reshape(800, 800)
    assert close(hessian, -2 * torch.eye(800, dtype=F64), 1e-14)
