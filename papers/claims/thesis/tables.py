"""Chapter 6 and Appendix B: settings, tables and figures of visual question answering."""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

import fenchel.continuous as fc
from papers.claims.evidence import Curves, Evidence, Fields, largest, smallest
from papers.claims.ledger import claim
from papers.claims.thesis._disc import inside, uniform
from papers.claims.thesis._modes import Modes
from papers.claims.thesis._stored import COMMAND, note_accuracies, note_modes
from papers.claims.verdicts import Verdict

_NO_DATA = "The accuracies need VQA-v2 and a training of days on a GPU"
_GRID = (14, 14)
_CELLS = 196

# Yes/no, number, other, overall, of Tables 6.2 and 6.3; a row that both have is given once.
_DEV = (
    (83.40, 43.59, 55.91, 65.83),
    (83.40, 44.80, 55.88, 65.96),
    (83.32, 44.29, 55.78, 65.82),
    (83.10, 44.12, 55.95, 65.79),
    (83.38, 44.25, 55.87, 65.88),
    (83.35, 44.28, 56.07, 65.97),
    (83.39, 43.52, 55.96, 65.85),
    (83.30, 44.60, 55.81, 65.86),
    (83.35, 44.75, 55.86, 65.92),
    (83.39, 44.75, 55.87, 65.95),
)
_STANDARD = (
    (83.47, 42.99, 56.33, 66.13),
    (83.79, 44.33, 56.04, 66.27),
    (83.57, 43.70, 56.07, 66.12),
    (83.38, 43.91, 56.14, 66.10),
    (83.69, 43.00, 56.09, 66.10),
    (83.59, 43.65, 56.24, 66.21),
    (83.72, 43.47, 56.03, 66.14),
    (83.76, 44.08, 56.00, 66.21),
    (83.77, 44.28, 56.02, 66.25),
    (83.79, 44.36, 56.04, 66.27),
)
_SHARES = {  # Table 6.4: per cent with K* = 1..5, by penalty
    10: (58.58, 20.81, 8.02, 6.77, 5.82),
    100: (84.87, 11.22, 2.51, 1.00, 0.41),
    500: (96.17, 3.30, 0.40, 0.10, 0.03),
}


