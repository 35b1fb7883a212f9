"""Recorded attention: shapes, sums, zeros, agreement with the output; and gradients."""

import pytest
import torch

from tests.hf.models import FAMILIES, IMPLEMENTATIONS, SPARSE, inputs, logits, tiny, tokens


def recorded(output):
    """Every tuple of attention weights that an output holds, by name."""
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return {name: output[name] for name in names if output.get(name)}


def shapes(family):
    """(query, key) of each kind of attention, for the standard inputs."""
    if family in ("t5", "bart"):
        return {
            "encoder_attentions": (7, 7),
            "decoder_attentions": (6, 6),
            "cross_attentions": (6, 7),
        }
    return {"attentions": (17, 17) if family == "vit" else (7, 7)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_weights_are_distributions(family, implementation):
    model, batch = tiny(family, implementation), inputs(family)
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    weights = recorded(output)
    assert {name: tuple(w[0].shape) for name, w in weights.items()} == {
        name: (2, 4, *shape) for name, shape in shapes(family).items()
    }
    assert all(len(layers) == 2 for layers in weights.values())
    everything = [w for layers in weights.values() for w in layers]
    assert all((w.sum(-1) - 1).abs().max() <= 1e-12 and (w >= 0).all() for w in everything)
    assert (output.logits - logits(model, **batch)).abs().max() <= 1e-10, "weights and output part"


@pytest.mark.parametrize("implementation", SPARSE)
@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_maps_give_exact_zeros(family, implementation):
    batch = inputs(family)
    for name, layers in _weights(tiny(family, implementation), batch).items():
        future = torch.ones(layers[0].shape[-2:]).triu(1).bool()
        causal = family in ("gpt2", "llama") or name == "decoder_attentions"
        allowed = ~future if causal else torch.ones_like(future)
        assert all((w[..., allowed] == 0).any() for w in layers)
        assert not causal or all((w[..., future] == 0).all() for w in layers)
    soft = _weights(tiny(family, "fenchel:softmax"), batch)
    assert all((w[..., 0] > 0).all() for layers in soft.values() for w in layers)


def _weights(model, batch):
    with torch.no_grad():
        return recorded(model(**batch, output_attentions=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_softmax_is_that_of_eager(family):
    ours, eager = (
        _weights(tiny(family, name), inputs(family)) for name in ("fenchel:softmax", "eager")
    )
    for name, layers in eager.items():
        for left, right in zip(ours[name], layers, strict=True):
            assert (left - right).abs().max() <= 1e-6  # Llama and ViT round to float32


def test_nothing_is_recorded_unasked():
    model = tiny("gpt2", "fenchel:entmax15")
    _weights(model, inputs("gpt2"))
    with torch.no_grad():
        assert not model(input_ids=tokens()).attentions


def test_generation_records_weights():
    output = tiny("gpt2", "fenchel:sparsemax").generate(
        tokens(), max_new_tokens=3, output_attentions=True, return_dict_in_generate=True
    )
    first, *later = output.attentions
    assert first[0].shape == (2, 4, 7, 7)
    assert [step[0].shape for step in later] == [(2, 4, 1, 8), (2, 4, 1, 9)]


def test_padding_gets_no_weight():
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    for implementation in IMPLEMENTATIONS:
        for w in _weights(tiny("bert", implementation), batch)["attentions"]:
            assert (w[0, :, :, 5:] == 0).all()
            assert (w[1, :, :, 5:] > 0).any()


def test_dropout_is_in_the_recorded_weights_and_in_the_output():
    """As eager records them: what multiplies the values, zeros and enlarged ones included."""
    model = tiny("bert", "fenchel:softmax").train()
    torch.manual_seed(0)
    output = model(input_ids=tokens(), output_attentions=True)
    weights = output.attentions[0]
    dropped = (weights == 0).double().mean()
    assert 0.02 < dropped < 0.25  # one in ten
    torch.manual_seed(0)
    assert torch.equal(model(input_ids=tokens(), output_attentions=True).logits, output.logits)
    torch.manual_seed(1)
    quiet = model(input_ids=tokens()).logits
    torch.manual_seed(2)
    assert (model(input_ids=tokens()).logits - quiet).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_parameter_of_attention(family, implementation):
    model = tiny(family, implementation)
    model(**inputs(family)).logits.square().sum().backward()
    silent = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all() or not parameter.grad.any()
    }
    # Nothing depends on a bias of the keys under softmax, and on what these inputs do not use.
    unused = ("pooler", "token_type", "position_embeddings", "embed_positions", "wpe")
    assert not {n for n in silent if not n.endswith(("k_proj.bias", "key.bias"))} - {
        n for n in silent if any(part in n for part in unused)
    }


@pytest.mark.parametrize("implementation", ["fenchel:softmax", "fenchel:entmax15"])
@pytest.mark.parametrize("recording", [False, True])
def test_the_relative_bias_of_t5_trains(implementation, recording):
    model = tiny("t5", implementation)
    model(**inputs("t5"), output_attentions=recording).logits.square().sum().backward()
    for stack in (model.encoder, model.decoder):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert table.grad.abs().max() > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_the_same_while_recording(implementation):
    """Two ways through attention, one derivative."""
    gradients = []
    for recording in (False, True):
        model = tiny("llama", implementation)
        model(input_ids=tokens(), output_attentions=recording).logits.square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-9 * gradients[0].abs().max()
