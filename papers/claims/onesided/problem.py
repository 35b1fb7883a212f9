"""Attention weights as the solution of one-sided entropic transport, and what other regularisers
give. Paper L, its forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

import fenchel as fl
from fenchel import dual, measures
from papers.claims._numerical import (
    DOUBLE,
    distributions,
    divergence,
    lowest_distribution,
    normal,
    sinkhorn,
    uniform,
)
from papers.claims.evidence import DIFFERENCES, SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.onesided._rows import N, Row, draw, objective
from papers.claims.verdicts import Verdict


def _largest(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).max()


def _attention_weights(row: Row) -> Tensor:
    """What the library's attention gives each key: its output where values are unit vectors."""
    units = torch.eye(N, dtype=DOUBLE)
    query, keys = row.query.expand(1, 1, -1), row.keys.unsqueeze(0)
    return fl.attention(query, keys, units.unsqueeze(0), scale=1 / row.tau).flatten()


def _descended(s: Tensor, tau: float, bias: Tensor | float = 0.0) -> Tensor:
    """Where BFGS on −⟨s, p⟩ − τ H(p) + τ ⟨bias, p⟩ ends, keys last."""
    return lowest_distribution(
        lambda p: (objective(s, tau, p) + tau * (bias * p).sum(-1)).sum(), torch.zeros_like(s)
    )


def _others(generator: torch.Generator, count: int, p: Tensor) -> Tensor:
    """Distributions far from p and near it. (2 count, n)"""
    far = distributions(generator, count, len(p))
    return torch.cat((far, 0.99 * p + 0.01 * far))


# ---- the problem of softmax


