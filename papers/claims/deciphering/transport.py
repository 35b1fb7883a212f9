"""Estimation with transport in place of the divergence: its value, its problem, its conjugate and
the preference that no evidence gives. Sec. 9 and appendix D of paper D."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel import dual, measures
from papers.claims._numerical import DOUBLE, distributions, entropy, lowest, normal, sinkhorn
from papers.claims.deciphering._transport import Drawn, columns, conjugate, draw, solved, weights_of
from papers.claims.evidence import DIFFERENCES, SLACK, Curves, Evidence, largest
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict

ALPHA, GAMMA = 0.8, 0.5


# ---- the value W_γ


@claim(
    "D-E20",
    "W_γ(p, u) = min over plans of ⟨M, X⟩ − γ H(X) tends to the transport cost as γ → 0",
    Verdict.CONFIRMED,
)
def entropic_value(evidence: Evidence) -> None:
    import ot

    off, library, above, below, costs, to_itself = [], [], [], [], [], []
    for generator in evidence.generators():
        x = _with_distances(draw(generator))
        p, value = _value(x, ALPHA, GAMMA)
        off.append(abs(value - sinkhorn(p, x.preference, x.cost, GAMMA)[0]))
        arrays = [y.numpy() for y in (p, x.preference, x.cost)]
        plan = torch.from_numpy(
            ot.sinkhorn(*arrays, GAMMA, method="sinkhorn_log", stopThr=1e-11, warn=False)
        )
        costs.append(abs(_transport_cost(x, p) - ot.emd2(*arrays)))
        library.append(abs(value - (plan * x.cost).sum() + GAMMA * entropy(plan.flatten())))
        limits = [_against_the_limit(x, gamma) for gamma in (0.5, 0.1, 0.02)]
        above += [value - high for _, value, high, _ in limits]
        below += [low - value for low, value, _, _ in limits]
        to_itself.append(sinkhorn(x.preference, x.preference, x.cost, GAMMA)[0])
        to_itself[-1] += GAMMA * entropy(x.preference)
    evidence.below("|W_γ of the library − Sinkhorn's|", torch.stack(off))
    evidence.below("|W_γ of the library − POT's|", torch.stack(library), 1e-9)
    evidence.below("|W_0 of the library − POT's|", torch.stack(costs), 1e-9)
    evidence.below("W_γ − (W_0 − γ max(H(p), H(u)))", torch.stack(above), 1e-9)
    evidence.below("(W_0 − γ (H(p) + H(u))) − W_γ", torch.stack(below), 1e-9)
    evidence.below("W_γ(u, u) + γ H(u): W_γ is negative at p = u", torch.stack(to_itself), SLACK)
    evidence.note("W_γ^(1/ρ) makes sense only in the limit: W_γ(u, u) ≤ −γ H(u) < 0.")
    gammas = [2.0**-k for k in range(8)]
    lows, values, highs, limit = zip(*(_against_the_limit(x, g) for g in gammas), strict=True)
    drawn = {"lower bound": lows, "W_γ": values, "upper bound": highs, "W_0": limit}
    lines = {name: (gammas, [float(y) for y in line]) for name, line in drawn.items()}
    evidence.draw(Curves("Entropic transport tends to transport", "γ", "value", lines, "x"))


def _with_distances(x: Drawn) -> Drawn:
    """Their largest is 2, four times γ, so that Sinkhorn's iteration ends."""
    templates = 2 * x.templates / torch.cdist(x.templates, x.templates).max()
    return Drawn(templates, x.preference, torch.cdist(templates, templates), x.evidence)


