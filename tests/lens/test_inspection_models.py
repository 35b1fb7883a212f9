"""fl.inspect on models of Hugging Face: the weights are those that transformers records."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fenchel as fl
from tests.hf import models
from tests.hf.models import hf, transformers
from tests.lens.inspections import assert_consistent

FAMILIES = ["bert", "gpt2", "llama", "t5", "bart", "vit"]
HEADS = 4
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.5,
    "head_dim": 8,
}


def recorded(model, inputs):
    """The weights of every attention (batch, head, query, key), in the order of calls."""
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    if "encoder_attentions" not in output:
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(x for pair in pairs for x in pair)]


def assert_all_seen(model, inputs, weights):
    """Head h of layer l, for l = 0, 1, … and h = l mod 4, in the last example."""
    for layer, of_layer in enumerate(weights):
        head, last = layer % HEADS, len(of_layer) - 1
        seen = fl.inspect(model, inputs, layer, head, example=last)
        assert_consistent(seen, of_layer[last, head])
    with pytest.raises(IndexError, match=f"layer must be from 0 to {len(weights) - 1} "):
        fl.inspect(model, inputs, len(weights), 0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_as_loaded(family, implementation, monkeypatch):
    model, inputs = models.tiny(family), models.inputs(family)
    with models.softmax_as_given(monkeypatch):
        weights = recorded(model, inputs)
        assert len(weights) == models.ATTENTIONS[family]
        model.set_attn_implementation(implementation)
        assert_all_seen(model, inputs, weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_models(family):
    model, inputs = models.tiny(family), models.inputs(family)
    hf.convert(model, fl.Tsallis(1.5))
    weights = recorded(model, inputs)
    assert any((x == 0).any() for x in weights)
    assert_all_seen(model, inputs, weights)
    assert fl.inspect(model, inputs, 0, 0).regularizer == fl.Tsallis(1.5)


def test_an_alpha_for_each_head():
    model, inputs = models.tiny("llama"), models.inputs("llama")
    hf.convert(model, lambda _: fl.nn.LearnedTsallis(HEADS, dtype=torch.float64))
    raw = model.model.layers[1].self_attn.fenchel_regularizer.raw
    torch.nn.init.normal_(raw, generator=torch.Generator().manual_seed(0))
    alpha = model.model.layers[1].self_attn.fenchel_regularizer.alpha.detach()
    weights = recorded(model, inputs)[1]
    for head in range(HEADS):
        seen = fl.inspect(model, inputs, "model.layers.1", head)
        assert_consistent(seen, weights[0, head])
        assert float(seen.regularizer.alpha) == float(alpha[head])
    raw.data.fill_(0.0)
    assert float(seen.regularizer.alpha) == float(alpha[-1]), "a step does not change the past"


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_padding(family, side, convert):
    """Padded keys carry nothing. Tokens of a tokenizer are taken as they are."""
    model, inputs = models.tiny(family, "sdpa"), models.inputs(family)
    if convert:
        hf.convert(model, fl.Tsallis(1.5))
    mask = torch.ones_like(inputs["input_ids"])
    hidden = slice(0, 3) if side == "left" else slice(-3, None)
    mask[1, hidden] = 0
    encoding = transformers.BatchEncoding({**inputs, "attention_mask": mask})
    seen = fl.inspect(model, encoding, 1, 2, example=1)
    rows = seen.status == fl.Status.OK.value  # a padded query of a decoder may see nothing
    assert rows.sum() >= 4
    assert not seen.support[:, hidden][rows].any()
    output = seen.weights.to_dense() @ seen.value
    assert (output - seen.output)[rows].abs().max() <= 1e-10
    whole = fl.inspect(model, encoding, 1, 2, example=0)
    assert_consistent(whole)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "fenchel:entmax15"])
def test_sliding_windows(implementation, monkeypatch):
    config = transformers.MistralConfig(**SIZES, sliding_window=3)
    model = transformers.MistralForCausalLM(config).double().eval()
    model.set_attn_implementation(implementation)
    with models.softmax_as_given(monkeypatch):
        seen = fl.inspect(model, models.tokens(length=8), 1, 3)
    assert_consistent(seen)
    assert seen.visible_size.tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    band = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
    assert not (seen.support & ~band).any()


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_softcap_and_sinks(family, convert, monkeypatch):
    """Scores that are squeezed, and a null key that takes weight."""
    torch.manual_seed(0)
    extra = {"attn_logit_softcapping": 3.0} if family == "Gemma2" else {"num_local_experts": 4}
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    model.set_attn_implementation("eager")
    if convert:
        hf.convert(model, fl.Tsallis(1.5))
    inputs = {"input_ids": models.tokens()}
    with models.softmax_as_given(monkeypatch):
        weights = recorded(model, inputs)
        assert_all_seen(model, inputs, weights)
    assert ((weights[0].sum(-1) < 0.99).any()) == (family == "GptOss")


def test_two_threads_and_nothing_stays_behind():
    """Each sees its own model; transformers' table is as it was, also after an error."""
    inspected = [models.tiny(family) for family in ("bert", "gpt2")]
    alone = [fl.inspect(model, models.tokens(), 1, 0) for model in inspected]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            seen = pool.map(lambda model: fl.inspect(model, models.tokens(), 1, 0), inspected)
            for one, other in zip(seen, alone, strict=True):
                assert torch.equal(one.output, other.output)
    with pytest.raises(IndexError, match=r"index out of range in self"):
        fl.inspect(inspected[0], 1000 + models.tokens(), 0, 0)
    assert "get_interface" not in vars(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)


