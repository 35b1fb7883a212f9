"""Comments send readers to files that are there."""

import re
from pathlib import Path

import fenchel as fl

SOURCES = Path(fl.__file__).parent


def named_but_missing(text):
    names = re.findall(r"\bnative/\w+\.(?:h|cpp)\b", text)
    return [name for name in names if not (SOURCES / "_kernels" / name).is_file()]


def test_native_files_named_in_python_exist():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    assert sum("native/" in text for text in texts.values()) > 2
    assert {p.name: named_but_missing(t) for p, t in texts.items() if named_but_missing(t)} == {}
    assert named_but_missing("see `native/nothing.h`") == ["native/nothing.h"]
