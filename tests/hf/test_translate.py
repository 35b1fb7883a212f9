"""The attention function alone: every argument is used or refused."""

import math

import pytest
import torch
from torch import nn

import fenchel as fl
from tests.hf.models import (
    IMPLEMENTATIONS,
    SPARSE,
    TranslatedAttention,
    logits,
    softmax_as_given,
    split_mask,
    tiny,
    tokens,
    transformers,
)

OURS = TranslatedAttention(fl.Tsallis(1.5))
DOUBLE = torch.float64


class Module(nn.Module):
    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def operands(queries=5, keys=5, heads=4, kv_heads=4):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, h, n, 8, dtype=DOUBLE, generator=generator) * 2
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )


def attend(module, *arguments, **others):
    """Both ways, which must agree; the output as (batch, head, query, d)."""
    output, nothing = OURS(module, *arguments, **others)
    dense, weights = OURS(module, *arguments, **others, output_attentions=True)
    assert nothing is None
    assert weights.shape[:2] == arguments[0].shape[:2]
    assert (output - dense).abs().max() <= 1e-13
    return output.transpose(1, 2)


def test_arguments_mean_what_they_mean_in_attention():
    q, k, v = operands()
    mask = torch.rand(2, 1, 5, 5) > 0.3
    bias = torch.randn(1, 4, 5, 5, dtype=DOUBLE)
    omega = OURS.regularizer
    plain = attend(Module(False), q, k, v, None)
    assert (plain - fl.attention(q, k, v, omega)).abs().max() <= 1e-13
    scaled = attend(Module(False), q, k, v, None, scaling=0.7)
    assert (scaled - fl.attention(q, k, v, omega, scale=0.7)).abs().max() <= 1e-13
    masked = attend(Module(True), q, k, v, mask)  # a mask says everything, causality included
    assert (masked - fl.attention(q, k, v, omega, attn_mask=mask)).abs().max() <= 1e-13
    both = attend(Module(), q, k, v, mask, position_bias=bias)
    expected = fl.attention(q, k, v, omega, attn_mask=bias.masked_fill(~mask, -math.inf))
    assert (both - expected).abs().max() <= 1e-13
    past = attend(Module(True), q, k, v, None, position_bias=bias)
    expected = fl.attention(q, k, v, omega, attn_mask=bias, is_causal=True)
    assert (past - expected).abs().max() <= 1e-13


def test_the_call_knows_better_than_the_module_whether_it_is_causal():
    q, k, v = operands()
    expected = fl.attention(q, k, v, OURS.regularizer, is_causal=True)
    assert (attend(Module(False), q, k, v, None, is_causal=True) - expected).abs().max() <= 1e-13
    whole = fl.attention(q, k, v, OURS.regularizer)
    assert (attend(Module(True), q, k, v, None, is_causal=False) - whole).abs().max() <= 1e-13
    last = attend(Module(True), q[:, :, -1:], k, v, None)
    assert (last - whole[:, :, -1:]).abs().max() <= 1e-13, "one query sees the whole cache"


def test_grouped_heads_are_not_repeated(monkeypatch):
    q, k, v = operands(kv_heads=2)
    expected = fl.attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), OURS.regularizer)
    assert (attend(Module(False), q, k, v, None) - expected).abs().max() <= 1e-13
    seen = {}

    def spy(query, key, value, *arguments, **others):
        seen.update(heads=key.shape[1], gqa=others["enable_gqa"])
        return fl.attention(query, key, value, *arguments, **others)

    monkeypatch.setattr("fenchel.hf.translate.attention", spy)
    OURS(Module(False), q, k, v, None)
    assert seen == {"heads": 2, "gqa": True}


def test_forbidden_in_a_float_mask_is_forbidden():
    mask = torch.tensor([[[[0.0, 0.5, torch.finfo(DOUBLE).min]]]], dtype=DOUBLE)
    visible, bias = split_mask(mask, None)
    assert visible is None
    assert bias.flatten().tolist() == [0.0, 0.5, -math.inf]
    q, k, v = operands()
    hidden = torch.full((2, 1, 5, 5), torch.finfo(DOUBLE).min, dtype=DOUBLE)
    assert (attend(Module(), q, k, v, hidden) == 0).all(), "a query that sees no key gets zeros"
    budget = TranslatedAttention(fl.Budget(2))
    hidden[..., :3] = 0
    weights = budget(Module(), q, k, v, hidden, output_attentions=True)[1]
    assert (weights[..., 3:] == 0).all()
    assert (weights.sum(-1) - 2).abs().max() <= 1e-12


