"""Every number of an audit against the slow reference, for every kind of model."""

import json
import math
from functools import cache

import pytest
import torch

from fenchel.lens.document import Document
from fenchel.lens.heads import recipe
from fenchel.lens.heads.auditing import AuditRun
from fenchel.lens.heads.columns import columns
from fenchel.lens.heads.datasets import make_dataset
from fenchel.lens.heads.settings import MEASURES, AuditSettings
from tests.lens.architectures import BUILDERS, build, pictures, processor, tokenizer
from tests.lens.heads.reference import Bench, Shown, entropy, last_states, mean
from tests.lens.heads.reference_probe import Probe, Search

pytestmark = pytest.mark.xdist_group("audit reference")  # one worker computes it once

TEXTS = ["a b c d e", "f g h i", "j"]
TARGETS = ["c a", "b d e f", "g h g"]
PROBE = [0, 1]  # of three texts, two at even distances
ALPHAS = (1.5, 2.0)
# an attack cut short, at 10 trials, repeats rounding of the keys to 1e-6 only
TOLERANCE, TRIALS = 0.15, 50
START = {"t5": 0, "bart": 2}  # the token that a decoder begins with
CLOSE = {"rel": 1e-6, "abs": 1e-12}


def shown(name, tools, inputs):
    """Each text alone, as a transformers user would hand it to the model."""
    if name == "vit":
        pixels = [_pixels(tools, path) for path in inputs]
        return [Shown({"pixel_values": one}, {"first": [True] + [False] * 4}) for one in pixels]
    texts = []
    for text, target in zip(TEXTS, TARGETS, strict=True):
        ids = tools(text)["input_ids"]
        given, special = {"input_ids": torch.tensor([ids])}, {"first": [at < 3 for at in ids]}
        if name in START:
            written = [START[name], *tools(target)["input_ids"][:-1]]
            given["decoder_input_ids"] = torch.tensor([written])
            special["second"] = [at < 3 for at in written]
        texts.append(Shown(given, special))
    return texts


def _pixels(tools, path):
    from PIL import Image

    with Image.open(path) as picture:
        return tools(images=[picture], return_tensors="pt")["pixel_values"].double()


def search():
    """The settings of the library; how they are used is the reference's own."""
    numbers = (recipe._GRID.tolist(), recipe._PRICES, recipe._STEPS, recipe._MARGIN)
    return Search(*numbers, TOLERANCE)


