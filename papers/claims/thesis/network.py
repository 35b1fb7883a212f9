"""Chapter 6: the network that reads a picture by a density, its shapes and what it computes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

import fenchel as fl
import fenchel.continuous as fc
from fenchel import nn as fnn
from papers.claims.evidence import Evidence, largest, smallest
from papers.claims.ledger import claim
from papers.claims.thesis._disc import Pair, normal, uniform
from papers.claims.verdicts import Verdict

if TYPE_CHECKING:
    from papers.experiments.vqa.model import CoAttention

_GRID = (14, 14)
_CELLS = 196


@claim(
    "F-S6.2",
    "pipeline: X is D × L, G is L × N, B = XG, r = E_p[ψ], x̃ = Br; z = LayerNorm(W_y ỹ + W_x x̃)",
    Verdict.CORRECTED,
)
def pipeline(evidence: Evidence) -> None:
    generator = torch.Generator().manual_seed(evidence.seed)
    features = uniform(generator, -1, 1, 2, _CELLS, 2048)
    scores = uniform(generator, -2, 2, 2, _CELLS)
    wrong, off, moments = 0, [], []
    for count in (49, 100):
        for regularizer, modes in ((fl.Shannon(), 1), (fl.Tsallis(2.0), 1), (fl.Shannon(), 2)):
            layer = fnn.ContinuousAttention2d(
                _GRID, regularizer, count, padding=False, modes=fnn.Modes(modes, iterations=2)
            ).double()
            context, density = layer(features, scores)
            wrong += context.shape != (2, 2048)
            wrong += density.expect(layer.basis).shape != (2, count)
            off.append(_context_off(layer.basis, features, density, context))
            moments.append(_moments_off(scores, density))
    evidence.below("x̃ − Σ π_k B r_k with B and r_k by hand, N = 49, 100, K = 1, 2", off)
    evidence.below("shapes of r and x̃ other than N and D = 2048", float(wrong), 0.0)
    evidence.below("mean and covariance of p − those of softmax(scores) on the cells", moments)
    _check_network(evidence, generator)
    _check_locations(evidence)
    evidence.correction = (
        "The attended question feature is ỹ, not x̃, and ỹ is what discrete attention makes in "
        "every model. The cells lie at (l − ½)/14, l = 1..14; l/14 from 0 to 14 gives 225 points."
    )


def _check_locations(evidence: Evidence) -> None:
    """t_l = (l₁/√L, l₂/√L) for l₁, l₂ in [0, √L] as printed, and the cells that features have."""
    side = math.isqrt(_CELLS)
    steps = torch.arange(side + 1, dtype=torch.float64)
    printed = torch.cartesian_prod(steps / side, steps / side)
    cells = fc.cell_centers(*_GRID, dtype=torch.float64)
    middles = (steps[1:] - 0.5) / side
    centres = torch.cartesian_prod(middles, middles)
    off = torch.cdist(centres, cells, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    evidence.below("from (l − ½)/14, l = 1..14, to the nearest of the library's cells", off)
    what = "locations l/√L, l = 0..√L, as many as the library has cells"
    evidence.printed_near(what, len(printed), len(cells), 0.5)
    nearest = torch.cdist(cells, printed).amin(1)
    evidence.printed_below("from a cell to the nearest of them, in cells", nearest * side, 0.5)


def _moments_off(scores: Tensor, density: Any) -> float:
    """Of a density, or of the modes of one, and of the weights. EM keeps both moments."""
    batch, mixed = len(scores), isinstance(density, fc.Mixture)
    modes = density.components if mixed else density
    mixing = density.mixing if mixed else torch.ones(batch, 1, dtype=torch.float64)
    mean, among = _moments(mixing, modes.mean.reshape(batch, -1, 2))
    each = modes.covariance_matrix.reshape(batch, -1, 2, 2)
    covariance = among + (mixing[..., None, None] * each).sum(1)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    centre, spread = _moments(weights, _cells().expand(batch, -1, -1))
    return largest([(mean - centre).abs(), (covariance - spread).abs()])


def _moments(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of weights (batch, n) on points (batch, n, 2)."""
    mean = (weights.unsqueeze(-1) * points).sum(1)
    apart = points - mean.unsqueeze(1)
    return mean, torch.einsum("bn,bni,bnj->bij", weights, apart, apart)


