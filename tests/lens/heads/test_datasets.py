"""What a model is shown: every text once, cut where it must be, padded on the right."""

import pytest
import torch
import transformers as hf

from fenchel.lens.heads import datasets as rooms
from fenchel.lens.heads.datasets import Images, Texts, grid, make_dataset
from fenchel.lens.tokenizing import token_limit
from tests.lens.architectures import SMALL, build, pictures, processor, tokenizer

TEXTS = ["a b c d e f g h", "a", "b c", "d e f", "g h i j k", "l m n o p q", "r s", ""]


def bert(positions=64):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(**SMALL, **sizes, intermediate_size=8, max_position_embeddings=positions)
    return hf.BertModel(config).eval()


def roberta(positions):
    names = {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 8, "max_position_embeddings": positions, "type_vocab_size": 1}
    return hf.RobertaModel(hf.RobertaConfig(**names, **sizes, **more)).eval()


def test_the_tightest_limit_holds():
    wide = tokenizer("bert")
    assert token_limit(bert(64), wide, 512) == 64
    assert token_limit(bert(64), wide, 10) == 10
    assert token_limit(bert(64), tokenizer("bert", model_max_length=20), 512) == 20
    assert token_limit(build("llama"), wide, 100_000) == 2048  # rotary: by the configuration
    assert token_limit(build("gpt2"), wide, 100_000) == 1024


def test_positions_of_roberta_begin_after_its_padding():
    """A table of 12 with padding 1 has places 2 to 11."""
    model = roberta(12)
    assert token_limit(model, tokenizer("bert"), 512) == 10
    shown = Texts(tokenizer("bert"), [" ".join("a" * 30)]).prepare(model, [0])
    assert shown.arguments["input_ids"].shape == (1, 10)
    with torch.no_grad():
        model(input_ids=torch.full((1, 10), 5))  # all ten have a place
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, 11), 5))


@pytest.mark.parametrize(("longest", "cut"), [(10, 0), (9, 1), (5, 3), (2, 7)])
def test_cut_counts(longest, cut):
    """Lengths with both marks: 10, 3, 4, 5, 7, 8, 4 and 2."""
    shown = Texts(tokenizer("bert"), TEXTS, longest=longest)
    assert shown.cut(bert(), range(8)) == cut
    assert shown.cut(bert(), [1, 2]) == (2 if longest == 2 else 0)
    assert shown.prepare(bert(), range(8)).arguments["input_ids"].shape[1] == longest


def test_groups_hold_each_text_once_and_little_padding():
    model, shown = bert(), Texts(tokenizer("bert"), TEXTS * 3, longest=8)
    groups = shown.groups(model, range(24))
    assert sorted(place for group in groups for place in group) == list(range(24))
    for group in groups:
        real = shown.prepare(model, group).first.real
        lengths = real.sum(1)
        assert real.shape[1] == lengths.max() <= 1.4 * lengths.min()
    some = [3, 5, 7, 11]
    assert sorted(place for group in shown.groups(model, some) for place in group) == some


def test_groups_fit(monkeypatch):
    monkeypatch.setattr(rooms, "_ENTRIES", 2 * 10**2 * 3)
    shown = Texts(tokenizer("bert"), TEXTS * 3)
    for group in shown.groups(bert(), range(24)):
        width = shown.prepare(bert(), group).first.real.shape[1]
        assert len(group) == 1 or len(group) * 2 * width**2 <= 600


def test_padding_is_on_the_right_whatever_the_tokenizer_likes():
    left = Texts(tokenizer("bert", padding_side="left"), TEXTS).prepare(bert(), range(8))
    right = Texts(tokenizer("bert"), TEXTS).prepare(bert(), range(8))
    assert torch.equal(left.arguments["input_ids"], right.arguments["input_ids"])
    assert (left.first.real.long().diff(dim=1) <= 0).all()
    assert torch.equal(left.first.real, left.arguments["input_ids"] != 0)


def test_special_tokens_are_the_tokenizers_and_padding_is_none_of_them():
    first = Texts(tokenizer("bert"), ["a b", ""]).prepare(bert(), [0, 1]).first
    assert first.special.tolist() == [[True, False, False, True], [True, True, False, False]]


def test_words_read_as_tokens():
    shown = Texts(tokenizer("bert"), ["a b"]).prepare(bert(), [0])
    assert shown.words == ([["<s>", "a", "b", "</s>"]],)


