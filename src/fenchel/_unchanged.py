"""Whether tensors that the backward pass reads once more are still those of the forward pass.

Autograd raises if a tensor that it saved was changed in place. What is computed again reads its
arguments instead, and nobody would notice: so their versions are written down, and compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getclosurevars
from types import FunctionType, ModuleType

import torch
from torch import Tensor


class Unchanged:
    """Every tensor inside the given objects, with the version that it has now."""

    def __init__(self, **things: object) -> None:
        self._tensors = [
            (name, tensor, tensor._version)
            for name, tensor in _tensors(things)
            if not tensor.is_inference()  # no version, and no change outside of that mode
        ]

    def __getstate__(self) -> dict[str, object]:
        """A copy has tensors of its own, of other versions, and watches none of them."""
        return {"_tensors": []}

    def check(
        self,
        trouble: str = "one of the variables needed for gradient computation has been modified by "
        "an inplace operation",
        reader: str = "attention, in the backward pass,",
    ) -> None:
        """Raise, as autograd does, if one of them was changed in place. reader: who needs them."""
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                raise RuntimeError(
                    f"{trouble}: {name}, [{tensor.type()} {list(tensor.shape)}], is at "
                    f"version {tensor._version}; expected version {version} instead; "
                    f"{reader} reads it once more: change a copy, or change it later"
                )


_SIMPLE = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


def _tensors(things: dict[str, object]) -> list[tuple[str, Tensor]]:
    """All that can be reached, each under the name nearest to it."""
    tensors: list[tuple[str, Tensor]] = []
    seen: dict[int, object] = {}
    waiting = list(things.items())
    while waiting:
        name, thing = waiting.pop()
        if isinstance(thing, Tensor):
            tensors.append((name, thing))
        elif type(thing) not in _SIMPLE and id(thing) not in seen:
            seen[id(thing)] = thing  # held, so that no other object gets its number
            waiting += [(x if isinstance(x, str) else name, part) for x, part in _parts(thing)]
    return tensors


def _parts(thing: object) -> Iterable[tuple[object, object]]:
    """What an object holds, by name where it has one."""
    if isinstance(thing, dict):
        return thing.items()
    if isinstance(thing, list | tuple | set | frozenset):
        return enumerate(thing)
    if isinstance(thing, FunctionType):
        return getclosurevars(thing).nonlocals.items()
    if isinstance(thing, type | ModuleType):
        return ()
    state = object.__getstate__(thing)  # attributes, slots: what `copy` would take
    some = state if isinstance(state, tuple) else (state,)
    return [part for parts in some if parts for part in parts.items()]
