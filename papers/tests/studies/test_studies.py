"""Studies: distances by hand, intervals, depth, pairs as they are made, and the commands."""

import json
import math
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
from typer.testing import CliRunner

from fenchel import lens
from papers import studies
from papers.__main__ import app
from papers.studies import depth, documents, facts, hidden
from papers.studies.stacks import STACKS
from papers.tests.studies.tiny_bert import save_tiny_bert
from tests import needs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_bert(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder):
    return lens.load(folder)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.txt"
    lines = ["a man is the guitar", "the man is rome .", "a guitar", "rome is a man . a man"]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path):
    """Four facts of LAMA's form in two relations, one not negated, and one group of neg-nli."""
    path = tmp_path / "data" / "negation"
    (path / "lama").mkdir(parents=True)
    (path / "neg-nli").mkdir()
    entries = [
        ("P1", "man", "Rome", "a man is [MASK] .", "a man is not [MASK] ."),
        ("P1", "guitar", "Rome", "the guitar is  [MASK] .", "the guitar is not [MASK] ."),
        ("P2", None, "guitar", "rome is a [MASK] .", "rome was never a [MASK] ."),
        ("P159", "x", "rome", "a man the [MASK] .", "a man the [MASK] ."),
    ]
    names = ("relation", "subject", "object", "sentence", "negation")
    lines = [json.dumps(dict(zip(names, entry, strict=True))) for entry in entries]
    (path / "lama" / "Tiny.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows = [
        "index\tText\tHypothesis\tgold_label",
        '0\tthe "man" is not a man\ta man is the man\tneutral',
        '1\tthe "man" is a man\ta man is not the man\tneutral',
        '2\tthe "man" is not a man\ta man is not the man\tneutral',
    ]
    (path / "neg-nli" / "Nat.tsv").write_text("\n".join(rows), encoding="utf-8")
    return path


# ---- clouds


def test_clouds_are_the_models_hidden_states(loaded):
    model, tokenizer = loaded
    texts = ["a man", "the man is a guitar unheard .", "rome"]
    clouds = hidden.clouds(model, tokenizer, texts)
    for text, cloud in zip(texts, clouds, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        expected = torch.cat(states).double()  # (layers + 1, n, d)
        assert cloud.tokens.shape == expected.shape
        assert (cloud.tokens - expected).abs().max() < 1e-5
        # an unknown word is a word; [CLS] and [SEP] are none
        assert cloud.words.tolist() == [False, *[True] * len(text.split()), False]
    assert torch.equal(clouds[0].embedding, clouds[0].tokens[-1].mean(0))
    with pytest.raises(ValueError, match="no word in ''"):
        hidden.clouds(model, tokenizer, ["a", ""])


def test_distance_and_spread_by_hand():
    one = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    other = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    assert float(hidden.apart(one, other)) == pytest.approx(0.5)  # one token stays, one goes by 1
    assert float(hidden.spread(one)) == pytest.approx(2.5)
    assert float(hidden.size(one)) == pytest.approx(2.5)
    # a token more: half of each of the two goes to it, a third of all mass
    three = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    assert float(hidden.apart(one, three)) == pytest.approx(5 / 6)


def test_distance_between_two_words_is_the_best_of_the_permutations(loaded):
    one, other = hidden.clouds(*loaded, ["a man", "rome guitar"])
    distances = hidden.apart(one.inner, other.inner)
    for layer in range(3):
        x, y = one.inner[layer], other.inner[layer]
        costs = [(x - y[list(p)]).norm(dim=-1).mean() for p in permutations(range(2))]
        assert float(distances[layer]) == pytest.approx(float(min(costs)), rel=1e-12)
        assert max(costs) > 1.001 * min(costs)  # the order matters


# ---- numbers


def test_intervals():
    values = torch.tensor([1.0, 2.0, 3.0, 6.0, math.nan], dtype=torch.float64)
    interval = documents.interval(values)
    half = 3.182446 * values[:4].std() / 2  # t with three degrees of freedom
    assert (interval["mean"], interval["n"]) == (3.0, 4)
    assert interval["high"] - 3 == pytest.approx(float(half), rel=1e-4)
    ratio = documents.ratio_interval(torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64))
    assert ratio["mean"] == pytest.approx(4 ** (1 / 3), rel=1e-4)
    assert ratio["low"] * ratio["high"] == pytest.approx(ratio["mean"] ** 2, rel=1e-3)
    assert documents.interval(torch.tensor([math.nan]))["mean"] is None
    assert documents.interval(torch.tensor([2.0])) == {
        "mean": 2.0,
        "low": None,
        "high": None,
        "n": 1,
    }


def test_documents_are_small_and_come_back(tmp_path):
    document = {"a": [{"b": {"c": 1.5, "d": None}}, {"b": {"c": 2}}], "words": ["x, [y]", "{z}"]}
    path = documents.write(document, tmp_path / "x.json")
    assert json.loads(path.read_text()) == document
    assert len(path.read_text().splitlines()) < len(json.dumps(document, indent=1).splitlines())
    with pytest.raises(ValueError, match="not JSON compliant"):
        documents.write({"a": math.nan}, tmp_path / "x.json")


