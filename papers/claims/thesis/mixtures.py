"""Chapter 5: densities of several modes, their fit to weights, and how many modes to take."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import fenchel.continuous as fc
from papers.claims.evidence import DIFFERENCES, SLACK, Curves, Evidence, Fields, largest, smallest
from papers.claims.ledger import claim
from papers.claims.thesis._disc import ellipse, legendre, uniform
from papers.claims.thesis._modes import Modes, clumps, even, start
from papers.claims.verdicts import Verdict

Penalty = Callable[[int, int, int], float]
_FLOOR = 1e-12  # of variances: too small to be felt here


def _grid(reach: float, count: int) -> tuple[Tensor, float]:
    """Points of [-reach, reach]^2, rows first, and the area that each stands for. (count^2, 2)"""
    line = torch.linspace(-reach, reach, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line), (2 * reach / (count - 1)) ** 2


# ---- a density of several modes


@claim("F-E5.1/5.2/5.3", "p(t) = Σ_k π_k p_k(t), π in the simplex, is a density", Verdict.CONFIRMED)
def mixture_density(evidence: Evidence) -> None:
    points, area = _grid(6.0, 121)
    formula, gaussians, paraboloids = [], [], []
    for generator in evidence.generators():
        modes = Modes.draw(generator, 3)
        density = modes.mixture().prob(points)
        formula.append((density - modes.each(points).sum(-1)).abs().max())
        gaussians.append((density.sum() * area - 1).abs())
        scales = uniform(generator, 0.1, 1.0, 3, 1, 1)
        components = fc.Paraboloid(uniform(generator, -1, 1, 3, 1), scales)
        paraboloids.append((_integral(fc.Mixture(modes.mixing, components)) - 1).abs())
    evidence.below("integral over the plane of 3 Gaussians − 1", torch.stack(gaussians))
    evidence.below("integral over the line of 3 paraboloids − 1", torch.stack(paraboloids))
    evidence.below("library's density − Σ π_k N(t; m_k, S_k)", torch.stack(formula))


def _integral(mixture: fc.Mixture) -> Tensor:
    """On the line, between the ends of the supports, where it is of degree 2."""
    ends = torch.cat(mixture.components.projection()).flatten().sort().values
    x, w = legendre(3)
    half = ends.diff().unsqueeze(1) / 2
    at = (ends[:-1] + ends[1:]).unsqueeze(1) / 2 + half * x
    return (half * w * mixture.prob(at.unsqueeze(-1))).sum()


@claim("F-E5.4/5.5", "E_p[ψ] = Σ_k π_k r_k and c = B E_p[ψ] = Σ_k π_k c_k", Verdict.CONFIRMED)
def mixture_context(evidence: Evidence) -> None:
    points, area = _grid(6.0, 121)
    linear, contexts, slopes, left_out = [], [], [], []
    for generator in evidence.generators():
        modes = Modes.draw(generator, 3)
        basis = fc.GaussianBasis(uniform(generator, -1, 1, 4, 2), ellipse(generator, 0.1, 0.3))
        by_sum = area * (modes.each(points).sum(-1) @ basis(points))
        linear.append((modes.mixture().expect(basis) - by_sum).abs().max())
        positions, features = uniform(generator, -1, 1, 9, 2), uniform(generator, -1, 1, 9, 2)
        values = fc.fit_values(features, positions, basis)
        of_modes = values.coefficients.T @ fc.Gaussian(*modes[1:]).expect(basis).T  # c_k, (2, K)
        contexts.append((values.expect(modes.mixture()) - of_modes @ modes.mixing).abs().max())
        logits = modes.mixing.log().requires_grad_()
        mixture = fc.Mixture(logits.softmax(0), fc.Gaussian(*modes[1:]))
        (slope,) = torch.autograd.grad(values.expect(mixture).sum(), logits)
        true = modes.mixing * (of_modes - (of_modes @ modes.mixing).unsqueeze(1)).sum(0)
        slopes.append((slope - true).abs().max())
        left_out.append(true.abs().max())
    evidence.below("library's E_p[ψ] − quadrature of Σ π_k p_k ψ", torch.stack(linear))
    evidence.below("context − Σ π_k B r_k", torch.stack(contexts))
    evidence.below("derivative in the logits of π − π_k (c_k − Σ π c)", torch.stack(slopes))
    evidence.above("its size, which the text leaves out", largest(left_out), 1e-3)
    moved = [_through_em(generator) for generator in evidence.generators()]
    evidence.below("derivative in weights, through EM − differences", moved, DIFFERENCES)
    evidence.note("The gradient has the terms Σ c_k dπ_k beside Σ π_k dc_k, and a path through EM.")


def _through_em(generator: torch.Generator) -> float:
    """Of the context in the attention weights along a direction, against central differences."""
    positions = fc.cell_centers(5, 5, dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    basis = fc.GaussianBasis(fc.cell_centers(3, 3, dtype=torch.float64), 0.1 * eye)
    values = fc.fit_values(uniform(generator, -1, 1, 25, 1), positions, basis)
    scores, towards = uniform(generator, -1, 1, 25), uniform(generator, -1, 1, 25)

    def context(step: Tensor) -> Tensor:
        weights = (scores + step * towards).softmax(0)
        return values.expect(fc.fit_mixture(weights, positions, 2, iterations=3))[0]

    at = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(context(at), at)
    high, low = (context(at.detach() + step) for step in (1e-5, -1e-5))
    return float((slope - (high - low) / 2e-5).abs())


# ---- its fit


@claim(
    "F-E5.6..5.11", "EM for a mixture of Gaussians: (5.7), then (5.8) to (5.11)", Verdict.CONFIRMED
)
def expectation_maximisation(evidence: Evidence) -> None:
    to_sklearn, to_formulas = [], []
    steps = 10
    for generator in evidence.generators():
        points = clumps(generator)
        weights = even(len(points))
        fit = _fit(weights, points, start(), steps)
        to_sklearn.append(fit.off(_by_sklearn(start(), points, steps)))
        to_formulas.append(fit.off(_stepped(start(), weights, points, steps)))
    evidence.below("library − scikit-learn after 10 steps", to_sklearn)
    evidence.below("library − the formulas after 10 steps", to_formulas)


def _by_sklearn(begun: Modes, points: Tensor, steps: int) -> Modes:
    from sklearn.mixture import GaussianMixture

    fit = GaussianMixture(
        len(begun.mixing),
        tol=0.0,
        reg_covar=0.0,
        max_iter=steps,
        weights_init=begun.mixing.numpy(),
        means_init=begun.mean.numpy(),
        precisions_init=torch.linalg.inv(begun.covariance).numpy(),
        init_params="random",
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that so few steps do not converge
        fit.fit(points.numpy())
    return Modes(*(torch.from_numpy(x) for x in (fit.weights_, fit.means_, fit.covariances_)))


@claim(
    "F-E5.12..5.15",
    "EM with weights w_n γ_nk in the M-step; it never lowers the weighted likelihood",
    Verdict.CONFIRMED,
)
def weighted_steps(evidence: Evidence) -> None:
    step, repeated, plain, least = [], [], [], []
    for generator in evidence.generators():
        points = clumps(generator, 20)
        counts = torch.randint(1, 5, (len(points),), generator=generator).double()
        weights = counts / counts.sum()
        once = _fit(weights, points, start(), 1)
        step.append(once.off(start().step(weights, points)))
        several = points.repeat_interleave(counts.long(), 0)
        as_often = _fit(even(len(several)), several, start(), 5)
        repeated.append(_fit(counts, points, start(), 5).off(as_often))
        ones = torch.ones_like(weights)
        plain.append(
            _fit(even(len(points)), points, start(), 5).off(_fit(ones, points, start(), 5))
        )
        runs = {k: _ascent(weights, points, Modes.draw(generator, k)) for k in (2, 3)}
        least += [run.diff() for run in runs.values()]
    evidence.below("one step − (5.12) to (5.15), Σw = 1", step)
    evidence.above("least gain of (5.16) in a step, 10 runs", torch.cat(least), -SLACK)
    evidence.below("whole weights − repeated data", repeated)
    evidence.below("weights 1/N − data without weights", plain)
    evidence.note("(5.14) needs Σw = 1; the library divides weights by their sum.")
    lines = {
        f"K = {k}": ([float(step) for step in range(len(run))], run.tolist())
        for k, run in runs.items()
    }
    evidence.draw(Curves("Weighted EM from a random start", "step", "Σ w ln p", lines))


def _fit(weights: Tensor, points: Tensor, begun: Modes, steps: int) -> Modes:
    mixture = fc.fit_mixture(
        weights, points, len(begun.mixing), iterations=steps, start=begun.mixture(), floor=_FLOOR
    )
    return Modes.of(mixture)


def _stepped(modes: Modes, weights: Tensor, points: Tensor, steps: int) -> Modes:
    """After so many steps of EM by the formulas."""
    for _ in range(steps):
        modes = modes.step(weights, points)
    return modes


def _ascent(weights: Tensor, points: Tensor, modes: Modes, steps: int = 10) -> Tensor:
    """The weighted likelihood before the first step and after each. (up to steps + 1,)

    On a single point the likelihood has no bound: a mode that falls onto one ends the run, before
    the least variance, which is no part of EM, stops it.
    """
    likelihoods = [modes.log_likelihood(weights, points)]
    for _ in range(steps):
        modes = _fit(weights, points, modes, 1)
        if float(torch.linalg.eigvalsh(modes.covariance).min()) < 1e3 * _FLOOR:
            break
        likelihoods.append(modes.log_likelihood(weights, points))
    return torch.stack(likelihoods)


@claim("F-E5.16", "weighted log-likelihood Σ_n w_n ln Σ_k π_k N(x_n; m_k, S_k)", Verdict.CONFIRMED)
def weighted_likelihood(evidence: Evidence) -> None:
    formula, repeated, flat = [], [], []
    for generator in evidence.generators():
        points = clumps(generator, 20)
        counts = torch.randint(1, 5, (len(points),), generator=generator).double()
        weights = counts / counts.sum()
        modes = Modes.draw(generator, 3)
        likelihood = modes.mixture().log_likelihood(weights, points)
        formula.append((likelihood - modes.log_likelihood(weights, points)).abs())
        several = points.repeat_interleave(counts.long(), 0)
        whole = modes.log_likelihood(torch.ones(len(several), dtype=torch.float64), several)
        repeated.append((likelihood - whole / len(several)).abs())
        flat.append(_slope_at_end(weights, points))
    evidence.below("library − the formula", torch.stack(formula))
    evidence.below("whole weights − (5.6) of repeated data, over N", torch.stack(repeated))
    evidence.below("its derivative in the means where EM ends", flat, DIFFERENCES)


def _slope_at_end(weights: Tensor, points: Tensor) -> float:
    end = _fit(weights, points, start(), 300)
    mean = end.mean.clone().requires_grad_()
    mixture = fc.Mixture(end.mixing, fc.Gaussian(mean, end.covariance))
    (slope,) = torch.autograd.grad(mixture.log_likelihood(weights, points), mean)
    return float(slope.abs().max())


@claim("F-POW", "N(x; m, S)^w is N(x; m, S/w) times a constant", Verdict.CONFIRMED)
def power(evidence: Evidence) -> None:
    spread, constant = [], []
    for generator in evidence.generators():
        w = float(uniform(generator, 0.1, 4, 1))
        mean, covariance = uniform(generator, -1, 1, 2), ellipse(generator, 0.1, 1)
        points = uniform(generator, -2, 2, 30, 2)
        wide, narrow = fc.Gaussian(mean, covariance), fc.Gaussian(mean, covariance / w)
        ratio = w * wide.log_prob(points) - narrow.log_prob(points)
        spread.append(ratio.max() - ratio.min())
        size = math.log(2 * math.pi) + float(torch.logdet(covariance)) / 2
        constant.append((ratio - (1 - w) * size + math.log(w)).abs().max())
    evidence.below("spread of w ln N(x; m, S) − ln N(x; m, S/w)", torch.stack(spread))
    evidence.below("it − (1−w) ln |2πS|^½ + ln w", torch.stack(constant))


# ---- how many modes


@claim("F-S5.3.3", "the largest likelihood of K modes does not fall as K grows", Verdict.CONFIRMED)
def more_modes(evidence: Evidence) -> None:
    gains, grown, split, by_hand, single = [], [], [], [], []
    for generator in evidence.generators():
        random = fc.Random(evidence.trials(5, 20), generator)
        weights, points = _hills(generator)
        modes = Modes.of(fc.fit_mixture(weights, points, 1, start=random, iterations=40))
        best = [modes.log_likelihood(weights, points)]
        for count in range(2, 6):
            halved = _split(modes)  # the best of one fewer, as a start
            split.append((halved.log_likelihood(weights, points) - best[-1]).abs())
            on = _fit(weights, points, halved, 40)
            by_hand.append(on.off(_stepped(halved, weights, points, 40)))
            fit = Modes.of(fc.fit_mixture(weights, points, count, start=random, iterations=40))
            reached = torch.stack([x.log_likelihood(weights, points) for x in (on, fit)])
            grown.append(reached[0] - best[-1])
            modes = (on, fit)[int(reached.argmax())]  # NaN, if there is one
            best.append(reached.max())
        gains.append(torch.stack(best).diff())
        apart = points - weights @ points
        size = torch.linalg.det(2 * math.pi * math.e * (weights * apart.T) @ apart)
        single.append((best[0] + size.log() / 2).abs())
    evidence.above("least gain from K to K + 1, K = 1..4", gains, -SLACK)
    evidence.above("the same by EM from the best K modes, one in two halves", grown, -SLACK)
    evidence.below("those 40 steps of EM − the formulas", by_hand)
    evidence.below("K modes as K + 1, one in two halves: same likelihood", split)
    evidence.below("K = 1 − that of the weights' mean and covariance", single)
    evidence.note(
        "Of points alone it has no bound from K = 2 on: a mode may fall onto one of them."
    )
    likelihoods = torch.stack(best).tolist()
    line = {"best found": ([1.0, 2.0, 3.0, 4.0, 5.0], likelihoods)}
    evidence.draw(Curves("More modes", "K", "Σ w ln p", line))


def _hills(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights over 25 x 25 points, of six Gaussians wider than the points are apart: no mode falls
    onto one of them, where the likelihood would have no bound. (625,), (625, 2)"""
    points, _ = _grid(2.4, 25)
    weights = Modes.draw(generator, 6).each(points).sum(-1)
    return weights / weights.sum(), points


