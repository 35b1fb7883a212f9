"""One study from a folder and a text file to numbers that can be kept."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fenchel.lens.deviations import Deviations
from fenchel.lens.estimation import deviation
from fenchel.lens.reading import load
from fenchel.lens.recognise import Kind, attentions
from fenchel.lens.text import encode, sentences


@dataclass(frozen=True)
class Settings:
    """model: a folder or a name on the hub. scaling None: the paper's."""

    model: str
    text: Path
    sentences: int = 200
    attention: str = "encoder"
    scaling: float | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """document: for JSON, an entry of what `add` writes."""

    deviations: Deviations
    document: dict[str, Any]

    @property
    def warning(self) -> str:
        """What was not solved, and is NaN."""
        wrong = {name: count for name, count in self.deviations.status.items() if name != "OK"}
        return f"not solved, and left out: {wrong}" if wrong else ""


def run(settings: Settings, advance: Callable[[float], object] | None = None) -> Run:
    """Load, encode, solve."""
    texts = sentences(settings.text, settings.sentences)
    model, tokenizer = load(settings.model)
    kind = cast(Kind, settings.attention)
    pair = attentions(model, kind)[0].family.pair  # refused here where the kind is wrong
    decoder = pair and kind != "encoder"
    inputs = encode(tokenizer, texts, decoder=decoder, model=model)
    start = time.perf_counter(), time.process_time()
    found = deviation(model, inputs, attention=kind, scaling=settings.scaling, advance=advance)
    seconds, busy = time.perf_counter() - start[0], time.process_time() - start[1]
    document = {
        **found.as_json(),
        "text": settings.text.name,
        "decoder_input": "the sentence itself, moved on by one" if decoder else None,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "processor_seconds": round(busy, 1),  # what else runs here does not count
    }
    return Run(found, document)


def add(document: dict[str, Any], path: Path) -> Path:
    """Into a file of several runs, in place of that of the same model, attention and scaling."""
    kept = []
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))["runs"]

    def key(one: dict[str, Any]) -> tuple[str, str, float]:
        return one["model"], one["attention"], one["scaling"]

    runs = [one for one in kept if key(one) != key(document)] + [document]
    whole = {"audit": "deviation", "runs": sorted(runs, key=key)}
    text = json.dumps(whole, indent=1)
    text = re.sub(r"\{[^{}]*\}", lambda inner: " ".join(inner.group().split()), text)
    path.write_text(text + "\n", encoding="utf-8")
    return path