def _cells() -> Tensor:
    """The middles of 14 x 14 cells, row by row. (196, 2)"""
    side = (torch.arange(14, dtype=torch.float64) + 0.5) / 14
    return torch.cartesian_prod(side, side)


def _context_off(basis: Any, features: Tensor, density: Any, context: Tensor) -> float:
    """Of a context and B r, both by hand."""
    centres, covariances = basis.centers, basis.covariances
    f = _functions(_cells(), centres, covariances).T
    eye = torch.eye(len(centres), dtype=torch.float64)
    b = features.mT @ torch.linalg.solve(f @ f.T + 0.01 * eye, f).T  # (batch, D, N)
    if isinstance(density, fc.Mixture):
        each = _expected(density.components, centres, covariances)  # (batch, K, N)
        r = (density.mixing.unsqueeze(-1) * each).sum(-2)
    else:
        r = _expected(density, centres, covariances)
    return float((context - torch.einsum("bdn,bn->bd", b, r)).abs().max())


def _functions(points: Tensor, centres: Tensor, covariances: Tensor) -> Tensor:
    """(points, N)"""
    both = zip(centres, covariances, strict=True)
    return torch.stack([normal(points, centre, covariance) for centre, covariance in both], -1)


def _expected(density: Any, centres: Tensor, covariances: Tensor) -> Tensor:
    """Of each member of the batch: N(m; m_j, S + S_j), or quadrature over its ellipse. (..., N)"""
    expectations = []
    for index in numpy.ndindex(*density.batch_shape):
        mean, scale = density.mean[index], density.scale[index]
        if isinstance(density, fc.Gaussian):
            both = zip(centres, covariances, strict=True)
            expectations.append(torch.stack([normal(mean, m, scale + s) for m, s in both]))
        else:
            pair = Pair(mean, scale, centres[0], covariances[0])
            points, area = pair.on_support()
            mass = area * pair.density(points)
            expectations.append(mass @ _functions(points, centres, covariances))
    return torch.stack(expectations).reshape(*density.batch_shape, -1)


def _check_network(evidence: Evidence, generator: torch.Generator) -> None:
    """Grid features of 2048 channels to scores, as in §6.2.1, small inside."""
    words = torch.randint(1, 20, (2, 5), generator=generator)
    pictures = uniform(generator, -1, 1, 2, *_GRID, 2048).float()
    names = ("softmax", "continuous-softmax-100", "continuous-sparsemax-49", "2-mca-100")
    models = [_network(name, evidence.seed) for name in names]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    evidence.below(
        "parameters beyond those of discrete attention",
        [abs(size - sizes[0]) for size in sizes[1:]],
        0.0,
    )
    with torch.no_grad():
        errors = [_answers(model, words, pictures) for model in models]
    evidence.below("scores − W LayerNorm(W_y ỹ + W_x x̃)", [x for x, _ in errors], 1e-5)
    evidence.printed_below("with x̃ for the question too", smallest(x for _, x in errors), 1e-3)


def _network(attention: str, seed: int) -> CoAttention:
    from papers.experiments.vqa.model import CoAttention, Shapes, Size

    size = Size(words=8, width=16, inner=16, layers=1, heads=2, flat=16, fused=24, dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CoAttention(size, Shapes(20, 10, _GRID, 2048), attention).eval()


def _answers(model: CoAttention, words: Tensor, pictures: Tensor) -> tuple[float, float]:
    """How far the scores are from those of ỹ and x̃, and of x̃ and x̃."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
        for name, layer in (("question", model.from_question), ("picture", model.from_picture))
    ]
    scores = model(words, pictures, torch.arange(2)).scores
    for hook in hooks:
        hook.remove()
    errors = []
    for asked in (seen["question"], seen["picture"]):
        z = asked @ model.from_question.weight.T + seen["picture"] @ model.from_picture.weight.T
        z = z + model.from_question.bias + model.from_picture.bias
        z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        z = z * model.fused_norm.weight + model.fused_norm.bias
        errors.append(float((model.answer(z) - scores).abs().max()))
    return errors[0], errors[1]
