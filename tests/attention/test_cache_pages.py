"""Pages of a pool have the users that they say: after any changes, interrupts and failures."""

import copy
import gc
import random
import weakref
from collections import Counter
from itertools import chain

import pytest
import torch

import fenchel as fl
from fenchel._kernels.pages import PagePool
from tests.attention.decoding import draw, filled
from tests.attention.interrupts import interrupted, traces


class Model:
    """Caches of one pool, and what they ought to hold."""

    def __init__(self, rng):
        self.rng, self.number = rng, 0
        cache = fl.KeyValueCache(rng.choice((1, 2, 3)), 1, 2, capacity=rng.choice((None, 4000)))
        self.pairs = [(cache, [torch.zeros(1, 0, 2)] * cache.batch)]

    def change(self):
        """One of them, in some way."""
        place = self.rng.randrange(len(self.pairs))
        cache, tokens = self.pairs[place]
        ways = (self.append, self.crop, self.reorder, self.select, self.keep, self.drop, self.copy)
        now = self.rng.choice((self.append, *ways))(cache, tokens)
        if now is None:
            self.pairs.pop(place)
        else:
            self.pairs[place] = now

    def append(self, cache, tokens):
        counts = [self.rng.choice((0, 1, 300, 512, 700)) for _ in tokens]
        if cache.capacity and max(map(sum, zip(counts, cache.lengths, strict=True))) > 4000:
            return cache, tokens
        self.number += 1
        new = draw(self.number, cache.batch, 1, max(counts), 2)
        cache.append(new, new, counts)
        triples = zip(tokens, new, counts, strict=True)
        return cache, [torch.cat([old, more[:, :count]], 1) for old, more, count in triples]

    def crop(self, cache, tokens):
        lengths = [self.rng.choice((0, 1, 512, 513, 2000)) for _ in tokens]
        cache.crop(lengths)
        return cache, [old[:, :length] for old, length in zip(tokens, lengths, strict=True)]

    def reorder(self, cache, tokens):
        order = [self.rng.randrange(cache.batch) for _ in tokens]
        cache.reorder(order)
        return cache, [tokens[b] for b in order]

    def select(self, cache, tokens):
        order = [self.rng.randrange(cache.batch) for _ in range(self.rng.choice((1, 2, 3)))]
        if len(self.pairs) < 4:
            self.pairs.append((cache.select(order), [tokens[b] for b in order]))
        return cache, tokens

    def keep(self, cache, tokens):
        self.number += 1
        masks = [draw(self.number + b, n) > 0 for b, n in enumerate(cache.lengths)]
        cache.keep(masks)
        return cache, [old[:, mask] for old, mask in zip(tokens, masks, strict=True)]

    def drop(self, cache, tokens):
        return None if len(self.pairs) > 1 else (cache, tokens)

    def copy(self, cache, tokens):
        return copy.deepcopy(cache), tokens

    def assert_holds(self):
        for cache, tokens in self.pairs:
            for b, expected in enumerate(tokens):
                assert torch.equal(cache.select([b]).key[0], expected)


def users(caches, pool):
    """Of each page, by its tables."""
    tables = [cache._table for cache in caches if cache.pool is pool]
    return Counter(chain.from_iterable(row for table in tables for row in table.pages))


def assert_counted(caches):
    for pool in {id(cache.pool): cache.pool for cache in caches}.values():
        counts = dict(enumerate(pool._users))
        assert {page: count for page, count in counts.items() if count} == users(caches, pool)
        assert set(pool._free) == {page for page, count in counts.items() if not count}


@pytest.mark.parametrize("seed", range(12))
def test_random_changes(seed):
    model = Model(random.Random(seed))
    for _ in range(30):
        model.change()
        assert_counted([cache for cache, _ in model.pairs])
    model.assert_holds()


def test_a_count_that_is_wrong_is_seen():
    cache = filled(draw(0, 1, 1, 600, 2), draw(0, 1, 1, 600, 2))
    assert_counted([cache])
    cache.pool.join([1])
    with pytest.raises(AssertionError):
        assert_counted([cache])


