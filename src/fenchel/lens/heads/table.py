"""An audit's sums as a table: one row a head."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel._version import __version__
from fenchel.lens.families import Kind
from fenchel.lens.heads.columns import Column, columns, root_of, spectrum
from fenchel.lens.heads.examples import Example
from fenchel.lens.heads.tallies import REACH, Tallies

Place = tuple[Kind, int]
_DIGITS = 8  # significant ones in the document


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """tallies: sums by "kind/layer/name", the first axis the head. heads: which heads of each
    attention. facts: of the model, its inputs and the settings. examples: texts to be shown."""

    tallies: Tallies
    heads: dict[Place, list[int]]
    facts: dict[str, Any]
    examples: list[Example]

    def __repr__(self) -> str:
        model, inputs = self.facts["model"]["name"], self.facts["inputs"]
        heads = sum(map(len, self.heads.values()))
        shown = f"{heads} heads, {len(self.columns())} columns, {inputs['count']} {inputs['what']}"
        return f"Audit({model}: {shown})"

    def columns(self) -> list[Column]:
        """Those that this audit holds, in the order of presentation."""
        there = {name.rpartition("/")[2] for name in self.tallies}
        alphas = self.facts["settings"]["alphas"]
        return [column for column in columns(tuple(alphas)) if there.issuperset(column.needs)]

    def rows(self) -> list[dict[str, Any]]:
        """One for each kind, layer and head; kinds and layers in the order of the model. A number
        that the head does not have is NaN."""
        found: list[dict[str, Any]] = []
        shown = self.columns()
        for (kind, layer), heads in self.heads.items():
            here = self.of(kind, layer)
            made = {column.name: _value(column, here, len(heads)) for column in shown}
            for number, head in enumerate(heads):
                numbers = {name: float(values[number]) for name, values in made.items()}
                found.append({"kind": kind, "layer": layer, "head": head, **numbers})
        return found

    def of(self, kind: str, layer: int) -> Tallies:
        """The sums of one attention, by name."""
        prefix = f"{kind}/{layer}/"
        found = {
            name.removeprefix(prefix): value
            for name, value in self.tallies.items()
            if name.startswith(prefix)
        }
        if not found:
            there = ", ".join(f"{k} {n}" for k, n in self.heads)
            raise KeyError(f"no {kind} layer {layer}; there are: {there}")
        return found

    def to_csv(self) -> str:
        """With a header; numbers in full, nothing where there is none."""
        names = ["kind", "layer", "head", *(column.name for column in self.columns())]
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows():
            writer.writerow({name: _written(value) for name, value in row.items()})
        return buffer.getvalue()

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of `rows`; needs pandas."""
        try:
            import pandas
        except ImportError as missing:
            raise ImportError("to_pandas needs pandas; install it, or use to_csv") from missing
        return pandas.DataFrame(self.rows())

    def plot(self, column: str, kind: str | None = None) -> Any:
        """A matplotlib figure: the column as a map, layers down, heads across."""
        from fenchel.lens.page import map_figure

        known = [one.name for one in self.columns()]
        if column not in known:
            raise ValueError(f"no column {column!r}; there are: {', '.join(known)}")
        return map_figure(self.document(), column, kind)

    def report(self, folder: str | Path) -> Path:
        """Write report.html, which needs nothing else, into the folder; its path."""
        from fenchel.lens.page import write

        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        return write(self.document(), where)

    def recipe(self) -> dict[str, Any] | None:
        """The alphas of every head, as `fenchel.hf.convert(model, recipe)` takes them; None if it
        was not asked for."""
        total = {
            name.rpartition("/")[2]: v for name, v in self.tallies.items() if "recipe/" in name
        }
        if not total:
            return None
        model = self.facts["model"]
        alphas = {
            path: self._alphas(place, model["heads"][place])
            for place, path in model["paths"].items()
        }
        moved = {
            name: {
                "texts": int(total[f"{name}_texts"]),
                "root_mean_square": _short(
                    float((total[f"{name}_square"] / total[f"{name}_texts"]).sqrt())
                ),
                "largest": _short(float(total[f"largest_{name}"])),
            }
            for name in ("probe", "unseen")
            if f"{name}_texts" in total
        }
        return {
            "format": "fenchel-recipe-1",
            "model": model["name"],
            "tolerance": self.facts["settings"]["tolerance"],
            "moved": moved,
            "kept": _mean([row["recipe_kept"] for row in self.rows()]),
            "alphas": alphas,
        }

    def _alphas(self, place: str, count: int) -> list[float]:
        """Of all heads of an attention; 1 where nobody asked."""
        kind, _, layer = place.partition("/")
        every = [1.0] * count
        found = {f"{k}/{n}": heads for (k, n), heads in self.heads.items()}
        for number, head in enumerate(found.get(place, [])):
            every[head] = _short(float(self.of(kind, int(layer))["largest_recipe_alpha"][number]))
        return every

    def summary(self) -> dict[str, Any]:
        """The facts, and of every column the median, least and largest over heads."""
        rows = self.rows()
        numbers = {
            column.name: _spread([row[column.name] for row in rows]) for column in self.columns()
        }
        shown = {key: dict(value) for key, value in self.facts.items()}
        shown["inputs"] |= self._counts()
        recipe = self.recipe()
        own = None if recipe is None else {k: recipe[k] for k in ("tolerance", "moved", "kept")}
        return {
            "format": 1,
            "fenchel": __version__,
            **shown,
            "heads": len(rows),
            "columns": numbers,
            "everywhere": self.everywhere(),
            "recipe": own,
        }

    def _counts(self) -> dict[str, int]:
        names = {"tokens": "inputs/0/tokens", "truncated": "inputs/0/cut"}
        return {key: int(self.tallies[name]) for key, name in names.items() if name in self.tallies}

    def everywhere(self) -> list[dict[str, Any]]:
        """The whole model switched, for every alpha."""
        made = []
        rows = self.rows()
        for alpha in (f"{alpha:g}" for alpha in self.facts["settings"]["alphas"]):
            if f"model/0/model_apart_{alpha}" not in self.tallies:
                continue
            here = self.of("model", 0)
            kl = here.get(f"model_kl_{alpha}")
            kept = [row[f"kept_{alpha}"] for row in rows if f"kept_{alpha}" in row]
            made.append(
                {
                    "alpha": float(alpha),
                    "cosine": _short(
                        float(here[f"model_cosine_{alpha}"] / here[f"model_texts_{alpha}"])
                    ),
                    "moved": _short(
                        float(root_of(f"model_apart_{alpha}", f"model_size_{alpha}")(here))
                    ),
                    "kl": None if kl is None else _short(float(kl / here[f"model_tokens_{alpha}"])),
                    "kept": _mean(kept),
                }
            )
        return made

    def document(self) -> dict[str, Any]:
        """All that the report shows, as JSON can hold it."""
        return {
            **{
                name: self.summary()[name]
                for name in ("format", "fenchel", "model", "inputs", "settings")
            },
            "columns": [_described(column) for column in self.columns()],
            "rows": [{k: _json(v) for k, v in row.items()} for row in self.rows()],
            **self._shapes(),
            "everywhere": self.everywhere(),
            "recipe": self._recipe_shown(),
            "examples": [dataclasses.asdict(example) for example in self.examples],
        }

    def _recipe_shown(self) -> dict[str, Any] | None:
        recipe = self.recipe()
        if recipe is None:
            return None
        heads = [
            {
                "kind": row["kind"],
                "layer": row["layer"],
                "head": row["head"],
                "alpha": _json(row["recipe_alpha"]),
                "kept": _json(row["recipe_kept"]),
            }
            for row in self.rows()
        ]
        return {name: recipe[name] for name in ("tolerance", "moved", "kept")} | {"heads": heads}

    def _shapes(self) -> dict[str, dict[str, Any]]:
        """What is more than a number a head, by "kind/layer"."""
        made: dict[str, dict[str, Any]] = {
            name: {} for name in ("histograms", "agreement", "spectra", "preference", "offsets")
        }
        reach = list(range(-REACH, REACH + 1))
        for kind, layer in self.heads:
            here, place = self.of(kind, layer), f"{kind}/{layer}"
            if "agreement" in here:
                names = ("entropy_share", "top_weight")
                made["histograms"][place] = {
                    n: here[f"{n}_histogram"].long().tolist() for n in names
                }
                cosines = here["agreement"] / here["queries"].clamp_min(1)[:, None]
                made["agreement"][place] = _listed(cosines)
            if "mass_by_offset" in here:
                mass = here["mass_by_offset"] / here["queries"].clamp_min(1)[:, None]
                made["offsets"][place] = {"offsets": reach, "mass": _listed(mass)}
            if "fisher" in here:
                made["spectra"][place] = _listed(spectrum(here))
            if "preference_pairs" in here:
                made["preference"][place] = {"offsets": reach, "log": _listed(preference(here))}
        return made


