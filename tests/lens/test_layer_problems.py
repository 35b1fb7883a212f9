"""The layer is the first-order solution: its weights are the model's own attention."""

import pytest
import torch

from fenchel import lens
from tests.lens.models import CASES, inputs_of, model_of

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def own_weights(model, inputs, kind):
    """What the model says itself: (batch, head, query, key) of each layer."""
    given = dict(inputs)
    if kind == "encoder" and model.config.model_type in ("t5", "mt5"):
        model = model.get_encoder()
    elif "labels" in given and not hasattr(model, "lm_head"):
        labels = given.pop("labels")
        given["decoder_input_ids"] = model._shift_right(labels)
    with torch.no_grad():
        output = model(**given, output_attentions=True)
    names = {"encoder": "attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    return output[names[kind]]


def words_of(inputs, kind):
    if kind == "encoder":
        return inputs["attention_mask"].bool()
    return inputs["labels"] != -100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("settings", [{}, {"scaling": 0.8, "reliability": 3.0}])
def test_first_order_is_the_models_attention(name, kind, dtype, settings):
    model, inputs = model_of(name, dtype), inputs_of(kind)
    expected = own_weights(model, inputs, kind)
    words = words_of(inputs, kind)
    layers = lens.problems(model, inputs, attention=kind, **settings)
    assert len(layers) == len(expected) == 2
    for problem, weights in zip(layers, expected, strict=True):
        ours = problem.first_order().weights
        assert ours.shape == weights.shape
        apart = (ours - weights).abs().amax(-1)  # (batch, head, query)
        assert apart.mT[words].max() <= TOLERANCE[dtype]
        assert weights.amax(-1).mT[words].max() > 0.6  # far from even, or the test says nothing
        assert problem.templates.shape[-1] == 32  # those of the model, not of a head


@pytest.mark.parametrize(
    ("name", "kind"), [("bert", "encoder"), ("t5", "decoder"), ("t5", "cross")]
)
def test_sdpa_gives_the_same_problems(name, kind):
    inputs = inputs_of(kind)
    problems = [
        lens.problems(model_of(name, implementation=way), inputs, attention=kind)
        for way in ("eager", "sdpa")
    ]
    for one, other in zip(*problems, strict=True):
        apart = one.first_order().weights - other.first_order().weights
        assert apart.transpose(1, 2)[words_of(inputs, kind)].abs().max() <= 1e-10


def test_sdpa_without_a_mask_is_still_causal():
    inputs = {"input_ids": torch.arange(3, 12)[None], "decoder_input_ids": torch.arange(3, 9)[None]}
    for way in ("eager", "sdpa"):
        (problem, _) = lens.problems(
            model_of("t5", implementation=way), inputs, attention="decoder"
        )
        weights = problem.first_order().weights
        assert (weights.triu(1) == 0).all()
        assert (weights.tril() > 0).sum() > 4 * 6


def test_a_wrong_factor_is_noticed():
    """The check above can fail: BERT's own scaling applied to T5, and a bias left out."""
    model, inputs = model_of("t5"), inputs_of()
    expected = own_weights(model, inputs, "encoder")[0]
    problem = lens.problems(model, inputs)[0]
    for wrong in (
        problem.__class__(**{**vars(problem), "evidence": problem.evidence / 6**0.5}),
        problem.__class__(**{**vars(problem), "preference": None}),
    ):
        assert (wrong.first_order().weights - expected)[0].abs().max() > 1e-2


def test_fewer_coordinates_change_no_length():
    problem = lens.problems(model_of("bert"), inputs_of())[1]
    small = problem.reduce()
    assert small.templates.shape[-1] == 10
    one, other = problem.exact(), small.exact()
    for name in ("multiplier", "mean"):
        long, short = getattr(one, name).norm(dim=-1), getattr(other, name).norm(dim=-1)
        assert (long - short).abs().max() <= 1e-12 * long.max()
    assert (one.weights - other.weights).abs().max() <= 1e-12
    assert (problem.parameter() - small.parameter()).abs().max() <= 1e-12


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_a_causal_bert_is_a_decoder(way):
    inputs = inputs_of()
    with torch.no_grad():
        output = model_of("bert-causal")(**inputs, output_attentions=True)
    model = model_of("bert-causal", implementation=way)
    problem = lens.problems(model, inputs, attention="decoder")[1]
    apart = (problem.first_order().weights - output.attentions[1]).abs().amax(-1)
    assert apart.mT[inputs["attention_mask"].bool()].max() <= 1e-10
    with pytest.raises(ValueError, match="no encoder attention; it has: decoder"):
        lens.problems(model, inputs)
