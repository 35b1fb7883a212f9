"""Decoding from a cache has the bits of attention over the same keys, and reads far less."""

import random
from contextlib import contextmanager

import pytest
import torch

import fenchel as fl
from fenchel._kernels import library
from tests import needs
from tests.attention.decoding import HALF, P, draw, filled, operands, reference

LENGTHS = (1, 2, 15, 300, 511, 512, 513, 1500, 4096, 4097, 9000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STRUCTURES = {
    "nothing": {},
    "window": {"base": P.SlidingWindow(700)},
    "narrow window": {"base": P.SlidingWindow(20)},
    "ALiBi": {"attn_mask": P.ALiBi(4)},
    "ALiBi as base": {"base": P.ALiBi(4)},
    "sink": {"attn_mask": P.Sink(torch.tensor([0.5, -1.0, 2.0, 0.0]))},
    "softcap": {"softcap": 3.0},
    "window and ALiBi": {"base": P.SlidingWindow(900), "attn_mask": P.ALiBi(4)},
    "scale": {"scale": 0.7},
}
shadows = needs.unless(
    library.loaded() is not None and library.loaded().variant != "plain",
    "no native kernels with AVX2",
    "skipping by the shadow of a cache",
)


@contextmanager
def settings(threads=None, screening=True, variant=None):
    native, before = library.loaded(), torch.get_num_threads()
    if native is not None:
        native.screen(screening)
        native.choose(variant or "avx512")
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if native is not None:
            native.screen(True)
            native.choose("avx512")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_attention(dtype, length):
    query, key, value = operands(length, dtype=dtype, spread=2.0)
    cache = filled(key, value)
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))
    assert cache.lengths == (length,)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("queries", [1, 3, 16, 17])
def test_every_structure(structure, queries):
    options = STRUCTURES[structure]
    query, key, value = operands(2500, queries=queries, spread=2.0, batch=2)
    cache = filled(key, value)
    found = fl.decode(query, cache, HALF, **options)
    assert torch.equal(found, reference(query, key, value, **options))


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.25, 1.3, 1.5, 1.7, 2.0, 2.5, 4.0])
def test_every_alpha(alpha):
    regularizer = fl.Tsallis(alpha)
    query, key, value = operands(5000, spread=2.0)
    cache = filled(key, value)
    expected = reference(query, key, value, regularizer)
    assert torch.equal(fl.decode(query, cache, regularizer), expected)


def test_one_alpha_per_head_and_a_temperature():
    alpha = torch.tensor([1.2, 1.5, 2.0, 1.7], dtype=torch.float64)[:, None]
    query, key, value = operands(3000, spread=2.0)
    cache = filled(key, value)
    for regularizer in (fl.Tsallis(alpha), fl.Tsallis(1.5, temperature=0.3)):
        expected = reference(query, key, value, regularizer)
        assert torch.equal(fl.decode(query, cache, regularizer), expected)


@pytest.mark.parametrize("queries", [1, 17])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_softmax_and_others_read_everything(dtype, queries):
    query, key, value = operands(700, dtype=dtype, queries=queries)
    cache = filled(key, value)
    for regularizer in (fl.Shannon(), fl.Budget(3.0), fl.Norm(2.0)):
        found = fl.decode(query, cache, regularizer)
        assert torch.equal(found, reference(query, key, value, regularizer))
        assert cache.read.scored.max() == 700
        assert cache.read.bytes == cache.read.bytes_of_all


def test_masks_of_keys():
    query, key, value = operands(1300, batch=2, spread=2.0)
    cache = filled(key, value)
    visible = draw(5, 2, 1, 1, 1300) > -0.5
    bias = draw(6, 1, 4, 1, 1300)
    for mask in (visible, bias):
        found = fl.decode(query, cache, HALF, attn_mask=mask)
        assert torch.equal(found, reference(query, key, value, attn_mask=mask))
    padding = P.KeyPadding(visible[:, :, 0])
    found = fl.decode(query, cache, HALF, base=padding)
    assert torch.equal(found, reference(query, key, value, base=padding))