def _split(modes: Modes) -> Modes:
    """The same density with the first mode as two equal ones."""
    mixing = torch.cat([modes.mixing[:1] / 2, modes.mixing[:1] / 2, modes.mixing[1:]])
    return Modes(mixing, *(torch.cat([x[:1], x]) for x in modes[1:]))


@claim(
    "F-E5.17..5.20",
    "K* = argmin_K -2 ln p(X|Θ_K) + P(K); BIC's P counts free parameters, 6K-1 in the plane",
    Verdict.CORRECTED,
)
def selection(evidence: Evidence) -> None:
    count = 144
    free = [_free_parameters(evidence, modes) for modes in (1, 2, 3)]
    per_point = [fc.BIC()(modes, 2, count) / math.log(count) for modes in (1, 2, 3)]
    evidence.near("free parameters of 3 Gaussians, rank of a Jacobian", free[2], 17, 0)
    off = [abs(a - b) for a, b in zip(free, per_point, strict=True)]
    evidence.below("library's BIC / ln n − free parameters, K = 1..3", off)
    evidence.printed_below("K − free parameters, K = 3", abs(3.0 - free[2]), 0.5)
    evidence.below("prices of AIC and BIC, K = 1..4 − 2 (6K − 1) and (6K − 1) ln n", _priced(count))
    chosen: list[float] = []
    dear: list[float] = []
    wrong: list[float] = []
    for generator in evidence.generators():
        weights, positions = _two_bumps(generator)
        fits = [fc.fit_mixture(weights, positions, k, start=fc.Regions()) for k in range(1, 5)]
        likelihoods = [float(Modes.of(x).log_likelihood(weights, positions)) for x in fits]
        too_much = 3 * count * (likelihoods[1] - likelihoods[0])  # a second mode gains 2/3 of it
        for penalty in (10.0, fc.BIC(), fc.AIC(), too_much):
            mixture = fc.select_mixture(weights, positions, 4, penalty, start=fc.Regions())
            costs = _costs(likelihoods, count, penalty)
            cheapest = 1 + int(torch.tensor(costs).argmin())  # NaN, if there is one
            wrong.append(abs(cheapest - int(mixture.modes)))
            reached = Modes.of(mixture).log_likelihood(weights, positions)
            wrong.append(abs(float(reached) - likelihoods[cheapest - 1]))
            (dear if penalty is too_much else chosen).append(float(mixture.modes))
    evidence.below("library's K* and likelihood − the argmin, by hand", wrong)
    evidence.near("least K* for two bumps, λ = 10, AIC, BIC", smallest(chosen), 2, 0)
    evidence.below("largest K* where a second mode gains but 2/3 of λ", dear, 1.0)
    evidence.correction = (
        "−2 ln(X|Θ) lacks its p: −2 ln p(X|Θ). P_BIC(K) is (6K − 1) ln n in the plane, the number "
        "of free parameters, not K ln n. With weights of sum one the likelihood needs a factor n "
        "before any of these penalties bites (F-Tab6.4)."
    )
    numbers = [1.0, 2.0, 3.0, 4.0]
    lines = {"−2 n Σ w ln p + (6K−1) ln n": (numbers, _costs(likelihoods, count, fc.BIC()))}
    lines["−2 n Σ w ln p + 10 K"] = (numbers, _costs(likelihoods, count, 10.0))
    evidence.draw(Curves("Two bumps: the criterion", "K", "criterion", lines))


