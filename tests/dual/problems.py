"""Random estimation problems over the whole range that is promised, each fixed by its seed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

F64 = torch.float64
LINE = torch.tensor([[0.0], [1.0]], dtype=F64)  # two templates


class Problem(NamedTuple):
    templates: Tensor
    preference: Tensor
    evidence: Tensor
    reliability: float

    @property
    def stiffness(self) -> float:
        """reliability times the squared diameter of the templates in use."""
        used = self.templates[self.preference > 0]
        return self.reliability * float(torch.cdist(used, used).max()) ** 2


def draw(seed: int, most_templates: int = 256, most_axes: int = 512) -> Problem:
    """reliability 1e-4 to 1e4, norms 1e-2 to 1e3, preferences with zeros and over 12 decades."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=F64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64)

    n, d = (
        max(1, min(most, round(float(most ** uniform(1))))) for most in (most_templates, most_axes)
    )
    templates = normal(n, d)
    if uniform(1) < 0.3:
        templates = templates + 3 * normal(d)  # far from zero
    templates = templates / templates.norm(dim=1).max() * 10 ** (5 * uniform(1) - 2)
    if uniform(1) < 0.2:
        templates[n // 2 :] = templates[0].clone()  # many are the same
    preference = 10 ** (-12 * uniform(n)) if uniform(1) < 0.5 else torch.ones(n, dtype=F64)
    if uniform(1) < 0.4:
        preference = preference * (uniform(n) < 0.8)
        preference[0] = 1.0
    evidence = normal(d)
    evidence = evidence / evidence.norm() * templates.norm(dim=1).max() * uniform(1)
    return Problem(templates, preference, evidence, float(10 ** (8 * uniform(1) - 4)))


def space(n: int = 6, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Templates in d dimensions, a preference that does not sum to one, and evidence."""
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(n, d, generator=g, dtype=F64)
    preference = torch.rand(n, generator=g, dtype=F64) + 0.1
    return templates, preference, torch.randn(d, generator=g).to(F64)


def plane(count: int = 7, seed: int = 0, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Templates in the plane, a preference and evidence."""
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(count, 2, generator=g, dtype=F64)
    preference = torch.rand(count, generator=g, dtype=F64) + 0.2
    if symmetric:
        templates = torch.cat([templates, -templates])
        preference = torch.cat([preference, preference])
    return templates, preference / preference.sum(), torch.randn(2, generator=g, dtype=F64)


def order(errors: list[float], sizes: list[float]) -> float:
    """The slope of log error over log size."""
    x, y = ([math.log(v) for v in values] for values in (sizes, errors))
    middle = sum(x) / len(x)
    top = sum((a - middle) * b for a, b in zip(x, y, strict=True))
    return top / sum((a - middle) ** 2 for a in x)
