"""What an audit is asked for, and how it is carried out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fenchel._numerics import check_whole

STREAMED = ("weights", "deviation", "what_if", "certificate")  # over all texts
PROBED = ("geometry", "advantage", "local", "attack", "model", "recipe")  # over a few
MEASURES = (*STREAMED, *PROBED)
ALPHAS = (1.5, 2.0)


@dataclass(frozen=True)
class AuditSettings:
    """measures: of `MEASURES`. alphas: of the what-if. layers, heads: None for all, else their
    numbers, from 0. probe: how many texts those measures see that are too slow for all.
    tolerance: of the recipe, relative. trials: of the attack on each certificate."""

    measures: tuple[str, ...] = MEASURES
    alphas: tuple[float, ...] = ALPHAS
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    probe: int = 32
    tolerance: float = 0.01
    trials: int = 200

    def __post_init__(self) -> None:
        unknown = [name for name in self.measures if name not in MEASURES]
        if unknown or not self.measures:
            shown = ", ".join(unknown) or "none"
            raise ValueError(f"measures must be of {', '.join(MEASURES)}; got {shown}")
        for alpha in self.alphas:
            if not 1 < alpha <= 4:
                raise ValueError(f"an alpha of the what-if lies in (1, 4], got {alpha:g}")
        if len({f"{alpha:g}" for alpha in self.alphas}) < len(self.alphas):
            raise ValueError(f"alphas must differ in their first six digits, got {self.alphas}")
        if not 0 < self.tolerance < 1 or not math.isfinite(self.tolerance):
            raise ValueError(f"tolerance must lie in (0, 1), got {self.tolerance:g}")
        for name in ("layers", "heads"):
            chosen = getattr(self, name)
            if chosen is not None and not len(chosen):
                raise ValueError(f"{name} must name at least one, or be None for all")
            for number in chosen or ():
                check_whole(number, name, 0)
        check_whole(self.probe, "probe", 1)
        check_whole(self.trials, "trials", 1)

    def asks_for(self, *measures: str) -> bool:
        """Whether one of these is asked for."""
        return any(measure in self.measures for measure in measures)

    def includes_layer(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def choose_heads(self, count: int) -> list[int]:
        """The heads of an attention that has so many."""
        if self.heads is None:
            return list(range(count))
        beyond = [head for head in self.heads if head >= count]
        if beyond:
            raise ValueError(f"there are heads 0 to {count - 1}, no head {beyond[0]}")
        return sorted(set(self.heads))


@dataclass(frozen=True)
class ExecutionSettings:
    """What numbers depend on by rounding, or by what is cut: items of a unit of work, tokens of a
    text at most, the model's dtype, and the threads of each process."""

    chunk: int
    longest: int
    dtype: str
    threads: int
