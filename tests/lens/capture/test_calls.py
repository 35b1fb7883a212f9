"""What is captured is what the model computes, for every kind of model."""

import pytest
import torch

from fenchel.lens.capture.calls import capture_attentions, watch
from fenchel.lens.families import find_attentions
from tests.lens.architectures import BUILDERS, KINDS, build, inputs


def captured(model, given):
    calls = []
    with watch(model, calls.append) as met:
        output = model(**given)
    return calls, met, output


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", BUILDERS)
def test_weights_are_the_models_own(name, implementation):
    model, given = build(name), inputs(name)
    with torch.no_grad():
        recorded = model(**given, output_attentions=True)
    model.set_attn_implementation(implementation)
    calls, _, output = captured(model, given)
    for kind, field in KINDS[name].items():
        mine = [call for call in calls if call.kind == kind]
        theirs = getattr(recorded, field)
        assert [call.layer for call in mine] == list(range(len(theirs)))
        for call, weights in zip(mine, theirs, strict=True):
            # transformers' own softmax of Llama and ViT rounds to float32
            torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)
    assert {call.kind for call in calls} == set(KINDS[name])
    torch.testing.assert_close(output[0], recorded[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_output_of_a_call_is_the_expectation(name):
    """Weights times values, heads side by side, is what the module works on with."""
    model, given = build(name), inputs(name)
    calls, _, _ = captured(model, given)
    for call in calls:
        _, value = call.repeat_groups()
        assert (call.weights() @ value).shape == (*call.query.shape[:3], value.shape[-1])
        seen = call.mask()
        assert (call.weights()[~seen] == 0).all()
        assert (call.weights().sum(-1)[seen.any(-1)] - 1).abs().max() < 1e-12


def test_the_future_is_hidden():
    calls, _, _ = captured(build("llama"), inputs("llama"))
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert all((call.weights()[..., future] == 0).all() for call in calls)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_is_left_as_it_was(implementation):
    model, given = build("bart", implementation), inputs("bart")
    model.train()
    with torch.no_grad():
        model.eval()
        before = model(**given)[0]
        model.train()
    _, met, _ = captured(model, given)
    assert model.training
    assert model.config._attn_implementation == implementation
    assert len(met) == 6
    assert not any(module._forward_pre_hooks for module in model.modules())
    calls = []
    with torch.no_grad():
        after = model.eval()(**given)[0]
    assert not calls
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_it_is_put_back_after_an_error():
    model = build("bert")
    with pytest.raises(RuntimeError, match="stop"), watch(model, _fail):
        model(**inputs("bert"))
    assert model.config._attn_implementation == "eager"


def _fail(call):
    raise RuntimeError("stop")


def test_a_module_without_attention_is_refused():
    with (
        pytest.raises((TypeError, ValueError), match="attention"),
        watch(torch.nn.Linear(2, 2), print),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "kind"), [("bert", "encoder"), ("t5", "encoder"), ("t5", "decoder"), ("t5", "cross")]
)
def test_entering_tokens_are_what_the_projections_are_given(name, kind):
    """Projected by the model's own matrices, they are the queries and keys of the call."""
    model, given = build(name), inputs(name)
    attentions = find_attentions(model, kind)
    calls = capture_attentions(model, attentions, lambda: model(**given))
    assert [(call.kind, call.path) for call in calls] == [(kind, one.path) for one in attentions]
    for attention, call in zip(attentions, calls, strict=True):
        for project, tokens, heads in (
            (attention.query, call.tokens.queries, call.query),
            (attention.key, call.tokens.keys, call.key),
        ):
            wanted = project(tokens).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
            torch.testing.assert_close(heads, wanted, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())
    plain, _, _ = captured(model, given)
    assert all(call.tokens is None for call in plain)