class Case:
    """One architecture: the audit and the reference."""

    def __init__(self, name, folder):
        self.name, self.model = name, build(name)
        self.tools = processor() if name == "vit" else tokenizer(name)
        self.inputs = pictures(folder) if name == "vit" else TEXTS
        texts = shown(name, self.tools, self.inputs)
        self.reference = Probe(Bench(name, self.model), texts, ALPHAS, PROBE)
        self.before = self.reference.outputs()
        self.audit = self.run_audit()
        self.alphas = self.reference.recipe(search())

    def run_audit(self):
        wanted = AuditSettings(
            MEASURES, ALPHAS, probe=len(PROBE), tolerance=TOLERANCE, trials=TRIALS
        )
        targets = TARGETS if self.name in START else None
        return AuditRun(self.model, make_dataset(self.tools, self.inputs, targets), wanted).audit()

    @cache  # noqa: B019 - one object an architecture
    def expected(self):
        """(kind, layer, head) -> column -> number; what a head does not have is left out."""
        rows = {place: self.of_head(*place) for place in self.reference.heads()}
        kept, pulls = self.reference.kept(self.alphas), self.reference.advantages()
        for (kind, layer, head), row in rows.items():
            row["recipe_alpha"] = self.alphas[kind, layer][head]
            row["recipe_kept"] = kept[kind, layer, head]
            row |= pulls[kind, layer, head]
            cosines = self.reference.agreement(kind, layer)[head]
            row["agreement"] = (sum(cosines) - cosines[head]) / (len(cosines) - 1)
            for alpha in ALPHAS:
                switched = self.reference.one_head(kind, layer, head, alpha)
                for name, value in self.reference.switched(switched, self.before).items():
                    row[f"model_{name}_{alpha:g}"] = value
        for kind, layer in self.reference.ran[0].seen:
            for alpha in ALPHAS:
                for head, values in enumerate(self.reference.what_if(kind, layer, alpha)):
                    rows[kind, layer, head] |= {f"{n}_{alpha:g}": v for n, v in values.items()}
        return rows

    def of_head(self, kind, layer, head):
        place, reference = (kind, layer, head), self.reference
        row = {name: mean(values) for name, values in reference.weights(*place).items()}
        del row["top_weight"]  # of the histogram alone
        row |= reference.deviations(*place)
        if self.name == "t5" and kind != "cross":
            row["preference_support"] = reference.preference_support(*place)
        row["fisher_scores"], spectrum = reference.fisher(*place)
        row["fisher_trace"], row["fisher_largest"] = sum(spectrum), spectrum[0]
        row["fisher_rank"] = math.exp(entropy([x / sum(spectrum) for x in spectrum]))
        bounds, local = reference.bounds(*place), reference.local(*place)
        row["bound"], row["largest_bound"] = mean(bounds), max(bounds)
        row["local"] = mean(x for norms in local.values() for x in norms)
        row["largest_local"] = max(x for norms in local.values() for x in norms)
        row["local_share"] = mean(max(norms) / bounds[at] for at, norms in local.items())
        row["attacked"] = reference.attacked(*place, TRIALS)
        row["tightness"] = bounds[reference.probe[0]] / row["attacked"]
        return row


@pytest.fixture(scope="module", params=BUILDERS)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("pictures"))


def differences(audit, expected):
    """What differs, and what only one of the two has."""
    rows = {(row["kind"], row["layer"], row["head"]): row for row in audit.rows()}
    entries = [] if rows.keys() == expected.keys() else [(list(rows), list(expected))]
    for place, row in rows.items():
        wanted = expected[place]
        for name in (column.name for column in audit.columns()):
            value = wanted.get(name, math.nan)
            if row[name] != pytest.approx(value, **CLOSE, nan_ok=True):
                entries.append((place, name, row[name], value))
    known = {name for row in expected.values() for name in row}
    return entries + sorted(known ^ {column.name for column in audit.columns()})


def test_every_number_of_every_head(case):
    assert differences(case.audit, case.expected()) == []


def test_no_column_is_without_a_reference(case):
    """T5 has them all: predictions, a position bias, three kinds of attention."""
    known = {name for row in case.expected().values() for name in row}
    every = {column.name for column in columns(ALPHAS)}
    assert known <= every
    if case.name == "t5":
        assert known == every


def test_the_comparison_can_fail(case):
    expected = {place: dict(row) for place, row in case.expected().items()}
    place = next(iter(expected))
    expected[place]["entropy"] *= 1 + 3e-6
    del expected[place]["local"]
    entries = differences(case.audit, expected)
    assert [one[:2] for one in entries] == [(place, "entropy"), (place, "local")]


def test_what_is_more_than_a_number_a_head(case):
    document, reference = case.audit.document().to_json(), case.reference
    for kind, layer in reference.ran[0].seen:
        place = f"{kind}/{layer}"
        cosines = reference.agreement(kind, layer)
        for head, row in enumerate(cosines):
            assert document["agreement"][place][head] == pytest.approx(row, **CLOSE)
            spectrum = reference.fisher(kind, layer, head)[1]
            assert document["spectra"][place][head] == pytest.approx(spectrum, rel=1e-6, abs=1e-10)
            weights = reference.weights(kind, layer, head)
            for name in ("entropy_share", "top_weight"):
                bins = [0] * 20
                for value in weights[name]:
                    bins[min(int(value * 20), 19)] += 1
                assert document["histograms"][place][name][head] == bins
            _check_offsets(case, document, kind, layer, head)


