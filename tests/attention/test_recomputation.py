"""`replace_sdpa` around torch's checkpoints, which compute a part of the model twice."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import fenchel as fl
from fenchel._attention import recomputation
from tests.attention.cases import draw, largest_difference

pytestmark = pytest.mark.usefixtures("kernels")

OMEGA, OTHER = fl.Tsallis(1.5), fl.Tsallis(2.0)
X = draw(0, 2, 3, 7, 4, scale=1.5)
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "other"])


def layer(x):
    return sdpa(x, x, x, is_causal=True).sin()


def wanted(*regularizers):
    """Output and gradient of one layer after another, without checkpoints or blocks."""
    leaf = X.clone().requires_grad_()
    x = leaf
    for regularizer in regularizers:
        x = fl.attention(x, x, x, regularizer, is_causal=True).sin()
    return x.detach(), torch.autograd.grad(x.square().sum(), leaf)[0]


def assert_agrees(output, leaf, *regularizers):
    right = wanted(*regularizers)
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
        assert largest_difference(leaf.grad, wanted(other)[1]) > 0.1


@BOTH
@pytest.mark.parametrize("where", ["outside", "inside", "in another"])
def test_a_block_around_a_checkpoint(reentrant, where):
    leaf = start()
    with fl.replace_sdpa(OMEGA):
        output = checkpoint(layer, leaf, use_reentrant=reentrant)
        if where == "inside":
            output.square().sum().backward()
    if where == "outside":
        output.square().sum().backward()
    elif where == "in another":
        with fl.replace_sdpa(OTHER):
            output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


@BOTH
@pytest.mark.parametrize("made", ["inside", "outside"])
def test_a_block_inside_the_checkpointed_function(reentrant, made):
    """It covers a part of the function, in both passes."""
    known = fl.replace_sdpa(OMEGA)

    def function(x):
        with fl.replace_sdpa(OMEGA) if made == "inside" else known:
            x = layer(x)
        return layer(x)

    leaf = start()
    output = checkpoint(function, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA, fl.Shannon())


@BOTH
def test_a_block_inside_and_one_around(reentrant):
    def function(x):
        with fl.replace_sdpa(OTHER):
            x = layer(x)
        return layer(x)

    leaf = start()
    with fl.replace_sdpa(OMEGA):
        output = checkpoint(function, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OTHER, OMEGA)


@BOTH
def test_a_forward_pass_from_before_the_block_stays_softmax(reentrant):
    leaf = start()
    output = checkpoint(layer, leaf, use_reentrant=reentrant)
    with fl.replace_sdpa(OMEGA):
        output.square().sum().backward()
    assert_agrees(output, leaf, fl.Shannon())


@BOTH
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "other"])
@pytest.mark.parametrize("place", ["outside", "between"])
def test_checkpoints_in_checkpoints(reentrant, inner, place):
    def function(x):
        if place == "outside":
            return layer(checkpoint(layer, x, use_reentrant=inner))
        with fl.replace_sdpa(OMEGA):
            x = checkpoint(layer, x, use_reentrant=inner)
        return layer(x)

    leaf = start()
    if place == "outside":
        with fl.replace_sdpa(OMEGA):
            output = checkpoint(function, leaf, use_reentrant=reentrant)
    else:
        output = checkpoint(function, leaf, use_reentrant=reentrant)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA, OMEGA if place == "outside" else fl.Shannon())


def test_a_checkpoint_that_compares_nothing_and_takes_names():
    """Without its comparison, wrong gradients would not be noticed by torch either."""
    leaf = start()
    with fl.replace_sdpa(OMEGA):
        output = checkpoint(layer, use_reentrant=False, determinism_check="none", x=leaf)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


@BOTH
def test_dropout_is_the_same_in_both_passes(reentrant):
    def function(x):
        return sdpa(x, x, x, dropout_p=0.4).sin()

    found = []
    for around in (lambda f, x: checkpoint(f, x, use_reentrant=reentrant), lambda f, x: f(x)):
        leaf = start()
        torch.manual_seed(3)
        with fl.replace_sdpa(OMEGA):
            output = around(function, leaf)
        output.square().sum().backward()
        found.append(leaf.grad)
    assert largest_difference(*found) <= 1e-12


@BOTH
def test_compiled_functions_in_checkpoints(reentrant):
    torch._dynamo.reset()
    leaf = start()
    with fl.replace_sdpa(OMEGA):
        output = checkpoint(
            torch.compile(layer, backend="aot_eager"), leaf, use_reentrant=reentrant
        )
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)


def test_checkpoints_in_compiled_functions():
    """The compiler keeps modes out of a checkpoint: then it runs as it is, or says so."""
    torch._dynamo.reset()

    def function(x):
        return checkpoint(layer, x, use_reentrant=False)

    leaf = start()
    with fl.replace_sdpa(OMEGA):
        output = torch.compile(function, backend="aot_eager")(leaf)
    output.square().sum().backward()
    assert_agrees(output, leaf, OMEGA)
    torch._dynamo.reset()
    whole = torch.compile(function, backend="aot_eager", fullgraph=True)
    with fl.replace_sdpa(OMEGA), pytest.raises(Exception, match="replace_sdpa"):
        whole(leaf)


def test_a_checkpoint_of_another_torch_is_an_error(monkeypatch):
    """One whose attributes have other names."""
    monkeypatch.setattr(recomputation._Checkpoint, "run_again_within", lambda *_: False)
    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=r"replace_sdpa.*inside the che"):
        checkpoint(layer, start(), use_reentrant=False)
    with torch.no_grad(), fl.replace_sdpa(OMEGA):
        assert layer(X).isfinite().all(), "without a checkpoint there is nothing to reach"
