"""`torch.export` and `torch.jit.trace` of a converted Llama: equal to eager at other lengths."""

import warnings

import pytest
import torch

from tests.tracing.models import assert_model_as_eager, converted, ids

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SHAPES = {"input_ids": {1: torch.export.Dim("length", min=2, max=32)}}


@pytest.mark.slow
def test_export_with_a_dynamic_length():
    model = converted("llama")
    program = torch.export.export(model, (ids(6),), dynamic_shapes=SHAPES)
    for length in (6, 9):
        assert_model_as_eager(program.module(), model, length, gradients=False)


@pytest.mark.slow
def test_jit_trace():
    model = converted("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it writes numbers down: that is what it says
        traced = torch.jit.trace(model, (ids(6),), check_trace=False)
    assert_model_as_eager(traced, model, 6, gradients=False)
    other = ids(6).flip(1)
    torch.testing.assert_close(traced(other), model(other), rtol=1e-9, atol=1e-9)
