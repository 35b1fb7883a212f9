"""Triton's interpreter, mended where it computes something else than a device does.

- bfloat16, which the interpreter keeps as 16 bits: conversions round to nearest even, products of
  matrices are right, and arithmetic is refused (kernels convert to float32 first);
- tf32: the operands of such products are rounded to it;
- the maximum or minimum of a number and NaN is the number;
- a comparison of single numbers is a truth value, whatever it meets later;
- overflow and NaN pass without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BUILDER = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle

# What computes with floating-point numbers, by its name in the interpreter.
_COMPARISONS = (
    *(f"fcmp{order}" for order in ("OLT", "OGT", "OLE", "OGE", "OEQ", "ONE")),
    *(f"fcmp{order}" for order in ("ULT", "UGT", "ULE", "UGE", "UEQ", "UNE")),
    *(f"icmp{order}" for order in ("SLT", "SGT", "SLE", "SGE", "EQ", "NE")),
    *(f"icmp{order}" for order in ("ULT", "UGT", "ULE", "UGE")),
)
_ARITHMETIC = (
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fma", "precise_divf", "clampf"),
    *("minimumf", "minnumf", "maximumf", "maxnumf", "floor", "ceil"),
    *("exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt", "sin", "cos", "erf"),
    *_COMPARISONS,
)


class BFloat16Arithmetic(TypeError):
    """A kernel computes in bfloat16, which not every device can."""


@cache
def mend() -> None:
    """Replace what is wrong, once in a process, before any kernel runs."""
    cast, dot, clamp = _BUILDER.cast_impl, _BUILDER.create_dot, _BUILDER.create_clampf
    _BUILDER.cast_impl = _mended_cast(cast)
    for name in ("fp_ext", "fp_trunc"):
        setattr(_BUILDER, f"create_{name}", _BUILDER.cast_impl)
    _BUILDER.create_dot = _mended_dot(dot)
    _BUILDER.create_clampf = _mended_clamp(clamp)
    _BUILDER.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    _BUILDER.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    for name in _COMPARISONS:
        setattr(_BUILDER, f"create_{name}", _truth(getattr(_BUILDER, f"create_{name}")))
    for name in _ARITHMETIC:
        operation = getattr(_BUILDER, f"create_{name}")
        setattr(_BUILDER, f"create_{name}", _in_float32(operation))
    reduction = interpreter.ReduceScanOpInterface
    reduction.check_tensor = _reduced_in_float32(reduction.check_tensor)
    executor = interpreter.GridExecutor
    executor.__call__ = _without_warnings(executor.__call__)


def widen(bits: Any) -> Any:
    """Bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Any) -> Any:
    """float32 to bits of bfloat16, to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def round_to_tf32(values: Any) -> Any:
    """float32 with ten bits of mantissa."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def _mended_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == after or tl.bfloat16 not in (before, after):
            return original(self, source, target)
        values = widen(source.data) if before == tl.bfloat16 else source.data
        if after == tl.bfloat16:
            return _Handle(narrow(values), after)
        return _Handle(values.astype(interpreter._get_np_dtype(after)), after)

    return cast


def _mended_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: int) -> Any:
        tf32 = precision == interpreter._ir.INPUT_PRECISION.TF32
        a, b = (_product_operand(x, tf32) for x in (a, b))
        return original(self, a, b, total, precision, imprecise)

    return dot


def _product_operand(x: Any, tf32: bool) -> Any:
    if x.dtype.scalar == tl.bfloat16:
        return _Handle(widen(x.data), tl.float32)
    if tf32 and x.dtype.scalar == tl.float32:
        return _Handle(round_to_tf32(x.data), tl.float32)
    return x


def _mended_clamp(original: Callable[..., Any]) -> Callable[..., Any]:
    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        if propagate == interpreter._ir.PROPAGATE_NAN.ALL:
            return original(self, x, low, high, propagate)
        return self.ternary_op(x, low, high, lambda v, lo, hi: np.fmin(np.fmax(v, lo), hi))

    return clamp


def _truth(comparison: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, a, b: _Handle(comparison(self, a, b).data, tl.int1)


def _in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *operands: Any) -> Any:
        _refuse_bfloat16(x for x in operands if isinstance(x, _Handle))
        return operation(self, *operands)

    return checked


def _reduced_in_float32(check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, operands: Any) -> None:
        check(self, operands)
        _refuse_bfloat16(operands)

    return checked


def _refuse_bfloat16(operands: Any) -> None:
    if any(x.dtype.scalar == tl.bfloat16 for x in operands):
        raise BFloat16Arithmetic("arithmetic in bfloat16: convert to float32 first")


def _without_warnings(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a row that is all NaN
            return launch(self, *arguments, **options)

    return run
