"""Real weights and real sentences: MiniLM (BERT) and a title-writing T5."""

import time
from functools import cache

import numpy as np
import pytest
import torch

from fenchel import lens
from tests import needs
from tests.lens.models import read_by_hand, reference

MEASURES = ("multiplier", "mean", "mean_shift", "parameter")
CASES = [
    ("minilm", "encoder"),
    ("flan-t5-small", "encoder"),
    ("flan-t5-small", "decoder"),
    ("flan-t5-small", "cross"),
]


load = cache(lens.load)


def loaded(name, kind, count):
    covers = f"deviations of {name} on real sentences"
    folder = needs.model(name, covers)
    text = needs.shared("data", "text", "sst2.dev.tsv", covers=covers)
    model, tokenizer = load(folder)
    model.float().set_attn_implementation("sdpa")  # whatever the last test made of it
    texts = lens.sentences(text, count)
    return model, lens.encode(tokenizer, texts, decoder=kind != "encoder")


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_first_order_is_the_models_attention(name, kind):
    model, inputs = loaded(name, kind, 4)
    model.set_attn_implementation("eager")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model.to(dtype)
        given = dict(inputs)
        if kind != "encoder":
            given["decoder_input_ids"] = model._shift_right(given.pop("labels"))
        body = model.get_encoder() if name != "minilm" and kind == "encoder" else model
        with torch.no_grad():
            output = body(**given, output_attentions=True)
        kept = {"encoder": "attentions", "decoder": "decoder_attentions"}
        expected = output[kept.get(kind, "cross_attentions")]
        words = inputs["attention_mask"].bool()
        problems = lens.problems(model, inputs, attention=kind)
        assert len(problems) == len(expected)
        for problem, weights in zip(problems, expected, strict=True):
            apart = (problem.first_order().weights - weights).abs().amax(-1)
            assert apart.mT[words].max() <= tolerance


@pytest.mark.parametrize("name", ["minilm", "flan-t5-small"])
def test_agrees_with_a_plain_method_on_twenty_queries(name):
    model, inputs = loaded(name, "encoder", 6)
    model.double()
    deviations = lens.deviation(model, inputs)
    chosen = np.random.default_rng(0)
    lengths = inputs["attention_mask"].sum(-1).tolist()
    for _ in range(20):
        sentence = int(chosen.integers(6))
        query = int(chosen.integers(lengths[sentence]))
        layer = int(chosen.integers(deviations.layers))
        head = int(chosen.integers(deviations.heads))
        expected = reference(*read_by_hand(model, inputs, layer, sentence, head, query))
        ours = [float(getattr(deviations, m)[layer, sentence, head, query]) for m in MEASURES]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_single_precision_says_the_same(name, kind):
    model, inputs = loaded(name, kind, 4)
    single = lens.deviation(model, inputs, attention=kind)
    double = lens.deviation(model.double(), inputs, attention=kind)
    for measure in MEASURES:
        torch.testing.assert_close(
            getattr(single, measure), getattr(double, measure), rtol=0, atol=1e-5, equal_nan=True
        )


@pytest.mark.slow
def test_two_hundred_sentences_in_a_minute():
    """Of processor time, so that what else runs does not count; two threads share it."""
    model, inputs = loaded("minilm", "encoder", 200)
    threads, start = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)
    try:
        deviations = lens.deviation(model, inputs)
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - start < 60
    assert deviations.status == {"OK": 6 * 12 * deviations.queries}