def preference(here: Tallies) -> Tensor:
    """log u(offset) - log u(0), mean over pairs; NaN where there is none. (H, 2 REACH + 1)"""
    mean = here["preference_by_offset"] / here["preference_pairs"]
    return mean - mean[:, REACH : REACH + 1]


def _value(column: Column, here: Tallies, heads: int) -> Tensor:
    """(H); NaN where this attention has no such number, as cross-attention has no distance."""
    if not all(name in here for name in column.needs):
        return torch.full((heads,), torch.nan)
    return column.value(here)


def _described(column: Column) -> dict[str, Any]:
    names = ("name", "title", "unit", "group", "explain", "scale", "of")
    return {name: getattr(column, name) for name in names}


def _spread(values: list[float]) -> dict[str, float | None]:
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return {"median": None, "least": None, "largest": None}
    middle = torch.tensor(known, dtype=torch.float64).quantile(0.5)
    return {
        "median": _short(float(middle)),
        "least": _short(known[0]),
        "largest": _short(known[-1]),
    }


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return _short(sum(known) / len(known)) if known else None


def _listed(x: Tensor) -> Any:
    if x.ndim:
        return [_listed(part) for part in x]
    return _json(float(x))


def _json(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return _short(value) if math.isfinite(value) else None


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _written(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return repr(value) if math.isfinite(value) else ""
