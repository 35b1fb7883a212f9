"""Pictures and tables of `python -m papers study`, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from benchmarks.tables import Listing
from fenchel.lens.pictures import draw

_FLOOR = 1e-17  # below it is rounding
_LOW = 0.01  # of W1 to layer 0: what is near the bounds stays above
_PLAIN = [base * 10.0**power for power in range(-4, 5) for base in (1, 2, 5)]
_Document = dict[str, Any]
_Paint = Callable[[Figure], None]


def save_picture(document: _Document, path: Path) -> Path:
    """The study as an SVG file."""
    paint, size = _PICTURES[document["study"]](document)
    return draw.save(paint, path, size)


def listings(document: _Document) -> list[Listing]:
    """What the command prints."""
    return _LISTINGS[document["study"]](document)


def findings(document: _Document) -> list[str]:
    """What the numbers say, and the study's own reservations."""
    return [*_FINDINGS[document["study"]](document), *document["words"]]


# ---- marks


def _line(
    ax: Axes, x: Sequence[float], entries: Sequence[_Document], look: tuple[str, str, str]
) -> None:
    """A mean or a median with its band. look: label, colour, marker."""
    label, color, marker = look
    names = ("median", "q05", "q95") if "median" in entries[0] else ("mean", "low", "high")
    full = [(a, e) for a, e in zip(x, entries, strict=True) if e[names[0]] is not None]
    middle = [max(e[names[0]], _FLOOR) for _, e in full]
    at: Any = [a for a, _ in full]
    ax.plot(at, middle, color=color, marker=marker, markersize=3.6, label=label)
    banded = [(a, e) for a, e in full if e[names[1]] is not None]
    low, high = ([max(e[name], _FLOOR) for _, e in banded] for name in names[1:])
    ax.fill_between([a for a, _ in banded], low, high, color=color, alpha=0.15, linewidth=0)


def _plain_log(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator(_PLAIN))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _finish(ax: Axes, title: str, xlabel: str = "layer") -> None:
    ax.set_title(title)
    ax.set_xlabel(xlabel)
    ax.grid(True, color=draw.FAINT, alpha=0.3, linewidth=0.5)
    if xlabel == "layer":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _headline(canvas: Figure, text: str) -> None:
    canvas.suptitle(text, x=0.01, ha="left", fontsize=9, linespacing=1.5)


def _below(canvas: Figure, ax: Axes, columns: int, *, right: bool = False) -> None:
    """One legend for several panels. right: those at the right."""
    handles, labels = ax.get_legend_handles_labels()
    place: Any = "outside lower right" if right else "outside lower center"
    canvas.legend(handles, labels, loc=place, ncols=columns, labelcolor=draw.INK)


# ---- robustness


def _robustness(document: _Document) -> tuple[_Paint, tuple[float, float]]:
    shares = document["shares"]
    kept = [entry["kept"] for entry in shares]

    def paint(canvas: Figure) -> None:
        _headline(
            canvas,
            f"{document['model']}, {_layer(document)}: keys left out at random, "
            f"{document['heads']} heads, {document['sentences']} sentences, "
            f"{document['draws']} draws\nmedian over heads and sentences; shaded: 5 % to 95 %",
        )
        left, right = canvas.subplots(1, 2)
        for name, *look in (
            ("bound_relative", "certified, any choice of keys", draw.VERMILION, "s"),
            ("truth_max_relative", "exact, the draw that moves most", draw.PURPLE, "^"),
            ("truth_relative", "exact, mean over draws", draw.BLUE, "o"),
        ):
            _line(left, kept, [entry[name] for entry in shares], (look[0], look[1], look[2]))
        left.set_ylabel("W1, in units of the values' spread")
        for name, *look in (
            ("ratio", "to the mean over draws", draw.BLUE, "o"),
            ("ratio_to_largest_draw", "to the draw that moves most", draw.PURPLE, "^"),
        ):
            _line(right, kept, [entry[name] for entry in shares], (look[0], look[1], look[2]))
        right.axhline(1, color=draw.INK, linewidth=1.0)
        right.set_ylabel("certified / exact")
        for ax, title in ((left, "How far the outputs move"), (right, "How loose the bound is")):
            _plain_log(ax)
            _finish(ax, title, "share of the keys that stay")
            ax.xaxis.set_major_locator(FixedLocator(kept))
            ax.legend(labelcolor=draw.INK)

    return paint, (8.6, 3.6)


