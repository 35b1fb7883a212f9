"""Every access of an interpreted kernel to memory, checked. `Fault` says what was found:

- an access outside of the tensor whose pointer it was made from;
- an element that is written twice, by two programs or by one;
- one store with two values for an element;
- an element that is both read and written: on a device nothing orders the two;
- an atomic operation: the order of its sums would be a matter of chance;
- on demand, an output that a launch did not write to its end.

Once this file is imported, all launches of the process are checked. Triton wraps a fault, as every
error in a kernel, in an `InterpreterError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

from fenchel._kernels.gpu.interpreter import mend

Handle = interpreter.TensorHandle
NOBODY = -1


class Fault(RuntimeError):
    """What a kernel must not do."""


# ---- what is known of memory


class Memory:
    """What the tensors of a launch share of a storage: which program read and wrote each unit."""

    def __init__(self, first: int, last: int, unit: int) -> None:
        self.first, self.unit = first, unit  # an address; bytes of the smallest element
        self.reader = np.full((last - first) // unit, NOBODY, np.int32)
        self.writer = np.full((last - first) // unit, NOBODY, np.int32)

    def units(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """The units of elements of so many bytes. (elements, units of one)"""
        first = (addresses - self.first) // self.unit
        return first[:, None] + np.arange(width // self.unit)


@dataclass(eq=False)
class Argument:
    """A tensor that a kernel was handed, and the memory that it is a view of."""

    name: str
    tensor: Tensor
    memory: Memory

    @property
    def width(self) -> int:
        return self.tensor.element_size()

    def units(self, addresses: np.ndarray, what: str) -> np.ndarray:
        """What lies at these addresses; a fault where one is not an element of the tensor."""
        offsets, span = (addresses - self.tensor.data_ptr()) // self.width, span_of(self.tensor)
        if offsets.min() < 0 or offsets.max() >= span:
            raise Fault(
                f"{what} {self.name} out of bounds: elements {offsets.min()} to {offsets.max()} "
                f"of {span}"
            )
        if span != self.tensor.numel() and not np.isin(offsets, self.offsets()).all():
            shape, strides = tuple(self.tensor.shape), self.tensor.stride()
            raise Fault(f"{what} {self.name} between the elements of {shape}, strides {strides}")
        return self.memory.units(addresses, self.width)

    def offsets(self) -> np.ndarray:
        """Of the elements, from the first one."""
        offsets = np.zeros(1, np.int64)
        for length, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True):
            offsets = (offsets[:, None] + np.arange(length) * stride).ravel()
        return offsets

    def count_unwritten(self) -> int:
        addresses = self.tensor.data_ptr() + self.offsets() * self.width
        written = self.memory.writer[self.memory.units(addresses, self.width)] != NOBODY
        return int((~written.all(-1)).sum())


def span_of(tensor: Tensor) -> int:
    """Elements from the first to the last, with those in between that are none of the tensor's."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((length - 1) * stride for length, stride in pairs) + 1


@dataclass
class Launch:
    """One launch: its arguments by name, and what it did."""

    kernel: str
    arguments: dict[str, Argument] = field(default_factory=dict)
    loads: int = 0
    stores: int = 0

    @classmethod
    def of(cls, kernel: str, tensors: dict[str, Tensor]) -> Launch:
        groups: dict[int, dict[str, Tensor]] = {}  # by the storage that they share
        for name, tensor in tensors.items():
            groups.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor
        arguments = {}
        for group in groups.values():
            first = min(x.data_ptr() for x in group.values())
            last = max(x.data_ptr() + span_of(x) * x.element_size() for x in group.values())
            memory = Memory(first, last, min(x.element_size() for x in group.values()))
            arguments |= {name: Argument(name, x, memory) for name, x in group.items()}
        return cls(kernel, arguments)

    def load(self, argument: Argument, addresses: np.ndarray, program: int) -> None:
        self.loads += 1
        units = argument.units(addresses, "load from")
        writer = argument.memory.writer[units].max()
        if writer != NOBODY:
            name = argument.name
            raise Fault(f"program {program} reads what program {writer} wrote to {name}")
        argument.memory.reader[units] = program

    def store(
        self, argument: Argument, addresses: np.ndarray, values: np.ndarray, program: int
    ) -> None:
        self.stores += 1
        units = argument.units(addresses, "store to")
        for verb, who in (("read", argument.memory.reader), ("wrote", argument.memory.writer)):
            other = who[units].max()
            if other != NOBODY:
                name = argument.name
                raise Fault(f"program {program} writes to {name} what program {other} {verb}")
        if _has_two_values(addresses, values):
            raise Fault(f"one store has two values for an element of {argument.name}")
        argument.memory.writer[units] = program

    def check_complete(self, outputs: frozenset[str]) -> None:
        for name, argument in self.arguments.items():
            count = argument.count_unwritten() if f"{self.kernel}.{name}" in outputs else 0
            if count:
                raise Fault(f"{self.kernel} left {count} elements of {name} unwritten")


