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


def _spoil(q, k, v, grad, where):
    """One number of the first head that is not finite."""
    for name, content in where.items():
        {"q": q, "k": k, "v": v, "grad": grad}[name][0, 0, 20, 3] = content


INF, NAN = float("inf"), float("nan")
HIDDEN = (torch.arange(150) != 20) | (torch.arange(100)[:, None] % 2 == 0)
STRANGE = {
    "+inf in a key, capped": ({"k": INF}, {"softcap": 5.0}),
    "-inf in a key, capped": ({"k": -INF}, {"softcap": 5.0}),
    "+inf in a key, hidden from some": ({"k": INF}, {"softcap": 5.0, "attn_mask": HIDDEN}),
    "NaN in a key, hidden from some": ({"k": NAN}, {"softcap": 5.0, "attn_mask": HIDDEN}),
    "-inf in a key beside a bias": ({"k": -INF}, {"attn_mask": P.ALiBi(2)}),
    "-inf in a key beside a stored bias": ({"k": -INF}, {"attn_mask": torch.zeros(100, 150)}),
    "inf in a query, capped": ({"q": INF}, {"softcap": 5.0}),
    "inf in a query, causal": ({"q": INF}, {"is_causal": True}),
    "NaN in a query": ({"q": NAN}, {"is_causal": True}),
    "NaN in a query beside a sink": ({"q": NAN}, {"attn_mask": P.Sink(torch.tensor([1.0, 5.0]))}),
    "NaN in a value": ({"v": NAN}, {"is_causal": True}),
    "inf in a value": ({"v": INF}, {}),
    "NaN in a gradient": ({"grad": NAN}, {"is_causal": True}),
    "inf in a gradient": ({"grad": INF}, {"softcap": 5.0}),
    "gains that overflow": ({"v": 1e200, "grad": 1e200}, {}),
}


def _strange_results(monkeypatch, name, alpha, room, scale, threads=1):
    monkeypatch.setattr(kernels, "ROOM", room)
    monkeypatch.setattr(plans, "_PLANS", {})
    where, options = STRANGE[name]
    g = torch.Generator().manual_seed(1)
    sizes = (100, 150, 150, 100)
    q, k, v, grad = (torch.randn(1, 2, n, 16, generator=g, dtype=torch.float64) for n in sizes)
    _spoil(q, k, v, grad, where)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = fl.attention(scale * q, k, v, fl.Tsallis(alpha), **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
    finally:
        torch.set_num_threads(before)


def assert_same_numbers(some, others, tolerance):
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (x.nan_to_num(0.0, 0.0, 0.0) for x in (one, other))
        assert (one - other).abs().max() <= tolerance * (1 + other.abs().max())


def test_the_check_notices_nan_that_spreads():
    one = [torch.tensor([1.0, NAN])]
    assert_same_numbers(one, [torch.tensor([1.0, NAN])], 0)
    for other in ([NAN, NAN], [1.0, INF], [1.0, 1.0], [1.1, NAN]):
        with pytest.raises(AssertionError):
            assert_same_numbers(one, [torch.tensor(other)], 1e-6)


@pytest.mark.parametrize("scale", [0.3, 8.0])  # most keys carry weight, or few
@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("name", STRANGE)
def test_strange_numbers_reach_the_same_keys_with_and_without_room(monkeypatch, name, alpha, scale):
    """Saved, found again or as a tile: what a row adds is a sum over its support."""
    saved = _strange_results(monkeypatch, name, alpha, 10_000, scale)
    tolerance = 1e-11 if alpha <= 2 else 1e-7
    for room in (1, 20):
        others = _strange_results(monkeypatch, name, alpha, room, scale)
        assert_same_numbers(others, saved, tolerance)
        again = _strange_results(monkeypatch, name, alpha, room, scale, threads=2)
        assert_same_numbers(again, others, 0)


@pytest.mark.parametrize("room", [10_000, 1])
@pytest.mark.parametrize("name", ["+inf in a key, capped", "NaN in a query", "NaN in a gradient"])
def test_rows_that_do_not_see_a_strange_number_keep_their_derivatives(monkeypatch, name, room):
    """The other head, and under a causal mask the keys beyond the row that is NaN."""
    output, dq, dk, dv = _strange_results(monkeypatch, name, 1.5, room, 0.3)
    assert all(x[:, 1].isfinite().all() for x in (output, dq, dk, dv))
    if STRANGE[name][1] == {"is_causal": True}:
        others = torch.arange(100) != 20
        assert dq[:, 0, others].isfinite().all()
        assert dq[:, 0, 20].isnan().any()
        assert dk[:, 0, 21:].isfinite().all()
        assert dv[:, 0, 21:].isfinite().all()