def _robustness_listing(document: _Document) -> list[Listing]:
    where = f"{document['model']}, {_layer(document)}"
    header = ["kept", "exact", "largest draw", "bound", "bound / exact", "bound / hull"]
    names = ("truth", "truth_max", "bound", "ratio", "bound_to_hull")
    rows = [
        [
            f"{100 * entry['kept']:g} %",
            *(_digits(entry[name]["median"]) for name in names),
        ]
        for entry in document["shares"]
    ]
    sets = ("on_the_ball", "on_these_tokens")
    logs = [
        [
            f"{100 * entry['kept']:g} %",
            *(_digits(entry["log10_proposition_25"][on]["median"]) for on in sets),
        ]
        for entry in document["shares"]
    ]
    return [
        Listing(f"{where}: W1 of a head's outputs, medians", header, rows),
        Listing(
            "log10 of Proposition 25, corrected, for the same moves, medians",
            ["kept", "on the ball of queries and keys", "on these tokens only"],
            logs,
        ),
    ]


def _layer(document: _Document) -> str:
    """Counted from 0, as the option has it."""
    return f"layer {document['layer']}"


def _robustness_findings(document: _Document) -> list[str]:
    draws = document["draws"] * len(document["shares"]) * document["sentences"] * document["heads"]
    return [
        f"{document['exceeded']} of {draws} draws moved the outputs further than their bound",
        "medians are over heads and sentences",
    ]


# ---- depth


def _depth(document: _Document) -> tuple[_Paint, tuple[float, float]]:
    model, stacks = document["model"], document["stacks"]
    colors = (draw.VERMILION, draw.BLUE, draw.AMBER, draw.GREEN)

    def paint(canvas: Figure) -> None:
        axes = list(canvas.subplots(1, 3 if model else 2))
        _headline(
            canvas,
            f"Two inputs through the layers: mean over pairs, shaded 95 %\nrandom stacks: "
            f"{document['settings']['tokens']} tokens in R^{document['settings']['width']}, "
            f"{document['settings']['pairs']} pairs; dotted: certified",
        )
        if model:
            _depth_of_model(axes.pop(0), model)
        for ax, name in zip(axes, ("spread", "distance_to_start"), strict=True):
            for stack, color in zip(stacks, colors, strict=True):
                layers = [entry["layer"] for entry in stack["layers"]]
                values = [entry[name] for entry in stack["layers"]]
                _line(ax, layers, values, (f"random, {stack['name']}", color, ""))
                if name == "distance_to_start" and "bound" in stack["layers"][0]:
                    bound = [entry["bound"]["mean"] for entry in stack["layers"]]
                    ax.plot(layers, bound, color=color, linestyle=":")
        axes[0].set(yscale="log", ylim=(_FLOOR, 5))
        _plain_log(axes[1])
        axes[1].set_ylim(_LOW, 1.5)
        _tell_of_those_below(axes[1], stacks)
        axes[0].set_ylabel("spread / spread at layer 0")
        axes[1].set_ylabel("W1 / W1 at layer 0")
        _finish(axes[0], "Random stacks: spread of a cloud")
        _finish(axes[1], "Random stacks: W1 of two clouds")
        _below(canvas, axes[0], 2, right=True)

    return paint, (12.0 if model else 8.4, 4.2)


def _tell_of_those_below(ax: Axes, stacks: Sequence[_Document]) -> None:
    """Where curves leave the panel, and where they end."""
    gone = [(s["name"], s["layers"], s["layers"][-1]["distance_to_start"]["mean"]) for s in stacks]
    gone = [(name, layers, end) for name, layers, end in gone if end < _LOW]
    for place, (name, layers, end) in enumerate(gone):
        out = next(e["layer"] for e in layers if e["distance_to_start"]["mean"] < _LOW)
        text = f"{name}:\nbelow, {end:.0e} at layer {layers[-1]['layer']}"
        up = (8, 6 + 24 * place)
        ax.annotate(text, (out, _LOW), up, textcoords="offset points", fontsize=7.5, va="bottom")


