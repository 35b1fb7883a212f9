"""The references and checkers of this folder: right where the answer is known, loud where wrong."""

import math

import numpy as np
import pytest
import torch

from tests.continuous import pairs, reference
from tests.continuous.checks import (
    assert_mean,
    assert_near,
    assert_relative,
    assert_rows_near,
    assert_says,
)

ALPHAS = (1.05, 1.25, 1.5, 2.0, 3.0, 4.0)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_ball_rule_has_the_moments_of_its_law(d, alpha):
    u, share = reference.ball_rule(alpha, d, 20)
    assert_near(share.sum(), 1.0, 1e-13)
    # |u|^2 is Beta(d / 2, 1 / eps + 1)
    a, b = d / 2, 1 / (alpha - 1) + 1
    assert_near(np.einsum("k,ki,kj", share, u, u), np.eye(d) * a / (a + b) / d, 1e-11)
    fourth = a * (a + 1) / ((a + b) * (a + b + 1))
    assert_near(share @ (u**2).sum(-1) ** 2, fourth, 1e-11)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_paraboloid_is_that_of_the_thesis(d):
    """Farinhas, 2021, eq. 3.14: c = (Gamma(d/2 + 2) / sqrt det(2 pi S))^(2 / (d + 2))."""
    scale = reference.random_spd(np.random.default_rng(d), d)
    root = math.sqrt(np.linalg.det(2 * math.pi * scale))
    level = (math.gamma(d / 2 + 2) / root) ** (2 / (d + 2))
    peak, radius = reference.peak_and_radius(scale, 2)
    assert_near([peak, radius], [level, math.sqrt(2 * level)], 1e-14)
    apart = 0.1 * np.ones(d)
    expected = level - apart @ np.linalg.solve(scale, apart) / 2
    assert_near(reference.density(apart, np.zeros(d), scale, 2), expected, 1e-14)


def test_too_few_nodes_are_noticed():
    mean, scale = np.zeros(2), np.eye(2)

    def narrow(t):
        return reference.normal(t, np.array([0.3, 0.2]), 1e-3 * np.eye(2))

    with pytest.raises(AssertionError):
        reference.expectation(narrow, mean, scale, 2, 40)
    fine = reference.expectation(narrow, mean, scale, 2, 200)
    assert_near(fine, reference.density(np.array([0.3, 0.2]), mean, scale, 2) - 1e-3, 1e-9)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_jets_are_derivatives_of_the_value(alpha):
    """Against central differences of the value and of the gradient, Richardson's."""
    case = pairs.plane(3, seed=3)
    free = reference.pack(*(torch.from_numpy(x) for x in case[:2]))
    value, gradient, hessian = reference.jets(*case, alpha)

    def at(x):
        mean, scale = reference.unpack(x, 2)
        return reference.jets(mean.numpy(), scale.numpy(), *case[2:], alpha)

    for i in range(free.shape[1]):
        step = torch.zeros_like(free)
        step[:, i] = 2e-4 * free[:, -3:].abs().amin(-1)
        size = step[:, i].numpy()
        ahead, back, far, behind = (at(free + k * step) for k in (1, -1, 2, -2))
        for order, row in ((0, gradient[:, i]), (1, hessian[:, :, i])):
            near = ahead[order] - back[order]
            wide = far[order] - behind[order]
            size = size.reshape(-1, *(1,) * order)
            assert_rows_near((8 * near - wide) / (12 * size), row, 1e-6)
    assert (value > 0).all()


def test_jets_have_converged_on_the_thousand_pairs():
    case = pairs.plane()
    narrow = np.argsort(pairs.narrowness(*case))[:: len(case[0]) // 25]
    some = [x[narrow] for x in case]
    for rough, fine in zip(
        reference.jets(*some, 2), reference.jets(*some, 2, refine=1.3), strict=True
    ):
        assert_rows_near(rough, fine, {1: 1e-11, 2: 1e-11, 3: 1e-9}[fine.ndim])


def test_pack_and_unpack():
    scale = torch.from_numpy(reference.random_spd(np.random.default_rng(0), 3))
    mean = torch.arange(3.0, dtype=torch.float64)
    back = reference.unpack(reference.pack(mean, scale), 3)
    assert torch.equal(back[0], mean)
    assert torch.equal(back[1], scale)


@pytest.mark.parametrize(
    ("check", "wrong", "right", "bar"),
    [
        (assert_near, [1.0, 2.1], [1.0, 2.0], 1e-2),
        (assert_near, [1.0, math.nan], [1.0, 2.0], 1e-2),
        (assert_near, [1.0], [1.0, 1.0], 1e-2),
        (assert_near, [1.0], [math.nan], 1e-2),
        (assert_rows_near, [[0.1, 9.0], [0.2, 1.0]], [[0.1, 9.0], [0.1, 1.0]], 1e-2),
        (assert_rows_near, [[math.nan, 9.0]], [[0.1, 9.0]], 1e-2),
        (assert_relative, [1.1e-9], [1e-9], 1e-2),
        (assert_relative, [0.0], [1e-300], 1e-2),
        (assert_mean, np.random.default_rng(0).normal(0.1, 1, (10000, 2)), [0.0, 0.1], 5),
        (assert_mean, np.random.default_rng(0).normal(0, 1, (100, 1)), [0.0, 0.0], 5),
    ],
)
def test_checkers_refuse_wrong_answers(check, wrong, right, bar):
    with pytest.raises(AssertionError):
        check(np.asarray(wrong), np.asarray(right), bar)


def test_checkers_take_right_answers():
    for check in (assert_near, assert_rows_near, assert_relative):
        check(np.full((2, 2), 1.0 + 1e-9), torch.ones(2, 2), 1e-8)
    assert_mean(np.random.default_rng(0).normal(0, 1, (10000, 2)), np.zeros(2))


def test_the_message_checker_refuses_a_missing_word():
    with pytest.raises(ValueError, match="spam") as caught:
        raise ValueError("spam and eggs")
    assert_says(caught, "spam", "eggs")
    with pytest.raises(AssertionError):
        assert_says(caught, "spam", "ham")
