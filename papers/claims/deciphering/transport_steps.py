"""From the transport problem to an attention: its multiplier to first and second order, the two
costs of the paper, and the expansion behind them. Sec. 9 and appendix D of paper D."""

from __future__ import annotations

import torch
from torch import Tensor

import fenchel as fl
from fenchel import dual
from papers.claims._numerical import DOUBLE, distributions, normal, slope
from papers.claims.deciphering._transport import (
    Drawn,
    columns,
    draw,
    solved,
    spread,
    together,
    weights_of,
)
from papers.claims.evidence import Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict

ALPHA, GAMMA = 0.8, 0.5


# ---- one step


@claim(
    "D-E22/E44",
    "p* is off its form with λ = α z by O(α²), and λ* off α z by O(α²/γ): α and α/γ are small",
    Verdict.CONFIRMED,
)
def first_order(evidence: Evidence) -> None:
    drawn = [draw(generator) for generator in evidence.generators()]
    alphas = [2.0**-k for k in range(2, 10)]
    multipliers, weights = _apart(drawn, torch.tensor(alphas, dtype=DOUBLE), GAMMA)
    evidence.near("order of |λ* − α z| in α", slope(alphas, multipliers), 2.0, 0.05)
    evidence.near("order of |p* − p(α z)| in α", slope(alphas, weights), 2.0, 0.05)
    gammas = [2.0**k for k in range(9)]
    warm = _apart(drawn, 0.01, torch.tensor(gammas, dtype=DOUBLE))[0]
    evidence.near("order of |λ* − α z| in γ", slope(gammas, warm), -1.0, 0.05)
    leading = [alphas[-1] ** 2 / GAMMA * (spread(x, GAMMA) @ x.evidence) for x in drawn]
    ratio = multipliers[-1] / float(torch.cat(leading).norm())
    evidence.near("|λ* − α z| / (α²/γ |Σ_j u_j Cov_j z|) at α = 2⁻⁹", ratio, 1.0, 0.05)
    evidence.below("|weights to first order − (22)|", [_formula(x) for x in drawn])
    evidence.note("(44) repeats the index t' where its inner sum runs over t''.")
    lines = {"|λ* − α z|": (alphas, multipliers), "|p* − p(α z)|": (alphas, weights)}
    evidence.draw(Curves("Transport attention is right to first order", "α", "error", lines, "xy"))


def _apart(
    drawn: list[Drawn], alpha: float | Tensor, gamma: float | Tensor
) -> tuple[list[float], list[float]]:
    """|λ* − α z| and |p* − p(α z)|, one for each α or γ, over all the problems: none of them alone
    may be special."""
    x = together(drawn)
    exact = solved(x, alpha, gamma)
    near = dual.transport_first_order(x.templates, x.preference, x.cost, x.evidence, alpha, gamma)
    return _sizes(exact.multiplier - near.multiplier), _sizes(weights_of(exact) - weights_of(near))


def _sizes(apart: Tensor) -> list[float]:
    """(problem, α or γ, component) -> one for each α or γ."""
    return [float(size) for size in apart.square().sum((0, 2)).sqrt()]


def _formula(x: Drawn) -> float:
    near = dual.transport_first_order(x.templates, x.preference, x.cost, x.evidence, ALPHA, GAMMA)
    wanted = columns(x.cost, GAMMA, ALPHA * x.templates @ x.evidence) @ x.preference
    return float((weights_of(near) - wanted).abs().max())


