"""What these kernels were checked on: the one place that says so."""

from __future__ import annotations

# By `tests/kernels/gpu/compiled`, without spilled registers.
COMPILED_FOR = ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942")

# (name of a device, the file that `python -m benchmarks gpu` wrote there). A test compares this
# with the repository's `results/gpu-*.json`, which are not installed.
DEVICES_RUN: tuple[tuple[str, str], ...] = ()


def checks() -> str:
    """Of the kernels, on all devices."""
    names = list(dict.fromkeys(name for name, _ in DEVICES_RUN))
    run = f"run on {', '.join(names)}" if names else "never run on a device"
    return f"proved in the interpreter, compiled for {', '.join(COMPILED_FOR)}; {run}"


def run_on(name: str) -> str:
    """Whether they were run on the device of that name, and whose figures say so."""
    files = [file for device, file in DEVICES_RUN if device == name]
    if files:
        return f"run on {name}: {', '.join(files)}"
    return f"never run on {name}: `python -m benchmarks gpu` in a clone checks them there"
