"""Converted Hugging Face models for tracers.

Llama asks transformers for its attention; the others take a softmax that is exchanged in place.
"""

import torch
from torch import nn

import fenchel as fl
from tests.hf.models import VOCABULARY, hf, tokens, transformers

_SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 1}


def _bloom():
    config = transformers.BloomConfig(**_SIZES, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def _gptj():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**_SIZES, **sizes))


def _deberta():
    config = transformers.DebertaV2Config(
        **_SIZES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_position_embeddings=32,
    )
    return transformers.DebertaV2ForMaskedLM(config)


def _llama():
    config = transformers.LlamaConfig(
        **_SIZES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {"llama": _llama, "bloom": _bloom, "gptj": _gptj, "deberta": _deberta}


class Logits(nn.Module):
    """From tokens, without a cache: what tracers take."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.model.config.use_cache = False

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).logits


def converted(name, regularizer=None):
    """Scores are wide enough that entmax drops keys."""
    generator = torch.Generator().manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.35, generator=generator)
    return Logits(hf.convert(model, regularizer or fl.Tsallis(1.5)))


def ids(length):
    return tokens(batch=2, length=length)


def assert_model_as_eager(traced, model, length, gradients=True, tolerance=1e-9):
    """Logits at this length, and the gradients of every parameter."""
    actual, expected = traced(ids(length)), model(ids(length))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    if gradients:
        weights = [x for x in model.parameters() if x.requires_grad]
        pair = [
            torch.autograd.grad(logits.cos().sum(), weights, allow_unused=True)
            for logits in (actual, expected)
        ]
        assert any(x is not None and x.any() for x in pair[1])
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)
