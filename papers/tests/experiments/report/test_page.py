"""The page says what the stored runs say, says what is missing, and is not stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from papers.__main__ import app
from papers.experiments.data.files import DataProblem
from papers.experiments.data.questions import QuestionData
from papers.experiments.report import figures, maps, page
from papers.experiments.report.studies import VIT
from papers.experiments.runs import of_first
from papers.tests.experiments.report.documents import Document, document, look, stored
from tests import needs

ROOT = needs.ROOT
RESULTS = ROOT / "papers" / "results" / "experiments"


def pairs(data: str, softmax: list[float], transport: list[float]) -> list[Document]:
    return [
        document("vit", data, attention, seed, accuracy)
        for attention, values in (("softmax", softmax), ("transport", transport))
        for seed, accuracy in enumerate(values)
    ]


def answers(attention: str, *accuracies: float) -> list[Document]:
    facts = {"looks": [look(0, 1.0)]}
    return [
        document("vqa", "easy", attention, seed, accuracy, facts=facts)
        for seed, accuracy in enumerate(accuracies)
    ]


def section(text: str, title: str) -> str:
    match = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", text, re.DOTALL | re.MULTILINE)
    assert match is not None, title
    return match[1]


# ---- what is published


@pytest.mark.smoke
def test_the_page_is_what_the_stored_runs_give() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    way_out = "write it again: python -m papers experiment page --results … --out docs/results.md"
    assert text == page.page_text(RESULTS), way_out


def test_the_picture_beside_it_is_of_the_stored_runs() -> None:
    picture = ROOT / "docs" / page.SHAPES_PICTURE
    documents = figures.shapes_documents(RESULTS)
    if not maps.has_rows(documents, compact=True):
        assert not picture.exists()
        return
    assert maps.mark_in(picture) == maps.mark_of(documents, compact=True)
    assert picture.stat().st_size <= 300_000


def test_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    text = page.page_text(tmp_path)
    assert text.count("No run is stored yet.") == 2
    assert "92.8 ± 1" in text  # what the paper reports stays
    assert "± nan" not in text


# ---- numbers


def test_means_intervals_and_differences_are_those_of_the_runs(tmp_path: Path) -> None:
    documents = pairs("fashion-mnist", [0.90, 0.92], [0.91, 0.94])
    text = page.page_text(stored(tmp_path, *documents))
    half = 12.7062  # of Student's t with one degree, for two values one point from their mean
    assert f"| ViT | 91.00 ± {half:.2f} |" in text
    assert f"| OT-ViT | 92.50 ± {1.5 * half:.2f} |" in text
    assert f"| OT-ViT − ViT | +1.50 ± {0.5 * half:.2f} |" in text
    assert "| ViT | 45.5 | 91.0 |" in section(text, "Fashion-MNIST")  # while learning
    assert "| ViT | 2 | 1,000 | 100 | 60 | 2.00 |" in section(text, "Fashion-MNIST")


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ([0.951, 0.951, 0.948], "The claim held here: OT-ViT was better than ViT by 5.00 ±"),
        ([0.851, 0.851, 0.848], "The claim did not hold here: OT-ViT was worse than ViT by 5.00 ±"),
        ([0.95, 0.851, 0.899], "neither confirmed nor refuted here"),
        ([0.95], "Nothing can be said yet"),
        ([0.95, 0.96], "Nothing can be said yet: that takes three seeds"),
        ([0.95, 0.951, 0.949], "Nothing can be said yet"),  # all better by 5.00: no interval
    ],
)
def test_the_verdict_follows_the_numbers(tmp_path: Path, transport: list[float], said: str) -> None:
    documents = pairs("cifar-10", [0.90, 0.901, 0.899], transport)
    assert said in section(page.page_text(stored(tmp_path, *documents)), "CIFAR-10")


def test_claims_on_continuous_attention(tmp_path: Path) -> None:
    documents = [
        *answers("question-only", 0.501, 0.51, 0.519),
        *answers("softmax", 0.90, 0.91, 0.92),
        *answers("continuous-softmax-36", 0.901, 0.909, 0.921),
        *answers("continuous-sparsemax-36", 0.801, 0.81, 0.819),
        *answers("2-mca-36", 0.952, 0.959, 0.970),
    ]
    text = section(page.page_text(stored(tmp_path, *documents)), "easy-VQA")
    assert "does as well as discrete softmax did not hold for all here: against" in text
    assert "no difference can be told for 2D continuous softmax with N = 36 (+0.03 ±" in text
    assert "worse for 2D continuous sparsemax with N = 36 (−10.00 ±" in text
    assert "several modes bring no clear gain in accuracy did not hold here" in text
    assert "Seeing the picture helped: discrete softmax − question only is +40.00 ±" in text
    assert page.SHAPES_PICTURE not in text  # these maps are of other pictures


@pytest.mark.parametrize("sparsemax", [(0.801, 0.81), (0.80, 0.81, 0.82)])
def test_too_few_seeds_and_equal_differences_say_nothing(
    tmp_path: Path, sparsemax: tuple[float, ...]
) -> None:
    documents = [
        *answers("softmax", 0.90, 0.91, 0.92),
        *answers("continuous-sparsemax-36", *sparsemax),
    ]
    text = section(page.page_text(stored(tmp_path, *documents)), "easy-VQA")
    assert "Of the claims on accuracy nothing can be said yet: that takes three seeds" in text
    assert "does as well as discrete softmax" not in text


def test_a_larger_penalty_and_one_mode(tmp_path: Path) -> None:
    def facts(*shares: float) -> dict[str, object]:
        penalties = zip(("10", "100", "500"), shares, strict=True)
        return {
            "selection": {p: {"scores": {}, "modes": [s, 1 - s, 0, 0, 0]} for p, s in penalties}
        }

    for shares, how in (
        ((0.2, 0.5, 0.9), "follows from"),
        ((0.2, 0.2, 0.9), "follows from"),
        ((0.2, 0.9, 0.5), "did not show here, against"),
        ((1.0, 1.0, 1.0), "follows from"),
    ):
        one = document("vqa", "easy", "continuous-softmax-36", 0, 0.9, facts=facts(*shares))
        text = page.page_text(stored(tmp_path, one))
        shown = f"with N = 36, for {100 * shares[0]:.1f}, {100 * shares[1]:.1f}, "
        assert f"chooses K\\* = 1 more often {how} the criterion: {shown}" in text


@pytest.mark.parametrize(
    ("gains", "how"),
    [
        ((0.001, -0.001, 0.0005), "held"),
        ((0.011, -0.009, 0.005), "was neither confirmed nor refuted"),  # wider than a point
        ((-0.020, -0.021, -0.022), "did not hold"),
    ],
)
def test_as_good_as_takes_an_interval_within_a_point(
    tmp_path: Path, gains: tuple[float, ...], how: str
) -> None:
    """One mode against discrete softmax; turned round, several modes against one."""
    one = [0.9 + gain for gain in gains]
    documents = [*answers("softmax", 0.9, 0.9, 0.9), *answers("continuous-softmax-36", *one)]
    several = answers("2-mca-36", 0.9, 0.9, 0.9)
    text = section(page.page_text(stored(tmp_path, *documents, *several)), "easy-VQA")
    assert f"does as well as discrete softmax {how} here: " in text
    assert f"no clear gain in accuracy {how} here: " in text


def chosen(accuracy: float) -> dict[str, object]:
    """Facts of a run whose modes were chosen at test time: always one."""
    one = {"scores": {"accuracy": accuracy}, "modes": [1.0, 0.0, 0.0, 0.0, 0.0]}
    return {"selection": dict.fromkeys(("10", "100", "500"), one)}


def test_modes_chosen_at_test_time_are_judged_too(tmp_path: Path) -> None:
    runs = [
        document("vqa", "easy", "continuous-softmax-36", seed, 0.9, facts=chosen(accuracy))
        for seed, accuracy in enumerate((0.951, 0.95, 0.949))
    ]
    text = section(page.page_text(stored(tmp_path, *runs)), "easy-VQA")
    said = "several modes bring no clear gain in accuracy did not hold here: against one mode, in "
    assert f"{said}points, better for test-MCA with N = 36, λ = 10 (+5.00 ± 0.25)" in text
    shown = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "| test-MCA, N = 36, λ = 500 | +5.00 ± 0.25 \\* |" in shown


def test_modes_that_change_no_answer_are_no_difference(tmp_path: Path) -> None:
    runs = [
        document("vqa", "easy", "continuous-softmax-36", seed, accuracy, facts=chosen(accuracy))
        for seed, accuracy in enumerate((0.90, 0.91, 0.93))
    ]
    text = section(page.page_text(stored(tmp_path, *runs)), "easy-VQA")
    assert "no clear gain in accuracy held here: against one mode, in points, no diff" in text
    assert "λ = 500 (+0.00 ± 0.00). Their intervals reach up to +0.00;" in text


def test_a_verdict_on_some_says_on_how_many(tmp_path: Path) -> None:
    documents = [
        *answers("softmax", 0.9, 0.901, 0.899),
        *answers("continuous-softmax-36", 0.9, 0.9, 0.9),
        *answers("continuous-sparsemax-36", 0.9, 0.9),
    ]
    text = section(page.page_text(stored(tmp_path, *documents)), "easy-VQA")
    assert "does as well as discrete softmax held here (so far of 1 of 2): " in text


# ---- what is there and what is not


def test_seeds_that_are_missing_are_counted(tmp_path: Path) -> None:
    documents = pairs("cifar-10", [0.5, 0.6, 0.7], [0.5, 0.6])
    text = section(page.page_text(stored(tmp_path, *documents)), "CIFAR-10")
    assert "Of 5 seeds there are: ViT: 3; OT-ViT: 2; ViT, entmax-1.5: 0." in text
    documents = [
        document("vit", "cifar-10", attention, seed, 0.5 + seed / 100)
        for attention in ("softmax", "transport", "entmax")
        for seed in range(5)
    ]
    text = section(page.page_text(stored(tmp_path, *documents)), "CIFAR-10")
    assert "Every attention has seeds 0 to 4." in text
    assert "Not all runs" not in text


def test_only_whole_runs_of_published_presets_are_in_the_tables(tmp_path: Path) -> None:
    smoke = document("vit", "cifar-10", "softmax", 0, 0.1111, preset="smoke")
    begun = of_first("paper", 20)  # where the command puts them
    first = document("vit", "cifar-10", "softmax", 0, 0.2222, preset=begun)
    text = page.page_text(stored(tmp_path, smoke, first))
    assert "11.11" not in text
    assert "22.22" not in text
    assert "Only the first steps (20 at most), to see that it runs: preset paper" in text
    assert "| ViT | cifar-10 | 1 | 1,000 | 100 | 60 | 2.00 |" in text


def test_what_is_not_published_is_named(tmp_path: Path) -> None:
    smoke = document("vit", "toy", "softmax", 0, 0.5, preset="smoke")
    results = stored(tmp_path / "results", smoke)
    line = ["experiment", "page", "--results", str(results), "--out", str(tmp_path / "page.md")]
    done = CliRunner().invoke(app, [*line, "--figures", str(tmp_path / "figures")])
    assert done.exit_code == 0, done.output
    assert "not on the page, which is of cpu and paper: runs of smoke\n" in done.stderr


def test_the_command_makes_what_is_there() -> None:
    usual = pairs("cifar-10", [0.5], [0.5])
    attentions = ("softmax", "transport", "entmax")
    line = page.command_line(VIT, "cpu", usual, attentions)
    assert line == (
        "python -m papers experiment vit --preset cpu --sets cifar-10 --data data "
        "--out papers/results/experiments"
    )
    more = [*usual, document("vit", "cifar-10", "sparsemax", 6, 0.5)]
    line = page.command_line(VIT, "cpu", more, attentions)
    assert "--attention softmax,transport,entmax,sparsemax --seeds 7 " in line


def test_the_note_on_the_data_is_shown(tmp_path: Path) -> None:
    one = document("vit", "cifar-10", "softmax", 0, 0.5, note="20,000 of 50,000 training images")
    assert "Data: 20,000 of 50,000 training images." in page.page_text(stored(tmp_path, one))


def test_the_same_runs_give_the_same_page_wherever_they_lie(tmp_path: Path) -> None:
    documents = pairs("cifar-10", [0.5, 0.6, 0.7], [0.5, 0.6, 0.65])
    here, there = tmp_path / "here", tmp_path / "there"
    texts = [page.page_text(stored(here, *documents)), page.page_text(stored(here))]
    texts.append(page.page_text(stored(there, *reversed(documents))))
    assert texts[0] == texts[1] == texts[2]
    assert str(tmp_path) not in texts[0]
    changed = pairs("cifar-10", [0.5, 0.6, 0.7], [0.5, 0.6, 0.66])
    assert page.page_text(stored(there, *changed)) != texts[0]


# ---- the command


@pytest.mark.smoke
def test_the_command_writes_page_and_curves_and_says_which_maps_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no folder data is
    facts = {"looks": [look(0, 1.0)]}
    one = document("vqa", "daquar", "softmax", 0, 0.5, facts=facts)
    results = stored(tmp_path / "results", one, *pairs("cifar-10", [0.5], [0.6]))
    out, drawn = tmp_path / "page.md", tmp_path / "figures"
    line = ["experiment", "page", "--results", str(results), "--out", str(out)]
    done = CliRunner().invoke(app, [*line, "--figures", str(drawn)], env={"FENCHEL_DATA": None})
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8") == page.page_text(results)
    names = sorted(path.name for path in drawn.iterdir())
    assert names == ["curves-vit-cifar-10.svg", "curves-vqa-daquar.svg"]
    assert "not on the page" not in done.stderr
    assert "no maps of DAQUAR: there is no folder data; give one that holds daquar/" in done.stderr
    assert done.stdout.splitlines() == [str(out), *(str(drawn / name) for name in names)]
    deep = tmp_path / "none" / "page.md"  # its folder is made
    again = CliRunner().invoke(app, [*line[:-1], str(deep), "--figures", str(drawn)])
    assert again.exit_code == 0, again.output
    assert deep.exists()


def test_only_a_network_that_does_not_look(tmp_path: Path) -> None:
    looks = [look(0, 1.0) | {"map": None}]
    one = document("vqa", "shapes", "question-only", 0, 0.5, facts={"looks": looks})
    results = stored(tmp_path / "results", one)
    out, drawn = tmp_path / "page.md", tmp_path / "figures"
    line = ["experiment", "page", "--results", str(results), "--out", str(out)]
    done = CliRunner().invoke(app, [*line, "--figures", str(drawn)])
    assert done.exit_code == 0, done.output
    assert page.SHAPES_PICTURE not in out.read_text(encoding="utf-8")
    assert not (tmp_path / page.SHAPES_PICTURE).exists()
    assert [path.name for path in drawn.iterdir()] == ["curves-vqa-shapes.svg"]


@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_the_page_points_to_a_picture_only_where_a_rule_chooses_one(
    tmp_path: Path, worth: float
) -> None:
    facts = {"looks": [look(0, worth)]}
    one = document("vqa", "shapes", "softmax", 0, 0.5, facts=facts)
    text = page.page_text(stored(tmp_path, one))
    assert (page.SHAPES_PICTURE in text) == (worth == 1.0)


def test_no_page_where_its_picture_cannot_be_drawn(tmp_path: Path) -> None:
    one = document("vqa", "shapes", "softmax", 0, 0.5, facts={"looks": [look(0, 1.0)]})
    results, out = stored(tmp_path / "results", one), tmp_path / "page.md"

    def absent(name: str) -> QuestionData:
        raise DataProblem("not at hand")

    with pytest.raises(DataProblem, match="not at hand"):
        figures.publish(results, out, tmp_path / "figures", absent)
    assert not out.exists()


@pytest.mark.parametrize(("study", "title"), [("vit", "ViT"), ("vqa", "discrete softmax")])
def test_names_that_are_not_known_stand_for_themselves(
    tmp_path: Path, study: str, title: str
) -> None:
    documents = [
        document(study, data, attention, 0, 0.5, facts={"looks": [look(0, 1.0)]})
        for data in ("new_data", "easy" if study == "vqa" else "cifar-10")
        for attention in ("softmax", "new_one")
    ]
    results = stored(tmp_path / "results", *documents)
    text = section(page.page_text(results), r"new\_data")
    assert f"| {title} | 25.0 | 50.0 |" in text
    assert r"| new\_one | 25.0 | 50.0 |" in text
    assert r"| new\_one | 1 | 1,000 |" in text

    def absent(name: str) -> QuestionData:
        raise DataProblem("not at hand")

    heard: list[str] = []
    paths = figures.save_figures(results, tmp_path / "figures", absent, heard.append)
    assert f"curves-{study}-new_data.svg" in [path.name for path in paths]
    if study == "vqa":
        assert "no maps of new_data: not at hand" in heard


def test_figures_stay_in_their_folder(tmp_path: Path) -> None:
    assert "/" not in figures._file_name("../../x")
