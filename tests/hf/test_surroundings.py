"""What is around a conversion does not change what it finds: inference mode, the meta device, an
error halfway through the run, training mode."""

import copy

import pytest
import torch

import fenchel as fl
from tests.hf.models import hf, inputs, logits, tiny, tokens, transformers


def _bloom():
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


def _learned(_):
    return fl.nn.LearnedTsallis(4)


def test_a_softmax_by_hand_is_seen_in_inference_mode():
    model = _bloom()
    with torch.inference_mode():
        assert len(hf.check(model).rows) == 2
        hf.convert(model, "fenchel:entmax15")


def test_an_alpha_that_inference_mode_made_trains():
    model = tiny("llama")
    encoder = torch.nn.TransformerEncoderLayer(8, 4, 8, batch_first=True)
    with torch.inference_mode():
        hf.convert(model, _learned)
        fl.nn.convert(encoder, _learned)
    model(**inputs("llama")).logits.sum().backward()
    encoder(torch.randn(1, 5, 8)).square().sum().backward()
    for attention in (model.model.layers[0].self_attn.fenchel_regularizer, encoder.self_attn):
        assert all(parameter.grad is not None for parameter in attention.parameters())


def test_an_attention_that_an_error_cut_short_is_no_other_module():
    model = tiny("llama")
    first = model.model.layers[0].self_attn
    first.q_proj.register_forward_hook(_fail)
    seen = hf.check(model)
    assert [row.path for row in seen.rows] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    assert "no such input" in seen.not_run[0]


def _fail(*_):
    raise RuntimeError("no such input")


def test_the_meta_device_as_default():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(
        vocab_size=40, intermediate_size=48, num_key_value_heads=2, **sizes
    )
    model = transformers.MistralForCausalLM(config).eval()
    alphas = fl.Tsallis(torch.tensor([[1.2], [1.4], [1.6], [1.8]]))
    with torch.device("meta"):  # where masks of sliding windows, among others, are made
        assert hf.check(model).not_run == []
        hf.convert(copy.deepcopy(model), alphas)


@pytest.mark.parametrize("regularizer", [_learned, fl.Tsallis(torch.full((4, 1), 1.3))])
def test_weights_that_come_later(regularizer):
    model = tiny("llama")
    state = model.state_dict()
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(model.config)
    hf.convert(empty, regularizer)
    held = empty.model.layers[0].self_attn.fenchel_regularizer
    assert not any(x.is_meta for x in (*held.parameters(), *held.buffers()))
    with pytest.raises(ValueError, match="does not broadcast"):
        hf.convert(empty, lambda _: fl.nn.LearnedTsallis(3))
    empty.load_state_dict(state, strict=False, assign=True)
    assert empty.lm_head.weight.device.type == "cpu"


@pytest.mark.parametrize("training", [True, False])
def test_what_attentions_hold_trains_with_them(training):
    model = tiny("llama").train(training)
    hf.convert(model, _learned)
    assert all(module.training == training for module in model.modules())


@pytest.mark.parametrize("make", [_bloom, lambda: tiny("llama", "sdpa")])
def test_a_block_around_the_conversion(make):
    """It is of what runs inside, and the model is looked at as it is outside."""
    model, ids = make(), tokens()
    expected = logits(hf.convert(copy.deepcopy(model), fl.Tsallis(1.3)), input_ids=ids)
    with fl.replace_sdpa(fl.Tsallis(2.0)):
        assert hf.check(model).converts
        hf.convert(model, fl.Tsallis(1.3))
        assert torch.equal(logits(model, input_ids=ids), expected), "it keeps its own"
    assert torch.equal(logits(model, input_ids=ids), expected)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_autocast_around_the_conversion(family):
    """Answers in float32, of layers that computed in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        model = hf.convert(tiny(family, dtype=torch.float32), fl.Tsallis(1.3))
    assert model.config._attn_implementation == "fenchel:tsallis-1.3"
