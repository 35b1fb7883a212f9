"""Regularisers as modules: what they hold trains, is saved, and moves with the model.

A module keeps its regulariser as another module, whose `forward()` returns the `Regularizer` to use
now. Yours may compute it from whatever parameters it likes; `LearnedTsallis` is one.
"""

from __future__ import annotations

import math
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fenchel._numerics import check_whole, compute_dtype
from fenchel.regularizers.contract import Regularizer, check_parameter, resolve_regularizer
from fenchel.regularizers.tsallis import Tsallis


class LearnedTsallis(Module):
    """`Tsallis(alpha)` with one alpha per head, trained: alpha = 1 + (upper - 1) sigmoid(raw).

    >>> layer = fl.nn.MultiheadAttention(64, 8, regularizer=fl.nn.LearnedTsallis(8))
    >>> layer.regularizer.alpha                # (8, 1), all 1.5, with a gradient

    heads: how many, as in the attention that uses it.
    init: where every head starts, between 1 and upper.
    upper: the sparsest that a head can become; 2 is sparsemax.
    """

    def __init__(
        self,
        heads: int,
        init: float = 1.5,
        upper: float = 2.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(heads, "heads", 1)
        check_parameter(upper, "upper", 1.0, strict=True)
        if not 1 < init < upper:
            raise ValueError(
                f"init must lie strictly between 1 and upper={upper:g}, got {init}; at the ends "
                "alpha could not move: use Shannon() or Tsallis(alpha) for a fixed one"
            )
        share = (init - 1) / (upper - 1)
        start = math.log(share / (1 - share))
        self.upper = float(upper)
        self.raw = Parameter(torch.full((heads, 1), start, device=device, dtype=dtype))

    @property
    def alpha(self) -> Tensor:
        """(heads, 1), from 1 to upper."""
        # In bfloat16, steps of alpha below 1/128 would be lost; those of raw are not.
        return 1 + (self.upper - 1) * self.raw.to(compute_dtype(self.raw.dtype)).sigmoid()

    def forward(self) -> Tsallis:
        """The regulariser to use now."""
        return Tsallis(self.alpha)

    def extra_repr(self) -> str:
        return f"heads={self.raw.shape[0]}, upper={self.upper:g}"


class HeldRegularizer(Module):
    """A regulariser as given: its Parameters become this module's, its other tensors buffers.

    Buffers are left out of the state dict, like every setting that does not train.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        super().__init__()
        self._regularizer = resolve_regularizer(regularizer)
        self._tensor_names: list[str] = []
        for name, value in vars(regularizer).items():
            if isinstance(value, Tensor):
                self._hold(name, value)

    def _hold(self, name: str, value: Tensor) -> None:
        kind = type(self._regularizer).__name__
        if not is_dataclass(self._regularizer):
            raise TypeError(
                f"{kind} holds the tensor {name} but is no dataclass, so that it cannot be made "
                "again after a step of the optimiser; decorate it with @dataclass(frozen=True)"
            )
        if isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif value.requires_grad:
            raise ValueError(
                f"{name} of {kind} has a gradient but is no Parameter; the module would keep one "
                f"backward graph for ever. Pass torch.nn.Parameter({name}), or a module whose "
                "forward() computes the regulariser, such as fenchel.nn.LearnedTsallis"
            )
        else:
            self.register_buffer(name, value, persistent=False)
        self._tensor_names.append(name)

    def forward(self) -> Regularizer:
        """The regulariser with the tensors as they are now, checked again."""
        if not self._tensor_names:
            return self._regularizer
        now: dict[str, Any] = {name: getattr(self, name) for name in self._tensor_names}
        return replace(self._regularizer, **now)  # type: ignore[type-var]

    def extra_repr(self) -> str:
        omega = self._regularizer
        return repr(omega) if not self._tensor_names else type(omega).__name__


def as_module(regularizer: Regularizer | Module) -> Module:
    """A module whose `forward()` returns the regulariser."""
    return regularizer if isinstance(regularizer, Module) else HeldRegularizer(regularizer)
