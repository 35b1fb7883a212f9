"""Bad input: each is refused at once, with what was wrong and the way out."""

import pytest
import torch

from fenchel.measures import (
    Affine,
    AttentionKernel,
    Deterministic,
    Dirac,
    Dot,
    Empirical,
    GaussianMeasure,
    GaussianPotential,
    KernelMixture,
    Lookup,
    MultiHeadKernel,
    Potential,
    Residual,
    ScaledDot,
    Softmatch,
    boltzmann_gibbs,
    maximum_entropy,
    mixture,
)

from .draws import F64, measure, normal, shares

X = normal(3, 2)
EYE = torch.eye(2, dtype=F64)
A = AttentionKernel(Dot())
HALF = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).double()
POOL = torch.nn.BatchNorm1d(3).double()


def keyed(**settings):
    return torch.nn.MultiheadAttention(4, 2, **settings)


VALUE, TYPE = ValueError, TypeError
CASES = [
    # measures
    (lambda: Empirical(X, torch.ones(3)), VALUE, r"sum of 3, off by .2 .*; Empirical.of"),
    (lambda: Empirical(X, shares(4)), VALUE, r"weights must be \(..., 3\).*got \(4,\)"),
    (lambda: Empirical(normal(2, 3, 1), shares(5, 3)), VALUE, "leading axes must broadcast"),
    (lambda: Empirical(X, torch.tensor([1.5, -0.5, 0.0])), VALUE, "smallest is -0.5"),
    (lambda: Empirical(X, torch.full((3,), torch.nan)), VALUE, "non-negative and finite"),
    (lambda: Empirical(X[:0]), VALUE, r"needs a point, got points \(0, 2\)"),
    (lambda: Empirical(X * torch.inf), VALUE, "points must be finite"),
    (lambda: Empirical(X.long()), TYPE, r"float32 or float64, got torch.int64; use points.double"),
    (lambda: Empirical(X.half()), TYPE, r"got torch.float16"),
    (lambda: Empirical(X[:, 0]), VALUE, r"points must be \(..., n, d\), got \(3,\); use points.u"),
    (lambda: Empirical([[1.0]]), TYPE, "points must be a tensor, got list"),
    (lambda: Empirical(X, torch.ones(3).long()), TYPE, "weights must be float32 or float64"),
    (lambda: Empirical.of_masses(X, torch.zeros(3)), VALUE, "positive, finite sum"),
    (lambda: Dirac(torch.tensor(1.0)), VALUE, r"point must be \(..., d\)"),
    (lambda: measure().expectation(lambda x: x.sum()), VALUE, r"one value or one vector .* \(\)"),
    (lambda: measure().expectation(3), TYPE, "callable, got int"),
    (lambda: measure().convolve(Empirical(X)), VALUE, "dimension 2, the measure in 3"),
    (lambda: measure().convolve(X), TYPE, "other must be a measure, got Tensor"),
    (lambda: measure().kl(GaussianMeasure(X[0], EYE)), TYPE,
     "an Empirical, got GaussianMeasure.*fenchel_"),
    (lambda: measure(batch=(2,)).merged(), VALUE, "one measure at a time"),
    (lambda: mixture([]), VALUE, "at least one part"),
    (lambda: mixture([measure()], [0.5]), VALUE, "sum of 0.5, off by -0.5 .*; divide them"),
    (lambda: mixture([measure()], [0.5, 0.5]), VALUE, r"each of 1 parts, got .* \(2,\)"),
    (lambda: mixture([measure(), Empirical(X)]), VALUE, r"one space, got dimensions \[2, 3\]"),
    (lambda: mixture([X]), TYPE, "measures must be Empirical, got Tensor"),
    # Gaussians
    (lambda: GaussianMeasure(X[0], -EYE), VALUE, "smallest eigenvalue is -1"),
    (lambda: GaussianMeasure(X[0], EYE + EYE.roll(1)), VALUE, "symmetric; use"),
    (lambda: GaussianMeasure(X[0], torch.eye(3).double()), VALUE, r"\(..., 2, 2\), got \(3, 3\)"),
    (
        lambda: GaussianMeasure(normal(4), torch.eye(4)).expectation(torch.sin),
        VALUE,
        r"d <= 3, got d = 4; use .sample\(n, generator\)",
    ),
    (lambda: GaussianMeasure(X[0], EYE).quadrature(0), VALUE, "order must be >= 1, got 0"),
    (lambda: GaussianMeasure(X[0], EYE).sample(1.5), TYPE, "n must be a whole number"),
    (lambda: GaussianMeasure(X[0], EYE).push(normal(2, 3)), VALUE, r"\(..., e, 2\), got \(2, 3\)"),
    (lambda: GaussianMeasure(X[0], EYE).convolve(Empirical(X)), VALUE, "3 points is a mixture"),
    (lambda: GaussianMeasure(X[0], EYE).convolve(X), TYPE, "must be a measure, got Tensor"),
    # potentials
    (lambda: Dot(0.0), VALUE, "temperature must be positive and finite, got 0"),
    (lambda: GaussianPotential("1"), TYPE, "temperature must be a number, got '1'"),
    (lambda: ScaledDot(query=3), TYPE, r"query must be a matrix \(d', d\) or a callable"),
    (lambda: Dot(query=normal(2, 2, 2)), VALUE, r"must be \(d', d\), got \(2, 2, 2\)"),
    (lambda: Dot().log(X, normal(3, 4)), VALUE, "one dimension, got 2 and 4; give `query`"),
    (lambda: GaussianPotential().log(X, normal(3, 4)), VALUE, "got 2 and 4"),
    (lambda: Dot(key=normal(2, 3)).log(X, X), VALUE, r"points of dimension 3, got 2.*W x"),
    (lambda: Potential(3), TYPE, "callable, got int"),
    (lambda: Potential(lambda x, y: x).log(X, X), VALUE, r"\(..., 3, 3\), got \(3, 2\)"),
    (lambda: Affine(EYE, torch.zeros(3)), VALUE, r"offset must be \(2,\), got \(3,\)"),
    # kernels
    (lambda: X @ Deterministic(EYE), TYPE, r"on measures, got Tensor; use Empirical\(points\)"),
    (lambda: Deterministic(EYE) @ EYE, TYPE, r"got Tensor; for a matrix use Deterministic"),
    (lambda: Deterministic(EYE) @ 3, TYPE, "composes with kernels, got int"),
    (lambda: Deterministic(EYE) @ A, TYPE, r"only once it has a measure; use A\(mu\)"),
    (lambda: Empirical(X) @ A, TYPE, r"AttentionKernel is .* use A\(mu\)"),
    (lambda: A @ Deterministic(EYE), TYPE, r"use A\(mu\)"),
    (lambda: Residual(A), TYPE, r"use A\(mu\)"),
    (lambda: Residual(torch.tanh), TYPE, r"use Deterministic\(function\)"),
    (lambda: Residual(Deterministic(normal(3, 2))).at(X), VALUE, "dimension 2, it goes to 3"),
    (lambda: KernelMixture([]), VALUE, "at least one part"),
    (lambda: KernelMixture([Deterministic(EYE)], [0.9]), VALUE, "sum of 0.9"),
    (lambda: Deterministic(None), TYPE, "matrix or a callable, got None"),
    (lambda: Deterministic("f"), TYPE, "function must be a matrix"),
    (lambda: Deterministic(lambda x: x.sum(-2)).at(X), VALUE, "one by one"),
    (lambda: Deterministic(EYE).at(X[0]), VALUE, r"x must be \(..., n, d\)"),
    (lambda: Deterministic(EYE).at(X[0]), VALUE, r"x.unsqueeze\(0\) for one point of R\^2, x"),
    (lambda: Deterministic(EYE).at(X[0, 0]), VALUE, r"x.reshape\(1, 1\)"),
    (lambda: GaussianMeasure(X[0], X[0]), VALUE, r"\(..., 2, 2\), got \(2,\); .*diag_embed"),
    (lambda: Empirical(X.float(), torch.tensor([0.3333, 0.3333, 0.3333])), VALUE,
     r"got a sum of 0.9999, off by -0.0001 where rounding in torch.float32 .*of_masses"),
    (lambda: GaussianMeasure(X[0], EYE) @ A(Empirical(X)), TYPE,
     r"through MomentProjection\(\)\(Softmatch\(.*Empirical\(.*not known to be affine"),
    (lambda: GaussianMeasure(X[0], EYE) @ Residual(Deterministic(normal(3, 2))), VALUE,
     "goes to 3"),
    (lambda: boltzmann_gibbs(Empirical(X), X[:, 0]), TYPE, r"boltzmann_gibbs\(log_g, nu\)"),
    (lambda: Deterministic(EYE).at(X.float()), TYPE, r"points are torch.float32 and the matrix is"),
    (lambda: Deterministic(torch.nn.Linear(2, 2)).at(X), TYPE,
     r"points are torch.float64 and the Linear is torch.float32; .*\.to\(torch.float64\) on"),
    (lambda: Dot(query=torch.nn.Linear(2, 2)).log(X, X), TYPE, "the Linear is torch.float32"),
    (lambda: Deterministic(HALF).at(X), VALUE, r"Dropout in training .* call .eval\(\)"),
    (lambda: Deterministic(POOL).at(normal(4, 3)), VALUE, "BatchNorm1d in training"),
    (lambda: Softmatch(torch.dot), TYPE, r"interaction potential, got .*Potential\(log\)"),
    (lambda: Softmatch(Dot())(X), TYPE, r"must be an Empirical, got Tensor; use Empirical\(points"),
    (lambda: A(GaussianMeasure(X[0], EYE)), TYPE, "got GaussianMeasure; use a Gaussian's .sample"),
    (lambda: boltzmann_gibbs(normal(4), Empirical(X)), VALUE, r"log_g must be \(..., 3\), got"),
    (lambda: boltzmann_gibbs(X[:, 0] * torch.nan, Empirical(X)), VALUE, "never NaN"),
    (lambda: boltzmann_gibbs(torch.full((3,), -torch.inf), Empirical(X)), VALUE, "above -inf"),
    (lambda: boltzmann_gibbs(torch.full((3,), torch.inf), Empirical(X)), VALUE, r"below \+inf"),
    # lookups
    (lambda: Lookup.table(X, X[:2]), VALUE, "one value for each key"),
    (lambda: Lookup.table(X, X).at(normal(2, 4)), VALUE, "keys have dimension 2"),
    (lambda: Lookup.stochastic(X, torch.ones(3, 3)), VALUE, "sum to 1, got a sum of 3"),
    (lambda: Lookup.stochastic(X, shares(3, 4)), VALUE, r"matrix \(..., 3, 3\)"),
    (lambda: Lookup.stochastic(X[[0, 0]], shares(2, 2)), VALUE, "points must be distinct"),
    # heads
    (lambda: MultiHeadKernel([A], []), VALUE, "1 heads and 0 maps"),
    (lambda: MultiHeadKernel([Deterministic(EYE)], [EYE]), TYPE, "AttentionKernels, got Determ"),
    (lambda: MultiHeadKernel.from_module(HALF), TYPE, "MultiheadAttention is needed, got Sequen"),
    (lambda: MultiHeadKernel.from_module(keyed(dropout=0.1)), VALUE, r"dropout of 0.1 .*.eval\(\)"),
    (lambda: MultiHeadKernel.from_module(keyed(add_bias_kv=True)), VALUE, "add_bias_kv"),
    (lambda: MultiHeadKernel.from_module(keyed(add_zero_attn=True)), VALUE, "add_zero_attn"),
    (lambda: MultiHeadKernel.from_module(keyed(kdim=3)), VALUE, "kdim and vdim"),
    # maximum entropy
    (lambda: maximum_entropy(X, lambda x: x, X[0]), TYPE, "nu must be an Empirical"),
    (lambda: maximum_entropy(Empirical(X), lambda x: x[..., 0], X[0]), VALUE, "let k be 1"),
    (lambda: maximum_entropy(Empirical(X), X, normal(3)), VALUE, r"moments must be \(..., 2\)"),
    (lambda: maximum_entropy(Empirical(X), X, X[0] * torch.nan), VALUE, "moments must be finite"),
    (lambda: maximum_entropy(Empirical(X), X, [0.0]), TYPE, "moments must be a tensor"),
    (lambda: maximum_entropy(Empirical(X), X, X[0], max_steps=0), VALUE, "max_steps must be >= 1"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_refused(case):
    action, kind, message = CASES[case]
    with pytest.raises(kind, match=message):
        action()
