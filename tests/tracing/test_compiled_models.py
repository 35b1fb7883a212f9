"""`torch.compile` of converted Hugging Face models: one graph for every length."""

import pytest
import torch

from tests.tracing.models import MODELS, assert_model_as_eager, converted
from tests.tracing.test_compile import compiled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_lengths(name):
    torch._dynamo.reset()
    model = converted(name)
    function = compiled(model)
    assert_model_as_eager(function, model, 6)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_model_as_eager(function, model, 9)
