"""What our own runs of the thesis' experiments found, where they are stored."""

from __future__ import annotations

from typing import Any

from papers.claims.evidence import Evidence

COMMAND = "python -m papers experiment vqa --preset cpu"
_NONE = f"No runs of our own are stored; `{COMMAND}` makes them, on smaller data than VQA-v2."


def note_accuracies(evidence: Evidence) -> None:
    """By data set and attention, and whether the thesis' statements held there."""
    documents = _stored(evidence)
    if not documents:
        return
    from papers.experiments.statistics import estimate
    from papers.experiments.tables import by_seed
    from papers.experiments.vqa import tables

    for data, of_data in _by_data(documents).items():
        parts = []
        for attention, name in tables.names(of_data).items():
            values = by_seed(of_data, tables.score("accuracy"), attention=attention)
            if values:
                text = estimate(list(values.values())).text()
                parts.append(f"{name} {text} ({_seeds(len(values))})")
        evidence.note(f"{data}, accuracy in per cent by `{COMMAND}`: {'; '.join(parts)}.")
        evidence.note(f"{data}: {tables.verdict(of_data, data)}")


def note_modes(evidence: Evidence) -> None:
    """The shares of K*, for the criterion with the factor L."""
    documents = _stored(evidence)
    if not documents:
        return
    from papers.experiments.vqa import tables

    for data, of_data in _by_data(documents).items():
        for listing in tables.of_data(of_data, data):
            if "Table 6.4" in listing.title:
                rows = "; ".join(
                    f"N = {row[0]}, λ = {row[1]}: {', '.join(row[2:])}" for row in listing.rows
                )
                evidence.note(f"{data}, per cent with K* = 1..5 by `{COMMAND}`: {rows}.")


def _stored(evidence: Evidence) -> list[dict[str, Any]]:
    """None, with a note that says so, where nothing is stored or it cannot be read."""
    documents: list[dict[str, Any]] = []
    if evidence.results is not None:
        from papers.experiments.tables import read_results

        try:
            documents = read_results(evidence.results / "vqa" / "cpu")
        except ValueError as problem:
            evidence.note(f"Stored runs cannot be read: {problem}")
            return []
    if not documents:
        evidence.note(_NONE)
    return documents


def _by_data(documents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    by_data: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        by_data.setdefault(document["settings"]["data"], []).append(document)
    return by_data


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"
