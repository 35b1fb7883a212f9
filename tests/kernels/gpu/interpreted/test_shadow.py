"""The shadow of a cache in the layout of GPUs: bounds that hold for every key, whatever it is."""

from dataclasses import replace

import pytest
import torch

from tests import needs

needs.package("triton", covers="the shadow of a cache on a GPU")

import fenchel as fl  # noqa: E402 - triton is there
from fenchel._kernels.gpu import shapes, split, stored  # noqa: E402
from fenchel._kernels.pages import PAGE  # noqa: E402
from tests.attention.decoding import HALF, P, draw, filled, operands  # noqa: E402

SLOW = pytest.mark.slow
DTYPES = (torch.bfloat16, *(pytest.param(x, marks=SLOW) for x in (torch.float32, torch.float16)))


@pytest.fixture(autouse=True)
def interpreted():
    with fl.use("gpu"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """Every call of the kernels of decoding, with what it found."""
    seen, run = [], split.Split.run

    def watched(self, *arguments):
        seen.append(self)
        run(self, *arguments)

    monkeypatch.setattr(split.Split, "run", watched)
    return seen


def tokens_of(cache, part):
    """(batch, kv_head, token, ...) of a part (head, page, token, ...) of the pages."""
    pages = part[:, cache._table.numbers]  # (head, sequence, chunk, token, ...)
    return pages.transpose(0, 1).flatten(2, 3)[:, :, : len(cache)]


def read(cache):
    """(centre, step, rho, bytes) of every key in float64."""
    shadow = stored.read_shadow(cache.pool.shadow, cache.d, PAGE)
    words = tokens_of(cache, shadow.words.data)
    step, rho = ((words & -65536).view(torch.float32), (words << 16).view(torch.float32))
    heads, pages = shadow.bytes.data.shape[:2]
    whole = shadow.bytes.data.unflatten(2, (PAGE, shadow.width))[..., : cache.d]
    centre = shadow.centre.data[:, :, None, : cache.d].expand(heads, pages, PAGE, -1)
    return (x.double() for x in (tokens_of(cache, centre), step, rho, tokens_of(cache, whole)))


def check_residuals(cache):
    """What the bytes leave of each key is no longer than the shadow says."""
    centre, step, rho, whole = read(cache)
    left = cache.key.double() - centre - step.unsqueeze(-1) * whole
    assert bool((left.norm(dim=-1) <= rho).all())
    return left.norm(dim=-1), rho


def check_bounds(call, scores):
    """scores: float64 (batch, head, query, key), what a row does not see is -inf."""
    batch, keys = scores.shape[0], scores.shape[-1]
    upper = call.by_row(call.found.upper)[..., :keys].double()
    exact = scores.reshape(batch, call.call.heads, -1, keys)
    seen = exact > -torch.inf
    assert bool((upper >= exact)[seen].all()), "a score exceeds its bound"
    lanes = call.by_row(call.found.lane_score).flatten(3).double()
    padded = torch.full((*exact.shape[:3], call.splits * call.length), -torch.inf).double()
    padded[..., :keys] = exact
    best = padded.view(*exact.shape[:3], call.splits, -1, call.block).amax(-2).flatten(3)
    assert bool((lanes <= best).all()), "a lower bound exceeds every score of its lane"
    return upper - exact


def exact_scores(query, key, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    repeats = query.shape[1] // key.shape[1]
    return query.double() @ key.double().repeat_interleave(repeats, 1).mT * scale


# ---- writing


@pytest.mark.parametrize(
    "scale", [1.0, 1e36, *(pytest.param(x, marks=SLOW) for x in (0.0, 1e-37, 1e15, 1e29))]
)
@pytest.mark.parametrize("d", [3, pytest.param(40, marks=SLOW)])
def test_no_residual_is_longer_than_it_says(d, scale):
    key = (draw(0, 1, 2, 70, d) + 3 * draw(1, 1, 2, 1, d)) * scale
    left, rho = check_residuals(filled(key, key))
    if scale in (1.0, 1e15):  # and not much shorter
        assert (rho < 1.1 * left + 1e-6 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_stand_where_they_belong(dtype):
    key, value = draw(0, 2, 2, 530, 5, dtype=dtype), draw(1, 2, 2, 530, 19, dtype=dtype)
    cache = filled(key, value, 300)
    assert torch.equal(cache.key, key)
    assert torch.equal(cache.value, value)
    assert cache.pool.layout == "gpu"
    check_residuals(cache)


def test_tokens_one_by_one_are_all_in_the_shadow():
    """Also where the centre changes, and after tokens were taken back."""
    key = draw(0, 1, 1, 20, 8).cumsum(2)
    cache = filled(key, key, 1)
    check_residuals(cache)
    cache.crop(10)
    for start in (0, 3, 9):
        cache.append(*[-key[:, :, start : start + 11]] * 2)
    assert len(cache) == 43
    check_residuals(cache)


def test_tokens_that_are_negated_later_are_negated():
    key = draw(0, 1, 1, 20, 8)
    cache = filled(torch._neg_view(key), torch._neg_view(key))
    assert torch.equal(cache.key, -key)
    assert torch.equal(cache.value, -key)


def test_forks_have_shadows_of_their_own():
    key = draw(0, 1, 1, 20, 8)
    cache = filled(key, key)
    fork = cache.select([0, 0])
    fork.append(*[5 * draw(1, 2, 1, 30, 8)] * 2)
    cache.append(*[7 * draw(2, 1, 1, 30, 8)] * 2)
    for one in (cache, fork):
        check_residuals(one)


def test_what_the_shadow_takes():
    for dtype, share in ((torch.float32, 0.15), (torch.bfloat16, 0.285)):
        bytes_of = filled(*[torch.zeros(1, 1, 8, 64, dtype=dtype)] * 2).nbytes
        assert bytes_of["shadow"] < share * bytes_of["keys and values"]


# ---- reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [60, pytest.param(700, marks=SLOW)])
def test_bounds_hold(calls, length, dtype):
    query, key, value = operands(length, dtype=dtype, d=40, queries=2)
    key = key + draw(3, 1, 2, 1, 40, dtype=dtype)
    fl.decode(query, filled(key, value), HALF)
    scores = exact_scores(query, key)
    scores[..., 0, -1] = -torch.inf
    slack = check_bounds(calls[0], scores)
    norm = query.double().norm(dim=-1).amax() * 40**-0.5
    assert slack[scores.view(slack.shape) > -torch.inf].max() < 0.1 * norm


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1e-14, 1e-3, 1.0, 1e3, 1e14])
@pytest.mark.parametrize("size", [1e-25, 1e-4, 1.0, 1e6, 1e25])
@pytest.mark.parametrize("d", [16, 200])
def test_bounds_hold_at_every_scale(calls, d, size, spread):
    query, key, value = operands(60, spread=spread, d=d)
    key = (key + draw(4, 1, 2, 1, d)) * size
    fl.decode(query, filled(key, value), HALF)
    check_bounds(calls[0], exact_scores(query, key))


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=SLOW) for s in range(1, 9))])
def test_keys_at_the_bound(calls, seed):
    """What rounding leaves of a key lies along the query, so that its score is at its bound."""
    d, count = 32, 200
    sign = draw(seed, d).sign()
    query = sign.reshape(1, 1, 1, d) * 0.5
    whole = torch.randint(-126, 127, (count, d), generator=torch.Generator().manual_seed(seed))
    whole[:, 0] = 127  # the step is the one that the others were made with
    key = (whole + (0.4999 if seed % 2 else -0.4999) * sign) * 2.0**-7
    key[:, 0] = 127 * 2.0**-7
    key = (key - key.mean(0)).reshape(1, 1, count, d)
    fl.decode(query, filled(key, key), HALF, scale=1.0)
    check_bounds(calls[0], exact_scores(query, key, 1.0))


