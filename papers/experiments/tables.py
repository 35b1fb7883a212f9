"""Tables of runs: every cell a mean over seeds with its interval, and what it cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Listing
from papers.experiments.checkpoint import differences
from papers.experiments.runs import read_result
from papers.experiments.statistics import Estimate, estimate, paired

Document = dict[str, Any]
NOTHING = "–"


def read_results(folder: Path) -> list[Document]:
    """Of every run of a preset, by path: folder/data/variant-seed.json.

    A file of another name or of another folder than its settings say is refused; so are runs of one
    data set whose settings differ in more than rows and seeds of a table do.
    """
    documents = {path: read_result(path) for path in sorted(folder.glob("*/*.json"))}
    for path, document in documents.items():
        _check_place(path, document["settings"])
    first: dict[tuple[str, ...], Path] = {}
    for path, document in documents.items():
        settings = document["settings"]
        _check_alike(first.setdefault((settings["data"],), path), path, documents)
        same = first.setdefault((settings["data"], settings["variant"]), path)
        _check_rate(same, path, documents)
    return list(documents.values())


def _check_place(path: Path, settings: Document) -> None:
    name = f"{settings['variant']}-{settings['training']['seed']}.json"
    wanted = (*(str(settings[part]) for part in ("study", "preset", "data")), name)
    if Path(os.path.abspath(path)).parts[-4:] != wanted:
        raise ValueError(
            f"{path} holds the run {'/'.join(wanted)}, as its settings say; put it there or remove "
            "it"
        )


def _check_alike(first: Path, second: Path, documents: dict[Path, Document]) -> None:
    """Their settings, without what makes a row or a seed."""
    one, other = (_common(documents[path]["settings"]) for path in (first, second))
    _refuse(first, second, differences(one, other))


def _common(settings: Document) -> Document:
    training = {k: v for k, v in settings["training"].items() if k not in ("seed", "rate")}
    rows = ("attention", "variant", "sharing")
    return {k: v for k, v in settings.items() if k not in rows} | {"training": training}


def _check_rate(first: Path, second: Path, documents: dict[Path, Document]) -> None:
    """Of one row: what `_check_alike` leaves out must agree but for the seed."""
    one, other = (_row(documents[path]["settings"]) for path in (first, second))
    _refuse(first, second, differences(one, other))


def _row(settings: Document) -> Document:
    return settings | {"training": {"rate": settings["training"]["rate"]}}


def _refuse(first: Path, second: Path, changed: Sequence[str]) -> None:
    if changed:
        raise ValueError(
            f"{first} and {second} are of other settings: {'; '.join(changed)}. They make no table "
            "together; move one of them to another --out"
        )


def by_seed(
    documents: Iterable[Document], score: Callable[[Document], float | None], **wanted: Any
) -> dict[int, float]:
    """The score of each seed, of runs whose settings are as wanted; two of one seed are refused."""
    values: dict[int, float] = {}
    for document in documents:
        settings = document["settings"]
        if all(settings[name] == value for name, value in wanted.items()):
            value = score(document)
            seed = int(settings["training"]["seed"])
            if seed in values:
                raise ValueError(f"two runs of seed {seed} with {wanted}: remove one of them")
            if value is not None:
                values[seed] = value
    return values


def over_seeds(documents: Iterable[Document]) -> str:
    """What a cell is; one seed tells no interval."""
    seeds = {document["settings"]["training"]["seed"] for document in documents}
    return "one seed" if len(seeds) == 1 else "mean ± 95 % interval over seeds"


def filled(listing: Listing) -> Listing:
    """Without the columns, after the first, in which no row has anything."""
    rest = range(1, len(listing.header))
    used = [n for n in rest if not listing.rows or any(row[n] != NOTHING for row in listing.rows)]
    header, *rows = ([row[n] for n in (0, *used)] for row in (listing.header, *listing.rows))
    return Listing(listing.title, header, rows)


def cell(values: dict[int, float], percent: bool = True) -> str:
    return estimate(list(values.values())).text(percent) if values else NOTHING


def difference(gain: Estimate | None) -> str:
    """In points; a star where the interval, of three seeds or more, leaves zero out."""
    if gain is None:
        return NOTHING
    sign = "+" if gain.mean >= 0 else "−"
    spread = "" if gain.half is None else f" ± {100 * gain.half:.2f}"
    star = " *" if gain.shows else ""
    return f"{sign}{100 * abs(gain.mean):.2f}{spread}{star}"


def against(scores: dict[int, float], base: dict[int, float]) -> str:
    return difference(paired(scores, base))


def cost(documents: Sequence[Document], title: str, names: dict[str, str]) -> Listing:
    """Of each variant on each data set, a mean over its runs."""
    header = ("", "data", "runs", "parameters", "steps", "seconds a run", "10¹² operations a run")
    groups: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        settings = document["settings"]
        groups.setdefault((settings["data"], settings["variant"]), []).append(document)
    ordered = sorted(groups, key=lambda key: (key[0], _place(key[1], names)))
    rows = [
        (names.get(variant, variant), data, *_costs(groups[data, variant]))
        for data, variant in ordered
    ]
    return Listing(title, header, rows)


def _place(variant: str, names: dict[str, str]) -> tuple[int, str]:
    known = list(names)
    return (known.index(variant) if variant in known else len(known), variant)


def _costs(documents: Sequence[Document]) -> tuple[str, ...]:
    seconds = estimate([document["cost"]["seconds"] for document in documents]).mean
    return (
        str(len(documents)),
        f"{_same(documents, 'parameters'):,.0f}",
        f"{_same(documents, 'steps'):,.0f}",
        f"{seconds:.0f}",
        f"{_same(documents, 'flops') / 1e12:#.3g}".rstrip("."),
    )


def _same(documents: Sequence[Document], name: str) -> float:
    """What runs that differ in their seed alone have in common; a mean where they stop early."""
    costs = [float(document["cost"][name]) for document in documents]
    settings = documents[0]["settings"]
    if len(set(costs)) > 1 and settings["training"].get("patience") is None:
        told = ", ".join(f"{value:g}" for value in sorted(set(costs)))
        raise ValueError(
            f"runs of {settings['variant']} on {settings['data']} have different {name}: {told}; "
            "make them again with one version"
        )
    return estimate(costs).mean