def _value(x: Drawn, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """The exact weights, and W_γ there: what of its objective is not the pull."""
    e = solved(x, alpha, gamma)
    apart = e.prior_mean + x.evidence - e.mean
    return weights_of(e), e.objective - alpha / 2 * apart.square().sum()


def _transport_cost(x: Drawn, p: Tensor) -> Tensor:
    """W_0(p, u) of the library."""
    mu, nu = (measures.Empirical.of_masses(x.templates, y) for y in (p, x.preference))
    return measures.wasserstein1(mu, nu, norm=2)


def _against_the_limit(x: Drawn, gamma: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A plan of margins p, u has an entropy between the larger of theirs and their sum."""
    p, value = _value(x, 5.0, gamma)
    u, cost = x.preference, _transport_cost(x, p)
    most, least = entropy(p) + entropy(u), torch.maximum(entropy(p), entropy(u))
    return cost - gamma * most, value, cost - gamma * least, cost


# ---- the problem


@claim(
    "D-E21/E31",
    "min over p of α/2 |μ̃ + z − E_p t|² + W_γ(p, u) is strictly convex and is solved",
    Verdict.CONFIRMED,
)
def transport_problem(evidence: Evidence) -> None:
    values, weights, convex = [], [], []
    for generator in evidence.generators():
        x = draw(generator, n=5, symmetric=False)
        e = solved(x, ALPHA, GAMMA)
        target = columns(x.cost, GAMMA) @ x.preference @ x.templates + x.evidence  # μ̃ + z
        plan = _best_plan(x, target, normal(generator, 5, 5))
        values.append(abs(_over_plans(x, target, plan) - e.objective))
        weights.append((plan.sum(1) - weights_of(e)).abs().max())
        one, other = (_plan(x, 2 * normal(generator, 5, 5)) for _ in range(2))
        ends = (_over_plans(x, target, one) + _over_plans(x, target, other)) / 2
        middle = _over_plans(x, target, (one + other) / 2)
        convex.append(ends - middle - GAMMA / 8 * (one - other).abs().sum().square())
    evidence.below("|objective − that of BFGS over plans|", torch.stack(values), 1e-9)
    evidence.below("|weights − row sums of BFGS's plan|", torch.stack(weights), DIFFERENCES)
    evidence.above(
        "chord − objective at the middle − γ/8 |X − Y|₁², of two plans", torch.stack(convex), -SLACK
    )


def _plan(x: Drawn, free: Tensor) -> Tensor:
    """(N, n) with column sums u."""
    return free.softmax(0) * x.preference


def _best_plan(x: Drawn, target: Tensor, start: Tensor) -> Tensor:
    return _plan(x, lowest(lambda free: _over_plans(x, target, _plan(x, free)), start))


def _over_plans(x: Drawn, target: Tensor, plan: Tensor) -> Tensor:
    apart = target - plan.sum(1) @ x.templates
    price = (plan * x.cost).sum() + GAMMA * torch.xlogy(plan, plan).sum()
    return ALPHA / 2 * apart.square().sum() + price


@claim(
    "D-E32/E38",
    "μ̃ = Σ_{t,t'} u(t') e^{−M(t,t')/γ} / Z(t') t, Z summing over the first argument",
    Verdict.CONFIRMED,
)
def mean_of_the_true_preference(evidence: Evidence) -> None:
    off, mean, row = [], [], []
    for generator in evidence.generators():
        for symmetric in (True, False):
            x = draw(generator, symmetric=symmetric)
            answer = dual.true_preference(x.templates, x.preference, x.cost, GAMMA)
            kernel = (-x.cost / GAMMA).exp()
            weights = (kernel / kernel.sum(0) * x.preference).sum(1)
            off.append((answer.mean - weights @ x.templates).abs().max())
            mean.append((answer.mean - answer.weights @ x.templates).abs().max())
            if not symmetric:
                row.append(abs(float((kernel / kernel.sum(1) * x.preference).sum()) - 1))
    evidence.below("|mean of the library − double sum|", torch.stack(off))
    evidence.below("|mean of the library − E_ũ t|", torch.stack(mean))
    evidence.above(
        "|Σ ũ − 1| of an asymmetric cost, normalised over the second argument", largest(row), 1e-4
    )


@claim(
    "D-E33",
    "W*(g) = γ (H(u) + Σ_t u_t LSE_{t'}((g_t − M[t, t']) / γ))",
    Verdict.CORRECTED,
)
def conjugate_of_the_value(evidence: Evidence) -> None:
    equal, above, formula, printed = [], [], [], []
    for generator in evidence.generators():
        x, g = draw(generator), normal(generator, 6)
        at_g, p = _library_conjugate(x, g)
        value = sinkhorn(p, x.preference, x.cost, GAMMA)[0]
        equal.append(abs(at_g + value - g @ p))
        others = distributions(generator, evidence.trials(20, 500), 6)
        values = sinkhorn(others, x.preference, x.cost, GAMMA)[0]
        above.append((at_g + values - others @ g).min())
        formula.append(abs(at_g - conjugate(x, g, GAMMA)))
        raised = torch.logsumexp((g.unsqueeze(1) - x.cost) / GAMMA, 1)
        outer = GAMMA * (entropy(x.preference) + x.preference @ raised)
        printed.append(abs(outer + value - g @ p))
    evidence.below("|W*(g) + W(p, u) − ⟨g, p⟩| at p = ∇W*(g), W by Sinkhorn", torch.stack(equal))
    evidence.above("W*(g) + W(p, u) − ⟨g, p⟩ of other p", torch.stack(above), -SLACK)
    evidence.below(
        "|W*(g) of the library − γ (H(u) + Σ_j u_j LSE_t((g_t − M[t, j]) / γ))|",
        torch.stack(formula),
    )
    evidence.printed_below(
        "|W*(g) + W(p, u) − ⟨g, p⟩| with the exponent's p(t) of the outer sum", torch.stack(printed)
    )
    evidence.correction = (
        "In (33) the exponent carries p(t) of the outer sum; it must be p(t') of the inner one, "
        "as (36) has it."
    )


def _library_conjugate(x: Drawn, potential: Tensor) -> tuple[Tensor, Tensor]:
    """W*(g) and its gradient: with the unit vectors for templates and z = g, α = 1, λ = α z is g
    itself, and the dual's value is ⟨b, g⟩ − |g|² / 2 − W*(g)."""
    units = torch.eye(len(potential), dtype=DOUBLE)
    e = dual.transport_first_order(units, x.preference, x.cost, potential, 1.0, GAMMA)
    target = e.prior_mean + potential
    return target @ potential - potential.square().sum() / 2 - e.dual_value, weights_of(e)


@claim(
    "D-E34",
    "∇W*(g)_t = Σ_{t'} u_{t'} e^{(g_t − M[t, t'])/γ} / Σ_{t'} e^{(g_{t''} − M[t', t''])/γ}",
    Verdict.CORRECTED,
)
def gradient_of_the_conjugate(evidence: Evidence) -> None:
    differences, formula, total, printed = [], [], [], []
    step = 1e-6
    for generator in evidence.generators():
        x, g = draw(generator), normal(generator, 6)
        weights = _library_conjugate(x, g)[1]
        for t, unit in enumerate(torch.eye(6, dtype=DOUBLE)):
            up, down = (_library_conjugate(x, g + sign * step * unit)[0] for sign in (1, -1))
            differences.append(abs((up - down) / (2 * step) - weights[t]))
        formula.append((weights - columns(x.cost, GAMMA, g) @ x.preference).abs().max())
        total.append(abs(weights.sum() - 1))
        above = ((g.unsqueeze(1) - x.cost) / GAMMA).exp()
        below = ((g - x.cost) / GAMMA).exp().sum(0)  # summed over t', g of the index left free
        printed.append(abs((above / below @ x.preference).sum() - 1))
    evidence.below("|central difference of W* − weights|", torch.stack(differences), DIFFERENCES)
    evidence.below("|weights − Σ_j u_j softmax_t((g_t − M[t, j]) / γ)|", torch.stack(formula))
    evidence.below("|Σ weights − 1|", torch.stack(total))
    evidence.printed_below("|Σ entries − 1|, denominator summed over t'", torch.stack(printed))
    evidence.correction = (
        "The denominator of (34) sums over t', which the outer sum uses already, and leaves t'' "
        "free; it must sum over t''. Computed as printed, with t'' the outer index, the entries "
        "do not sum to one."
    )


@claim(
    "D-E35/E36",
    "p* = Σ_j u_j softmax_t((⟨t, λ*⟩ − M[t, j]) / γ), λ* the maximiser of the dual",
    Verdict.CONFIRMED,
)
def dual_of_transport(evidence: Evidence) -> None:
    multipliers, weights, gaps, stationary, reported = [], [], [], [], []
    for generator in evidence.generators():
        x = draw(generator, symmetric=False)
        e = solved(x, ALPHA, GAMMA)
        mean = columns(x.cost, GAMMA) @ x.preference @ x.templates
        multiplier = _root(x, mean + x.evidence)
        multipliers.append((e.multiplier - multiplier).abs().max())
        p = columns(x.cost, GAMMA, x.templates @ multiplier) @ x.preference
        weights.append((weights_of(e) - p).abs().max())
        apart = mean + x.evidence - p @ x.templates
        primal = ALPHA / 2 * apart.square().sum() + sinkhorn(p, x.preference, x.cost, GAMMA)[0]
        value = (mean + x.evidence) @ multiplier - multiplier.square().sum() / (2 * ALPHA)
        value = value - conjugate(x, x.templates @ multiplier, GAMMA)
        gaps += [abs(primal - value), abs(e.objective - value), abs(e.dual_value - value)]
        stationary.append((mean + x.evidence - e.multiplier / ALPHA - e.mean).abs().max())
        reported.append(e.gap)
    evidence.below("|λ* of the library − root of the dual's gradient|", torch.stack(multipliers))
    evidence.below("|weights − formula at that root|", torch.stack(weights))
    evidence.below("|primal by Sinkhorn − dual|, and those of the library", torch.stack(gaps))
    evidence.below("|E_p* t − (μ̃ + z − λ*/α)|", torch.stack(stationary))
    evidence.below("gap that the library reports", torch.stack(reported))


def _root(x: Drawn, target: Tensor) -> Tensor:
    """Of b − h(λ) − λ / α, by Powell's hybrid method."""
    from scipy.optimize import root

    def off(multiplier: object) -> object:
        lam = torch.as_tensor(multiplier, dtype=DOUBLE)
        p = columns(x.cost, GAMMA, x.templates @ lam) @ x.preference
        return (target - p @ x.templates - lam / ALPHA).numpy()

    return torch.from_numpy(root(off, torch.zeros_like(target).numpy(), tol=1e-14).x)


# ---- without evidence


@claim(
    "D-P1/E37",
    "argmin over p of W_γ(p, u) is ũ = Σ_j u_j softmax_t(−M[t, j] / γ), M symmetric",
    Verdict.CONFIRMED,
)
def true_preference(evidence: Evidence) -> None:
    least, margins, formula, rows = [], [], [], []
    for generator in evidence.generators():
        x = draw(generator)
        weights = dual.true_preference(x.templates, x.preference, x.cost, GAMMA).weights
        value = sinkhorn(weights, x.preference, x.cost, GAMMA)[0]
        least.append(abs(value + conjugate(x, torch.zeros(6, dtype=DOUBLE), GAMMA)))
        far = distributions(generator, evidence.trials(20, 1000), 6)
        near = 0.99 * weights + 0.01 * far
        values = sinkhorn(torch.cat((far, near)), x.preference, x.cost, GAMMA)[0]
        margins.append((values - value).min())
        kernel = (-x.cost / GAMMA).exp()
        formula.append((weights - kernel / kernel.sum(1) @ x.preference).abs().max())  # as (37)
        other = (-draw(generator, symmetric=False).cost / GAMMA).exp()
        rows.append(abs(float((other / other.sum(1) @ x.preference).sum()) - 1))
    evidence.below("|W(ũ, u) − min W|, min W = −W*(0)", torch.stack(least))
    evidence.above("W(p, u) − W(ũ, u) of other p", torch.stack(margins), -SLACK)
    evidence.below("|ũ of the library − (37)|", torch.stack(formula))
    evidence.above("|Σ ũ − 1| of (37) with an asymmetric cost", largest(rows), 1e-4)
    evidence.note(
        "(37) normalises over the second argument of M, which is right for a symmetric M alone; "
        "(38) normalises over the first, which is always right."
    )


@claim("D-P1lim", "ũ → u as γ → 0", Verdict.CORRECTED)
def limit_of_the_true_preference(evidence: Evidence) -> None:
    last, over, tied, dotted = [], [], [], []
    gammas = [2.0**-k for k in range(8)] + [0.01]
    for generator in evidence.generators():
        x = draw(generator)
        errors = [_moved(x, x.cost, gamma) for gamma in gammas]
        apart = (x.cost + torch.eye(6) * 10).min()
        bounds = [10 * torch.exp(-apart / gamma) for gamma in gammas]  # 2 (N − 1) e^{−δ/γ}
        over += [error - bound for error, bound in zip(errors, bounds, strict=True)]
        last.append(errors[-1])
        groups = torch.arange(6) // 2
        inside = groups.unsqueeze(1) == groups
        tied.append(_moved(x, torch.where(inside, 0.0, torch.inf).to(DOUBLE), 1e-3))
        dotted.append(_moved(draw(generator, n=200), None, 1e-3))
    evidence.below("|ũ − u|₁ at γ = 0.01", torch.stack(last), DIFFERENCES)
    evidence.below(
        "|ũ − u|₁ − 2 (N − 1) e^{−δ/γ}, δ the least M[t', t] − M[t, t]", torch.stack(over), SLACK
    )
    evidence.printed_below(
        "|ũ − u|₁ at γ = 0.001, the paper's cost of groups", torch.stack(tied).min(), DIFFERENCES
    )
    evidence.printed_below(
        "|ũ − u|₁ at γ = 0.001, its cost C − ⟨a, b⟩, N(0, I₃) templates",
        torch.stack(dotted).min(),
        DIFFERENCES,
    )
    few, many = (_broken(evidence, d) for d in (16, 3))
    evidence.above("share of 200 N(0, I₃) templates with ⟨t', t⟩ ≥ |t|² for another t'", many, 0.8)
    evidence.near("share of 200 N(0, I₁₆) templates with that", few, 0.07, 0.06)
    evidence.correction = (
        "It needs M[t, t] < M[t', t] for all t' ≠ t, which a footnote of the paper assumes and "
        "both of its own costs break: inside a group all costs are zero, and C − ⟨a, b⟩ is least "
        f"at t itself only if no other template has ⟨t', t⟩ ≥ |t|² ({many:.0%} of 200 templates "
        f"have one in three dimensions, {few:.0%} in sixteen)."
    )
    seen = gammas[:6]  # below, rounding
    drawn = {"M[t, t] < M[t', t]": errors, "2 (N − 1) e^{−δ/γ}": bounds}
    lines = {name: (seen, [float(y) for y in line[:6]]) for name, line in drawn.items()}
    title = "The true preference tends to the preference"
    evidence.draw(Curves(title, "γ", "|ũ − u|₁", lines, "xy"))


def _moved(x: Drawn, cost: Tensor | None, gamma: float) -> Tensor:
    """|ũ − u|₁; no cost: C − ⟨a, b⟩."""
    weights = dual.true_preference(x.templates, x.preference, cost, gamma).weights
    return (weights - x.preference).abs().sum()


def _broken(evidence: Evidence, d: int) -> float:
    """Share of templates to which another is at least as near as they are, by C − ⟨a, b⟩."""
    shares = []
    for generator in evidence.generators():
        t = normal(generator, 200, d)
        products = t @ t.T
        with_itself = products.diagonal()
        shares.append((products >= with_itself).sum(0).gt(1).double().mean())
    return float(torch.stack(shares).mean())


@claim(
    "D-E43",
    "Σ_t u(t) μ_t = μ̃, μ_t the mean of q_t(t') ∝ e^{−M(t,t')/γ}, for a symmetric M",
    Verdict.CONFIRMED,
)
def mean_of_the_means(evidence: Evidence) -> None:
    off = []
    rows: list[Tensor] = []
    asymmetric: list[Tensor] = []
    for generator in evidence.generators():
        for symmetric in (True, False):
            x = draw(generator, symmetric=symmetric)
            units = torch.eye(6, dtype=DOUBLE)
            means = dual.true_preference(x.templates, units, x.cost, GAMMA).mean  # one a template
            mean = dual.true_preference(x.templates, x.preference, x.cost, GAMMA).mean
            off.append((x.preference @ means - mean).abs().max())
            within = (-x.cost / GAMMA).softmax(1)  # q_t, as printed
            apart = (x.preference @ within @ x.templates - mean).abs().max()
            (rows if symmetric else asymmetric).append(apart)
    evidence.below("|Σ u(t) μ_t − μ̃|, μ_t as printed", torch.stack(rows))
    evidence.below("|Σ u(t) μ_t − μ̃|, μ_t of the library, any cost", torch.stack(off))
    evidence.above(
        "|Σ u(t) μ_t − μ̃|, μ_t as printed, asymmetric cost", torch.stack(asymmetric).max(), 1e-4
    )
