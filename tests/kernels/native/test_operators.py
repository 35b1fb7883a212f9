"""The operators as torch sees them: schemas, fake tensors, export and compilation."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fenchel as fl
from tests import needs
from tests.kernels.native.cases import needs_library

pytestmark = needs_library


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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export_for_any_length():
    """With what the backward pass needs, on both sides of the pool's size."""
    x = torch.randn(2, 4, 50, 16, requires_grad=True)
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {name: {2: length} for name in ("query", "key", "value")}
    program = torch.export.export(_Module(), (x, x, x), dynamic_shapes=shapes)
    for n in (7, 450):
        leaf = torch.randn(2, 4, n, 16, requires_grad=True)
        actual, expected = program.module()(leaf, leaf, leaf), _Module()(leaf, leaf, leaf)
        assert torch.equal(actual, expected)
        (one,), (other,) = (torch.autograd.grad(y.square().sum(), leaf) for y in (actual, expected))
        # Autograd adds the three up, in an order of its own.
        assert (one - other).abs().max() <= 1e-6 * (1 + other.abs().max())


def _with_strange_padding(keys=64, seen=40, alpha=1.1):
    """Nearly dense rows, so that dense tiles run; what is hidden is NaN or infinite."""
    g = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, keys, 16, generator=g) * 0.1 for _ in range(3))
    key[:, :, seen:], value[:, :, seen:] = torch.nan, torch.inf
    mask = torch.arange(keys) < seen
    return query, key, value, {"regularizer": fl.Tsallis(alpha), "attn_mask": mask.expand(keys, -1)}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("keys", [64, 450])  # the second is made again in the backward pass
def test_compiled_calls_ignore_what_hidden_values_hold(keys):
    torch._dynamo.reset()
    seen = keys * 5 // 8
    query, key, value, options = _with_strange_padding(keys, seen)
    attend = torch.compile(fl.attention, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in (query, key, value)]
    shown = [query, key[:, :, :seen], value[:, :, :seen]]
    output, expected = attend(*leaves, **options), fl.attention(*shown, options["regularizer"])
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(output, leaves, seed),
        torch.autograd.grad(expected, leaves, seed),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_strange_query_spoils_the_gradient_of_its_row_of_the_mask():
    g = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, 2, 9, 8, generator=g) for _ in range(3))
    query[0, 0, 3] = torch.nan
    mask = torch.randn(1, 2, 9, 9, generator=g).requires_grad_()
    fl.attention(query, key, value, fl.Tsallis(1.5), attn_mask=mask).sum().backward()
    strange = query.isnan().any(-1, keepdim=True).expand_as(mask)
    assert torch.equal(mask.grad.isnan(), strange)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_for_any_length(backend):
    torch._dynamo.reset()
    compiled = torch.compile(_Module(), dynamic=True, backend=backend)
    for length in (50, 97, 600):  # a pool holds at most 512 keys of a row
        leaves = [torch.randn(2, 4, length, 16, requires_grad=True) for _ in range(3)]
        actual, expected = compiled(*leaves), _Module()(*leaves)
        assert torch.equal(actual, expected)
        for one, other in zip(
            torch.autograd.grad(actual.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_views_that_negate():
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    output = fl.attention(torch._neg_view(query), key, torch._neg_view(value), fl.Tsallis(1.5))
    assert torch.equal(output, fl.attention(-query, key, -value, fl.Tsallis(1.5)))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0])
@pytest.mark.parametrize(("queries", "keys", "dim"), [(4, 100_000, 64), (1, 1_000_000, 16)])
def test_memory_of_long_sequences(queries, keys, dim, alpha):
    """Forward and backward stay within a few copies of keys and values."""
    resource = needs.package("resource", "the memory of long sequences")
    query, key, value = (
        torch.randn(1, 1, n, dim, requires_grad=True) for n in (queries, keys, keys)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = fl.attention(query, key, value, fl.Tsallis(alpha))
    output.sum().backward()
    used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert output.isfinite().all()
    assert used < 6 * 2 * 4 * keys * dim + 2**28


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_one_graph_for_any_length():
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")

    def attend(x):
        return fl.attention(x, x, x, fl.Tsallis(1.5), is_causal=True)

    compiled = torch.compile(attend, dynamic=True, backend=count)
    actual = []
    for length in (50, 97, 130):
        compiled(torch.randn(1, 2, length, 16))
        actual.append(count.frame_count)
    assert actual[0] == actual[-1]
