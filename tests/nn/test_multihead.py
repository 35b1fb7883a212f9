"""MultiheadAttention against torch's own, and where ours is meant to differ."""

import math

import pytest
import torch

import fenchel as fl
import fenchel.nn as fnn
from tests.nn.pairs import (
    BATCH,
    HEADS,
    KEYS,
    QUERIES,
    WIDTH,
    assert_equal,
    assert_equal_gradients,
    gradients,
    operands,
    pair,
)

OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "own widths": {"kdim": 8, "vdim": 10, "batch_first": True},
    "one own width, no bias": {"vdim": 10, "bias": False},
    "bias kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True, "batch_first": True},
    "everything": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 8, "batch_first": True},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
with_weights = pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "lean"])


def draw_masks(kind, batched=True):
    """Arguments of forward; every query keeps at least the first two keys."""
    generator = torch.Generator().manual_seed(7)
    heads = (BATCH if batched else 1) * HEADS
    flat = torch.rand(QUERIES, KEYS, generator=generator) < 0.4
    each = torch.rand(heads, QUERIES, KEYS, generator=generator) < 0.4
    padding = torch.rand(BATCH, KEYS, generator=generator) < 0.4
    flat[:, :2] = each[..., :2] = padding[:, :2] = False
    padding = padding if batched else padding[0]

    def bias(hidden):
        noise = torch.randn(hidden.shape, dtype=torch.float64, generator=generator)
        return noise.masked_fill(hidden, -math.inf)

    return {
        "none": {},
        "flat": {"attn_mask": flat},
        "each": {"attn_mask": each},
        "padding": {"key_padding_mask": padding},
        "flat and padding": {"attn_mask": flat, "key_padding_mask": padding},
        "each and padding": {"attn_mask": each, "key_padding_mask": padding},
        "flat bias": {"attn_mask": bias(flat)},
        "each bias": {"attn_mask": bias(each)},
        "padding bias": {"key_padding_mask": bias(padding)},
        "both biases": {"attn_mask": bias(each), "key_padding_mask": bias(padding)},
    }[kind]


MASKS = ("none", "flat", "each", "padding", "flat and padding", "each and padding")
BIASES = ("flat bias", "each bias", "padding bias", "both biases")


@by_options
@with_weights
@pytest.mark.parametrize("kind", MASKS + BIASES)
def test_shannon_equals_torch(options, need_weights, kind):
    theirs, ours = pair(**options)
    inputs, masks = operands(ours), draw_masks(kind)
    expected, weights = theirs(*inputs, need_weights=need_weights, **masks)
    actual, our_weights = ours(*inputs, need_weights=need_weights, **masks)
    assert_equal(actual, expected)
    if need_weights:
        assert_equal(our_weights, weights)
    else:
        assert our_weights is None
    expected, actual = (gradients(x, inputs, y) for x, y in ((theirs, expected), (ours, actual)))
    assert_equal_gradients(actual, expected)


@by_options
@with_weights
@pytest.mark.parametrize("kind", ["none", "each", "flat and padding", "both biases"])
def test_unbatched_equals_torch(options, need_weights, kind):
    theirs, ours = pair(**options)
    inputs, masks = operands(ours, batched=False), draw_masks(kind, batched=False)
    for average in (True, False):
        flags = {"need_weights": need_weights, "average_attn_weights": average}
        expected, weights = theirs(*inputs, **flags, **masks)
        actual, our_weights = ours(*inputs, **flags, **masks)
        assert_equal(actual, expected)
        assert (our_weights is None) == (weights is None)
        if weights is not None:
            assert_equal(our_weights, weights)


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_projects_at_once_and_equals_torch(batch_first):
    theirs, ours = pair(batch_first=batch_first)
    x = operands(ours)[0]
    expected, actual = theirs(x, x, x)[0], ours(x, x, x)[0]
    assert_equal(actual, expected)
    assert_equal_gradients(gradients(ours, [x], actual), gradients(theirs, [x], expected))


