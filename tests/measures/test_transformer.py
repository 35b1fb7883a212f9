"""Layers of torch.nn as kernels, and the measures along a stack."""

import copy

import pytest
import torch

from fenchel.measures import (
    AttentionKernel,
    Deterministic,
    Dot,
    Empirical,
    GaussianPotential,
    TransformerKernel,
    flow,
)

from .draws import F64, close, measure, normal


def layer(norm_first=False, batch_first=True, activation="relu", bias=True, seed=0):
    torch.manual_seed(seed)
    actual = torch.nn.TransformerEncoderLayer(
        8, 4, 16, dropout=0.1, activation=activation, batch_first=batch_first,
        norm_first=norm_first, bias=bias, dtype=F64,
    )  # fmt: skip
    for parameter in actual.parameters():  # torch leaves biases at zero and norms at one
        torch.nn.init.normal_(parameter, std=0.5)
    return actual.eval()


def test_the_layer_of_the_paper():
    """Attention and feed-forward, without residuals and norms (proposition 12)."""
    net = layer()
    x = normal(3, 5, 8)
    mu = Empirical(x)
    T = TransformerKernel.from_layer(net, residual=False, norm=False)
    inner = net.self_attn(x, x, x, need_weights=False)[0]
    expected = net.linear2(torch.relu(net.linear1(inner)))
    assert close((mu @ T(mu)).points, expected, 1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_whole_layer(norm_first, activation, bias):
    net = layer(norm_first, activation=activation, bias=bias)
    x = normal(3, 5, 8)
    mu = Empirical(x)
    moved = mu @ TransformerKernel.from_layer(net)(mu)
    assert close(moved.points, net(x), 1e-12)
    assert close(moved.weights, mu.weights, 0.0)


def test_the_order_of_a_layers_axes_does_not_matter():
    batched, sequence = layer(batch_first=True), layer(batch_first=False)
    x = normal(3, 5, 8)
    mu = Empirical(x)
    one, two = (mu @ TransformerKernel.from_layer(net)(mu) for net in (batched, sequence))
    assert close(one.points, two.points, 0.0)
    assert close(two.points, sequence(x.transpose(0, 1)).transpose(0, 1), 1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("residual", "norm"), [(True, False), (False, True)])
def test_parts_of_the_layer(residual, norm, norm_first):
    net = layer(norm_first)
    x = normal(5, 8)
    mu = Empirical(x)

    def plain(y):
        return y

    first, second = (net.norm1, net.norm2) if norm else (plain, plain)

    def attend(y):
        return net.self_attn(y, y, y, need_weights=False)[0]

    def feed(y):
        return net.linear2(net.activation(net.linear1(y)))

    def block(y, step, normalise):
        if norm_first:
            return step(normalise(y)) + (y if residual else 0)
        return normalise(step(y) + (y if residual else 0))

    expected = block(block(x, attend, first), feed, second)
    actual = mu @ TransformerKernel.from_layer(net, residual=residual, norm=norm)(mu)
    assert close(actual.points, expected, 1e-12)


def test_a_stack_is_torchs_encoder():
    nets = [layer(seed=s) for s in range(3)]
    x = normal(2, 5, 8)
    measures = flow(Empirical(x), [TransformerKernel.from_layer(net) for net in nets])
    assert len(measures) == 4
    for net, before, after in zip(nets, measures, measures[1:], strict=False):
        assert close(after.points, net(before.points), 1e-12)
    assert close(measures[0].points, x, 0.0)


def test_weights_count_tokens():
    """A token of weight 2 / 3 moves all others as two copies of it would."""
    net = layer()
    T = TransformerKernel.from_layer(net)
    x = normal(2, 8)
    weighted = Empirical(x, torch.tensor([2 / 3, 1 / 3], dtype=F64))
    copies = Empirical(x[[0, 0, 1]])
    one, two = weighted @ T(weighted), copies @ T(copies)
    assert close(one.points, two.points[[0, 2]], 1e-12)


def test_tokens_that_share_a_place_stay_together():
    T = TransformerKernel.from_layer(layer())
    mu = Empirical(normal(1, 8).expand(4, 8))
    points = (mu @ T(mu)).points
    assert close(points, points[:1].expand(4, 8), 1e-12)


def test_derivatives_reach_the_layers_parameters():
    net = layer()
    twin = copy.deepcopy(net)
    x = normal(3, 5, 8)
    mu = Empirical(x)
    (mu @ TransformerKernel.from_layer(net)(mu)).points.square().sum().backward()
    twin(x).square().sum().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert close(mine.grad, theirs.grad, 1e-10 * float(1 + theirs.grad.abs().max()))


def test_flows_take_fixed_kernels_too():
    mu = measure(4, 2)
    A = AttentionKernel(GaussianPotential())
    measures = flow(mu, [A, Deterministic(torch.tanh), A])
    by_hand = mu @ A(mu)
    by_hand = by_hand @ Deterministic(torch.tanh)
    assert close(measures[2].points, by_hand.points, 0.0)
    assert close(measures[3].points, (by_hand @ A(by_hand)).points, 0.0)
    with pytest.raises(TypeError, match=r"a layer must be .* Deterministic\(function\)"):
        flow(mu, [torch.tanh])


def test_training_is_refused():
    net = layer().train()
    with pytest.raises(ValueError, match=r"Dropout in training.*\.eval\(\)"):
        TransformerKernel.from_layer(net)
    mu = measure(4, 8)
    net.eval()
    T = TransformerKernel.from_layer(net)
    assert (mu @ T(mu)).points.isfinite().all()


def test_bad_layers_are_refused():
    A = AttentionKernel(Dot())
    with pytest.raises(TypeError, match=r"TransformerEncoderLayer, got Linear"):
        TransformerKernel.from_layer(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"not A\(mu\)"):
        TransformerKernel(A(measure()), torch.tanh)
    with pytest.raises(ValueError, match="norm_first needs norms"):
        TransformerKernel(A, torch.tanh, norm_first=True)
    with pytest.raises(ValueError, match="two maps, got 1"):
        TransformerKernel(A, torch.tanh, norms=(torch.tanh,))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_of_another_dtype_says_so(norm_first):
    T = TransformerKernel.from_layer(layer(norm_first).float())
    with pytest.raises(
        TypeError, match=r"points are torch.float64 and .* is torch.float32; .*\.to\("
    ):
        flow(Empirical(normal(5, 8)), [T])
    bare = TransformerKernel(AttentionKernel(Dot()), layer().float().linear1)
    with pytest.raises(TypeError, match=r"the Linear is torch\.float32"):
        flow(Empirical(normal(5, 8)), [bare])


def test_another_error_of_a_map_stays_what_it_is():
    def broken(x):
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        Deterministic(broken).at(normal(5, 8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Deterministic(torch.nn.Linear(3, 2, dtype=F64)).at(normal(5, 8))


def test_short_representations():
    net = layer()
    T = TransformerKernel.from_layer(net)
    expected = "TransformerKernel(MultiHeadKernel(4 heads), Deterministic(TokenFeedForward), "
    assert repr(T) == expected + "residual=True, norms=after)"
    A = AttentionKernel(Dot(2.0, query=normal(3, 8)), normal(2, 8))
    assert (
        repr(A)
        == "AttentionKernel(Dot(temperature=2, query=Affine(8 -> 3)), Lookup(Affine(8 -> 2)))"
    )
    mu = Empirical(normal(5, 8))
    for actual in (
        A(mu),
        T(mu),
        T.attention(mu),
        Deterministic(torch.tanh) @ Deterministic(torch.sin),
    ):
        assert " object at 0x" not in repr(actual)
        assert "_" not in repr(actual)  # no private names
