"""Certificates of a model's heads, against the model itself."""

import math

import pytest
import torch

from fenchel.bounds import local_lipschitz
from fenchel.lens import head_bounds as module
from fenchel.lens.families import find_attentions
from tests.lens.models import model_of


@pytest.fixture(scope="module")
def model():
    return model_of("bert")


@pytest.fixture(scope="module")
def inputs():
    return {"input_ids": torch.tensor([[3, 7, 11, 2, 9, 5]])}


def test_what_is_seen_is_what_the_heads_use(model, inputs):
    """softmax(<q, k> / temperature) v, head by head, is the model's own context."""
    one = find_attentions(model, "encoder")[1]
    kept = []
    hook = one.module.register_forward_hook(lambda m, a, out: kept.append(out[0]))
    layer = module.capture_head_inputs(model, inputs)[1]
    hook.remove()
    scores = layer.queries @ layer.keys.mT / layer.temperature
    context = scores.softmax(-1) @ layer.values  # (H, n, f)
    wanted = kept[0][0].double()
    torch.testing.assert_close(context.transpose(0, 1).flatten(1), wanted, rtol=1e-5, atol=1e-6)


def test_every_head_is_certified(model, inputs):
    for layer in module.capture_head_inputs(model, inputs):
        for head in range(len(layer.keys)):
            operands = layer.queries[head], layer.keys[head], layer.values[head], layer.temperature
            bound = module.head_bound(layer, head).value
            _, keys, values, _ = operands
            wide = torch.cdist(keys, keys).max() * torch.cdist(values, values).max()
            assert 0 < module.largest_local_constant(*operands) <= bound * (1 + 1e-9)
            assert bound <= float(wide) / (4 * layer.temperature) * (1 + 1e-9)


def test_local_is_the_norm_of_the_jacobian(model, inputs):
    layer = module.capture_head_inputs(model, inputs)[0]
    keys, values, tau = layer.keys[0], layer.values[0], layer.temperature

    def output(q):
        return (q @ keys.mT / tau).softmax(-1) @ values

    wanted = max(local_lipschitz(output, q).value for q in layer.queries[0])
    assert math.isclose(
        module.largest_local_constant(layer.queries[0], keys, values, tau), wanted, rel_tol=1e-8
    )


def test_several_sentences_are_refused(model):
    with pytest.raises(ValueError, match="one sentence without padding"):
        list(module.capture_head_inputs(model, {"input_ids": torch.ones(2, 4, dtype=torch.int64)}))
