"""Base measures: what a tensor or a prior says for one tensor of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel._numerics import expands_to, has, where
from fenchel.priors.contract import Prior


@dataclass(frozen=True, eq=False)
class Base:
    """A measure resolved for one tensor of scores: nu = mass * exp(log_mass) where allowed.

    `allowed` marks the keys that can carry weight, in the shape of the scores. `mass` is kept
    as given (not as a logarithm) so that the derivative at zero mass is the one-sided one.
    """

    allowed: Tensor
    mass: Tensor | None = None
    log_mass: Tensor | None = None
    whole: bool = False  # known to allow every key of every row: nothing needs masking

    @classmethod
    def everything(cls, like: Tensor) -> Base:
        """Mass one on every key of scores like these."""
        return cls(
            torch.ones((), dtype=torch.bool, device=like.device).expand(like.shape), whole=True
        )

    def to(self, dtype: torch.dtype) -> Base:
        """The same measure in another precision."""
        mass = None if self.mass is None else self.mass.to(dtype)
        log_mass = None if self.log_mass is None else self.log_mass.to(dtype)
        return Base(self.allowed, mass, log_mass, self.whole)

    def detach(self) -> Base:
        """The same measure without its derivatives."""
        mass = None if self.mass is None else self.mass.detach()
        log_mass = None if self.log_mass is None else self.log_mass.detach()
        return Base(self.allowed, mass, log_mass, self.whole)

    def keep(self, values: Tensor, other: float = 0.0) -> Tensor:
        """`values` on allowed keys, `other` elsewhere."""
        return values if self.whole else where(self.allowed, values, other)

    @property
    def alive(self) -> Tensor:
        """Rows that allow any key at all. (..., 1)"""
        return self.allowed[..., :1] if self.whole else self.allowed.any(-1, keepdim=True)

    @property
    def plain(self) -> bool:
        """Every allowed key has mass one."""
        return self.mass is None and self.log_mass is None

    def log(self) -> Tensor | None:
        """log nu, -inf where nothing is allowed; None for a plain mask."""
        if self.plain:
            return None
        if self.mass is not None:
            logarithm = where(self.allowed, self.mass, 1.0).log()
        else:
            assert self.log_mass is not None
            logarithm = self.log_mass
        return where(self.allowed, logarithm, -math.inf)

    def safe_log(self) -> Tensor | float:
        """log nu where allowed and 0 elsewhere: finite, so that derivatives are too."""
        logarithm = self.log()
        return 0.0 if logarithm is None else where(self.allowed, logarithm, 0.0)


def resolve(base: Tensor | Prior | None, shape: torch.Size, like: Tensor) -> Base:
    """The measure over keys (last axis) for scores of `shape`; dtype and device of `like`."""
    if base is None:
        return Base(torch.ones((), dtype=torch.bool, device=like.device).expand(shape))
    check_base(base)
    if isinstance(base, Prior):
        return _from_prior(base, shape, like)
    return _from_tensor(base, shape, like)


def check_base(base: object) -> None:
    """Refuse what is neither a measure nor makes one."""
    if base is None or isinstance(base, Prior):
        return
    if not isinstance(base, Tensor):
        remedy = (
            f"call it: {base.__name__}(...)" if isinstance(base, type) else "use torch.tensor(...)"
        )
        raise TypeError(
            f"base must be a tensor or a fenchel prior, got {type(base).__name__}; {remedy}"
        )
    if base.is_complex():
        raise TypeError("base must be real and non-negative, got complex numbers")


def _from_prior(prior: Prior, shape: torch.Size, like: Tensor) -> Base:
    if prior.sink is not None:
        raise ValueError(
            "a Sink adds a null key, which `attention` has and a row of scores has not"
        )
    prior = prior.bind(shape if len(shape) > 1 else torch.Size((1, *shape)))
    queries = shape[-2] if len(shape) > 1 else 1
    rows = torch.arange(queries, device=like.device)
    columns = torch.arange(shape[-1], device=like.device)
    log_mass = prior.log_mass(rows, columns).to(like.dtype)
    if len(shape) == 1:
        log_mass = log_mass.squeeze(-2)
    log_mass = expand_to(log_mass, shape, f"{type(prior).__name__}.log_mass")
    allowed = log_mass != -math.inf  # NaN is no mask: it spoils its row
    return Base(allowed) if prior.is_mask else Base(allowed, log_mass=log_mass)


def _from_tensor(base: Tensor, shape: torch.Size, like: Tensor) -> Base:
    if base.device != like.device:
        raise ValueError(
            f"base is on {base.device} and the scores on {like.device}; move one of them"
        )
    base = expand_to(base, shape, "base")
    if base.dtype == torch.bool:
        return Base(allowed=base)
    if has(base < 0):
        raise ValueError(
            f"base must be non-negative, got {base.min().item():g}; 0 masks a key, and a bias "
            "on a logarithmic scale is passed as base=bias.exp() or as a prior"
        )
    mass = base.to(like.dtype)
    return Base(allowed=mass > 0, mass=mass)


def expand_to(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """The tensor in the scores' shape, or an error that names both."""
    if not expands_to(tensor.shape, shape):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} does not broadcast to the scores' shape "
            f"{tuple(shape)}; keys are the last axis (or the axis given as dim)"
        )
    return tensor.expand(shape)
