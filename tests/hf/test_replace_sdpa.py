"""`replace_sdpa` around models of transformers: softmax by hand is refused by name."""

import pytest
import torch

import fenchel as fl
from tests import needs

transformers = needs.package("transformers", "replace_sdpa around models of transformers")

OMEGA = fl.Tsallis(1.5)
IDS = torch.randint(3, 50, (1, 6), generator=torch.Generator().manual_seed(0))
SIZE = {"vocab_size": 50, "hidden_size": 32, "initializer_range": 0.3}
LLAMA = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **SIZE}


def llama(attention):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval()


def mixtral(attention):
    """Its router computes a softmax that is no attention."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **LLAMA, num_key_value_heads=4, num_local_experts=2, attn_implementation=attention
    )
    return transformers.MixtralForCausalLM(config).eval()


def bloom():
    return transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=1, n_head=4, **SIZE))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


REFUSED = r'by itself, out of replace_sdpa\'s reach; call model.set_attn_implementation\("sdpa"\)'


@pytest.mark.parametrize("model", [llama, mixtral])
def test_eager_attention_is_refused_with_the_way_out(model):
    model = model("eager")
    softmax = logits(model)
    refused = pytest.raises(RuntimeError, match=f"eager_attention_forward of .*{REFUSED}")
    with fl.replace_sdpa(OMEGA), refused:
        model(IDS)
    model.set_attn_implementation("sdpa")  # what the error says
    with fl.replace_sdpa(OMEGA):
        assert (logits(model) - softmax).abs().max() > 1e-3
    with fl.replace_sdpa(fl.Shannon()):
        assert (logits(model) - softmax).abs().max() < 1e-4


def test_an_attention_without_a_choice_is_refused_by_its_class():
    with fl.replace_sdpa(OMEGA), pytest.raises(RuntimeError, match=rf"BloomAttention.*{REFUSED}"):
        bloom()(IDS)


@pytest.mark.slow  # transformers compiles it to machine code
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without")
def test_flex_attention_is_replaced():
    softmax = logits(llama("eager"))
    with fl.replace_sdpa(OMEGA):
        by_function, by_flex = logits(llama("sdpa")), logits(llama("flex_attention"))
    assert (by_flex - by_function).abs().max() < 1e-5
    assert (by_flex - softmax).abs().max() > 1e-3


@pytest.mark.parametrize("model", [lambda: llama("eager"), bloom], ids=["llama", "bloom"])
def test_compiled_models_are_refused_too(model):
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend="eager")
    with fl.replace_sdpa(OMEGA), pytest.raises(Exception, match=REFUSED):
        compiled(IDS)


def test_softmax_of_others_is_left_alone():
    """Whoever computes attention by hand outside of transformers is not told from other code."""
    scores = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    expected = scores.softmax(-1)
    with fl.replace_sdpa(OMEGA):
        assert torch.equal(torch.nn.Softmax(-1)(scores), expected)
        assert torch.equal(torch.softmax(scores, -1), expected)
