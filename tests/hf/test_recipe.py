"""Recipes: from a dictionary or a file, for the model they are of and for no other."""

import json
import math

import pytest
import torch
import transformers as hf

from fenchel.hf import convert
from fenchel.hf.recipe import alphas_of

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16}
IDS = torch.tensor([[1, 5, 6, 7, 2]])


def config(layers=2, heads=2):
    return hf.BertConfig(**SIZES, num_hidden_layers=layers, num_attention_heads=heads)


def bert(kind=hf.BertModel, **sizes):
    torch.manual_seed(0)
    model = kind(config(**sizes)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def recipe(prefix=""):
    rows = [[1.0, 1.5], [2.0, 1.25]]
    paths = [f"{prefix}encoder.layer.{layer}.attention.self" for layer in range(2)]
    return {"format": "fenchel-recipe-1", "alphas": dict(zip(paths, rows, strict=True))}


def states(model):
    with torch.no_grad():
        return model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]


def held(model):
    """Alphas of the attentions, in order."""
    return [
        module.fenchel_regularizer().alpha.flatten().tolist()
        for module in model.modules()
        if hasattr(module, "fenchel_regularizer")
    ]


@pytest.mark.parametrize("how", [lambda path: path, str])
def test_a_file_is_the_same_as_the_dictionary(tmp_path, how):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe()), encoding="utf-8")
    one, two = convert(bert(), recipe()), convert(bert(), how(path))
    assert held(one) == held(two) == [[1.0, 1.5], [2.0, 1.25]]
    assert torch.equal(states(one), states(two))
    assert not torch.allclose(states(one), states(bert()))


def test_a_model_with_a_head_on_top_and_back():
    on_top = bert(hf.BertForSequenceClassification)
    convert(on_top, recipe())
    assert held(on_top) == [[1.0, 1.5], [2.0, 1.25]]
    assert held(convert(bert(), recipe("bert."))) == held(on_top)
    plain = on_top.bert
    assert torch.equal(states(on_top), states(plain))


def test_sdpa_leads_back():
    model, before = bert(), states(bert())
    convert(model, recipe())
    model.set_attn_implementation("eager")
    torch.testing.assert_close(states(model), before)


@pytest.mark.parametrize("sizes", [{"layers": 3}, {"layers": 1}, {"heads": 4}, {"heads": 1}])
def test_a_recipe_of_another_model_is_refused(sizes):
    model = bert(**sizes)
    before, implementation = states(model), model.config._attn_implementation
    with pytest.raises(ValueError, match="the recipe is for another model"):
        convert(model, recipe())
    assert model.config._attn_implementation == implementation
    assert not held(model)
    assert torch.equal(states(model), before)


def test_an_architecture_of_other_names_is_refused():
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match=r"another model.*'encoder\.layer\.0"):
        convert(model, recipe())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{ no json", "is not JSON"),
        ("[1, 2]", "must hold an object, got list"),
        ("{}", "a recipe says format 'fenchel-recipe-1'"),
        ('{"format": "fenchel-recipe-1"}', "alphas by path"),
        ('{"format": "fenchel-recipe-9", "alphas": {"a": [1.0]}}', "a recipe says format"),
        ('{"format": "fenchel-recipe-1", "alphas": {"a": [0.5]}}', "at least 1"),
        ('{"format": "fenchel-recipe-1", "alphas": {"a": [NaN]}}', "at least 1"),
        ('{"format": "fenchel-recipe-1", "alphas": {"a": []}}', "at least 1"),
        ('{"format": "fenchel-recipe-1", "alphas": {"a": ["x"]}}', "at least 1"),
        ('{"format": "fenchel-recipe-1", "alphas": {"a": [true]}}', "at least 1"),
        (
            '{"format": "fenchel-recipe-1", "alphas": {"a": [Infinity]}}',
            "finite numbers of at least 1",
        ),
        ('{"format": "fenchel-recipe-1", "alphas": {"a": 1.5}}', "a list of finite numbers"),
        ('{"format": "fenchel-recipe-1", "alphas": {}}', "another model"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, content, message):
    path = tmp_path / "recipe.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        convert(bert(), path)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the recipe .*none\.json"):
        convert(bert(), tmp_path / "none.json")


def test_binary_is_no_recipe(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ValueError, match="is not JSON"):
        convert(bert(), path)


def test_alphas_are_read():
    alphas = alphas_of(recipe())
    assert list(alphas.values()) == [[1.0, 1.5], [2.0, 1.25]]
    assert all(math.isfinite(alpha) for row in alphas.values() for alpha in row)