@shadows
@pytest.mark.parametrize("variant", ["avx2", "avx512"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_screening_threads_and_instructions_change_no_bit(threads, variant):
    query, key, value = operands(9000, spread=1.5, batch=2, d=64)
    cache = filled(key, value)
    with settings(threads, True, variant):
        found, scored = fl.decode(query, cache, HALF), cache.read.scored
    with settings(1, False, variant):
        assert torch.equal(fl.decode(query, cache, HALF), found)
        assert cache.read.scored.min() == 9000
        assert torch.equal(reference(query, key, value), found)
    assert scored.max() < 9000 / 6


@shadows
def test_random_calls_have_the_bits_of_attention():
    assert check_random_calls(range(150)) >= 150


@pytest.mark.slow
@shadows
def test_many_random_calls_have_the_bits_of_attention():
    """1e5 rows."""
    rows = check_random_calls(range(1000, 13_000))
    assert rows >= 100_000


def check_random_calls(seeds):
    rows = 0
    for seed in seeds:
        rng = random.Random(seed)
        dtype = rng.choice(DTYPES)
        kv_heads, repeats = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 7))
        shape = {"batch": rng.choice((1, 2)), "kv_heads": kv_heads, "heads": kv_heads * repeats}
        shape |= {"d": rng.choice((3, 16, 40, 64)), "d_value": rng.choice((5, 16))}
        length = rng.choice((5, 100, 513, 600, 2000, 5000))
        queries = rng.choice((1, 1, 1, 4))
        query, key, value = operands(
            length, queries=queries, dtype=dtype, spread=10 ** rng.uniform(-3, 3), **shape
        )
        key = key + draw(seed, 1, kv_heads, 1, shape["d"], dtype=dtype) * rng.choice((0, 3, 100))
        options = {}
        if rng.random() < 0.3:
            options["base"] = P.SlidingWindow(rng.choice((10, 600, 3000)))
        if rng.random() < 0.3:
            options["attn_mask"] = P.ALiBi(shape["heads"])
        if rng.random() < 0.2:
            options["softcap"] = 10 ** rng.uniform(-1, 2)
        regularizer = fl.Tsallis(rng.choice((1.1, 1.3, 1.5, 1.5, 2.0, 3.0)))
        cache = filled(key, value, rng.choice((None, 7, 64, 600)) if length < 700 else None)
        found = fl.decode(query, cache, regularizer, **options)
        assert torch.equal(found, reference(query, key, value, regularizer, **options)), seed
        fl.decode(query, cache, regularizer, proof=True, **options).check(cache.key)
        rows += found.shape[:3].numel()
    return rows


@shadows
@pytest.mark.parametrize("seed", range(8))
def test_keys_at_the_bound(seed):
    """What rounding leaves of a key lies along the query, so that its score is at its bound, and
    the scores lie around the threshold, a few roundings apart."""
    d, count = 64, 2048
    sign = draw(seed, d).sign()
    query = sign.reshape(1, 1, 1, d) * 0.5
    whole = torch.randint(-126, 127, (count, d), generator=torch.Generator().manual_seed(seed))
    whole[:, 0] = 127  # the step is the one that the others were made with
    step = 2.0**-7
    key = (whole + 0.4999 * sign) * step
    key[:, 0] = 127 * step
    key = key - key.mean(0)
    scores = key @ query.flatten()
    level = scores.max() - 2.0 - draw(seed + 1, count).abs() * 1e-6
    key = key + ((level - scores) / query.square().sum()).unsqueeze(-1) * query.flatten()
    key[seed * 100] = key[seed * 100] + 2.0 * query.flatten() / query.square().sum()
    key, value = key.reshape(1, 1, count, d), draw(2, 1, 1, count, 8)
    cache = filled(key, value)
    found = fl.decode(query, cache, HALF, scale=1.0)
    assert torch.equal(found, reference(query, key, value, scale=1.0))
    fl.decode(query, cache, HALF, scale=1.0, proof=True).check(key)


# ---- proofs


@shadows
def test_a_proof_names_what_was_skipped():
    query, key, value = operands(3000, spread=2.0)
    cache = filled(key, value)
    proof = fl.decode(query, cache, HALF, proof=True)
    assert torch.equal(proof.output, reference(query, key, value))
    assert 0 < proof.candidates.sum() < 0.1 * proof.candidates.numel()
    assert bool((proof.largest_skipped <= proof.cut).all())
    proof.check(key)
    assert "3000" in repr(proof)


@shadows
@pytest.mark.parametrize("wrong", ["key", "candidates", "cut", "bound"])
def test_a_wrong_proof_fails(wrong):
    query, key, value = operands(3000, spread=2.0)
    proof = fl.decode(query, filled(key, value), HALF, proof=True)
    parts = {"candidates": proof.candidates.clone(), "cut": proof.cut + 0}
    parts["largest_skipped"] = proof.largest_skipped + 0
    if wrong == "key":  # one that was skipped is another now, and would have mattered
        skipped = int((~proof.candidates[0, 0, 0]).nonzero()[0])
        key = key.clone()
        key[0, 0, skipped] = query[0, 0, 0] * 3
    if wrong == "candidates":
        weights = fl.attention_solution(query, key, value, HALF, enable_gqa=True).weights.to_dense()
        parts["candidates"][weights == weights.amax(-1, keepdim=True)] = False
    if wrong == "cut":
        parts["cut"] += 1
    if wrong == "bound":
        parts["largest_skipped"] += 100
    changed = fl.DecodeProof(proof.output, question=proof.question, **parts)
    with pytest.raises(AssertionError, match=r"at \(batch, head, query\)"):
        changed.check(key)


