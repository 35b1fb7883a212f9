"""What a chapter hands to the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Tour:
    """Settings of one tour. `quick` shrinks what is slow (for tests).

    model: the folder of a pretrained encoder for the chapters that can show one.
    """

    seed: int = 0
    quick: bool = False
    model: Path | None = None

    def generator(self) -> torch.Generator:
        """A fresh one, so that no chapter depends on another."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Figure:
    """Panels that flow side by side, and one sentence that says what to see.

    panels: SVG strings of `draw.panel`. alt: what is drawn, for those who cannot see it.
    width: how wide a panel wants to be: "small", "medium", "wide", or "square" for heat maps.
    """

    panels: tuple[str, ...]
    caption: str
    alt: str
    width: str = "medium"


@dataclass(frozen=True)
class Mark:
    """A cell that passed or failed."""

    passed: bool
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the row; the others are numbers, or words (aligned left)."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | Mark, ...], ...]
    words: bool = False


@dataclass(frozen=True)
class Chapter:
    """title, then paragraphs, then figures, then tables.

    intro: paragraphs divided by blank lines; `code` in backticks; a paragraph indented by four
    spaces is displayed as it stands.
    """

    title: str
    intro: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def number(value: float, digits: int = 4) -> str:
    """Significant digits, with true minus signs and a readable power of ten."""
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, power = text.partition("e")
        text = f"{mantissa}e{int(power)}"
    return text.replace("-", "−")
