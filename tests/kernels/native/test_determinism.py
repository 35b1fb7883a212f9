"""The same bits from run to run, for any number of threads, and the same numbers from a block that
overflowed its room for saved keys as from one that did not."""

import pytest
import torch

import fenchel as fl
from fenchel._attention import plans
from fenchel._kernels import attention_call as kernels
from tests.kernels.native.cases import needs_library

pytestmark = needs_library

SHAPES = [  # batch, heads, key heads, queries, keys, components, value components
    (1, 1, 1, 300, 300, 32, 16),
    (1, 1, 1, 97, 513, 17, 5),
    (2, 8, 2, 100, 130, 16, 24),
    (3, 5, 5, 49, 47, 16, 33),
]


def _results(shape, dtype, alpha, threads=1, **options):
    batch, heads, kv, queries, keys, dim, width = shape
    g = torch.Generator().manual_seed(1)

    def leaf(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    query, key, value = leaf(batch, heads, queries, dim), leaf(batch, kv, keys, dim), None
    value = leaf(batch, kv, keys, width)
    mask = leaf(queries, keys)
    alphas = torch.full((heads, 1), alpha, dtype=torch.float64, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = fl.attention(
            *(query, key, value, fl.Tsallis(alphas)),
            attn_mask=mask,
            is_causal=queries == keys,
            enable_gqa=heads != kv,
            **options,
        )
        incoming = torch.randn(output.shape, generator=g, dtype=torch.float64).to(dtype)
        leaves = (query, key, value, alphas)
        return [output.detach(), *torch.autograd.grad(output, leaves, incoming)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("room", [384, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_any_number_of_threads(monkeypatch, shape, dtype, room):
    monkeypatch.setattr(kernels, "ROOM", room)
    for alpha in (1.1, 1.5, 3.0):
        first = _results(shape, dtype, alpha)
        for threads in (1, 2, 3, 8):
            again = _results(shape, dtype, alpha, threads)
            for one, other in zip(first, again, strict=True):
                assert torch.equal(one, other), (alpha, threads)


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.3, 1.5, 2.0, 3.0])
def test_overflowing_blocks_agree(monkeypatch, room, alpha):
    for shape in SHAPES:
        for dropout in (0.0, 0.5):
            torch.manual_seed(3)
            monkeypatch.setattr(kernels, "ROOM", 10_000)
            sparse = _results(shape, torch.float64, alpha, dropout_p=dropout)
            torch.manual_seed(3)
            monkeypatch.setattr(kernels, "ROOM", room)
            dense = _results(shape, torch.float64, alpha, dropout_p=dropout)
            assert torch.equal(dense[0], sparse[0])
            for one, other in zip(dense[1:], sparse[1:], strict=True):
                tolerance = 1e-11 if alpha <= 2 else 1e-7
                assert (one - other).abs().max() <= tolerance * (1 + other.abs().max())


P = fl.priors
STRUCTURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"attn_mask": P.ALiBi(2)},
    "stored bias": {"attn_mask": torch.randn(700, 700, generator=torch.Generator().manual_seed(5))},
    "masses": {"base": P.Preference(torch.linspace(-1, 1, 700))},
    "sink": {"attn_mask": P.Sink(torch.tensor([1.0, 5.0]))},
    "softcap": {"softcap": 50.0},
    "window": {"base": P.SlidingWindow(200)},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("name", STRUCTURES)
def test_supports_without_room_are_found_again(monkeypatch, name, alpha, dtype):
    """Few keys carry weight, and none of them is saved: the derivatives are the same bits."""

    def results(room):
        monkeypatch.setattr(kernels, "ROOM", room)
        monkeypatch.setattr(plans, "_PLANS", {})
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 700, 32, dtype=dtype, requires_grad=True) for _ in range(3))
        output = fl.attention(8 * q, k, v, fl.Tsallis(alpha), **STRUCTURES[name])
        return [output, *torch.autograd.grad(output.sin().sum(), (q, k, v))]

    for one, other in zip(results(700), results(1), strict=True):
        assert torch.equal(one, other)
