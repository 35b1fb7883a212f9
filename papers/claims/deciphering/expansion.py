"""The expansion for little reliability, section 6: of what order it is off, and where it holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import fenchel as fl
from fenchel import dual
from papers.claims.deciphering._problems import (
    F64,
    Drawn,
    compare_by_hand,
    draw,
    draw_symmetric,
    halvings,
    normal,
    numbers,
    order,
    weights_of,
)
from papers.claims.evidence import SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict

Make = Callable[[torch.Generator], Drawn]


def _third(problem: Drawn, direction: Tensor) -> Tensor:
    """K'''(0)[v, v] = E_u (t - μ) <t - μ, v>², of directions (..., d)."""
    centred = problem.templates - problem.mean
    along = direction @ centred.mT
    return (problem.preference * along.square()) @ centred


# ---- the cumulants


def _quadratic(problem: Drawn, multiplier: Tensor) -> Tensor:
    """<μ, λ> + λ'Σλ/2"""
    bent = (multiplier @ problem.covariance * multiplier).sum(-1)
    return multiplier @ problem.mean + 0.5 * bent


def _potential(problem: Drawn, multiplier: Tensor) -> Tensor:
    """K(λ), the library's: the conjugate of Shannon's entropy with base u."""
    scores = multiplier @ problem.templates.mT
    return fl.solve(scores, fl.Shannon(), base=problem.preference).potential


def _remainders(evidence: Evidence, make: Make, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """|K - quadratic| summed over problems and directions, one for each size of λ; and how far
    from the third cumulant, relative, at the smallest."""
    total, (off, expected) = torch.zeros_like(sizes), torch.zeros(2, dtype=F64)
    for generator in evidence.generators():
        problem = make(generator)
        units = torch.nn.functional.normalize(normal(generator, 6, 1, 3), dim=-1)
        multiplier = sizes[:, None] * units  # (direction, size, d)
        rest = _potential(problem, multiplier) - _quadratic(problem, multiplier)
        last = multiplier[:, -1]
        third = (_third(problem, last) * last).sum(-1) / 6
        total = total + rest.abs().sum(0)
        off, expected = off + (rest[:, -1] - third).abs().sum(), expected + third.abs().sum()
    return total, off / expected


@claim("D-E11", "K(λ) = <μ, λ> + λ'Σλ/2 + o(|λ|²)", Verdict.CONFIRMED)
def cumulants(evidence: Evidence) -> None:
    sizes = halvings(0, 8)
    generic, third = _remainders(evidence, draw, sizes)
    symmetric, _ = _remainders(evidence, draw_symmetric, sizes)
    evidence.near("order of the remainder in |λ|", order(sizes, generic), 3, 0.05)
    evidence.near("its order for symmetric u", order(sizes, symmetric), 4, 0.05)
    evidence.below("|remainder - third cumulant / 6|, relative, |λ| = 2^-8", third, 0.02)
    lines = {
        "any u": (sizes.tolist(), generic.tolist()),
        "symmetric u": (sizes.tolist(), symmetric.tolist()),
    }
    evidence.draw(Curves("What the two cumulants leave", "|λ|", "remainder", lines, "xy"))


@claim("D-E12", "K(λ*) ≈ <μ, λ*> + λ*'Σλ*/2, exact for Gaussian u", Verdict.CONFIRMED)
def quadratic_at_the_solution(evidence: Evidence) -> None:
    exact, said, roots, wide, alphas = [], [], [], [], halvings(2, 9)
    rest = torch.zeros_like(alphas)
    for generator in evidence.generators():
        mean, z = normal(generator, 1), normal(generator, 1)
        variance = 0.3 + torch.rand(1, 1, generator=generator, dtype=F64)
        for alpha in (0.1, 1.0, 10.0):
            estimate = dual.gaussian(mean, variance, z, alpha)
            multiplier = estimate.multiplier
            potential = _gaussian_potential(mean, variance[0], multiplier)
            exact.append(potential - (mean * multiplier + 0.5 * variance[0] * multiplier**2))
            value = (mean + z) * multiplier - multiplier**2 / (2 * alpha) - potential
            said.append(value - estimate.dual_value)
        wide.append(_off_the_closed_form(generator))
        problem = draw(generator)
        estimate = dual.estimate(*problem.operands, alphas)
        apart = _potential(problem, estimate.multiplier) - _quadratic(problem, estimate.multiplier)
        rest = rest + apart.abs()
        roots.append((estimate.multiplier - _root(problem, alphas)).abs())
    evidence.below("|K(λ*) - quadratic|, Gaussian u, by quadrature", torch.stack(exact).abs())
    evidence.below("value of the dual against the quadrature", torch.stack(said).abs())
    evidence.below("|z - λ*/α - Σλ*|, |ĥ - μ - Σλ*|, u = N(μ, Σ) in R³", wide)
    evidence.near("order in α of the remainder, discrete u", order(alphas, rest), 3, 0.1)
    evidence.below("|λ* - root of the dual's gradient|, discrete u", roots)


def _off_the_closed_form(generator: torch.Generator) -> Tensor:
    """Where K is <μ, λ> + λ'Σλ/2, its gradient μ + Σλ is the mean; Σ at random. (2, α, d)"""
    mean, z, factor = normal(generator, 3), normal(generator, 3), normal(generator, 3, 3)
    covariance, alphas = factor @ factor.mT / 3, numbers([0.1, 1.0, 10.0])
    estimate = dual.gaussian(mean, covariance, z, alphas)
    moved = estimate.multiplier @ covariance
    slope = z - estimate.multiplier / alphas[:, None] - moved
    return torch.stack([slope, estimate.mean - mean - moved]).abs()


def _root(problem: Drawn, alphas: Tensor) -> Tensor:
    """Of b - λ/α - h(λ), by Newton's steps from α z. (α, d)"""
    inverse = alphas[:, None].reciprocal()
    multiplier = problem.evidence / inverse
    for _ in range(20):
        p = problem.weights(multiplier)
        mean = p @ problem.templates
        centred = problem.templates - mean[:, None]  # (α, n, d)
        bent = centred.mT @ (p[..., None] * centred) + torch.diag_embed(inverse.expand_as(mean))
        slope = problem.target - multiplier * inverse - mean
        multiplier = multiplier + torch.linalg.solve(bent, slope)
    return multiplier


def _gaussian_potential(mean: Tensor, variance: Tensor, multiplier: Tensor) -> Tensor:
    """log E e^{λ x} by trapezia, over 14 deviations around where the integrand is large."""
    deviation = variance.sqrt()
    grid = mean + variance * multiplier + deviation * torch.linspace(-14, 14, 1401, dtype=F64)
    logs = multiplier * grid - 0.5 * ((grid - mean) / deviation).square()
    width = 28 * deviation / 1400
    return torch.logsumexp(logs, 0) + (width / (deviation * math.sqrt(2 * math.pi))).log()


# ---- the multiplier


def _multiplier_errors(
    evidence: Evidence, make: Make, alphas: Tensor, second: bool
) -> tuple[Tensor, Tensor]:
    """|λ* - approximation| over problems, for each α; and relative distance of the difference,
    at the smallest α, from its leading term: -α²Σz, or -α³ K'''[z, z] / 2."""
    total, (off, expected) = torch.zeros_like(alphas), torch.zeros(2, dtype=F64)
    for generator in evidence.generators():
        problem = make(generator)
        rough = dual.second_order if second else dual.first_order
        exact = dual.estimate(*problem.operands, alphas).multiplier
        apart = exact - rough(*problem.operands, alphas).multiplier
        leading = (
            -(alphas[-1] ** 3) / 2 * _third(problem, problem.evidence)
            if second
            else -(alphas[-1] ** 2) * problem.covariance @ problem.evidence
        )
        total = total + apart.norm(dim=-1)
        off, expected = off + (apart[-1] - leading).norm(), expected + leading.norm()
    return total, off / expected


@claim("D-E13", "λ* ≈ α (I + αΣ)⁻¹ z for small α", Verdict.CONFIRMED)
def one_newton_step(evidence: Evidence) -> None:
    alphas, newton = halvings(2, 11), []
    generic, leading = _multiplier_errors(evidence, draw, alphas, second=True)
    symmetric, _ = _multiplier_errors(evidence, draw_symmetric, alphas, second=True)
    evidence.near("order of the error in α", order(alphas, generic), 3, 0.1)
    evidence.near("its order for symmetric u", order(alphas, symmetric), 4, 0.1)
    evidence.below("|error + α³K'''[z, z]/2|, relative, α = 2^-11", leading, 0.05)
    for generator in evidence.generators():
        problem = draw(generator)
        newton += [
            dual.second_order(*problem.operands, alpha).multiplier - _newton_step(problem, alpha)
            for alpha in (0.1, 1.0, 10.0)
        ]
    evidence.below("|it - one Newton step on the dual from 0|", torch.stack(newton).abs())
    lines = {
        "(13)": (alphas.tolist(), generic.tolist()),
        "(13), symmetric u": (alphas.tolist(), symmetric.tolist()),
        "(14)": (
            alphas.tolist(),
            _multiplier_errors(evidence, draw, alphas, second=False)[0].tolist(),
        ),
    }
    evidence.draw(Curves("Error of the multiplier", "α", "|λ* - λ|", lines, "xy"))


def _newton_step(problem: Drawn, alpha: float) -> Tensor:
    """On the dual, from 0; derivatives by autograd."""
    nothing = torch.zeros_like(problem.evidence)

    def value(multiplier: Tensor) -> Tensor:
        return problem.dual(multiplier, alpha)

    slope = torch.autograd.functional.jacobian(value, nothing)
    bent = torch.autograd.functional.hessian(value, nothing)
    step: Tensor = -torch.linalg.solve(bent, slope)
    return step


@claim("D-E14", "λ* ≈ α z for small α", Verdict.CONFIRMED)
def first_order(evidence: Evidence) -> None:
    alphas = halvings(2, 10)
    errors, leading = _multiplier_errors(evidence, draw, alphas, second=False)
    evidence.near("order of the error in α", order(alphas, errors), 2, 0.05)
    evidence.below("|error + α²Σz|, relative, α = 2^-10", leading, 0.02)
    step, ends, rate, relative = [], [], [], []
    for generator in evidence.generators():
        problem = draw(generator)
        alpha = 0.67 * 4 / problem.diameter**2
        multiplier = dual.estimate(*problem.operands, alpha).multiplier
        path = _iteration(problem, alpha, 100)
        step.append(dual.first_order(*problem.operands, alpha).multiplier - path[1])
        ends.append((path[-1] - multiplier).abs().max())
        moves = path.diff(dim=0).norm(dim=-1)
        seen = moves[:-1] > 1e-6  # below it is rounding
        rate.append((moves[1:] / moves[:-1])[seen].max())
        small = 2.0**-10
        tiny = dual.first_order(*problem.operands, small)
        deviation = tiny.compare(dual.estimate(*problem.operands, small)).multiplier
        moved = (problem.covariance @ problem.evidence).norm() / problem.evidence.norm()
        relative.append((deviation / (small * moved) - 1).abs())
    evidence.below("relative error over α|Σz|/|z|, less one", torch.stack(relative), 0.02)
    evidence.below("|α z - first step of λ ← α (b - h(λ)) from 0|", torch.stack(step).abs())
    evidence.below("|its end - λ*| where α diam² / 4 = 0.67", torch.stack(ends), 1e-9)
    evidence.below("ratio of its steps there", torch.stack(rate), 0.67 + SLACK)
    compare_by_hand(evidence)
    _sharp_contraction(evidence)


def _iteration(problem: Drawn, alpha: float, steps: int) -> Tensor:
    """λ ← α (b - h(λ)) from 0. (steps + 1, d)"""
    path = [torch.zeros_like(problem.evidence)]
    for _ in range(steps):
        mean = problem.weights(path[-1]) @ problem.templates
        path.append(alpha * (problem.target - mean))
    return torch.stack(path)


def _sharp_contraction(evidence: Evidence) -> None:
    """Two templates that are as likely: their variance is diam² / 4, the most there is."""
    pair = Drawn(numbers([[-1.0], [1.0]]), numbers([0.5, 0.5]), numbers([0.01]))
    ends = {}
    for alpha in (0.95, 1.05):
        multiplier = dual.estimate(*pair.operands, alpha).multiplier
        ends[alpha] = (_iteration(pair, alpha, 500)[-1] - multiplier).abs()
    evidence.below("|its end - λ*|, two templates, α diam² / 4 = 0.95", ends[0.95], 1e-8)
    evidence.above("and where α diam² / 4 = 1.05", ends[1.05], 0.1)


# ---- the estimate


@claim(
    "D-T2/E15",
    "ĥ ≈ E_u[a e^{α<a,z>}] / E_u[e^{α<a,z>}] for small α",
    Verdict.CONFIRMED,
)
def small_reliability(evidence: Evidence) -> None:
    alphas = halvings(3, 9)
    errors, objective = torch.zeros_like(alphas), torch.zeros_like(alphas)
    off, worth, expected, expected_worth = torch.zeros(4, dtype=F64)
    for generator in evidence.generators():
        problem = draw(generator)
        exact, rough = (f(*problem.operands, alphas) for f in (dual.estimate, dual.first_order))
        apart = rough.mean - exact.mean
        values = [problem.primal(weights_of(estimate), alphas) for estimate in (rough, exact)]
        more = values[0] - values[1]
        twice = problem.covariance @ problem.covariance @ problem.evidence
        leading = alphas[-1] ** 2 * twice
        lost = 0.5 * alphas[-1] ** 4 * (problem.evidence @ problem.covariance @ twice)
        errors, objective = errors + apart.norm(dim=-1), objective + more
        off, expected = off + (apart[-1] - leading).norm(), expected + leading.norm()
        worth, expected_worth = worth + (more[-1] - lost).abs(), expected_worth + lost
    evidence.near("order of |error| in α", order(alphas, errors), 2, 0.05)
    evidence.below("|error - α²Σ²z|, relative, α = 2^-9", off / expected, 0.02)
    evidence.near("order of the objective's excess", order(alphas, objective), 4, 0.1)
    evidence.below("excess against α⁴ z'Σ³z / 2, relative", worth / expected_worth, 0.05)
    compare_by_hand(evidence)
    _small_parameter(evidence)


def _relative(operands: tuple[Tensor, Tensor, Tensor], alpha: float | Tensor) -> Tensor:
    """|h - ĥ| / |ĥ - μ| of (16)"""
    return dual.first_order(*operands, alpha).compare(dual.estimate(*operands, alpha)).mean_shift


def _standard(evidence: Evidence, count: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Problems with templates and evidence from N(0, I), as (problem, 1, ...)."""
    generator = torch.Generator().manual_seed(evidence.seed)
    templates, z = normal(generator, count, 1, 7, d), normal(generator, count, 1, d)
    return templates, torch.rand(count, 1, 7, generator=generator, dtype=F64) + 0.1, z


