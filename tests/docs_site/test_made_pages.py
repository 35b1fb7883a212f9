"""Benchmarks and ledger: the stored figures, and nothing else, in the tables."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from docs_site import benchmarks, ledger
from papers.claims import PAPERS, listed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
# Without those of GPUs, results/gpu-*.json, which whoever has a device adds.
BENCHMARKS = (*RESULTS.glob("bench_*.json"), RESULTS / "models.json")
STORED = sorted([*BENCHMARKS, *ROOT.glob("papers/results/bench_*.json")])
WITHOUT_PICTURE = ("maps", "models")


def cells(html):
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.DOTALL)
    return [
        [unescape(re.sub("<[^>]+>", "", c)) for c in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in rows
    ]


def write(path, document):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))


# ---- benchmarks


def test_every_benchmark_was_measured():
    assert {path.stem.removeprefix("bench_") for path in STORED} == set(benchmarks.BENCHES)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_stored_benchmark_has_tables_its_command_and_its_machine(path):
    name = path.stem.removeprefix("bench_")
    text, pictures = benchmarks.section(name, ROOT, "benchmarks")
    document = json.loads(path.read_text())
    command = "papers experiment throughput" if name == "steps" else f"benchmarks {name}"
    assert f"$ python -m {command}" in text
    assert f"--out {path.relative_to(ROOT).as_posix()}" in text
    assert f"torch {document['machine']['torch']}" in text
    rows = cells(text)
    assert len(rows) > 2
    for one in re.findall("<table>.*?</table>", text, re.DOTALL):
        assert len({len(row) for row in cells(one)}) == 1
    for picture in pictures:
        assert f"]({picture.name})" in text
        assert "<svg" in picture.svg
    assert bool(pictures) == (name not in WITHOUT_PICTURE)


def test_the_figures_are_the_stored_ones():
    document = json.loads((RESULTS / "bench_maps.json").read_text())
    rows = {(row[0], row[1]): row[2:] for row in cells(benchmarks.section("maps", ROOT, "b")[0])}
    for e in document["results"]:
        shown = rows[e["name"], str(e["rows"])][e["direction"] == "forward+backward"]
        assert float(shown.split()[0]) == float(f"{e['ratio']:.3g}")

    entries = json.loads((RESULTS / "bench_attention.json").read_text())["results"]
    text = benchmarks.section("attention", ROOT, "b")[0]
    header, *rows = cells(text.partition("forward+backward")[0])
    (wanted,) = (row for row in rows if row[0] == "fl Tsallis(1.5), deviation 1")
    (stored,) = (
        e["ratio"]
        for e in entries
        if (e["method"], e["deviation"], e["variant"], e["n"], e["direction"])
        == ("fl Tsallis(1.5)", 1.0, "plain", 1024, "forward")
    )
    assert float(wanted[header.index("1024")]) == float(f"{stored:.3g}")


def test_a_benchmark_that_was_not_run_says_how(tmp_path):
    text, pictures = benchmarks.section("steps", tmp_path, "b")
    assert "Not measured yet" in text
    assert "$ python -m papers experiment throughput --out papers/results/bench_steps.json" in text
    assert pictures == []
    with pytest.raises(ValueError, match="no benchmark 'nothing'"):
        benchmarks.section("nothing", tmp_path, "b")


def test_training_steps_are_shown_once_they_are_measured(tmp_path):
    machine = json.loads((RESULTS / "bench_maps.json").read_text())["machine"]
    common = {"case": "small", "batch": 8, "error": ""}
    results = [
        {**common, "attention": "softmax", "seconds": 0.5},
        {**common, "attention": "transport", "seconds": 2.0},
    ]
    document = {"bench": "steps", "settings": {"threads": 1}, "machine": machine, "warning": ""}
    write(tmp_path / "papers/results/bench_steps.json", {**document, "results": results})
    text, (picture,) = benchmarks.section("steps", tmp_path, "b")
    assert ["small", "8", "transport", "2 s", "0.25"] in cells(text)
    assert picture.name == "b-steps.svg"


def test_a_run_that_was_disturbed_says_so(tmp_path):
    document = json.loads((RESULTS / "bench_maps.json").read_text())
    write(tmp_path / "results/bench_maps.json", {**document, "warning": "A busy run."})
    assert "**A busy run.**" in benchmarks.section("maps", tmp_path, "b")[0]


def test_the_pages_have_every_benchmark():
    pages = [ROOT / "docs" / name for name in ("benchmarks.md", "models.md")]
    text = "\n".join(page.read_text() for page in pages)
    assert set(re.findall(r"^<!-- bench: (\w+) -->$", text, re.M)) == set(benchmarks.BENCHES)


# ---- ledger


def record(id, verdict, **other):
    check = {"what": "off by", "figure": 2.0, "range": "≤ 1e-10", "as_printed": False}
    base = {"statement": "|x| < y", "counterexample": "", "correction": "", "checks": [check]}
    return {"id": id, "verdict": verdict, **base, **other}


@pytest.fixture
def stored(tmp_path):
    printed = {"what": "as it is", "figure": "inf", "range": "≤ 1", "as_printed": True}
    records = [
        record("D-E1", "CONFIRMED"),
        record("D-E5/E6", "REFUTED", counterexample="x = 3 < 4", checks=[printed]),
        record("L-5", "CONFIRMED WITH CORRECTION", correction="twice it"),
        record("M-D1", "NOT CHECKABLE", checks=[]),
    ]
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps(records))
    return path


def test_verdicts_are_counted_by_paper(stored):
    header, *rows = cells(ledger.section(stored).partition("\n## ")[0])
    assert header == [
        *("paper", "confirmed", "confirmed with correction", "refuted", "not checkable", "all")
    ]
    assert rows[0] == [f"D · {PAPERS['D']}", "1", "0", "1", "0", "2"]
    assert rows[-1] == ["all", "1", "1", "1", "1", "4"]


def test_every_entry_has_a_row_and_an_anchor(stored, tmp_path):
    for path in (stored, tmp_path / "absent.json"):
        text = ledger.section(path)
        anchors = re.findall(r'<tr id="([^"]+)">', text)
        assert anchors == [re.sub("[^A-Za-z0-9]", "-", entry.id) for entry in listed()]
        assert len(set(anchors)) == len(anchors)


def test_rows_say_what_came_out(stored):
    rows = {row[0]: row[1:] for row in cells(ledger.section(stored))}
    assert rows["D-E1"] == ["confirmed", "|x| < y", "2", "≤ 1e-10"]
    assert rows["D-E5/E6"] == ["refuted", "|x| < y", "inf", "not ≤ 1"]
    assert rows["M-D1"] == ["not checkable", "|x| < y", "–", "–"]
    assert rows["D-E2"][0] == "not run"


def test_what_does_not_hold_is_explained(stored):
    text = ledger.section(stored)
    explained = re.findall(r'<div class="explained">(.*?)</div>', text, re.DOTALL)
    refuted, corrected = (unescape(part) for part in explained)
    assert "Counterexample: x = 3 < 4" in refuted
    assert "As printed, as it is: inf, where it would have to be ≤ 1" in refuted
    assert "Holds instead: twice it" in corrected
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert links == {"D-E5-E6", "D-E5-E6-more", "L-5", "L-5-more"}
    assert links <= set(re.findall(r'id="([^"]+)"', text))


def test_an_absent_file_says_how_it_is_made(tmp_path):
    text = ledger.section(tmp_path / "ledger.json")
    assert "have not been run here" in text
    assert "$ python -m papers claims --json papers/results/ledger.json" in text


def test_a_file_of_another_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps([record("X-1", "CONFIRMED")]))
    with pytest.raises(ValueError, match=r"X-1.*make it again"):
        ledger.section(path)
