"""A block in which nothing may read a value, as on a device where a reader waits for all work.

Tensors of the CPU stand for those of a device: `fenchel._numerics.waits` says yes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fenchel import _numerics


class Waited(AssertionError):
    """Python read a value, or asked for a size that depends on values."""


# Operators whose result Python waits for: a value, or a size that depends on values.
_READERS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "item", "allclose"),
    *("nonzero", "nonzero_numpy", "masked_select", "bincount", "argwhere"),
    *("unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2"),
}
# Methods that do not always come to an operator, such as those that would copy to the CPU.
_METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_COPIES = {torch.tensor, torch.as_tensor, torch.asarray}  # from the host, in order with all work


class _Operators(TorchDispatchMode):
    """What comes to an operator, in a backward pass too."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.partition("::")[2]
        if name in _READERS or _has_counted_result(name, args):
            raise Waited(f"{name} reads a value")
        return function(*args, **(kwargs or {}))


def _has_counted_result(name: str, args: Any) -> bool:
    """Indexing by truth values, and repeating by counts."""
    if name == "repeat_interleave":
        return any(isinstance(x, Tensor) for x in args[:1]) and len(args) == 1
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _METHODS and args and isinstance(args[0], Tensor):
            raise Waited(f"{name} reads a value")
        if function in _COPIES and not isinstance(args[0], Tensor) and kwargs.get("device"):
            raise Waited(f"torch.{name} copies from the host to a device, and waits")
        return function(*args, **kwargs)


@contextmanager
def forbidden() -> Iterator[None]:
    """Inside the block a read raises `Waited`."""
    with mock.patch.object(_numerics, "waits", return_value=True), _Methods(), _Operators():
        yield