def test_dropout_is_applied():
    q, k, v = operands()
    assert (attend(Module(False), q, k, v, None, dropout=1.0) == 0).all()
    torch.manual_seed(0)
    output, _ = OURS(Module(False), q, k, v, None, dropout=0.5)
    assert (output.transpose(1, 2) - attend(Module(False), q, k, v, None)).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "argument"), [("cache", object()), ("head_mask", torch.ones(4))])
def test_what_cannot_be_honoured_is_refused(name, argument):
    q, k, v = operands()
    with pytest.raises(ValueError, match=f"Module passes {name}"):
        OURS(Module(False), q, k, v, None, **{name: argument})
    OURS(Module(False), q, k, v, None, **{name: None})


def test_keys_that_an_indexer_chose():
    q, k, v = operands()
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2], [3, 1], [4, 0]]).expand(2, 5, 2)
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool).scatter(-1, chosen[:, None], True)
    past = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    for given in (
        None,
        past,
        torch.zeros(past.shape, dtype=q.dtype).masked_fill(~past, torch.finfo(q.dtype).min),
    ):
        actual, _ = OURS(Module(False), q, k, v, given, indices=chosen)
        both = mask if given is None else mask & past
        assert torch.equal(actual, OURS(Module(False), q, k, v, both)[0])


def test_what_the_models_own_attention_reads_is_refused():
    """Everything else is on its way to somebody else."""
    scope = {"eager_attention_forward": lambda module, query, key, value, temper=None: None}
    exec("def forward(self, x): return eager_attention_forward", scope)

    class Tempered(Module):
        forward = scope["forward"]

    q, k, v = operands()
    with pytest.raises(ValueError, match=r"Tempered passes temper.*changes the attention"):
        OURS(Tempered(False), q, k, v, None, temper=2.0)
    plain, _ = OURS(Tempered(False), q, k, v, None)
    harmless = {"labels": torch.ones(2), "logits_to_keep": 1, "max_new_tokens": 3}
    assert torch.equal(OURS(Tempered(False), q, k, v, None, **harmless)[0], plain)


def test_passengers_ride_along():
    q, k, v = operands()
    plain, _ = OURS(Module(False), q, k, v, None)
    loaded, _ = OURS(Module(False), q, k, v, None, position_ids=torch.arange(5), use_cache=True)
    assert torch.equal(plain, loaded)


def test_a_lost_mask_is_noticed():
    q, k, v = operands()
    with pytest.raises(ValueError, match="window of 3 keys and passes 5 without a mask"):
        OURS(Module(True), q, k, v, None, sliding_window=3)
    OURS(Module(True), q, k, v, None, sliding_window=5)
    with pytest.raises(ValueError, match="does not say whether it is causal"):
        OURS(Module(), q, k, v, None)
    with pytest.raises(ValueError, match="four axes"):
        OURS(Module(), q, k, v, torch.ones(5, 5, dtype=torch.bool))


def test_autocast_leaves_the_weights_precise():
    q, k, v = (x.bfloat16() for x in operands())
    exact, _ = OURS(Module(False), *(x.float() for x in (q, k, v)), None, output_attentions=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = OURS(Module(False), q, k, v, None, output_attentions=True)
        fast, _ = OURS(Module(False), q, k, v, None)
    assert output.dtype == weights.dtype == fast.dtype == torch.bfloat16
    assert (output - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert (fast - exact).abs().max() <= 2**-8 * exact.abs().max()


def mistral(implementation):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=3,
        initializer_range=0.3,
        attn_implementation=implementation,
    )
    return transformers.MistralForCausalLM(config).double().eval()


def test_a_sliding_window_is_eager_s(monkeypatch):
    ids = tokens(length=9)
    with softmax_as_given(monkeypatch):
        expected = logits(mistral("eager"), input_ids=ids)
    ours = logits(mistral("fenchel:softmax"), input_ids=ids)
    assert (ours - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sliding_window_forgets_with_and_without_a_cache(implementation):
    model, ids = mistral(implementation), tokens(length=9)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 5) % 40
    before, after = (logits(model, input_ids=x) for x in (ids, changed))
    assert (before[:, 2] - after[:, 2]).abs().max() > 1e-6
    assert (before[:, 5:] - after[:, 5:]).abs().max() == 0  # two layers reach four tokens back
    options = {"max_new_tokens": 6, "do_sample": False}
    cached, plain = (model.generate(ids, use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("implementation", SPARSE)
def test_a_decoder_may_be_told_to_look_both_ways(implementation):
    """`is_causal=False` turns Llama into an encoder."""
    model, ids = tiny("llama", implementation), tokens()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 5) % 40
    both = [logits(model, input_ids=x, is_causal=False) for x in (ids, changed)]
    past = [logits(model, input_ids=x) for x in (ids, changed)]
    assert (both[0] - both[1])[:, 0].abs().max() > 1e-6
    assert (past[0] - past[1])[:, 0].abs().max() == 0