@claim(
    "D-OTnewton",
    "λ* ≈ (I + (α/γ) Σ_t u_t Σ_t)⁻¹ α z, Σ_t the covariance of q_t",
    Verdict.CONFIRMED,
)
def second_order(evidence: Evidence) -> None:
    drawn = [draw(generator) for generator in evidence.generators()]
    alphas = [2.0**-k for k in range(1, 9)]
    x, strengths = together(drawn), torch.tensor(alphas, dtype=DOUBLE)
    exact = solved(x, strengths, GAMMA).multiplier  # (problem, α, d)
    formula = torch.stack([torch.stack([_newton(y, alpha) for alpha in alphas]) for y in drawn])
    errors = _sizes(exact - formula)
    first = _sizes(exact - strengths.unsqueeze(1) * x.evidence)
    evidence.near("order of the error in α", slope(alphas, errors), 3.0, 0.1)
    evidence.near("order of the error of α z, beside it", slope(alphas, first), 2.0, 0.1)
    operands = (x.templates, x.preference, x.cost, x.evidence)
    step = dual.transport(*operands, strengths[3:], GAMMA, max_steps=1).multiplier
    evidence.below(
        "|formula − one step of the library's Newton method from 0|, α ≤ 1/16",
        (step - formula[:, 3:]).abs(),
    )
    lines = {"α z": (alphas, first), "(I + (α/γ) Σ)⁻¹ α z": (alphas, errors)}
    evidence.draw(Curves("Two approximations of the multiplier", "α", "error", lines, "xy"))


def _newton(x: Drawn, alpha: float) -> Tensor:
    eye = torch.eye(len(x.evidence), dtype=DOUBLE)
    step: Tensor = torch.linalg.solve(eye + alpha / GAMMA * spread(x, GAMMA), alpha * x.evidence)
    return step


# ---- two costs


@claim(
    "D-S9grp",
    "Cost 0 inside groups, ∞ across, ⟨t, z⟩ equal inside: u_i is spread evenly over its group",
    Verdict.CONFIRMED,
)
def groups(evidence: Evidence) -> None:
    exact: list[Tensor] = []
    large: list[Tensor] = []
    uneven: list[Tensor] = []
    for generator in evidence.generators():
        group = torch.tensor([0, 0, 0, 1, 1, 2])
        z = normal(generator, 3)
        templates = _of_groups(generator, group, z)
        present = torch.tensor([0, 3, 5])  # one of each group is in the input
        inside = group.unsqueeze(1) == group[present]
        u = distributions(generator, 3)
        shared = inside.to(DOUBLE) / inside.sum(0) @ u
        free, dear = (torch.where(inside, 0.0, price).to(DOUBLE) for price in (torch.inf, 1e3))
        any_templates = normal(generator, 6, 3)
        cases = ((templates, free, exact), (templates, dear, large), (any_templates, free, uneven))
        for t, cost, off in cases:
            weights = weights_of(dual.transport_first_order(t, u, cost, z, ALPHA, GAMMA))
            off.append((weights - shared).abs().max())
    evidence.below("|weight − u_i / |G||, infinite cost", torch.stack(exact))
    evidence.below("|weight − u_i / |G||, cost 1000 and γ = 0.5", torch.stack(large))
    evidence.above("|weight − u_i / |G|| where ⟨t, z⟩ differ", torch.stack(uneven).max(), 1e-3)
    evidence.note("The paper's M(t, t) = ∞ across groups should read M(t, t') = ∞.")


def _of_groups(generator: torch.Generator, group: Tensor, z: Tensor) -> Tensor:
    """Templates whose products with z are one number a group. (N, d)"""
    raw = normal(generator, len(group), len(z))
    wanted = normal(generator, int(group.max()) + 1)[group]
    return raw + ((wanted - raw @ z) / z.square().sum()).unsqueeze(1) * z


@claim(
    "D-S9dot",
    "M = C − ⟨a, b⟩ makes it Σ_i u_i softmax_t(⟨t, α z + t_i⟩ / γ), whatever C is",
    Verdict.CONFIRMED,
)
def dot_product_cost(evidence: Evidence) -> None:
    attention = []
    given: list[Tensor] = []
    constants: list[Tensor] = []
    gamma = 4.0
    for generator in evidence.generators():
        t, u, z = normal(generator, 200, 16), distributions(generator, 200), normal(generator, 16)
        p = ((t @ (ALPHA * z + t).T) / gamma).softmax(0) @ u
        mean = dual.dot_product_transport(t, u, z, ALPHA, gamma)
        attention.append((mean - p @ t).abs().max())
        products = t @ t.T
        most = products.max()
        for cost in (most - products, most + 10 - products, None):
            e = dual.transport_first_order(t, u, cost, z, ALPHA, gamma)
            (given if cost is None else constants).append((weights_of(e) - p).abs().max())
    evidence.below("|mean of the average of attentions − formula|", torch.stack(attention))
    evidence.below("|weights − formula| for two constants C", torch.stack(constants))
    evidence.below("|weights − formula|, no cost given", torch.stack(given))


