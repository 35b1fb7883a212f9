"""What the sweep over models compares with sees attentions, and weighs keys as it is told."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
from benchmarks.models_reference import Watch, entmax15, in_double, softmax
from tests import needs

needs.package("entmax", "what the sweep over models compares with")


def scores(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def eager_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1) @ value


class QuietSoftmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class OddAttention(nn.Module):
    """Its softmax is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.normalise = QuietSoftmax()

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x @ x.mT) @ x


class Router(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


@pytest.mark.parametrize("weights", [False, True])
def test_torchs_layer_is_seen(weights: bool) -> None:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).double().eval(), scores(2, 5, 8)
    plain = layer(x, x, x, need_weights=weights)[0]
    with Watch(softmax) as watch:
        same = layer(x, x, x, need_weights=weights)[0]
    assert watch.seen == 1
    torch.testing.assert_close(same, plain)
    with Watch(entmax15, everywhere=True) as watch:
        sparse = layer(x, x, x, need_weights=weights)[0]
    assert watch.seen == 1
    fl.nn.convert(layer, fl.Tsallis(1.5))
    torch.testing.assert_close(sparse, layer(x, x, x, need_weights=weights)[0])


def test_attention_is_told_from_other_softmaxes() -> None:
    x = scores(2, 5, 8)
    with Watch() as watch:
        eager_attention(x, x, x)
        OddAttention()(x)
    assert watch.seen == 2
    with Watch() as watch:
        Router()(x)
        torch.log_softmax(x, -1)
    assert watch.seen == 0


class ColumnAttention(nn.Module):
    """Keys along another axis than the last, as in ConvBERT's kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=1)


def test_keys_may_be_along_any_axis() -> None:
    x = scores(2, 5, 8)
    with Watch(entmax15) as watch:
        weights = ColumnAttention()(x)
    assert watch.seen == 1
    torch.testing.assert_close(weights, fl.entmax(x, dim=1))


def test_fenchels_own_calls_are_told_apart() -> None:
    x = scores(1, 2, 5, 8)
    with Watch() as watch:
        fl.attention(x, x, x, fl.Shannon())
        fl.attention(x, x, x, fl.Tsallis(1.5))
    assert watch.seen == 0
    assert watch.ours > 0


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "grouped"])
def test_attention_written_out_is_torchs(kind: str) -> None:
    heads = 2 if kind == "grouped" else 4
    query, key, value = scores(3, 4, 5, 8), scores(3, heads, 5, 8), scores(3, heads, 5, 8) + 1
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": scores(5, 5) > -1},
        "float": {"attn_mask": scores(5, 5), "scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[kind]
    expected = sdpa(query, key, value, **options)  # type: ignore[arg-type]
    with Watch(softmax, everywhere=True) as watch:
        written_out = sdpa(query, key, value, **options)  # type: ignore[arg-type]
    assert watch.seen == 1
    torch.testing.assert_close(written_out, expected)
    with Watch(entmax15, everywhere=True):
        sparse = sdpa(query, key, value, **options)  # type: ignore[arg-type]
    assert float((sparse - expected).abs().max()) > 1e-3
    ours = fl.attention(query, key, value, fl.Tsallis(1.5), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(sparse, ours)


@pytest.mark.parametrize("forbidden", [-math.inf, torch.finfo(torch.float64).min])
def test_rows_without_a_key_are_zero(forbidden: float) -> None:
    x = scores(3, 6)
    x[0] = forbidden
    x[1, 2:] = forbidden
    for weigh in (softmax, entmax15):
        weights = weigh(x)
        assert weights[0].eq(0).all()
        assert weights[1, 2:].eq(0).all()
        torch.testing.assert_close(weights[1:].sum(-1), torch.ones(2, dtype=torch.float64))
    query, mask = scores(1, 1, 3, 8), torch.zeros(3, 3, dtype=torch.float64)
    mask[0] = forbidden
    with Watch(softmax):
        output = sdpa(query, query, query, mask)
    assert output[0, 0, 0].eq(0).all()
    torch.testing.assert_close(output[0, 0, 1:], sdpa(query, query, query)[0, 0, 1:])


def test_single_precision_comes_back() -> None:
    with in_double():
        assert torch.ones(1).dtype == torch.float64
    assert torch.ones(1).dtype == torch.float32
