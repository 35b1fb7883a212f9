"""Few queries and many keys on the GPU's kernels, with and without a cache, in the interpreter."""

import random

import pytest
import torch

from tests import needs

needs.package("triton", covers="decoding on a GPU, interpreted")

import fenchel as fl  # noqa: E402 - triton is there
from fenchel._attention.sparse import GPU_PATH  # noqa: E402
from fenchel._kernels import library  # noqa: E402
from fenchel._kernels.gpu import folding, split  # noqa: E402
from tests.attention.decoding import HALF, P, draw, filled, operands, reference  # noqa: E402
from tests.kernels.gpu import interpreter  # noqa: E402

NAN, INF = float("nan"), float("inf")
SLOW = pytest.mark.slow
SPLIT, CACHED = {"scan"}, {"scan_shadow"}
STRUCTURES = {
    "nothing": {},
    "window": {"base": P.SlidingWindow(40)},
    "ALiBi": {"attn_mask": P.ALiBi(4)},
    "ALiBi as base": {"base": P.ALiBi(4)},
    "T5 table": {"attn_mask": P.RelativeBuckets(draw(8, 8, 4), max_distance=64)},
    "sink": {"attn_mask": P.Sink(torch.tensor([0.5, -1.0, 2.0, 0.0]))},
    "sink as base": {"base": P.Sink(torch.tensor([0.5, -1.0, 2.0, 0.0]))},
    "a high sink of little mass": {
        "base": P.Sink(torch.full((4,), -4.0)),
        "attn_mask": torch.full((1, 1, 1, 90), -9.0),
    },
    "softcap": {"softcap": 3.0},
    "window, ALiBi, softcap": {
        "base": P.SlidingWindow(50),
        "attn_mask": P.ALiBi(4),
        "softcap": 5.0,
    },
    "scale": {"scale": 0.7},
    "mask": {"attn_mask": draw(5, 1, 1, 1, 90) > -0.5},
    "mask by head": {"attn_mask": draw(5, 1, 4, 1, 90) > 0.0},
    "bias": {"attn_mask": draw(6, 1, 4, 1, 90)},
    "base": {"base": draw(7, 1, 4, 1, 90).exp()},
}
QUICK = ("window, ALiBi, softcap",)
BY_STRUCTURE = [pytest.param(s, marks=() if s in QUICK else SLOW) for s in STRUCTURES]


@pytest.fixture(autouse=True)
def interpreted():
    with fl.use("gpu"):
        yield


def exactly(function, *arguments, **options):
    """The same in float64, by other kernels."""
    with fl.use("torch"):
        return function(*(x.double() for x in arguments), **options)


def difference(found, query, key, value, *others, **options):
    exact = exactly(lambda q, k, v: reference(q, k, v, *others, **options), query, key, value)
    return (found.double() - exact).abs().max()


def launched(kernels, function, *arguments, **options):
    """The result, where one of these kernels was used."""
    with interpreter.watch() as launches:
        result = function(*arguments, **options)
    assert kernels <= {launch.kernel for launch in launches}
    return result


# ---- without a cache


@pytest.mark.parametrize("structure", BY_STRUCTURE)
@pytest.mark.parametrize("queries", [1, pytest.param(5, marks=SLOW)])
def test_attention_of_few_queries(structure, queries):
    options = STRUCTURES[structure]
    query, key, value = operands(90, queries=queries, spread=2.0, batch=2, d=24)
    found = launched(SPLIT, reference, query, key, value, **options)
    assert difference(found, query, key, value, **options) < 1e-5


@pytest.mark.parametrize("alpha", [1.1, *(pytest.param(a, marks=SLOW) for a in (1.3, 2.0))])
def test_every_alpha(alpha):
    query, key, value = operands(90, spread=2.0)
    regularizer = fl.Tsallis(alpha)
    found = launched(SPLIT, reference, query, key, value, regularizer)
    assert difference(found, query, key, value, regularizer) < 1e-5
    cached = launched(CACHED, fl.decode, query, filled(key, value), regularizer)
    assert difference(cached, query, key, value, regularizer) < 1e-5


@SLOW
def test_one_alpha_per_head_and_a_temperature():
    query, key, value = operands(70, spread=2.0)
    alpha = torch.tensor([1.2, 1.5, 2.0, 1.7], dtype=torch.float64)[:, None]
    regularizer = fl.Tsallis(alpha, temperature=0.7)
    found = launched(CACHED, fl.decode, query, filled(key, value), regularizer)
    assert difference(found, query, key, value, regularizer) < 1e-5


