"""`torch.compile` with symbolic lengths: one graph without breaks, equal to eager at any length."""

import pytest
import torch

from tests import needs
from tests.tracing.cases import DYNAMIC, assert_as_eager, each

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def assert_one_graph(case, backend="aot_eager"):
    """The graph of the first length is that of the others."""
    torch._dynamo.reset()
    function = compiled(case.function, backend)
    assert_as_eager(function, case, 5)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_as_eager(function, case, 9)
        assert_as_eager(function, case, 64)


@pytest.mark.parametrize("case", each(DYNAMIC))
def test_one_graph_for_all_lengths(case):
    assert_one_graph(case)


@pytest.mark.slow
@needs.compiler("compiled C++ with symbolic lengths")
@pytest.mark.parametrize("name", ["entmax", "attention: softmax", "attention: entmax, causal"])
def test_inductor_too(name):
    assert_one_graph(DYNAMIC[name], "inductor")


def broken(x):
    torch._dynamo.graph_break()
    return x


def test_the_check_can_fail():
    """A length by which Python decides has a graph of its own; a break is an error."""
    case = DYNAMIC["entmax"]._replace(function=lambda x: x * (2 if x.shape[-1] > 6 else 3))
    with pytest.raises(RuntimeError, match="recompile"):
        assert_one_graph(case)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        assert_one_graph(case._replace(function=broken))
