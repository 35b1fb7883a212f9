"""Plain values and arrays of numbers from a pickle, without calling anything that it names.

A pickle is a program: it may call what it names, and numpy's own constructors can be called so as
to read any place of the memory. Here the few names that an array needs stand for classes of ours,
which look at their arguments and make the array from its bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NUMBERS = re.compile(r"[<>|=]?([ui][1248]|f[248])")
_ORDERS = ("<", ">", "|", "=")
_REFUSED = {  # they make objects without a call, or look for values elsewhere
    *("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"),
    *("NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8"),
}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
BROKEN = (  # all that a damaged pickle makes `read` raise
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
)


def read(raw: bytes) -> Any:
    """Lists, dictionaries, numbers, texts and arrays of numbers; a text of Python 2 is latin1.

    Arrays that are values of the outermost dictionary are numpy's; no others are expected.
    """
    _scan(raw)
    found = _Reader(io.BytesIO(raw), encoding="latin1").load()
    if not isinstance(found, dict):
        return found
    return {
        key: value.array() if isinstance(value, _Array) else value for key, value in found.items()
    }


def _scan(raw: bytes) -> None:
    """A number of a place far beyond the values would take all of the memory."""
    for code, argument, _ in pickletools.genops(raw):
        if code.name in _REFUSED:
            raise pickle.UnpicklingError(f"{code.name} has no place in plain values and arrays")
        if code.name in _PUTS and not 0 <= int(argument or 0) <= len(raw):
            raise pickle.UnpicklingError(f"{code.name} {argument} in {len(raw)} bytes")


class _Named:
    """What a name stands for. It holds nothing, so that a pickle can change nothing in it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"a state is set on {type(self).__name__[1:]}")


class _ArrayType(_Named):
    """numpy.ndarray, only as an argument: called, it would take an address for a value."""

    __slots__ = ()


class _Reconstruct(_Named):
    __slots__ = ()

    def __call__(self, kind: object, shape: object, letter: object) -> _Array:
        if not isinstance(kind, _ArrayType):
            raise pickle.UnpicklingError("what is reconstructed is not an array")
        return _Array()  # shape and letter are those of an empty one; its state comes after


class _DtypeType(_Named):
    __slots__ = ()

    def __call__(self, code: object, align: object = False, copy: object = True) -> _Dtype:
        if not isinstance(code, str) or _NUMBERS.fullmatch(code) is None:
            raise pickle.UnpicklingError(f"an array of {code!r}; whole numbers or floats expected")
        return _Dtype(code)


class _Encode(_Named):
    """How bytes are written for Python 2."""

    __slots__ = ()

    def __call__(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in {encoding!r}; latin1 expected")
        return text.encode("latin1")


class _Dtype:
    __slots__ = ("numbers",)

    def __init__(self, code: str) -> None:
        self.numbers = np.dtype(code)

    def __setstate__(self, state: object) -> None:
        """version, order of the bytes, no part, names nor fields, then sizes that follow."""
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in _ORDERS:
            raise pickle.UnpicklingError("the state of a dtype is not one")
        if any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("an array of records; numbers expected")
        self.numbers = self.numbers.newbyteorder(state[1])


class _Array:
    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: Array | None = None

    def __setstate__(self, state: object) -> None:
        """(version,) shape, dtype, by columns?, bytes."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise pickle.UnpicklingError("the state of an array is not one")
        shape, dtype, columns, content = state[-4:]
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise pickle.UnpicklingError(f"the shape of an array is {shape!r}")
        if isinstance(content, str):
            content = content.encode("latin1")
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("the values of an array are not bytes of numbers")
        wanted = math.prod(shape) * dtype.numbers.itemsize
        if len(content) != wanted:
            raise pickle.UnpicklingError(f"{shape}: {len(content)} bytes, {wanted} expected")
        flat = np.frombuffer(content, dtype.numbers)
        self._values = flat.reshape(shape, order="F" if columns else "C")

    def array(self) -> Array:
        if self._values is None:
            raise pickle.UnpicklingError("an array has no values")
        return self._values


_NAMES: dict[tuple[str, str], _Named] = {
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): _ArrayType(),
    ("numpy", "dtype"): _DtypeType(),
    ("_codecs", "encode"): _Encode(),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(
                f"a pickle of plain values holds no {module}.{name}; it was not called"
            )
        return _NAMES[module, name]
