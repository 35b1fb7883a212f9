"""Twelve families by the checks of `python -m benchmarks models`: softmax is what a model computes
by itself, entmax what the package gives; outputs, and gradients of all parameters."""

from types import SimpleNamespace

import pytest
import torch

from tests import needs
from tests.hf.models import VOCABULARY, hf, inputs, tokens, transformers

needs.package("entmax", "entmax of converted models against the package")

from benchmarks import models, models_testers  # noqa: E402
from benchmarks.models_checks import TOLERANCE, check  # noqa: E402

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 1}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 4}
PAIRS = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
NEOX = {**SIZES, "max_position_embeddings": 32}
TEXT, PAIR, IMAGE = "llama", "t5", "vit"  # whose inputs they take

FAMILIES = {
    "bert": ("BertForMaskedLM", SIZES, TEXT),
    "distilbert": ("DistilBertForMaskedLM", SIZES, TEXT),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "gpt2": ("GPT2LMHeadModel", {**SIZES, "n_positions": 32}, TEXT),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX, TEXT),
    "llama": ("LlamaForCausalLM", GROUPED, TEXT),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 3}, TEXT),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 2}, TEXT),
    "bart": ("BartForConditionalGeneration", PAIRS, PAIR),
    "t5": ("T5ForConditionalGeneration", {**T5, "num_heads": 4}, PAIR),
    "dinov2": ("Dinov2Model", {**IMAGES, "mlp_ratio": 2}, IMAGE),
    "vit": ("ViTForImageClassification", IMAGES, IMAGE),
}


def small(family):
    name, sizes, like = FAMILIES[family]
    batch = inputs(like)
    if like == TEXT:
        batch["attention_mask"] = torch.ones_like(tokens()).index_fill(1, torch.tensor([6]), 0)

    def prepare():
        return transformers.AutoConfig.for_model(family, **sizes), batch

    known = SimpleNamespace(prepare_config_and_inputs_for_common=prepare)
    return models_testers.Tester(SimpleNamespace(model_tester=known), getattr(transformers, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_what_it_should_be(family):
    outcome = check(small(family))
    assert outcome.status == models.EQUAL, outcome
    assert outcome.own == "sdpa"
    assert outcome.why == ""
    assert 0 <= outcome.softmax <= TOLERANCE
    assert 0 < outcome.entmax <= TOLERANCE


def test_a_model_that_is_left_as_it_was_is_found(monkeypatch):
    monkeypatch.setattr(hf, "convert", lambda model, regularizer: model)
    outcome = check(small("bart"))
    assert outcome.status == models.STAYS
    assert outcome.why == "all 3 attentions"
    assert outcome.softmax <= TOLERANCE < 1e-3 < outcome.entmax


def test_half_of_a_model_is_found(monkeypatch):
    convert = hf.convert

    def partly(model, regularizer):
        layer = model.model.layers[0].self_attn
        convert(model, regularizer)
        layer.config = transformers.AutoConfig.for_model("llama", **GROUPED)
        layer.config._attn_implementation = "sdpa"
        return model

    monkeypatch.setattr(hf, "convert", partly)
    outcome = check(small("llama"))
    assert (outcome.status, outcome.why) == (models.STAYS, "1 attentions")


def test_a_mask_that_is_lost_is_found(monkeypatch):
    convert = hf.convert

    def unmasked(model, regularizer):
        convert(model, regularizer)
        forward = model.forward
        model.forward = lambda attention_mask=None, **batch: forward(**batch)
        return model

    monkeypatch.setattr(hf, "convert", unmasked)
    outcome = check(small("bert"))
    assert (outcome.status, outcome.why) == (models.DIFFERENT, "softmax")


def test_nothing_is_left_behind_in_transformers():
    file = transformers.models.llama.modeling_llama
    check(small("llama"))
    assert file.torch is torch
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32
