"""Models from disk; every bad input has a message with the way out."""

import json
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fenchel.cli import app
from fenchel.lens.loading import load
from tests.lens.heads import folders


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    names = ("bert", "t5", "gpt2", "llama", "bart", "vit")
    return {name: folders.save(name, base / name, pad=name != "llama") for name in names}


@pytest.fixture
def bert(models, tmp_path):
    """A copy that may be harmed."""
    return shutil.copytree(models["bert"], tmp_path / "bert")


def test_the_head_that_writes_text_is_kept(models):
    classes = {name: type(load(folder)[0]).__name__ for name, folder in models.items()}
    assert classes == {
        "bert": "BertModel",
        "t5": "T5ForConditionalGeneration",
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "bart": "BartForConditionalGeneration",
        "vit": "ViTModel",
    }


def test_other_heads_are_left_out(bert):
    folders.change_config(bert, architectures=["BertForSequenceClassification"])
    assert type(load(bert)[0]).__name__ == "BertModel"


def test_a_decoder_is_padded_with_its_end(models):
    _, tokenizer = load(models["llama"])
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("[SEP]", "right")


def test_images_get_their_processor(models):
    assert hasattr(load(models["vit"])[1], "image_mean")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_dtypes(models, dtype):
    model, _ = load(models["bert"], dtype)
    assert next(model.parameters()).dtype == getattr(torch, dtype)
    assert not model.training


def test_an_unknown_dtype_is_refused(models):
    with pytest.raises(ValueError, match="dtype must be of float32"):
        load(models["bert"], "int8")


def test_a_pickle_is_refused_and_not_opened(models, tmp_path):
    folder = folders.pickled(models["bert"], tmp_path / "pickled")
    with pytest.raises(OSError, match=r"pickle \(pytorch_model.bin\)(.|\n)*save_pretrained"):
        load(folder)
    assert not (folder / "trace").exists()


def test_the_trap_of_the_pickle_works(models, tmp_path):
    folder = folders.pickled(models["bert"], tmp_path / "pickled")
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert (folder / "trace").exists()


def test_folders_that_are_no_model(models, bert, tmp_path):
    with pytest.raises(FileNotFoundError, match="the folder does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="give the folder"):
        load(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"no weights: looked for \*\.safetensors"):
        load(bert)
    (bert / "config.json").unlink()
    with pytest.raises(OSError, match=r"no config\.json \(there is: tokenizer"):
        load(bert)


@pytest.mark.parametrize("harm", ["cut", "noise"])
def test_damaged_weights(bert, harm):
    path = bert / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] if harm == "cut" else b"noise" * 1000)
    with pytest.raises(OSError, match="are damaged"):
        load(bert)


def sharded(folder, weight_map):
    """The weights in one part, with an index. weight_map: of the names of the weights."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    document = {"metadata": {}, "weight_map": weight_map(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def test_weights_in_parts(models, bert):
    whole, _ = load(models["bert"])
    parts, _ = load(sharded(bert, lambda names: dict.fromkeys(names, "part.safetensors")))
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_index_that_leads_out_of_the_folder(bert):
    """The file that it names is there, and could be read."""
    outside = bert.parent / "outside.safetensors"
    outside.write_bytes((bert / "model.safetensors").read_bytes())
    sharded(bert, dict.fromkeys)
    path = bert / "model.safetensors.index.json"
    names = list(load_file(outside))
    for name in ("../outside.safetensors", str(outside), "sub/../../outside.safetensors"):
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
        message = f"index.json names the weights {name!r}, expected a *.safetensors within the"
        with pytest.raises(OSError, match=re.escape(message)):
            load(bert)


@pytest.mark.parametrize("name", ["part.bin", "part", ".", "", 3, None, ["part.safetensors"]])
def test_an_index_of_what_are_no_weights(bert, name):
    sharded(bert, lambda names: dict.fromkeys(names, name))
    with pytest.raises(OSError, match=r"index\.json (names the weights|is damaged)"):
        load(bert)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"metadata": {', "\xff"]
)
def test_a_damaged_index(bert, content):
    sharded(bert, dict.fromkeys)
    (bert / "model.safetensors.index.json").write_text(content, encoding="latin1")
    with pytest.raises(OSError, match=r"index\.json is damaged .*expected a table weight_map of"):
        load(bert)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "x"}, "its files are not as expected .*expected int, got str"),
        ({"num_attention_heads": 0}, "its files are not as expected .*ZeroDivisionError"),
        ({"architectures": 5}, "its files are not as expected .*TypeError"),
    ],
)
def test_a_configuration_that_transformers_stumbles_over(bert, changes, said):
    folders.change_config(bert, **changes)
    with pytest.raises(OSError, match=rf"cannot load {re.escape(str(bert))}: {said}"):
        load(bert)


def test_a_command_says_it_in_one_line(bert, tmp_path):
    sharded(bert, lambda names: dict.fromkeys(names, "../x.safetensors"))
    text = tmp_path / "a.txt"
    text.write_text("a b c")
    words = ["audit", str(bert), "--texts", str(text), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "names the weights '../x.safetensors', expected a *.safetensors within" in line


def test_weights_of_another_configuration(bert):
    folders.change_config(bert, num_hidden_layers=3)
    with pytest.raises(OSError, match=r"lack encoder.layer.2.*and 15 more"):
        load(bert)
    folders.change_config(bert, num_hidden_layers=2, intermediate_size=50)
    with pytest.raises(OSError, match="cannot load"):
        load(bert)


def test_no_tokenizer(bert):
    for path in bert.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(OSError, match=r"no tokenizer: looked for tokenizer\.json"):
        load(bert)


def test_code_of_the_folder_runs_only_if_trusted(bert):
    code = (
        "import pathlib\npathlib.Path(__file__).parents[0].joinpath('trace').touch()\nraise OSError"
    )
    (bert / "own.py").write_text(code)
    trace = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    folders.change_config(bert, model_type="own", architectures=["Own"], auto_map=trace)
    with pytest.raises(ValueError, match="--trust-remote-code"):
        load(bert)
    assert not list(bert.rglob("trace"))


def test_a_known_model_needs_no_code_of_its_own(bert):
    (bert / "own.py").write_text("raise SystemExit")
    folders.change_config(bert, auto_map={"AutoModel": "own.Model"})
    assert type(load(bert)[0]).__name__ == "BertModel"


def test_a_name_without_a_network(bert):
    with pytest.raises(OSError, match="hf download nobody/nothing --local-dir DIR"):
        load("nobody/nothing")


def test_a_damaged_configuration(bert):
    (bert / "config.json").write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(OSError, match="cannot load"):
        load(bert)
