"""What a state dict holds beside the weights: numbers without which they are another function.

As a tensor, which any format can hold; in float64, since a buffer would be cast with the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


def as_numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check_numbers(layer: Module, state: object, names: Sequence[str]) -> None:
    """Refuse the state of a layer that is another function of the same weights."""
    expected, kind = layer.get_extra_state(), type(layer).__name__
    if not isinstance(state, Tensor) or state.shape != expected.shape:
        raise ValueError(f"the extra state of {kind} must be like {expected}, got {state!r}")
    # a state dict may have been cast as a whole
    slack = torch.finfo(state.dtype).eps if state.is_floating_point() else 0.0
    for name, ours, theirs in zip(names, expected.tolist(), state.tolist(), strict=True):
        if not math.isclose(ours, theirs, rel_tol=slack):
            raise ValueError(
                f"these weights are of a {kind} with {name} = {theirs:g}, this one has {ours:g} "
                "and would be another function of them; build it with the same, and load into that"
            )


class NumberedLayer(Module):
    """A layer with such numbers. State dicts without them are older, or made by hand, and load."""

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state, prefix, metadata, *rest)
        _, missing, *_ = rest  # strict, missing keys, ...
        name = f"{prefix}_extra_state"
        if name in missing:
            missing.remove(name)
