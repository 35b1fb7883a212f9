"""Softmax from a cache, exact or within an error that is certified."""

import pytest
import torch

import fenchel as fl
from tests.attention.decoding import filled, operands, reference
from tests.attention.test_decode import shadows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("error", [1e-3, 0.03, 1.0])
@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
def test_the_error_is_kept_and_certified(spread, error, dtype):
    query, key, value = operands(3000, batch=2, spread=spread, dtype=dtype)
    cache = filled(key, value)
    found = fl.decode(query, cache, fl.Shannon(), error=error)
    exact = reference(query.double(), key.double(), value.double(), fl.Shannon())
    away = (found.double() - exact).norm(dim=-1)
    # Weights are rounded with the scores, which are at most as large as the product of the norms.
    largest = query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max() / 32**0.5
    longest = value.double().norm(dim=-1).max()
    rounding = (1e-7 * (1 + largest) + torch.finfo(dtype).eps) * longest
    assert cache.read.error.max() <= error
    assert bool((away <= cache.read.error + rounding).all())


@shadows
def test_keys_are_skipped_where_scores_are_far_apart():
    query, key, value = operands(3000, spread=8.0)
    cache = filled(key, value)
    fl.decode(query, cache, fl.Shannon(), error=1e-3)
    assert cache.read.scored.double().mean() < 300
    assert cache.read.bytes < 0.4 * cache.read.bytes_of_all
    assert cache.read.error.max() > 0


def test_sequences_of_different_lengths():
    query, key, value = operands(900, batch=2, spread=3.0)
    cache = fl.KeyValueCache(2, 2, 32, 16)
    cache.append(key, value, tokens=[900, 40])
    found = fl.decode(query, cache, fl.Shannon(), error=1e-2)
    for b, length in enumerate((900, 40)):
        one = query[b : b + 1], key[b : b + 1, :, :length], value[b : b + 1, :, :length]
        away = (found[b : b + 1] - reference(*one, fl.Shannon())).norm(dim=-1)
        assert away.max() <= 1e-2


def test_the_diameter_follows_new_values():
    query, key, value = operands(100)
    cache = filled(key, value)
    fl.decode(query, cache, fl.Shannon(), error=0.1)
    cache.append(key, 1e3 * value)
    fl.decode(query, cache, fl.Shannon(), error=0.1)
    assert cache.read.error.max() <= 0.1
    exact = reference(query, cache.key, cache.value, fl.Shannon())
    assert (fl.decode(query, cache, fl.Shannon(), error=0.1) - exact).norm(dim=-1).max() <= 0.1


def test_what_is_refused():
    query, key, value = operands(50, queries=2)
    cache = filled(key, value)
    one = query[:, :, :1]
    for wrong in (
        {"regularizer": fl.Tsallis(1.5)},
        {"error": -1.0},
        {"error": float("nan")},
        {"query": query},
        {"softcap": 3.0},
        {"proof": True},
    ):
        options = {"query": one, "cache": cache, "regularizer": fl.Shannon(), "error": 0.1} | wrong
        with pytest.raises(ValueError, match="error"):
            fl.decode(**options)