@traces
@pytest.mark.parametrize(
    "kept", [lambda n: torch.arange(n) % 3 > 0, torch.ones], ids=["some", "all"]
)
@pytest.mark.parametrize("capacity", [None, 3000])
def test_an_interrupted_keep_is_whole_or_nothing(capacity, kept):
    key = draw(0, 2, 1, 1200, 4)
    masks = [kept(1200).bool(), kept(700).bool()]
    before = [key[0], key[1, :, :700]]
    after = [old[:, mask] for old, mask in zip(before, masks, strict=True)]
    for step in range(1, 100_000, 97):
        cache = fl.KeyValueCache(2, 1, 4, capacity=capacity)
        cache.append(key, key, [1200, 700])
        done = interrupted(step, lambda cache=cache: cache.keep(masks))
        expected = before if cache.lengths == (1200, 700) and not done else after
        for b, tokens in enumerate(expected):
            assert torch.equal(cache.select([b]).key[0], tokens)
            assert torch.equal(cache.select([b]).value[0], tokens)
        cache.append(key[:, :, :9], key[:, :, :9])
        for b, tokens in enumerate(expected):
            assert torch.equal(cache.select([b]).key[0], torch.cat([tokens, key[b, :, :9]], 1))
        if done:
            assert cache.lengths == tuple(int(mask.sum()) + 9 for mask in masks)
            return
    raise AssertionError("keep did not end")


@traces
def test_interrupts_lose_no_memory():
    """What they leave behind is found before a pool grows."""
    rng, key = random.Random(0), draw(0, 2, 1, 1200, 2)
    cache = filled(key[:, :, :600], key[:, :, :600])
    fork = cache.select([0, 1])  # a pool of one table lays its pages out anew
    ways = (
        lambda: cache.reorder([1, 0]),
        lambda: cache.append(key, key),
        lambda: cache.crop(0),
        lambda: cache.keep([torch.arange(n) % 2 > 0 for n in cache.lengths]),
    )
    for _ in range(300):
        cache.crop(0)
        cache.append(key, key)
        interrupted(rng.randrange(1, 300), rng.choice(ways))
        counts = users([cache, fork], cache.pool)
        assert all(cache.pool._users[page] >= count for page, count in counts.items())
        assert not set(cache.pool._free) & set(counts)
    assert torch.equal(fork.key, key[:, :, :600])
    assert len(cache.pool) <= 24
    cache.pool._recount()
    assert_counted([cache, fork])


def test_memory_that_ran_out_is_given_back(monkeypatch):
    key = draw(0, 1, 1, 3000, 2)
    cache = filled(key[:, :, :512], key[:, :, :512])
    fork, before = cache.select([0]), cache.nbytes

    def refuse(pool, pages):
        raise MemoryError

    cache.append(key[:, :, :1], key[:, :, :1])
    cache.crop(512)
    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "_allocate", refuse)
        with pytest.raises(MemoryError):
            cache.append(key, key)
    assert cache.nbytes == before
    assert_counted([cache, fork])


def test_pages_that_come_and_go_leave_no_list_behind():
    key = draw(0, 1, 1, 600, 2)
    cache = filled(key, key)
    for _ in range(50):
        cache.crop(0)
        cache.append(key, key)
    assert len(cache.pool._free) <= len(cache.pool)


def test_a_cache_that_the_garbage_collector_takes():
    """A pool is laid out anew while a table of a dead cycle still waits for its end."""
    key = draw(0, 1, 1, 600, 2)
    cache = filled(key, key)

    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself, cycle.fork = cycle, cache.select([0])
    # called when weak references are cleared, before anything ends
    watch = weakref.ref(cycle.fork._table, lambda _: cache.append(*[key.repeat(1, 1, 9, 1)] * 2))
    del cycle
    gc.collect()
    assert watch() is None
    cache.append(key, key)
    assert torch.equal(cache.key, key.repeat(1, 1, 11, 1))
    assert_counted([cache])
