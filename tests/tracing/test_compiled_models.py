"""`torch.compile` of converted Hugging Face models: one graph for every length."""

import copy

import pytest
import torch

from tests import needs
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


@pytest.mark.slow
@needs.compiler("models compiled to machine code")
def test_five_steps_of_training_through_inductor():
    torch._dynamo.reset()
    model = converted("llama").model.float()
    plain = copy.deepcopy(model)
    expected = losses(plain, plain)
    found = losses(model, torch.compile(model, dynamic=True, fullgraph=True))
    assert expected.unique().numel() == 5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def losses(model, function):
    """Of five steps, each with another length."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, model.config.vocab_size, (2, 12 + 4 * step), generator=generator)
        loss = function(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)