def test_a_decoder_is_shown_its_target_moved_on_by_one():
    shown = Texts(tokenizer("t5"), ["a b", "c"], targets=["d", "e f g"])
    batch = shown.prepare(build("t5"), [0, 1])
    wanted = [[0, 7, 2, 0], [0, 8, 9, 10]]  # 0 begins; the last token of a target is not shown
    assert batch.arguments["decoder_input_ids"].tolist() == wanted
    assert batch.second.real.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.second.special.tolist() == [[True, False, False, False], [True] + [False] * 3]
    assert batch.last is batch.second
    assert batch.sides("cross") == (batch.second, batch.first)
    assert batch.sides("decoder") == (batch.second, batch.second)
    assert batch.sides("encoder") == (batch.first, batch.first)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_else_the_model_writes_greedily(name):
    """Each step again by hand: the likeliest word after what is there."""
    model, shown = build(name), Texts(tokenizer(name), ["a b c", "d"], generated=5)
    for place in (0, 1):
        given = shown.prepare(model, [place]).arguments
        ids = given["decoder_input_ids"]
        assert 1 <= ids.shape[1] <= 5
        encoder_inputs = {key: given[key] for key in ("input_ids", "attention_mask")}
        for at in range(1, ids.shape[1]):
            with torch.no_grad():
                logits = model(**encoder_inputs, decoder_input_ids=ids[:, :at]).logits[0, -1]
            assert int(logits.argmax()) == int(ids[0, at])


def test_what_comes_after_the_end_does_not_count():
    class Writes:
        """Padding in the midst of a text is a word like others; after the end it is padding."""

        config = type("Config", (), {"is_encoder_decoder": True, "max_position_embeddings": 64})
        generation_config = type("Config", (), {"eos_token_id": 2})

        def can_generate(self):
            return True

        def modules(self):
            return iter(())

        def eval(self):
            return self

        def generate(self, **settings):
            assert settings["max_new_tokens"] == 5
            assert settings["do_sample"] is False
            return torch.tensor([[0, 5, 2, 0, 0, 0], [0, 0, 7, 8, 0, 9]])

        def parameters(self):
            return iter([torch.zeros(1)])

        def named_modules(self):
            return iter(())

    batch = Texts(tokenizer("t5"), ["a", "b"], generated=5).prepare(Writes(), [0, 1])
    assert batch.arguments["decoder_input_ids"].tolist() == [[0, 5, 2, 0, 0], [0, 0, 7, 8, 0]]
    assert batch.second.real.tolist() == [[True, True, False, False, False], [True] * 5]


def test_images_are_patches_after_a_class_token(tmp_path):
    model, shown = build("vit"), Images(processor(), pictures(tmp_path))
    batch = shown.prepare(model, [2, 0])
    assert batch.arguments["pixel_values"].shape == (2, 3, 16, 16)
    assert batch.arguments["pixel_values"].dtype == torch.float64
    assert batch.first.real.all()
    assert batch.first.special.tolist() == [[True] + [False] * 4] * 2
    assert batch.words[0][0] == ["[class]", "1,1", "1,2", "2,1", "2,2"]
    assert grid(model, batch.arguments["pixel_values"]) == (1, 2, 2)
    assert [place for group in shown.groups(model, [0, 1, 2]) for place in group] == [0, 1, 2]
    assert shown.cut(model, [0, 1, 2]) == 0


def test_a_classifier_of_images_has_the_same_patches(tmp_path):
    model = hf.ViTForImageClassification(build("vit").config).double().eval()
    batch = Images(processor(), pictures(tmp_path)).prepare(model, [0])
    assert batch.first.special.tolist() == [[True] + [False] * 4]


def test_what_is_no_image_is_refused(tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        Images(processor(), [path]).prepare(build("vit"), [0])


def test_misuse_is_refused():
    words = tokenizer("t5")
    with pytest.raises(ValueError, match="must not be empty"):
        make_dataset(words, [])
    with pytest.raises(TypeError, match="got one string"):
        make_dataset(words, "a b c")
    with pytest.raises(ValueError, match="one target a text is needed, got 1 for 2"):
        make_dataset(words, ["a", "b"], ["c"])
    with pytest.raises(ValueError, match="images have none"):
        make_dataset(processor(), ["a.png"], ["c"])
    with pytest.raises(ValueError, match="longest"):
        make_dataset(words, ["a"], longest=1)
    with pytest.raises(ValueError, match="generated"):
        make_dataset(words, ["a"], generated=0)
