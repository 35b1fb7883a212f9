"""Tiles change nothing but the memory: that grows with the tokens, not with their square."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fenchel as fl
from tests.attention.cases import (
    DOUBLE,
    REGULARIZERS,
    assert_agrees,
    assert_within,
    chance,
    dense,
    derivatives,
    draw,
    largest,
    make_case,
)

pytestmark = pytest.mark.usefixtures("kernels")

SMALL = 1  # the smallest tiles there are
LENGTH = {"lead": (2, 2), "queries": 53, "keys": 21, "d": 3, "d_value": 2}


CASES = {
    name: make_case(regularizer, **LENGTH, options={"is_causal": name != "budget"})
    for name, regularizer in REGULARIZERS.items()
}
for _name, _regularizer in {"softmax": fl.Shannon(), "entmax": fl.Tsallis(1.5)}.items():
    CASES |= {
        f"{_name}, bool mask": make_case(
            _regularizer, **LENGTH, options={"attn_mask": chance(1, 0.5, 2, 1, 53, 21)}
        ),
        f"{_name}, mask of one row": make_case(
            _regularizer, **LENGTH, options={"attn_mask": chance(1, 0.5, 21), "is_causal": True}
        ),
        f"{_name}, float mask": make_case(
            _regularizer,
            **LENGTH,
            options=lambda x: {"attn_mask": x["mask"]},
            mask=draw(5, 2, 53, 21),
        ),
        f"{_name}, constant float mask": make_case(
            _regularizer, **LENGTH, options={"attn_mask": draw(5, 2, 53, 21)}
        ),
        f"{_name}, base": make_case(
            _regularizer, **LENGTH, options=lambda x: {"base": x["base"]}, base=draw(6, 53, 1).exp()
        ),
        f"{_name}, constant base": make_case(
            _regularizer, **LENGTH, options={"base": draw(6, 53, 21).exp()}
        ),
        f"{_name}, prior": make_case(
            _regularizer,
            **LENGTH,
            options=lambda x: {"base": fl.priors.Causal() * fl.priors.ALiBi(2, x["slopes"])},
            slopes=draw(7, 2).abs(),
        ),
        f"{_name}, grouped": make_case(
            _regularizer,
            **{**LENGTH, "lead": (2, 4)},
            kv_lead=(2, 2),
            options={"enable_gqa": True, "base": fl.priors.ALiBi(4)},
        ),
    }
CASES["alpha a query"] = make_case(
    lambda x: fl.Tsallis(x["alpha"], x["temperature"]),
    **LENGTH,
    alpha=1.1 + draw(8, 53).abs().clamp(max=2),
    temperature=draw(9, 2, 53).exp(),
)
CASES["alpha a head"] = make_case(
    lambda x: fl.Tsallis(x["alpha"]), **LENGTH, alpha=1.1 + draw(8, 2, 1).abs()
)
CASES["budget a query"] = make_case(lambda x: fl.Budget(x["k"]), **LENGTH, k=1 + draw(8, 53).abs())


@pytest.mark.parametrize("name", CASES)
def test_small_tiles_give_the_same(name, tiles):
    whole = derivatives(fl.attention, CASES[name])
    tiles(SMALL)
    cut = derivatives(fl.attention, CASES[name])
    for key, expected in whole.items():
        assert_within(cut[key], expected, 1e-12 * max(0.1, largest(expected)), key)
    assert_agrees(fl.attention, CASES[name])


@pytest.mark.parametrize("queries", [1, 15, 16, 17, 31, 32, 33])
def test_the_last_tile_may_be_short(queries, tiles):
    tiles(SMALL)
    for regularizer in (fl.Shannon(), fl.Tsallis(1.5)):
        alpha = make_case(
            regularizer,
            lead=(2,),
            queries=queries,
            options={"base": fl.priors.Causal() * fl.priors.ALiBi(2), "is_causal": True},
        )
        assert_agrees(fl.attention, alpha)


def test_a_tile_that_forgets_its_position_is_noticed(tiles, monkeypatch):
    """The comparison above fails if a tile believes that it is the first."""
    from fenchel._attention.call import AttentionCall

    tiles(SMALL)
    cut = AttentionCall.tile
    monkeypatch.setattr(
        AttentionCall,
        "tile",
        lambda self, *rows: AttentionCall(**{**vars(cut(self, *rows)), "first": 0}),
    )
    with pytest.raises(AssertionError, match="off by"):
        assert_agrees(fl.attention, CASES["norm"])


class Allocations(TorchDispatchMode):
    """The largest number of elements that any operation's result holds in memory."""

    def __init__(self):
        super().__init__()
        self.largest, self.where = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # Of the storage, not of the view: an expanded axis costs nothing.
            if isinstance(x, torch.Tensor):
                held = x.untyped_storage().nbytes() // x.element_size()
                if held > self.largest:
                    self.largest, self.where = held, str(func)
        return result


