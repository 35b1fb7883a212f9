"""A cache keeps what it is given: in pages, shared, cropped, reordered, on disk."""

import copy
import pickle
import threading

import pytest
import torch

import fenchel as fl
from tests.attention.decoding import HALF, P, draw, filled, operands, reference


def assert_holds(cache, key, value):
    assert torch.equal(cache.key, key)
    assert torch.equal(cache.value, value)
    assert cache.lengths == (key.shape[2],) * key.shape[0]


@pytest.mark.parametrize("step", [1, 5, 511, 512, 513, None])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_come_in_any_portions(batch, step):
    query, key, value = operands(1100 if step != 1 else 530, batch=batch, spread=2.0)
    cache = filled(key, value, step)
    assert_holds(cache, key, value)
    assert cache.key.data_ptr() == cache.key.data_ptr()  # a view
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))


def test_a_view_is_not_copied_and_appending_copies_no_token():
    _, key, value = operands(600)
    cache = fl.KeyValueCache(1, 2, 32, 16, capacity=4000)
    cache.append(key, value)
    before = cache.key.data_ptr()
    for _ in range(5):
        cache.append(key, value)
        assert cache.key.data_ptr() == before
    assert torch.equal(cache.key, torch.cat([key] * 6, 2))


def test_memory_grows_by_halves():
    _, key, value = operands(512)
    cache = fl.KeyValueCache(1, 2, 32, 16)
    sizes = set()
    for _ in range(40):
        cache.append(key, value)
        sizes.add(len(cache.pool))
    assert len(sizes) <= 10
    assert max(sizes) <= 60


def test_operands_of_any_layout():
    query, key, value = operands(700)
    strided = key.transpose(1, 2).contiguous().transpose(1, 2)
    cache = fl.KeyValueCache(1, 2, 32, 16)
    cache.append(strided, value[..., ::1].flip(-1).flip(-1))
    assert_holds(cache, key, value)
    wide = query.repeat(1, 1, 1, 2)[..., ::2]
    doubled = filled(key.repeat(1, 1, 1, 2)[..., ::2], value)
    expected = reference(wide.contiguous(), key.repeat(1, 1, 1, 2)[..., ::2].contiguous(), value)
    assert torch.equal(fl.decode(wide, doubled, HALF), expected)


def test_cropping_and_appending_again():
    query, key, value = operands(1600, spread=2.0)
    cache = filled(key, value)
    for length in (1599, 1024, 700, 1, 0):
        cache.crop(length)
        assert cache.lengths == (length,)
        again = copy.deepcopy(cache)
        again.append(key[:, :, length:], value[:, :, length:])
        assert_holds(again, key, value)
        assert torch.equal(fl.decode(query, again, HALF), reference(query, key, value))
    with pytest.raises(ValueError, match="length"):
        cache.crop([1, 2])


def test_sequences_of_different_lengths():
    query, key, value = operands(1500, batch=3, spread=2.0)
    lengths = (1500, 200, 777)
    cache = fl.KeyValueCache(3, 2, 32, 16)
    cache.append(key, value, tokens=lengths)
    assert cache.lengths == lengths
    assert len(cache) == 1500
    for options in ({}, {"base": P.SlidingWindow(300)}, {"attn_mask": P.ALiBi(4)}):
        found = fl.decode(query, cache, HALF, **options)
        for b, length in enumerate(lengths):
            one = query[b : b + 1], key[b : b + 1, :, :length], value[b : b + 1, :, :length]
            assert torch.equal(found[b : b + 1], reference(*one, **options))
    with pytest.raises(ValueError, match="different lengths"):
        cache.key  # noqa: B018
    with pytest.raises(ValueError, match="one by one"):
        fl.decode(query, cache, fl.Budget(2.0))
    with pytest.raises(ValueError, match="prove them one by one"):
        fl.decode(query, cache, HALF, proof=True)
    mask = torch.ones(1500, dtype=torch.bool)
    with pytest.raises(ValueError, match="one by one"):
        fl.decode(query, cache, HALF, attn_mask=mask)
    assert_holds(cache.select([2]), key[2:, :, :777], value[2:, :, :777])


def test_selected_sequences_share_pages_until_they_are_written():
    query, key, value = operands(1300, batch=2, spread=2.0)
    cache = filled(key, value)
    pages = len(cache.pool)
    fork = cache.select([1, 1, 0])
    assert len(cache.pool) == pages
    picked = torch.tensor([1, 1, 0])
    assert_holds(fork, key[picked], value[picked])
    new_key, new_value = draw(7, 3, 2, 300, 32), draw(8, 3, 2, 300, 16)
    fork.append(new_key, new_value)
    longer = torch.cat([key[picked], new_key], 2), torch.cat([value[picked], new_value], 2)
    assert_holds(fork, *longer)
    assert_holds(cache, key, value)
    question = draw(9, 3, 4, 1, 32) * 2
    assert torch.equal(fl.decode(question, fork, HALF), reference(question, *longer))
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))
    cache.append(key, value)
    assert_holds(fork, *longer)


