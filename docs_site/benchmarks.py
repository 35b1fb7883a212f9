"""The tables of the benchmarks, from the JSON that `python -m benchmarks` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import (
    attention_picture,
    attention_summary,
    continuous,
    dual,
    integrals,
    maps,
    models,
    pictures,
    serve,
    structure,
    wasserstein,
)
from benchmarks.attention_summary import digits
from benchmarks.tables import Listing
from docs_site.snippets import Picture
from docs_site.tables import table

Document = dict[str, Any]
Listings = Callable[[Document], list[Listing]]
Save = Callable[[Document, Path], Path]


@dataclass(frozen=True)
class Bench:
    """command: without --out. caption: of its picture. folder, prefix: of its JSON."""

    command: str
    listings: Listings
    caption: str = ""
    save: Save = pictures.save_picture
    folder: str = "results"
    prefix: str = "bench_"


def _steps(document: Document) -> list[Listing]:
    """Needs what the experiments need, so it is asked for only where there are results."""
    from papers.experiments import throughput

    return throughput.listings(document)


# ---- those that print themselves in another way


def map_listings(document: Document) -> list[Listing]:
    """One row a map and number of rows, which slow maps have fewer of."""
    settings = document["settings"]
    rows: dict[tuple[str, int], list[str]] = {}
    for e in document["results"]:
        ratio, low, high = (digits(e[key]) for key in ("ratio", "ratio_min", "ratio_max"))
        rows.setdefault((e["name"], e["rows"]), []).append(f"{ratio} ({low} to {high})")
    title = (
        f"Time relative to {document['baseline']}: {settings['length']} keys, "
        f"median of {settings['repeats']} rounds (smallest to largest)"
    )
    header = ("map", "rows", *maps.DIRECTIONS)
    made = [(name, str(count), *cells) for (name, count), cells in rows.items()]
    return [Listing(title, header, made)]


def attention_listings(document: Document) -> list[Listing]:
    made = [_attention_listing(document, direction) for direction in maps.DIRECTIONS]
    made.append(_memory_listing(document))
    return [listing for listing in made if listing.rows]


def _attention_listing(document: Document, direction: str) -> Listing:
    entries = document["results"]
    sizes = attention_summary.sizes_of(entries)
    rows = [
        (str(row), *(attention_summary.cell(entries, row, n, direction) for n in sizes))
        for row in attention_summary.rows(entries)
    ]
    rows = [row for row in rows if set(row[1:]) != {"–"}]
    title = f"Time relative to SDPA, {direction}, by the number of tokens"
    return Listing(title, ("attention", *map(str, sizes)), rows)


def _memory_listing(document: Document) -> Listing:
    rows = []
    for e in document["memory"]:
        extra, ratio = e["extra_bytes"], e["ratio"]
        shown = "–" if extra is None else f"{extra / 2**20:.0f}"
        relative = "–" if ratio is None else digits(ratio)
        rows.append((e["method"], str(e["n"]), shown, relative))
    title = "Peak memory beyond the inputs, forward+backward"
    return Listing(title, ("attention", "tokens", "MiB", "to SDPA"), rows)


BENCHES = {
    "maps": Bench("python -m benchmarks maps", map_listings),
    "attention": Bench(
        "python -m benchmarks attention",
        attention_listings,
        "Time of attention relative to torch's own, by the number of tokens",
        attention_picture.save_picture,
    ),
    "structure": Bench(
        "python -m benchmarks structure",
        structure.listings,
        "Time of entmax-1.5 with structure, with one query and with short rows, as ratios",
    ),
    "serve": Bench(
        "python -m benchmarks serve --model smollm2 --texts wikitext.txt",
        serve.listings,
        "Time of one attention call and of one token of whole models, by the length of the past",
    ),
    "integrals": Bench(
        "python -m benchmarks integrals",
        integrals.listings,
        "Largest error of the integrals by the number of nodes along the angle",
    ),
    "continuous": Bench(
        "python -m benchmarks continuous",
        continuous.listings,
        "Forward time of a transformer layer by the number of tokens",
    ),
    "dual": Bench(
        "python -m benchmarks dual --model build/models/minilm --text story.txt",
        dual.listings,
        "Seconds to exact estimates by the reliability, for each method",
    ),
    "wasserstein": Bench(
        "python -m benchmarks wasserstein",
        wasserstein.listings,
        "Milliseconds of one Wasserstein-1 distance by the number of atoms",
    ),
    "models": Bench(
        "python -m benchmarks models --transformers transformers", models.listings, prefix=""
    ),
    "steps": Bench(
        "python -m papers experiment throughput",
        _steps,
        "Training steps a second of each attention, softmax = 1",
        folder="papers/results",
    ),
}


def section(name: str, root: Path, prefix: str) -> tuple[str, list[Picture]]:
    """What stands in place of the marker. root: of a clone. prefix: of the picture's file name."""
    if name not in BENCHES:
        raise ValueError(f"there is no benchmark {name!r}; known are {', '.join(BENCHES)}")
    bench = BENCHES[name]
    file = f"{bench.folder}/{bench.prefix}{name}.json"
    path = root / file
    command = f"```console\n$ {bench.command} --out {file}\n```"
    if not path.is_file():
        return f"Not measured yet; this does it:\n\n{command}", []
    document = json.loads(path.read_text(encoding="utf-8"))
    parts = [command, _machine(document)]
    drawn = []
    if bench.caption:
        drawn.append(_picture(bench, document, f"{prefix}-{name}.svg"))
        parts.append(f"![{bench.caption}]({drawn[0].name}){{ .produced }}")
    parts += [_shown(listing) for listing in bench.listings(document)]
    return "\n\n".join(parts), drawn


def _machine(document: Document) -> str:
    """What is stored with the figures. others: share of the processors that others used."""
    machine, settings = document["machine"], document["settings"]
    facts = [
        f"fenchel {machine['fenchel']}",
        f"torch {machine['torch']}",
        f"Python {machine['python']}",
        ", ".join(machine["devices"]),
        f"{settings.get('threads', machine['threads'])} thread(s)",
    ]
    if "kernels" in document:
        facts.append(f"native kernels {document['kernels']}")
    if "others" in document:
        facts.append(f"other programs used {document['others']:.1%} of the processors")
    told = f"Measured with {'; '.join(facts)}."
    return f"{told}\n\n**{document['warning']}**" if document.get("warning") else told


def _picture(bench: Bench, document: Document, name: str) -> Picture:
    with TemporaryDirectory() as folder:
        svg = bench.save(document, Path(folder) / name).read_text(encoding="utf-8")
    return Picture(name, svg)


def _shown(listing: Listing) -> str:
    title = listing.title[:1].upper() + listing.title[1:]
    drawn = table(listing.header, listing.rows, words=listing.words)
    return f'<p class="title">{escape(title)}</p>\n\n{drawn}'
