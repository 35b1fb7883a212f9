"""`make_fx`, `torch.jit.trace` and `torch.export`: what they write down equals eager."""

import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fenchel as fl
from tests.tracing.cases import DYNAMIC, assert_as_eager, each, normal, tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *operands):
        return self.function(*operands)


def plain(case):
    """The same case without gradients, which these tracers do not follow."""

    def operands(length):
        return tuple(x.detach() for x in case.operands(length))

    return case._replace(operands=operands)


# ---- make_fx


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("case", each(DYNAMIC))
def test_make_fx(case, mode):
    case = plain(case)
    graph = make_fx(case.function, tracing_mode=mode)(*case.operands(5))
    assert_as_eager(graph, case, 5, gradients=False)
    if mode == "symbolic":
        assert_as_eager(graph, case, 9, gradients=False)


@pytest.mark.parametrize("regularizer", [fl.Shannon(), fl.Tsallis(1.5)], ids=["softmax", "entmax"])
def test_make_fx_of_a_gradient(regularizer):
    """Forward and backward pass in one graph, right for other values."""

    def gradients(*operands):
        followed = [x.detach().requires_grad_() for x in operands]
        output = fl.attention(*followed, regularizer, is_causal=True)
        return torch.autograd.grad(output.square().sum(), followed)

    graph = make_fx(gradients, tracing_mode="symbolic")(*(x.detach() for x in tokens(5)))
    others = [normal(2, 3, 9, 8, seed=seed) for seed in (5, 6, 7)]
    for actual, expected in zip(graph(*others), gradients(*others), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# ---- torch.jit.trace


def jit_trace(function, operands):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it writes numbers down: that is what it says
        return torch.jit.trace(function, operands, check_trace=False)


@pytest.mark.parametrize("case", each(DYNAMIC))
def test_jit_trace(case):
    """At one length: this tracer writes lengths down. It takes roots of them in float32, so that
    only the root of four is exact."""
    case = plain(case)
    traced = jit_trace(case.function, case.operands(4))
    assert_as_eager(traced, case, 4, gradients=False)
    first, *rest = case.operands(4)
    others = case._replace(operands=lambda _: (2 * first, *rest))
    assert_as_eager(traced, others, 4, gradients=False)


# ---- torch.export


def shapes(case):
    """A length is dynamic or an error. A name and limits would ask torch to prove what it cannot of
    tensors with four axes, ours or its own."""
    length = torch.export.Dim.DYNAMIC
    axes = [axis if isinstance(axis, tuple) else (axis,) for axis in case.axes]
    return (tuple(dict.fromkeys(each, length) for each in axes),)


@pytest.mark.parametrize("case", each(DYNAMIC))
def test_export_with_a_dynamic_length(case):
    case = plain(case)
    program = torch.export.export(
        Module(case.function), case.operands(5), dynamic_shapes=shapes(case)
    )
    for length in (5, 9):
        assert_as_eager(program.module(), case, length, gradients=False)


def test_the_checks_can_fail():
    """A value that Python reads stays what it was."""
    case = plain(DYNAMIC["entmax"])._replace(function=lambda s: s * float(s.amax()))
    traced = jit_trace(case.function, case.operands(5))
    wrong = case._replace(operands=lambda _: (2 * case.operands(5)[0],))
    with pytest.raises(AssertionError):
        assert_as_eager(traced, wrong, 5, gradients=False)