# ---- depth


def test_attention_alone_collapses_and_residuals_do_not():
    alone, usual, *bounded = studies.depth_of_stacks(layers=5, pairs=4)
    assert (alone.spread[:, 4] < 1e-6 * alone.spread[:, 0]).all()
    assert all((b < a).all() for a, b in pairwise(alone.spread[:, :4].unbind(1)))
    assert (alone.distance[:, -1] > 0.05 * alone.distance[:, 0]).all()  # to two Diracs, apart
    assert (usual.spread[:, -1] > 0.2 * usual.spread[:, 0]).all()
    for stack in bounded:
        assert stack.exceeded == 0
        assert stack.bound is not None
        assert (stack.bound[:, -1] < stack.bound[:, 0]).all()
    low = replace(bounded[-1], bound=0.01 * bounded[-1].bound)
    assert low.exceeded > 0  # a bound that is too small is caught


def test_certified_constants_are_the_products_of_their_parts():
    start = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states, constants = STACKS[3].run(start, 3, torch.Generator().manual_seed(0))
    assert states.shape == (4, 2, 5, 8)
    assert constants is not None
    assert all(c == pytest.approx((0.9 + 0.1 * 0.5) ** 2) for c in constants)
    bound = depth.contracted(start, constants)
    best = min((start[0] - start[1][list(p)]).square().sum() for p in permutations(range(5))) / 5
    assert float(bound[0]) == pytest.approx(float(best.sqrt()), rel=1e-12)
    assert float(bound[-1] / bound[0]) == pytest.approx(math.prod(constants))


def test_depth_of_a_model(loaded):
    texts = ["a man", "rome guitar", "the man is a man", "rome", "left alone"]
    report = studies.depth_of_model(*loaded, texts, name="tiny")
    assert report.distance.shape == (2, 3)
    one, other = hidden.clouds(*loaded, texts[2:4])
    expected = hidden.apart(one.tokens, other.tokens)
    assert torch.allclose(report.distance[1], expected, rtol=1e-5)
    document = report.as_json()
    assert document["layers"][0]["spread"]["mean"] == 1.0
    with pytest.raises(ValueError, match="two sentences make a pair, got 1"):
        studies.depth_of_model(*loaded, ["a man"])


def test_a_spread_of_rounding_gives_no_ratio():
    points = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    report = depth.Depth("x", points, points * torch.tensor([1.0, 1e-15]), points)
    assert report.as_json()["layers"][0]["relative"]["mean"] == 1.0
    assert report.as_json()["layers"][1]["relative"]["mean"] is None


# ---- negation


def test_facts_are_filled_and_the_one_without_negation_is_left_out(data):
    tiny_facts = studies.read_facts(data)
    assert [fact.relation for fact in tiny_facts] == ["P1", "P1", "P2", "Nat", "Nat"]
    assert tiny_facts[1].sentence == "the guitar is Rome ."
    assert tiny_facts[1].negation == "the guitar is not Rome ."
    assert [fact.place for fact in tiny_facts] == [3, 3, None, 3, 3]
    assert tiny_facts[0].with_word("indeed") == "a man is indeed Rome ."
    assert tiny_facts[2].with_word("indeed") is None
    assert tiny_facts[3].sentence == 'the "man" is a man'  # quotes are letters
    assert tiny_facts[4].negation == "a man is not the man"


def test_a_not_that_is_not_the_only_change_has_no_place():
    fact = facts.Fact("s", "r", "", "he died in rome", "he did not die in rome")
    assert fact.place is None
    assert replace(fact, negation="he not died in paris").place is None
    assert replace(fact, negation="he not died in rome").place == 1


def test_cases_have_their_controls(data):
    tiny_facts = studies.read_facts(data)
    cases = studies.drawn_cases(tiny_facts, 10, seed=1)
    assert [case.fact for case in cases] == tiny_facts
    first = cases[0]
    assert list(first.others) == [
        "negation", "not", "never", "possibly", "allegedly", "formerly", "indeed", "also", "really",
        "same_relation", "other_relation",
    ]  # fmt: skip
    assert first.others["never"] == "a man is never Rome ."
    assert first.others["same_relation"] == "the guitar is Rome ."  # the only other of P1
    same_relation = {first.fact.sentence, "the guitar is Rome ."}
    for seed in range(20):
        first = studies.drawn_cases(tiny_facts, 10, seed)[0]
        assert first.others["other_relation"] not in same_relation
    assert "same_relation" not in cases[2].others  # P2 has no other
    assert "not" not in cases[2].others
    assert len(studies.drawn_cases(tiny_facts, 1)) == 2  # one of each source
    assert studies.drawn_cases(tiny_facts, 2, seed=5) == studies.drawn_cases(tiny_facts, 2, seed=5)


