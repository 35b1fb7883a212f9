"""Folders of small random models, as save_pretrained writes them, with a real tokenizer."""

import json
import os
import pickle
import shutil

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.lens.architectures import build

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
WORDS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer(pad=True, longest=32):
    """A word a letter; [CLS] before and [SEP] after."""
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    names |= {"pad_token": "[PAD]"} if pad else {}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=longest,
        **names,
        model_input_names=["input_ids", "attention_mask"],
    )


def save(name, folder, pad=True):
    """A small model of this kind in the folder, which is returned."""
    hf.utils.logging.disable_progress_bar()
    model = build(name).float()
    model.config.dtype = "float32"
    model.save_pretrained(folder)
    if name == "vit":
        size = {"height": 16, "width": 16}
        processor = {"image_processor_type": "ViTImageProcessor", "size": size}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    else:
        tokenizer(pad).save_pretrained(folder)
    return folder


class Trap:
    """A pickle of it makes a folder when it is opened."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def pickled(folder, to):
    """The same with its weights as a pickle; opened, it would leave `to`/trace."""
    shutil.copytree(folder, to)
    (to / "model.safetensors").unlink()
    (to / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(to / "trace")))
    return to


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
