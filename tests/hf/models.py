"""Small random models of each family, with inputs, for every test of this room."""

from contextlib import contextmanager

import torch

from fenchel import Tsallis
from tests import needs

transformers = needs.package("transformers", "fenchel.hf")

# What needs transformers is imported behind the skip, and by the tests from here.
from transformers.utils import logging  # noqa: E402

from fenchel import hf  # noqa: E402
from fenchel.hf.names import derived_name, regularizer_by_name  # noqa: E402
from fenchel.hf.translate import TranslatedAttention, split_mask  # noqa: E402

__all__ = [
    "TranslatedAttention",
    "derived_name",
    "hf",
    "regularizer_by_name",
    "split_mask",
    "transformers",
]

logging.set_verbosity_error()
logging.disable_progress_bar()
hf.register("fenchel:test-1.3", Tsallis(1.3))

IMPLEMENTATIONS = ["fenchel:softmax", "fenchel:entmax15", "fenchel:sparsemax", "fenchel:test-1.3"]
SPARSE = IMPLEMENTATIONS[1:]
DECODERS = ["gpt2", "llama", "t5", "bart"]
SEQUENCE_TO_SEQUENCE = ["t5", "bart"]
PAD, VOCABULARY = 1, 40

_NAMES = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _bert():
    config = transformers.BertConfig(**_NAMES, **_SIZES, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config)


def _roberta():
    config = transformers.RobertaConfig(**_NAMES, **_SIZES, max_position_embeddings=40)
    return transformers.RobertaForMaskedLM(config)


def _gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_NAMES, **sizes, bos_token_id=0))


def _llama():
    config = transformers.LlamaConfig(**_NAMES, **_SIZES, num_key_value_heads=2, bos_token_id=0)
    return transformers.LlamaForCausalLM(config)


def _t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        **_NAMES,
        **sizes,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart():
    config = transformers.BartConfig(
        **_NAMES,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=32,
        bos_token_id=0,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config)


def _vit():
    config = transformers.ViTConfig(**_SIZES, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(config)


FAMILIES = {
    "bert": _bert,
    "roberta": _roberta,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "bart": _bart,
    "vit": _vit,
}

# Modules that attend: layers times self- and cross-attention.
ATTENTIONS = {"bert": 2, "roberta": 2, "gpt2": 2, "llama": 2, "t5": 6, "bart": 6, "vit": 2}


def tiny(family, implementation="eager", dtype=torch.float64):
    """A model whose scores are wide enough that sparse maps drop keys."""
    generator = torch.Generator().manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(float(norm), 0.35, generator=generator)
    model.set_attn_implementation(implementation)
    return model


def tokens(batch=2, length=7, seed=1):
    return torch.randint(3, VOCABULARY, (batch, length), generator=_seeded(seed))


def inputs(family, dtype=torch.float64):
    """What the family's forward takes, without padding."""
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=dtype, generator=_seeded(1))}
    if family in SEQUENCE_TO_SEQUENCE:
        return {"input_ids": tokens(), "decoder_input_ids": tokens(length=6, seed=2)}
    return {"input_ids": tokens()}


def logits(model, **arguments):
    with torch.no_grad():
        return model(**arguments).logits


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


@contextmanager
def softmax_as_given(monkeypatch):
    """Eager attention of Llama and ViT rounds its softmax to float32; here it does not."""
    exact = torch.nn.functional.softmax

    def softmax(scores, dim=-1, dtype=None, **_):
        return exact(scores, dim=dim)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


@contextmanager
def calls_of(monkeypatch):
    """The modules that reach our attention function, in order."""
    seen = []
    original = TranslatedAttention.__call__

    def counted(self, module, *arguments, **others):
        seen.append(module)
        return original(self, module, *arguments, **others)

    with monkeypatch.context() as patch:
        patch.setattr(TranslatedAttention, "__call__", counted)
        yield seen