# ---- the expansion behind it


@claim(
    "D-E39",
    "LSE_t'((⟨t', λ⟩ − M(t, t')) / γ) = log E_{q_t} e^{⟨t', λ⟩/γ} + log Z(t)",
    Verdict.CONFIRMED,
)
def cumulants(evidence: Evidence) -> None:
    off, within = [], []
    for generator in evidence.generators():
        x, lam = draw(generator), normal(generator, 3)
        q = _columns_of_the_library(x)
        generating = _log_moments(x, q, lam)
        z = (-x.cost / GAMMA).exp().sum(1)
        whole = torch.logsumexp((x.templates @ lam - x.cost) / GAMMA, 1)
        off.append((generating + z.log() - whole).abs().max())
        within.append((q - (-x.cost / GAMMA).exp() / z.unsqueeze(1)).abs().max())
    evidence.below("|LSE − (log MGF of the library + log Z)|", torch.stack(off))
    evidence.below("|q_t of the library − e^{−M/γ} / Z|", torch.stack(within))


def _columns_of_the_library(x: Drawn) -> Tensor:
    """q_t in row t: the true preference of one that prefers t alone. (N, N)"""
    units = torch.eye(len(x.templates), dtype=DOUBLE)
    return dual.true_preference(x.templates, units, x.cost, GAMMA).weights


def _log_moments(x: Drawn, q: Tensor, lam: Tensor) -> Tensor:
    """log E_{q_t} e^{⟨t', λ⟩/γ}, one a template: the potential over the base q_t."""
    scores = (x.templates @ lam / GAMMA).expand_as(q)
    return fl.solve(scores, fl.Shannon(), base=q).potential


@claim(
    "D-E40/41/42",
    "log MGF of q_t at λ/γ = ⟨μ_t, λ/γ⟩ + (λ/γ)ᵀ Σ_t (λ/γ) / 2 + O(|λ/γ|³), moments of q_t",
    Verdict.CONFIRMED,
)
def expansion(evidence: Evidence) -> None:
    drawn = [(draw(g), normal(g, 3)) for g in evidence.generators()]
    sizes = [2.0**-k for k in range(9)]
    rests, means, covariances = [], [], []
    for size in sizes:
        remainders = [_remainder(x, size * direction) for x, direction in drawn]
        rests.append(float(torch.cat(remainders).norm()))
    for x, _ in drawn:
        q = (-x.cost / GAMMA).softmax(1)
        mean, covariance = _moments(x)
        means.append((mean - q @ x.templates).abs().max())
        centred = x.templates - (q @ x.templates).unsqueeze(1)  # (t, t', d)
        second = torch.einsum("ts,tsi,tsj->tij", q, centred, centred)
        covariances.append((covariance - second).abs().max())
    evidence.near("order of the remainder in |λ|", slope(sizes, rests), 3.0, 0.1)
    evidence.below("|mean of the library − (41)|", torch.stack(means))
    evidence.below("|covariance of the library − (42), summed over t'|", torch.stack(covariances))
    evidence.note("The sum of (42) is printed over t; it runs over t'.")
    lines = {"remainder": (sizes, rests), "cubic": (sizes, [rests[0] * s**3 for s in sizes])}
    evidence.draw(Curves("The second cumulants leave a cubic rest", "|λ|", "rest", lines, "xy"))


def _remainder(x: Drawn, lam: Tensor) -> Tensor:
    mean, covariance = _moments(x)
    v = lam / GAMMA
    return _log_moments(x, _columns_of_the_library(x), lam) - mean @ v - (covariance @ v) @ v / 2


def _moments(x: Drawn) -> tuple[Tensor, Tensor]:
    """Mean (N, d) and covariance (N, d, d) of every q_t, from the library."""
    q = _columns_of_the_library(x)
    solution = fl.solve(torch.zeros_like(q), fl.Shannon(), base=q)
    return solution.weights @ x.templates, x.templates.T @ solution.hessian() @ x.templates
