"""Who attends in a model is seen by running it: nothing stays on softmax unnoticed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import fenchel as fl
from tests.hf.models import hf, inputs, logits, tiny, tokens, transformers

ENTMAX = fl.Tsallis(1.5)


def small(**more):
    return {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, **more}


def bloom():
    config = transformers.BloomConfig(
        vocab_size=40, hidden_size=32, n_head=4, n_layer=2, initializer_range=0.3
    )
    torch.manual_seed(0)
    return transformers.BloomForCausalLM(config).double().eval()


def siglip():
    config = transformers.SiglipVisionConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        num_hidden_layers=1,
        image_size=32,
        patch_size=16,
    )
    torch.manual_seed(0)
    return transformers.SiglipVisionModel(config).double().eval()


def attend_by_helper(q, k, v):
    """As models write it that ask nobody."""
    return functional.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


SDPA = functional.scaled_dot_product_attention  # under another name


class Mixer(nn.Module):
    """No "attention" in its name, and none in its own source."""

    def __init__(self, helper):
        super().__init__()
        self.helper = helper

    def forward(self, x):
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return self.helper(heads, heads, heads).transpose(1, 2).flatten(2)


class Doubled(nn.Module):
    """A BERT whose output goes through one more attention."""

    def __init__(self, helper):
        super().__init__()
        self.bert, self.mixer = tiny("bert").bert, Mixer(helper).double()

    def forward(self, input_ids):
        return self.mixer(self.bert(input_ids).last_hidden_state)


def test_a_table_of_all(capsys):
    check = hf.check(tiny("t5"))
    assert check.converts
    assert [row.path for row in check.rows] == [
        "encoder.block.0.layer.0.SelfAttention",
        "encoder.block.1.layer.0.SelfAttention",
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
        "decoder.block.1.layer.0.SelfAttention",
        "decoder.block.1.layer.1.EncDecAttention",
    ]
    assert {(row.how, row.seen, row.result, row.now) for row in check.rows} == {
        ("asks transformers for its function", "ran", "converts", "eager")
    }
    print(check)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "attention"
    assert line.startswith("encoder.block.0.layer.0.SelfAttention … decoder.block.1")


def test_the_model_stays_as_it_was():
    model, batch = tiny("bert").train(), inputs("bert")
    model.bert.pooler = None
    config, before = model.config, logits(tiny("bert"), **batch)
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    hf.check(model)
    assert torch.equal(torch.rand(4), expected)
    assert model.config is config
    assert config._attn_implementation == "eager"
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(logits(model.eval(), **batch), before)


@pytest.mark.parametrize("helper", [attend_by_helper, SDPA])
def test_attentions_that_nobody_can_read_are_switched(helper):
    model, ids = Doubled(helper), tokens()
    with torch.no_grad():
        softmax = model(ids)
        hf.convert(model, ENTMAX, inputs=(ids,))
        hidden = model.bert(ids).last_hidden_state
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        scale = 1.0 if helper is attend_by_helper else None
        own = fl.attention(heads, heads, heads, ENTMAX, scale=scale).transpose(1, 2).flatten(2)
        assert (model(ids) - own).abs().max() <= 1e-12
        hf.convert(model, fl.Shannon(), inputs=(ids,))
        assert (model(ids) - softmax).abs().max() <= 1e-10


def test_a_forward_that_was_patched_on_the_module_is_noticed():
    model, batch = tiny("gpt2"), inputs("gpt2")
    module = model.transformer.h[1].attn
    patch(module, attend_by_helper)
    ways = {row.path: row.how for row in hf.check(model).rows}
    assert ways["transformer.h.0.attn"] == "asks transformers for its function"
    assert ways["transformer.h.1.attn"] == "takes a softmax itself"
    hf.convert(model, ENTMAX)
    actual = logits(model, **batch)
    expected = hf.convert(tiny("gpt2"), ENTMAX)
    patch(expected.transformer.h[1].attn, partial(fl.attention, regularizer=ENTMAX, scale=1.0))
    assert (actual - logits(expected, **batch)).abs().max() <= 1e-12


def patch(module, attend):
    """Its forward, on this one object, is that of others; it takes no mask."""

    def patched(hidden_states, **others):
        heads = hidden_states.unflatten(-1, (4, -1)).transpose(1, 2)
        return attend(heads, heads, heads).transpose(1, 2).flatten(2), None

    module.forward = patched


def test_a_softmax_of_its_own_is_exchanged():
    """Bloom: ALiBi and the mask are in its scores by then."""
    model, ids = bloom(), tokens()
    softmax = logits(model, input_ids=ids)
    hf.convert(model, fl.Shannon())
    assert (logits(model, input_ids=ids) - softmax).abs().max() <= 1e-12
    seen = []
    real = functional.softmax

    def record(scores, *args, **options):
        seen.append(scores.detach().clone())
        return real(scores, *args, **options)

    functional.softmax = record
    try:
        logits(bloom(), input_ids=ids)
    finally:
        functional.softmax = real
    hf.convert(model, ENTMAX)
    entmax = model(ids, output_attentions=True)
    assert (entmax.logits - softmax).abs().max() > 1e-3
    first = seen[0].masked_fill(seen[0] < -1e30, -torch.inf).double()
    expected = fl.entmax(first, 1.5)
    assert (entmax.attentions[0] - expected).abs().max() <= 1e-6  # Bloom rounds to float32
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, input_ids=ids), softmax)


def test_heads_of_torch_are_switched_too():
    model = siglip()
    pixels = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        softmax = model(pixels).pooler_output
        hf.convert(model, fl.Shannon())
        assert (model(pixels).pooler_output - softmax).abs().max() <= 1e-12
        hf.convert(model, ENTMAX)
    assert isinstance(model.head.attention, fl.nn.MultiheadAttention)
    assert {row.now for row in hf.check(model).rows} == {"fenchel:tsallis-1.5", "fenchel"}


def test_a_name_alone_is_refused_where_something_would_stay():
    model = siglip()
    with pytest.raises(ValueError, match=r"head\.attention \(MultiheadAttention\)"):
        model.set_attn_implementation("fenchel:entmax15")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"would stay on softmax.*BloomAttention"):
        bloom().set_attn_implementation("fenchel:entmax15")
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_head=4, n_layer=1)
    config._attn_implementation = "fenchel:entmax15"
    with pytest.raises(ValueError, match=r"would stay on softmax.*BloomAttention"):
        transformers.BloomForCausalLM(config)


def test_only_some_layers():
    model, batch = tiny("llama"), inputs("llama")
    softmax = logits(model, **batch)
    both = logits(hf.convert(tiny("llama"), ENTMAX), **batch)
    some = logits(hf.convert(model, ENTMAX, skip="*.layers.0.*"), **batch)
    assert (some - softmax).abs().max() > 1e-3
    assert (some - both).abs().max() > 1e-3
    same = logits(hf.convert(tiny("llama"), ENTMAX, only=["*.layers.1.*"]), **batch)
    assert torch.equal(some, same)
    with pytest.raises(ValueError, match="leave no attention"):
        hf.convert(model, ENTMAX, only="nothing")
    for wrong in (0, None, (0, 1)):
        with pytest.raises(TypeError, match="must be patterns such as"):
            hf.convert(model, ENTMAX, skip=wrong)


def test_a_model_that_cannot_be_run_is_run_in_parts():
    """Its pictures and its words must fit each other; its parts can be run alone."""
    text = transformers.LlamaConfig(
        **small(num_hidden_layers=1, num_key_value_heads=2, intermediate_size=48)
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        num_hidden_layers=1,
        image_size=32,
        patch_size=16,
    )
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=39)
    ).eval()
    check = hf.check(model)
    assert check.converts
    assert {row.seen for row in check.rows} == {"ran"}
    assert len(check.rows) == 2
    hf.convert(model, ENTMAX)
    assert {row.now for row in hf.check(model).rows} == {"fenchel:tsallis-1.5"}


def test_an_attention_that_changes_with_the_length_needs_inputs():
    """BigBird exchanges its attention for a full one when a text is short."""
    config = transformers.BigBirdConfig(
        **small(num_hidden_layers=1, intermediate_size=48, block_size=4, num_random_blocks=1)
    )
    model = transformers.BigBirdModel(config).eval()
    with pytest.raises(ValueError, match="changes with the length of its input"):
        hf.convert(model, ENTMAX)
    assert model.attention_type == "block_sparse", "a twin was run"


def test_inputs_of_the_wrong_kind():
    with pytest.raises(TypeError, match="inputs must be a tensor, a tuple or a mapping"):
        hf.check(tiny("bert"), inputs="some text")


def test_what_is_no_model_and_what_has_no_configuration():
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
        hf.check("a model")
    seen = hf.check(torch.nn.TransformerEncoderLayer(8, 2))
    assert "no configuration that says what it takes; pass inputs=" in seen.not_run[0]


def test_a_name_for_each_part():
    """transformers takes a dictionary of names, too."""
    with pytest.raises(ValueError, match="would stay on softmax"):
        bloom().set_attn_implementation({"": "fenchel:entmax15"})
    model, batch = bloom(), {"input_ids": tokens()}
    softmax = logits(model, **batch)
    hf.convert(model, ENTMAX)
    model.set_attn_implementation({"": "eager"})
    assert torch.equal(logits(model, **batch), softmax)
    llama = hf.convert(tiny("llama"), lambda _: fl.nn.LearnedTsallis(4))
    llama.set_attn_implementation({"": "sdpa"})
    assert not any("fenchel" in name for name in llama.state_dict())


def test_a_part_is_led_back_alone():
    sizes = small(intermediate_size=48, num_hidden_layers=1)
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=sizes, vision_config=vision))
    hf.convert(model, lambda _: fl.nn.LearnedTsallis(4))
    model.set_attn_implementation({"vision_config": "sdpa"})
    held = {name.split(".")[0] for name in model.state_dict() if "fenchel" in name}
    assert held == {"text_model"}
    assert "fenchel_attention" not in model.config.to_dict(), "it says what all of them hold"


def test_the_table_names_what_each_attention_holds():
    model = hf.convert(
        tiny("llama"), fl.nn.LearnedTsallis(4), skip="*.layers.0.*", allow_partial=True
    )
    first, second = (row.now for row in hf.check(model).rows)
    assert first == "Shannon(temperature=1.0)"
    assert second == "Tsallis, alpha 1.5 to 1.5"
    with torch.no_grad():
        model.model.layers[1].self_attn.fenchel_regularizer.raw[0] = 100.0
    assert hf.check(model).rows[1].now == "Tsallis, alpha 1.5 to 2"
