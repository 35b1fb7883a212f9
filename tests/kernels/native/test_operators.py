"""The operators as torch sees them: schemas, fake tensors, export and compilation."""

import pytest
import torch

import fenchel as fl
from fenchel.kernels.attention import tsallis_attention, tsallis_attention_backward
from tests.kernels.native.cases import needs_library

pytestmark = needs_library


def _arguments(queries=50, keys=50):
    g = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 16, generator=g)
    key, value = (torch.randn(2, 2, keys, d, generator=g) for d in (16, 5))
    eps = torch.full((2, 4, queries), 0.5, dtype=torch.float64)
    mask = (torch.rand(queries, keys, generator=g) < 0.7).expand(2, 4, queries, keys)
    bias = torch.randn(2, 4, queries, keys, generator=g)
    numbers = (0.25, 1.0, False, True, 0, 0.0, queries)
    return (query, key, value, eps, mask, bias, None, None), numbers


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_forward_operator():
    operands, numbers = _arguments()
    leaves = tuple(
        x.clone().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in operands
    )
    torch.library.opcheck(tsallis_attention, (*leaves, *numbers, True), test_utils=CHECKS)


@pytest.mark.parametrize("wanted", [[True, True, False], [False, False, False]])
def test_backward_operator(wanted):
    operands, numbers = _arguments()
    output, *saved = tsallis_attention(*operands, *numbers, True)
    arguments = (torch.ones_like(output), *operands, *numbers, *saved, wanted)
    torch.library.opcheck(tsallis_attention_backward, arguments)


class _Module(torch.nn.Module):
    def forward(self, query, key, value):
        return fl.attention(query, key, value, fl.Tsallis(1.5), is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export(strict):
    x = torch.randn(2, 4, 50, 16)
    program = torch.export.export(_Module(), (x, x, x), strict=strict)
    assert any("tsallis_attention" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x, x, x), _Module()(x, x, x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_for_any_length(backend):
    torch._dynamo.reset()
    compiled = torch.compile(_Module(), dynamic=True, backend=backend)
    for length in (50, 97, 130):
        leaves = [torch.randn(2, 4, length, 16, requires_grad=True) for _ in range(3)]
        made, expected = compiled(*leaves), _Module()(*leaves)
        assert torch.equal(made, expected)
        for one, other in zip(
            torch.autograd.grad(made.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_views_that_negate():
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    made = fl.attention(torch._neg_view(query), key, torch._neg_view(value), fl.Tsallis(1.5))
    assert torch.equal(made, fl.attention(-query, key, -value, fl.Tsallis(1.5)))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(4, 100_000, 64), (1, 1_000_000, 16)])
def test_memory_of_long_sequences(queries, keys, dim, alpha):
    """Forward and backward stay within a few copies of keys and values."""
    resource = pytest.importorskip("resource")
    query, key, value = (
        torch.randn(1, 1, n, dim, requires_grad=True) for n in (queries, keys, keys)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = fl.attention(query, key, value, fl.Tsallis(alpha))
    output.sum().backward()
    used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert output.isfinite().all()
    assert used < 6 * 2 * 4 * keys * dim + 2**28