def _depth_of_model(ax: Axes, model: _Document) -> None:
    """In colours that mean none of the random stacks."""
    layers = [entry["layer"] for entry in model["layers"]]
    for name, *look in (
        ("relative", "W1 of two sentences / spread", draw.PURPLE, "o"),
        ("spread", "spread / spread at layer 0", draw.INK, "s"),
        ("alike", "spread / length of the tokens", draw.FAINT, "^"),
    ):
        _line(ax, layers, [entry[name] for entry in model["layers"]], (look[0], look[1], look[2]))
    ax.set_ylim(0, None)
    ax.set_ylabel("ratio")
    ax.legend(labelcolor=draw.INK, loc="lower left")
    _finish(ax, f"{model['name']}: {model['pairs']} pairs of sentences")


def _depth_listing(document: _Document) -> list[Listing]:
    header = ["layer", "W1", "W1 / spread", "W1, to layer 0", "spread, to layer 0"]
    tables = []
    for part in [*([document["model"]] if document["model"] else []), *document["stacks"]]:
        certified = "bound" in part["layers"][0]
        rows = [
            [
                str(entry["layer"]),
                *(
                    _digits(entry[name]["mean"])
                    for name in ("distance", "relative", "distance_to_start", "spread")
                ),
                *([_digits(entry["bound"]["mean"])] if certified else []),
            ]
            for entry in part["layers"]
        ]
        columns = [*header, "bound"] if certified else header
        tables.append(Listing(f"{part['name']}, {part['pairs']} pairs", columns, rows))
    return tables


def _depth_findings(document: _Document) -> list[str]:
    sentences = []
    for stack in document["stacks"]:
        last = stack["layers"][-1]
        line = (
            f"{stack['name']}: after {last['layer']} layers the spread is "
            f"{_digits(last['spread']['mean'])} of what it was, and W1 "
            f"{_digits(last['distance_to_start']['mean'])}"
        )
        if "bound" in last:
            line += f", certified {_digits(last['bound']['mean'])}"
        sentences.append(line)
    return sentences


# ---- negation

_CONDITIONS = (
    ("not", "with not", draw.VERMILION, "s"),
    ("never", "with never", draw.AMBER, "D"),
    ("hedged", "with possibly, allegedly, formerly", draw.INK, "P"),
    ("neutral", "with a neutral word", draw.BLUE, "o"),
    ("same_relation", "same relation, other subject", draw.GREEN, "^"),
    ("other_relation", "other relation", draw.PURPLE, "v"),
)


def _negation(document: _Document) -> tuple[_Paint, tuple[float, float]]:
    whole = document["sources"]["together"]

    def paint(canvas: Figure) -> None:
        _headline(
            canvas,
            f"{document['model']}: a sentence against the same with one word more, and against "
            f"others; {document['pairs']} pairs, {_with_one_more(whole)} of them with one word more"
            "\nmeans with 95 % intervals; W1 (l2) of the words, without [CLS] and [SEP]",
        )
        first, second, third = canvas.subplots(1, 3)
        layers = [entry["layer"] for entry in whole["layers"]]
        for name, *look in _CONDITIONS:
            values = [entry["words"][name] for entry in whole["layers"]]
            _line(first, layers, values, (look[0], look[1], look[2]))
        first.set_ylim(0, None)
        _finish(first, "W1 to the sentence")
        _negation_ratio(second, document, layers)
        _negation_cosine(third, whole["cosine"])
        _below(canvas, first, 6)

    return paint, (11.0, 3.9)


def _with_one_more(whole: _Document) -> int:
    """Pairs whose negation is the sentence with one word more, which another can replace."""
    count: int = whole["cosine"]["not"]["n"]
    return count


def _negation_ratio(ax: Axes, document: _Document, layers: list[int]) -> None:
    for name, part in document["sources"].items():
        if name != "together":
            thin = [(e["layer"], e["ratio"]["mean"]) for e in part["layers"] if e["ratio"]["mean"]]
            ax.plot([a for a, _ in thin], [b for _, b in thin], color=draw.FAINT, linewidth=0.6)
    whole = document["sources"]["together"]["layers"]
    looks = zip(("ratio", "ratio_never", "ratio_hedged"), _CONDITIONS, strict=False)
    for name, (_, _, color, marker) in looks:
        _line(ax, layers, [entry[name] for entry in whole], ("", color, marker))
    ax.axhline(1, color=draw.INK, linewidth=1.0)
    _finish(ax, "W1, ratio to a neutral word (grey: each source)")


