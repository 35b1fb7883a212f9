"""`replace_sdpa` around torch's checkpoints, which compute a part of the model twice."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import fenchel as fl
from tests.attention.cases import draw, largest_difference

pytestmark = pytest.mark.usefixtures("kernels")

OMEGA, OTHER = fl.Tsallis(1.5), fl.Tsallis(2.0)
X = draw(0, 2, 3, 7, 4, scale=1.5)
NATIVE = pytest.mark.parametrize("kernels", ["native"], indirect=True)  # compiled sooner
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "other"])


def layer(x):
    return sdpa(x, x, x, is_causal=True).sin()


def sparse_layer(x):
    with fl.replace_sdpa(OMEGA):
        return layer(x)


def reference(*regularizers):
    """Output and gradient of one layer after another, without checkpoints or blocks."""
    leaf = X.clone().requires_grad_()
    x = leaf
    for regularizer in regularizers:
        x = fl.attention(x, x, x, regularizer, is_causal=True).sin()
    return x.detach(), torch.autograd.grad(x.square().sum(), leaf)[0]


def assert_agrees(output, leaf, *regularizers):
    right = reference(*regularizers)
    assert largest_difference(output.detach(), right[0]) <= 1e-13
    assert largest_difference(leaf.grad, right[1]) <= 1e-12


def start():
    return X.clone().requires_grad_()


def test_regularizers_differ():
    """Or the tests below could not fail."""
    leaf = start()
    output = layer(leaf)
    output.square().sum().backward()
    assert_agrees(output, leaf, fl.Shannon())
    for other in (OMEGA, OTHER):
        assert largest_difference(leaf.grad, reference(other)[1]) > 0.1


REFUSED = r"the block does not hold; enter the block inside .* context_fn"


@BOTH
def test_a_block_around_a_checkpoint_is_refused(reentrant):
    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=REFUSED):
        checkpoint(layer, start(), use_reentrant=reentrant)


@BOTH
def test_without_a_gradient_nothing_is_computed_again(reentrant):
    """Of a reentrant checkpoint only inference mode shows that there is none."""
    right, _ = reference(OMEGA)
    for mode in (torch.inference_mode,) if reentrant else (torch.inference_mode, torch.no_grad):
        with mode(), fl.replace_sdpa(OMEGA):
            output = checkpoint(layer, start(), use_reentrant=reentrant)
        assert largest_difference(output, right) <= 1e-13


@BOTH
def test_gradients_switched_on_inside_the_block(reentrant):
    refused = pytest.raises(RuntimeError, match=REFUSED)
    with torch.no_grad(), fl.replace_sdpa(OMEGA), torch.enable_grad(), refused:
        checkpoint(layer, start(), use_reentrant=reentrant)


def test_hooks_of_others_do_not_hide_a_checkpoint():
    def function(x):
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=REFUSED):
        checkpoint(function, start(), use_reentrant=False)
    leaf = start()  # and all hooks are where they were
    with fl.replace_sdpa(OMEGA), torch.autograd.graph.save_on_cpu():
        output = layer(leaf)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


def test_torchs_own_way_to_enter_blocks_again():
    leaf = start()
    output = checkpoint(
        layer,
        leaf,
        use_reentrant=False,
        context_fn=lambda: (fl.replace_sdpa(OMEGA), fl.replace_sdpa(OMEGA)),
    )
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


def test_hooks_of_others_are_no_checkpoint():
    leaf = start()
    with fl.replace_sdpa(OMEGA), torch.autograd.graph.save_on_cpu():
        output = layer(leaf)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


@BOTH
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_block_inside_the_checkpointed_function(reentrant, place):
    """It covers a part of the function, in both passes."""
    block = fl.replace_sdpa(OMEGA)

    def function(x):
        with fl.replace_sdpa(OMEGA) if place == "inside" else block:
            x = layer(x)
        return layer(x)

    leaf = start()
    output = checkpoint(function, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA, fl.Shannon())


@BOTH
def test_a_block_inside_and_one_around(reentrant):
    """The inner one holds in both passes."""
    leaf = start()
    with fl.replace_sdpa(OTHER):
        output = checkpoint(sparse_layer, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


@BOTH
def test_a_forward_pass_from_before_the_block_stays_softmax(reentrant):
    leaf = start()
    output = checkpoint(layer, leaf, use_reentrant=reentrant)
    with fl.replace_sdpa(OMEGA):
        output.square().sum().backward()
    assert_agrees(output, leaf, fl.Shannon())


@BOTH
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "other"])
def test_checkpoints_in_checkpoints(reentrant, inner):
    def function(x):
        return layer(checkpoint(sparse_layer, x, use_reentrant=inner))

    leaf = start()
    output = checkpoint(function, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA, fl.Shannon())


@BOTH
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "other"])
def test_a_block_between_two_checkpoints_is_refused(reentrant, inner):
    def function(x):
        with fl.replace_sdpa(OMEGA):
            return checkpoint(layer, x, use_reentrant=inner)

    if reentrant:  # its forward pass takes no gradient, its second one does
        output = checkpoint(function, start(), use_reentrant=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            output.square().sum().backward()
    else:
        with pytest.raises(RuntimeError, match=REFUSED):
            checkpoint(function, start(), use_reentrant=False)


@BOTH
def test_dropout_is_the_same_in_both_passes(reentrant):
    def function(x):
        with fl.replace_sdpa(OMEGA):
            return sdpa(x, x, x, dropout_p=0.4).sin()

    gradients = []
    for around in (lambda f, x: checkpoint(f, x, use_reentrant=reentrant), lambda f, x: f(x)):
        leaf = start()
        torch.manual_seed(3)
        output = around(function, leaf)
        output.square().sum().backward()
        gradients.append(leaf.grad)
    assert largest_difference(*gradients) <= 1e-12


@BOTH
@NATIVE
@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled inside"])
def test_a_block_around_a_compiled_function_in_a_checkpoint(reentrant, before):
    """It raises; compiled before, without a checkpoint, at the latest in the backward pass."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    if before:
        with fl.replace_sdpa(OMEGA):
            compiled(start())
    with fl.replace_sdpa(OMEGA), pytest.raises(Exception, match=f"{REFUSED}|recomput"):
        checkpoint(compiled, start(), use_reentrant=reentrant).square().sum().backward()


@BOTH
@NATIVE
def test_compiled_functions_with_a_block_in_checkpoints(reentrant):
    torch._dynamo.reset()
    leaf = start()
    compiled = torch.compile(sparse_layer, backend="aot_eager")
    output = checkpoint(compiled, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


def test_checkpoints_in_compiled_functions():
    """The compiler keeps modes out of a checkpoint: it says so."""
    torch._dynamo.reset()

    def function(x):
        return checkpoint(layer, x, use_reentrant=False)

    for whole in (True, False):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=whole)
        with fl.replace_sdpa(OMEGA), pytest.raises(Exception, match="replace_sdpa"):
            compiled(start())