def _square(count: int) -> Tensor:
    """Linearly spaced in [0, 1]^2, ends included. (count^2, 2)"""
    line = torch.linspace(0, 1, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


# ---- settings


@claim(
    "F-Tab6.1",
    "settings: N in {49, 100} functions of S_j = 0.001 I, ridge 0.01",
    Verdict.NOT_CHECKABLE,
)
def settings(evidence: Evidence) -> None:
    line = torch.linspace(0.1, 0.9, 81, dtype=torch.float64)
    points = torch.cartesian_prod(line, line)
    held = {(49, 0.001): (0.0061, 3.613), (100, 0.001): (0.290, 2.681)}
    off = []
    for (count, variance), ends in held.items():
        values = _constant(count, variance, padding=False)(points)
        for name, extreme, end in zip(("least", "largest"), values.aminmax(), ends, strict=True):
            what = f"{name} V_B of the constant 1, N = {count}, S_j = {variance} I"
            evidence.near(what, extreme, end, 0.0006)
        off.append((values - _by_hand(count, variance, points)).abs())
    for count in (49, 100):
        values = _constant(count, 0.01, padding=False)(points)
        evidence.above(f"least with S_j = 0.01 I, N = {count}", values, 0.975)
        evidence.below(f"largest with S_j = 0.01 I, N = {count}", values, 1.035)
    padded = _constant(49, 0.001, padding=True)(points)
    evidence.below("least with padding, N = 49, S_j = 0.001 I", padded.min(), 0.01)
    evidence.below("library's V_B − ridge regression by hand", off)
    evidence.note(
        f"{_NO_DATA}. What can be computed: functions of S_j = 0.001 I are so narrow that "
        "V_B has holes between them; a picture that is 1 everywhere becomes 0.006 to 3.6 inside "
        "[0.1, 0.9]². Functions as wide as they are apart, S_j = 0.01 I, hold it within 3.5 %."
    )
    _draw_constant(evidence)


def _constant(count: int, variance: float, padding: bool) -> fc.Values:
    """V_B of a picture that is 1 in all 196 cells."""
    eye = torch.eye(2, dtype=torch.float64)
    basis = fc.GaussianBasis(_square(math.isqrt(count)), variance * eye)
    positions = fc.cell_centers(*_GRID, dtype=torch.float64)
    return fc.fit_values(
        torch.ones(_CELLS, 1, dtype=torch.float64), positions, basis, 0.01, padding
    )


def _by_hand(count: int, variance: float, points: Tensor) -> Tensor:
    side = (numpy.arange(14) + 0.5) / 14
    cells = numpy.stack(numpy.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    centres = _square(math.isqrt(count)).numpy()

    def at(x: numpy.ndarray) -> numpy.ndarray:
        squared = ((x[:, None] - centres) ** 2).sum(-1)
        density: numpy.ndarray = numpy.exp(-squared / (2 * variance)) / (2 * math.pi * variance)
        return density

    f = at(cells)  # F', (196, N)
    coefficients = numpy.linalg.solve(f.T @ f + 0.01 * numpy.eye(count), f.T @ numpy.ones(196))
    return torch.from_numpy(at(points.numpy()) @ coefficients).unsqueeze(1)


def _draw_constant(evidence: Evidence) -> None:
    points = fc.cell_centers(40, 40, dtype=torch.float64)
    panels = {
        f"S_j = {variance} I": _constant(49, variance, padding=False)(points)
        .reshape(40, 40)
        .tolist()
        for variance in (0.001, 0.01)
    }
    evidence.draw(Fields("V_B of a picture that is 1 everywhere, N = 49", panels, (0, 1, 0, 1)))


# ---- tables


@claim(
    "F-Tab6.2/6.3",
    "accuracies on VQA-v2 of discrete, continuous and multimodal attention",
    Verdict.NOT_CHECKABLE,
)
def accuracies(evidence: Evidence) -> None:
    splits = (
        ("test-dev", _DEV, (0.413, 0.116, 0.471)),
        ("test-standard", _STANDARD, (0.415, 0.110, 0.474)),
    )
    fits = [(name, *_weights(rows), printed) for name, rows, printed in splits]
    for name, residual, _, _ in fits:
        what = f"{name}: least residual of one weight for each kind, in points"
        evidence.below(what, residual, 0.005)
    for name, _, weights, expected in fits:
        kinds = zip(("yes/no", "number", "other"), weights, expected, strict=True)
        for kind, weight, value in kinds:
            evidence.near(f"{name}: weight of {kind}", weight, value, 0.001)
    overall = [[row[3] for row in rows] for rows in (_DEV, _STANDARD)]
    spread = [largest(each) - smallest(each) for each in overall]
    evidence.below("largest difference of two models, overall, in points", spread, 0.2)
    evidence.note(
        f"{_NO_DATA}. The tables agree with themselves: one share of yes/no, number and other "
        "questions explains every overall accuracy within rounding."
    )
    note_accuracies(evidence)


def _weights(rows: tuple[tuple[float, ...], ...]) -> tuple[float, list[float]]:
    """Shares of the kinds, sum 1, that leave the least largest residual: a linear programme."""
    from scipy.optimize import linprog

    table = numpy.array(rows)
    parts, overall = table[:, :3], table[:, 3]
    slack = -numpy.ones((len(rows), 1))
    both = numpy.vstack([numpy.hstack([parts, slack]), numpy.hstack([-parts, slack])])
    sides = numpy.concatenate([overall, -overall])
    program = linprog([0, 0, 0, 1], A_ub=both, b_ub=sides, A_eq=[[1, 1, 1, 0]], b_eq=[1])
    return float(program.x[3]), program.x[:3].tolist()


@claim("F-Tab6.4", "shares of questions with K* modes, by the penalty λ", Verdict.NOT_CHECKABLE)
def shares(evidence: Evidence) -> None:
    corners, side = _gain([0, 13, 182, 195]), (13 / 28) ** 2
    true = 2 * (1 + math.log(side / 1e-6) - math.log(4))
    evidence.near("−2 Δ Σ w ln p from 1 to 4 modes, four corners, Σw = 1", corners, 23.79, 0.01)
    evidence.below("it − 2 (1 + ln(v/1e-6) − ln 4), v their variance", abs(corners - true), 1e-8)
    gains = [_gain(_pixels(generator)) for generator in evidence.generators()]
    evidence.below("the same, four pixels at random", gains, 24.0)
    evidence.printed_above(
        "any of these reaches λ = 100, as K* > 1 needs", largest([corners, *gains]), 100.0
    )
    _check_chosen(evidence)
    for penalty, row in _SHARES.items():
        evidence.near(f"sum of the row λ = {penalty}, in per cent", sum(row), 100.0, 0.025)
    ones = [row[0] for row in _SHARES.values()]
    evidence.above("growth of the share of K* = 1 with λ", numpy.diff(ones).tolist(), 0.0)
    evidence.note(
        f"{_NO_DATA}. The rows sum to 100 within rounding. With weights of sum one, as (5.14) "
        "needs them, λ = 100 and 500 would always choose K* = 1: the table has another scale, "
        "perhaps times the number of cells, which is the library's."
    )
    note_modes(evidence)
    lines = {
        f"λ = {penalty}": ([1.0, 2.0, 3.0, 4.0, 5.0], list(row)) for penalty, row in _SHARES.items()
    }
    evidence.draw(Curves("The thesis' shares of K*", "K*", "per cent", lines, "y"))


def _pixels(generator: torch.Generator) -> list[int]:
    """One in each quarter of the picture."""
    steps = torch.randint(0, 5, (4, 2), generator=generator).tolist()
    corners = ((0, 0), (0, 9), (9, 0), (9, 9))
    return [(r + i) * 14 + c + j for (r, c), (i, j) in zip(corners, steps, strict=True)]


def _isolated(pixels: list[int]) -> tuple[Tensor, Tensor]:
    weights = torch.zeros(_CELLS, dtype=torch.float64)
    weights[pixels] = 1 / len(pixels)
    return weights, fc.cell_centers(*_GRID, dtype=torch.float64)


def _gain(pixels: list[int]) -> float:
    """-2 Δ Σ w ln p from one mode to four, no variance below 1e-6."""
    weights, positions = _isolated(pixels)
    floor = 1e-6 / float((positions - positions.mean(0)).square().mean())
    one, four = (_likelihood(weights, positions, modes, floor) for modes in (1, 4))
    return 2 * (four - one)


def _likelihood(weights: Tensor, positions: Tensor, modes: int, floor: float = 1e-6) -> float:
    """Σ w ln p of a fit; floor: the least variance, a share of that of the positions."""
    fit = Modes.of(fc.fit_mixture(weights, positions, modes, start=fc.Regions(), floor=floor))
    seen = weights > 0
    return float(fit.log_likelihood(weights[seen], positions[seen]))


def _check_chosen(evidence: Evidence) -> None:
    """K* of four pixels with the factor L = 196, by λ: from 4 modes to 1 as it doubles."""
    least, dear, wrong = [], [], []
    for generator in evidence.generators():
        weights, positions = _isolated(_pixels(generator))
        by_modes = [_likelihood(weights, positions, modes) for modes in range(1, 6)]
        likelihoods = torch.tensor(by_modes, dtype=torch.float64)
        for price in (*(100.0 * 2**k for k in range(8)), 100.0 * _CELLS):
            mixture = fc.select_mixture(weights, positions, 5, price, start=fc.Regions())
            costs = price * torch.arange(1, 6) - 2 * _CELLS * likelihoods
            wrong.append(abs(int(mixture.modes) - 1 - int(costs.argmin())))
            least += [abs(int(mixture.modes) - 4)] if price == 100 else []
        dear.append(int(mixture.modes) - 1)
    evidence.below("K* at λ = 100 with the factor L = 196 − 4", least, 0.0)
    evidence.below("K* at λ = 100 · 196, as without the factor − 1", dear, 0.0)
    evidence.below("K* at λ = 100, 200, …, 12800 and there − the argmin, by hand", wrong, 0.0)


# ---- figures


@claim(
    "F-Fig6.x/TabB.1",
    "attention maps: the ellipse of continuous sparsemax holds all its mass; the machines used",
    Verdict.NOT_CHECKABLE,
)
def figures(evidence: Evidence) -> None:
    inner, gaussian, outside, moments = [], [], [], []
    positions = fc.cell_centers(*_GRID, dtype=torch.float64)
    for generator in evidence.generators():
        weights = uniform(generator, -3, 3, _CELLS).softmax(0)
        sparse, dense = (
            fc.match_moments(weights, positions, family) for family in (fc.Paraboloid, fc.Gaussian)
        )
        covariance = positions.T @ (weights.unsqueeze(1) * positions)
        covariance = covariance - (weights @ positions).outer(weights @ positions)
        moments += [(x.covariance_matrix - covariance).abs().max() for x in (sparse, dense)]
        points, area = inside(2 * float(sparse.level) * sparse.scale)
        inner.append((area @ sparse.prob(points + sparse.mean) - 1).abs())
        gaussian.append((area @ dense.prob(points + dense.mean) - 1 + math.exp(-3)).abs())
        beyond = sparse.mean + 1.3 * points[points.norm(dim=-1) > 0.9 * points.norm(dim=-1).max()]
        outside.append(sparse.prob(beyond).max())
    evidence.below("mass of the paraboloid inside its ellipse − 1", torch.stack(inner))
    evidence.below("its density beyond the ellipse", torch.stack(outside), 0.0)
    evidence.below("the Gaussian's mass outside that ellipse − e⁻³", torch.stack(gaussian))
    evidence.below("covariances of both − that of the weights", torch.stack(moments))
    evidence.note(
        "The maps are of trained networks and pictures of VQA-v2, and Table B.1 lists machines. "
        "What can be computed: the outer ellipse of continuous sparsemax holds all of its mass, "
        f"and 95 % of a Gaussian of the same moments. `{COMMAND}` makes maps of our own networks."
    )
    shown = fc.cell_centers(36, 36, dtype=torch.float64)
    panels = {"weights": weights.reshape(_GRID).flip(0).tolist()}  # rows from below
    for name, density in (("continuous softmax", dense), ("continuous sparsemax", sparse)):
        panels[name] = density.prob(shown).reshape(36, 36).flip(0).tolist()
    evidence.draw(Fields("Weights and the densities of their moments", panels, (0, 1, 0, 1)))
