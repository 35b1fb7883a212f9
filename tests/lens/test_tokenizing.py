"""What the tokenizer makes of sentences."""

import pytest
import torch

from fenchel import lens
from tests.lens.models import model_of, transformers

WORDS = ["a", "man", "is", "playing", "the", "guitar", "and", "nobody", "knew", "it"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small BERT with a tokenizer, as from_pretrained likes it."""
    path = tmp_path_factory.mktemp("models") / "tiny-bert"
    model_of("bert", torch.float32).save_pretrained(path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=numbers).save_pretrained(path)
    return path


def test_encode_for_a_decoder(folder):
    tokenizer = lens.load(folder)[1]
    inputs = lens.encode(tokenizer, ["a man is playing", "the guitar"], decoder=True)
    assert set(inputs) == {"input_ids", "attention_mask", "labels"}
    words = inputs["attention_mask"].bool()
    assert torch.equal(inputs["labels"][words], inputs["input_ids"][words])
    assert (inputs["labels"][~words] == -100).all()
