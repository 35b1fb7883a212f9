"""What an audit has counted so far, on disk: one file per unit of work, whole or not at all.

A run that is killed loses the unit it was at. A file that does not match its checksum is set aside
and its unit run again. The checksum counts the settings in, so that no unit of another audit is
ever added.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fenchel.lens.files import write_whole
from fenchel.lens.heads.tallies import Tallies, from_arrays, to_arrays

_SETTINGS = "settings.json"
_UNIT = re.compile(r"(chunk|probe)-\d{6}|attack|recipe|model-[\w.+-]+")  # what Run names them
_SHOWN = 60  # characters of a setting that differs


class OtherSettings(ValueError):
    """The folder holds an audit of something else."""


@dataclass
class Store:
    """Units of one audit in `folder`, made with `settings` (what JSON can hold).

    set_aside: files that were damaged.
    """

    folder: Path
    settings: dict[str, Any]
    set_aside: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = json.loads(json.dumps(self.settings))  # as it will be read again
        self._key = json.dumps(self.settings, sort_keys=True).encode()

    def open(self, resume: bool) -> None:
        """Make the folder, or go on with what is in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume:
            self.join()
        else:
            for name in self.names():
                self.path(name).unlink(missing_ok=True)
                (self.folder / f"{name}.damaged").unlink(missing_ok=True)
        self._remove(".*.npz.*", f".{_SETTINGS}.*")  # half-written, by a run that was killed
        content = json.dumps(self.settings, indent=1, sort_keys=True) + "\n"
        write_whole(self.folder / _SETTINGS, content.encode())

    def join(self) -> None:
        """Check that what is in the folder, if anything, has these settings."""
        stored = _read_json(self.folder / _SETTINGS)
        if stored is not None and stored != self.settings:
            raise OtherSettings(
                f"{self.folder} holds an audit with other settings: "
                f"{'; '.join(_differences(stored, self.settings))}. Choose another folder, or "
                "leave out --resume to begin again"
            )

    def _remove(self, *patterns: str) -> None:
        for pattern in patterns:
            for old in self.folder.glob(pattern):
                old.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Of the units that are there, checked, damaged or not; none if the folder is not ours."""
        if not (self.folder / _SETTINGS).exists():
            return []
        files = (*self.folder.glob("*.npz"), *self.folder.glob("*.damaged"))
        return sorted({path.stem for path in files if _UNIT.fullmatch(path.stem)})

    def path(self, unit: str) -> Path:
        return self.folder / f"{unit}.npz"

    def save(self, unit: str, tallies: Tallies) -> None:
        arrays = {name: x.cpu().numpy() for name, x in sorted(to_arrays(tallies).items())}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        content = buffer.getvalue()
        write_whole(self.path(unit), self._checksum(unit, content) + content)

    def load(self, unit: str) -> Tallies | None:
        """None: not there, or damaged and set aside."""
        path = self.path(unit)
        if not path.exists():
            return None
        raw = path.read_bytes()
        content = raw[32:]
        if self._checksum(unit, content) != raw[:32]:
            aside = self.folder / f"{unit}.damaged"
            os.replace(path, aside)
            self.set_aside.append(aside)
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        return from_arrays(Tallies, tensors)

    def _checksum(self, unit: str, content: bytes) -> bytes:
        owner = hashlib.sha256(self._key).digest() + hashlib.sha256(unit.encode()).digest()
        return hashlib.sha256(owner + content).digest()


def _read_json(path: Path) -> dict[str, Any] | None:
    """None: not there, or damaged; the units' checksums hold the settings too."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{name} was {_cut(old.get(name))}, is {_cut(new.get(name))}" for name in names]


def _cut(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
