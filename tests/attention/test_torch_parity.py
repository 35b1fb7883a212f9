"""Softmax attention is torch's, and any attention can stand in its place."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
from tests.attention.cases import DOUBLE, INF, chance, dense, draw, largest_difference

pytestmark = pytest.mark.usefixtures("kernels")


def operands(dtype=DOUBLE, d_value=8, kv_heads=4):
    q, k, v = draw(0, 2, 4, 7, 8), draw(1, 2, kv_heads, 9, 8), draw(2, 2, kv_heads, 9, d_value)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


ARGUMENTS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": chance(3, 0.7, 2, 1, 7, 9)},
    "float": {"attn_mask": draw(4, 7, 9)},
    "hidden by float": {"attn_mask": draw(4, 7, 9).masked_fill(chance(5, 0.3, 7, 9), -INF)},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "grouped": {"enable_gqa": True},
    "grouped and causal": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("d_value", [8, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_values_and_gradients_are_those_of_torch(name, dtype, d_value):
    options = dict(ARGUMENTS[name])
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype)
    results = []
    for attend in (fl.attention, sdpa):
        leaves = operands(dtype, d_value, 2 if "grouped" in name else 4)
        output = attend(*leaves, **options)
        results.append(
            [output, *torch.autograd.grad(output, leaves, draw(9, *output.shape, dtype=dtype))]
        )
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert largest_difference(ours, theirs) <= 64 * torch.finfo(dtype).eps * theirs.abs().max()


def test_parity_can_fail():
    q, k, v = operands()
    off = largest_difference(fl.attention(q, k, v, fl.Shannon(1.001)), sdpa(q, k, v))
    assert off > 1e4 * 64 * torch.finfo(DOUBLE).eps


def test_rows_that_torch_leaves_undefined_are_zero():
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[3] = False
    leaves = operands()
    output = fl.attention(*leaves, attn_mask=mask)
    theirs = sdpa(*leaves, attn_mask=mask)
    others = torch.arange(7) != 3
    assert largest_difference(output[:, :, others], theirs[:, :, others]) <= 1e-14
    assert (output[:, :, 3] == 0).all()
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, :, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_runs_in_the_precision_of_torch(dtype):
    q, k, v = (x.detach().float().requires_grad_() for x in operands())
    with torch.autocast("cpu", dtype=dtype):
        for regularizer in (fl.Shannon(), fl.Tsallis(1.5)):
            for options in ({}, {"base": fl.priors.Causal()}, {"attn_mask": draw(4, 7, 9)}):
                output = fl.attention(q, k, v, regularizer, **options)
                assert output.dtype == sdpa(q, k, v).dtype == dtype
                expected = dense(q, k, v, regularizer, **options)
                assert largest_difference(output, expected) <= 0.05
    (gradient,) = torch.autograd.grad(output.float().sum(), q)
    assert gradient.dtype == torch.float32
    assert gradient.isfinite().all()


class Block(nn.Module):
    """A model that knows nothing of fenchel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(8, 24, dtype=DOUBLE)

    def forward(self, x, **options):
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        self.seen = (q, k, v)
        return nn.functional.scaled_dot_product_attention(q, k, v, **options)


X = draw(3, 2, 5, 8)


@pytest.mark.parametrize("regularizer", [fl.Tsallis(1.5), fl.Norm(2.0), fl.Shannon(0.5)], ids=str)
def test_a_module_uses_the_regularizer_inside_the_block(regularizer):
    block = Block()
    before = block(X, is_causal=True)
    with fl.replace_sdpa(regularizer):
        inside = block(X, is_causal=True)
    reference = dense(*block.seen, regularizer, is_causal=True)
    assert largest_difference(inside, reference) <= 1e-13
    assert largest_difference(inside, before) > 1e-3
    assert torch.equal(block(X, is_causal=True), before)
    actual, right = (
        torch.autograd.grad(y.square().sum(), block.projection.weight, retain_graph=True)[0]
        for y in (inside, reference)
    )
    assert largest_difference(actual, right) <= 1e-12


