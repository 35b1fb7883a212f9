"""Names, conversion, and what becomes of a converted model."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fenchel as fl
from tests.hf.models import (
    ATTENTIONS,
    FAMILIES,
    calls_of,
    derived_name,
    hf,
    inputs,
    logits,
    regularizer_by_name,
    tiny,
    tokens,
    transformers,
)

ATTENTION_FUNCTIONS = transformers.AttentionInterface()
MASK_FUNCTIONS = transformers.AttentionMaskInterface()


def test_attention_and_mask_are_registered_together():
    hf.register("fenchel:test-pair", fl.Tsallis(1.7))
    for name in ("fenchel:softmax", "fenchel:sparsemax", "fenchel:entmax15", "fenchel:test-pair"):
        assert name in hf.names()
        assert name in ATTENTION_FUNCTIONS.valid_keys()
        assert MASK_FUNCTIONS[name] is MASK_FUNCTIONS["fenchel:softmax"]
    assert "sdpa" not in hf.names()


def test_registering_twice_is_once_and_two_meanings_are_refused():
    before = ATTENTION_FUNCTIONS["fenchel:entmax15"]
    hf.register("fenchel:entmax15", fl.Tsallis(1.5))
    assert ATTENTION_FUNCTIONS["fenchel:entmax15"] is before
    with pytest.raises(ValueError, match=r"already means Tsallis\(alpha=1.5"):
        hf.register("fenchel:entmax15", fl.Tsallis(2.0))
    with pytest.raises(ValueError, match="already means Tsallis"):
        hf.register("fenchel:entmax15", fl.Shannon())


def test_tensors_are_the_same_by_their_numbers():
    """A cell of a notebook may run twice."""
    alpha = torch.tensor([[1.5], [1.2]])
    hf.register("fenchel:test-tensor", fl.Tsallis(alpha))
    before = ATTENTION_FUNCTIONS["fenchel:test-tensor"]
    hf.register("fenchel:test-tensor", fl.Tsallis(alpha.clone()))
    assert ATTENTION_FUNCTIONS["fenchel:test-tensor"] is before
    for other in (alpha + 0.1, alpha.double(), alpha[:1], 1.5):
        with pytest.raises(ValueError, match=r"means Tsallis\(alpha=<tensor \(2, 1\)>") as caught:
            hf.register("fenchel:test-tensor", fl.Tsallis(other))
        assert "'fenchel:test-tensor-2'" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_learned_tensors_are_the_same_by_being_one():
    """Of two with the same numbers, the second would train and change nothing."""
    alpha = torch.nn.Parameter(torch.tensor([[1.5], [1.2]]))
    hf.register("fenchel:test-learned", fl.Tsallis(alpha))
    hf.register("fenchel:test-learned", fl.Tsallis(alpha))
    for other in (torch.nn.Parameter(alpha.detach().clone()), alpha.detach().clone()):
        with pytest.raises(ValueError, match=r"learned, and a name cannot be bound again.*another"):
            hf.register("fenchel:test-learned", fl.Tsallis(other))


def test_a_module_that_makes_a_regularizer_is_registered_too():
    module = fl.nn.LearnedTsallis(4, init=1.3)
    hf.register("fenchel:test-module", module)
    hf.register("fenchel:test-module", module)
    with pytest.raises(ValueError, match="already means the module LearnedTsallis that is learned"):
        hf.register("fenchel:test-module", fl.nn.LearnedTsallis(4, init=1.3))
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    caller = nn.Module()
    caller.is_causal = False
    expected = fl.attention(q, k, v, module()).transpose(1, 2)
    for recorded in (False, True):
        output, weights = ATTENTION_FUNCTIONS["fenchel:test-module"](
            caller, q, k, v, None, output_attentions=recorded
        )
        torch.testing.assert_close(output, expected)
        assert (weights is not None) == recorded


@pytest.mark.parametrize("name", ["entmax", "fenchel:", "fenchel:a b", "other:x", 3, "fenchel:a/b"])
def test_names_keep_to_a_form(name):
    with pytest.raises(ValueError, match="a name must be 'fenchel:'"):
        hf.register(name, fl.Shannon())


def test_other_misuse_of_register():
    with pytest.raises(ValueError, match="transformers' own"):
        hf.register("fenchel:flash-entmax", fl.Tsallis(1.5))
    with pytest.raises(TypeError, match="must be a Regularizer"):
        hf.register("fenchel:x", 1.5)


@pytest.mark.parametrize(
    ("omega", "name"),
    [
        (fl.Tsallis(1.3), "fenchel:tsallis-1.3"),
        (fl.Tsallis(1.3, 0.5), "fenchel:tsallis-1.3-temperature-0.5"),
        (fl.Shannon(), "fenchel:shannon-1.0"),
        (fl.Norm(2.5), "fenchel:norm-2.5"),
        (fl.Budget(3), "fenchel:budget-3"),
        (fl.Fused(0.2, grid=(2, 3)), "fenchel:fused-0.2-grid-2x3"),
    ],
)
def test_a_regulariser_has_a_name(omega, name):
    assert derived_name(omega) == name
    hf.register(name, omega)


@pytest.mark.parametrize(
    "omega", [fl.Tsallis(1.5, temperature=1e-05), fl.Shannon(2.5e-10), fl.Shannon(1e20)]
)
def test_a_name_says_small_numbers(omega):
    assert regularizer_by_name(derived_name(omega)) == omega


@pytest.mark.parametrize("name", ["tsallis-1_3", "tsallis-1.3 ", "tsallis-1.3-alpha-1.5"])
def test_a_name_that_could_be_misread_is_refused(name):
    with pytest.raises(ValueError, match="names no regulariser"):
        hf.convert(tiny("llama"), f"fenchel:{name}")


def test_a_regulariser_of_your_own_has_a_name():
    @dataclass(frozen=True)
    class Mine(fl.Shannon):
        strength: float = 2.0

    assert derived_name(Mine()) == "fenchel:mine-1.0"
    assert derived_name(Mine(1.0, 3.0)) == "fenchel:mine-1.0-strength-3.0"


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_switches_every_attention(family, monkeypatch):
    model, batch = tiny(family), inputs(family)
    soft = logits(model, **batch)
    assert hf.convert(model, fl.Tsallis(1.3)) is model
    with calls_of(monkeypatch) as seen:
        sparse = logits(model, **batch)
    assert len(seen) == ATTENTIONS[family]
    assert (sparse - soft).abs().max() > 1e-3
    assert (sparse - logits(tiny(family, "fenchel:test-1.3"), **batch)).abs().max() == 0


def test_convert_again_and_back():
    model, batch = tiny("t5"), inputs("t5")
    eager = logits(model, **batch)
    first = logits(hf.convert(model, "fenchel:sparsemax"), **batch)
    second = logits(hf.convert(model, "fenchel:entmax15"), **batch)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(logits(hf.convert(model, "fenchel:sparsemax"), **batch), first)
    assert torch.equal(logits(hf.convert(model, "fenchel:sparsemax"), **batch), first)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, **batch), eager)


def test_an_unknown_name_lists_the_known():
    model = tiny("bert")
    with pytest.raises(
        ValueError, match=r"'fenchel:entmax16' names no.*fenchel:entmax15.*register"
    ):
        hf.convert(model, "fenchel:entmax16")
    with pytest.raises(ValueError, match="unknown name 'sdpa'"):
        hf.convert(model, "sdpa")
    with pytest.raises(TypeError, match="must be a Regularizer"):
        hf.convert(model, 1.5)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        hf.convert("bert", "fenchel:softmax")
    with pytest.raises(ValueError, match=r"'fenchel:held' is what hf\.convert uses"):
        hf.register("fenchel:held", fl.Shannon())
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_of_the_same_configuration_stay(family):
    model = tiny(family)
    config, before = model.config, model.config.to_dict()
    twin = type(model)(config).double().eval()
    batch = inputs(family)
    soft = logits(twin, **batch)
    hf.convert(model, "fenchel:entmax15")
    assert config._attn_implementation == twin.config._attn_implementation == "eager"
    assert torch.equal(logits(twin, **batch), soft)
    later = type(model)(config).double().eval()
    later.load_state_dict(twin.state_dict())
    assert torch.equal(logits(later, **batch), soft)
    assert config.to_dict() == before
    assert model.config is not config
    assert model.config.to_dict() == before, "the same in all but the choice"


def test_one_configuration_stays_one():
    """Modules that shared a configuration share the copy, and parts of it stay its parts."""
    llama = hf.convert(tiny("llama"), "fenchel:entmax15")
    inside = [module.config for module in llama.modules() if hasattr(module, "config")]
    assert len(inside) > 2
    assert all(config is llama.config for config in inside)
    encoder = transformers.BertConfig(**small(num_hidden_layers=1, intermediate_size=48))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, encoder)
    pair = transformers.EncoderDecoderModel(config)
    parts = pair.encoder.config, pair.decoder.config
    assert (config.encoder, config.decoder) == parts
    hf.convert(pair, "fenchel:entmax15")
    assert pair.config.encoder is pair.encoder.config
    assert pair.config.decoder is pair.decoder.config
    for old in (config, *parts):
        assert not old._attn_implementation.startswith("fenchel")


def test_save_and_load(tmp_path):
    """transformers does not save the choice: it is made again on loading."""
    model, batch = hf.convert(tiny("t5"), "fenchel:entmax15"), inputs("t5")
    model.save_pretrained(tmp_path)
    kind = type(model)
    chosen = kind.from_pretrained(tmp_path, attn_implementation="fenchel:entmax15").eval()
    assert same_outputs(chosen, model, batch)
    for name, parameter in chosen.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name])
    forgotten = kind.from_pretrained(tmp_path).eval()
    assert forgotten.config._attn_implementation == "sdpa"
    assert not same_outputs(forgotten, model, batch)
    assert same_outputs(hf.convert(forgotten, "fenchel:entmax15"), model, batch)


def same_outputs(left, right, batch):
    """Up to rounding: weights from a file lie elsewhere in memory, and sums take another order."""
    return (logits(left, **batch) - logits(right, **batch)).abs().max() <= 1e-12


def test_the_choice_can_be_kept_in_the_folder(tmp_path):
    model, batch = hf.convert(tiny("t5"), "fenchel:entmax15"), inputs("t5")
    model.config.attn_implementation = "fenchel:entmax15"
    model.save_pretrained(tmp_path)
    assert same_outputs(type(model).from_pretrained(tmp_path).eval(), model, batch)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_implementation"] = "fenchel:never-registered"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="fenchel:never-registered"):
        type(model).from_pretrained(tmp_path)


def test_copies_and_states():
    model, batch = hf.convert(tiny("llama"), fl.Tsallis(1.3)), inputs("llama")
    expected = logits(model, **batch)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, **batch), expected)
    hf.convert(twin, "fenchel:sparsemax")
    assert torch.equal(logits(model, **batch), expected), "the copy has its own configuration"
    plain = tiny("llama")
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        plain.model.norm.weight.zero_()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(hf.convert(plain, fl.Tsallis(1.3)), **batch), expected)


def test_a_model_made_of_two(monkeypatch):
    """Encoder and decoder with configurations of their own, and cross-attention between."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    names = {"vocab_size": 40, "intermediate_size": 48, "max_position_embeddings": 32}
    encoder, decoder = (transformers.BertConfig(**sizes, **names) for _ in range(2))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(config).double().eval()
    batch = {"input_ids": tokens(), "decoder_input_ids": tokens(length=5)}
    hf.convert(model, "fenchel:entmax15")
    with calls_of(monkeypatch) as seen:
        before = logits(model, **batch)
    assert len(seen) == 3
    batch["decoder_input_ids"][:, 3:] += 1
    assert (logits(model, **batch) - before)[:, :3].abs().max() == 0


