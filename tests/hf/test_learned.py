"""Regularisers that a model holds: they train, are saved, and follow it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import fenchel as fl
from tests.hf.models import ATTENTIONS, FAMILIES, calls_of, hf, inputs, logits, tiny

HEADS = 4


def each(layer):
    return fl.nn.LearnedTsallis(HEADS, init=1.3)


def alphas(model):
    return {name: p for name, p in model.named_parameters() if "fenchel_regularizer" in name}


def backward(model, family):
    model.zero_grad()
    model(**inputs(family)).logits.square().mean().backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_regulariser_in_use(family, monkeypatch):
    model, batch = tiny(family), inputs(family)
    fixed = logits(hf.convert(tiny(family), fl.Tsallis(1.3)), **batch)
    assert hf.convert(model, each) is model
    with calls_of(monkeypatch) as seen:
        actual = logits(model, **batch)
    assert len(seen) == ATTENTIONS[family] == len(alphas(model))
    assert (actual - fixed).abs().max() <= 1e-5  # alpha is computed in float32
    with torch.no_grad():
        for raw in alphas(model).values():
            raw.fill_(20.0)  # sparsemax
    sparsest = logits(hf.convert(tiny(family), "fenchel:sparsemax"), **batch)
    assert (logits(model, **batch) - sparsest).abs().max() <= 1e-5
    assert (sparsest - fixed).abs().max() > 1e-3


def test_alpha_trains():
    model = hf.convert(tiny("llama"), each).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = [raw.detach().clone() for raw in alphas(model).values()]
    for _ in range(2):
        backward(model, "llama")
        assert all(raw.grad.abs().max() > 0 for raw in alphas(model).values())
        optimizer.step()
    assert all(not torch.equal(x, y) for x, y in zip(before, alphas(model).values(), strict=True))


def test_the_gradient_is_that_of_finite_differences():
    model = hf.convert(tiny("bert"), lambda layer: each(layer).double())
    backward(model, "bert")
    raw = model.bert.encoder.layer[1].attention.self.fenchel_regularizer.raw
    step = 1e-5
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            raw[2] += sign * step
            losses.append(logits(model, **inputs("bert")).square().mean())
            raw[2] -= sign * step
    slope = (losses[0] - losses[1]) / (2 * step)
    assert (raw.grad[2] - slope).abs() <= 1e-5 * slope.abs()


def test_with_gradient_checkpointing():
    actual = []
    for recompute in (False, True):
        model = hf.convert(tiny("llama"), each).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        backward(model, "llama")
        actual.append(torch.stack([raw.grad for raw in alphas(model).values()]))
    assert (actual[0] - actual[1]).abs().max() <= 1e-6 * actual[0].abs().max()


def test_one_module_is_shared_by_all_layers():
    shared = fl.nn.LearnedTsallis(HEADS)
    model = hf.convert(tiny("llama"), shared)
    assert len(alphas(model)) == 1
    assert all(layer.self_attn.fenchel_regularizer is shared for layer in model.model.layers)
    backward(model, "llama")
    assert shared.raw.grad.abs().max() > 0


def test_state_dicts_and_copies(tmp_path):
    model, batch = hf.convert(tiny("t5"), each), inputs("t5")
    with torch.no_grad():
        for raw in alphas(model).values():
            raw.uniform_(-2, 2)
    expected = logits(model, **batch)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, **batch), expected)
    other = hf.convert(tiny("t5"), each)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, **batch), expected)
    model.save_pretrained(tmp_path)
    loaded = hf.convert(type(model).from_pretrained(tmp_path).eval(), each)
    loaded.load_state_dict(model.state_dict())
    assert (logits(loaded, **batch) - expected).abs().max() <= 1e-12


def test_another_choice_drops_it():
    model = hf.convert(tiny("bert"), each)
    hf.convert(model, "fenchel:entmax15")
    assert not alphas(model)
    assert model.state_dict().keys() == tiny("bert").state_dict().keys()


@pytest.mark.parametrize("kind", [nn.Parameter, lambda x: x], ids=["parameter", "tensor"])
def test_tensors_of_a_regulariser_are_held_too(kind):
    alpha = kind(torch.full((HEADS, 1), 1.3))
    model = hf.convert(tiny("llama"), fl.Tsallis(alpha))
    fixed = hf.convert(tiny("llama"), fl.Tsallis(1.3))
    batch = inputs("llama")
    assert (logits(model, **batch) - logits(fixed, **batch)).abs().max() <= 1e-5
    assert len(alphas(model)) == isinstance(alpha, nn.Parameter)


def test_misuse():
    model = tiny("bert")
    with pytest.raises(TypeError, match="must be a Regularizer"):
        hf.convert(model, fl.nn.LearnedTsallis)
    graph = 1 + torch.ones(HEADS, 1, requires_grad=True)
    with pytest.raises(ValueError, match="LearnedTsallis"):
        hf.convert(model, fl.Tsallis(graph))
    assert model.config._attn_implementation == "eager"
    hf.convert(model, each)
    again = tiny("bert")
    again.set_attn_implementation("fenchel:held")
    with pytest.raises(ValueError, match=r"holds no regulariser.*fenchel\.hf\.convert"):
        logits(again, **inputs("bert"))
    assert "fenchel:held" not in hf.names()


def test_gradient_checkpointing():
    """A converted model computes the same again; a block around the model is refused."""
    gradients = []
    for checkpointing in (False, True):
        model = tiny("llama", "fenchel:entmax15").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**inputs("llama")).logits.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-12 * gradients[0].abs().max()
    model = tiny("llama", "sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        fl.replace_sdpa(fl.Tsallis(1.5)),
        pytest.raises(RuntimeError, match=r"fenchel\.hf\.convert"),
    ):
        model(**inputs("llama"))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_and_a_decoder_come_back(family, tmp_path):
    """Their parts are built first, and know fewer attentions than were saved."""
    model = hf.convert(tiny(family), lambda layer: each(layer).double())
    model.save_pretrained(tmp_path)
    load = partial(type(model).from_pretrained, tmp_path, dtype=torch.float64)
    again = load(attn_implementation="fenchel:held").eval()
    batch = inputs(family)
    assert (logits(model, **batch) - logits(again, **batch)).abs().max() <= 1e-9
    with pytest.warns(UserWarning, match="fenchel:entmax15 leaves it out"):
        load(attn_implementation="fenchel:entmax15")


def test_a_wrong_number_of_heads_is_refused_at_once():
    model = tiny("llama")
    with pytest.raises(ValueError, match="does not run with this regulariser"):
        hf.convert(model, lambda layer: fl.nn.LearnedTsallis(3))
    assert model.config._attn_implementation == "eager"


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no attention matches '\*.layer.0.\*'; there are "):
        hf.convert(tiny("llama"), fl.Tsallis(1.5), skip="*.layer.0.*")
