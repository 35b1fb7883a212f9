"""Tables 6.2 to 6.4 of the thesis, in its layout, from the runs that are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from benchmarks.tables import Listing
from papers.experiments.data.questions import KINDS
from papers.experiments.statistics import ENOUGH, Estimate, estimate, paired
from papers.experiments.tables import NOTHING, Document, against, by_seed, cell, cost, difference
from papers.experiments.vqa.measures import MOST_MODES, PENALTIES
from papers.experiments.vqa.reading import BLIND, Plane
from papers.experiments.vqa.reading import plane as known_plane

_COLUMNS = (*KINDS, "accuracy")
_EQUAL = 1e-12  # an interval below this is none: all differences are equal but for rounding
_MARGIN = 0.01  # as good as: not worse by more, at the worst end of the interval
_TOO_FEW = (
    "Of the claims on accuracy nothing can be said yet: that takes three seeds on both sides of a "
    "comparison, and differences that vary."
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
    tables = [
        listing
        for name in sets
        for listing in of_data([d for d in documents if d["settings"]["data"] == name], name)
    ]
    return [*tables, cost(documents, "Cost", names(documents))] if documents else []


def of_data(documents: Sequence[Document], name: str) -> list[Listing]:
    tables = [
        _accuracies(documents, f"{name}: Table 6.2, accuracy in per cent, one mode", 1),
        _accuracies(documents, f"{name}: Table 6.3, accuracy in per cent, several modes", None),
        _modes(documents, f"{name}: Table 6.4, per cent of questions with K* modes"),
        _differences(documents, f"{name}: difference of the same seed, in points (* leaves 0 out)"),
        _agreements(documents, f"{name}: attention on what the question is about, in per cent"),
    ]
    return [listing for listing in tables if listing.rows]


def plane(attention: str) -> Plane | None:
    """None also for one that is not known, which is shown under its own name."""
    try:
        return known_plane(attention)
    except ValueError:
        return None


def label(attention: str) -> str:
    settings = plane(attention)
    if settings is None:
        return _DISCRETE.get(attention, attention)
    if settings.modes > 1:
        return f"{settings.modes}-MCA"
    family = attention.split("-")[1]
    return f"2D continuous {family}"


def attentions(documents: Sequence[Document]) -> list[str]:
    """Those that are there: discrete, one mode, several; more functions first. Then the unknown."""

    def place(attention: str) -> tuple[float, str, int]:
        settings = plane(attention)
        if settings is None:
            known = attention in _DISCRETE
            order = list(_DISCRETE).index(attention) - len(_DISCRETE) if known else math.inf
            return (order, attention, 0)
        return (settings.modes, attention.rsplit("-", 1)[0], -settings.functions)

    return sorted({document["settings"]["attention"] for document in documents}, key=place)


def names(documents: Sequence[Document]) -> dict[str, str]:
    """Of the attentions that are there, in the order of the tables."""
    labels = {}
    for attention in attentions(documents):
        settings = plane(attention)
        labels[attention] = label(attention) + (
            "" if settings is None else f", N = {settings.functions}"
        )
    return labels


def score(name: str) -> Callable[[Document], float | None]:
    return lambda document: document["scores"].get(name)


def _accuracies(documents: Sequence[Document], title: str, modes: int | None) -> Listing:
    """modes 1: the discrete ones and those of one mode; None: several, fixed or chosen."""
    rows: list[tuple[str, ...]] = []
    for attention in attentions(documents):
        settings = plane(attention)
        if (settings is None or settings.modes == 1) != (modes == 1):
            continue
        cells = (cell(by_seed(documents, score(c), attention=attention)) for c in _COLUMNS)
        count = NOTHING if settings is None else str(settings.functions)
        rows.append((label(attention), count, NOTHING, *cells))
    if modes is None:
        rows += _chosen(documents)
    return Listing(title, ("attention", "N", "λ", *_HEADER), rows)


def _chosen(documents: Sequence[Document]) -> list[tuple[str, ...]]:
    """The network of one mode, with as many as the criterion chooses at test time."""
    rows = []
    for attention, functions, penalty in _selections(documents):
        scores = [by_seed(documents, _selected(penalty, c), attention=attention) for c in _COLUMNS]
        rows.append(("test-MCA", str(functions), penalty, *map(cell, scores)))
    return rows


def _selections(documents: Sequence[Document]) -> Iterator[tuple[str, int, str]]:
    """Attention, functions and penalty, where modes were chosen at test time."""
    for attention in attentions(documents):
        settings = plane(attention)
        for penalty in (f"{penalty:g}" for penalty in PENALTIES):
            if settings and by_seed(documents, _share(penalty, 0), attention=attention):
                yield attention, settings.functions, penalty


def _selected(penalty: str, name: str) -> Callable[[Document], float | None]:
    def score(document: Document) -> float | None:
        selection = document["facts"].get("selection", {})
        value: float | None = selection.get(penalty, {}).get("scores", {}).get(name)
        return value

    return score


def _modes(documents: Sequence[Document], title: str) -> Listing:
    rows = []
    for attention, functions, penalty in _selections(documents):
        shares = [
            by_seed(documents, _share(penalty, number), attention=attention)
            for number in range(MOST_MODES)
        ]
        rows.append((str(functions), penalty, *map(cell, shares)))
    header = ("N", "λ", *(f"K* = {number + 1}" for number in range(MOST_MODES)))
    return Listing(title, header, rows)


def _share(penalty: str, number: int) -> Callable[[Document], float | None]:
    def share(document: Document) -> float | None:
        selection = document["facts"].get("selection", {})
        value: float | None = selection[penalty]["modes"][number] if selection else None
        return value

    return share


def _differences(documents: Sequence[Document], title: str) -> Listing:
    """To the discrete softmax, to the question alone, and of several modes to one with as many
    functions; over all questions."""
    every = score("accuracy")
    called = names(documents)

    def cells(scores: dict[int, float], *bases: str) -> list[str]:
        """Nothing for a base of no name, or of which no run is stored."""
        return [against(scores, by_seed(documents, every, attention=base)) for base in bases]

    rows = []
    for attention in attentions(documents):
        scores = by_seed(documents, every, attention=attention)
        two = ("" if base == attention else base for base in ("softmax", BLIND))
        rows.append((called[attention], *cells(scores, *two, _alone(attention))))
    for attention, functions, penalty in _selections(documents):
        scores = by_seed(documents, _selected(penalty, "accuracy"), attention=attention)
        row = cells(scores, "softmax", BLIND, attention)
        rows.append((_chosen_name(functions, penalty), *row))
    header = ("attention", "− discrete softmax", "− question only", "− one mode, same N")
    return Listing(title, header, rows)


def _alone(attention: str) -> str:
    """What several modes are compared with: one, with as many functions. "" for one mode."""
    settings = plane(attention)
    return f"continuous-softmax-{settings.functions}" if settings and settings.modes > 1 else ""


def _chosen_name(functions: int, penalty: str) -> str:
    return f"test-MCA, N = {functions}, λ = {penalty}"


def _agreements(documents: Sequence[Document], title: str) -> Listing:
    called = names(documents)
    rows = []
    for attention in attentions(documents):
        measures = [
            by_seed(documents, _agreement(name), attention=attention)
            for name in ("mass", "area", "hit")
        ]
        if measures[0]:
            rows.append((called[attention], *map(cell, measures)))
    return Listing(title, ("attention", "mass inside", "its area", "largest weight near"), rows)


def _agreement(name: str) -> Callable[[Document], float | None]:
    def measure(document: Document) -> float | None:
        value: float | None = document["facts"].get("agreement", {}).get(name)
        return value

    return measure


def verdicts(documents: Sequence[Document], data: str) -> list[str]:
    """Whether the thesis' claims held on this data: one mode does as well as discrete softmax,
    several gain nothing, a larger penalty chooses one mode more often. And whether seeing helped.
    """
    of_data = [document for document in documents if document["settings"]["data"] == data]
    said = [_one_mode(of_data), _several_modes(of_data), _penalties(of_data), _sight(of_data)]
    if not any(said[:2]):
        said.insert(0, _TOO_FEW)
    return [sentence for sentence in said if sentence]


def verdict(documents: Sequence[Document], data: str) -> str:
    return " ".join(verdicts(documents, data))


def _compared(scores: dict[int, float], base: dict[int, float]) -> Estimate | None:
    """Their difference, where seeds enough, not all alike, tell its interval. Modes that are chosen
    may be those that were there: no difference at all."""
    gain = paired(scores, base)
    if gain is None or gain.half is None or gain.count < ENOUGH:
        return None
    return None if gain.half < _EQUAL <= abs(gain.mean) else gain


def _way(gain: Estimate) -> str:
    if not gain.shows:
        return "no difference can be told"
    return "better" if gain.mean > 0 else "worse"


def _listed(gains: dict[str, Estimate | None]) -> str:
    """By the way they went: "better for A (+1.20 ± 0.30); worse for B (…)"."""
    parts = []
    for way in ("better", "no difference can be told", "worse"):
        names = [
            f"{name.replace(', ', ' with ', 1)} ({_points(gain)})"
            for name, gain in gains.items()
            if gain is not None and _way(gain) == way
        ]
        parts += [f"{way} for {', '.join(names)}"] if names else []
    return "; ".join(parts)


def _points(gain: Estimate) -> str:
    return difference(gain).removesuffix(" *")


def _told(gains: dict[str, Estimate | None]) -> tuple[list[Estimate], str]:
    """Of those that can be compared; and, where some cannot yet, how many."""
    known = [gain for gain in gains.values() if gain is not None]
    partly = f" (so far of {len(known)} of {len(gains)})" if len(known) < len(gains) else ""
    return known, partly


def _one_mode(documents: Sequence[Document]) -> str:
    every, called = score("accuracy"), names(documents)
    softmax = by_seed(documents, every, attention="softmax")
    gains = {}
    for attention in attentions(documents):
        settings = plane(attention)
        if settings is not None and settings.modes == 1:
            gain = _compared(by_seed(documents, every, attention=attention), softmax)
            gains[called[attention]] = gain
    known, partly = _told(gains)
    if not known:
        return ""
    worse = sum(_way(gain) == "worse" for gain in known)
    lowest = min(gain.mean - (gain.half or 0.0) for gain in known)
    if worse:
        how = "did not hold" if worse == len(known) else "did not hold for all"
    else:
        how = "held" if lowest >= -_MARGIN else "was neither confirmed nor refuted"
    return (
        f"The claim that one continuous mode does as well as discrete softmax {how} here{partly}: "
        f"against it, in points, {_listed(gains)}. Their intervals reach down to "
        f"{_signed(lowest)}; to hold takes −{100 * _MARGIN:g} or more."
    )


def _several_modes(documents: Sequence[Document]) -> str:
    """Against one mode with as many functions; chosen at test time, of the same network."""
    every, called = score("accuracy"), names(documents)
    gains = {}
    for attention in attentions(documents):
        if one := _alone(attention):
            pair = (by_seed(documents, every, attention=name) for name in (attention, one))
            gains[called[attention]] = _compared(*pair)
    for attention, functions, penalty in _selections(documents):
        scores = by_seed(documents, _selected(penalty, "accuracy"), attention=attention)
        gain = _compared(scores, by_seed(documents, every, attention=attention))
        gains[_chosen_name(functions, penalty)] = gain
    known, partly = _told(gains)
    if not known:
        return ""
    highest = max(gain.mean + (gain.half or 0.0) for gain in known)
    if any(_way(gain) == "better" for gain in known):
        how = "did not hold"
    else:
        how = "held" if highest <= _MARGIN else "was neither confirmed nor refuted"
    return (
        f"That several modes bring no clear gain in accuracy {how} here{partly}: against one mode, "
        f"in points, {_listed(gains)}. Their intervals reach up to {_signed(highest)}; to hold "
        f"takes +{100 * _MARGIN:g} or less."
    )


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{100 * abs(value):.2f}"


def _penalties(documents: Sequence[Document]) -> str:
    """Of the network with the most functions. With the same fits, a penalty for each mode can only
    choose fewer of them: no more than a check."""
    penalties = [f"{penalty:g}" for penalty in PENALTIES]
    for attention, functions, _ in _selections(documents):
        shares = [by_seed(documents, _share(p, 0), attention=attention) for p in penalties]
        means = [estimate(list(share.values())).mean for share in shares]
        one = ", ".join(f"{100 * mean:.1f}" for mean in means)
        how = "follows from" if means == sorted(means) else "did not show here, against"
        return (
            f"That a larger λ chooses K* = 1 more often {how} the criterion: with N = {functions}, "
            f"for {one} % of the questions at λ = {', '.join(penalties)}."
        )
    return ""


def _sight(documents: Sequence[Document]) -> str:
    pair = (by_seed(documents, score("accuracy"), attention=name) for name in ("softmax", BLIND))
    gain = _compared(*pair)
    if gain is None:
        return ""
    way = {"better": "helped", "worse": "did harm"}
    how = way.get(_way(gain), "made no difference that can be told")
    return f"Seeing the picture {how}: discrete softmax − question only is {_points(gain)} points."
