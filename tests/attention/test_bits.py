"""The same bits whatever stands beside a row: a prompt, one token, packed, batched, threads."""

import pytest
import torch

import fenchel as fl
from tests import needs

P = fl.priors
pytestmark = needs.kernels("that results do not depend on what stands beside a row")

ALPHAS = (1.0, 1.3, 1.5, 2.0, 2.5)


def regularizer(alpha):
    return fl.Tsallis(alpha)


def operands(
    queries, keys, heads=4, kv_heads=2, width=24, batch=1, factor=2.0, dtype=torch.float32
):
    g = torch.Generator().manual_seed(queries + keys)
    q = factor * torch.randn(batch, heads, queries, width, generator=g)
    k, v = (torch.randn(batch, kv_heads, keys, width, generator=g) for _ in range(2))
    return tuple(x.to(dtype) for x in (q, k, v))


STRUCTURES = {
    "plain": lambda offset: {"base": P.Causal(offset)},
    "window": lambda offset: {"base": P.Causal(offset) * P.SlidingWindow(70)},
    "alibi": lambda offset: {"base": P.Causal(offset), "attn_mask": P.ALiBi(4).shifted(offset)},
    "alibi as base": lambda offset: {"base": P.Causal(offset) * P.ALiBi(4)},
    "sink and softcap": lambda offset: {
        "base": P.Causal(offset),
        "attn_mask": P.Sink(torch.tensor([0.5, 0.0, -1.0, 2.0])),
        "softcap": 5.0,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_prompt_and_its_tokens_one_by_one(name, alpha, dtype):
    n = 150
    q, k, v = operands(n, n, dtype=dtype)
    omega, make = regularizer(alpha), STRUCTURES[name]
    prompt = fl.attention(q, k, v, omega, enable_gqa=True, **make(0))
    for i in (0, 1, 17, 63, 64, 65, 127, 128, 149):
        one = fl.attention(q[:, :, i : i + 1], k, v, omega, enable_gqa=True, **make(i))
        assert torch.equal(one[:, :, 0], prompt[:, :, i]), i
    few = fl.attention(q[:, :, 40:55], k, v, omega, enable_gqa=True, **make(40))
    assert torch.equal(few, prompt[:, :, 40:55])


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("factor", [0.02, 2.0], ids=["flat", "sharp"])
def test_rows_of_several_segments(alpha, factor):
    """More than 4,096 keys, which are searched in parts."""
    n = 9000
    q, k, v = operands(60, n, heads=2, kv_heads=1, width=8, factor=factor)
    omega = regularizer(alpha)
    together = fl.attention(q, k, v, omega, enable_gqa=True)
    for i in (0, 31, 59):
        alone = fl.attention(q[:, :, i : i + 1], k, v, omega, enable_gqa=True)
        assert torch.equal(alone[:, :, 0], together[:, :, i])
    exact = fl.attention(q.double(), k.double(), v.double(), omega, enable_gqa=True)
    assert (together - exact).abs().max() <= 2e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_batch_and_each_alone(alpha):
    q, k, v = operands(60, 200, batch=3)
    omega = regularizer(alpha)
    together = fl.attention(q, k, v, omega, enable_gqa=True)
    for b in range(3):
        alone = fl.attention(q[b], k[b], v[b], omega, enable_gqa=True)
        assert torch.equal(alone, together[b])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_with_and_without_a_gradient(alpha):
    for n in (20, 60, 200, 700):
        q, k, v = operands(n, n)
        followed = fl.attention(
            q.clone().requires_grad_(), k, v, regularizer(alpha), enable_gqa=True
        )
        assert torch.equal(followed, fl.attention(q, k, v, regularizer(alpha), enable_gqa=True))


@pytest.mark.parametrize("queries", [3, 130])
@pytest.mark.parametrize("name", STRUCTURES)
def test_any_number_of_threads(name, queries):
    q, k, v = operands(queries, 300)
    slopes = torch.linspace(0.01, 0.3, 4).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)] + [slopes]
    options = STRUCTURES[name](300 - queries)
    trained = P.ALiBi(4, slopes).shifted(300 - queries)
    mask = options.get("attn_mask")
    options["attn_mask"] = trained if mask is None else mask * trained
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            output = fl.attention(q, k, v, fl.Tsallis(1.5), enable_gqa=True, **options)
            results.append((output, *torch.autograd.grad(output.sin().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


PACKED = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"base": P.SlidingWindow(5)},
    "alibi": lambda: {"attn_mask": P.ALiBi(4)},
    "alibi as base": lambda: {"base": P.ALiBi(4) * P.Causal()},
    "sink and softcap": lambda: {"attn_mask": P.Sink(torch.zeros(4)), "softcap": 3.0},
}


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_and_each_alone(name, alpha):
    """Outputs and gradients, of lengths around blocks, of none and of one token."""
    lengths = torch.tensor([5, 0, 1, 47, 130, 48, 17])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    g = torch.Generator().manual_seed(0)
    tokens = int(starts[-1])
    q = (2 * torch.randn(tokens, 4, 24, generator=g)).requires_grad_()
    k, v = (torch.randn(tokens, 2, 24, generator=g).requires_grad_() for _ in range(2))
    options, omega = PACKED[name](), regularizer(alpha)
    packed = fl.varlen_attention(q, k, v, starts, None, omega, enable_gqa=True, **options)
    parts = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        own = (x[first:last].transpose(0, 1) for x in (q, k, v))
        parts.append(fl.attention(*own, omega, enable_gqa=True, **options).transpose(0, 1))
    looped = torch.cat(parts)
    assert torch.equal(packed, looped)
    slope = torch.randn(packed.shape, generator=g)
    found, wanted = (torch.autograd.grad(x, (q, k, v), slope) for x in (packed, looped))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("alpha", [1.3, 1.5])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("keys", [4097, 9000])
def test_segments_on_several_threads(alpha, queries, keys):
    """Few queries against many keys: the keys of one head are shared among threads."""
    q, k, v = operands(queries, keys, heads=4, kv_heads=2, width=8)
    q, late = q * 2, keys - queries
    structures = (
        {},
        {"base": P.Causal(offset=late)},
        {"base": P.Causal(offset=late) * P.SlidingWindow(4500)},
        {"base": P.Causal(offset=4090) * P.SlidingWindow(60)},  # rows begin on both sides of 4096
        {"attn_mask": P.Sink(torch.tensor([0.0, 3.0, 8.0, 40.0]))},
        {"base": P.Preference(torch.linspace(-1, 1, keys))},
    )
    before = torch.get_num_threads()
    for options in structures:
        results = []
        try:
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                call = fl.attention(q, k, v, fl.Tsallis(alpha), enable_gqa=True, **options)
                results.append(call)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(other, results[0]) for other in results)
        exact = (x.double() for x in (q, k, v))
        wanted = fl.attention(*exact, fl.Tsallis(alpha), enable_gqa=True, **options)
        assert (results[0] - wanted).abs().max() <= 2e-5
