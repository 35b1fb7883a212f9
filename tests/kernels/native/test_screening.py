"""Keys dropped by products of rounded operands could not have carried weight: the same bits."""

import math
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import fenchel as fl
from fenchel._kernels import library
from tests import needs
from tests.kernels.native.cases import needs_library

P = fl.priors
pytestmark = [
    needs_library,
    needs.unless(
        library.loaded() is None or library.loaded().variant != "plain",
        "AVX2 is absent, and with it screening",
        "screening",
    ),
]
HALF = fl.Tsallis(1.5)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(n=1100, dim=64, heads=2, spread=1.0, queries=100):
    return (
        draw(0, 1, heads, queries, dim) * spread,
        draw(1, 1, heads, n, dim),
        draw(2, 1, heads, n, 16),
    )


@contextmanager
def screening(on):
    loaded = library.loaded()
    before = loaded.screen(on)
    try:
        yield
    finally:
        loaded.screen(before)


def assert_same_bits(call, screened=True):
    """With screening and without it; and it did take place, or did not."""
    before = library.loaded().screened
    with screening(True):
        ours = call()
    took_place = library.loaded().screened > before
    before = library.loaded().screened
    with screening(False):
        plain = call()
    assert library.loaded().screened == before
    assert took_place == screened
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


STRUCTURES = {
    "plain": {},
    "causal": {"base": P.Causal(offset=1000)},
    "window": {"base": P.SlidingWindow(600, right=600)},
    "lengths": {"base": P.KeyPadding(torch.tensor([[900]]))},
    "alibi": {"attn_mask": P.ALiBi(2)},
    "alibi as base": {"base": P.ALiBi(2)},
    "table": {"attn_mask": P.RelativeBuckets(draw(5, 32, 2))},
    "per key": {"attn_mask": P.Preference(draw(6, 1100))},
    "per key as base": {"base": P.Preference(draw(6, 1100))},
    "sink": {"attn_mask": P.Sink(torch.tensor([1.0, 5.0]))},
    "mask": {"attn_mask": draw(7, 100, 1100) > 0},
    "steep": {"attn_mask": P.ALiBi(2) * P.Preference(30 * draw(6, 1100))},
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_structures(name, alpha):
    q, k, v = operands(spread=4.0)
    kwargs = STRUCTURES[name]
    screened = name not in ("table", "per key")  # biases that differ from key to key
    assert_same_bits(lambda: [fl.attention(q, k, v, fl.Tsallis(alpha), **kwargs)], screened)


@pytest.mark.parametrize("dim", [1, 7, 16, 40, 65, 130])
@pytest.mark.parametrize("spread", [4.0, 30.0, 1e4])
def test_widths_and_spreads(dim, spread):
    q, k, v = operands(dim=dim, spread=spread)
    assert_same_bits(lambda: [fl.attention(q, k, v, HALF)])


def test_flat_rows_are_scored_whole():
    """Screening stops to pay where many keys are above the cut."""
    q, k, v = operands(spread=0.01)
    assert_same_bits(lambda: [fl.attention(q, k, v, HALF)], screened=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precisions(dtype):
    """bfloat16 is computed in float32; float64 is never screened."""
    q, k, v = (x.to(dtype) for x in operands(spread=3.0))
    assert_same_bits(lambda: [fl.attention(q, k, v, HALF)], screened=dtype != torch.float64)


@pytest.mark.parametrize("place", [3, 600, 1099])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e19, 1e38, 1e-30, 0.0])
@pytest.mark.parametrize("side", ["query", "key", "both"])
def test_numbers_that_cannot_be_rounded(place, value, side):
    q, k, v = operands(spread=3.0)
    if side != "key":
        q[0, 0, place % 100] = value
    if side != "query":
        k[0, 0, place, 5] = value
    assert_same_bits(lambda: [fl.attention(q, k, v, HALF)])


@pytest.mark.parametrize(
    ("power", "screened"), [(-120, False), (-40, True), (-20, True), (20, True), (40, True)]
)
def test_scales_far_from_one(power, screened):
    """The steps of rounding follow the operands, as far as their squares are numbers."""
    q, k, v = operands(spread=3.0)
    factor = 2.0**power
    assert_same_bits(lambda: [fl.attention(q * factor, k / factor, v, HALF)], screened)


def test_keys_of_very_different_norms():
    q, k, v = operands(spread=3.0)
    k *= torch.logspace(-6, 3, 1100)[:, None]
    k[..., 7] += 100
    assert_same_bits(lambda: [fl.attention(q / 100, k, v, HALF)])


def test_scores_at_the_cut():
    """Many keys exactly at the threshold, and next to it."""
    q, k, v = operands(spread=3.0)
    k[..., 600:, :] = k[..., :500, :]
    k[..., 700:800, :] = torch.nextafter(k[..., 700:800, :], torch.tensor(math.inf))
    assert_same_bits(lambda: [fl.attention(q, k, v, HALF), fl.attention(q, k, v, fl.Tsallis(2.0))])


def test_gradients_groups_and_packs():
    q, k, v = draw(0, 1, 6, 700, 32) * 3, draw(1, 1, 2, 700, 32), draw(2, 1, 2, 700, 32)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    starts = torch.tensor([0, 630, 700])

    def packed():
        tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
        output = fl.varlen_attention(*tokens, starts, starts, HALF, enable_gqa=True)
        return [output, *torch.autograd.grad(output.sin().sum(), (q, k, v))]

    def grouped():
        output = fl.attention(q, k, v, HALF, is_causal=True, enable_gqa=True)
        return [output, *torch.autograd.grad(output.sin().sum(), (q, k, v))]

    assert_same_bits(packed)
    assert_same_bits(grouped)


def test_biases_that_cancel():
    """Each is large, and rounds; their sum is nothing."""
    q, k, v = operands(spread=4.0)
    table = P.RelativeBuckets(torch.full((32, 2), 1e7))
    bias = table * P.Preference(torch.full((1100,), -1e7))
    assert_same_bits(
        lambda: [fl.attention(q, k, v, fl.Tsallis(2.0), attn_mask=bias)], screened=False
    )


GUARDED = """
import ctypes, mmap, torch, fenchel as fl
keys, width, page = 1025, 64, mmap.PAGESIZE  # the last panel holds one key
size = keys * width * 4
pages = -(-size // page)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
start = libc.mmap(None, (pages + 1) * page, access, kind, -1, 0)
assert libc.mprotect(start + pages * page, page, 0) == 0
numbers = (ctypes.c_float * (keys * width)).from_address(start + pages * page - size)
k = torch.frombuffer(numbers, dtype=torch.float32).view(1, 1, keys, width)
torch.manual_seed(0)
k.copy_(-1 + 0.3 * torch.randn(k.shape))  # all scores are negative, and so is the cut
q, v = 4 + torch.randn(1, 1, 100, width), torch.randn(1, 1, keys, 16)
before = fl._kernels.library.loaded().screened
fl.attention(q, k, v, fl.Tsallis(1.5))
print(fl._kernels.library.loaded().screened > before)
"""


def test_nothing_beyond_the_keys_is_read():
    """A page that may not be read follows the keys."""
    run = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "True"
