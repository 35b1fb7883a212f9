"""Derivatives of transport, first and second, in everything; transforms and compilation."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fenchel.dual.transport import (
    dot_product_transport,
    transport,
    transport_first_order,
    true_preference,
)
from tests.dual.test_transport import DOUBLE, draw


def results(e):
    return e.multiplier, e.weights, e.mean, e.objective, e.dual_value, e.prior_mean


def operands(n, columns, d, batch=()):
    templates, preference, cost, evidence = draw(n, columns, d, 2, batch)
    numbers = [torch.full(batch, x, dtype=DOUBLE) for x in (1.5, 0.6)]
    return [x.requires_grad_() for x in (templates, preference, cost, evidence, *numbers)]


def assert_differentiable_twice(function, inputs):
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("shape", [(3, 2, 2), (2, 2, 3)], ids=["d <= N", "d > N"])
@pytest.mark.parametrize("function", [transport, transport_first_order])
def test_in_everything(function, shape):
    assert_differentiable_twice(lambda *x: results(function(*x)), operands(*shape))


@pytest.mark.parametrize("function", [transport, transport_first_order])
def test_with_the_dot_product_cost(function):
    t, u, _, z, reliability, gamma = operands(3, 3, 2)
    assert_differentiable_twice(
        lambda t, u, z, r, g: results(function(t, u, None, z, r, g)), [t, u, z, reliability, gamma]
    )


def test_of_the_average_of_attentions():
    t, u, _, z, reliability, gamma = operands(3, 3, 2)
    mask = torch.tensor([True, True, False])
    inputs = [t, u, z, reliability, gamma]
    assert_differentiable_twice(dot_product_transport, inputs)
    assert_differentiable_twice(
        lambda *x: dot_product_transport(*x, mask=mask, values=x[0].sin()), inputs
    )


def test_of_the_true_preference():
    t, u, cost, _, _, gamma = operands(3, 2, 2)
    assert_differentiable_twice(true_preference, [t, u, cost, gamma])


def test_where_rows_share_their_templates():
    templates, preference, cost, _ = draw(3, 3, 2, 2)
    evidence = draw(2, 1, 2, 3)[0]
    gamma = torch.tensor([0.5, 0.8], dtype=DOUBLE)
    inputs = [x.requires_grad_() for x in (templates, preference, cost, evidence, gamma)]
    assert_differentiable_twice(lambda t, u, m, z, g: transport(t, u, m, z, 2.0, g).mean, inputs)


def test_where_costs_are_infinite_and_templates_masked():
    templates, preference, cost, evidence = draw(4, 4, 2)
    allowed = torch.ones(4, 4, dtype=torch.bool)
    allowed[0, 1] = allowed[2, 0] = False
    mask = torch.tensor([True, True, True, False])
    gamma = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)

    def function(t, u, m, z, g):
        m = torch.where(allowed, m, math.inf)
        return results(transport(t, u, m, z, 2.0, g, mask=mask))

    inputs = [x.requires_grad_() for x in (templates, preference, cost, evidence)]
    assert_differentiable_twice(function, [*inputs, gamma])
    gradients = torch.autograd.grad(function(*inputs, gamma)[2].sum(), [*inputs, gamma])
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][3] == 0).all()
    assert (gradients[2][~allowed] == 0).all()


def test_no_preference_is_a_derivative_too():
    """One-sided, at a preference of zero."""
    templates, preference, cost, evidence = draw(3, 3, 2)
    preference[1] = 0

    def mean(extra):
        u = preference + torch.tensor([0.0, extra, 0.0], dtype=DOUBLE)
        return transport(templates, u, cost, evidence, 2.0, 0.5).mean

    u = preference.clone().requires_grad_()
    e = transport(templates, u, cost, evidence, 2.0, 0.5)
    (gradient,) = torch.autograd.grad(e.mean[0], u)
    step = 1e-6
    expected = (4 * mean(step) - mean(2 * step) - 3 * mean(0.0))[0] / (2 * step)
    torch.testing.assert_close(gradient[1], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("given", [True, False], ids=["cost", "dot product"])
def test_transforms_agree(given):
    templates, preference, cost, evidence = draw(4, 4, 3)
    chosen = cost if given else None

    def mean(t, z):
        return transport(t, preference, chosen, z, 2.0, 0.5).mean

    expected = torch.autograd.functional.jacobian(lambda z: mean(templates, z), evidence)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        actual = transform(mean, argnums=1)(templates, evidence)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    second = torch.func.hessian(lambda z: mean(templates, z).sum())(evidence)
    plain = torch.autograd.functional.hessian(lambda z: mean(templates, z).sum(), evidence)
    torch.testing.assert_close(second, plain, rtol=1e-9, atol=1e-11)
    many = torch.stack([templates, 2 * templates])
    for axes in ((0, None), (None, 0)):
        each = (many if axes[0] == 0 else templates, evidence if axes[1] is None else many[:, 0])
        loop = [
            mean(*(x[i] if a == 0 else x for x, a in zip(each, axes, strict=True))) for i in (0, 1)
        ]
        actual = torch.func.vmap(mean, axes)(*each)
        torch.testing.assert_close(actual, torch.stack(loop), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", [True, False], ids=["cost", "dot product"])
def test_compiles_whole(given):
    templates, preference, cost, evidence = draw(4, 4, 3)
    chosen = cost if given else None

    def mean(z):
        return transport(templates, preference, chosen, z, 2.0, 0.5).mean

    compiled = torch.compile(mean, fullgraph=True, backend="aot_eager")
    inputs = [evidence.clone().requires_grad_() for _ in range(2)]
    outputs = [f(x) for f, x in zip((compiled, mean), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-13)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-12)
