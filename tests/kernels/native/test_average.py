"""Attention averaged over its queries, in native code, against torch's operations."""

import pytest
import torch

import fenchel as fl
from fenchel._kernels import average, library
from fenchel._kernels.average import average_attention, average_attention_backward
from fenchel.dual import dot_product_transport
from tests.kernels.native.cases import native, needs_library

pytestmark = needs_library

F64 = torch.float64
SHAPES = [  # groups, rows, queries, keys, components, value components
    (3, 2, 7, 5, 4, 3),
    (2, 1, 50, 50, 16, 16),
    (2, 3, 100, 65, 33, 17),
    (4, 1, 130, 130, 8, 1),
    (1, 1, 1, 1, 1, 1),
    (2, 1, 48, 32, 64, 16),
]


def _operands(shape, dtype=F64, seed=0):
    groups, rows, queries, keys, dim, width = shape
    g = torch.Generator().manual_seed(seed)
    sizes = ((groups, rows, queries, dim), (groups, keys, dim), (groups, keys, width))
    actual = [torch.randn(size, generator=g, dtype=F64) for size in sizes]
    actual.append(torch.rand(groups, rows, queries, generator=g, dtype=F64))
    return [x.to(dtype).requires_grad_() for x in actual]


def _plain(query, key, value, share):
    weights = (query @ key.unsqueeze(1).mT).softmax(-1)
    return (share.unsqueeze(2) @ weights).squeeze(2) @ value


def _results(function, operands):
    output = function(*operands)
    slope = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, operands, slope)]


def _off(actual, exact):
    return [float((x - y).abs().max()) for x, y in zip(actual, exact, strict=True)]


@pytest.mark.parametrize("variant", library.VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_derivatives(shape, variant):
    """A set the machine lacks falls back to its best one."""
    operands = _operands(shape)
    exact = _results(_plain, operands)
    with native(variant=variant):
        for one, other in zip(_results(average_attention, operands), exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("variant", library.VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_single_precision_is_as_good_as_torchs(shape, variant):
    operands = _operands(shape, torch.float32)
    exact = _results(_plain, [x.detach().double().requires_grad_() for x in operands])
    theirs = _off(_results(_plain, operands), exact)
    with native(variant=variant):
        ours = _off(_results(average_attention, operands), exact)
    for error, bar, size in zip(ours, theirs, exact, strict=True):
        assert error <= 2 * bar + 4 * torch.finfo(torch.float32).eps * float(size.abs().max())


def test_derivatives_of_derivatives():
    operands = _operands((2, 2, 4, 5, 3, 2))
    assert torch.autograd.gradcheck(average_attention, operands)
    assert torch.autograd.gradgradcheck(average_attention, operands)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_same_bits_for_any_number_of_threads_and_any_layout(dtype):
    operands, before = _operands((9, 2, 50, 40, 16, 5), dtype), torch.get_num_threads()
    first = _results(average_attention, operands)
    turned = [
        x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in operands
    ]
    assert not turned[0].is_contiguous()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for given in (operands, turned):
                for one, other in zip(_results(average_attention, given), first, strict=True):
                    assert torch.equal(one, other), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [1e3, 1e-30])
def test_scores_of_any_size(dtype, size):
    query, key, value, share = _operands((2, 1, 9, 11, 4, 3), dtype)
    operands = [(query * size).detach().requires_grad_(), key, value, share]
    for one, other in zip(
        _results(average_attention, operands), _results(_plain, operands), strict=True
    ):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(scale, 1e-30))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_what_is_not_finite_is_not_hidden(dtype, bad):
    """In the group it belongs to, and in no other."""
    query, key, value, share = (x.detach() for x in _operands((3, 1, 50, 40, 4, 3), dtype))
    query[1, 0, 49, 2] = bad
    output = average_attention(query, key, value, share)
    assert output[1].isnan().all()
    assert output[[0, 2]].isfinite().all()
    slopes = average_attention_backward(torch.ones_like(output), query, key, value, share)
    assert slopes[0][1, 0, 49].isnan().all()
    assert slopes[0][[0, 2]].isfinite().all()


def test_transport_uses_it_and_agrees_without(monkeypatch):
    g = torch.Generator().manual_seed(3)
    templates = torch.randn(4, 1, 20, 5, generator=g, dtype=F64, requires_grad=True)
    evidence = torch.randn(4, 3, 5, generator=g, dtype=F64, requires_grad=True)

    def answers():
        mean = dot_product_transport(templates, None, evidence, 1.0, 2.0)
        return mean, *torch.autograd.grad(mean.square().sum(), (templates, evidence))

    asked = []
    used = average.average_attention
    monkeypatch.setattr(average, "average_attention", lambda *x: asked.append(x) or used(*x))
    actual = answers()
    assert len(asked) == 1
    with fl.use("torch"):
        others = answers()
    for one, other in zip(actual, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert len(asked) == 1
