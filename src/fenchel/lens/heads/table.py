"""An audit's sums as a table: one row per head."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel._version import __version__
from fenchel.lens.document import (
    FORMAT,
    ColumnFacts,
    Document,
    Example,
    Histograms,
    InputFacts,
    Moved,
    OffsetMass,
    OffsetPreference,
    RecipeFacts,
    RecipeHead,
    Row,
    ShownRecipe,
    Spread,
    Summary,
    SwitchedModel,
    Table,
)
from fenchel.lens.families import Kind, place_name
from fenchel.lens.heads.columns import (
    Column,
    columns,
    mean_agreement,
    relative_root,
    spectrum,
)
from fenchel.lens.heads.counting import REACH
from fenchel.lens.heads.facts import AuditFacts
from fenchel.lens.heads.tallies import (
    AttentionTally,
    MoveTally,
    OutputTally,
    PreferenceTally,
    Tallies,
    WeightTally,
)
from fenchel.lens.records import to_json

Place = tuple[Kind, int]
_DIGITS = 8  # significant ones in the document
_OFFSETS = list(range(-REACH, REACH + 1))
_RECIPE_FORMAT = "fenchel-recipe-1"


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """heads: which heads of each attention. facts: of the model, its inputs and the settings.
    examples: texts to be shown."""

    tallies: Tallies
    heads: dict[Place, list[int]]
    facts: AuditFacts
    examples: list[Example]

    def __repr__(self) -> str:
        inputs = self.facts.inputs
        heads = sum(map(len, self.heads.values()))
        shown = f"{heads} heads, {len(self.columns())} columns, {inputs.count} {inputs.what}"
        return f"Audit({self.facts.model.name}: {shown})"

    def columns(self) -> list[Column]:
        """Those that this audit holds, in the order of presentation."""
        return list(self._values)

    @cached_property
    def _values(self) -> dict[Column, dict[Place, Tensor]]:
        """The numbers of each column, (H) for each attention that has them."""
        values = {}
        for column in columns(self.facts.settings.alphas):
            by_place = {place: column.value(self.of(*place)) for place in self.heads}
            measured = {place: x for place, x in by_place.items() if x is not None}
            if measured:
                values[column] = measured
        return values

    def rows(self) -> list[dict[str, Any]]:
        """One for each kind, layer and head; kinds and layers in the order of the model. A number
        that the head does not have is NaN."""
        return [
            {"kind": kind, "layer": layer, "head": head}
            | {
                column.name: float(values[kind, layer][number])
                if (kind, layer) in values
                else math.nan
                for column, values in self._values.items()
            }
            for (kind, layer), heads in self.heads.items()
            for number, head in enumerate(heads)
        ]

    def of(self, kind: str, layer: int) -> AttentionTally:
        """The sums of one attention."""
        tally = self.tallies.attentions.get(place_name(kind, layer))
        if tally is None:
            places = ", ".join(f"{k} {n}" for k, n in self.heads)
            raise KeyError(f"no {kind} layer {layer}; there are: {places}")
        return tally

    def to_csv(self) -> str:
        """With a header; numbers in full, nothing where there is none."""
        names = ["kind", "layer", "head", *(column.name for column in self.columns())]
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows():
            writer.writerow({name: _cell(value) for name, value in row.items()})
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

        names = [one.name for one in self.columns()]
        if column not in names:
            raise ValueError(f"no column {column!r}; there are: {', '.join(names)}")
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
        facts = self._recipe_facts()
        if facts is None:
            return None
        model = self.facts.model
        alphas = {path: self._alphas(name) for name, path in model.paths.items()}
        head = {"format": _RECIPE_FORMAT, "model": model.name}
        return {**head, **to_json(facts), "alphas": alphas}

    def _recipe_facts(self) -> RecipeFacts | None:
        if not self.tallies.recipe:
            return None
        moves = self.tallies.recipe
        order: tuple[str, ...] = ("probe", "unseen")
        moved = {name: _summarise_moves(moves[name]) for name in order if name in moves}
        kept = _mean([row["recipe_kept"] for row in self.rows()])
        return RecipeFacts(self.facts.settings.tolerance, moved, kept)

    def _alphas(self, name: str) -> list[float]:
        """Of all heads of an attention; 1 where nobody asked. name: "kind/layer"."""
        alphas = [1.0] * self.facts.model.heads[name]
        heads = {place_name(*place): heads for place, heads in self.heads.items()}
        tally = self.tallies.attentions.get(name)
        if tally is not None and tally.recipe is not None:
            for head, alpha in zip(heads[name], tally.recipe.alpha.tolist(), strict=True):
                alphas[head] = _round(alpha)
        return alphas

    def summary(self) -> Summary:
        """The facts, and of every column the median, least and largest over heads."""
        rows = self.rows()
        return Summary(
            format=FORMAT,
            fenchel=__version__,
            model=self.facts.model,
            inputs=self._inputs(),
            settings=self.facts.all_settings(),
            heads=len(rows),
            columns={c.name: _spread([row[c.name] for row in rows]) for c in self.columns()},
            everywhere=self.everywhere(),
            recipe=self._recipe_facts(),
        )

    def _inputs(self) -> InputFacts:
        counts = self.tallies.inputs
        if counts is None:
            return self.facts.inputs
        return replace(self.facts.inputs, tokens=int(counts.tokens), truncated=int(counts.cut))

    def everywhere(self) -> list[SwitchedModel]:
        """The whole model switched, for every alpha."""
        rows = self.rows()
        tallies = self.tallies.everywhere
        return [
            _switched_model(alpha, tallies[alpha], [row.get(f"kept_{alpha}") for row in rows])
            for alpha in (f"{alpha:g}" for alpha in self.facts.settings.alphas)
            if alpha in tallies
        ]

    def document(self) -> Document:
        """All that the report shows."""
        rows = [_row(row) for row in self.rows()]
        tallies = {place_name(*place): self.of(*place) for place in self.heads}
        weights = {name: t.weights for name, t in tallies.items() if t.weights is not None}
        return Document(
            format=FORMAT,
            fenchel=__version__,
            model=self.facts.model,
            inputs=self._inputs(),
            settings=self.facts.all_settings(),
            columns=[_describe(column) for column in self.columns()],
            rows=rows,
            histograms={name: _histograms(tally) for name, tally in weights.items()},
            agreement={name: _to_table(mean_agreement(tally)) for name, tally in weights.items()},
            spectra={
                name: _to_table(spectrum(t.fisher))
                for name, t in tallies.items()
                if t.fisher is not None
            },
            preference={
                name: OffsetPreference(_OFFSETS, _to_table(log_preference(t.preference)))
                for name, t in tallies.items()
                if t.preference is not None
            },
            offsets={
                name: OffsetMass(
                    _OFFSETS, _to_table(t.offsets.mass / t.offsets.queries.clamp_min(1)[:, None])
                )
                for name, t in tallies.items()
                if t.offsets is not None
            },
            everywhere=self.everywhere(),
            recipe=self._shown_recipe(rows),
            examples=self.examples,
        )

    def _shown_recipe(self, rows: list[Row]) -> ShownRecipe | None:
        facts = self._recipe_facts()
        if facts is None:
            return None
        heads = [
            RecipeHead(
                row.kind, row.layer, row.head, row.get("recipe_alpha"), row.get("recipe_kept")
            )
            for row in rows
        ]
        return ShownRecipe(facts.tolerance, facts.moved, facts.kept, heads)


def log_preference(tally: PreferenceTally) -> Tensor:
    """log u(offset) - log u(0), mean over pairs; NaN where there is none. (H, 2 REACH + 1)"""
    mean = tally.by_offset / tally.pairs
    return mean - mean[:, REACH : REACH + 1]


def _row(row: dict[str, Any]) -> Row:
    numbers = {name: x for name, x in row.items() if name not in ("kind", "layer", "head")}
    rounded = {name: _number(x) for name, x in numbers.items()}
    return Row(row["kind"], row["layer"], row["head"], rounded)


def _histograms(tally: WeightTally) -> Histograms:
    counts = (tally.entropy_share_histogram, tally.top_weight_histogram)
    return Histograms(*(x.long().tolist() for x in counts))


def _switched_model(alpha: str, tally: OutputTally, kept: list[float | None]) -> SwitchedModel:
    """kept: of every head, where it was measured."""
    kl = None if tally.kl is None or tally.tokens is None else tally.kl / tally.tokens
    return SwitchedModel(
        alpha=float(alpha),
        cosine=_round(float(tally.cosine / tally.texts)),
        moved=_round(float(relative_root(tally.apart, tally.size))),
        kl=None if kl is None else _round(float(kl)),
        kept=_mean([share for share in kept if share is not None]),
    )


def _summarise_moves(tally: MoveTally) -> Moved:
    return Moved(
        texts=int(tally.texts),
        root_mean_square=_round(float((tally.square / tally.texts).sqrt())),
        largest=_round(float(tally.largest)),
    )


def _describe(column: Column) -> ColumnFacts:
    return ColumnFacts(
        name=column.name,
        title=column.title,
        unit=column.unit,
        group=column.group,
        explain=column.explain,
        scale=column.scale,
        of=column.of,
    )


def _spread(values: list[float]) -> Spread:
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return Spread(None, None, None)
    middle = torch.tensor(finite, dtype=torch.float64).quantile(0.5)
    return Spread(_round(float(middle)), _round(finite[0]), _round(finite[-1]))


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return _round(sum(finite) / len(finite)) if finite else None


def _to_table(table: Tensor) -> Table:
    return [[_number(x) for x in row] for row in table.tolist()]


def _number(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return _round(value) if math.isfinite(value) else None


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return repr(value) if math.isfinite(value) else ""
