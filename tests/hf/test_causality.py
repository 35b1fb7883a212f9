"""Decoders: the future cannot leak, and a cache changes nothing."""

from functools import partial

import pytest
import torch

from fenchel import Tsallis
from tests.hf.models import (
    DECODERS,
    IMPLEMENTATIONS,
    VOCABULARY,
    TranslatedAttention,
    inputs,
    logits,
    tiny,
    tokens,
    transformers,
)


def leaks(model, family, position=4):
    """How much outputs before `position` change when the token there does."""
    batch = inputs(family)
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    changed = batch[name].clone()
    changed[:, position:] = (changed[:, position:] + 5) % VOCABULARY
    before, after = logits(model, **batch), logits(model, **{**batch, name: changed})
    assert (before[:, position:] - after[:, position:]).abs().max() > 1e-3
    return (before[:, :position] - after[:, :position]).abs().max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", DECODERS)
def test_the_future_does_not_leak(family, implementation):
    assert leaks(tiny(family, implementation), family) == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", DECODERS)
def test_the_future_does_not_leak_past_a_mask(family, implementation):
    """Padding is one more thing that the mask says: it must hide the future all the same."""
    model, batch = tiny(family, implementation), inputs(family)
    prefix = "decoder_" if "decoder_input_ids" in batch else ""
    mask = torch.ones_like(batch[f"{prefix}input_ids"])
    mask[0, -1] = 0
    ids = batch[f"{prefix}input_ids"].clone()
    ids[:, 4:] = (ids[:, 4:] + 5) % VOCABULARY
    batch[f"{prefix}attention_mask"] = mask
    before, after = logits(model, **batch), logits(model, **{**batch, f"{prefix}input_ids": ids})
    assert (before[:, :4] - after[:, :4]).abs().max() == 0


def test_the_checker_finds_a_leak():
    """Causality is in the mask, which this one says is open."""
    model = tiny("gpt2", "fenchel:entmax15")
    length = inputs("gpt2")["input_ids"].shape[1]
    open_mask = torch.zeros(1, 1, length, length, dtype=torch.float64)
    model.forward = partial(model.forward, attention_mask=open_mask)
    assert leaks(model, "gpt2") > 1e-3


def test_a_flag_on_the_module_does_not_open_the_mask():
    model = tiny("gpt2", "fenchel:entmax15")
    for block in model.transformer.h:
        block.attn.is_causal = False
    assert leaks(model, "gpt2") == 0


def in_two_parts(model, ids):
    """Logits of a text whose second part, several tokens long, continues from the cache."""
    cache = transformers.DynamicCache(config=model.config)
    parts = (ids[:, :5], ids[:, 5:])
    return torch.cat([logits(model, input_ids=x, past_key_values=cache) for x in parts], 1)


def test_attention_registered_without_its_mask_function_goes_wrong():
    """The mistake that `register` prevents: no mask reaches the attention, and nothing is said.
    A plain text survives by the module's flag; padding and continued texts do not."""
    transformers.AttentionInterface.register("test:no-mask", TranslatedAttention(Tsallis(1.5)))
    half, whole = tiny("llama", "test:no-mask"), tiny("llama", "fenchel:entmax15")
    ids, mask = tokens(length=9), torch.ones(2, 9)
    mask[:, 0] = 0
    expected = logits(whole, input_ids=ids)
    assert (logits(half, input_ids=ids) - expected).abs().max() <= 1e-12
    assert (in_two_parts(whole, ids) - expected).abs().max() <= 1e-12
    assert (in_two_parts(half, ids) - expected).abs().max() > 1e-3
    lost, kept = (logits(m, input_ids=ids, attention_mask=mask) for m in (half, whole))
    assert (lost - kept)[:, 1:].abs().max() > 1e-3


def generated(model, family, **options):
    ids = tokens()
    mask = torch.ones_like(ids)
    if family in ("gpt2", "llama"):
        ids[0, :2], mask[0, :2] = 1, 0  # left padding
    else:
        ids[0, -2:], mask[0, -2:] = 1, 0
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        num_beams=1,
        no_repeat_ngram_size=2,
        min_new_tokens=8,
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", DECODERS)
def test_generation_with_a_cache_is_generation_without(family, implementation):
    model = tiny(family, implementation)
    cached, plain = (generated(model, family, use_cache=choice) for choice in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    assert plain.sequences.unique().numel() > 3
    for left, right in zip(cached.logits, plain.logits, strict=True):
        assert (left - right).abs().max() <= 1e-10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_static_cache_is_longer_than_what_it_holds(implementation):
    """Its empty places are keys that no query may see, in the prompt and in each step after."""
    model, ids = tiny("llama", implementation), tokens(length=9)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    expected = logits(model, input_ids=ids)
    pieces = [
        logits(model, input_ids=part, past_key_values=cache, use_cache=True)
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:])
    ]
    assert (torch.cat(pieces, 1) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_beams_reorder_the_cache(implementation):
    model = tiny("llama", implementation)
    options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False}
    cached, plain = (
        model.generate(tokens(), use_cache=choice, **options) for choice in (True, False)
    )
    assert torch.equal(cached, plain)
