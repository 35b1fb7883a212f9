"""Attention as a kernel is attention as linear algebra has it."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fenchel.measures import (
    Affine,
    AttentionKernel,
    Dot,
    Empirical,
    GaussianPotential,
    Lookup,
    MultiHeadKernel,
    Potential,
    ScaledDot,
)

from .draws import F64, attention, close, measure, normal, shares

Q, K = normal(2, 3, seed=91), normal(2, 3, seed=92)
POTENTIALS = {
    "dot": Dot(0.7),
    "projected": Dot(0.7, Q, K),
    "scaled": ScaledDot(),
    "scaled, projected": ScaledDot(query=Q, key=K),
    "gaussian": GaussianPotential(2.0),
    "callable": Potential(lambda x, y: -torch.cdist(x, y, p=1)),
}


@pytest.mark.parametrize("name", list(POTENTIALS))
@pytest.mark.parametrize("repeated", [False, True])
def test_attention_over_a_table(name, repeated):  # definition 8, proposition 9
    potential = POTENTIALS[name]
    keys, values, queries = normal(6, 3), normal(6, 4, seed=1), normal(5, 3, seed=2)
    if repeated:
        keys = keys[[0, 1, 1, 3, 3, 3]]
    A = AttentionKernel(potential, Lookup.table(keys, values))
    points = (Empirical(queries) @ A(Empirical(keys))).points
    expected = torch.softmax(potential.log(queries, keys), -1) @ values
    assert close(points, expected, 1e-12)


@pytest.mark.parametrize("name", list(POTENTIALS))
def test_self_attention_with_weights_and_batches(name):
    potential, w = POTENTIALS[name], normal(4, 3, seed=3)
    mu = measure(6, 3, batch=(2, 3))
    moved = mu @ AttentionKernel(potential, w)(mu)
    scores = potential.log(mu.points, mu.points)
    assert close(moved.points, attention(scores, mu.weights, mu.points @ w.mT), 1e-12)
    assert close(moved.weights, mu.weights, 0.0)


def test_it_is_torchs_attention():
    q, k, v = normal(2, 5, 4), normal(2, 7, 4, seed=1), normal(2, 7, 3, seed=2)
    A = AttentionKernel(ScaledDot(), Lookup.table(k, v))
    points = (Empirical(q) @ A(Empirical(k))).points
    assert close(points, scaled_dot_product_attention(q, k, v), 1e-14)


def test_a_kernel_at_queries_is_a_dirac_each():
    mu = measure(4, 2)
    at = AttentionKernel(Dot())(mu).at(normal(5, 2, seed=1))
    assert at.size == 1
    assert at.batch_shape == (5,)


def test_a_stochastic_lookup_is_averaged_too():
    points, matrix = normal(4, 2), shares(4, 4)
    A = AttentionKernel(Dot(), Lookup.stochastic(points, matrix))
    mu = Empirical(points)
    expected = torch.softmax(points @ points.mT, -1) @ matrix @ points
    assert close((mu @ A(mu)).points, expected, 1e-14)


def heads(count=3, d=6, size=2):
    kernels, outputs = [], []
    for h in range(count):
        q, k, v = (normal(size, d, seed=10 * h + s) for s in range(3))
        kernels.append(AttentionKernel(ScaledDot(query=q, key=k), v))
        outputs.append(normal(d, size, seed=10 * h + 3))
    return kernels, outputs


def test_many_heads_are_concatenation_and_projection():  # proposition 12
    kernels, outputs = heads()
    bias = normal(6, seed=77)
    mu = measure(5, 6)
    each = torch.cat([(mu @ head(mu)).points for head in kernels], -1)  # (5, 6)
    expected = each @ torch.cat(outputs, 1).mT
    actual = mu @ MultiHeadKernel(kernels, outputs)(mu)
    assert close(actual.points, expected, 1e-12)
    with_bias = mu @ MultiHeadKernel(kernels, outputs, bias)(mu)
    assert close(with_bias.points, expected + bias, 1e-12)
    by_functions = [lambda z, w=w: z @ w.mT for w in outputs]
    again = mu @ MultiHeadKernel(kernels, by_functions, bias)(mu)
    assert close(again.points, expected + bias, 1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_torchs_multihead_attention(bias):
    torch.manual_seed(3)
    module = torch.nn.MultiheadAttention(8, 4, bias=bias, batch_first=True, dtype=F64)
    if bias:
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    x = normal(2, 5, 8)
    mu = Empirical(x)
    actual = mu @ MultiHeadKernel.from_module(module)(mu)
    assert close(actual.points, module(x, x, x, need_weights=False)[0], 1e-12)


def test_derivatives_flow_through_a_step():
    def step(points, masses, q, w):
        mu = Empirical.of_masses(points, masses)
        moved = mu @ AttentionKernel(GaussianPotential(query=q), w)(mu)
        return moved.points, moved.weights

    leaves = (normal(4, 2), shares(4), normal(2, 2, seed=1), normal(3, 2, seed=2))
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    assert torch.autograd.gradcheck(step, leaves)
    assert torch.autograd.gradgradcheck(step, leaves)


def test_an_output_with_an_offset_is_refused():
    kernels, outputs = heads()
    outputs[1] = Affine(outputs[1], normal(6))
    with pytest.raises(ValueError, match="as `bias`, added once"):
        MultiHeadKernel(kernels, outputs)