def _priced(count: int) -> list[float]:
    """How far the prices of 1 to 4 modes in the plane are from those by hand."""
    off = []
    for modes in range(1, 5):
        off.append(abs(fc.AIC()(modes, 2, count) - 2 * (6 * modes - 1)))
        off.append(abs(fc.BIC()(modes, 2, count) - (6 * modes - 1) * math.log(count)))
    return off


def _price(penalty: float | Penalty, modes: int, count: int) -> float:
    return penalty * modes if isinstance(penalty, float) else penalty(modes, 2, count)


def _costs(likelihoods: list[float], count: int, penalty: float | Penalty) -> list[float]:
    pairs = enumerate(likelihoods, 1)
    return [-2 * count * value + _price(penalty, k, count) for k, value in pairs]


def _free_parameters(evidence: Evidence, count: int) -> float:
    """In how many directions ln p moves at 60 points: of K logits, 2 K means, 3 K covariances."""
    generator = torch.Generator().manual_seed(evidence.seed)
    modes = Modes.draw(generator, count)
    points = uniform(generator, -2, 2, 60, 2)
    sizes = (count, 2 * count, 3 * count)

    def log_density(flat: Tensor) -> Tensor:
        logits, mean, entries = flat.split(sizes)
        xx, xy, yy = entries.split(count)
        covariance = torch.stack([xx, xy, xy, yy], -1).reshape(count, 2, 2)
        mixture = Modes(logits.softmax(0), mean.reshape(count, 2), covariance)
        return mixture.each(points).sum(-1).log()

    entries = modes.covariance.flatten(1)[:, [0, 1, 3]]
    at = torch.cat([modes.mixing.log(), modes.mean.flatten(), entries.T.flatten()])
    jacobian = torch.autograd.functional.jacobian(log_density, at)  # (60, 6 K)
    return float(torch.linalg.matrix_rank(jacobian, rtol=1e-9))