def test_arguments_keep_their_order():
    theirs, ours = pair(batch_first=True)
    inputs = operands(ours)
    masks = draw_masks("each and padding")
    rest = (masks["key_padding_mask"], True, masks["attn_mask"], False)
    for expected, actual in zip(theirs(*inputs, *rest), ours(*inputs, *rest), strict=True):
        assert_equal(actual, expected)


@with_weights
def test_a_float_mask_has_a_gradient(need_weights):
    theirs, ours = pair()
    inputs = operands(ours)
    bias = torch.randn(QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    expected, actual = (
        gradients(layer, [bias], layer(*inputs, attn_mask=bias, need_weights=need_weights)[0])
        for layer in (theirs, ours)
    )
    assert expected[-1].abs().max() > 1e-3
    assert_equal(actual[-1], expected[-1])


def test_bool_and_float_masks_mix():
    _, ours = pair(add_zero_attn=True)
    inputs = operands(ours)
    flat = draw_masks("flat")["attn_mask"]
    padding = draw_masks("padding bias")["key_padding_mask"]
    bias = torch.zeros(QUERIES, KEYS, dtype=torch.float64).masked_fill(flat, -math.inf)
    expected = ours(*inputs, attn_mask=bias, key_padding_mask=padding)
    actual = ours(*inputs, attn_mask=flat, key_padding_mask=padding)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1], expected[1])


