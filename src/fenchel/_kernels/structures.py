"""The structs of native/problem.h for ctypes, read from the header: they are described once.

The header's own text is the version of the layout: the library holds a checksum of the text that it
was compiled with (`setup.py`), so that one of another version is noticed, whatever has changed.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from pathlib import Path

HEADER = Path(__file__).parent / "native" / "problem.h"

_NUMBERS: dict[str, type] = {"std::int64_t": ctypes.c_int64, "double": ctypes.c_double}
_FIELDS = re.compile(r"^(?:const )?(?P<type>[\w:]+)(?P<pointer>\*?) (?P<names>[^()]+)$")


def checksum(header: Path = HEADER) -> int:
    """Of the header's text, as `setup.py` computes it."""
    return zlib.crc32(header.read_bytes())


def read_structures(text: str) -> dict[str, type[ctypes.Structure]]:
    """Every struct of the header by name; those that hold others come after them."""
    text = re.sub(r"//[^\n]*", "", text)
    structures: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", text, re.DOTALL):
        body = re.sub(r"\n    [^\n;]*\([^)]*\) const \{.*?\}", "", body, flags=re.DOTALL)
        fields = [
            field
            for line in map(str.strip, body.split(";"))
            if line
            for field in _fields(" ".join(line.split()), structures)
        ]
        structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structures


def _fields(line: str, structures: dict[str, type[ctypes.Structure]]) -> list[tuple[str, type]]:
    """`double scale, bias_scale`, `const void *query, *key`, `View query` or `stride[4]`."""
    match = _FIELDS.match(line)
    if match is None:
        raise ValueError(f"native/problem.h: cannot read the field {line!r}")
    fields: list[tuple[str, type]] = []
    for name in match["names"].split(","):
        name, pointer = name.strip().lstrip("*"), "*" in match["pointer"] or "*" in name
        kind = ctypes.c_void_p if pointer else _NUMBERS.get(match["type"])
        name, _, count = name.rstrip("]").partition("[")
        kind = kind or structures[match["type"]]
        # One field for each entry: an array is slow to make.
        fields += [(f"{name}_{i}", kind) for i in range(int(count))] if count else [(name, kind)]
    return fields