def _small_parameter(evidence: Evidence) -> None:
    """Of t c, z c, α / c² the problem is the same: only α|Σ| can be what is small."""
    templates, preference, z = _standard(evidence, evidence.trials(100, 500), 3)
    alphas = numbers([1.0, 0.5, 0.25])
    errors = _relative((templates, preference, z), alphas)
    scaled = _relative((8 * templates, preference, 8 * z), alphas / 64)
    means = ", ".join(f"{value:.2f}" for value in errors.mean(0).tolist())
    evidence.below("|relative error - that of 8 t, 8 z, α / 64|", (errors - scaled).abs(), 1e-9)
    evidence.above("relative error at α = 1, templates N(0, I): mean", errors.mean(0)[0], 0.5)
    evidence.note(f"relative error at α = 1, 0.5, 0.25, templates N(0, I): {means} on average")


@claim("D-T2dom", "Theorem 2 holds for every u with bounded moments", Verdict.CORRECTED)
def domain(evidence: Evidence) -> None:
    places = numbers([1e2, 1e3, 1e4])
    density = -places.log() - 0.5 * math.log(2 * math.pi) - 0.5 * places.log().square()
    integrand = density + 0.05 * places
    evidence.printed_below("log of u(x) e^{0.05 x} at x = 1e4, u log-normal", integrand[2], 0.0)
    evidence.near("and at x = 1e3", integrand[1], 18.3, 0.1)
    evidence.near("and at x = 1e2", integrand[0], -11.1, 0.1)
    evidence.correction = (
        "finite moments do not suffice: the moment generating function must be finite near 0; "
        "the log-normal has all moments, and none of E e^{λx} for λ > 0"
    )
    grid = torch.linspace(-12, 20, 3201, dtype=F64)  # of log x
    moments = [torch.logsumexp(k * grid - 0.5 * grid.square(), 0) for k in range(5)]
    off = torch.stack([moments[k] - moments[0] - 0.5 * k**2 for k in range(5)])
    evidence.below("its moments against e^{k²/2}, k ≤ 4", off.abs())
    ends, roots = [], []
    for cut in places.tolist():
        logs = torch.arange(-6, math.log(cut), 0.02, dtype=F64)
        problem = Drawn(logs.exp()[:, None], (-0.5 * logs.square()).softmax(0), numbers([1.0]))
        ends.append(_relative(problem.operands, 0.05))
        multiplier = dual.estimate(*problem.operands, 0.05).multiplier
        roots.append((multiplier / _bisected(problem, 0.05) - 1).abs())
    evidence.below("|λ* - root by bisection|, relative, u cut at 1e2, 1e3, 1e4", roots)
    evidence.printed_below("error of (15) over |ĥ - μ|, u cut at 1e4, α = 0.05", ends[2], 1.0)
    evidence.above("growth of that error from the cut 1e3 to 1e4", ends[2] / ends[1], 5.0)
    compare_by_hand(evidence)
    _exponential(evidence)


