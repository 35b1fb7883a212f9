"""The transformation of Boltzmann and Gibbs, and the kernel it makes of a potential."""

from __future__ import annotations

from torch import Tensor

from fenchel._implicit import tilt
from fenchel._numerics import has, masked_max
from fenchel.measures.empirical import Empirical
from fenchel.measures.kernels import Kernel, NonlinearKernel
from fenchel.measures.measure import Function, values_of
from fenchel.measures.potentials import InteractionPotential


def boltzmann_gibbs(log_g: Tensor | Function, nu: Empirical) -> Empirical:
    """Psi_g(nu): nu with its weights multiplied by g and normalised.

    log_g: values at the points of nu, (..., n), or a function of points that gives them.
    -inf takes a point's mass away.

    >>> nu = Empirical(torch.tensor([[0.0], [1.0]]), torch.tensor([0.2, 0.8]))
    >>> boltzmann_gibbs(torch.tensor([4.0, 1.0]).log(), nu).weights
    tensor([0.5000, 0.5000])
    """
    # Vuckovic et al. (2020), definition 3
    if isinstance(log_g, Empirical):
        raise TypeError(
            "log_g comes first and the measure second, as in boltzmann_gibbs(log_g, nu), got an "
            "Empirical for log_g"
        )
    check_measure(nu, "nu")
    values = log_g if isinstance(log_g, Tensor) else values_of(log_g, nu.points)
    if values.dim() < 1 or values.shape[-1] != nu.size:
        raise ValueError(f"log_g must be (..., {nu.size}), got {tuple(values.shape)}")
    if not values.is_floating_point():
        raise TypeError(
            f"log_g must be floating-point, got {values.dtype}; use log_g.to({nu.weights.dtype})"
        )
    return Empirical._unchecked(nu.points, _reweigh(nu.weights, values))


class Softmatch(NonlinearKernel):
    """nu -> the Markov kernel x -> Psi_{G(x, .)}(nu): softmax over keys, weighted by nu.

    >>> keys = Empirical(torch.tensor([[0.0], [1.0]]))
    >>> from fenchel.measures.potentials import Dot
    >>> Softmatch(Dot())(keys).at(torch.ones(1, 1)).weights
    tensor([[0.2689, 0.7311]])
    """

    def __init__(self, potential: InteractionPotential) -> None:
        if not isinstance(potential, InteractionPotential):
            raise TypeError(
                f"potential must be an interaction potential, got {type(potential).__name__}; "
                "Potential(log) takes any function (..., m, d), (..., n, d) -> (..., m, n)"
            )
        self.potential = potential

    def __call__(self, nu: Empirical) -> Kernel:
        check_measure(nu, "nu")
        return _Softmatched(self.potential, nu)

    def __repr__(self) -> str:
        return f"Softmatch({self.potential!r})"


class _Softmatched(Kernel):
    def __init__(self, potential: InteractionPotential, nu: Empirical) -> None:
        self.potential, self.nu = potential, nu

    def __repr__(self) -> str:
        return f"Softmatch({self.potential!r})({self.nu!r})"

    def _at(self, x: Tensor) -> Empirical:
        values = self.potential.log(x, self.nu.points)  # (..., m, n)
        weights = _reweigh(self.nu.weights.unsqueeze(-2), values)
        return Empirical._unchecked(self.nu.points.unsqueeze(-3), weights)


def _reweigh(weights: Tensor, log_g: Tensor) -> Tensor:
    """weights g / sum of them, for log g (..., n)."""
    top = masked_max(log_g.detach(), weights > 0)
    if has(~top.isfinite() | log_g.detach().isnan().any(-1, keepdim=True)):
        raise ValueError(
            "log G must be below +inf, never NaN, and above -inf at some point with mass for every "
            "x; check what made the scores, or leave no row without a key"
        )
    return tilt(log_g, weights)[0]


def check_measure(measure: object, name: str) -> None:
    """Refuse anything but an Empirical."""
    if isinstance(measure, Empirical):
        return
    tensor = isinstance(measure, Tensor)
    hint = "Empirical(points)" if tensor else "a Gaussian's .sample(n) or .quadrature(order)"
    raise TypeError(f"{name} must be an Empirical, got {type(measure).__name__}; use {hint}")
