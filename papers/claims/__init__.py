"""The papers' results as executable claims: each computes, and says what came out.

from fenchel import claims
claims.run(claims.ledger()["D-E13"])        # a Record: verdict, checks, figures, seconds
"""

from papers.claims.evidence import Check, Curves, Evidence, Fields
from papers.claims.ledger import Claim, Record, ledger, run
from papers.claims.listed import PAPERS, Listed, listed
from papers.claims.verdicts import Verdict

__all__ = [
    "PAPERS",
    "Check",
    "Claim",
    "Curves",
    "Evidence",
    "Fields",
    "Listed",
    "Record",
    "Verdict",
    "ledger",
    "listed",
    "run",
]
