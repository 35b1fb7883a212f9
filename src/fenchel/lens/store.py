"""What an audit has counted so far, on disk: one file a chunk of texts, written whole or not.

A run that is killed loses the chunk it was at. A file that does not match its checksum is set aside
and its chunk run again. Chunks are added in their order, so that the result does not depend on who
made them, or in how many sittings.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fenchel.lens.tallies import Tallies, added

_SETTINGS = "settings.json"


class OtherSettings(ValueError):
    """The folder holds an audit of something else."""


@dataclass
class Store:
    """Chunks of one audit in `folder`, made with `settings` (what JSON can hold).

    set_aside: files that were damaged.
    """

    folder: Path
    settings: dict[str, Any]
    set_aside: list[Path] = field(default_factory=list)

    def open(self, resume: bool) -> None:
        """Make the folder, or go on with what is in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _SETTINGS
        if path.exists() and resume:
            known = _read_json(path)
            if known is not None and known != self.settings:
                changed = sorted(
                    name
                    for name in known.keys() | self.settings.keys()
                    if known.get(name) != self.settings.get(name)
                )
                raise OtherSettings(
                    f"{self.folder} holds an audit with other settings ({', '.join(changed)}); "
                    "choose another folder, or leave out --resume to begin again"
                )
        if not resume:
            for old in self.folder.glob("chunk-*"):
                old.unlink()
        _write(path, json.dumps(self.settings, indent=1, sort_keys=True).encode())

    def path(self, number: int) -> Path:
        return self.folder / f"chunk-{number:06d}.npz"

    def save(self, number: int, tallies: Tallies) -> None:
        arrays = {name: value.cpu().numpy() for name, value in sorted(tallies.items())}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        content = buffer.getvalue()
        _write(self.path(number), hashlib.sha256(content).digest() + content)

    def load(self, number: int) -> Tallies | None:
        """None: not there, or damaged and set aside."""
        path = self.path(number)
        if not path.exists():
            return None
        raw = path.read_bytes()
        content = raw[32:]
        if hashlib.sha256(content).digest() != raw[:32]:
            aside = path.with_suffix(".damaged")
            os.replace(path, aside)
            self.set_aside.append(aside)
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def missing(self, count: int) -> Iterator[int]:
        """The chunks that are still to be made, in order."""
        return (number for number in range(count) if self.load(number) is None)

    def total(self, count: int) -> Tallies:
        """All chunks added, in order."""
        whole: Tallies = {}
        for number in range(count):
            part = self.load(number)
            if part is None:
                raise FileNotFoundError(f"{self.path(number)} is missing; run with --resume")
            whole = added(whole, part)
        return whole


def _write(path: Path, content: bytes) -> None:
    """To a file beside it, to the disk, then in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # damaged: written anew
        return None
    return found