def _check_offsets(case, document, kind, layer, head):
    place = f"{kind}/{layer}"
    assert (place in document["offsets"]) == (kind != "cross")
    assert (place in document["preference"]) == (case.name == "t5" and kind != "cross")
    if kind == "cross":
        return
    shape = document["offsets"][place]
    wanted = [case.reference.offsets(kind, layer, head, offset) for offset in shape["offsets"]]
    assert shape["mass"][head] == pytest.approx(wanted, **CLOSE)
    if place in document["preference"]:
        shape = document["preference"][place]
        level = case.reference.preference_at(kind, layer, head, 0)
        for offset, value in zip(shape["offsets"], shape["log"][head], strict=True):
            bias = case.reference.preference_at(kind, layer, head, offset)
            number = math.nan if value is None else value
            assert number == pytest.approx(bias - level, rel=1e-6, abs=1e-9, nan_ok=True)


def test_the_whole_model_switched(case):
    document, rows = case.audit.document().to_json(), case.audit.rows()
    for alpha, entry in zip(ALPHAS, document["everywhere"], strict=True):
        wanted = case.reference.switched(case.reference.everywhere(alpha), case.before)
        assert entry["alpha"] == alpha
        for name in ("moved", "cosine", "kl"):
            assert entry[name] == (
                pytest.approx(wanted[name], rel=1e-6) if name in wanted else None
            )
        assert entry["kept"] == pytest.approx(mean(row[f"kept_{alpha:g}"] for row in rows))


def test_the_recipe_moves_the_model_as_it_says(case):
    moved = case.audit.document().to_json()["recipe"]["moved"]
    for name, places in {"probe": PROBE, "unseen": [2]}.items():
        distances = case.reference.moves(case.alphas, places)
        assert moved[name]["texts"] == len(places)
        assert moved[name]["largest"] == pytest.approx(max(distances), rel=1e-6, abs=1e-7)
        squares = math.sqrt(mean(x * x for x in distances))
        assert moved[name]["root_mean_square"] == pytest.approx(squares, rel=1e-6, abs=1e-7)
    assert moved["probe"]["largest"] <= TOLERANCE


def test_the_hand_made_attention_is_the_models_own(case):
    """transformers' softmax of Llama and ViT rounds to float32, so that they agree to that."""
    rounded = case.name in ("llama", "vit")
    for text, ran in zip(case.reference.texts, case.reference.ran, strict=True):
        with torch.no_grad():
            theirs = case.model(**text.given, output_hidden_states=True)
        hand_states, model_states = last_states(ran.outputs), last_states(theirs)
        torch.testing.assert_close(
            hand_states, model_states, rtol=0, atol=1e-4 if rounded else 1e-10
        )


def test_the_document_is_json(case):
    document = case.audit.document().to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert Document.from_json(document).to_json() == document
    assert set(document) == {
        "format", "fenchel", "model", "inputs", "settings", "columns", "rows", "histograms",
        "agreement", "spectra", "preference", "offsets", "everywhere", "recipe", "examples",
    }  # fmt: skip
    assert document["format"] == 1
    assert {"name", "type", "class", "parameters"} <= set(document["model"])
    assert document["inputs"]["what"] == ("images" if case.name == "vit" else "texts")
    assert (document["inputs"]["count"], document["inputs"]["probe"]) == (3, 2)
    names = ["name", "title", "unit", "group", "explain", "scale", "of"]
    assert all(list(column) == names for column in document["columns"])
    listed = [column["name"] for column in document["columns"]]
    assert all(list(row) == ["kind", "layer", "head", *listed] for row in document["rows"])
    assert {"tolerance", "moved", "kept", "heads"} <= set(document["recipe"])
    assert len(document["recipe"]["heads"]) == len(document["rows"])
    example = document["examples"][0]
    assert {"text", "tokens", "special", "image", "links"} <= set(example)
    assert set(example["links"]) == set(document["agreement"])
