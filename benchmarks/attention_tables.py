"""What `python -m benchmarks attention` shows: tables and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import attention_summary, maps
from benchmarks.console import no_picture


def print_attention(document: dict[str, Any]) -> None:
    console = Console()
    for direction in maps.DIRECTIONS:
        console.print(_attention_table(document, direction))
    for table in (_row_map_table(document), _memory_table(document)):
        if table.row_count:
            console.print(table)
    for note in attention_summary.notes([*document["results"], *document["memory"]]):
        console.print(Text(note, style="dim"))
    if document["warning"]:
        Console(stderr=True).print(Text(document["warning"], style="yellow"))


def _attention_table(document: dict[str, Any], direction: str) -> Table:
    entries = document["results"]
    sizes = attention_summary.sizes_of(entries)
    title = f"Time relative to SDPA, {direction} ({document['settings']['threads']} thread(s))"
    table = Table("tokens", title=title, title_justify="left")
    for n in sizes:
        table.add_column(str(n), justify="right", no_wrap=True)
    for row in attention_summary.rows(entries):
        cells = [attention_summary.cell(entries, row, n, direction) for n in sizes]
        style = "bold" if row.ours else ""
        table.add_row(Text(str(row), style=style), *cells)
    return table


def _row_map_table(document: dict[str, Any]) -> Table:
    table = Table("map", "rows x keys", "direction", "ratio", title_justify="left")
    table.title = "Maps of rows, time relative to torch.softmax"
    for entry in document["maps"]:
        size = f"{entry['rows']} x {entry['length']}"
        shown = entry["error"] or attention_summary.digits(entry["ratio"])
        table.add_row(entry["method"], size, entry["direction"], shown)
    return table


def _memory_table(document: dict[str, Any]) -> Table:
    table = Table("attention", "tokens", "MiB", "to SDPA", title_justify="left")
    table.title = "Peak memory beyond the inputs, forward+backward"
    for entry in document["memory"]:
        extra, ratio = entry["extra_bytes"], entry["ratio"]
        shown = "–" if extra is None else f"{extra / 2**20:.0f}"
        relative = "–" if ratio is None else attention_summary.digits(ratio)
        table.add_row(entry["method"], str(entry["n"]), shown, relative)
    return table


def draw_attention(document: dict[str, Any], path: Path) -> str:
    """The path of the picture, or why there is none."""
    try:
        from benchmarks.attention_picture import save_picture
    except ModuleNotFoundError as missing:
        return no_picture(missing)
    return str(save_picture(document, path))
