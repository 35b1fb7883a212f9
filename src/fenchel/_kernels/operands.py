"""What a native operator is handed, checked: it reads memory by shape and dtype alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.gpu.device import is_asked_for, load

DOUBLE = (torch.float64,)
FULL = (torch.float32, torch.float64)
REAL = (*FULL, torch.float16, torch.bfloat16)
MOST_KEYS = 2**31 - 1  # native code counts them in 32 bits


class Axis(str):
    """The name of an axis of any length: it equals every number, so that shapes compare at once."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def check(
    tensor: Tensor, name: str, shape: tuple[int | Axis, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse an operand of another shape or dtype."""
    if tensor.shape == shape and tensor.dtype in dtypes:
        return
    axes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{name} must have shape ({axes}) and dtype {kinds}, got {tuple(tensor.shape)} of "
        f"{str(tensor.dtype).removeprefix('torch.')}"
    )


def check_keys(count: int) -> None:
    """Refuse more keys than native code can number."""
    if count > MOST_KEYS:
        raise ValueError(f"a row may have {MOST_KEYS} keys at most, got {count}")


def register_native(
    library: torch.library.Library,
    name: str,
    kernel: Callable[..., Any],
    shapes: Callable[..., Any],
    gpu: str | None = None,
) -> Any:
    """The operator `fenchel::name` on the CPU; shapes: empty outputs for the same operands.

    gpu: the same in Triton, as "module:function" below `fenchel._kernels.gpu`, loaded by the first
    call. It runs on CUDA tensors, and on CPU tensors inside `fenchel.use("gpu")`.
    """
    if gpu is None:
        library.impl(name, kernel, "CPU")
    else:
        library.impl(name, lambda *x: (load(gpu) if is_asked_for() else kernel)(*x), "CPU")
        library.impl(name, lambda *x: load(gpu)(*x), "CUDA")
    torch.library.register_fake(f"fenchel::{name}", _on_one_device(shapes), lib=library)
    return getattr(torch.ops.fenchel, name).default


def _on_one_device(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """For `register_fake`: torch would run it, too, where one operand of several is on `meta`."""

    def checked(*operands: Any) -> Any:
        devices = {operand.device for operand in operands if isinstance(operand, Tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"all operands must be on one device, got {names}; move them")
        return shapes(*operands)

    return checked
