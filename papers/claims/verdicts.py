"""What can be said of a printed result."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """The last one is of us: a computation did not bear out the verdict that the ledger holds."""

    CONFIRMED = "CONFIRMED"
    CORRECTED = "CONFIRMED WITH CORRECTION"
    REFUTED = "REFUTED"
    NOT_CHECKABLE = "NOT CHECKABLE"
    DEFINITION = "DEFINITION"
    CONTRADICTED = "CONTRADICTED"
