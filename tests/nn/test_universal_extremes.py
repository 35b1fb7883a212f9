"""Fixed points near the ends of precision: what is proved stays proved with rounding in it."""

import pytest
import torch

from fenchel._solution import Status
from fenchel.nn.lipschitz import DotForm, LipschitzAttention, LipschitzFeedForward
from fenchel.nn.universal import Iteration, UniversalTransformer


def averaging(constant, width=8, **solver):
    """T(X) = constant X for one token, in a ball that nothing leaves."""
    attention = LipschitzAttention(width, 1, constant, form=DotForm(1e6), bias=False)
    forward = LipschitzFeedForward(width, width, 1.0, activation=torch.nn.Identity())
    eye = torch.eye(width)
    with torch.no_grad():
        for matrix in (attention.heads.query, attention.heads.key):
            matrix.zero_()
        for matrix in (attention.heads.value, attention.output, forward.inner, forward.outer):
            matrix.copy_(eye)
    return UniversalTransformer(attention, forward, solver=Iteration(**solver))


def true_slope(layer):
    with torch.no_grad():
        one = layer.attention._scale([1], torch.float32)[0].item()
        return one * layer.feedforward._scale(torch.float32)[0].item()


def test_two_fixed_points_are_not_called_one():
    """Weights whose factors cancel, so that their product in float32 was zero."""
    value = torch.tensor(
        [[7238.9931640625, 3486.82470703125], [7238.9931640625, 3486.825927734375]]
    )
    output = torch.tensor(
        [[-287.4492492675781, 287.4492492675781], [-1341.7562255859375, 1341.7562255859375]]
    )
    attention = LipschitzAttention(2, 1, 8.0, form=DotForm(1e3), bias=False)
    zero = torch.zeros(2, 2)
    attention.load_state_dict(
        {"output": output, "heads.query": zero, "heads.key": zero, "heads.value": value}
    )
    forward = LipschitzFeedForward(2, 2, 1.0)
    with torch.no_grad():
        forward.inner.copy_(torch.eye(2))
        forward.outer.copy_(torch.eye(2))
    layer = UniversalTransformer(attention, forward)
    start = torch.tensor([[[1.17689049243927, -0.6706920266151428]]])
    with torch.no_grad():
        there, back = (layer.solve(torch.zeros(1, 1, 2), start=s) for s in (start, -start))
    assert (there.points - back.points).norm() > 0.1
    assert not there.unique
    assert layer.constant(1) >= 1
    assert there.error.isinf().all()


@pytest.mark.parametrize(
    "constant",
    [0.9, 0.99, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.999, 0.9999))],
)
def test_the_error_includes_rounding(constant):
    layer = averaging(constant, tolerance=1e-30, max_steps=200_000)
    with torch.no_grad():
        solution = layer.solve(torch.ones(1, 1, 8))
    true = 1 / (1 - true_slope(layer))
    away = float((solution.points.double() - true).norm())
    assert 0 < away <= float(solution.error)
    assert float(solution.error) < 0.05 * true * 8**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_error_includes_the_cast(dtype):
    layer = averaging(0.9).to(dtype)
    u = torch.full((1, 1, 8), 1.37).to(dtype)
    with torch.no_grad():
        solution = layer.solve(u)
    away = float((solution.points.double() - u.double() / (1 - true_slope(layer))).norm())
    assert away > 1e-3
    assert away <= float(solution.error)
    assert solution.status.tolist() == [Status.OK.value]


def test_points_too_large_for_their_dtype_are_not_ok():
    layer = averaging(0.9).half()
    u = torch.full((2, 1, 8), 2e4).half()
    u[1] = 1.0
    solution = layer.solve(u)
    assert solution.status.tolist() == [Status.NONFINITE.value, Status.OK.value]
    assert solution.points[0].isnan().all()
    assert solution.points[1].isfinite().all()
    assert solution.error.isinf().tolist() == [True, False]
