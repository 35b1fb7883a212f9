"""Where a run stands, on disk: tensors as safetensors, the rest as JSON with a checksum of both.

The bytes of metrics.jsonl up to the step, the curve, are among the tensors: it goes on as the
weights do, whatever became of its file. The two newest are kept. One that does not match its
checksum is set aside, and the one before it is used; so is one of other settings.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fenchel.lens.files import write_whole

METRICS = "metrics.jsonl"
_CURVE = "curve"
_KEPT = 2
_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SafetensorError,
)


class OtherConfig(ValueError):
    """The folder holds a run of something else."""


@dataclass(frozen=True)
class State:
    """step: how many are done. facts: what JSON holds, such as the best so far. config: a mark of
    the configuration it was made with, where it is known. curve: metrics.jsonl up to the step;
    None in those of an older version."""

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    config: str | None = None
    curve: bytes | None = None


@dataclass
class Checkpoints:
    """Of one run in `folder`, whose configuration is `config` (what JSON holds)."""

    folder: Path
    config: dict[str, Any]

    def open(self, resume: bool) -> list[Path]:
        """Make the folder; refuse to go on with another configuration; or begin anew.

        Given back: checkpoints that are not known to be of this configuration, set aside.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "config.json"
        wanted = json.loads(json.dumps(self.config))
        known = path.exists()
        if resume and known:
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
        others = self._others(known)
        write_whole(path, json.dumps(wanted, indent=1, sort_keys=True).encode())
        return others

    def _others(self, known: bool) -> list[Path]:
        """known: there was a config.json, which speaks for those that do not say themselves."""
        mark, aside = _mark(self.config), []
        for stem in self._stems():
            state = _read(stem)
            stated = None if state is None else state.config
            if state is not None and stated != mark and not (stated is None and known):
                aside += _set_aside(stem, "other")
        return aside

    def save(self, state: State) -> None:
        tensors = {name: x.contiguous() for name, x in state.tensors.items()}
        if state.curve:
            tensors[_CURVE] = torch.frombuffer(bytearray(state.curve), dtype=torch.uint8)
        content = save(tensors)
        facts = {"step": state.step, "facts": state.facts, "config": _mark(self.config)}
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
            state = _read(stem)
            if state is not None:
                return state, aside
            aside += _set_aside(stem, "damaged")
        return None, aside

    def _stems(self) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.folder.glob("step-*.json"))


def _known(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged ({problem}); begin again with --again") from problem


def _read(stem: Path) -> State | None:
    try:
        facts = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        content = stem.with_suffix(".safetensors").read_bytes()
        stated = facts.pop("sha256")
        if stated != _digest(content, facts):
            return None
        tensors = load(content)
        kept = tensors.pop(_CURVE, None)
        curve = None if kept is None else kept.numpy().tobytes()
        return State(int(facts["step"]), tensors, facts["facts"], facts.get("config"), curve)
    except _DAMAGED:  # the caller sets it aside
        return None


def _set_aside(stem: Path, why: str) -> list[Path]:
    moved = []
    for path in (stem.with_suffix(".json"), stem.with_suffix(".safetensors")):
        if path.exists():
            moved.append(path.with_name(f"{path.name}.{why}"))
            os.replace(path, moved[-1])
    return moved


def _mark(config: Any) -> str:
    """Of a configuration; what is None is as if it were not there, as in `differences`."""
    plain = json.dumps(_said(json.loads(json.dumps(config))), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _said(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {name: _said(value) for name, value in part.items() if value is not None}


def _digest(content: bytes, facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(content)
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


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


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """A line that was cut by a kill, or damaged otherwise, is left out."""
    path = folder / METRICS
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and _is_number(entry.get("step"), entry.get("loss")):
            yield entry


def _is_number(*values: object) -> bool:
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of each parameter, by "number.name"."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value)
        for number, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    document = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(document | {"state": state})
