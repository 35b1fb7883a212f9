"""Files of data, read no further than their format reaches.

A few megabytes that are zipped can hold all of the memory, and so can a file with holes. Whoever
reads says how many bytes there can be; one more is a problem of the file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

Stream = IO[bytes] | gzip.GzipFile
_PIECE = 2**22  # bytes at a time


class DataProblem(ValueError):
    """Data that is missing or not what it should be; the message says which file and what to do."""


@contextmanager
def unzipped(path: Path) -> Iterator[Stream]:
    """The content of a file, of a .gz what is inside; one that does not unzip is named."""
    if path.suffix != ".gz":
        with path.open("rb") as plain:
            yield plain
        return
    try:
        with gzip.open(path) as file:
            yield file
    except (EOFError, OSError, zlib.error) as problem:
        size = path.stat().st_size
        raise DataProblem(f"{path} ({size} bytes) does not unzip: {problem}") from problem


def read_file(path: Path, most: int) -> bytes:
    """All of a file, of a .gz what is inside; `most` bytes, or it is refused."""
    with unzipped(path) as file:
        return read_rest(file, most, path)


def read_rest(file: Stream, most: int, name: Path | str) -> bytes:
    """What is left of it, `most` bytes, or it is refused. name: for the message."""
    parts, left = [], most
    while part := file.read(min(_PIECE, left + 1)):  # one more shows that there is more
        left -= len(part)
        if left < 0:
            raise DataProblem(
                f"{name} holds more than {most:,} bytes, the most that is expected of it; get it "
                "again"
            )
        parts.append(part)
    return b"".join(parts)
