"""Plain values and arrays of numbers from a pickle, without calling anything that it names.

A pickle is a program: it may call what it names, and numpy's own constructors can be called so as
to read any place of the memory. Here the few names that an array needs stand for classes of ours,
which look at their arguments and make the array from its bytes.

A pickle can also name a value again and again. What is read here stays within a small multiple of
the file: its codes are counted, and calls make no more bytes than there are in it.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NUMBERS = re.compile(r"[<>|=]?([ui][1248]|f[248])")
_ORDERS = ("<", ">", "|", "=")
_REFUSED = {  # they make objects without a call, or look for values elsewhere
    *("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"),
    *("NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8", "EMPTY_SET", "ADDITEMS", "FROZENSET"),
}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_CODES = 2**20  # each may make an object; 50,000 labels and names of files take some 5e5
_AXES = 64  # of an array, at most, as in numpy
_SHOWN = 60  # characters of what is refused
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
    content = _Reader(raw).load()
    if not isinstance(content, dict):
        return content
    return {
        key: value.array() if isinstance(value, _Array) else value for key, value in content.items()
    }


def _scan(raw: bytes) -> None:
    """A value is put in a place with a number, and places are made up to it: one far beyond the
    values would take all of the memory."""
    for before, (code, argument, _) in enumerate(pickletools.genops(raw)):
        if code.name in _REFUSED:
            raise pickle.UnpicklingError(f"{code.name} has no place in plain values and arrays")
        if before >= _CODES:
            raise pickle.UnpicklingError(f"it has more than {_CODES:,} codes")
        if code.name in _PUTS and not 0 <= int(argument or 0) <= before:
            raise pickle.UnpicklingError(f"{code.name} {argument} after {before} codes")


def _short(value: object) -> str:
    """Written out, a value whose parts name each other could be longer than any memory."""
    return repr(value[:_SHOWN]) if isinstance(value, str) else f"a {type(value).__name__}"


class _Allowance:
    """Bytes that calls may still make: the text of each stands in the file, once for each."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def latin1(self, text: str) -> bytes:
        self.left -= len(text)
        if self.left < 0:
            raise pickle.UnpicklingError("its calls make more bytes than it has itself")
        return text.encode("latin1")


class _Named:
    """What a name stands for. It takes no state, so that a pickle can change nothing in it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"a state is set on {type(self).__name__[1:]}")


class _ArrayType(_Named):
    """numpy.ndarray, only as an argument: called, it would take an address for a value."""

    __slots__ = ()


class _Reconstruct(_Named):
    __slots__ = ("_allowance",)

    def __init__(self, allowance: _Allowance) -> None:
        self._allowance = allowance

    def __call__(self, kind: object, shape: object, letter: object) -> _Array:
        if not isinstance(kind, _ArrayType):
            raise pickle.UnpicklingError("what is reconstructed is not an array")
        # shape and letter are those of an empty one; its state comes after
        return _Array(self._allowance)


class _DtypeType(_Named):
    __slots__ = ()

    def __call__(self, code: object, align: object = False, copy: object = True) -> _Dtype:
        if not isinstance(code, str) or _NUMBERS.fullmatch(code) is None:
            raise pickle.UnpicklingError(
                f"an array of {_short(code)}; whole numbers or floats expected"
            )
        return _Dtype(code)


class _Encode(_Named):
    """How bytes are written for Python 2."""

    __slots__ = ("_allowance",)

    def __init__(self, allowance: _Allowance) -> None:
        self._allowance = allowance

    def __call__(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in {_short(encoding)}; latin1 expected")
        return self._allowance.latin1(text)


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
    __slots__ = ("_allowance", "_values")

    def __init__(self, allowance: _Allowance) -> None:
        self._allowance = allowance
        self._values: Array | None = None

    def __setstate__(self, state: object) -> None:
        """(version,) shape, dtype, by columns?, bytes."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise pickle.UnpicklingError("the state of an array is not one")
        shape, dtype, columns, content = state[-4:]
        if not _is_shape(shape):
            raise pickle.UnpicklingError("the shape of an array is none: whole numbers expected")
        if isinstance(content, str):
            content = self._allowance.latin1(content)
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


def _is_shape(shape: object) -> bool:
    """Of no more axes and no larger ones than an array can have: their product is asked for."""
    return (
        isinstance(shape, tuple)
        and len(shape) <= _AXES
        and all(type(n) is int and 0 <= n <= sys.maxsize for n in shape)
    )


class _Reader(pickle.Unpickler):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="latin1")
        allowance = _Allowance(len(raw))
        self._names: dict[tuple[str, str], _Named] = {
            ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(allowance),
            ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(allowance),
            ("numpy", "ndarray"): _ArrayType(),
            ("numpy", "dtype"): _DtypeType(),
            ("_codecs", "encode"): _Encode(allowance),
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            full = f"{module}.{name}"[:_SHOWN]
            raise pickle.UnpicklingError(
                f"a pickle of plain values holds no {full}; it was not called"
            )
        return self._names[module, name]
