"""Native attention where it is easily wrong: odd bases, NaN, keys that just leave, steep rows."""

import math

import pytest
import torch

import fenchel as fl
from fenchel import priors
from fenchel._kernels import attention_call as kernels
from tests.kernels.native.cases import native, needs_library

pytestmark = needs_library


def _both(compute):
    actual = compute()
    with native(False):
        return actual, compute()


def _normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_base_of_whole_numbers(dtype):
    q, k, v = (_normal(1, 2, 5, 16, dtype=torch.float32, seed=s) for s in range(3))
    base = torch.arange(1, 26).reshape(5, 5).to(dtype)
    actual, expected = _both(lambda: fl.attention(q, k, v, fl.Tsallis(1.5), base=base))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_a_temperature_of_each_row(dtype):
    x = _normal(1, 2, 5, 16).to(dtype)
    actual, expected = _both(
        lambda: fl.attention(x, x, x, fl.Tsallis(1.5, torch.full((2, 5), 0.5)))
    )
    assert actual.dtype == expected.dtype == dtype


def test_nan_in_a_mask_with_a_temperature_of_each_row():
    x, mask = _normal(1, 2, 5, 16), torch.zeros(5, 5, dtype=torch.float64)
    mask[1, 2] = math.nan
    temperature = torch.full((2, 5), 0.5, dtype=torch.float64)
    output = fl.attention(x, x, x, fl.Tsallis(1.5, temperature), attn_mask=mask)
    assert output[:, :, 1].isnan().all()


@pytest.mark.parametrize("alpha", [1.9, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_sum_to_one_where_a_key_just_leaves(dtype, alpha):
    """Keys that a first, small step of Newton's method drops from the support."""
    unit, worst = torch.finfo(dtype).eps, 0.0
    for factor in (0.3, 0.5, 0.9, 2.0, 5.0):
        step = 0.25 * unit**0.5 * factor
        scores = torch.full((64,), -100.0, dtype=dtype)
        scores[0], scores[32], scores[1] = 0.0, step - 1, 0.05 * step - 1
        key, one = (scores / (alpha - 1)).reshape(1, 1, 64, 1), torch.ones(1, 1, 1, 1, dtype=dtype)
        weights = fl.attention(
            *(one, key, torch.eye(64, dtype=dtype)[None, None], fl.Tsallis(alpha)),
            scale=1.0,
            base=torch.ones(64, dtype=dtype),
        )
        worst = max(worst, abs(float(weights.double().sum()) - 1))
    assert worst <= 8 * unit


def test_derivative_in_alpha_of_a_steep_row_with_a_large_base():
    """One key has all the weight, whatever alpha: its derivative is zero."""
    q, k, v = (_normal(1, 1, 200, 16, seed=s) for s in range(3))
    base = 1e12 * (0.1 + _normal(200, seed=4).abs())
    alpha = torch.tensor(3.7, dtype=torch.float64, requires_grad=True)
    output = fl.attention(q, k, v, fl.Tsallis(alpha), base=base)
    (gradient,) = torch.autograd.grad(output, alpha, _normal(1, 1, 200, 16, seed=5))
    assert abs(float(gradient)) < 1e-6


def test_float32_weights_under_a_large_base():
    key = torch.zeros(1, 1, 3, 1)
    one = torch.ones(1, 1, 1, 1)
    base = torch.tensor([8e11, 0.0, 1e3])
    weights = fl.attention(one, key, torch.eye(3)[None, None], fl.Tsallis(1.25), base=base)
    assert abs(float(weights.sum()) - 1) < 2e-6


def test_a_distant_key_of_large_score():
    """Its log mass of -120 is less than its score of 130 makes up for."""
    key = torch.zeros(1, 1, 400, 1)
    key[..., -1, :] = 130.0
    value = torch.arange(400.0).reshape(1, 1, 400, 1)
    base = priors.ALiBi(1, torch.tensor([0.3]))
    actual, expected = _both(
        lambda: fl.attention(
            torch.ones(1, 1, 1, 1), key, value, fl.Tsallis(1.0001), base=base, scale=1.0
        )
    )
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("keys", [5, 64, 600])
def test_nan_in_a_hidden_value(keys):
    q, k, v = (_normal(1, 1, keys, 16, seed=s) for s in range(3))
    v[..., 3, :], mask = math.nan, torch.arange(keys) != 3
    actual, expected = _both(lambda: fl.attention(q, 0.1 * k, v, fl.Tsallis(1.1), attn_mask=mask))
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("spoilt", ["key", "value"])
def test_gradients_beside_hidden_nan_in_an_overflowing_block(monkeypatch, spoilt):
    monkeypatch.setattr(kernels, "ROOM", 1)
    leaves = {name: _normal(1, 1, 60, 16, seed=s) for s, name in enumerate(("q", "key", "value"))}
    leaves[spoilt][..., 59, :] = math.nan  # the last: forward never reads padding
    for leaf in leaves.values():
        leaf.requires_grad_()
    output = fl.attention(*leaves.values(), fl.Tsallis(1.1), attn_mask=torch.arange(60) != 59)
    assert output.isfinite().all()
    for gradient in torch.autograd.grad(output.sum(), list(leaves.values())):
        assert gradient[..., :59, :].isfinite().all()
