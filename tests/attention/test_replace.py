"""`replace_sdpa`: what else computes attention inside a block is replaced, or refused by name."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
from tests.attention.cases import dense, draw, largest_difference

pytestmark = pytest.mark.usefixtures("kernels")

OMEGA, OTHER = fl.Tsallis(1.5), fl.Tsallis(2.0)
ATEN = torch.ops.aten
Q, K, V = draw(0, 2, 3, 5, 4), draw(1, 2, 3, 7, 4), draw(2, 2, 3, 7, 4)
PLAIN, EXPECTED = sdpa(Q, K, V), dense(Q, K, V, OMEGA)


class Layer(nn.Module):
    """Knows nothing of fenchel."""

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, q, k, v):
        return self.inner(q, k, v)


def assert_replaced(output):
    assert largest_difference(output, EXPECTED) <= 1e-13
    assert largest_difference(output, PLAIN) > 1e-3


@pytest.mark.parametrize("name", ["packet", "overload"])
def test_the_operator_is_the_function(name):
    operator = ATEN.scaled_dot_product_attention
    operator = operator.default if name == "overload" else operator
    with fl.replace_sdpa(OMEGA):
        assert_replaced(operator(Q, K, V))
        causal = operator(Q, K, V, is_causal=True, scale=0.3)
    assert largest_difference(causal, dense(Q, K, V, OMEGA, is_causal=True, scale=0.3)) <= 1e-13


@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_efficient_attention",
        "_flash_attention_forward",
    ],
)
def test_fused_operators_are_refused_by_name(name):
    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=rf"aten\.{name}.*sdpa"):
        getattr(ATEN, name)(Q, K, V)
    assert torch.is_tensor(ATEN._scaled_dot_product_attention_math(Q, K, V)[0])  # outside it runs


def test_an_operator_of_another_library_is_refused_by_name():
    @torch.library.custom_op("tests_replace::my_attention", mutates_args=())
    def my_attention(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=r"tests_replace\.my_attention"):
        torch.ops.tests_replace.my_attention(Q)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_bias_means_what_torch_means(make):
    bias = make(5, 7)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(0 if make is causal_upper_left else 2)
    with fl.replace_sdpa(OMEGA):
        output = sdpa(Q, K, V, attn_mask=bias)
    assert largest_difference(output, dense(Q, K, V, OMEGA, attn_mask=mask)) <= 1e-13
    with fl.replace_sdpa(fl.Shannon()):
        softmax = sdpa(Q, K, V, attn_mask=bias)
    assert largest_difference(softmax, sdpa(Q, K, V, attn_mask=mask)) <= 1e-13


# ---- what torch.jit and torch.export made

OWN_WARNINGS = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:`isinstance.treespec")


SCRIPTS = {
    "traced module": lambda: torch.jit.trace(Model(), (Q, K, V)),
    "scripted module": lambda: torch.jit.script(Model()),
    "frozen module": lambda: torch.jit.freeze(torch.jit.script(Model()).eval()),
    "traced function": lambda: torch.jit.trace(lambda *x: sdpa(*x), (Q, K, V)),
    "a method": lambda: torch.jit.script(Model()).inner.forward,
}


@OWN_WARNINGS
@pytest.mark.parametrize("name", SCRIPTS)
def test_traced_and_scripted_modules_are_refused_by_name(name):
    script = SCRIPTS[name]()
    message = r"torch\.jit.*aten::scaled_dot_product_attention.*model itself"
    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=message):
        script(Q, K, V)
    assert torch.equal(script(Q, K, V), PLAIN)


@OWN_WARNINGS
def test_a_script_without_attention_runs():
    double = torch.jit.trace(lambda x: 2 * x.softmax(-1), (Q,))
    with fl.replace_sdpa(OMEGA):
        assert torch.equal(double(Q), 2 * Q.softmax(-1))


@OWN_WARNINGS
def test_exported_modules_are_replaced():
    program = torch.export.export(Model(), (Q, K, V))
    with fl.replace_sdpa(OMEGA):
        assert_replaced(program.module()(Q, K, V))
        assert_replaced(torch.export.unflatten(program)(Q, K, V))


@OWN_WARNINGS
def test_exported_modules_that_were_decomposed_are_refused():
    program = torch.export.export(Model(), (Q, K, V)).run_decompositions()
    for module in (program.module(), torch.export.unflatten(program)):
        with (
            fl.replace_sdpa(OMEGA),
            pytest.raises(RuntimeError, match=r"torch\.export.*decomposed"),
        ):
            module(Q, K, V)


@OWN_WARNINGS
def test_an_exported_softmax_runs():
    program = torch.export.export(nn.Softmax(-1), (Q,)).run_decompositions()
    with fl.replace_sdpa(OMEGA):
        assert largest_difference(program.module()(Q), Q.softmax(-1)) <= 1e-15


# ---- as a decorator


@fl.replace_sdpa(OMEGA)
def decorated(q, k, v, *, depth=0):
    """What it says."""
    output = sdpa(q, k, v)
    return decorated(output, k, v, depth=depth - 1) if depth else output


def test_a_decorated_function_runs_in_the_block():
    assert_replaced(decorated(Q, K, V))
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "What it says.")
    assert torch.equal(sdpa(Q, K, V), PLAIN)
    expected = dense(dense(EXPECTED, K, V, OMEGA), K, V, OMEGA)
    assert largest_difference(decorated(Q, K, V, depth=2), expected) <= 1e-13
    with fl.replace_sdpa(OTHER):
        assert_replaced(decorated(Q, K, V))
        assert largest_difference(sdpa(Q, K, V), dense(Q, K, V, OTHER)) <= 1e-13


def test_one_object_serves_several_threads():
    """Each leaves its own block, in whatever order they come."""
    block, first, second, outputs = fl.replace_sdpa(OMEGA), *(threading.Event() for _ in "ab"), []

    def other():
        with block:
            first.set()
            second.wait(30)
            outputs.append(sdpa(Q, K, V))
        outputs.append(sdpa(Q, K, V))

    thread = threading.Thread(target=other)
    with torch.no_grad(), block:
        thread.start()
        first.wait(30)
    second.set()
    thread.join(30)
    assert_replaced(outputs[0])
    assert torch.equal(outputs[1], PLAIN)
    assert torch.equal(sdpa(Q, K, V), PLAIN)


@pytest.mark.parametrize("wrong", [Layer(), Layer, None], ids=["module", "class", "nothing"])
def test_only_functions_are_decorated(wrong):
    with pytest.raises(TypeError, match="replace_sdpa decorates functions"):
        fl.replace_sdpa(OMEGA)(wrong)