def _bisected(problem: Drawn, alpha: float) -> Tensor:
    """Root of b - λ/α - h(λ), which falls in λ; one coordinate, z > 0, so that 0 < λ* < α z."""
    low, high = torch.zeros_like(problem.evidence), alpha * problem.evidence
    for _ in range(100):
        middle = (low + high) / 2
        slope = problem.target - middle / alpha - problem.weights(middle) @ problem.templates
        low, high = (middle, high) if slope > 0 else (low, middle)
    return low


def _exponential(evidence: Evidence) -> None:
    """u = e^{-x}, K(λ) = -log(1 - λ): templates and preference of Gauss and Laguerre."""
    from numpy.polynomial.laguerre import laggauss

    nodes, weights = (torch.from_numpy(x) for x in laggauss(40))
    alphas, z = halvings(2, 8), 1.0
    operands = (nodes[:, None], weights, numbers([z]))
    rough, exact = (f(*operands, alphas) for f in (dual.first_order, dual.estimate))
    # 1 + z - λ/α - 1/(1 - λ) = 0
    half = (1 + alphas * (1 + z)) / 2
    multiplier = half - (half.square() - alphas * z).sqrt()
    errors = (rough.mean - exact.mean).abs()[:, 0]
    evidence.below("(15) for u = e^{-x}", (rough.mean[:, 0] - 1 / (1 - alphas * z)).abs())
    evidence.below("λ* for u = e^{-x}", (exact.multiplier[:, 0] - multiplier).abs())
    evidence.near("order of its error in α", order(alphas, errors), 2, 0.1)


