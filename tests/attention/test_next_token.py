"""A call of `decode` like the last one skips its checks: same bits, only where nothing changed."""

import copy
import pickle

import pytest
import torch

import fenchel as fl
from fenchel._attention.step import DecodingStep
from tests.attention.decoding import HALF, P, draw, filled, operands, reference
from tests.attention.interrupts import interrupted, traces

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture
def repeated(monkeypatch):
    """Whether each call since the last look was a repetition."""
    seen, repeat = [], DecodingStep.repeat

    def watched(step, *arguments):
        output = repeat(step, *arguments)
        seen.append(output is not None)
        return output

    monkeypatch.setattr(DecodingStep, "repeat", watched)
    return seen


def token(key, i):
    """A copy in a memory layout of its own, as models have it: heads after tokens."""
    return key[:, :, i : i + 1].transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d_value", [32, 16])
@pytest.mark.parametrize("regularizer", [HALF, fl.Tsallis(1.3, 0.7), fl.Shannon()], ids=str)
def test_token_by_token(repeated, dtype, d_value, regularizer):
    _, key, value = operands(523, batch=2, dtype=dtype, d_value=d_value)
    cache = filled(key[:, :, :505], value[:, :, :505])  # the next page begins on the way
    for i in range(505, 523):
        cache.append(token(key, i), token(value, i))
        query = draw(i, 2, 4, 32, 1, dtype=dtype).transpose(2, 3)
        seen = key[:, :, : i + 1], value[:, :, : i + 1]
        found = fl.decode(query, cache, regularizer)
        assert torch.equal(found, reference(query, *seen, regularizer))
        assert cache.read.scored.eq(i + 1).all()  # short rows are scored whole
    assert repeated.count(False) <= 3  # new pages, new counts
    assert repeated.count(True) >= 12


def test_an_old_reading_stays():
    query, key, value = operands(900)
    cache = filled(key[:, :, :898], value[:, :, :898])
    for i in (898, 899):
        cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        fl.decode(query, cache, HALF)
    before = cache.read
    scored = before.scored.clone()
    cache.crop(100)
    fl.decode(query, cache, HALF)
    assert torch.equal(before.scored, scored)
    assert cache.read.scored.eq(100).all()


CHANGES = {
    "crop": lambda cache: cache.crop(300),
    "reorder": lambda cache: cache.reorder([1, 0]),
    "same again": lambda cache: cache.reorder([1, 1]),
    "keep": lambda cache: cache.keep([torch.arange(600) % 2 == 0] * 2),
    "many tokens": lambda cache: cache.append(draw(7, 2, 2, 700, 32), draw(8, 2, 2, 700, 16)),
    "ragged": lambda cache: cache.append(draw(7, 2, 2, 1, 32), draw(8, 2, 2, 1, 16), [1, 0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_cache_is_read_as_it_is(change):
    query, key, value = operands(600, batch=2)
    cache = filled(key, value)
    fl.decode(query, cache, HALF)
    fl.decode(query, cache, HALF)
    CHANGES[change](cache)
    found = fl.decode(query, cache, HALF)
    for b in range(2):
        alone = cache.select([b])
        assert torch.equal(found[b : b + 1], reference(query[b : b + 1], alone.key, alone.value))


def test_another_question_is_asked_anew(repeated):
    query, key, value = operands(600)
    cache = filled(key, value)
    for options in ({"scale": 0.3}, {}, {"softcap": 2.0}, {"base": P.SlidingWindow(50)}, {}):
        found = fl.decode(query, cache, HALF, **options)
        assert torch.equal(found, reference(query, key, value, **options))
    for regularizer in (fl.Tsallis(2.0), fl.Shannon(), fl.Budget(3.0)):
        found = fl.decode(query, cache, regularizer)
        assert torch.equal(found, reference(query, key, value, regularizer))
    few = query[:, :2]
    assert torch.equal(fl.decode(few, cache, HALF), reference(few, key, value))
    assert not any(repeated)
    with fl.use("torch"):
        close = fl.decode(query, cache, HALF)
    torch.testing.assert_close(close, reference(query, key, value))
    proof = fl.decode(query, cache, HALF, proof=True)
    proof.check(key)
    assert torch.equal(proof.output, reference(query, key, value))


def test_wrong_calls_are_refused_as_the_first_was():
    query, key, value = operands(600)
    cache = filled(key, value)
    fl.decode(query, cache, HALF)
    fl.decode(query, cache, HALF)
    with pytest.raises(ValueError, match="gradient"):
        fl.decode(query.clone().requires_grad_(), cache, HALF)
    for wrong in (query[..., :16], query.double(), query[:, :3], query.expand(2, -1, -1, -1)):
        with pytest.raises((TypeError, ValueError)):
            fl.decode(wrong, cache, HALF)
    negative = torch._neg_view(query)
    assert torch.equal(fl.decode(negative, cache, HALF), reference(-query, key, value))
    with pytest.raises((TypeError, ValueError)):
        cache.append(key[:, :, :1].double(), value[:, :, :1].double())
    with pytest.raises(ValueError, match="gradient"):
        cache.append(key[:, :, :1].clone().requires_grad_(), value[:, :, :1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_have_no_last_call(duplicate):
    query, key, value = operands(600)
    cache = filled(key[:, :, :598], value[:, :, :598])
    cache.append(key[:, :, 598:599], value[:, :, 598:599])
    fl.decode(query, cache, HALF)
    other = duplicate(cache)
    other.append(key[:, :, 599:], value[:, :, 599:])
    assert torch.equal(fl.decode(query, other, HALF), reference(query, key, value))
    first = key[:, :, :599], value[:, :, :599]
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, *first))


def test_capacity_and_shared_pages_are_respected():
    _, key, value = operands(3)
    cache = fl.KeyValueCache(1, 2, 32, 16, capacity=2)
    for i in range(2):
        cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
    with pytest.raises(ValueError, match="capacity"):
        cache.append(key[:, :, 2:], value[:, :, 2:])
    fork = cache.select([0])
    fork.crop(1)
    fork.append(key[:, :, 2:], value[:, :, 2:])
    assert torch.equal(cache.key, key[:, :, :2])
    assert torch.equal(fork.key, key[:, :, [0, 2]])


@traces
def test_an_interrupted_token_is_there_or_not():
    query, key, value = operands(40)
    step, done = 0, False
    while not done:
        step += 1
        cache = filled(key[:, :, :38], value[:, :, :38], step=19)
        cache.append(key[:, :, 38:39], value[:, :, 38:39])
        done = interrupted(step, lambda c=cache: c.append(key[:, :, 39:], value[:, :, 39:]))
        there = len(cache)
        assert there in (39, 40)
        seen = key[:, :, :there], value[:, :, :there]
        assert torch.equal(fl.decode(query, cache, HALF), reference(query, *seen))
    assert there == 40
