"""The papers' results that are false as printed, refuted while the page is written."""

from __future__ import annotations

from benchmarks import machine
from papers import claims
from papers.claims import Claim, Record, Verdict
from papers.claims.report.pictures import drawn
from papers.tour.chapter import Chapter, Figure, Mark, Table, Tour, number

ORDER = 100

_INTRO = """
fenchel is built on four papers, and keeps a ledger: every theorem, key equation, algorithm, table
and figure of theirs as a function that computes it with this library and checks it against another
computation. {counts}

A claim is confirmed only by a check that can fail; each is also run with a library function broken
on purpose, and must notice. The table below computes those that are false as printed.

    python -m papers claims
    python -m papers claims --id {first}
    python -m papers claims --html ledger.html
"""


def chapter(tour: Tour) -> Chapter:
    ledger = claims.ledger()
    false = [claim for claim in ledger.values() if claim.verdict is Verdict.REFUTED]
    with machine.one_thread():
        records = [
            claims.run(claim, seed=tour.seed) for claim in (false[:3] if tour.quick else false)
        ]
    intro = _INTRO.format(counts=_counts(list(ledger.values())), first=false[0].id)
    return Chapter("The papers, checked", intro, _pictures(records), (_table(records),))


def _counts(every: list[Claim]) -> str:
    held = {verdict: sum(claim.verdict is verdict for claim in every) for verdict in Verdict}
    told = ", ".join(f"{n} {verdict.value.lower()}" for verdict, n in held.items() if n)
    return f"Of {len(every)} entries it holds {told}."


def _pictures(records: list[Record]) -> tuple[Figure, ...]:
    return tuple(
        Figure((drawn(picture),), f"{record.id}: {record.statement}.", picture.title, "wide")
        for record in records
        for picture in record.pictures
    )


def _table(records: list[Record]) -> Table:
    rows = []
    for record in records:
        first = next(check for check in record.checks if check.as_printed)
        refuted = record.verdict is Verdict.REFUTED
        mark = Mark(refuted, f"{number(first.figure, 4)}, printed {first.range()}", first.what)
        rows.append((record.id, record.statement, mark, record.counterexample))
    header = ("entry", "as printed", "what came out", "counterexample")
    return Table("Refuted while this page was written.", header, tuple(rows), words=True)
