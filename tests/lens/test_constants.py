"""Certificates of a model's heads, against the model itself."""

import math

import pytest
import torch

from fenchel import lens
from fenchel.bounds import local_lipschitz
from fenchel.lens import constants as module
from fenchel.lens.recognise import attentions
from tests.lens.models import model_of


@pytest.fixture(scope="module")
def model():
    return model_of("bert")


@pytest.fixture(scope="module")
def inputs():
    return {"input_ids": torch.tensor([[3, 7, 11, 2, 9, 5]])}


def test_what_is_seen_is_what_the_heads_use(model, inputs):
    """softmax(<q, k> / temperature) v, head by head, is the model's own context."""
    one = attentions(model, "encoder")[1]
    kept = []
    hook = one.module.register_forward_hook(lambda m, a, out: kept.append(out[0]))
    layer = list(module.seen(model, inputs))[1]
    hook.remove()
    scores = layer.queries @ layer.keys.mT / layer.temperature
    context = scores.softmax(-1) @ layer.values  # (H, n, f)
    wanted = kept[0][0].double()
    torch.testing.assert_close(context.transpose(0, 1).flatten(1), wanted, rtol=1e-5, atol=1e-6)


def test_every_head_is_certified_and_attacked(model, inputs):
    found = module.stability(model, inputs, budget=300)
    heads = attentions(model, "encoder")[0].heads
    assert found.bound.shape == (len(attentions(model, "encoder")), heads)
    assert (found.attacked <= found.bound * (1 + 1e-9)).all()
    assert (found.local <= found.bound * (1 + 1e-9)).all()
    assert (found.bound <= found.diameters * (1 + 1e-9)).all()
    assert (found.bound.log10() < found.paper).all()
    document = found.as_json()
    assert document["summary"]["tightness_worst"] == float(found.tightness.max())


def test_local_is_the_norm_of_the_jacobian(model, inputs):
    layer = next(module.seen(model, inputs))
    keys, values, tau = layer.keys[0], layer.values[0], layer.temperature

    def output(q):
        return (q @ keys.mT / tau).softmax(-1) @ values

    wanted = max(local_lipschitz(output, q).value for q in layer.queries[0])
    assert math.isclose(module.max_local(layer.queries[0], keys, values, tau), wanted, rel_tol=1e-8)


def test_the_whole_attention_is_certified(model, inputs):
    one, layer = attentions(model, "encoder")[0], next(module.seen(model, inputs))
    certificate = module.self_attention_certificate(one, layer)
    context = (layer.queries @ layer.keys.mT / layer.temperature).softmax(-1) @ layer.values
    made = certificate.trials.function(layer.tokens.unsqueeze(0))[0]
    torch.testing.assert_close(made, context.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-6)
    assert module.local_of(certificate, layer.tokens) <= certificate.bound


def test_what_cannot_be_certified_is_refused(model, inputs):
    with pytest.raises(ValueError, match="one sentence without padding"):
        list(module.seen(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)}))
    other = model_of("t5")
    one = attentions(other, "encoder")[0]
    with pytest.raises(ValueError, match="without a position bias"):
        module.self_attention_certificate(one, None)


def test_it_is_public():
    assert lens.stability is module.stability