@SLOW
def test_what_keys_are_not_split_for():
    query, key, value = operands(90)
    few, many = operands(20), operands(90, queries=folding.MOST_ROWS)
    calls = {
        "few keys": lambda: reference(*few),
        "many queries": lambda: reference(*many),
        "dropout": lambda: fl.attention(query, key, value, HALF, dropout_p=0.1, enable_gqa=True),
        "bias by key and head": lambda: reference(
            query, key, value, attn_mask=P.Preference(draw(9, 1, 4, 90))
        ),
        "a derivative": lambda: reference(query.clone().requires_grad_(), key, value),
    }
    for name, call in calls.items():
        with interpreter.watch() as launches:
            call()
        kernels = {launch.kernel for launch in launches}
        assert "bound" in kernels, name
        assert not kernels & (SPLIT | CACHED), name


def test_explain_says_that_it_never_ran():
    operand = operands(90)
    route = fl.explain(*operand, HALF, enable_gqa=True)
    assert route.path == GPU_PATH
    assert "never run on a device" in str(route)


# ---- with a cache


@pytest.mark.parametrize("structure", BY_STRUCTURE)
@pytest.mark.parametrize("queries", [1, pytest.param(5, marks=SLOW)])
def test_every_structure(structure, queries):
    options = STRUCTURES[structure]
    query, key, value = operands(90, queries=queries, spread=2.0, batch=2, d=24)
    found = launched(CACHED, fl.decode, query, filled(key, value, 70), HALF, **options)
    assert difference(found, query, key, value, **options) < 1e-5


@pytest.mark.parametrize("length", [33, *(pytest.param(n, marks=SLOW) for n in (1, 2, 512, 1100))])
def test_every_length(length):
    query, key, value = operands(length, spread=2.0)
    found = launched(CACHED, fl.decode, query, filled(key, value), HALF)
    assert difference(found, query, key, value) < 1e-5


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)], ids=str
)
@pytest.mark.parametrize("spread", [2.0, pytest.param(0.01, marks=SLOW)])
def test_half_precision(dtype, spread):
    """No worse than twice the plain computation in that precision."""
    query, key, value = operands(90, spread=spread, dtype=dtype)
    repeats = (x.repeat_interleave(2, 1) for x in (key, value))
    plain_key, plain_value = repeats
    scores = (query @ plain_key.mT) * 32**-0.5
    plain = fl.entmax(scores.float(), 1.5).to(dtype) @ plain_value
    allowed = 2 * difference(plain, query, key, value)
    for found in (
        launched(SPLIT, reference, query, key, value),
        launched(CACHED, fl.decode, query, filled(key, value), HALF),
    ):
        assert found.dtype == dtype
        assert difference(found, query, key, value) <= allowed