def test_torchs_order_of_arguments():
    q, k, v = (x.detach() for x in operands())
    mask = chance(3, 0.7, 7, 9)
    with fl.replace_sdpa(fl.Tsallis(1.5)):
        positional = sdpa(q, k, v, mask, 0.0, True)
        named = sdpa(query=q, key=k, value=v, attn_mask=mask, is_causal=True, scale=0.3)
        torch.manual_seed(5)
        dropped = sdpa(q, k, v, None, 0.5)
        grouped = sdpa(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert torch.equal(
        positional, fl.attention(q, k, v, fl.Tsallis(1.5), attn_mask=mask, is_causal=True)
    )
    assert torch.equal(
        named, fl.attention(q, k, v, fl.Tsallis(1.5), attn_mask=mask, is_causal=True, scale=0.3)
    )
    torch.manual_seed(5)
    assert torch.equal(dropped, fl.attention(q, k, v, fl.Tsallis(1.5), dropout_p=0.5))
    expected = fl.attention(q, k[:, :2], v[:, :2], fl.Tsallis(1.5), enable_gqa=True)
    assert torch.equal(grouped, expected)


def test_blocks_nest_and_end():
    q, k, v = (x.detach() for x in operands())
    plain = sdpa(q, k, v)
    outer, inner = fl.replace_sdpa(fl.Tsallis(1.5)), fl.replace_sdpa(fl.Tsallis(2.0))
    expected = {alpha: dense(q, k, v, fl.Tsallis(alpha)) for alpha in (1.5, 2.0)}
    with outer:
        with inner:
            assert largest_difference(sdpa(q, k, v), expected[2.0]) <= 1e-13
        assert largest_difference(sdpa(q, k, v), expected[1.5]) <= 1e-13
    assert torch.equal(sdpa(q, k, v), plain)
    with outer:  # once more
        assert largest_difference(sdpa(q, k, v), expected[1.5]) <= 1e-13
    assert torch.equal(sdpa(q, k, v), plain)


def test_a_block_ends_with_an_exception():
    q, k, v = (x.detach() for x in operands())
    plain = sdpa(q, k, v)
    with pytest.raises(ZeroDivisionError), fl.replace_sdpa(fl.Tsallis(2.0)):
        _ = 1 / 0
    assert torch.equal(sdpa(q, k, v), plain)
    with pytest.raises(ValueError, match="at least two axes"), fl.replace_sdpa(fl.Tsallis(2.0)):
        sdpa(q[0, 0, 0], k, v)
    assert torch.equal(sdpa(q, k, v), plain)


def test_softmax_inside_a_block_of_something_else_stays_softmax():
    """Its path calls torch's operator, which the outer block must not catch."""
    q, k, v = (x.detach() for x in operands())
    plain = sdpa(q, k, v)
    with fl.replace_sdpa(fl.Tsallis(2.0)):
        assert largest_difference(fl.attention(q, k, v, fl.Shannon()), plain) <= 1e-13
        with fl.replace_sdpa(fl.Shannon()):
            assert largest_difference(sdpa(q, k, v), plain) <= 1e-13


def test_a_backward_pass_inside_a_block_is_that_of_the_forward_pass_outside(tiles):
    """Tiles are made again in the backward pass, wherever that happens."""
    tiles(1)
    q, k, v = draw(0, 1, 40, 4), draw(1, 1, 30, 4), draw(2, 1, 30, 4)
    mask = draw(3, 40, 30)
    gradients = []
    for regularizer in (None, fl.Tsallis(2.0)):
        leaf = q.clone().requires_grad_()
        loss = fl.attention(leaf, k, v, attn_mask=mask).square().sum()
        if regularizer is None:
            loss.backward()
        else:
            with fl.replace_sdpa(regularizer):
                loss.backward()
        gradients.append(leaf.grad)
    assert largest_difference(*gradients) <= 1e-13


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_is_out_of_reach_and_says_so(training):
    """Torch keeps its attention from every mode; staying with softmax in silence would be worse."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=DOUBLE)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dtype=DOUBLE)
    attention.train(training), layer.train(training)
    with torch.no_grad(), fl.replace_sdpa(fl.Tsallis(2.0)):
        for call in (lambda: attention(X, X, X, need_weights=False), lambda: layer(X)):
            with pytest.raises(RuntimeError, match=r"fenchel\.nn\.convert"):
                call()


def test_a_block_holds_for_its_own_thread():
    q, k, v = (x.detach() for x in operands())
    plain, actual = sdpa(q, k, v), []
    with fl.replace_sdpa(fl.Tsallis(2.0)):
        other = threading.Thread(target=lambda: actual.append(sdpa(q, k, v)))
        other.start()
        other.join()
        assert largest_difference(sdpa(q, k, v), plain) > 1e-3
    assert torch.equal(actual[0], plain)


def test_other_functions_are_left_alone():
    with fl.replace_sdpa(fl.Tsallis(2.0)):
        assert torch.equal(torch.softmax(X, -1), X.softmax(-1))
        assert torch.allclose(torch.softmax(X, -1).sum(-1), torch.ones(2, 5, dtype=DOUBLE))


@pytest.mark.parametrize("wrong", [fl.Tsallis, "entmax", 1.5, None])
def test_a_block_needs_a_regularizer(wrong):
    with pytest.raises(TypeError, match=r"must be a Regularizer such as Tsallis\(1.5\)"):
        fl.replace_sdpa(wrong)
