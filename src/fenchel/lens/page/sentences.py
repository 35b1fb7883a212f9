"""What an audit says in a few sentences, each linked to the head or the map it is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple
from urllib.parse import quote

from fenchel.lens.document import Document, Moved, Row, ShownRecipe, Table

MOST = 6  # more than six sentences are not read
_HALF = 0.5
_LITTLE = 0.05  # a share of links that is hardly worth a recipe
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Piece(NamedTuple):
    """A part of a sentence. link: what follows the # of an address, if it leads anywhere."""

    text: str
    link: str | None = None


Sentence = tuple[Piece, ...]


def make_sentences(document: Document) -> list[Sentence]:
    """At most six; those whose numbers were not measured are left out."""
    makers = (
        _on_special_tokens,
        _on_support,
        _on_extremes,
        _on_switched_model,
        _on_bounds,
        _on_recipe,
        _on_agreement,
    )
    return [sentence for make in makers for sentence in make(document)][:MOST]


def place(row: Row, document: Document) -> Piece:
    """layer 3 head 7, with its kind where there are several, linked to its page."""
    several = len({other.kind for other in document.rows}) > 1
    kind = f"{row.kind} " if several else ""
    return Piece(f"{kind}layer {row.layer} head {row.head}", f"{row.kind}/{row.layer}/{row.head}")


def rows_with(rows: Iterable[Row], column: str) -> list[Row]:
    return [row for row in rows if row.get(column) is not None]


def number(value: float) -> str:
    """Three digits, without an exponent where that is short."""
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1000:
        return f"{value:.3g}"
    if 1000 <= size < 1e6:
        return f"{value:,.0f}".replace(",", "\u202f")
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}·10{str(int(power)).translate(_RAISED)}"


def percent(share: float) -> str:
    """31 %, 0.8 %, less than 0.1 %."""
    if 0 < share < 0.001:
        return "less than 0.1 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _first(document: Document, *names: str) -> str | None:
    """The first of these columns that was measured for some head."""
    return next((name for name in names if rows_with(document.rows, name)), None)


def _map(text: str, column: str) -> Piece:
    return Piece(text, f"map/{quote(column, safe='')}")


def _on_special_tokens(document: Document) -> Iterator[Sentence]:
    rows = rows_with(document.rows, "mass_special")
    if rows:
        many = sum(row["mass_special"] > _HALF for row in rows)
        heads = _map(f"{many} of {len(rows)} heads", "mass_special")
        verb = "puts" if many == 1 else "put"
        yield (heads, Piece(f" {verb} more than half of the weight on special tokens."))


def _on_support(document: Document) -> Iterator[Sentence]:
    rows = rows_with(document.rows, "effective_support")
    if rows:
        middle = number(median(row["effective_support"] for row in rows))
        what = "patches" if document.inputs.what == "images" else "tokens"
        start = Piece("The median head looks at ")
        yield (start, _map(f"{middle} {what}", "effective_support"), Piece("."))


def _on_extremes(document: Document) -> Iterator[Sentence]:
    near, wide = _first(document, "distance"), _first(document, "entropy_share", "entropy")
    pieces: list[Piece] = []
    if near is not None:
        row = min(rows_with(document.rows, near), key=lambda row: row[near])
        reach = f" (its keys are {_describe_distance(row[near], document)} on average)"
        pieces += [Piece("Most local: "), place(row, document), Piece(reach)]
    if wide is not None:
        row = max(rows_with(document.rows, wide), key=lambda row: row[wide])
        pieces += [Piece("; most diffuse: " if pieces else "Most diffuse: "), place(row, document)]
    if pieces:
        yield (*pieces, Piece("."))


def _describe_distance(distance: float, document: Document) -> str:
    """Patches lie on a grid, but their distance is that of their places in the sequence."""
    if document.inputs.what == "images":
        return f"{number(distance)} patches away, in reading order,"
    return f"{number(distance)} tokens away"


def _on_switched_model(document: Document) -> Iterator[Sentence]:
    for model in document.everywhere[:1]:
        start = Piece(f"alpha {model.alpha:g} everywhere", "everywhere")
        kept = ("{} of the links are kept", model.kept)
        words = _shares(kept, ("the output moves by {}", model.moved))
        yield (Piece("At "), start, Piece(f" {words}."))


def _shares(*parts: tuple[str, float | None]) -> str:
    """The parts whose share is known. parts: words with {} for the share, and the share."""
    return " and ".join(words.format(percent(x)) for words, x in parts if x is not None)


def _root_mean_square(moved: dict[str, Moved]) -> float | None:
    """Over the texts that the recipe has not met, where there are such."""
    texts = moved.get("unseen", moved.get("probe"))
    return None if texts is None else texts.root_mean_square


def _on_bounds(document: Document) -> Iterator[Sentence]:
    """Only the largest bound of any text holds for all of them: a mean is no bound."""
    column = _first(document, "largest_bound")
    if column is not None:
        one = "image" if document.inputs.what == "images" else "text"
        rows = sorted(rows_with(document.rows, column), key=lambda row: row[column])
        low, high = rows[0], rows[-1]
        mean = high.get("bound")
        yield (
            Piece(f"Certified for each {one}: a head's output moves by at most "),
            _map(f"{number(low[column])} to {number(high[column])} times", column),
            Piece(" as far as its query; least stable: "),
            place(high, document),
            Piece("." if mean is None else f" (on average over {one}s {number(mean)})."),
        )


def _on_recipe(document: Document) -> Iterator[Sentence]:
    recipe = document.recipe
    if recipe is None:
        return
    if recipe.kept is not None and 1 - recipe.kept < _LITTLE:
        yield _on_small_recipe(recipe, 1 - recipe.kept)
        return
    moved = ("moves the output by {}", _root_mean_square(recipe.moved))
    words = _shares(("keeps {} of the links", recipe.kept), moved)
    if words:
        yield (Piece("The "), Piece("recipe", "recipe"), Piece(f" {words}."))


def _on_small_recipe(recipe: ShownRecipe, share: float) -> Sentence:
    """Of a recipe that leaves the model almost as it is. share: of the links, saved."""
    heads = recipe.heads
    many = sum(head.alpha is not None and head.alpha > 1 for head in heads)
    leave = f"{many} of {len(heads)} heads {'leaves' if many == 1 else 'leave'} softmax."
    saved = percent(max(0.0, share))
    start = Piece(f"Within {percent(recipe.tolerance)} the ")
    return (
        start,
        Piece("recipe", "recipe"),
        Piece(f" can save only {saved} of the links: {leave}"),
    )


def _on_agreement(document: Document) -> Iterator[Sentence]:
    """The two heads of one layer that look alike the most."""
    best: tuple[float, Row, Row] | None = None
    for rows, table in _layers(document):
        for i in range(len(rows)):
            for j in range(i):
                cosine = table[i][j]
                if cosine is not None and (best is None or cosine > best[0]):
                    best = (cosine, rows[j], rows[i])
    if best is not None:
        cosine, one, other = best
        link = Piece(f"head {other.head}", place(other, document).link)
        words = Piece(f" look alike the most (cosine {cosine:.2f}).")
        yield (_capitalise(place(one, document)), Piece(" and "), link, words)


def _layers(document: Document) -> Iterator[tuple[list[Row], Table]]:
    for name, table in document.agreement.items():
        yield [row for row in document.rows if f"{row.kind}/{row.layer}" == name], table


def _capitalise(piece: Piece) -> Piece:
    return Piece(piece.text[:1].upper() + piece.text[1:], piece.link)
