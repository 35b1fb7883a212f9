"""Small random models of every kind that the audit opens, and inputs for them."""

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SMALL = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.BertModel(hf.BertConfig(**SMALL, **sizes, intermediate_size=48))


def _gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4))


def _llama():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    groups = {"num_key_value_heads": 2, "intermediate_size": 48}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **sizes, **groups))


def _t5():
    sizes = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48}
    return hf.T5ForConditionalGeneration(hf.T5Config(**SMALL, **sizes))


def _bart():
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = hf.BartConfig(**SMALL, **layers, **heads, **widths, max_position_embeddings=64)
    return hf.BartForConditionalGeneration(config)


def _vit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    image = {"image_size": 16, "patch_size": 8, "intermediate_size": 48}
    return hf.ViTModel(hf.ViTConfig(**sizes, **image))


BUILDERS = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "bart": _bart,
    "vit": _vit,
}
KINDS = {
    "bert": {"encoder": "attentions"},
    "gpt2": {"decoder": "attentions"},
    "llama": {"decoder": "attentions"},
    "t5": {
        "encoder": "encoder_attentions",
        "decoder": "decoder_attentions",
        "cross": "cross_attentions",
    },
    "vit": {"encoder": "attentions"},
}
KINDS["bart"] = KINDS["t5"]


def build(name, implementation="eager"):
    """In float64, every parameter random."""
    torch.manual_seed(0)
    model = BUILDERS[name]().double().eval()
    for path, parameter in model.named_parameters():
        if "norm" not in path.lower():
            torch.nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation(implementation)
    return model


def inputs(name):
    """Two texts, the second padded on the right; or two images."""
    g = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g, dtype=torch.float64)}
    ids = torch.randint(3, 60, (2, 7), generator=g)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    arguments = {"input_ids": ids * mask, "attention_mask": mask}
    if name in ("t5", "bart"):
        arguments["decoder_input_ids"] = torch.randint(3, 60, (2, 5), generator=g)
    return arguments


LETTERS = "abcdefghijklmnopqrstuvwxyz"
FRAMES = {  # special tokens around a text, as the tokenizers of these families set them
    "bert": "<s> $A </s>",
    "gpt2": "$A",
    "llama": "<s> $A",
    "t5": "$A </s>",
    "bart": "<s> $A </s>",
}


def tokenizer(name, **settings):
    """Of single letters with spaces between them: 0 pads, 1 begins, 2 ends, 3 is unknown."""
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", 1), ("</s>", 2)]
    inner.post_processor = processors.TemplateProcessing(
        single=FRAMES[name], special_tokens=[one for one in special if one[0] in FRAMES[name]]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    given = {"model_input_names": ["input_ids", "attention_mask"], **names, **settings}
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, **given)


def processor():
    """Of images for the ViT above: 2 x 2 patches."""
    return hf.ViTImageProcessorPil(size={"height": 16, "width": 16})


def pictures(folder, count=3):
    """Paths of random images of several sizes."""
    g = np.random.default_rng(0)
    paths = []
    for number in range(count):
        pixels = g.integers(0, 256, (20 + 3 * number, 16 + 5 * number, 3), dtype=np.uint8)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths
