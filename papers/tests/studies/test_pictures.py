"""Pictures and tables of studies, from documents made by hand."""

import json

import pytest

from papers.studies import pictures as picture
from tests import needs


def band(value):
    return {"median": value, "q05": 0.8 * value, "q95": 1.25 * value}


def mean(value, n=5):
    if value is None:
        return {"mean": None, "low": None, "high": None, "n": 0}
    return {"mean": value, "low": 0.9 * value, "high": 1.1 * value, "n": n}


def robustness():
    names = ("truth", "truth_max", "coupled", "bound")
    shares = []
    for kept in (0.9, 0.5):
        entry = {name: band(1.0 + k) for k, name in enumerate(names)}
        relative = {f"{name}_relative": band(0.5 + k) for k, name in enumerate(names)}
        logs = {"on_the_ball": band(14.0), "on_these_tokens": band(5.0)}
        ratios = {"ratio": band(4.0), "ratio_to_largest_draw": {**band(2.0), "least": 1.5}}
        ratios["bound_to_hull"] = band(0.75)
        both = {**entry, **relative, **ratios, "log10_proposition_25": logs}
        shares.append({"kept": kept, **both})
    sizes = {"layer": 2, "heads": 12, "sentences": 3, "draws": 20, "exceeded": 0}
    return {"study": "robustness", "model": "tiny", "shares": shares, **sizes, "words": ["so"]}


def depth(model=True):
    def part(name, certified):
        layers = []
        for layer in range(3):
            names = ("distance", "distance_to_start", "relative", "spread", "alike")
            entry = {name: mean(0.5**layer) for name in names}
            layers.append({"layer": layer, **entry})
            if certified:
                layers[-1]["bound"] = mean(0.9**layer)
        return {"name": name, "pairs": 4, "layers": layers}

    stacks = [part(name, name > "b") for name in ("a1", "a2", "c1", "c2")]
    settings = {"tokens": 16, "width": 16, "pairs": 4}
    whole = {"study": "depth", "model": part("tiny", False) if model else None, "stacks": stacks}
    return {**whole, "settings": settings, "words": ["so"]}


def negation(bare=False):
    names = ("negation", "not", "never", "hedged", "neutral", "same_relation", "other_relation")
    none = ("not", "never", "hedged", "neutral") if bare else ()
    values = {name: mean(None if name in none else 1.0 + k) for k, name in enumerate(names)}
    ratio = {**mean(None if bare else 1.7), "over_relations": mean(None if bare else 1.5)}
    other = mean(None if bare else 2.0)
    layers = [
        {
            "layer": layer,
            "words": values,
            "ratio": ratio,
            "ratio_never": other,
            "ratio_hedged": other,
        }
        for layer in range(3)
    ]
    part = {
        "pairs": 5,
        "layers": layers,
        "cosine": values,
        "cosine_ratio": ratio,
        "cosine_ratio_hedged": other,
        "negation_nearer_than_same_relation": {"cosine": {"share": 0.987, "n": 5}},
    }
    sources = {"together": part, "TREx": part}
    return {"study": "negation", "model": "tiny", "pairs": 5, "sources": sources, "words": ["so"]}


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """The figure of a document, before it becomes a file."""

    def drawn(document):
        kept = {}

        def save(paint, path, size):
            from matplotlib.figure import Figure

            kept["figure"] = Figure(figsize=size, layout="constrained")
            paint(kept["figure"])
            kept["figure"].canvas.draw()
            return path

        monkeypatch.setattr(picture.draw, "save", save)
        picture.save_picture(document, tmp_path / "x.svg")
        return kept["figure"]

    return drawn


def lines(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.lines}


def test_robustness_shows_bound_and_truth(figure):
    left, right = figure(robustness()).axes
    assert lines(left)["certified, any choice of keys"] == [3.5, 3.5]
    assert lines(left)["exact, mean over draws"] == [0.5, 0.5]
    assert lines(right)["to the mean over draws"] == [4.0, 4.0]
    assert len(left.collections) == 3  # bands


