"""Plain computations beside the library's: descent, Sinkhorn's iteration, slopes, samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DOUBLE = torch.float64


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=DOUBLE)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=DOUBLE)


def distributions(generator: torch.Generator, *shape: int) -> Tensor:
    """Even over the simplex of the last axis."""
    raw = -uniform(generator, *shape).clamp_min(1e-12).log()
    return raw / raw.sum(-1, keepdim=True)


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p | q), as a sum of non-negative terms: it keeps its digits where p and q are near."""
    return (torch.xlogy(p, p / q) - p + q).sum(-1)


def slope(sizes: Sequence[float], errors: Sequence[float]) -> float:
    """The order of the errors in the sizes, from the last two."""
    return math.log(errors[-1] / errors[-2]) / math.log(sizes[-1] / sizes[-2])


def lowest(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where BFGS ends, from a point of any shape."""
    from scipy.optimize import minimize

    def both(flat: object) -> tuple[float, object]:
        x = torch.as_tensor(flat, dtype=DOUBLE).reshape(start.shape).clone().requires_grad_()
        value = objective(x)
        (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient.flatten().numpy()

    minimum = minimize(
        both, start.flatten().numpy(), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    return torch.as_tensor(minimum.x, dtype=DOUBLE).reshape(start.shape)


def lowest_distribution(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The distribution on the last axis at which BFGS in softmax coordinates ends."""
    return lowest(lambda x: objective(x.softmax(-1)), start).softmax(-1)


def sinkhorn(
    p: Tensor, u: Tensor, cost: Tensor, gamma: float, steps: int = 2000
) -> tuple[Tensor, Tensor]:
    """min <M, X> - gamma H(X) over plans with row sums p and column sums u, and the plan.

    p (..., N), u (n), cost (N, n). The value is the dual's: from below, off by the square.
    """
    f, g = torch.zeros_like(p), torch.zeros_like(p[..., :1] * u)
    for _ in range(steps):
        before = g
        f = gamma * (p.log() - torch.logsumexp((g.unsqueeze(-2) - cost) / gamma, -1))
        g = gamma * (u.log() - torch.logsumexp((f.unsqueeze(-1) - cost) / gamma, -2))
        if bool((g - before).abs().max() < 1e-14):
            break
    plan = ((f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / gamma).exp()
    return (f * p).sum(-1) + (g * u).sum(-1), plan
