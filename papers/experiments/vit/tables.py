"""Tables 1 and 2 of the paper, in its layout, from the runs that are stored."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables import Listing
from papers.experiments.statistics import ENOUGH, paired
from papers.experiments.tables import Document, against, by_seed, cell, cost, over_seeds

NAMES = {
    "softmax": "ViT",
    "transport": "OT-ViT",
    "transport-head": "OT-ViT, γ of a head",
    "entmax": "ViT, entmax-1.5",
    "sparsemax": "ViT, sparsemax",
    "continuous": "ViT, continuous sparsemax",
}
_EQUAL = 1e-12  # an interval below this is none: all differences are equal but for rounding
_DATA = ("fashion-mnist", "cifar-10", "cifar-100", "toy")


def listings(documents: Sequence[Document]) -> list[Listing]:
    """Accuracies by data set, differences to ViT, accuracies by rate, and costs."""
    if not documents:
        return []
    usual = [d for d in documents if "-rate-" not in d["settings"]["variant"]]
    tables = [by_data(usual), _differences(usual)]
    if len(usual) < len(documents):
        tables.append(_by_rate(documents))
    return [*(listing for listing in tables if listing.rows), cost(usual, "Cost", NAMES)]


def accuracy(document: Document) -> float:
    value: float = document["scores"]["test accuracy"]
    return value


def _present(documents: Sequence[Document], name: str, order: Sequence[str]) -> list[str]:
    """Those that are there, in this order; what it does not know comes last."""
    seen = {document["settings"][name] for document in documents}
    return [*(value for value in order if value in seen), *sorted(seen.difference(order))]


def _name(attention: str) -> str:
    return NAMES.get(attention, attention)


def by_data(documents: Sequence[Document]) -> Listing:
    sets = _present(documents, "data", _DATA)
    rows = [
        (_name(a), *(cell(by_seed(documents, accuracy, attention=a, data=d)) for d in sets))
        for a in _present(documents, "attention", list(NAMES))
    ]
    title = f"Table 2: test accuracy in per cent, {over_seeds(documents)}"
    return Listing(title, ("", *sets), rows)


def _differences(documents: Sequence[Document]) -> Listing:
    sets = _present(documents, "data", _DATA)
    rows = []
    for attention in _present(documents, "attention", list(NAMES)):
        if attention == "softmax":
            continue
        cells = []
        for data in sets:
            base = by_seed(documents, accuracy, attention="softmax", data=data)
            cells.append(
                against(by_seed(documents, accuracy, attention=attention, data=data), base)
            )
        rows.append((f"{_name(attention)} − ViT", *cells))
    title = "Difference to ViT with the same seed, in points (* its interval leaves 0 out)"
    return Listing(title, ("", *sets), rows)


def _by_rate(documents: Sequence[Document]) -> Listing:
    """Of the data set on which the rate was searched for."""
    data = next(d["settings"]["data"] for d in documents if "-rate-" in d["settings"]["variant"])
    of_data = [document for document in documents if document["settings"]["data"] == data]
    rates = sorted({_rate(document) for document in of_data}, reverse=True)
    rows = [
        (_name(a), *(_at_rate(of_data, a, rate) for rate in rates))
        for a in _present(of_data, "attention", list(NAMES))
    ]
    title = f"Table 1: test accuracy on {data} in per cent, by rate of learning"
    return Listing(title, ("", *(f"{rate:g}" for rate in rates)), rows)


def _rate(document: Document) -> float:
    value: float = document["settings"]["training"]["rate"]
    return value


def _at_rate(documents: Sequence[Document], attention: str, rate: float) -> str:
    of_rate = [document for document in documents if _rate(document) == rate]
    return cell(by_seed(of_rate, accuracy, attention=attention))


def verdict(documents: Sequence[Document], data: str) -> str:
    """Whether OT-ViT was better than ViT on this data, as the paper says, in a sentence."""
    base = by_seed(documents, accuracy, variant="softmax", data=data)
    gain = paired(by_seed(documents, accuracy, variant="transport", data=data), base)
    if gain is None or gain.half is None or gain.count < ENOUGH or gain.half < _EQUAL:
        return (
            "Nothing can be said yet: that takes three seeds with both ViT and OT-ViT, and "
            "differences that vary."
        )
    points = f"{100 * abs(gain.mean):.2f} ± {100 * gain.half:.2f} points"
    if gain.shows and gain.mean > 0:
        said = f"The claim held here: OT-ViT was better than ViT by {points}"
    elif gain.shows:
        said = f"The claim did not hold here: OT-ViT was worse than ViT by {points}"
    else:
        sign = "+" if gain.mean >= 0 else "−"
        said = (
            "The claim was neither confirmed nor refuted here: no difference can be told, "
            f"OT-ViT − ViT is {sign}{points}"
        )
    return f"{said} ({gain.count} paired seeds)."