@pytest.mark.parametrize("d", [3, pytest.param(100, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_every_head_dimension(d):
    query, key, value = operands(70, d=d, d_value=d + 2 if d < 256 else 7)
    found = launched(CACHED, fl.decode, query, filled(key, value), HALF)
    assert difference(found, query, key, value) < 1e-5


@pytest.mark.parametrize(
    "spread", [1e-3, *(pytest.param(x, marks=SLOW) for x in (1e-20, 1e3, 0.3))]
)
def test_lists_overflow(spread):
    """Flat scores: every key may matter, and splits are used whole. Sharp ones: one key does."""
    query, key, value = operands(90, spread=spread)
    cache = filled(key, value)
    found = launched(CACHED, fl.decode, query, cache, HALF)
    assert difference(found, query, key, value) < 1e-5 * max(1.0, spread)
    assert difference(launched(SPLIT, reference, query, key, value), query, key, value) < 1e-5 * (
        max(1.0, spread)
    )
    if spread <= 0.3:
        assert cache.read.scored.min() == 90
    if spread == 1e3:
        assert cache.read.scored.max() < 20


@pytest.mark.parametrize("size", [1e25, *(pytest.param(x, marks=SLOW) for x in (1e-30, 1e-8, 1e6))])
def test_keys_of_every_size(size):
    """Only the query brings the scores back to where they differ by about one."""
    query, key, value = operands(70)
    key, query = key * size, query / size if 1e-8 <= size <= 1e6 else query
    found = launched(CACHED, fl.decode, query, filled(key, value), HALF)
    expected = exactly(lambda q, k, v: reference(q, k, v), query, key, value)
    bar = 1e-5 if size <= 1e6 else 1e-3  # the larger score wins whatever rounding does
    assert (found - expected).abs().max() < bar


def test_ragged_sequences_are_each_themselves():
    query, key, value = operands(70, batch=2, spread=2.0, queries=2)
    lengths = [70, 17]
    cache = fl.KeyValueCache(2, 2, 32, 16)
    cache.append(key, value, tokens=lengths)
    assert cache.pool.layout == "gpu"
    for options in ({"base": P.SlidingWindow(9), "attn_mask": P.ALiBi(4)},):
        found = launched(CACHED, fl.decode, query, cache, HALF, **options)
        for b, n in enumerate(lengths):
            one = query[b : b + 1], key[b : b + 1, :, :n], value[b : b + 1, :, :n]
            assert difference(found[b : b + 1], *one, **options) < 1e-5


def test_ragged_sequences_of_documents_are_refused():
    query, key, value = operands(80, batch=2)
    cache = fl.KeyValueCache(2, 2, 32, 16)
    cache.append(key, value, tokens=[80, 17])
    documents = P.Documents(torch.zeros(80, dtype=torch.int64))
    with pytest.raises(ValueError, match="decode them one by one"):
        fl.decode(query, cache, HALF, base=documents)


def test_an_empty_cache_is_refused():
    cache = fl.KeyValueCache(1, 2, 32, 16)
    with pytest.raises(ValueError, match="Append keys and values first"):
        fl.decode(operands(1)[0], cache, HALF)
    with pytest.raises(RuntimeError, match="nothing was decoded"):
        _ = cache.read


@SLOW
def test_shared_pages_and_beams():
    query, key, value = operands(40, batch=2, spread=2.0)
    cache = filled(key, value)
    beams = cache.select([1, 0, 1])
    new = draw(11, 3, 2, 1, 32), draw(12, 3, 2, 1, 16)
    beams.append(*new)
    order = torch.tensor([1, 0, 1])
    grown = (torch.cat([x[order], more], 2) for x, more in zip((key, value), new, strict=True))
    asked = query[order]
    assert difference(fl.decode(asked, beams, HALF), asked, *grown) < 1e-5
    assert difference(fl.decode(query, cache, HALF), query, key, value) < 1e-5


def test_nothing_visible_gives_zeros():
    query, key, value = operands(70)
    nothing = torch.zeros(1, 4, 1, 70, dtype=torch.bool)
    for found in (
        launched(SPLIT, reference, query, key, value, attn_mask=nothing),
        launched(CACHED, fl.decode, query, filled(key, value), HALF, attn_mask=nothing),
    ):
        assert torch.equal(found, torch.zeros_like(found))


# ---- numbers that are none


@needs.unless(library.loaded() is not None, "no native kernels", "strange keys, as they see them")
@pytest.mark.parametrize(
    "strange", [NAN, *(pytest.param(x, marks=SLOW) for x in (INF, -INF, 1e38))]
)
def test_a_strange_key_spoils_its_own_rows_alone(strange):
    query, key, value = operands(70, batch=2, spread=2.0)
    key[1, 0, 33, 5] = strange
    with fl.use("native"):  # which hides a key of score -inf, as these kernels do
        expected = reference(query, key, value)
    for found in (
        launched(SPLIT, reference, query, key, value),
        launched(CACHED, fl.decode, query, filled(key, value), HALF),
    ):
        assert found[0].isfinite().all()
        assert found[1, 2:].isfinite().all()  # heads of the other key head
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("strange", [INF, *(pytest.param(x, marks=SLOW) for x in (NAN, 0.0))])
def test_a_strange_query(strange):
    query, key, value = operands(70, spread=2.0)
    query[0, 1] = strange
    expected = exactly(reference, query, key, value).float()
    for found in (
        launched(SPLIT, reference, query, key, value),
        launched(CACHED, fl.decode, query, filled(key, value), HALF),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("spread", [2.0, pytest.param(0.01, marks=SLOW)])
def test_values_that_are_not_finite_count_where_they_carry_weight(spread):
    query, key, value = operands(70, spread=spread)
    value[0, 0, 30] = float("nan")
    value[0, 1, 3] = float("inf")
    support = exactly(fl.attention_solution, query, key, value, regularizer=HALF, enable_gqa=True)
    weights = support.weights.to_dense()
    spoilt = torch.stack([weights[0, :2, 0, 30] > 0, weights[0, 2:, 0, 3] > 0]).flatten()
    for found in (
        launched(SPLIT, reference, query, key, value),
        launched(CACHED, fl.decode, query, filled(key, value), HALF),
    ):
        assert torch.equal(~found[0, :, 0].isfinite().all(-1), spoilt)


# ---- what is promised beside numbers


@SLOW
def test_the_same_call_has_the_same_bits():
    query, key, value = operands(90, spread=2.0)
    cache = filled(key, value)
    assert torch.equal(fl.decode(query, cache, HALF), fl.decode(query, cache, HALF))


def test_what_was_read():
    query, key, value = operands(200, d=64, d_value=64, spread=4.0, heads=2)
    cache = filled(key, value)
    fl.decode(query, cache, HALF)
    read = cache.read
    weights = fl.attention_solution(query, key, value, HALF).weights.to_dense()
    assert torch.equal(read.support, (weights > 0).sum(-1))
    assert bool((read.seen == 200).all())
    assert bool((read.scored >= read.support).all())
    assert read.scored.max() < 40
    assert read.bytes < 0.3 * read.bytes_of_all
    assert read.bytes_of_all == 2 * 200 * 128 * 4


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"attn_mask": P.ALiBi(4), "softcap": 9.0}, marks=SLOW)]
)
def test_a_proof(options):
    query, key, value = operands(90, spread=2.0)
    proof = fl.decode(query, filled(key, value), HALF, proof=True, **options)
    assert difference(proof.output, query, key, value, **options) < 1e-5
    assert bool((proof.largest_skipped <= proof.cut).all())
    assert proof.candidates.double().mean() < 0.5
    with fl.use("torch"):
        proof.check(key)
    wrong = key.clone()
    skipped = int((~proof.candidates[0, 0, 0]).nonzero()[0])
    wrong[0, 0, skipped] = query[0, 0, 0] * 30
    with fl.use("torch"), pytest.raises(AssertionError, match="a skipped key exceeds its bound"):
        proof.check(wrong)


