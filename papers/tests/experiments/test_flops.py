"""Multiplications and additions of a training step, against a count by hand."""

from dataclasses import replace

import pytest
import torch

from papers.experiments import flops
from papers.experiments.data.toy import load_toy
from papers.experiments.flops import step_flops
from papers.experiments.vit.model import Size
from papers.experiments.vit.study import VitStudy
from tests.kernels.native.cases import needs_library

SIZE = Size(width=8, inner=12, layers=2, heads=2, dropout=0.0)
BATCH, CLASSES = 4, 4
TOKENS = 16 + 1  # 4 x 4 patches of 16 x 16 pixels, and the class token


@pytest.fixture(scope="module")
def data():
    return load_toy(train=16, test=4)


def counted(data, attention, sharing=0.0, size=SIZE):
    study = VitStudy(data, size, attention, sharing)
    torch.manual_seed(0)
    return step_flops(study, study.build(), BATCH)


def layer(queries, tokens, factor_linear, factor_attention):
    """Of one image: a product of (n, k) and (k, m) is 2 n k m; attention is two products."""
    width, inner = SIZE.width, SIZE.inner
    projections = 2 * width * width * (queries + 2 * tokens + queries)  # query, key, value, out
    feed_forward = 2 * queries * 2 * width * inner
    attention = 2 * 2 * queries * tokens * width  # all heads together
    return factor_linear * (projections + feed_forward) + factor_attention * attention


def by_hand(linear, attention, convolution):
    """Factors on the operations of the forward pass."""
    patches = convolution * 2 * 16 * SIZE.width * 4 * 4
    answer = linear * 2 * SIZE.width * CLASSES
    whole = layer(TOKENS, TOKENS, linear, attention) + layer(1, TOKENS, linear, attention)
    return BATCH * (patches + whole + answer)


def test_a_step_of_a_tiny_transformer(data):
    """Backward, a linear layer is two products of the same size, attention five for two (weights
    again); the convolution has no gradient for pixels."""
    assert counted(data, "softmax") == by_hand(1 + 2, 1 + 2.5, 1 + 1)


@needs_library
def test_entmax_counts_as_if_it_were_dense(data):
    assert counted(data, "entmax") == counted(data, "softmax")


def averaged(tokens, heads=SIZE.heads):
    """Of one image, forward and backward: scores once and again, and the gradients of queries and
    keys; and what each weight takes part in: averages twice, rewards."""
    return 2 * tokens**2 * (4 * SIZE.width + 3 * heads)


@needs_library
def test_transport_is_a_mean_over_sharing(data):
    """A partner's tokens are projected with its own image: more of them are looked at, no more."""
    alone, shared = counted(data, "transport", 0.0), counted(data, "transport", 1.0)
    assert shared - alone == BATCH * (averaged(2 * TOKENS) - averaged(TOKENS))
    looked = layer(1, TOKENS, 0, 1 + 2.5)
    assert alone - counted(data, "softmax") == BATCH * (averaged(TOKENS) - looked)
    assert counted(data, "transport", 0.25) == round(0.75 * alone + 0.25 * shared)


def test_a_layer_more_costs_a_layer_more(data):
    deeper = counted(data, "continuous", size=replace(SIZE, layers=3))
    assert deeper - counted(data, "continuous") == BATCH * layer(TOKENS, TOKENS, 3, 3.5)


def test_a_recurrent_layer_counts(data):
    """Forward, each word meets both matrices of the four gates; backward, two such products."""
    read, width, (batch, words) = 6, 5, (3, 7)
    shape = [words, batch, read]

    class Reading(VitStudy):
        def loss(self, model, batch):
            return model(torch.zeros(shape, requires_grad=True))[0].sum()

    forward = 2 * batch * words * 4 * width * (read + width)
    study = Reading(data, SIZE, "softmax")
    assert step_flops(study, torch.nn.LSTM(read, width), BATCH) == 3 * forward
    matrices = [[4 * width, read], [4 * width, width], [4 * width], [4 * width]]
    for operation, factor in (("_cudnn_rnn", 1), ("_cudnn_rnn_backward", 2)):  # weights as a list
        counted = flops._MORE[getattr(torch.ops.aten, operation)]
        assert counted(shape, matrices, 4, None) == factor * forward


def test_the_model_is_left_as_it_was(data):
    study = VitStudy(data, SIZE, "softmax")
    model = study.build().eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    step_flops(study, model, BATCH)
    assert not model.training
    assert all(x.grad is None for x in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
