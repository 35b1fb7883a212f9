"""Where a run stands, on disk: tensors as safetensors, the rest as JSON with a checksum of both.

The two newest are kept. One that does not match its checksum is set aside, and the one before it is
used.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fenchel._files import write_whole

_KEPT = 2


class OtherConfig(ValueError):
    """The folder holds a run of something else."""


@dataclass(frozen=True)
class State:
    """step: how many are done. facts: what JSON holds, such as the best so far."""

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass
class Checkpoints:
    """Of one run in `folder`, whose configuration is `config` (what JSON holds)."""

    folder: Path
    config: dict[str, Any]

    def open(self, resume: bool) -> None:
        """Make the folder; refuse to go on with another configuration; or begin anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "config.json"
        wanted = json.loads(json.dumps(self.config))
        if resume and path.exists():
            changed = differences(_known(path), wanted)
            if changed:
                raise OtherConfig(
                    f"{self.folder} holds a run with other settings: {'; '.join(changed)}. Choose "
                    "another --out, or begin again with --again"
                )
        if not resume:
            for old in self.folder.glob("step-*"):
                old.unlink()
        for torn in self.folder.glob(".step-*"):  # a kill left it half written
            torn.unlink()
        write_whole(path, json.dumps(wanted, indent=1, sort_keys=True).encode())

    def save(self, state: State) -> None:
        content = save({name: x.contiguous() for name, x in state.tensors.items()})
        facts = {"step": state.step, "facts": state.facts}
        facts["sha256"] = _digest(content, facts)
        stem = self.folder / f"step-{state.step:08d}"
        write_whole(stem.with_suffix(".safetensors"), content)
        write_whole(stem.with_suffix(".json"), json.dumps(facts).encode())  # last: now it counts
        for old in self._stems()[:-_KEPT]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def newest(self) -> tuple[State | None, list[Path]]:
        """The newest that is whole, and those that were damaged and set aside."""
        aside: list[Path] = []
        for stem in reversed(self._stems()):
            found = _read(stem)
            if found is not None:
                return found, aside
            for path in (stem.with_suffix(".json"), stem.with_suffix(".safetensors")):
                if path.exists():
                    aside.append(path.with_name(f"{path.name}.damaged"))
                    os.replace(path, aside[-1])
        return None, aside

    def _stems(self) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.folder.glob("step-*.json"))


def _known(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is damaged ({problem}); begin again with --again") from problem


def _read(stem: Path) -> State | None:
    try:
        facts = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        content = stem.with_suffix(".safetensors").read_bytes()
        stated = facts.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError):  # damaged: the caller sets it aside
        return None
    if stated != _digest(content, facts):
        return None
    return State(int(facts["step"]), load(content), facts["facts"])


def _digest(content: bytes, facts: dict[str, Any]) -> str:
    made = hashlib.sha256(content)
    made.update(json.dumps(facts, sort_keys=True).encode())
    return made.hexdigest()


def differences(known: Any, wanted: Any, path: str = "") -> list[str]:
    """Where two documents differ, in words."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        names = sorted(known.keys() | wanted.keys())
        return [
            text
            for name in names
            for text in differences(known.get(name), wanted.get(name), f"{path}.{name}".strip("."))
        ]
    return [] if known == wanted else [f"{path} was {known!r}, is {wanted!r}"]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of each parameter, by "number.name"."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value)
        for number, own in state.items()
        for name, value in own.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    document = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(document | {"state": state})