def _two_bumps(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights over 12 x 12 cells, about one place above and one below. (144,), (144, 2)"""
    positions = fc.cell_centers(12, 12, dtype=torch.float64)
    mean = torch.stack([uniform(generator, 0.2, 0.3, 2), uniform(generator, 0.7, 0.8, 2)])
    covariance = 0.006 * torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    weights = Modes(uniform(generator, 0.7, 1, 2), mean, covariance).each(positions).sum(-1)
    return weights / weights.sum(), positions


@claim(
    "F-Fig5.1",
    "one Gaussian fills the gap between two clumps; two Gaussians leave it",
    Verdict.CONFIRMED,
)
def two_clumps(evidence: Evidence) -> None:
    ratios, moments, moved, pair = [], [], [], []
    for generator in evidence.generators():
        points = clumps(generator, 60)
        weights = even(len(points))
        one, two = (fc.fit_mixture(weights, points, modes, iterations=60) for modes in (1, 2))
        apart = points - points.mean(0)
        by_moments = Modes(
            torch.ones(1).double(), points.mean(0)[None], (apart.T @ apart / 120)[None]
        )
        moments.append(Modes.of(one).off(by_moments))
        moved.append(Modes.of(two).off(Modes.of(two).step(weights, points)))
        middle = two.components.mean.mean(0)
        pair.append((float(one.prob(middle)), float(two.prob(middle))))
        ratios.append(pair[-1][0] / pair[-1][1])
    evidence.above("density midway: one Gaussian / two", ratios, 50.0)
    evidence.above("density midway: one Gaussian", [x for x, _ in pair], 0.2)
    evidence.below("density midway: two Gaussians", [x for _, x in pair], 0.005)
    evidence.below("one Gaussian − mean and covariance of the data", moments)
    evidence.below("two Gaussians: moved by one more step of EM, by hand", moved, DIFFERENCES)
    line, _ = _grid(2.4, 36)
    panels = {
        name: mixture.prob(line).reshape(36, 36).T.tolist()
        for name, mixture in (("one Gaussian", one), ("two Gaussians", two))
    }
    evidence.draw(Fields("Two clumps", panels, (-2.4, 2.4, -2.4, 2.4)))