N = 320
MEMORY = {
    "plain": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": (torch.arange(N) < 200).expand(1, 1, 1, N)},
    "float mask of keys": {"attn_mask": draw(1, N, dtype=torch.float32)},
    "prior": {"base": fl.priors.Causal() * fl.priors.ALiBi(2)},
    "base of keys": {"base": draw(1, N, dtype=torch.float32).exp()},
    "dropout": {"dropout_p": 0.2},
    "other components": {},
    "grouped": {"enable_gqa": True},
}


def peak(attend, regularizer, options, *, backward=True, d_value=8, kv_heads=2):
    q = draw(0, 1, 2, N, 8, dtype=torch.float32).requires_grad_(backward)
    k = draw(1, 1, kv_heads, N, 8, dtype=torch.float32).requires_grad_(backward)
    v = draw(2, 1, kv_heads, N, d_value, dtype=torch.float32).requires_grad_(backward)
    with Allocations() as seen:
        output = attend(q, k, v, regularizer, **options)
        if backward:
            output.square().sum().backward()
    return seen


def test_the_watch_sees_a_dense_computation():
    assert peak(dense, fl.Tsallis(1.5), {}, backward=False).largest >= 2 * N * N
    assert peak(dense, fl.Shannon(), {}).largest >= 2 * N * N

    def in_the_backward_pass_only(q, k, v, *_):
        class Late(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient + (gradient @ gradient.mT).sum()

        return Late.apply(q)

    assert peak(in_the_backward_pass_only, None, {}, backward=False).largest < N * N
    assert peak(in_the_backward_pass_only, None, {}).largest >= N * N


@pytest.fixture
def small_room(monkeypatch):
    """The kernels save ROOM keys a row, more than this test has keys."""
    monkeypatch.setattr(sys.modules["fenchel._kernels.attention_call"], "ROOM", 8)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.5)], ids=str)
def test_no_tensor_of_queries_times_keys(regularizer, name, backward, tiles, small_room):
    tiles(SMALL)
    shape = {"other components": {"d_value": 5}, "grouped": {"kv_heads": 1}}.get(name, {})
    seen = peak(fl.attention, regularizer, MEMORY[name], backward=backward, **shape)
    assert 0 < seen.largest < N * N // 4, f"{seen.where} made {seen.largest} numbers"


@pytest.mark.parametrize("name", ["tsallis 3", "norm", "budget", "fused"])
def test_no_tensor_of_queries_times_keys_for_the_others(name, tiles, small_room):
    tiles(SMALL)
    seen = peak(fl.attention, REGULARIZERS[name], {})
    assert 0 < seen.largest < N * N // 4, f"{seen.where} made {seen.largest} numbers"


def test_the_sparse_solution_holds_no_such_tensor_either(tiles):
    tiles(SMALL)
    seen = peak(
        lambda q, k, v, r: fl.attention_solution(4 * q, k, v, r).gap,
        fl.Tsallis(2.0),
        {},
        backward=False,
    )
    assert 0 < seen.largest < N * N // 4, f"{seen.where} made {seen.largest} numbers"


def test_second_derivatives_through_tiles(tiles):
    """Each tile is made again, and differentiated again."""
    q, k, v = draw(0, 2, 33, 2), draw(1, 2, 6, 2), draw(2, 2, 6, 2)

    def second(attend, regularizer):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output = attend(*leaves, regularizer, is_causal=True)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    tiles(SMALL)
    for regularizer in (fl.Shannon(), fl.Tsallis(1.5), fl.Tsallis(2.0), fl.Norm(2.0)):
        for actual, expected in zip(
            second(fl.attention, regularizer), second(dense, regularizer), strict=True
        ):
            assert expected.dtype == DOUBLE
            assert expected.abs().max() > 1e-3
            assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max()
