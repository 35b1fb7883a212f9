"""PreferenceAttention against T5's own attention."""

import math

import pytest
import torch

from fenchel.nn import (
    PositionPreference,
    PreferenceAttention,
    UniformPreference,
)
from tests import needs
from tests.nn.pairs import assert_equal
from tests.nn.preference_layers import called, draw

transformers = needs.package("transformers", "PreferenceAttention against T5's own attention")
T5_WIDTH = 16


def t5_model(kind=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=T5_WIDTH,
        d_kv=6,  # heads * d_kv is not d_model
        d_ff=20,
        num_heads=4,
        num_layers=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        pad_token_id=0,
        decoder_start_token_id=0,
        **options,
    )
    model = (kind or transformers.T5Model)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def self_attention(stack, block=0):
    return stack.block[block].layer[0].SelfAttention


class Calls:
    """What every attention of a model was given and gave, in a run of the model."""

    def __init__(self, model):
        self.made = {}
        for name, part in model.named_modules():
            if type(part).__name__ == "T5Attention":
                part.register_forward_hook(self.hook(name), with_kwargs=True)

    def hook(self, name):
        def keep(part, args, kwargs, output):
            (hidden,) = args
            self.made[name] = (part, hidden, kwargs.get("key_value_states"), output[0])

        return keep


def check_whole_model(model, ids, decoder_ids, seen):
    """Each attention of the model again as ours, from the layer norm's output on.

    The largest deviation of each kind, relative to the largest output if that is above one.
    """
    calls = Calls(model)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=seen, decoder_input_ids=decoder_ids)
    first, worst = {}, {"encoder": 0.0, "decoder": 0.0, "cross": 0.0}
    for name, (part, hidden, states, expected) in calls.made.items():
        side = name.split(".")[0]
        kind = side if states is None else "cross"
        given = (
            first.get(side) if kind != "cross" and not part.has_relative_attention_bias else None
        )
        layer = PreferenceAttention.from_t5(part, preference=given)
        if part.has_relative_attention_bias:
            first[side] = layer.preference
        templates = hidden if states is None else states
        padding = None if kind == "decoder" else ~seen.bool()
        with torch.no_grad():
            output = layer(hidden, templates, key_padding_mask=padding, is_causal=kind == "decoder")
        rows = seen.bool() if kind == "encoder" else slice(None)  # those of padding are nobody's
        off = (output - expected)[rows].abs().max() / expected.abs().max().clamp(min=1)
        worst[kind] = max(worst[kind], float(off))
    assert len(calls.made) == 3 * model.config.num_layers
    return worst


def test_every_attention_of_a_t5():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (2, 50), generator=generator)
    seen = torch.ones_like(ids)
    seen[1, 37:] = 0
    decoder_ids = torch.randint(1, 40, (2, 45), generator=generator)
    for options in ({}, {"attn_implementation": "eager"}):
        worst = check_whole_model(t5_model(**options), ids, decoder_ids, seen)
        assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("estimated", [False, True])
def test_self_attention_of_t5_called_alone(side, estimated):
    model, x = t5_model(), draw(2, 30, T5_WIDTH)
    causal = side == "decoder"
    future = torch.full((30, 30), -math.inf, dtype=torch.float64).triu(1)
    for block, has_bias in ((0, True), (1, False)):
        theirs = self_attention(getattr(model, side), block)
        assert theirs.has_relative_attention_bias == has_bias
        with torch.no_grad():
            expected = theirs(x, mask=future[None, None] if causal else None)[0]
            layer = PreferenceAttention.from_t5(theirs)
            output, _ = called(layer, x, x, is_causal=causal, estimated=estimated)
        assert_equal(output, expected)
        assert isinstance(layer.preference, PositionPreference if has_bias else UniformPreference)


def test_cross_attention_of_t5_called_alone():
    theirs = t5_model().decoder.block[1].layer[1].EncDecAttention
    query, templates = draw(2, 5, T5_WIDTH, seed=1), draw(2, 30, T5_WIDTH, seed=2)
    layer = PreferenceAttention.from_t5(theirs)
    assert_equal(layer(query, templates), theirs(query, key_value_states=templates)[0])
    assert isinstance(layer.preference, UniformPreference)


def test_gradients_are_those_of_t5():
    theirs, x = self_attention(t5_model().encoder), draw(2, 30, T5_WIDTH)
    layer = PreferenceAttention.from_t5(theirs)
    theirs(x)[0].sin().sum().backward()
    layer(x, x).sin().sum().backward()
    pairs = {
        "q": layer.evidence_proj,
        "k": layer.template_proj,
        "v": layer.value_proj,
        "o": layer.out_proj,
    }
    for name, ours in pairs.items():
        assert_equal(ours.weight.grad, getattr(theirs, name).weight.grad)
    assert_equal(layer.preference.table.grad, theirs.relative_attention_bias.weight.grad)


def test_from_t5_copies_and_keeps_dtype_and_mode():
    theirs = self_attention(t5_model(dtype=torch.bfloat16).encoder).train()
    layer = PreferenceAttention.from_t5(theirs)
    assert layer.training
    assert layer.dropout == theirs.dropout == 0.1
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    before = theirs.q.weight.clone(), theirs.relative_attention_bias.weight.clone()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert theirs.q.weight.equal(before[0])
    assert theirs.relative_attention_bias.weight.equal(before[1])


def test_from_t5_refuses_others():
    model = t5_model()
    first = self_attention(model.encoder)
    with pytest.raises(TypeError, match=r"got T5LayerSelfAttention; .*SelfAttention"):
        PreferenceAttention.from_t5(model.encoder.block[0].layer[0])
    with pytest.raises(ValueError, match="a relative bias of its own"):
        PreferenceAttention.from_t5(first, preference=UniformPreference())


def test_real_t5():
    """flan-t5-small: all 24 attentions, on a text longer than the exact buckets."""
    folder = needs.model("flan-t5-small", "PreferenceAttention in a real T5")
    model = transformers.T5Model.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["summarize: " + "The river rose all night and nobody slept. " * 16, "A short one."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] > 128
    decoder_ids = batch["input_ids"][:, :40]
    worst = check_whole_model(model, batch["input_ids"], decoder_ids, batch["attention_mask"])
    assert max(worst.values()) <= 1e-12, worst