def _has_two_values(addresses: np.ndarray, values: np.ndarray) -> bool:
    """Two lanes may write an element if their bits agree."""
    order = np.argsort(addresses, kind="stable")
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")[order]
    same_place = np.diff(addresses[order]) == 0
    return bool((same_place & (bits[1:] != bits[:-1])).any())


# ---- what a test asks for


@dataclass
class Watch:
    """complete: outputs that must be written to their end, as "kernel.argument"."""

    complete: frozenset[str]
    launches: list[Launch] = field(default_factory=list)  # those that ended, without arguments


_WATCHES: list[Watch] = []


@contextmanager
def watch(*complete: str) -> Iterator[list[Launch]]:
    """Yields the list of launches, which grows as they end.

    complete: outputs that a launch must write to their end, as "kernel.argument".
    """
    _WATCHES.append(Watch(frozenset(complete)))
    try:
        yield _WATCHES[-1].launches
    finally:
        _WATCHES.pop()


# ---- the hooks

_RUNNING: list[Launch] = []  # one at most: kernels launch no kernels


def _checked_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *values: Any, **by_name: Any) -> Any:
        arguments = dict(zip(self.arg_names, values, strict=False)) | by_name
        tensors = dict(_tensors_of(arguments))
        launch = Launch.of(self.fn.__name__, tensors)
        _RUNNING.append(launch)
        try:
            original(self, *values, **by_name)
        finally:
            _RUNNING.pop()
        for each in _WATCHES:
            launch.check_complete(each.complete)
        launch.arguments.clear()
        for each in _WATCHES:
            each.launches.append(launch)

    return run


def _tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """With those that stand in tuples, as "argument.field"."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.numel():
            yield name, value
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            yield from _tensors_of(
                {f"{name}.{field}": x for field, x in zip(fields, value, strict=True)}
            )


def _named_pointer(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor that becomes a pointer is remembered with it."""

    def convert(value: Any) -> Any:
        converted = original(value)
        if isinstance(value, Tensor) and _RUNNING:
            for argument in _RUNNING[-1].arguments.values():
                if _is_same_view(argument.tensor, value):
                    converted.handle.set_attr("argument", argument)
        return converted

    return convert


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    """The interpreter hands on views of its own."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        *(b.data_ptr(), b.shape, b.stride(), b.dtype),
    )


_POINTER_OPERATIONS = ("addptr", "splat", "broadcast", "expand_dims", "reshape", "trans", "select")


def _handed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A pointer made from pointers of one tensor belongs to that tensor."""

    def operation(self: Any, *operands: Any) -> Any:
        result = original(self, *operands)
        handles = [x for x in operands if isinstance(x, Handle)]
        sources = {x.attr["argument"] for x in handles if "argument" in x.attr}
        if len(sources) == 1:
            result.set_attr("argument", sources.pop())
        return result

    return operation


def _accessed(pointers: Any, mask: Any) -> tuple[Argument | None, np.ndarray, np.ndarray]:
    """The tensor, the addresses that the mask leaves, and the mask; no tensor for no address."""
    on = np.broadcast_to(mask.data if isinstance(mask, Handle) else mask, pointers.data.shape)
    addresses = pointers.data[on].astype(np.int64)
    argument = pointers.attr.get("argument")
    if addresses.size and argument is None:
        raise Fault("a pointer that does not come from one tensor of the launch")
    return argument if addresses.size else None, addresses, on


def _program(builder: Any) -> int:
    (x, y, z), (_, high, deep) = builder.grid_idx, builder.grid_dim
    return (x * high + y) * deep + z


def _checked_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        argument, addresses, _ = _accessed(pointers, mask)
        if argument is not None:
            _RUNNING[-1].load(argument, addresses, _program(self))
        return original(self, pointers, mask, *rest, **options)

    return load


def _checked_store(original: Callable[..., Any]) -> Callable[..., Any]:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        argument, addresses, on = _accessed(pointers, mask)
        if argument is not None:
            values = np.broadcast_to(value.data, on.shape)[on]
            _RUNNING[-1].store(argument, addresses, values, _program(self))
        return original(self, pointers, value, mask, *rest)

    return store


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    def atomic(self: Any, *_: Any) -> Any:
        raise Fault("an atomic operation: the order of its sums differs from run to run")

    return atomic


def _install() -> None:
    mend()
    _replace(interpreter.GridExecutor, "__call__", _checked_launch)
    _replace(interpreter, "_implicit_cvt", _named_pointer)
    builder = interpreter.InterpreterBuilder
    for name in _POINTER_OPERATIONS:
        _replace(builder, f"create_{name}", _handed_on)
    _replace(builder, "create_masked_load", _checked_load)
    _replace(builder, "create_masked_store", _checked_store)
    for name in ("rmw", "cas"):
        _replace(builder, f"create_atomic_{name}", _refused)


def _replace(owner: Any, name: str, make: Callable[..., Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


_install()
