"""transformers' `generate` on our cache: the tokens of a forward pass without any cache."""

import copy

import pytest
import torch

import fenchel as fl
from tests import needs
from tests.hf import models
from tests.hf.models import TranslatedAttention, hf, transformers

LENGTH = 12
PAD = 1
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "bos_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, GROUPED),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, GROUPED | {"head_dim": 8}),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        GROUPED | {"sliding_window": 9},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        GROUPED | {"head_dim": 8, "sliding_window": 9},
    ),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {
            "vocab_size": 60,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "pad_token_id": PAD,
            "eos_token_id": None,
        },
    ),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, SIZES),
}


def tiny(family, name="fenchel:entmax15", dtype=torch.float64):
    config, model_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config(**sizes)).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and label.endswith("weight")
            parameter.normal_(float(norm), 0.35, generator=generator)
    model.set_attn_implementation(name)
    return model


def prompt(rows=2, length=10):
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(4))


def generate(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"do_sample": False, "max_new_tokens": LENGTH, "min_new_tokens": LENGTH}
    settings |= {"return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, **settings | options)


def uncached(model, ids, mask=None, **options):
    return generate(model, ids, mask, use_cache=False, **options).sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["greedy", "beams", "left padding", "assisted", "lookup"])
def test_generates_what_no_cache_does(family, way):
    model, ids, mask, options = tiny(family), prompt(), None, {}
    if way == "beams":
        options = {"num_beams": 3}
    if way == "left padding":
        mask = torch.ones_like(ids)
        ids[0, :4], mask[0, :4] = PAD, 0
    if way in ("assisted", "lookup"):
        ids = ids[:1]
    expected = uncached(model, ids, mask, **options)
    if way == "assisted":
        helper = copy.deepcopy(model)
        torch.nn.init.normal_(helper.get_input_embeddings().weight, 0, 0.36)
        options = {"assistant_model": helper}
    if way == "lookup":
        options = {"prompt_lookup_num_tokens": 3}
    found = generate(model, ids, mask, **options)
    assert torch.equal(found.sequences, expected)
    if way in ("greedy", "beams", "left padding"):
        assert isinstance(found.past_key_values, hf.Cache)


@pytest.mark.parametrize("name", ["fenchel:softmax", "fenchel:entmax15", "fenchel:sparsemax"])
def test_a_converted_model_uses_it_and_says_what_it_read(name):
    model = tiny("llama", name, torch.float32)
    cache = generate(model, prompt(1)).past_key_values
    assert type(cache) is hf.Cache
    assert [read.seen.flatten().tolist() for read in cache.read] == [[21] * 4] * 2


def test_other_models_keep_their_cache():
    found = generate(tiny("llama", "sdpa"), prompt()).past_key_values
    assert type(found) is transformers.DynamicCache


def test_a_model_on_sdpa_may_use_it():
    model = tiny("llama", "sdpa")
    found = generate(model, prompt(), past_key_values=hf.Cache(model))
    assert torch.equal(found.sequences, uncached(model, prompt()))


def test_a_conversation_goes_on():
    """Given to `generate` again with more tokens, and copied before."""
    model, ids = tiny("llama"), prompt(1)
    first = generate(model, ids, past_key_values=hf.Cache(model))
    cache = copy.deepcopy(first.past_key_values)
    longer = torch.cat([first.sequences, prompt(1, 5)], 1)
    expected = uncached(model, longer)
    for past in (first.past_key_values, cache):
        assert torch.equal(generate(model, longer, past_key_values=past).sequences, expected)


def test_cropping_and_resetting():
    model, ids = tiny("llama"), prompt(1)
    with torch.no_grad():
        full = model(ids).logits
        cache = hf.Cache(model)
        model(ids, past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 6
        again = model(ids[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(again, full[:, 6:])
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, full)


def test_gradients_go_through_a_cache():
    """As through transformers' own: keys that train are kept in tensors that say so."""
    ids = prompt(1)
    slopes = []
    for make in (hf.Cache, lambda model: transformers.DynamicCache()):
        model = tiny("llama")
        cache = make(model)
        model(ids[:, :6], past_key_values=cache)
        model(ids[:, 6:], past_key_values=cache).logits.sum().backward()
        slopes.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    assert slopes[0].abs().sum() > 0
    torch.testing.assert_close(*slopes)


def test_gradients_of_queries_alone():
    """Only the first layer's queries train: its keys and values could do without a gradient."""
    slopes = []
    for make in (hf.Cache, lambda model: transformers.DynamicCache()):
        model = tiny("llama").requires_grad_(False)
        weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        cache = make(model)
        model(prompt(1)[:, :9], past_key_values=cache)
        model(prompt(1)[:, 9:], past_key_values=cache).logits.sum().backward()
        slopes.append(weight.grad)
    assert slopes[0].abs().sum() > 0
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("changed", ["keys", "values"])
def test_tensors_that_were_changed_are_read_as_they_are(changed):
    """Whoever writes into the tensors of a cache is heard: its shadow is left aside."""
    model = tiny("llama", "fenchel:entmax15", torch.float32)
    cache = hf.Cache(model)
    with torch.no_grad():
        model(prompt(1), past_key_values=cache)
        layer = cache.layers[0]
        new = torch.randn(1, 2, 1, 8)
        keys, values = layer.update(new, new)
        if changed == "keys":
            keys.mul_(-1)
        else:
            values = 2 * values
        query = torch.randn(1, 4, 1, 8)
        attend = TranslatedAttention(fl.Tsallis(1.5))
        found, _ = attend(model.model.layers[0].self_attn, query, keys, values, None)
    expected = fl.attention(query, keys.clone(), values, fl.Tsallis(1.5), enable_gqa=True)
    assert torch.equal(found.transpose(1, 2), expected)


def test_encoder_and_decoder():
    for family in ("t5", "bart"):
        model = models.tiny(family, "fenchel:entmax15")
        ids = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(1))
        options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
        found = model.generate(ids, return_dict_in_generate=True, **options)
        assert torch.equal(found.sequences, model.generate(ids, use_cache=False, **options))
        assert isinstance(found.past_key_values.self_attention_cache, hf.Cache)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["greedy", "beams", "left padding"])
def test_smollm2(way):
    """A real model in float64: 48 tokens after a real text."""
    folder = needs.model("smollm2", covers="a real decoder on our cache")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float64, attn_implementation="fenchel:entmax15").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is Paris. The capital of Italy is", return_tensors="pt")
    ids, mask = ids.input_ids, None
    options = {"num_beams": 3} if way == "beams" else {}
    if way == "left padding":
        ids = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1).repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
    found = generate(model, ids, mask, **options)
    assert torch.equal(found.sequences, uncached(model, ids, mask, **options))
