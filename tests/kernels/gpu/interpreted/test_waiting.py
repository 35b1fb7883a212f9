"""Forward and backward, the host waits for nothing that is computed on the device."""

import pytest
import torch

import fenchel as fl
from fenchel import priors
from tests import needs

needs.package("triton", covers="that the fast path on a GPU reads no value")

from tests.kernels.gpu import interpreter  # noqa: E402 - triton is there
from tests.waiting import forbidden  # noqa: E402

MAPS = {
    "entmax": lambda x: fl.entmax(x, 1.5),
    "entmax of another alpha": lambda x: fl.entmax(x, 1.2),
    "entmax along an axis": lambda x: fl.entmax(x, 1.5, dim=0),
    "sparsemax": fl.sparsemax,
    "softmax": fl.softmax,
    "solve": lambda x: fl.solve(x, fl.Tsallis(1.7)).weights,
    "Budget": lambda x: fl.solve(x, fl.Budget(2.5)).weights,
    "Norm": lambda x: fl.solve(x, fl.Norm(2.0)).weights,
    "a mask": lambda x: fl.solve(x, fl.Tsallis(1.5), base=x.detach() > -1).weights,
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MAPS)
def test_maps(name):
    scores, direction = normal(4, 20).requires_grad_(), normal(4, 20, seed=1)
    with fl.use("gpu"), interpreter.watch() as launches:
        with forbidden():
            weights = MAPS[name](scores)
            (slope,) = torch.autograd.grad(weights, scores, direction)
        assert len(launches) == (0 if name == "softmax" else 2)
    exact_scores = scores.detach().double().requires_grad_()
    exact = MAPS[name](exact_scores)
    (exact_slope,) = torch.autograd.grad(exact, exact_scores, direction.double())
    assert (weights - exact).abs().max() <= 1e-6
    assert (slope - exact_slope).abs().max() <= 1e-5


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": normal(40, 48, seed=3) > 0},
    "bias": {"attn_mask": normal(4, 40, 48, seed=3)},
    "window": {"attn_mask": priors.SlidingWindow(8)},
    "dropout": {"dropout_p": 0.2},
    "grouped heads": {"enable_gqa": True},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("mask", "dropout") else pytest.mark.slow) for n in CALLS],
)
@pytest.mark.parametrize("alpha", [1.5, pytest.param(1.3, marks=pytest.mark.slow)])
def test_attention(name, alpha):
    heads = 2 if name == "grouped heads" else 4
    shapes = ((1, 4, 40, 16), (1, heads, 48, 16), (1, heads, 48, 16))
    operands = [normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    with fl.use("gpu"), interpreter.watch() as launches, forbidden():
        output = fl.attention(*operands, fl.Tsallis(alpha), **CALLS[name])
        gradients = torch.autograd.grad(output, operands, torch.ones_like(output))
    kernels = {launch.kernel for launch in launches}
    assert {"bound", "attend", "rows", "columns"} <= kernels
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_modules():
    layer = fl.nn.MultiheadAttention(16, 2, batch_first=True, regularizer=fl.Tsallis(1.5))
    x = normal(2, 20, 16).requires_grad_()
    with fl.use("gpu"), interpreter.watch() as launches, forbidden():
        output, _ = layer(x, x, x, need_weights=False)
        output.sum().backward()
    assert "attend" in {launch.kernel for launch in launches}
    assert x.grad.isfinite().all()
