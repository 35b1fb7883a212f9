"""The page of the ledger, from the JSON that `python -m papers claims --json` wrote."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from docs_site.tables import table
from papers.claims import PAPERS, Verdict, listed

Entry = dict[str, Any]

FILE = "papers/results/ledger.json"
COMMAND = f"python -m papers claims --json {FILE}"
_ABSENT = "–"
_EXPLAINED = (Verdict.REFUTED.value, Verdict.CORRECTED.value, Verdict.CONTRADICTED.value)


def anchor(id: str) -> str:
    """Of an id, for links: ledger.md#D-E5-E6."""
    return re.sub(r"[^A-Za-z0-9]", "-", id)


def section(path: Path) -> str:
    """What stands in place of the marker. Every entry has its row, and so its anchor, whether it
    is in the file or not: other pages link to them."""
    records: dict[str, Entry] = {}
    parts = [f"```console\n$ {COMMAND}\n```"]
    if path.is_file():
        records = {e["id"]: e for e in json.loads(path.read_text(encoding="utf-8"))}
        unknown = records.keys() - {entry.id for entry in listed()}
        if unknown:
            raise ValueError(
                f"{path.name} holds {', '.join(sorted(unknown))}, which the ledger does not list; "
                f"make it again: {COMMAND}"
            )
        parts.append(_summary(records))
    else:
        parts.append("The claims have not been run here yet; the command above does it.")
    for paper in PAPERS:
        parts += _paper(paper, records)
    return "\n\n".join(parts)


def _summary(records: dict[str, Entry]) -> str:
    """Verdicts by paper."""
    counts = {
        paper: Counter(e["verdict"] for id, e in records.items() if id.startswith(f"{paper}-"))
        for paper in PAPERS
    }
    verdicts = [v.value for v in Verdict if any(count[v.value] for count in counts.values())]
    rows = [
        (f"{paper} · {PAPERS[paper]}", *(str(count[v]) for v in verdicts), str(count.total()))
        for paper, count in counts.items()
    ]
    sums = [sum(count[v] for count in counts.values()) for v in verdicts]
    rows.append(("all", *map(str, sums), str(len(records))))
    return table(("paper", *(v.lower() for v in verdicts), "all"), rows)


def _paper(paper: str, records: dict[str, Entry]) -> list[str]:
    ids = [entry.id for entry in listed() if entry.id.startswith(f"{paper}-")]
    header = ("id", "verdict", "statement", "figure", "range")
    rows = [_row(id, records.get(id)) for id in ids]
    made = table(header, rows, numbers_from=3, ids=[anchor(id) for id in ids], escaped=True)
    parts = [f"## {paper} · {PAPERS[paper]}", made]
    explained = [records[id] for id in ids if records.get(id, {}).get("verdict") in _EXPLAINED]
    if explained:
        parts.append(f"### {paper}: what does not hold as printed")
        parts += [_explained(e) for e in explained]
    return parts


def _row(id: str, record: Entry | None) -> tuple[str, ...]:
    """Cells of HTML."""
    if record is None:
        return (f"<code>{escape(id)}</code>", "not run", _ABSENT, _ABSENT, _ABSENT)
    name = f"<code>{escape(id)}</code>"
    if record["verdict"] in _EXPLAINED:
        name = f'<a href="#{anchor(id)}-more">{name}</a>'
    figure, bound = _ABSENT, _ABSENT
    if record["checks"]:
        main = record["checks"][0]
        figure = _number(main["figure"])
        bound = ("not " if main["as_printed"] else "") + main["range"]
    verdict = record["verdict"]
    look = re.sub(r"\W", "-", verdict.lower())
    shown = f'<span class="verdict {look}">{escape(verdict.lower())}</span>'
    return (name, shown, escape(record["statement"]), escape(figure), escape(bound))


def _number(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.4g}"


def _explained(record: Entry) -> str:
    """The counterexample, what holds instead, and the figures as printed."""
    id = record["id"]
    lines = [
        f'<p id="{anchor(id)}-more"><a href="#{anchor(id)}"><code>{escape(id)}</code></a> '
        f"<em>{escape(record['verdict'].lower())}</em>: {escape(record['statement'])}</p>",
        "<ul>",
    ]
    told = [("Counterexample", record["counterexample"]), ("Holds instead", record["correction"])]
    lines += [f"<li>{label}: {escape(text)}</li>" for label, text in told if text]
    lines += [
        f"<li>As printed, {escape(check['what'])}: {escape(_number(check['figure']))}, "
        f"where it would have to be {escape(check['range'])}</li>"
        for check in record["checks"]
        if check["as_printed"]
    ]
    return '<div class="explained">\n' + "\n".join([*lines, "</ul>", "</div>"])
