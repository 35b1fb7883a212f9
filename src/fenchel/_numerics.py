"""Numbers that every room needs: precision, and functions that stay smooth where
the textbook formula divides zero by zero. Nothing here knows about attention."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32; float32 and float64 as they are."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def certificate_dtype(device: torch.device) -> torch.dtype:
    """Certificates are evaluated in float64, except on devices that lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """A block in which autocast leaves matrix products alone."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):  # such as meta
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def readable(*tensors: Tensor | None) -> bool:
    """Whether Python may look at the values: not while compiling, under vmap, or on fake data."""
    if torch.compiler.is_compiling() or traced():
        return False
    return all(_holds_values(tensor) for tensor in tensors if tensor is not None)


def traced() -> bool:
    """`torch.jit.trace` or `make_fx` writes down what runs: a value that Python read would be
    part of it."""
    if torch._C._get_tracing_state() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def exported_to_onnx() -> bool:
    """Only torch's own operators have a meaning there."""
    return (torch.compiler.is_compiling() or traced()) and _onnx_is_written()


def _onnx_is_written() -> bool:
    return torch.onnx.is_in_onnx_export()


_onnx_is_written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read, not traced


def is_symbolic(number: object) -> bool:
    """A number that stands for many in what is traced: a length, or what depends on it."""
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return True
    if isinstance(number, Tensor):  # so `torch.jit.trace` writes lengths
        return number.ndim == 0 and torch._C._get_tracing_state() is not None
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return isinstance(number, int | float) and not has_static_value(number)


def transformed() -> bool:
    """Inside vmap, jvp, grad or another transform that only plain operations survive."""
    if torch.compiler.is_compiling():
        return False
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None or torch.autograd.forward_ad._current_level >= 0


def forward_mode() -> bool:
    """Whether tangents may be carried along, by jvp or a dual level."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def _holds_values(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return tensor.device.type != "meta" and type(tensor) in (Tensor, torch.nn.Parameter)


def waits(device: torch.device) -> bool:
    """Whether who reads a value there waits until all that was asked of the device is done."""
    return device.type == "cuda"


def at_hand(*tensors: Tensor | None) -> bool:
    """Readable without waiting. What is looked at in passing, for a good message or a shorter way,
    is looked at where this holds: on a device nothing is read unless an answer depends on it."""
    if any(tensor is not None and waits(tensor.device) for tensor in tensors):
        return False
    return readable(*tensors)


def has(condition: Tensor) -> bool:
    """`condition` holds somewhere, as far as Python may look; False where it may not."""
    return readable(condition) and bool(condition.any())


def check_whole(value: object, name: str, low: int) -> None:
    """Refuse anything but a whole number >= low."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


def check_positive(value: float, name: str) -> None:
    """Refuse anything but a finite number > 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value}")


def expands_to(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of this shape can be expanded to the target."""
    try:
        return bool(torch.broadcast_shapes(shape, target) == target)
    except RuntimeError:
        return False


def check_tensor(value: object, name: str) -> None:
    """Refuse anything but a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; use torch.tensor")


def check_local(tensor: Tensor, name: str) -> None:
    """Refuse a tensor whose parts lie with several processes."""
    if type(tensor).__name__ == "DTensor":  # its class is dear to import
        raise NotImplementedError(
            f"{name} is a DTensor, which fenchel does not compute with; rows are independent, so "
            "let each process compute its part: wrap the function in "
            "torch.distributed.tensor.experimental.local_map, or pass "
            f"{name}.to_local(), or {name}.full_tensor()"
        )


class NonFiniteError(ValueError):
    """A tensor holds NaN or infinity where numbers are needed: so ends a training that diverges."""


def check_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity, where the values can be read."""
    wrong = ~values.detach().isfinite()
    if has(wrong):
        count = f"{int(wrong.sum())} of {wrong.numel()}"
        raise NonFiniteError(f"{name} must be finite; got NaN or infinity in {count} places")


def where(condition: Tensor, values: Tensor, other: float) -> Tensor:
    """torch.where with a number on the other side, in the dtype of `values`."""
    return torch.where(condition, values, values.new_full((), other))


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value of the last axis where `mask` holds; -inf for a row without any. (..., 1)"""
    if values.shape[-1] == 0:
        return values.new_full((*values.shape[:-1], 1), -torch.inf)
    return where(mask, values, -torch.inf).amax(-1, keepdim=True)


def exponent_limit(dtype: torch.dtype) -> float:
    """Largest exponent whose exponential may still be multiplied with another."""
    return 0.45 * math.log(torch.finfo(dtype).max)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner product over the last axis in plain operations, which autocast leaves alone."""
    return (left * right).sum(-1)


# Below this size the ratios use their series: beyond it, three derivatives of the quotient
# lose at most a factor 1/0.25^3 = 64 of precision; within it, the series below are exact.
_SERIES_RADIUS = 0.25


def log1p_ratio(x: Tensor) -> Tensor:
    """log(1 + x) / x for x > -1, smooth through x = 0 with its derivatives of every order."""
    near = x.abs() < _SERIES_RADIUS
    small, large = where(near, x, 0.0), where(~near, x, 1.0)
    # log1p(x) = 2 artanh(y), y = x / (2 + x): an odd series whose terms fall by y^2 < 0.021.
    y = small / (2.0 + small)
    series = _horner(y * y, [1.0 / (2 * k + 1) for k in range(11)]) * 2.0 / (2.0 + small)
    return torch.where(near, series, torch.log1p(large) / large)


def expm1_ratio(x: Tensor) -> Tensor:
    """(exp(x) - 1) / x, smooth through x = 0 with its derivatives of every order."""
    near = x.abs() < _SERIES_RADIUS
    small, large = where(near, x, 0.0), where(~near, x, 1.0)
    coefficients, factorial = [], 1.0
    for k in range(14):
        factorial *= k + 1
        coefficients.append(1.0 / factorial)
    return torch.where(near, _horner(small, coefficients), torch.expm1(large) / large)


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
