"""The attention table of the README is the measured one."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.attention_summary import readme_table

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "results" / "bench_attention.json"


def test_the_table_of_attention_is_the_measured_one() -> None:
    table = readme_table(json.loads(MEASURED.read_text(encoding="utf-8")))
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), (
        f"the README should show, from {MEASURED.name}:\n\n{table}"
    )
