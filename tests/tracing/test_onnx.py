"""ONNX: attention, maps and a converted model, run by another runtime at another length."""

import pytest
import torch

import fenchel as fl
from tests import needs
from tests.tracing.cases import DYNAMIC, assert_same
from tests.tracing.test_tracers import Module, plain, shapes

COVERS = "what torch.onnx.export writes"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of packages not ours
MAPS = ["sparsemax", "entmax 3", "norm", "budget"]
ATTENTIONS = [
    "attention: softmax, window",
    "attention: entmax",
    "attention: entmax, causal",
    "attention: entmax, ALiBi",
    "attention: entmax, scale of the length",
]


def session(module, operands, dynamic_shapes):
    """What runs the exported file."""
    needs.package("onnxscript", COVERS)
    runtime = needs.package("onnxruntime", COVERS)
    program = torch.onnx.export(
        module, operands, dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False
    )
    return runtime.InferenceSession(program.model_proto.SerializeToString())


def run(session, operands):
    names = [x.name for x in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, operands, strict=True)}
    return torch.tensor(session.run(None, feed)[0])


@pytest.mark.parametrize("name", MAPS)
def test_a_map(name):
    case = plain(DYNAMIC[name])
    exported = session(Module(case.function), case.operands(5), shapes(case))
    for length in (5, 9):
        operands = case.operands(length)
        assert_same(run(exported, operands), case.function(*operands))


# Torch's exporter rounds numbers such as a scale to float32; so the rest is compared there, in
# torch's tolerances.


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    case = plain(DYNAMIC[name])
    first, *others = ([x.float() for x in case.operands(length)] for length in (5, 5, 9))
    exported = session(Module(case.function), tuple(first), shapes(case))
    for operands in others:
        torch.testing.assert_close(run(exported, operands), case.function(*operands))


def test_a_converted_llama():
    from tests.tracing.models import converted, ids
    from tests.tracing.test_exported_models import SHAPES

    model = converted("llama").float()
    exported = session(model, (ids(6),), SHAPES)
    for length in (6, 9):
        expected = model(ids(length)).detach()
        error = run(exported, (ids(length),)) - expected
        assert error.abs().max() <= 1e-5 * expected.abs().max()


def test_what_onnx_does_not_know_is_refused_with_the_way_out():
    needs.package("onnxscript", COVERS)
    case = plain(DYNAMIC["fused"])
    with pytest.raises(Exception, match="Fused cannot be exported to ONNX") as refusal:
        torch.onnx.export(Module(case.function), case.operands(5), dynamo=True, verbose=False)
    assert "torch.export" in str(refusal.value)


def test_the_check_can_fail():
    """A number that Python reads is wrong for other rows."""
    case = plain(DYNAMIC["sparsemax"])
    wrong = session(Module(lambda s: fl.sparsemax(2 * s)), case.operands(5), shapes(case))
    with pytest.raises(AssertionError):
        assert_same(run(wrong, case.operands(5)), case.function(*case.operands(5)))
