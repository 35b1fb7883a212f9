"""Sentences from a file, and what the tokenizer makes of them."""

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


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.tsv"
    path.write_text("a man is playing\t1\n\n the guitar \t0\nnobody knew it\t1\n", encoding="utf-8")
    return path


def test_sentences(text):
    assert lens.sentences(text, 2) == ["a man is playing", "the guitar"]
    assert len(lens.sentences(text, 100)) == 3
    with pytest.raises(ValueError, match="count must be"):
        lens.sentences(text, 0)
    empty = text.with_name("empty.txt")
    empty.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no sentence"):
        lens.sentences(empty, 1)


def test_encode_for_a_decoder(folder):
    tokenizer = lens.load(folder)[1]
    inputs = lens.encode(tokenizer, ["a man is playing", "the guitar"], decoder=True)
    assert set(inputs) == {"input_ids", "attention_mask", "labels"}
    words = inputs["attention_mask"].bool()
    assert torch.equal(inputs["labels"][words], inputs["input_ids"][words])
    assert (inputs["labels"][~words] == -100).all()