def test_distances_of_a_case(loaded, data):
    cases = studies.drawn_cases(studies.read_facts(data), 10)
    report = studies.negation(*loaded, cases)
    one, negated, indeed = hidden.clouds(
        *loaded, ["a man is rome .", "a man is not rome .", "a man is indeed rome ."]
    )
    assert torch.allclose(report.words["not"][0], hidden.apart(one.inner, negated.inner), rtol=1e-4)
    expected = hidden.apart(one.tokens, indeed.tokens)
    assert torch.allclose(report.everything["indeed"][0], expected, rtol=1e-4)
    cosine = 1 - torch.cosine_similarity(one.embedding, negated.embedding, dim=0)
    assert float(report.cosine["not"][0]) == pytest.approx(float(cosine), rel=1e-4)
    mean = torch.stack([report.words[word][0] for word in facts.NEUTRAL]).mean(0)
    assert torch.allclose(report.words["neutral"][0], mean)
    assert report.words["not"][2].isnan().all()
    assert report.longer == 0
    document = report.as_json()
    ratio = (report.words["not"] / report.words["neutral"])[[0, 1, 3, 4], 1].log().mean().exp()
    shown = document["sources"]["together"]["layers"][1]["ratio"]
    assert shown["mean"] == pytest.approx(float(ratio), rel=1e-4)
    assert (shown["n"], shown["over_relations"]["n"]) == (4, 2)
    assert document["sources"]["Tiny"]["pairs"] == 3
    json.dumps(document, allow_nan=False)


def test_missing_data_says_the_way_out(tmp_path, monkeypatch, data):
    monkeypatch.delenv("FENCHEL_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"--data FOLDER[^$]* FENCHEL_DATA"):
        studies.negation_folder()
    with pytest.raises(FileNotFoundError, match=r"holds no lama/\*\.jsonl"):
        studies.negation_folder(tmp_path / "nothing")
    monkeypatch.setenv("FENCHEL_DATA", str(data.parent))
    assert studies.negation_folder() == data
    assert studies.negation_folder(data.parent) == data
    (data / "lama" / "Tiny.jsonl").write_text('{"relation": "x"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"Tiny\.jsonl, line 1: a JSON object with sentence"):
        studies.read_facts(data)


# ---- commands


def invoke(*command):
    return CliRunner().invoke(app, ["study", *map(str, command)], env={"COLUMNS": "300"})


@pytest.mark.smoke
def test_the_commands(folder, text, data, tmp_path):
    out = tmp_path / "out"
    rest = ["--out", out]
    runs = [
        ["robustness", folder, "--text", text, "--layer", 1, "--draws", 3, "--sentences", 2, *rest],
        ["depth", folder, "--text", text, "--layers", 2, "--pairs", 3, *rest],
        ["negation", folder, "--data", data, "--pairs", 2, *rest],
    ]
    for run in runs:
        result = invoke(*run)
        assert result.exit_code == 0, result.output
        assert f"study_{run[0]}.json" in result.output
        document = json.loads((out / f"study_{run[0]}.json").read_text())
        assert document["study"] == run[0]
        assert (out / f"study_{run[0]}.svg").read_text().rstrip().endswith("</svg>")
        for line in document["words"]:
            assert line in " ".join(result.output.split())
    assert invoke("depth", "--layers", 1, "--pairs", 2, *rest).exit_code == 0
    assert json.loads((out / "study_depth.json").read_text())["model"] is None


@pytest.mark.parametrize("command", ["", "robustness", "depth", "negation"])
def test_help_shows_an_example(command):
    output = invoke(*([command] if command else []), "--help").output
    assert f"Example: python -m papers study {command}" in " ".join(output.split())


def test_the_commands_fail_clearly(folder, text, tmp_path, monkeypatch):
    monkeypatch.delenv("FENCHEL_DATA", raising=False)
    wrong = [
        (["robustness", folder, "--text", text, "--layer", 7], "below the 2 layers"),
        (["robustness", "nobody/nothing", "--text", text], "cannot load 'nobody/nothing'"),
        (["depth", folder], "MODEL and --text go together"),
        (["negation", folder], "set the environment variable FENCHEL_DATA"),
    ]
    for command, message in wrong:
        result = invoke(*command, "--out", tmp_path)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


# ---- real data


def test_real_facts():
    folder = needs.shared("data", "negation", covers="the facts of the study of negation")
    real_facts = studies.read_facts(folder)
    assert not any(fact.relation == "P159" for fact in real_facts)
    sources = ("TREx", "GoogleRE", "SQuAD")
    counts = {name: sum(fact.source == name for fact in real_facts) for name in sources}
    assert counts == {"TREx": 10133, "GoogleRE": 499, "SQuAD": 51}
    assert sum(f.place is not None for f in real_facts if f.source == "TREx") == 9040
