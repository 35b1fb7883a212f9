"""Sizes of blocks and launches: a fixed table. Nothing is tried out at run time, so that the same
call gives the same bits every time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Configuration:
    """rows, keys: of a tile. few: rows of a program that reads lists. capacity: of a row's list.
    chunk: bytes of scratch memory. parts: programs that a kernel of columns aims at."""

    rows: int
    keys: int
    few: int
    capacity: int
    chunk: int = 2**28
    programs: int = 256
    warps: int = 4  # of `bound`
    heavy: int = 4  # warps of kernels that hold more of a tile
    # Pieces of a tile, so that two products and more fit the registers: for rows, for columns.
    split: tuple[int, int] = (1, 1)
    stages: int = 2
    run: int = 64
    lanes: int = 1024
    # Most steps of Newton's search: from one key of each lane, from a list, over tiles.
    steps: tuple[int, int, int] = (8, 32, 32)


# In Triton's interpreter: small, so that short sequences have several blocks, chunks and crowds.
INTERPRETED = Configuration(16, 16, 8, 16, chunk=2**15, programs=6, split=(2, 4), run=16, lanes=64)


def configuration(device: torch.device, dtype: torch.dtype, width: int) -> Configuration:
    """width: of the widest head, padded."""
    if device.type == "cpu":
        return INTERPRETED
    if dtype == torch.float32:
        rows, keys = (32, 32) if width <= 128 else (16, 16)
        return Configuration(rows, keys, 16, 128, warps=4, heavy=4, stages=1)
    if width <= 64:
        return Configuration(64, 64, 16, 128, warps=4, heavy=4, split=(2, 4), stages=1)
    if width <= 128:
        return Configuration(64, 64, 16, 128, warps=8, heavy=8, split=(4, 4), stages=1)
    return Configuration(32, 32, 16, 128, warps=8, heavy=8, stages=1)
