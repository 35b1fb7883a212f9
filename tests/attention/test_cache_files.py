"""A cache on disk comes back as it was, or says what is wrong with it."""

import pytest
import torch

import fenchel as fl
from tests import needs
from tests.attention.decoding import HALF, draw, filled, operands

files = needs.package("safetensors.torch", "caches on disk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_files(tmp_path, dtype):
    query, key, value = operands(700, batch=2, dtype=dtype, spread=2.0)
    cache = fl.KeyValueCache(2, 2, 32, 16, dtype=dtype)
    cache.append(key, value, tokens=[700, 30])
    cache.save(tmp_path / "cache")
    again = fl.KeyValueCache.load(tmp_path / "cache")
    assert again.lengths == cache.lengths
    if dtype != torch.float64:
        assert torch.equal(fl.decode(query, again, HALF), fl.decode(query, cache, HALF))
    assert torch.equal(again.select([1]).key, key[1:, :, :30])


def test_files_that_are_none(tmp_path):
    _, key, _ = operands(40)
    path = tmp_path / "cache"
    for wrong in (b"", b"x" * 400):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="damaged"):
            fl.KeyValueCache.load(path)
    files.save_file({"a": key}, path)
    with pytest.raises(ValueError, match="holds no cache"):
        fl.KeyValueCache.load(path)
    with pytest.raises(FileNotFoundError):
        fl.KeyValueCache.load(tmp_path / "absent")


def test_every_bit_of_a_file_counts(tmp_path):
    """Of the header, of keys and of values; the shadow is not in the file."""
    tokens = draw(0, 2, 1, 3, 2)
    cache = fl.KeyValueCache(2, 1, 2, capacity=30)
    cache.append(tokens, tokens, [3, 2])
    path = tmp_path / "cache"
    cache.save(path)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 5):  # one or two of each byte
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged|header is damaged"):
            fl.KeyValueCache.load(path)
    for length in range(0, len(whole), 11):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            fl.KeyValueCache.load(path)
    path.write_bytes(whole)
    again = fl.KeyValueCache.load(path)
    assert again.capacity == 30
    assert torch.equal(again.select([1]).key[0], tokens[1, :, :2])


@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_damaged_is_named(tmp_path, part):
    _, key, value = operands(40, batch=2)
    filled(key, value).save(tmp_path / "cache")
    whole = (tmp_path / "cache").read_bytes()
    victim = {"key": key, "value": value}[part][1, 1, 7].numpy().tobytes()
    start = whole.index(victim)
    (tmp_path / "cache").write_bytes(
        whole[:start] + bytes(len(victim)) + whole[start + len(victim) :]
    )
    message = f"the {part}s of sequence 1 are not those saved; use another copy"
    with pytest.raises(ValueError, match=message):
        fl.KeyValueCache.load(tmp_path / "cache")


def test_sequences_that_share_pages_are_saved(tmp_path):
    _, key, value = operands(600, kv_heads=1)
    cache = filled(key, value).select([0, 0])
    cache.save(tmp_path / "cache")
    again = fl.KeyValueCache.load(tmp_path / "cache")
    assert torch.equal(again.key, cache.key)
    assert torch.equal(again.value, cache.value)
