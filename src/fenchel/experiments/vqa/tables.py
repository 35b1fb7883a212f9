"""Tables 6.2 to 6.4 of the thesis, in its layout, from the runs that are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fenchel.bench.tables import Listing
from fenchel.experiments.data.questions import KINDS
from fenchel.experiments.statistics import Estimate, estimate, paired
from fenchel.experiments.tables import (
    NOTHING,
    Document,
    against,
    by_seed,
    cell,
    cost,
    difference,
)
from fenchel.experiments.vqa.measures import MOST_MODES, PENALTIES
from fenchel.experiments.vqa.reading import BLIND, Plane
from fenchel.experiments.vqa.reading import plane as known_plane

_COLUMNS = (*KINDS, "accuracy")
_EQUAL = 1e-12  # an interval below this is none: all differences are equal but for rounding
_TOO_FEW = (
    "Nothing can be said yet: it takes three seeds with both sides of a comparison, whose "
    "differences are not all equal."
)
_HEADER = ("yes/no", "number", "other", "overall")
_DISCRETE = {
    BLIND: "question only",
    "softmax": "discrete softmax",
    "entmax": "discrete entmax-1.5",
    "sparsemax": "discrete sparsemax",
}


def listings(documents: Sequence[Document]) -> list[Listing]:
    """For each data set its tables, then the costs."""
    sets = sorted({document["settings"]["data"] for document in documents})
    found = [
        listing
        for name in sets
        for listing in of_data([d for d in documents if d["settings"]["data"] == name], name)
    ]
    return [*found, cost(documents, "Cost", names(documents))] if documents else []


def of_data(documents: Sequence[Document], name: str) -> list[Listing]:
    found = [
        _accuracies(documents, f"{name}: Table 6.2, accuracy in per cent, one mode", 1),
        _accuracies(documents, f"{name}: Table 6.3, several modes", None),
        _modes(documents, f"{name}: Table 6.4, per cent of questions with K* modes"),
        _differences(documents, f"{name}: difference of the same seed, in points (* leaves 0 out)"),
        _agreements(documents, f"{name}: attention on what the question is about, in per cent"),
    ]
    return [listing for listing in found if listing.rows]


def plane(attention: str) -> Plane | None:
    """None also for one that is not known, which is shown under its own name."""
    try:
        return known_plane(attention)
    except ValueError:
        return None


def label(attention: str) -> str:
    own = plane(attention)
    if own is None:
        return _DISCRETE.get(attention, attention)
    if own.modes > 1:
        return f"{own.modes}-MCA"
    family = attention.split("-")[1]
    return f"2D continuous {family}"


def attentions(documents: Sequence[Document]) -> list[str]:
    """Those that are there: discrete, one mode, several; more functions first. Then the unknown."""

    def place(attention: str) -> tuple[float, str, int]:
        own = plane(attention)
        if own is None:
            known = attention in _DISCRETE
            order = list(_DISCRETE).index(attention) - len(_DISCRETE) if known else math.inf
            return (order, attention, 0)
        return (own.modes, attention.rsplit("-", 1)[0], -own.functions)

    return sorted({document["settings"]["attention"] for document in documents}, key=place)


def names(documents: Sequence[Document]) -> dict[str, str]:
    """Of the attentions that are there, in the order of the tables."""
    found = {}
    for attention in attentions(documents):
        own = plane(attention)
        found[attention] = label(attention) + ("" if own is None else f", N = {own.functions}")
    return found


def score(name: str) -> Callable[[Document], float | None]:
    return lambda document: document["scores"].get(name)


def _accuracies(documents: Sequence[Document], title: str, modes: int | None) -> Listing:
    """modes 1: the discrete ones and those of one mode; None: several, fixed or chosen."""
    rows: list[tuple[str, ...]] = []
    for attention in attentions(documents):
        own = plane(attention)
        if (own is None or own.modes == 1) != (modes == 1):
            continue
        cells = (cell(by_seed(documents, score(c), attention=attention)) for c in _COLUMNS)
        count = NOTHING if own is None else str(own.functions)
        rows.append((label(attention), count, NOTHING, *cells))
    if modes is None:
        rows += _chosen(documents)
    return Listing(title, ("attention", "N", "λ", *_HEADER), rows)


def _chosen(documents: Sequence[Document]) -> list[tuple[str, ...]]:
    """The network of one mode, with as many as the criterion chooses at test time."""
    rows = []
    for attention in attentions(documents):
        for penalty in (f"{penalty:g}" for penalty in PENALTIES):
            found = [
                by_seed(documents, _selected(penalty, c), attention=attention) for c in _COLUMNS
            ]
            own = plane(attention)
            if found[-1] and own is not None:
                rows.append(("test-MCA", str(own.functions), penalty, *map(cell, found)))
    return rows


def _selected(penalty: str, name: str) -> Callable[[Document], float | None]:
    def found(document: Document) -> float | None:
        selection = document["facts"].get("selection", {})
        value: float | None = selection.get(penalty, {}).get("scores", {}).get(name)
        return value

    return found


def _modes(documents: Sequence[Document], title: str) -> Listing:
    rows = []
    for attention in attentions(documents):
        for penalty in (f"{penalty:g}" for penalty in PENALTIES):
            shares = [
                by_seed(documents, _share(penalty, number), attention=attention)
                for number in range(MOST_MODES)
            ]
            own = plane(attention)
            if shares[0] and own is not None:
                rows.append((str(own.functions), penalty, *map(cell, shares)))
    header = ("N", "λ", *(f"K* = {number + 1}" for number in range(MOST_MODES)))
    return Listing(title, header, rows)


def _share(penalty: str, number: int) -> Callable[[Document], float | None]:
    def found(document: Document) -> float | None:
        selection = document["facts"].get("selection", {})
        value: float | None = selection[penalty]["modes"][number] if selection else None
        return value

    return found


def _differences(documents: Sequence[Document], title: str) -> Listing:
    """To the discrete softmax and to the question alone, over all questions."""
    every = score("accuracy")
    softmax = by_seed(documents, every, attention="softmax")
    blind = by_seed(documents, every, attention=BLIND)
    called = names(documents)
    rows = []
    for attention in attentions(documents):
        own = by_seed(documents, every, attention=attention)
        to_softmax = NOTHING if attention == "softmax" else against(own, softmax)
        to_blind = NOTHING if attention == BLIND else against(own, blind)
        rows.append((called[attention], to_softmax, to_blind))
    return Listing(title, ("attention", "− discrete softmax", "− question only"), rows)


def _agreements(documents: Sequence[Document], title: str) -> Listing:
    called = names(documents)
    rows = []
    for attention in attentions(documents):
        found = [
            by_seed(documents, _agreement(name), attention=attention)
            for name in ("mass", "area", "hit")
        ]
        if found[0]:
            rows.append((called[attention], *map(cell, found)))
    return Listing(title, ("attention", "mass inside", "its area", "largest weight near"), rows)


def _agreement(name: str) -> Callable[[Document], float | None]:
    def found(document: Document) -> float | None:
        value: float | None = document["facts"].get("agreement", {}).get(name)
        return value

    return found


def verdicts(documents: Sequence[Document], data: str) -> list[str]:
    """Whether the thesis' claims held on this data: one mode does as well as discrete softmax,
    several gain nothing, a larger penalty chooses one mode more often. And whether seeing helped.
    """
    own = [document for document in documents if document["settings"]["data"] == data]
    said = [_one_mode(own), _several_modes(own), _penalties(own), _sight(own)]
    if not any(said[:2]):
        said.insert(0, _TOO_FEW)
    return [sentence for sentence in said if sentence]


def verdict(documents: Sequence[Document], data: str) -> str:
    return " ".join(verdicts(documents, data))


def _compared(documents: Sequence[Document], own: str, base: str) -> Estimate | None:
    """Their difference in accuracy, where seeds enough, not all alike, tell its interval."""
    every = score("accuracy")
    pair = (by_seed(documents, every, attention=attention) for attention in (own, base))
    found = paired(*pair)
    if found is None or found.half is None or found.count < 3 or found.half < _EQUAL:
        return None
    return found


def _way(found: Estimate) -> str:
    if not found.beyond_zero:
        return "no difference can be told"
    return "better" if found.mean > 0 else "worse"


def _listed(documents: Sequence[Document], found: dict[str, Estimate]) -> str:
    """By the way they went: "better for A (+1.20 ± 0.30); worse for B (…)"."""
    called = names(documents)
    parts = []
    for way in ("better", "no difference can be told", "worse"):
        own = [
            f"{called[attention].replace(', ', ' with ')} ({_points(gain)})"
            for attention, gain in found.items()
            if _way(gain) == way
        ]
        parts += [f"{way} for {', '.join(own)}"] if own else []
    return "; ".join(parts)


def _points(found: Estimate) -> str:
    return difference(found).removesuffix(" *")


def _one_mode(documents: Sequence[Document]) -> str:
    found = {}
    for attention in attentions(documents):
        own = plane(attention)
        compared = _compared(documents, attention, "softmax")
        if own is not None and own.modes == 1 and compared is not None:
            found[attention] = compared
    if not found:
        return ""
    worse = sum(_way(gain) == "worse" for gain in found.values())
    lowest = min(gain.mean - (gain.half or 0.0) for gain in found.values())
    how = "held" if not worse else "did not hold" if worse == len(found) else "held in part"
    return (
        f"The claim that one continuous mode does as well as discrete softmax {how} here: "
        f"against it, in points, {_listed(documents, found)}. Their intervals reach down to "
        f"{'+' if lowest >= 0 else '−'}{100 * abs(lowest):.2f}."
    )


def _several_modes(documents: Sequence[Document]) -> str:
    """Against one mode with as many functions."""
    found = {}
    for attention in attentions(documents):
        own = plane(attention)
        if own is not None and own.modes > 1:
            one = f"continuous-softmax-{own.functions}"
            compared = _compared(documents, attention, one)
            if compared is not None:
                found[attention] = compared
    if not found:
        return ""
    how = "held" if all(_way(gain) != "better" for gain in found.values()) else "did not hold"
    return (
        f"That several modes bring no clear gain in accuracy {how} here: against one mode, "
        f"in points, {_listed(documents, found)}."
    )


def _penalties(documents: Sequence[Document]) -> str:
    """Of the network with the most functions."""
    penalties = [f"{penalty:g}" for penalty in PENALTIES]
    for attention in attentions(documents):
        shares = [by_seed(documents, _share(p, 0), attention=attention) for p in penalties]
        if shares[0]:
            means = [estimate(list(share.values())).mean for share in shares]
            more = means == sorted(means) and means[-1] > means[0]
            how = "held" if more else "did not show"
            one = ", ".join(f"{100 * mean:.1f}" for mean in means)
            return (
                f"That a larger λ chooses K* = 1 more often {how} here: for {one} % of the "
                f"questions at λ = {', '.join(penalties)}."
            )
    return ""


def _sight(documents: Sequence[Document]) -> str:
    found = _compared(documents, "softmax", BLIND)
    if found is None:
        return ""
    how = {"better": "helped", "worse": "did harm"}.get(_way(found), "did not tell")
    return f"Seeing the picture {how}: discrete softmax − question only is {_points(found)} points."