def test_what_has_no_proof_says_the_way_out():
    query, key, value = operands(40)
    with pytest.raises(ValueError, match="on a GPU at most 2"):
        fl.decode(query, filled(key, value), fl.Tsallis(3.0), proof=True)


@SLOW
def test_others_read_everything():
    """Softmax, alpha beyond 2, and more rows than keys are split for."""
    query, key, value = operands(70, queries=40)
    cache = filled(key, value)
    for regularizer in (fl.Shannon(), fl.Tsallis(3.0), HALF):
        found = fl.decode(query, cache, regularizer)
        assert difference(found, query, key, value, regularizer) < 1e-5
        assert cache.read.bytes == cache.read.bytes_of_all


@SLOW
def test_a_saved_cache_comes_back(tmp_path):
    query, key, value = operands(70, spread=2.0)
    cache = filled(key, value)
    cache.save(tmp_path / "cache.safetensors")
    back = fl.KeyValueCache.load(tmp_path / "cache.safetensors")
    assert back.pool.layout == "gpu"
    assert torch.equal(fl.decode(query, back, HALF), fl.decode(query, cache, HALF))


def test_the_host_reads_no_value(monkeypatch):
    from tests.kernels.gpu.interpreted.test_rules import Unread

    query, key, value = operands(70, batch=2, spread=2.0)
    cache = fl.KeyValueCache(2, 2, 32, 16)
    cache.append(key, value, tokens=[70, 20])
    run = split.run

    def launch(*arguments, **constants):
        with torch.utils._python_dispatch._disable_current_modes():
            run(*arguments, **constants)

    monkeypatch.setattr(split, "run", launch)
    with Unread():
        found = fl.decode(query, cache, HALF, base=P.SlidingWindow(30), attn_mask=P.ALiBi(4))
        fl.attention(query, key, value, HALF, enable_gqa=True)
    assert found.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_random_calls(seed):
    rng = random.Random(seed)
    kv_heads, repeats = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 7))
    shape = {"batch": rng.choice((1, 2)), "kv_heads": kv_heads, "heads": kv_heads * repeats}
    shape |= {"d": rng.choice((3, 16, 40, 64)), "d_value": rng.choice((5, 16))}
    length, queries = rng.choice((5, 33, 100, 513, 600)), rng.choice((1, 1, 1, 4))
    spread = 10 ** rng.uniform(-3, 1)
    query, key, value = operands(length, queries=queries, spread=spread, **shape)
    key = key + draw(seed, 1, kv_heads, 1, shape["d"]) * rng.choice((0, 3))
    options = {}
    if rng.random() < 0.3:
        options["base"] = P.SlidingWindow(rng.choice((4, 10, 60)))
    if rng.random() < 0.3:
        options["attn_mask"] = P.ALiBi(shape["heads"])
    if rng.random() < 0.2:
        options["softcap"] = 10 ** rng.uniform(-1, 2)
    regularizer = fl.Tsallis(rng.choice((1.1, 1.3, 1.5, 1.5, 2.0)))
    cache = filled(key, value, rng.choice((None, 7, 64, 600)) if length < 200 else None)
    found = launched(CACHED, fl.decode, query, cache, regularizer, **options)
    exact = exactly(lambda q, k, v: reference(q, k, v, regularizer, **options), query, key, value)
    # scores are rounded in float32, and the output moves with them
    size = (query.norm(dim=-1).amax() * key.norm(dim=-1).amax() * shape["d"] ** -0.5).clamp(min=10)
    assert (found - exact).abs().max() < 1e-6 * size
    if queries * repeats <= folding.MOST_ROWS:
        proof = fl.decode(query, cache, regularizer, proof=True, **options)
        with fl.use("torch"):
            proof.check(key)