# ---- the picture


@claim(
    "D-Fig3",
    "in the plane (16) nears ĥ as α falls, and is good at α = 0.5 and 1",
    Verdict.CORRECTED,
)
def in_the_plane(evidence: Evidence) -> None:
    templates, preference, z = _standard(evidence, evidence.trials(200, 1000), 2)
    alphas = numbers([4.0, 2.0, 1.0, 0.5, 0.25])
    errors = _relative((templates, preference, z), alphas)  # (problem, α)
    mean = errors.mean(0)
    evidence.printed_below("relative error at α = 1, templates N(0, I): mean", mean[2], 0.1)
    evidence.printed_below("and at α = 0.5", mean[3], 0.1)
    rises = errors[:, 1] - errors[:, 0]
    evidence.printed_below("rise of the error from α = 4 to 2, worst problem", rises, 0.0)
    evidence.correction = (
        "(16) nears ĥ once α|Σ| is small; for larger α the error need not fall with α, and which α "
        "is good depends on the size of the templates, through α|Σ|"
    )
    small = _relative((templates, preference, z), halvings(6, 10))
    evidence.below("rise of the error as α falls from 2^-6 to 2^-10", small.diff(dim=1), 0.0)
    evidence.near("its order in α there", order(halvings(6, 10), small.mean(0)), 1, 0.05)
    good = _relative((templates / 4, preference, z / 4), numbers([1.0, 0.5])).mean(0)
    evidence.below("mean error at α = 1 and 0.5 of templates a quarter the size", good, 0.1)
    compare_by_hand(evidence)
    means = ", ".join(f"{value:.2f}" for value in mean.tolist())
    share = float((rises > 0).double().mean())
    evidence.note(f"mean relative error at α = 4, 2, 1, 0.5, 0.25: {means}")
    evidence.note(f"from α = 4 to 2 the error rises in {share:.0%} of the problems")
    evidence.note("the templates of the printed figure are not given; there (16) may well be good")
    many = torch.logspace(-3, 1.5, 30, dtype=F64)
    relative = _relative((templates[:3], preference[:3], z[:3]), many)
    lines = {f"problem {k + 1}": (many.tolist(), relative[k].tolist()) for k in range(3)}
    evidence.draw(Curves("Error of (16)", "α", "|h - ĥ| / |ĥ - μ|", lines, "xy"))
