"""Where Triton's kernels can run: on CUDA devices (NVIDIA's or AMD's), and interpreted on the CPU.

With `TRITON_INTERPRET=1` in the environment of a process, triton makes every kernel a Python
function that runs on CPU tensors. A process interprets or compiles, never both.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.choice import CHOSEN, GPU, Reason, other_than
from fenchel._kernels.gpu.devices_run import checks, run_on
from fenchel._numerics import exported_to_onnx, transformed

_OLDEST = (7, 5)  # compute capability: Turing, the oldest that the kernels are compiled for
_INSTALL = 'pip install --no-deps "triton==3.7.1", which torch 2.13 pairs with'


@cache
def is_installed() -> bool:
    """Whether triton is there; it is not imported for the answer."""
    return importlib.util.find_spec("triton") is not None


@cache
def is_interpreted() -> bool:
    """Whether kernels run in triton's interpreter: decided once, as triton does for each kernel."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def is_asked_for() -> bool:
    """Inside `fenchel.use("gpu")`: CPU tensors go to interpreted kernels."""
    return CHOSEN.get() == GPU


# Compiled code keeps the choice that it was made with, as in `against_library` of `route.py`.
is_asked_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def asked_again(asked: bool) -> Iterator[None]:
    """For a backward pass, which may run outside of the block that its forward pass ran in."""
    token = CHOSEN.set(GPU) if asked else None
    try:
        yield
    finally:
        if token is not None:
            CHOSEN.reset(token)


def check_available() -> None:
    """Refuse `fenchel.use("gpu")` where it could run nothing."""
    if not is_installed():
        raise RuntimeError(f"the GPU kernels need triton, which is not installed: {_INSTALL}")
    if not is_interpreted() and not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device is here; to run the GPU kernels in triton's interpreter on CPU "
            "tensors, start the process with TRITON_INTERPRET=1 in its environment"
        )


def describe_gpu() -> tuple[bool, str]:
    """Whether these kernels run here, and what they were checked on, for `fenchel info`."""
    if not is_installed():
        return False, f"triton is not installed; {checks()}"
    if is_interpreted():
        reason = _against_device(torch.device("cpu"))
        return reason is None, f"{reason or 'in the interpreter, on CPU tensors'}; {checks()}"
    if not torch.cuda.is_available():
        return False, f"no CUDA device found; {checks()}"
    reasons, told = [], []
    for index in range(torch.cuda.device_count()):
        reasons.append(_against_device(torch.device("cuda", index)))
        told.append(reasons[-1] or run_on(torch.cuda.get_device_name(index)))
    return None in reasons, "; ".join([*dict.fromkeys(told), checks()])


def against_gpu(like: Tensor) -> Reason:
    """What holds for every kernel in Triton."""
    reason = _against_device(like.device)
    if reason is not None:
        return reason
    if like.layout != torch.strided:
        return f"GPU kernels read dense tensors, got {like.layout}"
    if exported_to_onnx():
        return "ONNX knows torch's operations alone"
    if transformed():
        return "a transform (vmap, jvp, torch.func) is active, which only torch's operations take"
    return None


def _against_device(device: torch.device) -> Reason:
    if device.type == "cpu" and not is_asked_for():
        return 'GPU kernels run on CPU tensors only inside fenchel.use("gpu")'
    if device.type not in ("cpu", "cuda"):
        return f"GPU kernels run on CUDA devices, the operands are on {device}"
    other = other_than(GPU)
    if other is not None:
        return other
    if not is_installed():
        return f"triton is not installed ({_INSTALL})"
    if device.type == "cpu":
        why = "the operands are on the CPU, and TRITON_INTERPRET=1 was not set for this process"
        return None if is_interpreted() else why
    if is_interpreted():
        return "TRITON_INTERPRET=1 is set: kernels of this process run on CPU tensors alone"
    return _against_capability(device)


_against_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _against_capability(device: torch.device) -> Reason:
    """Asked of the driver once for each device."""
    if torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= _OLDEST:
        return None
    name = torch.cuda.get_device_name(device)
    return f"GPU kernels need compute capability 7.5 (Turing) or later, {name} has {capability}"


@cache
def load(place: str) -> Callable[..., Any]:
    """The function at "module:function" of this package, whose module imports triton."""
    if is_interpreted():
        import_module("fenchel._kernels.gpu.interpreter").mend()
    module, _, function = place.partition(":")
    kernel: Callable[..., Any] = getattr(import_module(f"fenchel._kernels.gpu.{module}"), function)
    return kernel


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Every launch goes through here."""
    kernel[grid](*arguments, **constants)


def registers(most: int) -> dict[str, int]:
    """An option of launches: the registers that a thread may have on an NVIDIA device.

    Left alone, NVIDIA's compiler stores a few bytes elsewhere to fit one more program on a device.
    """
    if is_interpreted():
        return {}
    target = import_module("triton.runtime.driver").driver.active.get_current_target()
    return {"maxnreg": most} if target.backend == "cuda" else {}
