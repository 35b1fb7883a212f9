"""Tables of runs: every cell a mean over seeds with its interval, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fenchel.bench.tables import Listing
from fenchel.experiments.runs import read_result
from fenchel.experiments.statistics import Estimate, estimate, paired

Document = dict[str, Any]
NOTHING = "–"


def read_results(folder: Path) -> list[Document]:
    """Of every run in the folder and below, by path."""
    return [read_result(path) for path in sorted(folder.rglob("*-*.json")) if _is_result(path)]


def _is_result(path: Path) -> bool:
    """A run's own folder, beside its result, holds checkpoints."""
    run = path.parent.with_name(f"{path.parent.name}.json")
    return not run.exists() and not path.name.startswith("step-")


def by_seed(
    documents: Iterable[Document], score: Callable[[Document], float | None], **wanted: Any
) -> dict[int, float]:
    """The score of each seed, of runs whose settings are as wanted."""
    found = {}
    for document in documents:
        settings = document["settings"]
        if all(settings[name] == value for name, value in wanted.items()):
            value = score(document)
            if value is not None:
                found[int(settings["training"]["seed"])] = value
    return found


def cell(values: dict[int, float], percent: bool = True) -> str:
    return estimate(list(values.values())).text(percent) if values else NOTHING


def difference(found: Estimate | None) -> str:
    """In points; a star where the interval leaves zero out."""
    if found is None:
        return NOTHING
    sign = "+" if found.mean >= 0 else "−"
    spread = "" if found.half is None else f" ± {100 * found.half:.2f}"
    star = " *" if found.beyond_zero else ""
    return f"{sign}{100 * abs(found.mean):.2f}{spread}{star}"


def against(own: dict[int, float], base: dict[int, float]) -> str:
    return difference(paired(own, base))


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
    first = documents[0]["cost"]
    seconds = estimate([document["cost"]["seconds"] for document in documents]).mean
    return (
        str(len(documents)),
        f"{first['parameters']:,}",
        f"{first['steps']:,}",
        f"{seconds:.0f}",
        f"{first['flops'] / 1e12:.1f}",
    )