def test_another_thread_may_be_inside_the_same_model():
    """It came before the inspection, and leaves while that is under way."""
    model = models.tiny("llama", "sdpa")
    alone = fl.inspect(model, models.tokens(), 1, 0)
    me, inside, leave = threading.get_ident(), threading.Event(), threading.Event()

    def meet(*_):
        if threading.get_ident() != me:
            inside.set()
            assert leave.wait(60)
        elif pool_run is not None:
            leave.set()
            pool_run.result()

    pool_run = None
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: None)  # torch looks for hooks once it has some
    model.model.layers[0].self_attn.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(1) as pool:
        pool_run = pool.submit(model, models.tokens())
        assert inside.wait(60)
        seen = fl.inspect(model, models.tokens(), 1, 0)
    assert torch.equal(seen.output, alone.output)
    assert seen.path == alone.path == "model.layers.1.self_attn"


def test_weights_that_the_model_would_record_are_left_out():
    model, inputs = models.tiny("gpt2"), models.inputs("gpt2")
    model.config.output_attentions = True
    for given in ({**inputs, "output_attentions": True}, inputs["input_ids"]):
        assert_consistent(fl.inspect(model, given, 1, 0))
    hf.convert(model, fl.Tsallis(1.5))
    assert_consistent(fl.inspect(model, inputs, 1, 0))
    assert model(**inputs, output_attentions=True).attentions[0] is not None


def test_parts_of_a_model_keep_their_own_attention():
    """Of a model in two parts, one converted and one on eager."""
    model = transformers.VisionEncoderDecoderModel(
        encoder=models.tiny("vit", dtype=torch.float64).vit,
        decoder=transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=32, n_layer=1, n_head=HEADS, vocab_size=40, add_cross_attention=True
            )
        ).double(),
    ).eval()
    model.encoder.set_attn_implementation("eager")
    model.decoder.set_attn_implementation("fenchel:entmax15")
    inputs = {**models.inputs("vit"), "decoder_input_ids": models.tokens()}
    before = [x.config._attn_implementation for x in (model.encoder, model.decoder)]
    assert before == ["eager", "fenchel:entmax15"]
    kinds = [fl.inspect(model, inputs, layer, 0).regularizer for layer in range(4)]
    assert kinds == [fl.Shannon(), fl.Shannon(), fl.Tsallis(1.5), fl.Tsallis(1.5)]
    assert [x.config._attn_implementation for x in (model.encoder, model.decoder)] == before


def test_layers_that_share_their_parameters():
    config = transformers.AlbertConfig(
        vocab_size=40,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        intermediate_size=48,
        initializer_range=0.3,
    )
    model = transformers.AlbertModel(config).double().eval()
    outputs = [fl.inspect(model, models.tokens(), layer, 1).output for layer in range(3)]
    assert (outputs[1] - outputs[2]).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"attends 3 times in a pass; .* 0 \(.*\), 1 \(.*\), 2 \("):
        fl.inspect(model, models.tokens(), "encoder", 1)


def test_attention_that_cannot_be_seen():
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=HEADS)
    model = transformers.BloomModel(config).eval()
    with pytest.raises(ValueError, match=r"softmax of its own, in h.0.self_attention, h.1.self_at"):
        fl.inspect(model, models.tokens(), 0, 0)
    with pytest.raises(ValueError, match=r"seen in h.1\. .* in h.1.self_attention\. What can be"):
        fl.inspect(model, models.tokens(), "h.1", 0)
