"""What `fenchel audit` was asked for: one object, made from the command line once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fenchel.lens.heads.settings import AuditSettings

_TEXTS, _PICTURES = 32, 4  # items of a unit
_MOST = 100_000  # a number of layers or heads that no model has


@dataclass(frozen=True)
class ModelSource:
    """name: a folder, or a name on the hub."""

    name: str
    dtype: str
    trust_remote_code: bool


@dataclass(frozen=True)
class InputSource:
    """Texts with targets, or images. sample: how many, drawn with the seed; None: all.
    longest: tokens of a text at most."""

    texts: Path | None
    images: Path | None
    targets: Path | None
    sample: int | None
    seed: int
    longest: int

    def check(self, is_vision: bool) -> None:
        """Whether they go together, and with a model that looks at images or does not."""
        if (self.texts is None) == (self.images is None):
            raise ValueError("give either --texts FILE or --images FOLDER")
        if self.images is not None and self.targets is not None:
            raise ValueError("--targets goes with --texts; images have none")
        if is_vision and self.texts is not None:
            raise ValueError("this model looks at images: give --images FOLDER, not --texts")
        if not is_vision and self.images is not None:
            raise ValueError("this model reads texts: give --texts FILE, not --images")


@dataclass(frozen=True)
class OutputSettings:
    """folder: for all that is written. figures: whether PNG and SVG are."""

    folder: Path
    resume: bool
    figures: bool


@dataclass(frozen=True)
class Resources:
    """chunk: items of a unit of work; None: by what is shown. threads: None: as torch chooses."""

    chunk: int | None
    threads: int | None


@dataclass(frozen=True)
class CommandSettings:
    model: ModelSource
    inputs: InputSource
    output: OutputSettings
    resources: Resources
    audit: AuditSettings

    @property
    def chunk(self) -> int:
        default = _TEXTS if self.inputs.images is None else _PICTURES
        return self.resources.chunk or default


def parse_measures(
    *,
    measures: str | None,
    alphas: str,
    layers: str | None,
    heads: str | None,
    probe: int,
    tolerance: float,
    trials: int,
) -> AuditSettings:
    """From the words of the command line."""
    from fenchel.lens.heads.settings import MEASURES, AuditSettings

    return AuditSettings(
        measures=MEASURES if measures is None else tuple(_split(measures)),
        alphas=_parse_alphas(alphas),
        layers=None if layers is None else _parse_numbers(layers, "--layers"),
        heads=None if heads is None else _parse_numbers(heads, "--heads"),
        probe=probe,
        tolerance=tolerance,
        trials=trials,
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """ "0,3-5" -> (0, 3, 4, 5)"""
    numbers: set[int] = set()
    for part in _split(text):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        whole = all(end.strip().isdecimal() for end in ends)
        if not whole or not int(ends[0]) <= int(ends[1]) <= _MOST:
            raise ValueError(f"{option} takes numbers and ranges such as 0,3-5; got {text!r}")
        numbers.update(range(int(ends[0]), int(ends[1]) + 1))
    if not numbers:
        raise ValueError(f"{option} takes numbers and ranges such as 0,3-5; got {text!r}")
    return tuple(sorted(numbers))


def _parse_alphas(text: str) -> tuple[float, ...]:
    try:
        alphas = tuple(float(part) for part in _split(text))
    except ValueError:
        raise ValueError(f"--alphas takes numbers such as 1.5,2; got {text!r}") from None
    if not alphas or len(set(alphas)) < len(alphas):
        raise ValueError(f"--alphas takes numbers such as 1.5,2, each once; got {text!r}")
    return alphas
