"""What our own studies found, where they are stored."""

from __future__ import annotations

import json
from pathlib import Path

from papers.claims.evidence import Evidence

_FILE = "study_negation.json"
_ABOUT = "a statement about trained models"
_COMMAND = "python -m papers study negation"


def note_negation(evidence: Evidence) -> None:
    """How far a negation moves the words of a sentence, or that the study is not at hand."""
    if evidence.results is None or not (evidence.results.parent / _FILE).is_file():
        evidence.note(f"{_ABOUT}. Our own study is not at hand ({_FILE}); `{_COMMAND}` makes it")
        return
    try:
        evidence.note(f"{_ABOUT}. {_measured(evidence.results.parent / _FILE)}")
    except (OSError, ValueError, LookupError, TypeError) as problem:
        evidence.note(f"{_ABOUT}. Our own study cannot be read ({_FILE}): {problem!r}")


def _measured(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    together = document["sources"]["together"]
    first, last = (together["layers"][place]["ratio"]["mean"] for place in (0, -1))
    nearer = together["negation_nearer_than_same_relation"]["words"]
    return (
        f"Measured on {document['model']} ({_FILE}): in the last layer a negation moves the words "
        f"of a sentence {last:.2f} times as far as a neutral word does, at the input {first:.2f} "
        "times, and less far than another sentence of the same relation in "
        f"{100 * nearer['share']:.4g} % of {nearer['n']} pairs"
    )
