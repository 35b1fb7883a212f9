"""An audit's sums as a table: one row a head, means over queries."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fenchel.lens.tallies import Tallies

_WHOLE = ("count", "queries", "texts", "deviation_count", "largest_bound")  # as they are
_SHAPED = ("_histogram", "agreement")  # more than a number a head
_OVER = {"bound": "texts", "deviation": "deviation_count"}  # the rest over queries


@dataclass(frozen=True, eq=False)
class Audit:
    """tallies: by "kind/layer/name", the first axis the head."""

    tallies: Tallies

    def rows(self) -> list[dict[str, Any]]:
        """One for each kind, layer and head; kinds and layers in the order of the model."""
        found: list[dict[str, Any]] = []
        for kind, layer in self.places():
            here = self.of(kind, layer)
            columns = {
                name: _mean(name, here)
                for name in sorted(here)
                if not name.endswith(_SHAPED) and not name.startswith("square")
            }
            for alpha in _alphas(here):
                share = here[f"square_{alpha}"] / here["square"].clamp_min(1e-300)
                columns[f"moved_{alpha}"] = share.sqrt()
            for head in range(len(here["queries"])):
                numbers = {name: float(values[head]) for name, values in columns.items()}
                found.append({"kind": kind, "layer": layer, "head": head, **numbers})
        return found

    def places(self) -> list[tuple[str, int]]:
        """(kind, layer), each once."""
        parts = (name.split("/") for name in self.tallies)
        return sorted({(kind, int(layer)) for kind, layer, _ in parts})

    def of(self, kind: str, layer: int) -> Tallies:
        """The sums of one layer, by name."""
        prefix = f"{kind}/{layer}/"
        found = {
            name.removeprefix(prefix): value
            for name, value in self.tallies.items()
            if name.startswith(prefix)
        }
        if not found:
            there = ", ".join(f"{k} {n}" for k, n in self.places())
            raise KeyError(f"no {kind} layer {layer}; there are: {there}")
        return found

    def to_csv(self) -> str:
        """With a header; numbers in full."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, names, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows({name: _digits(value) for name, value in row.items()} for row in rows)
        return buffer.getvalue()

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of `rows`; needs pandas."""
        try:
            import pandas
        except ImportError as missing:
            raise ImportError("to_pandas needs pandas; install it, or use to_csv") from missing
        return pandas.DataFrame(self.rows())


def _mean(name: str, here: Tallies) -> Tensor:
    if name in _WHOLE:
        return here[name]
    over = next((count for start, count in _OVER.items() if name.startswith(start)), "queries")
    return here[name] / here[over].clamp_min(1)


def _alphas(here: Tallies) -> list[str]:
    return [name.removeprefix("square_") for name in here if name.startswith("square_")]


def _digits(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else value
