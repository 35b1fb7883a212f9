"""Scores: each formula against its definition, number by number."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import fenchel as fl

DOUBLE = torch.float64


def draw(seed, *shape):
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


Q, K = draw(0, 2, 3, 5), draw(1, 2, 4, 5)
FORM, DIRECTION = draw(2, 5, 5), draw(3, 5)

MAPS = {
    "scaled dot": (fl.scores.scaled_dot, lambda q, k: (q @ k) / math.sqrt(5)),
    "scaled dot 2": (lambda q, k: fl.scores.scaled_dot(q, k, 2.0), lambda q, k: 2 * (q @ k)),
    "scaled dot 0": (lambda q, k: fl.scores.scaled_dot(q, k, 0.0), lambda q, k: 0 * (q @ k)),
    "bilinear": (lambda q, k: fl.scores.bilinear(q, k, FORM), lambda q, k: q @ FORM @ k),
    "additive": (
        lambda q, k: fl.scores.additive(q, k, DIRECTION),
        lambda q, k: DIRECTION @ torch.tanh(q + k),
    ),
    "distance": (
        fl.scores.negative_squared_distance,
        lambda q, k: -0.5 * ((q - k) ** 2).sum(),
    ),
    "distance 3": (
        lambda q, k: fl.scores.negative_squared_distance(q, k, 3.0),
        lambda q, k: -3 * ((q - k) ** 2).sum(),
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_every_score_is_its_definition(name):
    score, definition = MAPS[name]
    actual = score(Q, K)
    assert actual.shape == (2, 3, 4)
    for batch in range(2):
        for i in range(3):
            for j in range(4):
                expected = definition(Q[batch, i], K[batch, j])
                assert abs(actual[batch, i, j] - expected) <= 1e-13


def test_definitions_differ():
    """The comparison above tells the maps apart."""
    values = [definition(Q[0, 0], K[0, 0]).item() for _, definition in MAPS.values()]
    assert len({round(value, 9) for value in values}) == len(values)


@pytest.mark.parametrize("name", MAPS)
def test_derivatives(name):
    score, _ = MAPS[name]
    assert gradcheck(score, (Q.clone().requires_grad_(), K.clone().requires_grad_()))


def test_derivatives_in_form_and_direction():
    assert gradcheck(lambda form: fl.scores.bilinear(Q, K, form), (FORM.clone().requires_grad_(),))
    assert gradcheck(
        lambda direction: fl.scores.additive(Q, K, direction),
        (DIRECTION.clone().requires_grad_(),),
    )


def test_other_shapes():
    assert fl.scores.bilinear(draw(0, 3, 5), draw(1, 4, 2), draw(2, 5, 2)).shape == (3, 4)
    assert fl.scores.scaled_dot(draw(0, 3, 5), draw(1, 7, 4, 5)).shape == (7, 3, 4)
    heads = fl.scores.bilinear(draw(0, 1, 3, 5), draw(1, 1, 4, 5), draw(2, 6, 5, 5))
    assert heads.shape == (6, 3, 4)
    assert fl.scores.scaled_dot(draw(0, 3, 0), draw(1, 4, 0)).tolist() == [[0.0] * 4] * 3
    assert fl.scores.scaled_dot(draw(0, 0, 5), draw(1, 4, 5)).shape == (0, 4)


def test_a_distance_is_never_positive():
    points = 100 + draw(0, 50, 3).float()
    scores = fl.scores.negative_squared_distance(points, points)
    assert (scores <= 0).all()
    assert scores.diagonal().abs().max() <= 1e-2


def test_softmax_of_distances_is_the_gaussian_kernel_estimate():
    points, values = draw(1, 6, 2), draw(2, 6, 1)
    queries = draw(3, 4, 2)
    weights = fl.softmax(fl.scores.negative_squared_distance(queries, points, 0.5 / 0.3**2))
    kernel = torch.exp(-(torch.cdist(queries, points) ** 2) / (2 * 0.3**2))
    expected = (kernel @ values) / kernel.sum(-1, keepdim=True)
    assert (weights @ values - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("scale", [None, 0.7, -0.2])
def test_attention_is_the_map_of_scaled_dot(scale):
    value = draw(4, 2, 4, 3)
    for regularizer in (fl.Shannon(), fl.Tsallis(1.5)):
        weights = fl.solve(fl.scores.scaled_dot(Q, K, scale), regularizer).weights
        output = fl.attention(Q, K, value, regularizer, scale=scale)
        assert (weights @ value - output).abs().max() <= 1e-13


def test_second_derivatives_where_points_meet():
    """-|x|^2 / 2 has the Hessian -1, also where rounding puts the score above zero."""
    points = torch.randn(40, 16, dtype=torch.float64)

    def score(x):
        return fl.scores.negative_squared_distance(x, points).diagonal()

    for row in range(len(points)):
        hessian = torch.func.hessian(lambda x, row=row: score(points.index_copy(
            0, torch.tensor([row]), x.unsqueeze(0)))[row])(points[row])  # fmt: skip
        torch.testing.assert_close(hessian, -torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-12)
