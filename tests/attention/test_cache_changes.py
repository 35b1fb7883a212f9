"""A cache stays what it says it is: uneven growth, copies, interrupts, and threads of one pool."""

import pickle
import sys
import threading

import pytest
import torch

import fenchel as fl
from fenchel._kernels.pages import PagePool
from tests.attention.decoding import HALF, P, draw, filled, operands, reference
from tests.attention.interrupts import interrupted, traces


def tokens_of(cache):
    return [cache.select([b]).key[0].clone() for b in range(cache.batch)]


def test_a_short_sequence_grows_beside_a_long_one():
    key = draw(0, 2, 1, 5120, 4)
    cache = fl.KeyValueCache(2, 1, 4)
    cache.append(key[:, :, :512], key[:, :, :512], [0, 512])
    cache.append(key, key, [5120, 0])
    cache.append(key[:, :, 512:513], key[:, :, 512:513], [0, 1])
    long, short = tokens_of(cache)
    assert torch.equal(long, key[0])
    assert torch.equal(short, key[1, :, :513])


def test_a_pickled_cache_can_be_appended_to():
    query, key, value = operands(400)  # no new page, which would be new memory too
    cache = pickle.loads(pickle.dumps(filled(key[:, :, :300], value[:, :, :300])))
    cache.append(key[:, :, 300:], value[:, :, 300:])
    assert torch.equal(cache.key, key)
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))


def test_a_copy_holds_no_pages_of_caches_that_were_not_copied():
    _, key, value = operands(600)
    cache = filled(key, value)
    fork = cache.select([0])
    fork.crop(100)
    other = pickle.loads(pickle.dumps(fork))
    assert sum(other.pool._users) == 1
    assert fork.lengths == other.lengths


@pytest.mark.parametrize("lengths", [None, [600, 1]])
def test_memory_that_runs_out_changes_nothing(monkeypatch, lengths):
    key = draw(0, 2, 1, 1200, 4)
    cache = fl.KeyValueCache(2, 1, 4)
    cache.append(key[:, :, :512], key[:, :, :512])
    fork = cache.select([0, 1])  # so that pages are taken one by one
    allocate, left = PagePool._allocate, [1]

    def allocate_once(pool, pages):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return allocate(pool, pages)

    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "_allocate", allocate_once)
        with pytest.raises(MemoryError):
            cache.append(key[:, :, 512:], key[:, :, 512:], lengths)
    assert cache.lengths == (512, 512)
    for b, found in enumerate(tokens_of(cache)):
        assert torch.equal(found[:, :512], key[b, :, :512])
    query = draw(5, 2, 1, 1, 4)
    for b in range(2):
        one = cache.select([b])
        expected = fl.attention(query[b : b + 1], one.key, one.key, HALF)
        assert torch.equal(fl.decode(query, cache, HALF)[b : b + 1], expected)
    cache.append(key[:, :, :3], key[:, :, :3], [3, 0])
    assert cache.lengths == (515, 512)
    assert torch.equal(fork.key, key[:, :, :512])
    first, second = tokens_of(cache)
    assert torch.equal(first, torch.cat([key[0, :, :512], key[0, :, :3]], 1))
    assert torch.equal(second, key[1, :, :512])


@traces
def test_an_interrupted_append_is_whole_or_nothing():
    key = draw(0, 2, 1, 1200, 4)
    query = draw(1, 2, 1, 1, 4)
    for step in range(1, 10_000, 29):
        cache = fl.KeyValueCache(2, 1, 4)
        cache.append(key[:, :, :100], key[:, :, :100])
        cache.reorder([0, 0])  # a page to copy before it is written to
        done = interrupted(step, lambda cache=cache: cache.append(key[:, :, 100:], key[:, :, 100:]))
        first, second = tokens_of(cache)
        assert first.shape == second.shape
        assert first.shape[1] in (100, 1200)
        assert torch.equal(first, key[0, :, : first.shape[1]])
        assert torch.equal(second[:, :100], key[0, :, :100])
        assert torch.equal(fl.decode(query, cache, HALF), reference(query, cache.key, cache.key))
        cache.append(key[:, :, :9], key[:, :, :9])
        assert torch.equal(cache.key[:, :, -9:], key[:, :, :9])
        assert torch.equal(cache.key[1, :, :100], key[0, :, :100])
        if done:
            return
    raise AssertionError("the append did not end")


def test_caches_of_one_pool_in_several_threads():
    start = draw(0, 1, 1, 300, 4)
    cache = filled(start, start)
    problems = []

    def grow(fork, number):
        tokens = draw(number, 1, 1, 4000, 4)
        for first in range(0, 4000, 40):
            part = tokens[:, :, first : first + 40]
            fork.append(part, part)
            again = fork.select([0])
            again.append(part, part)
        if not torch.equal(fork.key, torch.cat([start, tokens], 2)):
            problems.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        forks = [cache.select([0]) for _ in range(4)]
        threads = [threading.Thread(target=grow, args=(f, i)) for i, f in enumerate(forks, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems
    assert torch.equal(cache.key, start)


@pytest.mark.parametrize("change", ["crop", "reorder"])
def test_an_error_is_certified_for_the_values_there_are(change):
    key, value = draw(0, 2, 1, 600, 8) * 3, draw(1, 2, 1, 600, 8)
    value[1] *= 1e6
    query = draw(2, 2, 1, 1, 8)
    cache = filled(key, value)
    fl.decode(query, cache, fl.Shannon(), error=0.1)
    if change == "crop":
        cache.crop(0)
        cache.append(key.flip(0), value.flip(0))
    else:
        cache.reorder([1, 0])
    found = fl.decode(query, cache, fl.Shannon(), error=0.1)
    certified = cache.read.error
    fresh = filled(key.flip(0), value.flip(0))
    assert torch.equal(found, fl.decode(query, fresh, fl.Shannon(), error=0.1))
    assert torch.equal(certified, fresh.read.error)


@pytest.mark.parametrize("queries", [1, 17])
@pytest.mark.parametrize("base", [None, P.ALiBi(4), P.Sink(torch.tensor([0.5, -1.0, 2.0, 0.0]))])
def test_proofs_of_many_queries_and_of_masses_that_vanish(queries, base):
    query, key, value = operands(2100, queries=queries, spread=4.0)
    cache = filled(key, value)
    proof = fl.decode(query, cache, HALF, base=base, proof=True)
    proof.check(key)
    assert torch.equal(proof.output, reference(query, key, value, base=base))


@pytest.mark.parametrize("place", ["query", "key"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_proofs_of_rows_that_hold_no_number(place, number):
    query, key, value = operands(2100, spread=2.0)
    {"query": query, "key": key}[place][0, 0, 0, 0] = number
    fl.decode(query, filled(key, value), HALF, proof=True).check(key)


def test_a_key_that_is_no_number_counts_under_softcap_and_a_bias():
    query, key, value = operands(1500, heads=1, kv_heads=1, spread=3.0)
    key[0, 0, 3] = torch.nan
    options = {"attn_mask": P.ALiBi(1), "softcap": 3.0}
    found = fl.decode(query, filled(key, value), HALF, **options)
    assert found.isnan().all()
    assert reference(query, key, value, **options).isnan().all()