@claim(
    "L-1",
    "softmax(s/τ) = argmin over p of −⟨s, p⟩ − τ H(p); J(p') − J(p) = τ KL(p' | p)",
    Verdict.CONFIRMED,
)
def one_sided_problem(evidence: Evidence) -> None:
    weights, margins, identity, values, descents = [], [], [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        s, solution = row.scores, fl.solve(row.scores, fl.Shannon(row.tau))
        p = solution.weights
        weights.append((p - (s / row.tau).softmax(-1)).abs().max())
        weights.append((p - _attention_weights(row)).abs().max())
        others = _others(generator, evidence.trials(2000, 20_000), p)
        above = objective(s, row.tau, others) - objective(s, row.tau, p)
        margins.append(above.min())
        identity.append((above - row.tau * divergence(others, p)).abs().max())
        values.append((objective(s, row.tau, p) + row.tau * torch.logsumexp(s / row.tau, -1)).abs())
        values.append((solution.potential + objective(s, row.tau, p)).abs())
        descents.append((_descended(s, row.tau) - p).abs().max())
    evidence.below("|J(p') − J(p) − τ KL(p' | p)|", _largest(identity))
    evidence.below("|weights of solve and of attention − softmax(s/τ)|", _largest(weights))
    evidence.above("J(p') − J(p) of random p'", torch.stack(margins), -SLACK)
    evidence.below("|J(p) + τ LSE(s/τ)|", _largest(values))
    evidence.below("|weights − where BFGS ends|", _largest(descents), DIFFERENCES)
    evidence.note("(5) says min; it is the argmin that is equal to the weights.")


@claim(
    "L-2",
    "With one source, n = 1, entropic transport (3) becomes (4), min of Σ C_j p_j − ε H(p)",
    Verdict.CORRECTED,
)
def one_source(evidence: Evidence) -> None:
    dropped, kept, forced, shifted = [], [], [], []
    for generator in evidence.generators():
        row, target = draw(generator), distributions(generator, N)
        p = fl.solve(row.scores, fl.Shannon(row.tau)).weights
        cost = (row.scores.max() - row.scores).unsqueeze(1)  # ≥ 0, one column: the source
        one = torch.ones(1, dtype=DOUBLE)
        free = [dual.true_preference(row.keys, one, cost + c, row.tau).weights for c in (0, 7)]
        dropped.append((free[0] - p).abs().max())
        shifted.append((free[1] - p).abs().max())
        plan = sinkhorn(one, target, cost.T, row.tau)[1].squeeze(0)
        kept.append((plan - target).abs().max())
        source = measures.Empirical(row.query.unsqueeze(0))
        exact = measures.transport_plan(source, measures.Empirical(row.keys, target)).plan
        kept.append((exact.squeeze(0) - target).abs().max())
        forced.append((plan - p).abs().max())
    evidence.below(
        "|library's plan with one source and a free target − softmax(s/τ)|", _largest(dropped)
    )
    evidence.below("the same with a constant added to the cost", _largest(shifted))
    evidence.below("|plan with both marginals − target|, entropic and exact", _largest(kept))
    evidence.printed_below(
        "|plan of (3) with one source and both marginals − softmax(s/τ)|",
        torch.stack(forced).min(),
        DIFFERENCES,
    )
    evidence.correction = (
        "With one source both marginals leave one plan, the target itself, whatever the cost; "
        "the target's marginal has to be dropped for (3) to become (4). Costs below zero do no "
        "harm, since a constant moves no weight."
    )


@claim(
    "L-3",
    "ε → 0 gives transport, or the argmax with ties shared; ε → ∞ gives a bᵀ, or even weights",
    Verdict.CONFIRMED,
)
def limits(evidence: Evidence) -> None:
    _limits_of_weights(evidence)
    _limits_of_plans(evidence)


def _limits_of_weights(evidence: Evidence) -> None:
    hard, even, between = [], [], []
    for generator in evidence.generators():
        s = normal(generator, N)
        s[:2] = s.max() + 0.5
        shared = (s == s.max()).to(DOUBLE) / 2
        hard.append((fl.solve(s, fl.Shannon(2e-3)).weights - shared).abs().max())
        even.append((fl.solve(s, fl.Shannon(1e4)).weights - 1 / N).abs().max())
        for tau in (0.1, 0.5, 1.0, 3.0, 20.0):
            raised = ((s - s.max()) / tau).exp()
            p = fl.solve(s, fl.Shannon(tau)).weights
            between.append((p - raised / raised.sum()).abs().max())
    evidence.below("|weights at τ = 0.002 − argmax, two ties shared|", _largest(hard))
    evidence.below("|weights at τ = 10⁴ − 1/n|", _largest(even), 1e-4)
    evidence.below("|weights at τ from 0.1 to 20 − e^{s/τ} / Z|", _largest(between))
    taus = [10 ** (k / 8 - 2) for k in range(33)]
    rows = torch.stack([fl.solve(s, fl.Shannon(tau)).weights for tau in taus])
    order = s.argsort(descending=True)[1:6]
    lines = {f"key {j}": (taus, rows[:, k].tolist()) for j, k in enumerate(order.tolist(), 1)}
    evidence.draw(Curves("From the argmax to even weights", "τ", "weight", lines, "x"))


def _limits_of_plans(evidence: Evidence) -> None:
    cold, warm, bounds, widths = [], [], [], []
    for generator in evidence.generators():
        x, y = uniform(generator, 3, 2) / 2, uniform(generator, 4, 2) / 2  # no cost above 1
        a, b = distributions(generator, 3), distributions(generator, 4)
        mu, nu = measures.Empirical.of_masses(x, a), measures.Empirical.of_masses(y, b)
        least, cost = measures.wasserstein1(mu, nu, norm=2), torch.cdist(x, y)
        plan = sinkhorn(a, b, cost, 2e-3, steps=20_000)[1]
        cold.append(((plan * cost).sum() - least).abs())
        warm.append((sinkhorn(a, b, cost, 1e4)[1] - a.unsqueeze(1) * b).abs().max())
        bracket = measures.entropic_wasserstein1(mu, nu, norm=2, max_steps=200)
        bounds += [bracket.lower - least, least - bracket.upper]
        widths.append(bracket.upper - bracket.lower)
    # The plan a bᵀ costs some 0.03 more than W_0, which this must not let pass.
    evidence.below("|cost of Sinkhorn's plan at ε = 0.002 − W_0|", _largest(cold), 5e-4)
    evidence.below("|Sinkhorn's plan at ε = 10⁴ − a bᵀ|", _largest(warm), 1e-5)
    evidence.below("how far W_0 is outside the library's entropic bounds", _largest(bounds), 1e-9)
    evidence.below("how far those bounds are apart", _largest(widths), 1e-2)


@claim("L-4", "−H is strongly convex on the simplex: KL(p | q) ≥ |p − q|₁² / 2", Verdict.CONFIRMED)
def strongly_convex(evidence: Evidence) -> None:
    margins, values, ratios = [], [], []
    for generator in evidence.generators():
        p, q = (distributions(generator, evidence.trials(2000, 50_000), N) for _ in range(2))
        loss = fl.fenchel_young_loss(q.log(), p, fl.Shannon(), reduction="none")
        margins.append((loss - (p - q).abs().sum(-1).square() / 2).min())
        values.append((loss - divergence(p, q)).abs().max())
        ratios.append((2 * loss / (p - q).abs().sum(-1).square()).min())
    evidence.above("KL(p | q) − |p − q|₁² / 2", torch.stack(margins), -SLACK)
    evidence.below("|Fenchel–Young loss of the library − KL|", _largest(values))
    evidence.above("least 2 KL / |p − q|₁² found", torch.stack(ratios), 1.0)
    half = torch.tensor([0.5, 0.5], dtype=DOUBLE)
    near = half + torch.tensor([1e-3, -1e-3], dtype=DOUBLE)
    sharp = 2 * fl.fenchel_young_loss(half.log(), near, fl.Shannon()) / 4e-6
    evidence.near(
        "2 KL / |p − q|₁² of two even keys, 0.001 apart: the constant is sharp", sharp, 1.0, 1e-5
    )


@claim(
    "L-E8/E9",
    "+Σ μ_j p_j in the Lagrangian: C_j + τ (1 + log p_j) + λ + μ_j = 0, μ_j p_j = 0",
    Verdict.CORRECTED,
)
def lagrangian(evidence: Evidence) -> None:
    smooth, most, least, complementary = [], [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        s = row.scores
        solution = fl.solve(s, fl.Shannon(row.tau))
        multiplier = solution.potential - row.tau
        smooth.append((-s + row.tau * (1 + solution.weights.log()) + multiplier).abs().max())
        wide = 3 * normal(generator, N)
        p = fl.sparsemax(wide)
        level = (wide - p)[p > 0].mean()  # of −s_j + p_j + λ on the support
        mu = wide - p - level
        most.append(mu.max())
        least.append(mu.min())
        complementary.append((mu * p).abs().max())
    evidence.below("|C_j + τ (1 + log p_j) + λ| at the weights: μ = 0", _largest(smooth))
    evidence.below(
        "largest μ_j of +μ_j p_j, where p_j ≥ 0 is active (sparsemax)", _largest(most), SLACK
    )
    evidence.below("least μ_j there: it is not zero", _largest(least), -1e-3)
    evidence.below("|μ_j p_j| there", _largest(complementary), SLACK)
    evidence.correction = (
        "The sign of μ is not given; with +μ_j p_j it must be μ_j ≤ 0 (or −μ_j p_j with μ_j ≥ 0). "
        "Harmless for softmax, whose weights are positive, so that μ = 0."
    )


@claim(
    "L-E11/E12",
    "p_j = e^{−(C_j + τ + λ)/τ} with λ = τ LSE(s/τ) − τ is softmax(s/τ)",
    Verdict.CONFIRMED,
)
def closed_form(evidence: Evidence) -> None:
    weights, totals, multipliers = [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        s, solution = row.scores, fl.solve(row.scores, fl.Shannon(row.tau))
        multiplier = row.tau * torch.logsumexp(s / row.tau, -1) - row.tau
        p = (-(-s + row.tau + multiplier) / row.tau).exp()
        weights.append((p - solution.weights).abs().max())
        weights.append((p - _attention_weights(row)).abs().max())
        totals.append((p.sum() - 1).abs())
        multipliers.append((solution.potential - row.tau - multiplier).abs())
    evidence.below("|closed form − weights of solve and of attention|", _largest(weights))
    evidence.below("|Σ p − 1|", _largest(totals))
    evidence.below("|potential of the library − τ − λ|", _largest(multipliers))


@claim("L-SQRTD", "q, k ~ N(0, I_d): ⟨q, k⟩ / √d has variance one", Verdict.CONFIRMED)
def scale(evidence: Evidence) -> None:
    count = evidence.trials(16_000, 200_000)
    scaled, plain, formula = [], [], []
    for generator in evidence.generators():
        q, k = (normal(generator, count, 1, 16) for _ in range(2))
        scores, products = fl.scores.scaled_dot(q, k).flatten(), (q * k).sum(-1).flatten()
        scaled.append(scores.var())
        plain.append(products.var())
        formula.append((scores - products / 4).abs().max())
    evidence.near("variance of ⟨q, k⟩ / √d, d = 16", torch.stack(scaled).mean(), 1.0, 0.03)
    evidence.near("variance of ⟨q, k⟩", torch.stack(plain).mean(), 16.0, 0.48)
    evidence.below("|scores of the library − ⟨q, k⟩ / √d|", _largest(formula))


# ---- other regularisers


@claim(
    "L-E13",
    "−Σ C_j p_j + Ω(p), with C = −s, has the attention weights for its minimiser",
    Verdict.REFUTED,
)
def generalised_problem(evidence: Evidence) -> None:
    right, printed, opposite = [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        s, tau = row.scores, row.tau
        p, turned = (fl.solve(x, fl.Shannon(tau)).weights for x in (s, -s))
        literal, mended = _descended(-s, tau), _descended(s, tau)
        right.append((mended - p).abs().max())
        opposite.append((literal - turned).abs().max())
        printed.append((literal - p).abs().max())
    evidence.printed_below(
        "|argmin of −Σ C_j p_j − τ H(p) − softmax(s/τ)|, C = −s",
        torch.stack(printed).min(),
        DIFFERENCES,
    )
    evidence.below("|argmin of +Σ C_j p_j − τ H(p) − softmax(s/τ)|", _largest(right), DIFFERENCES)
    evidence.below(
        "|argmin of −Σ C_j p_j − τ H(p) − softmax(−s/τ)|", _largest(opposite), DIFFERENCES
    )
    two = torch.tensor([1.0, 0.0], dtype=DOUBLE)
    wrong = fl.solve(-two, fl.Shannon()).weights
    evidence.counterexample = (
        f"s = (1, 0), τ = 1: the printed problem gives ({wrong[0]:.4f}, {wrong[1]:.4f}), which is "
        "softmax(−s); attention gives the two the other way round."
    )
    evidence.correction = "The sign is wrong: +Σ C_j p_j + Ω(p), that is −⟨s, p⟩ + Ω(p)."


@claim("L-TabSoftmax", "Ω = −τ H gives p = softmax(s/τ)", Verdict.CONFIRMED)
def table_softmax(evidence: Evidence) -> None:
    weights, by_torch, descents = [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        raised = (row.scores / row.tau - (row.scores / row.tau).max()).exp()
        p = fl.solve(row.scores, fl.Shannon(row.tau)).weights
        weights.append((p - raised / raised.sum()).abs().max())
        ours = fl.attention(*_heads(row), scale=1 / row.tau)
        theirs = torch.nn.functional.scaled_dot_product_attention(*_heads(row), scale=1 / row.tau)
        by_torch.append((ours - theirs).abs().max())
        descents.append((_descended(row.scores, row.tau) - p).abs().max())
    evidence.below("|weights − e^{s/τ} / Z|", _largest(weights))
    evidence.below("|attention of the library − torch's|", _largest(by_torch))
    evidence.below("|weights − where BFGS ends|", _largest(descents), DIFFERENCES)


def _heads(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, head, token, d) of one query."""
    return row.query.expand(1, 1, 1, -1), row.keys.expand(1, 1, -1, -1), row.values[None, None]


@claim(
    "L-TabSparsemax",
    "Ω = |p|²/2 gives p_j = [s_j − θ]₊, θ such that they sum to one",
    Verdict.CONFIRMED,
)
def table_sparsemax(evidence: Evidence) -> None:
    weights, margins, warm = [], [], []
    for generator in evidence.generators():
        s, tau = 2 * normal(generator, N), 0.4 + float(uniform(generator, 1))
        p = fl.sparsemax(s)
        weights.append((p - _above_a_level(s, 1.0)).abs().max())
        others = _others(generator, evidence.trials(2000, 20_000), p)
        margins.append((_squares(s, others) - _squares(s, p)).min())
        hot = fl.solve(s, fl.Tsallis(2.0, tau)).weights
        warm.append((hot - _above_a_level(s / tau, 1.0)).abs().max())
    evidence.below("|weights − [s − θ]₊, θ by bisection|", _largest(weights))
    evidence.above("J(p') − J(p) of random p', J = −⟨s, p⟩ + |p|²/2", torch.stack(margins), -SLACK)
    evidence.below("|weights at temperature τ − [s/τ − θ]₊|", _largest(warm))
    evidence.note("The table writes τ for the threshold θ; it is not the temperature.")


def _squares(s: Tensor, p: Tensor) -> Tensor:
    return -(s * p).sum(-1) + p.square().sum(-1) / 2


def _above_a_level(x: Tensor, power: float) -> Tensor:
    """[x − θ]₊^power that sums to one, θ by bisection."""
    low, high = x.max() - 1, x.max()
    for _ in range(100):
        middle = (low + high) / 2
        full = (x - middle).clamp_min(0).pow(power).sum() >= 1
        low, high = (middle, high) if full else (low, middle)
    return (x - low).clamp_min(0).pow(power)


@claim(
    "L-TabPrior",
    "Ω = τ KL(p | π) = Σ p_j log(p_j/π_j) gives p_j = π_j e^{s_j/τ} / Z",
    Verdict.CORRECTED,
)
def table_prior(evidence: Evidence) -> None:
    weights, descents, preferred, printed = [], [], [], []
    for generator in evidence.generators():
        row, prior = draw(generator), distributions(generator, N)
        s, tau = row.scores, row.tau
        p = fl.solve(s, fl.Shannon(tau), base=prior).weights
        raised = prior * (s / tau).exp()
        weights.append((p - raised / raised.sum()).abs().max())
        descents.append((_with_divergence(s, tau, prior) - p).abs().max())
        estimate = dual.first_order(row.keys, prior, row.query, 1 / tau)
        assert estimate.weights is not None
        preferred.append((estimate.weights - p).abs().max())
        printed.append((_with_divergence(s, 1.0, prior) - p).abs().max())
    evidence.below("|weights over the base π − π e^{s/τ} / Z|", _largest(weights))
    evidence.below("|weights − where BFGS ends with τ KL(p | π)|", _largest(descents), DIFFERENCES)
    evidence.below("|weights − estimation to first order, u = π, α z = q/τ|", _largest(preferred))
    evidence.printed_below(
        "|π e^{s/τ} / Z − where BFGS ends with Σ p log(p/π), as the table expands it|",
        _largest(printed),
        DIFFERENCES,
    )
    evidence.correction = (
        "The table's equality τ KL(p | π) = Σ p_j log(p_j/π_j) drops τ; the weights it gives are "
        "those with τ."
    )


def _with_divergence(s: Tensor, tau: float, prior: Tensor) -> Tensor:
    return lowest_distribution(lambda p: -(s * p).sum() + tau * divergence(p, prior), 0 * s)


@claim(
    "L-Entmax",
    "Ω_a(p) = Σ (p^a − p) / (a (a − 1)) gives a-entmax, [(a − 1) s − θ]₊^{1/(a−1)}",
    Verdict.CONFIRMED,
)
def table_entmax(evidence: Evidence) -> None:
    weights, margins, ends = [], [], []
    for generator in evidence.generators():
        s = 2 * normal(generator, N)
        for alpha in (1.25, 1.5, 2.0, 3.0):
            p = fl.entmax(s, alpha)
            others = _others(generator, evidence.trials(1000, 10_000), p)
            wanted = _above_a_level((alpha - 1) * s, 1 / (alpha - 1))
            weights.append((p - wanted).abs().max())
            margins.append((_powers(s, others, alpha) - _powers(s, p, alpha)).min())
        ends.append((fl.entmax(s, 1.0) - s.softmax(-1)).abs().max())
        ends.append((fl.entmax(s, 2.0) - fl.sparsemax(s)).abs().max())
    evidence.below("|weights − [(a − 1) s − θ]₊^{1/(a−1)}|, a = 1.25, 1.5, 2, 3", _largest(weights))
    evidence.above("J(p') − J(p) of random p'", torch.stack(margins), -SLACK)
    evidence.below("|entmax at a = 1 − softmax|, at a = 2 − sparsemax", _largest(ends))


def _powers(s: Tensor, p: Tensor, alpha: float) -> Tensor:
    return -(s * p).sum(-1) + (p.pow(alpha) - p).sum(-1) / (alpha * (alpha - 1))


@claim(
    "L-ALiBi",
    "A penalty τ m |i − j| gives softmax(s/τ − m |i − j|), the prior e^{−m |i − j|}",
    Verdict.CONFIRMED,
)
def table_alibi(evidence: Evidence) -> None:
    weights, descents, given = [], [], []
    for generator in evidence.generators():
        s, slopes = normal(generator, 2, 5, 5), 0.1 + uniform(generator, 2)
        tau = 0.4 + float(uniform(generator, 1))
        apart = (torch.arange(5) - torch.arange(5).unsqueeze(1)).abs()
        prior = fl.priors.ALiBi(2, slopes)
        p = fl.solve(s, fl.Shannon(tau), base=prior).weights
        bias = slopes[:, None, None] * apart
        weights.append((p - (s / tau - bias).softmax(-1)).abs().max())
        given.append((p - fl.solve(s, fl.Shannon(tau), base=(-bias).exp()).weights).abs().max())
        descents.append((_descended(s, tau, bias) - p).abs().max())
    evidence.below(
        "|weights under the library's prior − softmax(s/τ − m |i − j|)|", _largest(weights)
    )
    evidence.below("|weights − those over the base e^{−m |i − j|}|", _largest(given))
    evidence.below("|weights − where BFGS ends with the penalty|", _largest(descents), DIFFERENCES)
