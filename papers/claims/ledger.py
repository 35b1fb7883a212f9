"""Claims, gathered: which function is about which entry, and what verdict its evidence allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from papers.claims.evidence import Check, Curves, Evidence, Fields
from papers.claims.listed import FAMILIES, listed
from papers.claims.verdicts import Verdict

Body = Callable[[Evidence], None]


@dataclass(frozen=True)
class Claim:
    """verdict: what the ledger holds; it is said only if the evidence bears it out."""

    id: str
    statement: str
    verdict: Verdict
    body: Body


@dataclass(frozen=True)
class Record:
    """What came out of one claim."""

    id: str
    statement: str
    verdict: Verdict
    checks: tuple[Check, ...]
    correction: str
    counterexample: str
    notes: tuple[str, ...]
    pictures: tuple[Curves | Fields, ...]
    seed: int
    seconds: float

    @property
    def figure(self) -> Check | None:
        """The one that stands for the claim."""
        return self.checks[0] if self.checks else None

    def as_json(self) -> dict[str, Any]:
        main = self.figure
        return {
            "id": self.id,
            "verdict": self.verdict.value,
            "figure": None if main is None else _number(main.figure),
            "seconds": round(self.seconds, 4),
            "tolerance": None if main is None else main.range(),
            "seed": self.seed,
            "statement": self.statement,
            "correction": self.correction,
            "counterexample": self.counterexample,
            "notes": list(self.notes),
            "checks": [
                {
                    "what": check.what,
                    "figure": _number(check.figure),
                    "range": check.range(),
                    "as_printed": check.as_printed,
                    "bears_out": check.bears_out,
                }
                for check in self.checks
            ],
        }


def _number(figure: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return figure if abs(figure) < float("inf") else str(figure)


def claim(id: str, statement: str, verdict: Verdict) -> Callable[[Body], Body]:
    """Mark a function as the claim of an entry.

    @claim("L-5", "dLoss/ds_j = p_j (l_j - E_p l) / τ", Verdict.CONFIRMED)
    def backpropagation(evidence: Evidence) -> None: ...
    """

    def mark(body: Body) -> Body:
        body.claim = Claim(id, statement, verdict, body)  # type: ignore[attr-defined]
        return body

    return mark


@cache
def ledger() -> dict[str, Claim]:
    """Every claim, by its id, in the order of the list."""
    by_id: dict[str, Claim] = {}
    for name in FAMILIES:
        for member in vars(import_module(f"papers.claims.{name}")).values():
            each = getattr(member, "claim", None)
            if isinstance(each, Claim):
                if each.id in by_id:
                    raise ValueError(f"two functions claim {each.id}")
                by_id[each.id] = each
    order = [entry.id for entry in listed()]
    unknown = by_id.keys() - set(order)
    if unknown:
        raise ValueError(f"claims of entries that are not listed: {', '.join(sorted(unknown))}")
    return {id: by_id[id] for id in order if id in by_id}


def run(claim: Claim, *, seed: int = 0, slow: bool = False, results: Path | None = None) -> Record:
    """Compute, and say no more than the evidence allows. A claim that fails to compute is
    contradicted, and says by what; only a package that is missing is an error of the caller."""
    evidence = Evidence(seed, slow, results)
    started = time.perf_counter()
    failure = ""
    try:
        claim.body(evidence)
    except ImportError:
        raise
    except Exception as problem:  # the other claims go on
        failure = f"{type(problem).__name__}: {problem}"
        evidence.note(f"not computed: {failure}")
    seconds = time.perf_counter() - started
    return Record(
        claim.id,
        claim.statement,
        Verdict.CONTRADICTED if failure else _verdict(claim, evidence),
        tuple(evidence.checks),
        evidence.correction,
        evidence.counterexample,
        tuple(evidence.notes),
        tuple(evidence.pictures),
        seed,
        seconds,
    )


def _verdict(claim: Claim, evidence: Evidence) -> Verdict:
    lacking = _lacking(claim.verdict, evidence)
    if lacking:
        raise ValueError(f"{claim.id} says {claim.verdict.value} without {lacking}")
    if all(check.bears_out for check in evidence.checks):
        return claim.verdict
    return Verdict.CONTRADICTED


def _lacking(verdict: Verdict, evidence: Evidence) -> str:
    """What a verdict may not be said without; empty if nothing is missing."""
    ours = [check for check in evidence.checks if not check.as_printed]
    printed = [check for check in evidence.checks if check.as_printed]
    needs: dict[Verdict, list[tuple[object, str]]] = {
        Verdict.CONFIRMED: [(ours, "a check")],
        Verdict.CORRECTED: [
            (ours, "a check of the corrected statement"),
            (evidence.correction, "its correction"),
        ],
        Verdict.REFUTED: [
            (printed, "a check that the printed statement fails"),
            (evidence.counterexample, "its counterexample"),
        ],
        Verdict.NOT_CHECKABLE: [(evidence.notes, "the reason")],
    }
    missing = [what for there, what in needs.get(verdict, []) if not there]
    if printed and verdict is Verdict.CONFIRMED:
        missing.append("a correction, though it proves the printed statement wrong")
    return " and ".join(missing)
