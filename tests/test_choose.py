"""The page on choosing an attention quotes the stored benchmarks, number for number."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "choose.md").read_text()

# What a row writes -> where its number is stored. "forward+backward" unless it says otherwise.
ATTENTION = {
    "`fl.attention(q, k, v)`": ("torch SDPA", "plain"),
    "`fl.Tsallis(1.5)`": ("fl Tsallis(1.5)", "plain"),
    "`fl.Tsallis(2.0)`": ("fl Tsallis(2)", "plain"),
    "`fl.Tsallis(1.3)`": ("fl Tsallis(1.3)", "plain"),
    "`fl.nn.LearnedTsallis(heads)`": ("fl Tsallis(per head)", "plain"),
    "`fl.Tsallis(1.5)`, `is_causal=True`": ("fl Tsallis(1.5)", "causal"),
    "`fl.Tsallis(1.5)`, `attn_mask=`": ("fl Tsallis(1.5)", "padded"),
}
MAPS = {
    "`fl.Budget(k)`": "fl Budget(4)",
    "`fl.Norm(2.0)`": "fl Norm(2)",
    "`fl.Fused(0.1)`": "fl Fused(0.1)",
}
IMAGES = {
    "`fl.nn.ContinuousAttention2d((14, 14))`": "fl Shannon()",
    "`ContinuousAttention2d((14, 14), fl.Tsallis(2.0))`": "fl Tsallis(2)",
    "`ContinuousAttention2d((14, 14), modes=4)`": "fl Shannon(), 4 modes",
    "`ContinuousAttention2d((14, 14), fl.Tsallis(1.5))`": "fl Tsallis(1.5)",
}
LAYERS = {
    "`fl.nn.ContinuousTransformerLayer(256, 4, functions=64)`": "fl ContinuousTransformerLayer"
}


def stored(name):
    return json.loads((ROOT / "results" / f"bench_{name}.json").read_text())


def rows(first):
    """Cells of the table whose first heading is given."""
    table = PAGE.split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()
    assert set(table[1]) <= set("|-:")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def only(entries):
    (entry,) = entries
    return entry["ratio"]


def measured(written):
    """The stored ratio of a row."""
    if written in ATTENTION:
        method, variant = ATTENTION[written]
        return only(
            r
            for r in stored("attention")["results"]
            if (r["method"], r["variant"], r["n"]) == (method, variant, 4096)
            and (r["deviation"], r["direction"]) == (1.0, "forward+backward")
        )
    if written in MAPS:
        actual = stored("maps")["results"]
        return only(
            r for r in actual if (r["name"], r["direction"]) == (MAPS[written], "forward+backward")
        )
    document = stored("continuous")
    if written in IMAGES:
        return only(
            r
            for r in document["results"]
            if (r["method"], r["direction"]) == (IMAGES[written], "forward+backward")
        )
    return only(r for r in document["layers"] if (r["method"], r["n"]) == (LAYERS[written], 4096))


CHOICES = rows("you want")
TIMED = {cells[1]: cells[2] for cells in CHOICES if cells[2] != "–"}


def test_every_time_of_the_table_has_its_source():
    assert TIMED.keys() == {*ATTENTION, *MAPS, *IMAGES, *LAYERS}


@pytest.mark.parametrize("written", TIMED)
def test_times_are_the_stored_ones(written):
    assert TIMED[written] == f"{measured(written):.3g}"


@pytest.mark.parametrize("cells", CHOICES, ids=lambda cells: cells[0])
def test_rows_name_their_baseline_and_page(cells):
    assert len(cells) == 5
    assert bool(cells[3]) == (cells[2] != "–")
    assert re.fullmatch(r"\[[\w ]+\]\(\w+\.md\)", cells[4])


def test_times_by_deviation_are_the_stored_ones():
    shown = {float(d): times for d, *times in rows("deviation")}
    assert shown.keys() == {0.2, 1.0, 2.0}
    results = stored("attention")["results"]
    for deviation, times in shown.items():
        for n, time in zip((128, 1024, 4096, 16384), times, strict=True):
            ratio = only(
                r
                for r in results
                if (r["method"], r["variant"], r["n"]) == ("fl Tsallis(1.5)", "plain", n)
                and (r["deviation"], r["direction"]) == (deviation, "forward+backward")
            )
            assert time == f"{ratio:.3g}"


def test_the_settings_it_states_are_the_stored_ones():
    attention, continuous = stored("attention"), stored("continuous")
    assert (attention["baseline"], attention["settings"]["heads"]) == ("torch SDPA", 8)
    assert attention["settings"]["dim"] == 64
    assert attention["settings"]["threads"] == continuous["settings"]["threads"] == 2
    maps = stored("maps")["settings"]
    assert (maps["length"], maps["threads"]) == (1024, 1)
    images, layers = continuous["settings"]["images"], continuous["settings"]["layers"]
    assert (images["side"], images["functions"]) == (14, 100)
    assert (layers["embed"], layers["heads"], layers["functions"]) == (256, 4, 64)