@shadows
def test_a_wrong_byte_in_the_shadow_is_caught():
    """The bound of a key that carries weight says less than its score: the proof fails."""
    query, key, value = operands(1024, heads=1, kv_heads=1, spread=2.0)
    cache = filled(key, value)
    support = fl.attention_solution(query, key, value, HALF).support[0, 0, 0]
    victim = int(support.nonzero()[-1])
    assert victim >= 512  # the first page finds its cut from single lanes
    words = cache.pool.shadow[0, victim // 512, -2048:].view(torch.int32)
    words[victim % 512] = 0  # step and what is left out: as if the key were the centre
    proof = fl.decode(query, cache, HALF, proof=True)
    assert not proof.candidates[0, 0, 0, victim]
    with pytest.raises(AssertionError, match="exceeds its bound"):
        proof.check(key)


def test_no_proof_where_nothing_is_skipped():
    query, key, value = operands(100)
    with pytest.raises(ValueError, match="nothing skips here"):
        fl.decode(query, filled(key, value), fl.Budget(2.0), proof=True)


# ---- what is read


@shadows
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_little_is_read(dtype):
    query, key, value = operands(8192, d=64, d_value=64, spread=2.0, dtype=dtype)
    cache = filled(key, value)
    fl.decode(query, cache, HALF)
    assert cache.read.bytes < (0.17 if dtype == torch.float32 else 0.33) * cache.read.bytes_of_all
    assert cache.read.support.max() < 100
    assert "values read per query" in str(cache.read)
    share = cache.nbytes["shadow"] / cache.nbytes["keys and values"]
    assert share < (0.15 if dtype == torch.float32 else 0.28)


def test_flat_scores_are_scored_whole():
    query, key, value = operands(2048, spread=1e-3)
    cache = filled(key, value)
    assert torch.equal(fl.decode(query, cache, HALF), reference(query, key, value))
    assert cache.read.scored.min() >= 1024


# ---- numbers that are none


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("place", [3, 600])
def test_a_strange_key_spoils_its_own_rows_alone(strange, place):
    query, key, value = operands(1200, batch=2, spread=2.0)
    key[1, 0, place, 5] = strange
    cache = filled(key, value)
    found, expected = fl.decode(query, cache, HALF), reference(query, key, value)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[0].isfinite().all()
    assert found[1, 2:].isfinite().all()  # heads of the other key head
    cache.append(key[:, :, :1], value[:, :, :1])
    assert fl.decode(query, cache, HALF)[0].isfinite().all()


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), 1e30, 1e-30, 0.0])
def test_a_strange_query(strange):
    query, key, value = operands(1200, spread=2.0)
    query[0, 1] = strange
    found = fl.decode(query, filled(key, value), HALF)
    expected = reference(query, key, value)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_values_that_are_not_finite_count_where_they_carry_weight():
    query, key, value = operands(900, spread=2.0)
    value[0, 0, 100] = float("nan")
    found, expected = fl.decode(query, filled(key, value), HALF), reference(query, key, value)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ---- without kernels


def test_without_kernels_the_same_numbers():
    query, key, value = operands(700, queries=2)
    cache = filled(key, value)
    native = fl.decode(query, cache, HALF, base=P.SlidingWindow(300))
    with fl.use("torch"):
        plain = fl.decode(query, cache, HALF, base=P.SlidingWindow(300))
        written = filled(key, value, 50)
    torch.testing.assert_close(plain, native)
    assert torch.equal(written.key, key)
    assert written.pool.shadow.shape[-1] == 0  # nothing that could be out of date
    torch.testing.assert_close(fl.decode(query, written, HALF, base=P.SlidingWindow(300)), native)


# ---- what is refused

WRONG = {
    "batch": (lambda q: q.expand(2, -1, -1, -1), "shape"),
    "width": (lambda q: q[..., :-1], "shape"),
    "axes": (lambda q: q[0], "shape"),
    "dtype": (lambda q: q.double(), "holds torch.float32"),
    "heads": (lambda q: q[:, :3], "multiple of the cache's 2"),
    "too many": (lambda q: q.expand(-1, -1, 30, -1), "Append keys and values first"),
    "none": (lambda q: q[:, :, :0], "Append keys and values first"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_queries_that_do_not_fit(wrong):
    query, key, value = operands(20)
    change, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        fl.decode(change(query), filled(key, value), HALF)


def test_an_offset_of_its_own_is_refused():
    query, key, value = operands(20)
    with pytest.raises(ValueError, match="decode places the queries"):
        fl.decode(query, filled(key, value), HALF, base=P.Causal(19))
    with pytest.raises(TypeError, match="KeyValueCache"):
        fl.decode(query, key, HALF)


def test_gradients_that_would_be_lost_are_refused():
    query, key, value = operands(20)
    cache = filled(key, value)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        fl.decode(query.requires_grad_(), cache, HALF)
    with pytest.raises(ValueError, match="key requires a gradient"):
        cache.append(key.requires_grad_(), value)
    with torch.no_grad():
        assert not fl.decode(query, cache, HALF).requires_grad
        cache.append(key, value)
    assert len(cache) == 40