WRONG = {
    "byte": lambda shadow: shadow.bytes.data[0, 0, :600].view(-1)[::7].neg_(),
    "step": lambda shadow: shadow.words.data[0, 0, 17].bitwise_and_(0xFFFF),
    "residual": lambda shadow: shadow.words.data[0, 0, :].bitwise_and_(-65536),
    "centre": lambda shadow: shadow.centre.data[0, 0, 2].add_(1.0),
}


@pytest.mark.parametrize("wrong", ["byte", *(pytest.param(w, marks=SLOW) for w in list(WRONG)[1:])])
def test_a_wrong_number_in_the_shadow_is_caught(calls, wrong):
    query, key, value = operands(60, heads=1, kv_heads=1, spread=2.0)
    cache = filled(key, value)
    WRONG[wrong](stored.read_shadow(cache.pool.shadow, cache.d, PAGE))
    fl.decode(query, cache, HALF)
    with pytest.raises(AssertionError, match=r"bound exceeds|exceeds its bound"):
        check_bounds(calls[0], exact_scores(query, key))
    if wrong != "centre":
        with pytest.raises(AssertionError):
            check_residuals(cache)


def test_a_single_wrong_byte_is_caught():
    _, key, value = operands(60, heads=1, kv_heads=1)
    cache = filled(key, value)
    check_residuals(cache)
    stored.read_shadow(cache.pool.shadow, cache.d, PAGE).bytes.data[0, 0, 5 * 32 + 3] += 3
    with pytest.raises(AssertionError):
        check_residuals(cache)


