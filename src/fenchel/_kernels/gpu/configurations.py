"""Sizes of blocks and launches: a fixed table. Nothing is tried out at run time, so that the same
call gives the same bits every time. Where it says so, a size was chosen by compiling: without
spilled registers, and with little more shared memory than the device has for two programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

INTERPRETER, HIP = "interpreter", "hip"  # other architectures are called sm_75, sm_80, ...
_REGISTERS = 255  # the most that a thread can have
_TENSOR_CORES = 80  # before, Triton multiplies half precision by ordinary instructions


@dataclass(frozen=True)
class Configuration:
    """rows, keys: of a tile. few: rows of a program of one warp, which reads lists and takes as
    many steps as the longest of them has entries. capacity: of a row's list. warps: of a program
    with one product, and of one with more. split: pieces of a tile, so that two products and more
    fit the registers, for kernels of rows and of columns."""

    rows: int
    keys: int
    few: int = 4
    capacity: int = 128
    warps: tuple[int, int] = (4, 4)
    stages: int = 1
    split: tuple[int, int] = (1, 1)
    chunk: int = 2**28  # bytes of scratch memory
    registers: int | None = None  # of a thread at most: said, nothing is spilled for less
    programs: int = 256  # that `columns`, and decoding, aim at
    run: int = 64  # least keys of a program that reads a part of them, in decoding
    lanes: int = 1024  # numbers of one row that a program holds, in decoding
    multiplies_bytes: bool = True  # Triton has products of bytes for it
    # Most steps of Newton's search: from one key of each lane, from a list, over tiles.
    steps: tuple[int, int, int] = (5, 32, 32)


# Small, so that short sequences have several blocks, chunks and lists that overflow.
_INTERPRETED = Configuration(
    32, 32, 32, 16, split=(1, 2), chunk=2**16, programs=6, run=32, lanes=256
)


def configuration(
    architecture: str, dtype: torch.dtype, width: int, rich: bool = False
) -> Configuration:
    """width: of the widest head, padded. rich: more than a closed form and limits is computed for
    each pair of a query and a key."""
    if architecture == INTERPRETER:
        return _INTERPRETED
    chosen = _of_tensor_cores(architecture, dtype, width, rich)
    nvidia = architecture.startswith("sm_")
    return replace(chosen, registers=_REGISTERS) if nvidia else chosen


def _of_tensor_cores(
    architecture: str, dtype: torch.dtype, width: int, rich: bool
) -> Configuration:
    old = architecture.startswith("sm_") and int(architecture[3:]) < _TENSOR_CORES
    if dtype == torch.float32 or old:
        half = dtype != torch.float32  # converted before it is multiplied
        chosen = _without_tensor_cores(2 * width if half and width > 64 else width)
        return replace(chosen, multiplies_bytes=not old)
    if rich or width > 128:
        return Configuration(32, 32, warps=(4, 8), split=(2, 2))
    if width <= 64:
        amd = architecture == HIP or architecture.startswith("gfx")
        return Configuration(64, 32, split=(2, 4)) if amd else Configuration(64, 32, stages=2)
    return Configuration(64, 64, warps=(8, 8), split=(4, 4))


def _without_tensor_cores(width: int) -> Configuration:
    rows = 32 if width <= 128 else 16
    return Configuration(rows, rows, warps=(4, 8), split=(2, 2) if rows == 32 else (1, 1))


@cache
def architecture(device: torch.device) -> str:
    """The name of a device's, as the table has it."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip is not None:
        return HIP
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
