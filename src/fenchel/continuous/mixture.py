"""Several modes: sum_k mixing_k p_k."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.nn import Module

from fenchel._numerics import check_tensor, has, where
from fenchel._solve import solve
from fenchel.continuous.densities import NO_CDF, Density
from fenchel.continuous.support import Union
from fenchel.regularizers import Regularizer


class Mixture(Distribution):
    """mixing (..., K), summing to one, over densities of batch shape (..., K).

    >>> import fenchel.continuous as fc
    >>> two = fc.Gaussian(torch.tensor([[0.0], [4.0]]), torch.eye(1))
    >>> Mixture(torch.tensor([0.25, 0.75]), two).mean
    tensor([3.])
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}  # checked here, with reasons

    def __init__(self, mixing: Tensor, components: Density) -> None:
        check_tensor(mixing, "mixing")
        if not isinstance(components, Density):
            raise TypeError(f"components must be a density, got {type(components).__name__}")
        if mixing.dim() < 1 or components.batch_shape[-1:] != mixing.shape[-1:]:
            raise ValueError(
                f"mixing (..., K) needs components of batch shape (..., K), got "
                f"{tuple(mixing.shape)} and {tuple(components.batch_shape)}"
            )
        _check_mixing(mixing)
        shape = torch.broadcast_shapes(mixing.shape, components.batch_shape)
        self.mixing = mixing.expand(shape)
        self.components = (
            components.expand(shape) if components.batch_shape != shape else components
        )
        super().__init__(shape[:-1], components.event_shape, validate_args=False)

    @classmethod
    def from_scores(
        cls, scores: Tensor, components: Density, regularizer: Regularizer | Module
    ) -> Self:
        """Mixing weights that solve max <scores, p> - Omega(p): `Tsallis(2.0)` leaves modes out."""
        return cls(solve(scores, regularizer).weights, components)

    @property
    def modes(self) -> Tensor:
        """How many components carry weight. (...)"""
        return (self.mixing > 0).sum(-1)

    @property
    def dim(self) -> int:
        return int(self.event_shape[0])

    @property
    def mean(self) -> Tensor:
        """(..., d)"""
        return (self.mixing.unsqueeze(-1) * self.components.mean).sum(-2)

    @property
    def covariance_matrix(self) -> Tensor:
        """(..., d, d)"""
        apart = self.components.mean - self.mean.unsqueeze(-2)
        each = self.components.covariance_matrix + apart.unsqueeze(-1) * apart.unsqueeze(-2)
        return (self.mixing[..., None, None] * each).sum(-3)

    @property
    def variance(self) -> Tensor:
        """(..., d)"""
        return self.covariance_matrix.diagonal(dim1=-2, dim2=-1)

    @property
    def support(self) -> Union:
        """Where some component has mass."""
        return Union(self.mixing, self.components.support)

    def log_prob(self, value: Tensor) -> Tensor:
        """-inf where no component has mass. value (..., d)"""
        return _log_sum(log_mixing(self.mixing) + self.components.log_prob(value.unsqueeze(-2)), -1)

    def prob(self, value: Tensor) -> Tensor:
        """The density itself; 0 off the support."""
        return (self.mixing * self.components.prob(value.unsqueeze(-2))).sum(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Which component is drawn has no derivative: there is no rsample."""
        shape = torch.Size(sample_shape)
        with torch.no_grad():
            drawn = torch.distributions.Categorical(self.mixing).sample(shape)
            each = self.components.sample(shape)  # (..., K, d)
            index = drawn[..., None, None].expand(*drawn.shape, 1, self.dim)
            return each.gather(-2, index).squeeze(-2)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Refused: which component is drawn has no derivative."""
        raise NotImplementedError(
            "a mixture has no rsample; use sample, or those of its components"
        )

    def entropy(self) -> Tensor:
        """Refused: it has no closed form."""
        raise NotImplementedError(
            "the entropy of a mixture has no closed form; -log_prob(sample((n,))).mean(0) "
            "estimates Shannon's, and components.entropy() is that of each mode"
        )

    def cdf(self, value: Tensor) -> Tensor:
        """Refused, as for its components."""
        raise NotImplementedError(NO_CDF)

    def log_likelihood(self, weights: Tensor, positions: Tensor) -> Tensor:
        """sum_l w_l log p(t_l), weights (..., L) divided by their sum. (...)

        Farinhas (2021), eq. 5.16.
        """
        log_p = self.log_prob_at(positions)
        share = weights / weights.sum(-1, keepdim=True)
        return (share * where(share > 0, log_p, 0.0)).sum(-1)

    def log_prob_at(self, positions: Tensor) -> Tensor:
        """log p at every position (L, d), for each mixture of the batch. (..., L)"""
        means = self.components.mean.unsqueeze(-2)  # room for L: the batch stays in front
        each = (
            type(self.components)
            ._like(
                means.expand(*means.shape[:-2], len(positions), self.dim),
                self.components.scale.unsqueeze(-3),
                self.components.alpha.unsqueeze(-1)
                if isinstance(self.components.alpha, Tensor)
                else self.components.alpha,
            )
            .log_prob(positions)
        )
        return _log_sum(log_mixing(self.mixing).unsqueeze(-1) + each, -2)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """A view with more batch axes in front."""
        shape = (*torch.Size(batch_shape), self.mixing.shape[-1])
        return type(self)(self.mixing.expand(shape), self.components.expand(shape))

    def __getitem__(self, index: Any) -> Self:
        """Some of the batch, indexed as a tensor of the batch's shape is."""
        batch, modes = self.batch_shape, self.mixing.shape[-1]
        chosen = torch.arange(batch.numel(), device=self.mixing.device).reshape(batch)[index]
        each = self.components.expand((*batch, modes))
        flat = (chosen.unsqueeze(-1) * modes + torch.arange(modes, device=chosen.device)).long()
        mean, scale = each.mean.reshape(-1, self.dim), each.scale.reshape(-1, self.dim, self.dim)
        alpha = each.alpha.reshape(-1)[flat] if isinstance(each.alpha, Tensor) else each.alpha
        components = type(each)._like(mean[flat], scale[flat], alpha)
        return type(self)(self.mixing.reshape(-1, modes)[chosen], components)

    def expect(self, basis: Any, tolerance: float | None = None) -> Tensor:
        """sum_k mixing_k E_k[psi_j] (Farinhas, 2021, eq. 5.4). (..., N)"""
        return (self.mixing.unsqueeze(-1) * self.components.expect(basis, tolerance)).sum(-2)

    def __repr__(self) -> str:
        batch, modes = tuple(self.batch_shape), self.mixing.shape[-1]
        return f"Mixture(batch {batch}, {modes} of {self.components!r})"


def log_mixing(mixing: Tensor) -> Tensor:
    """log, -inf without a NaN in the derivative for modes that are left out."""
    on = mixing > 0
    return where(on, where(on, mixing, 1.0).log(), -torch.inf)


def _log_sum(terms: Tensor, axis: int) -> Tensor:
    """log sum exp; -inf, with derivative zero, where every term is."""
    top = terms.detach().amax(axis, keepdim=True)
    empty = top == -torch.inf
    shifted = terms - where(~empty, top, 0.0)
    total = where(~empty, shifted.exp().sum(axis, keepdim=True), 1.0)
    return where(~empty, total.log() + top, -torch.inf).squeeze(axis)


def _check_mixing(mixing: Tensor) -> None:
    if not mixing.is_floating_point():
        raise TypeError(f"mixing must be floating point, got {mixing.dtype}")
    values = mixing.detach()
    slack = 1e3 * torch.finfo(mixing.dtype).eps
    if has(~(values >= 0)) or has((values.sum(-1) - 1).abs() > slack):
        raise ValueError("mixing must be >= 0 and sum to one; divide it by its sum")