def test_pages_that_nobody_reads_are_given_out_again():
    _, key, value = operands(2048)
    cache = filled(key, value)
    for _ in range(6):
        fork = cache.select([0])
        fork.append(key, value)
        del fork
    assert len(cache.pool) <= 12
    other = fl.KeyValueCache(1, 2, 32, 16, pool=cache.pool)
    other.append(key, value)
    assert_holds(other, key, value)
    assert_holds(cache, key, value)


def test_beams():
    query, key, value = operands(900, batch=4, spread=2.0)
    cache, order = filled(key, value), torch.tensor([2, 2, 0, 3])
    for _ in range(3):
        cache.reorder(order)
        key, value = key[order], value[order]
        new = draw(3, 4, 2, 1, 32), draw(4, 4, 2, 1, 16)
        cache.append(*new)
        key, value = torch.cat([key, new[0]], 2), torch.cat([value, new[1]], 2)
        assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))
    assert_holds(cache, key, value)
    cache.compact()
    assert_holds(cache, key, value)
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))
    for wrong in ([], [0, 4], [-1]):
        with pytest.raises(ValueError, match="sequences must be numbers"):
            cache.reorder(wrong)
    mask = torch.tensor([True, False, True, True])
    for strange in ([0.5], [True], ["0"], [None], 3, torch.tensor([1.0]), mask, mask[None].long()):
        for change in (cache.reorder, cache.select):
            with pytest.raises(TypeError, match=r"whole numbers, got .*nonzero"):
                change(strange)
    for strange in (0.5, [0, 1, 2, 3.5], True, None, torch.tensor([1, 2, 3, 4])):
        with pytest.raises(TypeError, match="length must be a whole number"):
            cache.crop(strange)
    assert_holds(cache, key, value)
    cache.reorder(order.numpy())
    assert_holds(cache, key[order], value[order])


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(way):
    query, key, value = operands(600, spread=2.0)
    cache = filled(key, value)
    fl.decode(query, cache, HALF)
    other = way(cache)
    other.append(key, value)
    assert_holds(cache, key, value)
    assert other.lengths == (1200,)
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))


def test_capacity():
    _, key, value = operands(20)
    cache = fl.KeyValueCache(1, 2, 32, 16, capacity=30)
    cache.append(key, value)
    with pytest.raises(ValueError, match="capacity of 30 tokens"):
        cache.append(key, value)
    assert_holds(cache, key, value)
    with pytest.raises(ValueError, match="capacity of 30 tokens"):
        cache.append(key, value, tokens=[11])
    cache.append(key, value, tokens=[10])
    assert len(cache) == 30


def test_two_threads_at_once_are_refused():
    query, key, value = operands(50)
    cache = filled(key, value)
    failures = []

    def use():
        for act in (lambda: cache.append(key, value), lambda: fl.decode(query, cache, HALF)):
            try:
                act()
            except RuntimeError as problem:
                failures.append(str(problem))

    with cache._lock:
        other = threading.Thread(target=use)
        other.start()
        other.join()
    assert len(failures) == 2
    assert "another thread" in failures[0]
    cache.append(key, value)


WRONG = {
    "axes": (lambda k, v: (k[0], v[0]), "shape"),
    "batch": (lambda k, v: (k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)), "shape"),
    "heads": (lambda k, v: (k[:, :1], v[:, :1]), "shape"),
    "width": (lambda k, v: (k, v[..., :3]), "shape"),
    "dtype": (lambda k, v: (k.double(), v), "holds torch.float32"),
    "tokens": (lambda k, v: (k, v[:, :, :3]), "as many"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tokens_that_do_not_fit(wrong):
    _, key, value = operands(20)
    cache = filled(key, value)
    change, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        cache.append(*change(key, value))
    assert_holds(cache, key, value)


def test_arguments_that_are_refused():
    for wrong in ({"batch": 0}, {"d": -1}, {"kv_heads": 0}, {"capacity": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fl.KeyValueCache(**{"batch": 1, "kv_heads": 1, "d": 4} | wrong)
    with pytest.raises(TypeError, match="dtype"):
        fl.KeyValueCache(1, 1, 4, dtype=torch.int32)
    cache = fl.KeyValueCache(1, 1, 4)
    with pytest.raises(ValueError, match="the pool holds"):
        fl.KeyValueCache(1, 2, 4, pool=cache.pool)
    with pytest.raises(RuntimeError, match="nothing was decoded"):
        cache.read  # noqa: B018
    with pytest.raises(ValueError, match="one number per sequence"):
        cache.append(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), tokens=[1, 1])
    assert "lengths=(0,)" in repr(cache)
    cache.close()
