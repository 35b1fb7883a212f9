"""A recipe keeps what it promises, and converting by it is the same as switching."""

import math

import pytest
import torch
import transformers as hf

from fenchel.hf import convert
from fenchel.lens.heads.auditing import AuditRun
from fenchel.lens.heads.datasets import make_dataset
from fenchel.lens.heads.settings import AuditSettings
from tests.lens.architectures import build, tokenizer
from tests.lens.heads.reference import Bench, Shown, embedding
from tests.lens.heads.reference_probe import Probe

TEXTS = ["a b c d e", "f g h i j k", "l m n", "o p q r"]
TOLERANCE = 0.2


def searched(model, name, **settings):
    wanted = AuditSettings(("recipe",), probe=2, tolerance=TOLERANCE, **settings)
    targets = TEXTS if name in ("t5", "bart") else None
    return AuditRun(model, make_dataset(tokenizer(name), TEXTS, targets), wanted).audit()


def given(text, name="bert"):
    return {"input_ids": torch.tensor([tokenizer(name)(text)["input_ids"]])}


@pytest.fixture(scope="module")
def model():
    return build("bert")


@pytest.fixture(scope="module")
def audit(model):
    return searched(model, "bert")


@pytest.fixture(scope="module")
def probe(model):
    """Places 0 and 2 of four texts, at even distances."""
    texts = [Shown(given(text), {}) for text in TEXTS]
    return Probe(Bench("bert", model), texts, (), [0, 2])


def by_place(recipe):
    return {
        ("encoder", layer): recipe["alphas"][f"encoder.layer.{layer}.attention.self"]
        for layer in (0, 1)
    }


def test_every_head_is_allowed(audit, probe):
    """Switched alone, it moves its layer's output by no more than the tolerance."""
    alphas = by_place(audit.recipe())
    assert any(alpha > 1 for row in alphas.values() for alpha in row)
    assert any(alpha == 1 for row in alphas.values() for alpha in row)
    chosen = sorted({alpha for row in alphas.values() for alpha in row if alpha > 1})
    for (kind, layer, head), points in probe.curves(chosen).items():
        alpha = alphas[kind, layer][head]
        if alpha > 1:
            assert points[chosen.index(alpha)][0] <= TOLERANCE


def test_the_model_stays_within_the_tolerance(audit, probe):
    recipe = audit.recipe()
    moved = probe.moves(by_place(recipe), [0, 2])
    assert 0 < max(moved) <= TOLERANCE
    assert recipe["moved"]["probe"]["largest"] == pytest.approx(max(moved), rel=1e-6)
    left = probe.moves(by_place(recipe), [1, 3])
    assert recipe["moved"]["unseen"]["largest"] == pytest.approx(max(left), rel=1e-6)
    assert recipe["tolerance"] == TOLERANCE


def test_a_converted_model_is_the_switched_one(audit, probe):
    recipe = audit.recipe()
    conversion = convert(build("bert"), recipe)
    alphas = by_place(recipe)
    for text, shown in zip(TEXTS, probe.texts, strict=True):
        with torch.no_grad():
            outputs = conversion(**given(text))
        wanted = probe.bench.run(shown.given, alphas).outputs
        # alphas are held in float32
        torch.testing.assert_close(embedding(outputs), embedding(wanted), rtol=1e-5, atol=1e-6)


def test_softmax_heads_stay_softmax(audit):
    """All at alpha 1: the model as it was."""
    recipe = audit.recipe()
    even = {path: [1.0] * len(row) for path, row in recipe["alphas"].items()}
    conversion, plain = convert(build("bert"), recipe | {"alphas": even}), build("bert")
    with torch.no_grad():
        one, two = (x(**given(TEXTS[0])).last_hidden_state for x in (conversion, plain))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    calls = {}

    def keep(name):
        def hook(_, args, output):
            calls[name] = output[0].unflatten(-1, (4, 8))

        return hook

    # in the first layer the heads have the same inputs in both
    conversion = convert(build("bert"), recipe)
    for name, one in (("conversion", conversion), ("plain", plain)):
        one.encoder.layer[0].attention.self.register_forward_hook(keep(name))
        with torch.no_grad():
            one(**given(TEXTS[0]))
    for head, alpha in enumerate(recipe["alphas"]["encoder.layer.0.attention.self"]):
        apart = (calls["conversion"][:, :, head] - calls["plain"][:, :, head]).abs().max()
        assert (apart < 1e-12) == (alpha == 1)


def test_a_subset_leaves_the_others_on_softmax(model):
    part = searched(model, "bert", layers=(1,), heads=(0, 3)).recipe()
    assert part["alphas"]["encoder.layer.0.attention.self"] == [1.0] * 4
    row = part["alphas"]["encoder.layer.1.attention.self"]
    assert row[1:3] == [1.0, 1.0]
    assert max(row) > 1


def test_without_a_measure_there_is_no_recipe(model):
    shown = make_dataset(tokenizer("bert"), TEXTS)
    assert AuditRun(model, shown, AuditSettings(("weights",))).audit().recipe() is None


def test_a_smaller_tolerance_moves_less(model):
    shown, last = make_dataset(tokenizer("bert"), TEXTS), math.inf
    for tolerance in (0.5, 0.1, 0.001):
        wanted = AuditSettings(("recipe",), probe=2, tolerance=tolerance)
        moved = AuditRun(model, shown, wanted).audit().recipe()["moved"]["probe"]["largest"]
        assert moved <= min(tolerance, last)
        last = moved


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_other_architectures_are_converted_too(name):
    recipe = searched(build(name), name, layers=(0,)).recipe()
    conversion = convert(build(name), recipe)
    ids = given(TEXTS[0], name) | (
        {"decoder_input_ids": torch.tensor([[0, 5]])} if name == "t5" else {}
    )
    with torch.no_grad():
        one, two = (model(**ids).logits for model in (conversion, build(name)))
    assert one.isfinite().all()
    assert (one - two).abs().max() > 1e-9


def test_a_classifier_gives_a_recipe_for_its_body():
    model = build("bert")
    classifier = hf.BertForSequenceClassification(model.config).double().eval()
    recipe = searched(classifier, "bert").recipe()
    assert all(path.startswith("bert.encoder") for path in recipe["alphas"])
    convert(classifier, recipe)
    body = convert(build("bert"), recipe)
    held = body.encoder.layer[1].attention.self.fenchel_regularizer()
    wanted = recipe["alphas"]["bert.encoder.layer.1.attention.self"]
    assert held.alpha.flatten().tolist() == pytest.approx(wanted, rel=1e-6)