def test_a_module_that_holds_models(monkeypatch):
    pair = nn.ModuleDict({"one": tiny("bert"), "two": nn.Sequential(tiny("gpt2"))})
    hf.convert(pair, "fenchel:sparsemax")
    with calls_of(monkeypatch) as seen:
        logits(pair["one"], **inputs("bert"))
        logits(pair["two"][0], **inputs("gpt2"))
    assert len(seen) == 4


def small(**more):
    return {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, **more}


def test_layers_of_torch_are_sent_to_the_other_convert():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    with pytest.raises(
        ValueError, match=r"fenchel\.nn\.convert\(model, regularizer\) is for torch"
    ):
        hf.convert(layer, "fenchel:entmax15")
    with pytest.raises(ValueError, match=r"found no attention.*fenchel\.nn\.convert"):
        hf.convert(fl.nn.convert(layer, fl.Tsallis(1.5)), "fenchel:entmax15")
    both = nn.ModuleList([tiny("bert"), nn.MultiheadAttention(8, 2)])
    fl.nn.convert(both, fl.Tsallis(1.5))
    hf.convert(both, "fenchel:entmax15")
    assert both[0].config._attn_implementation == "fenchel:entmax15"


def test_an_attention_whose_source_cannot_be_read_is_refused():
    namespace = {"nn": nn, "__name__": "nowhere"}
    exec("class HiddenAttention(nn.Module):\n    def forward(self, x): return x", namespace)
    model = tiny("bert")
    model.extra = namespace["HiddenAttention"]()
    with pytest.raises(ValueError, match=r"extra \(HiddenAttention\)"):
        hf.convert(model, "fenchel:entmax15")


def test_models_without_attention_are_refused():
    for model in (nn.Linear(2, 2), nn.Sequential()):
        with pytest.raises(ValueError, match=r"found no attention in .* of a transformers"):
            hf.convert(model, "fenchel:entmax15")


def test_the_core_does_not_import_transformers():
    code = "import sys, fenchel; print({'transformers', 'fenchel.hf'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


def test_without_transformers_the_message_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import fenchel.hf"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 1
    assert 'pip install -c constraints.txt ".[hf]"' in out.stderr
