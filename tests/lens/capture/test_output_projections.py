"""The matrix from heads to the layer's output is found by what it is fed."""

import math
from pathlib import Path

import pytest
import torch
import transformers as hf

from fenchel import lens
from fenchel.lens.capture.output_projections import find_projections
from fenchel.lens.heads.datasets import make_dataset
from tests.lens.architectures import BUILDERS, SMALL, build, pictures, processor, tokenizer
from tests.lens.heads.reference import ATTENTIONS, output_of


def shown(name, folder):
    if name == "vit":
        return make_dataset(processor(), pictures(folder))
    targets = ["c d", "e"] if name in ("t5", "bart") else None
    return make_dataset(tokenizer(name), ["a b c", "d e"], targets)


@pytest.mark.parametrize("name", BUILDERS)
def test_it_is_the_real_module(name, tmp_path):
    model = build(name)
    projections = find_projections(model, shown(name, tmp_path).prepare(model, [0]).arguments)
    places = [(kind, layer) for kind in ATTENTIONS[name] for layer in range(2)]
    assert sorted(projections) == sorted(places)
    for kind, layer in places:
        module = output_of(name, model, ATTENTIONS[name][kind].format(layer))
        joined = torch.randn(3, 32, dtype=torch.float64)
        heads = joined.unflatten(-1, (4, 8)).transpose(0, 1)[None]  # (1, H, 3, e)
        with torch.no_grad():
            wanted = module(joined)
        torch.testing.assert_close(projections[kind, layer].apply(heads)[0], wanted)
        grams, weight = projections[kind, layer].grams(), projections[kind, layer].weight
        for head in range(4):
            head_output = heads[0, head]
            lengths = (head_output @ weight[head]).square().sum(-1)
            torch.testing.assert_close(((head_output @ grams[head]) * head_output).sum(-1), lengths)
        assert projections[kind, layer].select([2]).weight.shape == (1, 8, 32)


class Gate(torch.nn.Module):
    """Something between the heads and their projection."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, joined, *others):
        return self.inner(joined * joined.sigmoid(), *others)


def gated(layers):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.BertModel(hf.BertConfig(**SMALL, **sizes, intermediate_size=48)).double().eval()
    for layer in layers:
        attention = model.encoder.layer[layer].attention
        attention.output = Gate(attention.output)
    return model


def test_with_a_gate_between_there_is_none():
    one = gated([1])
    projections = find_projections(one, shown("bert", Path()).prepare(one, [0]).arguments)
    assert list(projections) == [("encoder", 0)]
    measures = ["weights", "what_if", "recipe"]
    rows = lens.audit(one, tokenizer("bert"), ["a b c", "d e"], measures=measures).rows()
    for row in rows:
        assert math.isnan(row["layer_moved_2"]) == math.isnan(row["layer_all_1.5"])
        assert math.isnan(row["layer_moved_2"]) == (row["layer"] == 1)
        assert math.isfinite(row["moved_2"])
        assert row["recipe_alpha"] >= 1
    both = gated([0, 1])
    audit = lens.audit(both, tokenizer("bert"), ["a b c", "d e"], measures=measures)
    assert not [column.name for column in audit.columns() if column.name.startswith("layer_")]
    assert all(row["recipe_alpha"] >= 1 for row in audit.rows())


class Adapted(torch.nn.Module):
    """A low-rank adapter around the linear map, as peft makes them."""

    def __init__(self, inner):
        super().__init__()
        self.base_layer = inner
        self.more = torch.nn.Linear(inner.in_features, inner.out_features, bias=False).double()

    def forward(self, x):
        return self.base_layer(x) + self.more(x)


class Scaled(torch.nn.Linear):
    """Not only its matrix, as a quantised map."""

    def forward(self, x):
        return 1.3 * super().forward(x)


def scaled(inner):
    replacement = Scaled(inner.in_features, inner.out_features).double()
    replacement.load_state_dict(inner.state_dict())
    return replacement


@pytest.mark.parametrize("change", [Adapted, scaled])
def test_a_map_that_is_more_than_its_matrix_is_left_out(change):
    model = build("bert")
    output = model.encoder.layer[0].attention.output
    output.dense = change(output.dense)
    projections = find_projections(model, shown("bert", None).prepare(model, [0]).arguments)
    assert list(projections) == [("encoder", 1)]
