"""The native library: found, loaded and described to ctypes. Everything works without it, slower.

It is built when the package is installed and a C++ compiler is present. `FENCHEL_NATIVE=0` in the
environment leaves it alone.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from ctypes import POINTER, Structure
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels.structures import HEADER, checksum, read_structures

BLOCK = 48  # rows of queries handled together: kBlock of native/problem.h
VARIANTS = ("plain", "avx2", "avx512")

_NO_MEMORY, _DONE = 0, 1  # as native/parallel.h numbers them

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


_STRUCTURES = read_structures(HEADER.read_text(encoding="utf-8"))
View = _STRUCTURES["View"]
AttentionProblem = _STRUCTURES["AttentionProblem"]
AttentionGradient = _STRUCTURES["AttentionGradient"]
RowsProblem = _STRUCTURES["RowsProblem"]
RowsGradient = _STRUCTURES["RowsGradient"]
BallProblem = _STRUCTURES["BallProblem"]
MixtureProblem = _STRUCTURES["MixtureProblem"]
AverageProblem = _STRUCTURES["AverageProblem"]
CacheProblem = _STRUCTURES["CacheProblem"]
AppendProblem = _STRUCTURES["AppendProblem"]
BoundsProblem = _STRUCTURES["BoundsProblem"]


def view(tensor: Tensor | None) -> Structure:
    """Up to four axes, missing ones last; no tensor is a view of nothing."""
    if tensor is None:
        return View()
    return View(tensor.data_ptr(), _DTYPES.get(tensor.dtype, 0), *tensor.stride())


def code(dtype: torch.dtype) -> int:
    """The native code's number for a precision."""
    return _DTYPES[dtype]


class Library:
    """The loaded functions."""

    def __init__(self, path: Path) -> None:
        native = ctypes.CDLL(str(path))
        self._native = native
        signatures = {
            "attention": [POINTER(AttentionProblem)],
            "attention_gradient": [POINTER(AttentionProblem), POINTER(AttentionGradient)],
            "row_map": [POINTER(RowsProblem)],
            "row_map_gradient": [POINTER(RowsGradient)],
            "paraboloid": [POINTER(BallProblem)],
            "mixture": [POINTER(MixtureProblem)],
            "average": [POINTER(AverageProblem)],
            "append": [POINTER(AppendProblem)],
            "bounds": [POINTER(BoundsProblem)],
            "shadow_bytes": [ctypes.c_int64],
            "variant": [],
            "choose": [ctypes.c_int],
            "screen": [ctypes.c_int],
            "screened": [],
            "block": [],
            "layout": [],
        }
        stale = OSError(f"{path.name} is of another version; install fenchel again")
        for name, arguments in signatures.items():
            function = getattr(native, f"fenchel_{name}", None)
            if function is None:
                raise stale
            function.argtypes, function.restype = arguments, ctypes.c_int
        native.fenchel_layout.restype = ctypes.c_uint32
        native.fenchel_screened.restype = ctypes.c_int64
        native.fenchel_shadow_bytes.restype = ctypes.c_int64
        if native.fenchel_block() != BLOCK or native.fenchel_layout() != checksum():
            raise stale

    def call(self, name: str, *operands: Structure) -> None:
        """Run one kernel. The interpreter's lock is released meanwhile."""
        outcome = getattr(self._native, f"fenchel_{name}")(*map(ctypes.byref, operands))
        if outcome != _DONE:
            raise _failure(outcome, name)

    def packed(self, name: str, operands: int) -> Callable[..., None]:
        """The same kernel for structs that were packed into bytes."""
        return self._typed(name, [ctypes.c_char_p] * operands)

    def addressed(self, name: str) -> Callable[[int], None]:
        """The same kernel for a struct at an address."""
        return self._typed(name, [ctypes.c_void_p])

    def _typed(self, name: str, arguments: list[Any]) -> Callable[..., None]:
        kernel = self._native[f"fenchel_{name}"]  # with types of its own
        kernel.argtypes, kernel.restype = arguments, ctypes.c_int

        def call(*structs: Any) -> None:
            outcome = kernel(*structs)
            if outcome != _DONE:
                raise _failure(outcome, name)

        return call

    @property
    def variant(self) -> str:
        """The instruction set in use."""
        return VARIANTS[self._native.fenchel_variant()]

    def choose(self, variant: str) -> str:
        """Use a lesser instruction set than the machine's best, to compare them."""
        return VARIANTS[self._native.fenchel_choose(VARIANTS.index(variant))]

    def screen(self, on: bool) -> bool:
        """Drop keys by products of rounded operands first, or score all; the same bits."""
        return bool(self._native.fenchel_screen(on))

    def shadow_bytes(self, dim: int) -> int:
        """Of the shadow of one page of one head of a cache, for keys of so many components."""
        return int(self._native.fenchel_shadow_bytes(dim))

    @property
    def screened(self) -> int:
        """How often a row was screened against a chunk of keys, in all calls so far."""
        return int(self._native.fenchel_screened())


def _failure(outcome: int, name: str) -> Exception:
    if outcome == _NO_MEMORY:
        return MemoryError(f"no memory for the scratch space of fenchel's {name}")
    return ValueError(f"what {name} was given as saved is of a call with other operands")


_VARIABLE = "FENCHEL_NATIVE"
# What `os.environ` wraps: its own lookup of an absent name costs as much as a short row.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_KEY = os.environ.encodekey(_VARIABLE) if _ENVIRONMENT is not os.environ else _VARIABLE


def is_mentioned() -> bool:
    """The environment says whether to use the library."""
    return _KEY in _ENVIRONMENT


def is_disabled() -> bool:
    """By the environment; `fenchel.use` may still ask for the kernels."""
    return os.environ.get(_VARIABLE, "1") == "0"


@cache
def loaded() -> Library | None:
    """The library where it is built and of this version; `why_absent` says what is wrong."""
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        return None
    try:
        return Library(path)
    except OSError as problem:  # of another version or machine: everything works without it
        warnings.warn(f"{problem}; fenchel computes with torch alone, slower", stacklevel=2)
        return None


def why_absent() -> str:
    """One sentence for who wonders why the native kernels do not run."""
    if is_disabled():
        return "disabled by FENCHEL_NATIVE=0: results are the same, slower"
    if Path(__file__).with_name("_native.so").exists():
        return "the native library is of another version; install fenchel again"
    return "not built (no C++ compiler at installation): results are the same, slower"


def run(name: str, *operands: Structure) -> None:
    """Call a kernel that has no other implementation."""
    _needed(name).call(name, *operands)


def packed(name: str, operands: int) -> Callable[..., None]:
    """A kernel that has no other implementation, for structs that were packed into bytes."""
    return _needed(name).packed(name, operands)


def addressed(name: str) -> Callable[[int], None]:
    """A kernel that has no other implementation, for a struct at an address."""
    return _needed(name).addressed(name)


def _needed(name: str) -> Library:
    library = loaded()
    if library is None:
        raise RuntimeError(f"{name} needs fenchel's native library: {why_absent()}")
    return library


if not is_disabled():
    loaded()  # now, not under limits of memory that a program may set later
