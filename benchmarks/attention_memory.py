"""How much memory an attention takes beyond its inputs: the peak of a process of its own.

`python -m benchmarks.attention_memory '{"method": "torch SDPA", "n": 1024}'` measures one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_methods import Shape, named, thunk

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_TIMEOUT = 300  # seconds
_SMALL = 64  # tokens of a first call, which loads what is loaded only once


@dataclass(frozen=True)
class Request:
    """Forward and backward of one method."""

    method: str
    n: int
    deviation: float = 1.0
    heads: int = 8
    dim: int = 64
    seed: int = 0
    threads: int = 1


@dataclass(frozen=True)
class Peak:
    """Bytes above those in use once the inputs are there; or why there are none."""

    method: str
    n: int
    extra: int | None
    error: str = ""


def measure(request: Request) -> Peak:
    """In a fresh process, so that nothing freed before can hide what is needed."""
    command = [sys.executable, "-m", "benchmarks.attention_memory", json.dumps(asdict(request))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Peak(request.method, request.n, None, f"took more than {_TIMEOUT} seconds")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Peak(request.method, request.n, None, f"exit status {done.returncode}: {last[:200]}")
    return Peak(request.method, request.n, json.loads(done.stdout)["extra_bytes"])


def extra_bytes(request: Request) -> int:
    """Measured in this process: the peak of one call less what was in use just before it."""
    torch.set_num_threads(request.threads)
    shape = Shape(request.heads, request.dim, request.seed)
    method = named(request.method)
    thunk(method, shape.inputs(_SMALL, request.deviation), "forward+backward")()
    call = thunk(method, shape.inputs(request.n, request.deviation), "forward+backward")
    before = _forget_peak()
    kept = call()  # the result stays alive until the peak is read
    after = _peak()
    del kept
    return max(0, after - before)


def _forget_peak() -> int:
    """Start a new peak at what is in use now; where that is refused, the old peak must do."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        import resource  # absent on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


def main(arguments: list[str]) -> None:
    fields: dict[str, Any] = json.loads(arguments[0])
    print(json.dumps({"extra_bytes": extra_bytes(Request(**fields))}))


if __name__ == "__main__":
    main(sys.argv[1:])