@by_options
def test_the_same_seed_gives_the_same_parameters_under_the_same_names(options):
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, **options)
    torch.manual_seed(3)
    ours = fnn.MultiheadAttention(WIDTH, HEADS, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@by_options
def test_state_dicts_load_both_ways(options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    ours = fnn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    inputs = operands(ours)
    assert (ours(*inputs)[0] - theirs(*inputs)[0]).abs().max() > 1e-3
    theirs.load_state_dict(ours.state_dict())
    assert_equal(ours(*inputs)[0], theirs(*inputs)[0])
    fresh = fnn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    fresh.load_state_dict(theirs.state_dict())
    assert_equal(fresh(*inputs)[0], theirs(*inputs)[0])


@pytest.mark.parametrize(
    "regularizer",
    [fl.Tsallis(1.5), fl.Tsallis(2.0, 0.5), fl.Shannon(0.3), fl.Norm(2.0), fl.Budget(2.0)],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["none", "each and padding", "both biases"])
def test_weights_are_the_solution_and_agree_with_the_output(regularizer, kind):
    theirs, ours = pair(batch_first=True)
    ours.hold(regularizer)
    inputs, masks = operands(ours), draw_masks(kind)
    output, weights = ours(*inputs, average_attn_weights=False, **masks)
    lean, nothing = ours(*inputs, need_weights=False, **masks)
    assert nothing is None
    assert_equal(lean, output, 1e-11)
    assert (output - theirs(*inputs, **masks)[0]).abs().max() > 1e-3
    hidden = masks.get("attn_mask", torch.zeros(()))
    hidden = hidden if hidden.dtype == torch.bool else hidden.isneginf()
    if kind != "none":
        assert not weights.reshape(-1, QUERIES, KEYS)[hidden].any()
    mass = 2.0 if isinstance(regularizer, fl.Budget) else 1.0
    assert_equal(weights.sum(-1), torch.full((BATCH, HEADS, QUERIES), mass).double())


def test_tsallis_weights_equal_solve_on_the_scores():
    theirs, ours = pair(batch_first=True, bias=False)
    ours.hold(fl.Tsallis(1.7))
    query, key, value = operands(ours)
    w_q, w_k, _ = theirs.in_proj_weight.chunk(3)
    q = (query @ w_q.T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k = (key @ w_k.T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    expected = fl.solve(q @ k.mT / math.sqrt(WIDTH // HEADS), fl.Tsallis(1.7)).weights
    assert (expected == 0).any()
    assert_equal(ours(query, key, value, average_attn_weights=False)[1], expected)
    assert_equal(ours(query, key, value)[1], expected.mean(1))


# Rows that see nothing


@with_weights
@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.5)], ids=repr)
@pytest.mark.parametrize("bias", [False, True], ids=["bool", "float"])
def test_a_query_that_sees_no_key_gets_zeros(need_weights, regularizer, bias):
    theirs, ours = pair(batch_first=True)
    ours.hold(regularizer)
    inputs = operands(ours)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    if bias:
        padding = torch.zeros(BATCH, KEYS).double().masked_fill(padding, -math.inf)
    output, weights = ours(*inputs, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(output[1], ours.out_proj.bias.expand(QUERIES, WIDTH))
    if need_weights:
        assert not weights[1].any()
        assert theirs(*inputs, key_padding_mask=padding)[0][1].isnan().all()
    actual = gradients(ours, inputs, output)
    assert all(gradient.isfinite().all() for gradient in actual)
    for gradient in actual[-3:]:
        assert not gradient[1].any()
        assert gradient[0].any()


def test_appended_keys_are_seen_by_all():
    _, ours = pair(add_zero_attn=True)
    padding = torch.ones(BATCH, KEYS, dtype=torch.bool)
    weights = ours(*operands(ours), key_padding_mask=padding)[1]
    assert torch.equal(weights[..., -1], torch.ones(BATCH, QUERIES).double())


# Causality


def causal(tokens, kind):
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return (
        future
        if kind == "bool"
        else torch.zeros(tokens, tokens).double().masked_fill(future, -math.inf)
    )


@with_weights
@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.5)], ids=repr)
def test_the_future_does_not_leak(need_weights, hint, kind, regularizer):
    _, ours = pair(batch_first=True)
    ours.hold(regularizer)
    x = operands(ours, queries=6)[0].detach()
    changed = x.clone()
    changed[:, 4] += 3.0
    flags = {"need_weights": need_weights, "attn_mask": causal(6, kind), "is_causal": hint}
    before, after = ours(x, x, x, **flags)[0], ours(changed, changed, changed, **flags)[0]
    assert_equal(before[:, :4], after[:, :4], 1e-14)
    assert ((before - after)[:, 4:].abs().amax((0, 2)) > 1e-3).all()


@with_weights
@pytest.mark.parametrize("padded", [True, False])
def test_the_hint_equals_torch_and_the_mask_alone(need_weights, padded):
    theirs, ours = pair(batch_first=True)
    x = operands(ours, queries=KEYS)[0]
    flags = {"need_weights": need_weights, "attn_mask": causal(KEYS, "bool")}
    if padded:
        flags["key_padding_mask"] = draw_masks("padding")["key_padding_mask"]
    expected = theirs(x, x, x, is_causal=True, **flags)[0]
    assert_equal(ours(x, x, x, is_causal=True, **flags)[0], expected)
    assert_equal(ours(x, x, x, **flags)[0], expected)


def test_the_hint_keeps_appended_keys_visible():
    """Torch's own module hides them here, unless asked for weights; ours gives one answer."""
    theirs, ours = pair(add_bias_kv=True)
    x = operands(ours, queries=6)[0]
    flags = {"attn_mask": causal(6, "bool"), "is_causal": True}
    expected, other = theirs(x, x, x, **flags)[0], theirs(x, x, x, need_weights=False, **flags)[0]
    assert (expected - other).abs().max() > 1e-3
    assert_equal(ours(x, x, x, need_weights=False, **flags)[0], expected)


# Dropout


def test_dropout_with_weights_equals_torch_under_one_seed():
    theirs, ours = pair(dropout=0.4, batch_first=True)
    inputs = operands(ours)
    torch.manual_seed(11)
    expected = theirs(*inputs, average_attn_weights=False)
    torch.manual_seed(11)
    actual = ours(*inputs, average_attn_weights=False)
    assert 0.2 < (actual[1] == 0).double().mean() < 0.6
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1], expected[1])


