"""The document of an audit: what the audit writes, and what its page and its figures read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fenchel.lens.records import from_json, to_json

FORMAT = 1
Table = list[list[float | None]]  # None: not measured
_OPTIONAL = {"optional": True}


@dataclass(frozen=True)
class ModelFacts:
    """paths and heads by "kind/layer": the module within the model, and how many heads it has."""

    name: str
    type: str
    class_name: str = field(metadata={"key": "class"})
    parameters: int
    paths: dict[str, str]
    heads: dict[str, int]


@dataclass(frozen=True)
class InputFacts:
    """What the model was shown. what: "texts" or "images". probe: how many the slow measures saw.

    chunk: items of a unit of work. longest: tokens of a text at most. tokens, truncated: of all
    items, and how many items were cut; None where nobody counted.
    """

    what: str
    count: int
    probe: int
    chunk: int
    longest: int | None
    tokens: int | None = field(default=None, metadata=_OPTIONAL)
    truncated: int | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True)
class SettingsFacts:
    """What the audit was asked for; see `fenchel.lens.AuditSettings`.

    dtype, threads, longest: of the command; None where the audit did not come from it.
    """

    measures: tuple[str, ...]
    alphas: tuple[float, ...]
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    probe: int
    tolerance: float
    trials: int
    dtype: str | None = field(default=None, metadata=_OPTIONAL)
    threads: int | None = field(default=None, metadata=_OPTIONAL)
    longest: int | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True)
class ColumnFacts:
    """A column of the table. of: the texts it is counted over, all or the probe."""

    name: str
    title: str
    unit: str
    group: str
    explain: str
    scale: str
    of: str


@dataclass(frozen=True)
class Row:
    """One head and its numbers, by the name of the column."""

    kind: str
    layer: int
    head: int
    numbers: dict[str, float | None] = field(metadata={"flat": True})

    def get(self, column: str) -> float | None:
        """None: not measured."""
        return self.numbers.get(column)

    def __getitem__(self, column: str) -> float:
        """A number that was measured."""
        value = self.get(column)
        if value is None:
            raise KeyError(f"{self.kind} layer {self.layer} head {self.head} has no {column}")
        return value


@dataclass(frozen=True)
class Histograms:
    """Of each head, how many queries fall into each bin of [0, 1]."""

    entropy_share: list[list[int]]
    top_weight: list[list[int]]


@dataclass(frozen=True)
class OffsetMass:
    """The weight of each head by key - query."""

    offsets: list[int]
    mass: Table


@dataclass(frozen=True)
class OffsetPreference:
    """The log-preference of each head by key - query."""

    offsets: list[int]
    log: Table


@dataclass(frozen=True)
class SwitchedModel:
    """The whole model on entmax: how far its output moves, and which share of links it keeps."""

    alpha: float
    cosine: float
    moved: float
    kl: float | None
    kept: float | None


@dataclass(frozen=True)
class Moved:
    """How far a recipe moves the embeddings of some texts, relative to their lengths."""

    texts: int
    root_mean_square: float
    largest: float


@dataclass(frozen=True)
class RecipeFacts:
    """moved: of the texts it was found on ("probe"), and of those it has not met ("unseen")."""

    tolerance: float
    moved: dict[str, Moved]
    kept: float | None


@dataclass(frozen=True)
class RecipeHead:
    kind: str
    layer: int
    head: int
    alpha: float | None
    kept: float | None


@dataclass(frozen=True)
class ShownRecipe:
    """As `RecipeFacts`, with the alpha of every head."""

    tolerance: float
    moved: dict[str, Moved]
    kept: float | None
    heads: list[RecipeHead]


@dataclass(frozen=True)
class Links:
    """The strongest links of the heads of one attention, in 16 bits, base 64.

    to, weight (H, Q, width): the keys, and their weights. received (H, n): the mean weight of each
    key. gained (H, n): what each key would gain by a step down the gradient; half is nothing.
    """

    width: int
    queries: int
    keys: int
    to: str
    weight: str
    received: str
    gained: str | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True)
class Picture:
    """data: as an address that holds the image. first: how many tokens come before the patches."""

    data: str
    rows: int
    columns: int
    first: int


@dataclass(frozen=True)
class Example:
    """One text or image. tokens and special (their places) by side, links by "kind/layer"."""

    text: str
    tokens: dict[str, list[str]]
    special: dict[str, list[int]]
    image: Picture | None
    links: dict[str, Links]


@dataclass(frozen=True)
class Document:
    """All that the page shows. What is more than a number per head stands by "kind/layer"."""

    format: int
    fenchel: str
    model: ModelFacts
    inputs: InputFacts
    settings: SettingsFacts
    columns: list[ColumnFacts]
    rows: list[Row]
    histograms: dict[str, Histograms]
    agreement: dict[str, Table]
    spectra: dict[str, Table]
    preference: dict[str, OffsetPreference]
    offsets: dict[str, OffsetMass]
    everywhere: list[SwitchedModel]
    recipe: ShownRecipe | None
    examples: list[Example]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Document:
        """What `to_json` wrote, with this version or another of the same format."""
        version = data.get("format")
        if version != FORMAT:
            raise ValueError(
                f"document must have format {FORMAT}, got {version!r}; audit the model again with "
                "this version, or draw the page with the version that made the document"
            )
        return from_json(cls, data)

    def to_json(self) -> dict[str, Any]:
        written: dict[str, Any] = to_json(self)
        return written


@dataclass(frozen=True)
class Spread:
    """Of a column over the heads; None where no head has the number."""

    median: float | None
    least: float | None
    largest: float | None


@dataclass(frozen=True)
class Summary:
    """The facts, and the spread of every column."""

    format: int
    fenchel: str
    model: ModelFacts
    inputs: InputFacts
    settings: SettingsFacts
    heads: int
    columns: dict[str, Spread]
    everywhere: list[SwitchedModel]
    recipe: RecipeFacts | None

    def to_json(self) -> dict[str, Any]:
        written: dict[str, Any] = to_json(self)
        return written
