"""Texts that a report draws: the strongest links of every head, in 16 bits."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from fenchel.lens.heads.datasets import make_dataset
from fenchel.lens.heads.examples import make_examples, pack_links
from fenchel.lens.heads.settings import AuditSettings
from tests.lens.architectures import KINDS, build, pictures, processor, tokenizer

TEXTS = ["a b <script> c", "d e f"]
PLAIN = AuditSettings(("weights",))


def numbers(text, *shape):
    return np.frombuffer(base64.b64decode(text), "<u2").reshape(shape)


def recorded(model, prepared):
    """(kind, layer) -> weights of transformers' own eager attention, (H, Q, n), of one text."""
    with torch.no_grad():
        outputs = model(**prepared.arguments, output_attentions=True)
    kinds = KINDS[model.config.model_type]
    return {
        f"{kind}/{layer}": weights[0]
        for kind, field in kinds.items()
        for layer, weights in enumerate(getattr(outputs, field))
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bart", "vit"])
def test_links_are_the_models_strongest(name, tmp_path):
    model = build(name)
    tools = processor() if name == "vit" else tokenizer(name)
    targets = ["a b", "c"] if name in ("t5", "bart") else None
    shown = make_dataset(tools, pictures(tmp_path) if name == "vit" else TEXTS, targets)
    examples = make_examples(model, shown, [1, 0], PLAIN)
    for place, example in zip([1, 0], examples, strict=True):
        wanted = recorded(model, shown.prepare(model, [place]))
        assert example.links.keys() == wanted.keys()
        for key, links in example.links.items():
            heads, queries, keys = wanted[key].shape
            width = links.width
            assert (links.queries, links.keys) == (queries, keys)
            assert width == min(32 if name == "vit" else 8, keys)
            to = numbers(links.to, heads, queries, width).astype(np.int64)
            weight = numbers(links.weight, heads, queries, width) / 65535
            received = numbers(links.received, heads, keys) / 65535
            theirs = wanted[key].numpy()
            assert np.abs(np.take_along_axis(theirs, to, -1) - weight).max() < 1e-5
            assert np.abs(weight - -np.sort(-theirs, -1)[..., :width]).max() < 1e-5
            assert np.abs(received - theirs.mean(1)).max() < 1e-5


def test_tokens_and_special_places():
    example = make_examples(
        build("bart"), make_dataset(tokenizer("bart"), TEXTS, ["a b", "c"]), [0], PLAIN
    )[0]
    assert example.text == "a b <script> c"
    assert example.tokens["encoder"] == ["<s>", "a", "b", "<unk>", "c", "</s>"]
    assert example.special["encoder"] == [0, 3, 5]
    assert example.tokens["decoder"] == ["</s>", "<s>", "a", "b"]
    assert example.special["decoder"] == [0, 1]
    assert example.image is None


def test_only_wanted_heads():
    wanted = AuditSettings(("weights",), layers=(1,), heads=(2,))
    example = make_examples(build("bert"), make_dataset(tokenizer("bert"), TEXTS), [1], wanted)[0]
    assert list(example.links) == ["encoder/1"]
    assert len(numbers(example.links["encoder/1"].received, -1)) == 5


def test_an_image_is_shown_as_the_model_sees_it(tmp_path):
    example = make_examples(
        build("vit"), make_dataset(processor(), pictures(tmp_path)), [1], PLAIN
    )[0]
    assert example.text == "1.png"
    assert {key: getattr(example.image, key) for key in ("rows", "columns", "first")} == {
        "rows": 2, "columns": 2, "first": 1,
    }  # fmt: skip
    head, _, data = example.image.data.partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (16, 16)


def test_packed_by_hand():
    weights = torch.tensor([[[0.25, 0.75, 0.0], [0.5, 0.1, 0.4]]], dtype=torch.float64)
    links = pack_links(weights, 2)
    assert numbers(links.to, 1, 2, 2).tolist() == [[[1, 0], [0, 2]]]
    half = [[[49151, 16384], [32768, 26214]]]
    assert numbers(links.weight, 1, 2, 2).tolist() == half
    assert numbers(links.received, 1, 3).tolist() == [[24576, 27852, 13107]]
