"""Texts, targets and images from disk, with errors that say the way out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NoReturn

from fenchel._numerics import check_whole

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def sentences(path: Path, count: int) -> list[str]:
    """The first `count` lines that are not empty; of a .tsv the first column."""
    check_whole(count, "count", 1)
    with path.open(encoding="utf-8") as lines:
        chosen = list(islice(_texts(path, lines), count))
    if not chosen:
        raise ValueError(f"{path} holds no sentence")
    return chosen


def read_texts(path: Path, sample: int | None = None, seed: int = 0) -> list[str]:
    """One text per line, blank lines left out; of a .tsv the first column.

    sample: so many of them, drawn with the seed, in the file's order; None: all.
    """
    texts = list(_texts(path, _lines(path)))
    if not texts:
        raise ValueError(f"{path} holds only blank lines; give a file with one text per line")
    return [texts[place] for place in draw_places(len(texts), sample, seed)]


def read_targets(path: Path, count: int) -> list[str]:
    """One target per line for each of `count` texts; a blank line is an empty target.

    Where only some texts are taken, `draw_places` says which, of the texts and of their targets.
    """
    targets = [line.strip() for line in _lines(path)]
    if len(targets) != count:
        raise ValueError(
            f"{path} holds {len(targets)} targets for {count} texts; give one line per text (blank "
            "lines among the texts are left out and have no target)"
        )
    return targets


def draw_places(count: int, sample: int | None, seed: int = 0) -> list[int]:
    """Places of `sample` of `count` items, without replacement, rising; None: all."""
    if sample is not None:
        check_whole(sample, "sample", 1)
    if sample is None or sample >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), sample))


def _texts(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """What is not blank, without space around it; of a .tsv the first column."""
    for line in lines:
        text = line.partition("\t")[0] if path.suffix == ".tsv" else line
        if text.strip():
            yield text.strip()


def _lines(path: Path) -> list[str]:
    _check_file(path)
    raw = path.read_bytes()
    if not raw:
        raise ValueError(f"{path} is empty; give a file with one text per line")
    text = _decode(path, raw).replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n")


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a text file with one text per line")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; give a text file with one text per line")


def _decode(path: Path, raw: bytes) -> str:
    """UTF-8, with a byte order mark or without."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        _refuse_encoding(path, "is UTF-16, not UTF-8", "utf-16")
    zero = raw.find(b"\0")
    if zero >= 0:
        raise ValueError(
            f"{path} is a binary file (byte {zero} is zero); give plain text in UTF-8, one text "
            "per line"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        # utf-8-sig counts from after its mark
        place = problem.start + (len(raw) - len(problem.object))
        line = raw.count(b"\n", 0, place) + 1
        where = f"is not UTF-8 (byte {place}, 0x{raw[place]:02x}, in line {line})"
        _refuse_encoding(path, where, "latin1", problem)


def _refuse_encoding(
    path: Path, what: str, encoding: str, problem: Exception | None = None
) -> NoReturn:
    better = path.with_suffix(f".utf8{path.suffix}")
    raise ValueError(
        f"{path} {what}; convert it, for example: iconv -f {encoding} -t utf-8 {path} > {better}"
    ) from problem


def read_images(folder: Path, sample: int | None = None, seed: int = 0) -> list[Path]:
    """The images of a folder by name; one that cannot be read is named."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise NotADirectoryError(f"{folder} {what}; give a folder of images")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)
    if not paths:
        raise ValueError(f"{folder} holds no image; looked for {', '.join(_IMAGES)}")
    chosen = [paths[place] for place in draw_places(len(paths), sample, seed)]
    for path in chosen:
        _check_image(path)
    return chosen


def _check_image(path: Path) -> None:
    try:
        from PIL import Image
    except ImportError as missing:
        raise ImportError("images need Pillow: pip install -c constraints.txt pillow") from missing
    try:
        with Image.open(path) as picture:
            picture.verify()
    except (  # PNG: SyntaxError, of all things
        Image.DecompressionBombError,
        OSError,
        SyntaxError,
        ValueError,
    ) as problem:
        raise ValueError(
            f"{path} cannot be read as an image ({problem}); mend it, or move it out of the folder"
        ) from problem