def test_robustness_table_and_words():
    listing, logs = picture.listings(robustness())
    assert listing.rows[0] == ["90 %", "1", "2", "4", "4", "0.75"]
    assert logs.rows[0] == ["90 %", "14", "5"]
    findings = picture.findings(robustness())
    assert findings[0] == "0 of 1440 draws moved the outputs further than their bound"
    assert findings[-1] == "so"


def test_table_and_picture_name_the_same_layer(figure):
    where = "layer 2"
    assert where in picture.listings(robustness())[0].title
    assert where in figure(robustness()).get_suptitle()


def test_depth_gives_colours_one_meaning_and_hides_no_curve(figure):
    document = depth()
    for layer, entry in enumerate(document["stacks"][2]["layers"]):
        entry["distance_to_start"] = mean(1e-9**layer)
    of_model, spread, distance = figure(document).axes
    assert not {line.get_color() for line in of_model.lines} & {
        line.get_color() for line in spread.lines
    }
    assert all(ax.get_ylabel() for ax in (of_model, spread, distance))
    assert [text.get_text() for text in distance.texts] == ["c1:\nbelow, 1e-18 at layer 2"]


@pytest.mark.parametrize("document", ["robustness", "depth", "negation"])
def test_tables_fit_eighty_columns(document):
    path = needs.ROOT / "papers" / "results" / f"study_{document}.json"
    for listing in picture.listings(json.loads(path.read_text())):
        columns = zip(listing.header, *listing.rows, strict=True)
        assert sum(3 + max(map(len, column)) for column in columns) + 1 <= 80
        assert len(listing.title) <= 80


@pytest.mark.parametrize("model", [True, False])
def test_depth_shows_model_and_stacks(figure, model):
    axes = figure(depth(model)).axes
    assert len(axes) == (3 if model else 2)
    dotted = [line for line in axes[-1].lines if line.get_linestyle() == ":"]
    assert [list(line.get_ydata()) for line in dotted] == [[1.0, 0.9, 0.9**2]] * 2
    assert len(picture.listings(depth(model))) == 4 + model
    last = picture.listings(depth(model))[-1].rows[2]
    assert last == ["2", "0.25", "0.25", "0.25", "0.25", "0.81"]
    assert "certified 0.81" in picture.findings(depth(model))[2]


def test_negation_shows_every_condition(figure):
    first, second, third = figure(negation()).axes
    assert lines(first)["with not"] == [2.0] * 3
    assert lines(first)["with a neutral word"] == [5.0] * 3
    assert len(second.lines) == 5  # one source, not, never, hedges, and the line at one
    assert [patch.get_width() for patch in third.patches] == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    named = [label.get_text() for label in third.get_yticklabels()]
    assert named[0] == "other relation (5)"
    assert named[-1] == "not (5)"


def test_negation_tables_and_words():
    layers, ratios, sources = picture.listings(negation())
    assert layers.rows[0] == ["0", "2", "3", "4", "5", "6", "7"]
    assert ratios.rows[0] == ["0", "1.7 (1.53–1.87)", *["2 (1.8–2.2)"] * 2]
    assert sources.rows[1][:4] == ["TREx", "5", "5", "1.7 (1.53–1.87)"]
    findings = picture.findings(negation())
    assert "98.70 % of the pairs" in findings[2]
    assert "over all 5 negations" in findings[2]
    assert "each relation counted once 1.5 (1.35 to 1.65)" in findings[0]


def test_negation_without_any_not(figure):
    figure(negation(bare=True))
    layers, ratios, _ = picture.listings(negation(bare=True))
    assert layers.rows[0] == ["0", "–", "–", "–", "–", "6", "7"]
    assert ratios.rows[0] == ["0", "–", "–", "–"]


@pytest.mark.parametrize("document", [robustness(), depth(), negation()])
def test_files(tmp_path, document):
    path = picture.save_picture(document, tmp_path / "x.svg")
    text = path.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</svg>")
    assert "#0a0b0" not in text  # no placeholder is left