@with_weights
def test_dropout_drops_its_share_in_training_only(need_weights):
    layer = fnn.MultiheadAttention(1, 1, dropout=0.3, bias=False, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.fill_(1.0)
        layer.out_proj.weight.fill_(1.0)
    x = torch.ones(4000, 1, 1)  # one key: its weight is one or dropped
    torch.manual_seed(0)
    output = layer(x, x, x, need_weights=need_weights)[0]
    dropped = output == 0
    assert abs(dropped.double().mean() - 0.3) < 0.03
    assert_equal(output[~dropped], torch.full_like(output[~dropped], 1 / 0.7), 1e-6)
    layer.eval()
    assert torch.equal(layer(x, x, x, need_weights=need_weights)[0], x)


# Precision


@with_weights
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_no_worse_than_torch(need_weights, dtype):
    theirs, ours = pair(batch_first=True)
    exact = ours(*operands(ours))[0]
    inputs = [x.to(dtype) for x in operands(ours)]
    error = (ours.to(dtype)(*inputs, need_weights=need_weights)[0] - exact).abs().max()
    reference = (theirs.to(dtype)(*inputs)[0] - exact).abs().max()
    assert 0 < error <= 2 * reference


@with_weights
@by_options
def test_autocast(options, need_weights):
    theirs, ours = (layer.float() for layer in pair(**options))
    inputs = [x.float() for x in operands(ours)]
    exact = ours(*inputs)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(*inputs, need_weights=need_weights)[0]
        reference = theirs(*inputs)[0]
    assert output.dtype == torch.bfloat16
    assert 0 < (output - exact).abs().max() <= 2 * (reference - exact).abs().max()


# What is refused


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1), {}, "embed_dim must be >= 1, got 0"),
        ((12, 2.0), {}, "num_heads must be a whole number"),
        ((12, 5), {}, "divisible by num_heads, got 12 and 5"),
        ((12, 3), {"kdim": 0}, "kdim must be >= 1, got 0"),
        ((12, 3), {"dropout": 1.5}, "between 0 and 1, got 1.5"),
        ((12, 3), {"regularizer": "entmax"}, "must be a Regularizer such as"),
        ((12, 3), {"regularizer": fl.Tsallis}, "must be a Regularizer such as"),
    ],
)
def test_bad_settings_are_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fnn.MultiheadAttention(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.ones(2, 5, 11)}, r"query must have width 12, got shape \(2, 5, 11\)"),
        ({"query": torch.ones(5, 12)}, "all have three axes .* or all two"),
        ({"query": torch.ones(12)}, "all have three axes .* or all two"),
        ({"query": [1.0]}, "query must be a tensor, got list"),
        ({"query": torch.ones(3, 5, 12)}, "all the same batch; with batch_first=True"),
        ({"value": torch.ones(2, 6, 12)}, "the same tokens"),
        ({"attn_mask": torch.ones(7, 5) > 0}, r"\(query, key\) = \(5, 7\) or .* \(6, 5, 7\), got"),
        ({"attn_mask": torch.ones(2, 5, 7) > 0}, r"= \(6, 5, 7\), got \(2, 5, 7\)"),
        ({"attn_mask": torch.ones(5, 7).int()}, "pass attn_mask.bool()"),
        ({"key_padding_mask": torch.ones(7) > 0}, r"\(batch, key\) = \(2, 7\), got \(7,\)"),
        ({"key_padding_mask": torch.ones(2, 7).long()}, "pass key_padding_mask.bool()"),
        ({"key_padding_mask": [True]}, "key_padding_mask must be a tensor"),
        ({"is_causal": True}, "attn_mask is None; pass"),
    ],
)
def test_bad_calls_are_refused(change, message):
    layer = fnn.MultiheadAttention(12, 3, batch_first=True)
    call = {name: torch.ones(2, 7, 12) for name in ("key", "value")}
    call["query"] = torch.ones(2, 5, 12)
    layer(**call)
    with pytest.raises((TypeError, ValueError), match=message):
        layer(**{**call, **change})


def test_nested_tensors_are_refused():
    layer = fnn.MultiheadAttention(12, 3, batch_first=True)
    parts = [torch.ones(2, 12), torch.ones(3, 12)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(TypeError, match=r"nested tensor.*enable_nested_tensor=False"):
        layer(nested, nested, nested)