def _negation_cosine(ax: Axes, cosine: _Document) -> None:
    shown = [
        (name.replace("_", " "), color, cosine[name])
        for name, _, color, _ in reversed(_CONDITIONS)
        if cosine[name]["mean"] is not None
    ]
    for place, (_, color, entry) in enumerate(shown):
        ax.barh(place, entry["mean"], color=color, height=0.6)
        reach = entry["mean"] if entry["high"] is None else entry["high"]
        if entry["low"] is not None:
            ax.plot([entry["low"], entry["high"]], [place, place], color=draw.INK, linewidth=1.0)
        ax.annotate(
            f"{entry['mean']:.3g}",
            (reach, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.margins(x=0.15)
    _finish(ax, "Mean-pooled, last layer (pairs)", "cosine distance to the sentence")
    ax.set_yticks(range(len(shown)), [f"{name} ({entry['n']})" for name, _, entry in shown])
    ax.grid(False)


def _negation_listing(document: _Document) -> list[Listing]:
    whole = document["sources"]["together"]
    names = [name for name, *_ in _CONDITIONS]
    rows = [
        [
            str(entry["layer"]),
            *(_digits(entry["words"][name]["mean"]) for name in names),
        ]
        for entry in whole["layers"]
    ]
    ratios = ("ratio", "ratio_never", "ratio_hedged")
    paired = [
        [str(entry["layer"]), *(_narrow(entry[name]) for name in ratios)]
        for entry in whole["layers"]
    ]
    sources = [
        [source, str(part["pairs"]), str(_with_one_more(part)), *map(_narrow, _last_ratios(part))]
        for source, part in document["sources"].items()
    ]
    return [
        Listing(
            f"{document['model']}: mean W1 (l2) of the words to the sentence, all sources",
            ["layer", *(name.replace("_", " ") for name in names)],
            rows,
        ),
        Listing(
            "W1, paired ratios to a neutral word with 95 % intervals",
            ["layer", "not", "never", "hedged"],
            paired,
        ),
        Listing(
            "Last layer, paired ratios of not to a neutral word with 95 % intervals",
            ["source", "pairs", "one word more", "W1", "cosine"],
            sources,
        ),
    ]


def _last_ratios(part: _Document) -> tuple[_Document, _Document]:
    return part["layers"][-1]["ratio"], part["cosine_ratio"]


def _negation_findings(document: _Document) -> list[str]:
    whole = document["sources"]["together"]
    first, last = whole["layers"][0], whole["layers"][-1]
    cosine = whole["cosine"]
    near = whole["negation_nearer_than_same_relation"]["cosine"]["share"]
    return [
        f"not moves the words {_with_interval(first['ratio'])} times as far as a neutral word "
        f"before the first layer, {_with_interval(last['ratio'])} times after the last, and the "
        f"pooled embedding {_with_interval(whole['cosine_ratio'])} times (cosine distance); with "
        f"each relation counted once {_with_interval(last['ratio']['over_relations'])} times after "
        "the last",
        f"a hedge, which is no negation, moves the words {_with_interval(last['ratio_hedged'])} "
        f"times as far after the last layer, and the pooled embedding "
        f"{_with_interval(whole['cosine_ratio_hedged'])} times",
        f"yet a negation stays near: cosine distance {_digits(cosine['negation']['mean'])} over "
        f"all {cosine['negation']['n']} negations as the data has them "
        f"({_digits(cosine['not']['mean'])} over the {cosine['not']['n']} that are one word more, "
        f"as in the picture), a sentence of the same relation "
        f"{_digits(cosine['same_relation']['mean'])}; the negation is the nearer of the two in "
        f"{_percent(near)} of the pairs",
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f} %"


def _with_interval(entry: _Document) -> str:
    if entry["low"] is None:
        return _digits(entry["mean"])
    return f"{_digits(entry['mean'])} ({_digits(entry['low'])} to {_digits(entry['high'])})"


def _narrow(entry: _Document) -> str:
    """The same, for tables on eighty columns."""
    return _with_interval(entry).replace(" to ", "–")


def _digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


_PICTURES: dict[str, Callable[[_Document], tuple[_Paint, tuple[float, float]]]] = {
    "robustness": _robustness,
    "depth": _depth,
    "negation": _negation,
}
_LISTINGS: dict[str, Callable[[_Document], list[Listing]]] = {
    "robustness": _robustness_listing,
    "depth": _depth_listing,
    "negation": _negation_listing,
}
_FINDINGS: dict[str, Callable[[_Document], list[str]]] = {
    "robustness": _robustness_findings,
    "depth": _depth_findings,
    "negation": _negation_findings,
}