@SLOW
def test_softcap_and_bias_keep_the_bounds(calls):
    query, key, value = operands(60, spread=30.0)
    options = {"attn_mask": P.ALiBi(4), "softcap": 2.0}
    fl.decode(query, filled(key, value), HALF, **options)
    slopes = torch.tensor([2.0 ** (-2 * h) for h in range(1, 5)], dtype=torch.float64)
    scores = 2.0 * torch.tanh(exact_scores(query, key) / 2.0)
    far = torch.arange(59, -1, -1)
    check_bounds(calls[0], scores - slopes.view(1, 4, 1, 1) * far)


@pytest.mark.parametrize(
    "strange", [float("nan"), *(pytest.param(x, marks=SLOW) for x in (float("inf"), 1e38))]
)
def test_a_strange_key_is_never_ruled_out(calls, strange):
    query, key, value = operands(60)
    key[0, 0, 3, 5] = strange
    cache = filled(key, value)
    fl.decode(query, cache, HALF)
    upper = calls[0].by_row(calls[0].found.upper)
    assert bool((upper[:, 0, :, 3] == torch.inf).all())
    assert bool(upper[:, 1, :, :60].isfinite().all())
    assert bool(upper[:, 0, :, 4:60].isfinite().all())


@SLOW
def test_without_products_of_bytes_the_same_bounds(calls, monkeypatch):
    """As on Turing, for which Triton has none."""
    query, key, value = operands(60, spread=2.0)
    cache = filled(key, value)
    first = fl.decode(query, cache, HALF)
    configuration = shapes.configuration

    def older(*arguments):
        return replace(configuration(*arguments), multiplies_bytes=False)

    monkeypatch.setattr(shapes, "configuration", older)
    torch.testing.assert_close(fl.decode(query, cache, HALF), first)  # blocks are smaller, too
    a, b = (call.by_row(call.found.upper)[..., :60] for call in calls)
    assert torch.equal(a, b)


# ---- which kernels a pool belongs to


@SLOW
def test_a_pool_keeps_to_one_layout():
    query, key, value = operands(60)
    with fl.use("native"):
        native = filled(key, value)
        expected = fl.decode(query, native, HALF)
    assert native.pool.layout == "native"
    torch.testing.assert_close(fl.decode(query, native, HALF), expected)
    cache = filled(key, value)
    with fl.use("native"):  # which cannot read this shadow
        assert torch.equal(fl.decode(query, cache, HALF), expected)
        assert cache.pool.shadow.shape[-1] > 0
        cache.append(key[:, :, :1], value[:, :, :1])
    assert cache.pool.layout is None
    assert cache.pool.shadow.shape[-1] == 0  # nothing that could be out of date
    fl.decode(query, cache, HALF)
