"""The entries of the ledger: every theorem, key equation, algorithm, table and figure, by paper."""

from __future__ import annotations

import re
from dataclasses import dataclass

PAPERS = {
    "D": "Deciphering Attention Mechanisms: Optimization and Fenchel Dual Solutions",
    "M": "A Mathematical Theory of Attention",
    "L": "Scaled-Dot-Product Attention as One-Sided Entropic Optimal Transport",
    "F": "Visual Attention with Sparse and Continuous Transformations",
}

# The modules that hold the claims.
FAMILIES = (
    "deciphering.estimation",
    "deciphering.expansion",
    "deciphering.limits",
    "deciphering.heads",
    "deciphering.likelihood",
    "deciphering.transport",
    "deciphering.transport_steps",
    "deciphering.tables",
    "theory.kernels",
    "theory.distances",
    "theory.projection",
    "theory.contraction",
    "theory.gaussian",
    "onesided.problem",
    "onesided.gradient",
    "thesis.basics",
    "thesis.families",
    "thesis.values",
    "thesis.moments",
    "thesis.integrals",
    "thesis.mixtures",
    "thesis.tables",
    "thesis.network",
)

_IDS = """
D-E1 D-E2 D-E3 D-E4 D-MEM D-E5/E6 D-T1 D-E10 D-E11 D-E12 D-E13 D-E14 D-T2/E15 D-T2dom D-E16
D-LIM D-E17 D-E18 D-E19a D-E19b D-Fig1 D-Fig2 D-Fig3 D-Fig4 D-E20 D-E21/E31 D-E32/E38 D-E33
D-E34 D-E35/E36 D-P1/E37 D-P1lim D-E22/E44 D-S9grp D-S9dot D-E39 D-E40/41/42 D-E43
D-OTnewton D-E23..26 D-E27/28 D-E29/30 D-Tab1 D-Tab2

M-D1 M-D2 M-D3 M-D4 M-D5 M-D6/7/Eq2 M-D8/P9 M-FLOW M-R11 M-S3.1 M-P12/Eq3/Eq5 M-W1 M-BL M-KL
M-D13/D35 M-T14 M-T14b M-R15 M-P16 M-P17 M-P19a M-P19b M-P20 M-P21 M-D22 M-T23 M-C24 M-C24+
M-P25 M-P26 M-R27 M-P28 M-T29 M-C30 M-L31 M-L32/33/34 M-L36 M-L37 M-L38 M-L39 M-L40 M-L41
M-E9 M-NEG

L-1 L-2 L-3 L-4 L-E8/E9 L-E11/E12 L-SQRTD L-E13 L-TabSoftmax L-TabSparsemax L-TabPrior
L-Entmax L-ALiBi L-5 L-5q L-5pg L-5var L-6 L-6dual L-6KL L-7

F-E2.2/2.3/2.6 F-E2.4/2.5 F-E2.7..2.12 F-E2.13 F-E2.14/2.15 F-Tab2.1 F-E2.16 F-E3.1 F-E3.2
F-E3.3/3.4 F-E3.5 F-E3.6 F-E3.7 F-E3.8 F-E3.9 F-E3.10/3.11 F-E3.12 F-E3.13 F-E3.14/3.15
F-S3.2txt F-Fig3.1 F-E3.16 F-E3.17/3.18 F-E3.19 F-E3.20 F-T1 F-A.6/A.7 F-E4.2/4.3 F-E4.4
F-E4.5 F-E4.6 F-E4.7..4.10 F-E4.11/4.12 F-E4.13/A.12/A.15/A.16 F-E4.14 F-L1 F-A.14 F-A.17
F-A.18..21 F-A.22 F-A.23 F-A.24/A.25 F-A.26 F-A.27 F-A.30/A.31 F-A.33/A.34 F-A.35..A.41 F-A4
F-NAIVE F-Tab4.1 F-E5.1/5.2/5.3 F-E5.4/5.5 F-E5.6..5.11 F-E5.12..5.15 F-E5.16 F-POW F-S5.3.3
F-E5.17..5.20 F-Fig5.1 F-Tab6.1 F-Tab6.2/6.3 F-Tab6.4 F-S6.2 F-Fig6.x/TabB.1 F-REF1D
"""

# Further names under which an entry may be asked for.
_OTHERS = {
    "D-T1": ("D-E7", "D-E8", "D-E9"),
    "D-Fig4": ("D-Fig5..8",),
    "L-1": ("L-E1", "L-E4", "L-E5"),
    "L-2": ("L-E2", "L-E3"),
    "F-E3.17/3.18": ("F-A1",),
    "F-T1": ("F-E4.1", "F-A.1..A.5", "F-A.8..A.10"),
    "F-E4.6": ("F-A2",),
    "F-E4.7..4.10": ("F-A3fwd",),
    "F-E4.11/4.12": ("F-A3bwd",),
}


@dataclass(frozen=True)
class Listed:
    id: str
    others: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        """D, M, L or F."""
        return self.id[0]

    def names(self) -> set[str]:
        """D-E5/E6 is asked for as D-E5/E6, D-E5 and D-E6; F-E3.3/3.4 also as F-E3.4; D-E23..26 also
        as D-E24."""
        names = {self.id, *self.others}
        for name in (self.id, *self.others):
            parts = name.removeprefix(f"{self.paper}-").split("/")
            kind = re.match(r"[A-Za-z.]*", parts[0])
            assert kind is not None
            for part in parts:
                whole = part if part[0].isalpha() else kind.group() + part
                names |= {f"{self.paper}-{each}" for each in _between(whole)}
        return names


def _between(name: str) -> list[str]:
    """E23..26 names four, A.18..21 and E4.7..4.10 as well; anything else itself."""
    ends = re.fullmatch(r"(\D*(?:\d+\.)?)(\d+)\.\.(?:\D*)(?:\d+\.)?(\d+)", name)
    if ends is None:
        return [name]
    before, first, last = ends.group(1), int(ends.group(2)), int(ends.group(3))
    return [name, *(f"{before}{number}" for number in range(first, last + 1))]


def listed() -> tuple[Listed, ...]:
    return tuple(Listed(id, _OTHERS.get(id, ())) for id in _IDS.split())


def find(name: str) -> Listed:
    """The entry of that name, whatever the case of its letters."""
    entries, name = listed(), name.strip()
    for entry in entries:
        if name.casefold() in {known.casefold() for known in entry.names()}:
            return entry
    near = [entry.id for entry in entries if name.casefold() in entry.id.casefold()]
    hint = f"; there is {', '.join(near[:6])}" if near else "; the ids are listed by --list"
    raise KeyError(f"no entry {name!r}{hint}")
