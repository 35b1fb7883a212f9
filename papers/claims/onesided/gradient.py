"""The backward pass of paper L: an advantage, a policy gradient, the geometry of the potential."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import fenchel as fl
from papers.claims._numerical import distributions, divergence, entropy, normal, slope
from papers.claims.evidence import SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.onesided._rows import N, Row, draw
from papers.claims.verdicts import Verdict


def _largest(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).max()


def _solved(row: Row) -> fl.Solution:
    return fl.solve(row.scores, fl.Shannon(row.tau))


def _log_slopes(scores: Tensor, tau: float = 1.0) -> Tensor:
    """∇_s log p_j in row j, by autograd of log_softmax. (..., n) -> (..., n, n)"""
    rows = scores.detach().reshape(-1, scores.shape[-1])
    slopes: Tensor = torch.func.vmap(torch.func.jacrev(lambda s: (s / tau).log_softmax(-1)))(rows)
    return slopes.unflatten(0, scores.shape[:-1]) if scores.dim() > 1 else slopes[0]


def _backward(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


# ---- the gradient in the scores


@claim("L-5", "∂Loss/∂s_j = p_j (l_j − E_p l) / τ", Verdict.CONFIRMED)
def backpropagation(evidence: Evidence) -> None:
    formula, views, of_solve = [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        s, losses = row.scores.requires_grad_(), row.losses
        p = (s / row.tau).softmax(-1)
        (exact,) = _backward((p @ row.values) @ row.slope, s)
        solution = _solved(row)
        p, advantage = solution.weights, solution.advantage(losses)
        formula.append((p * (losses - p @ losses) / row.tau - exact).abs().max())
        views.append((p / row.tau * advantage - exact).abs().max())
        views.append((solution.gradient(losses) - exact).abs().max())
        leaf = row.scores.requires_grad_()
        (ours,) = _backward(fl.solve(leaf, fl.Shannon(row.tau)).weights @ losses, leaf)
        of_solve.append((ours - exact).abs().max())
    evidence.below("|p_j (l_j − E_p l) / τ − autograd's|", _largest(formula))
    evidence.below(
        "|p_j / τ times the library's advantage, and its gradient − autograd's|", _largest(views)
    )
    evidence.below("|derivative of solve − autograd's|", _largest(of_solve))
    evidence.note(
        "The abstract's u_j is the utility −l_j, for the direction of descent; its proportionality "
        "holds the factor p_j / τ."
    )


@claim("L-5q", "∂Loss/∂q = Cov_p(k, l) / τ, ∂Loss/∂k_j = (∂Loss/∂s_j) q", Verdict.CONFIRMED)
def gradients_of_query_and_keys(evidence: Evidence) -> None:
    queries, keys = [], []
    for generator in evidence.generators():
        row = draw(generator)
        q, k = row.query.clone().requires_grad_(), row.keys.clone().requires_grad_()
        out = fl.attention(q.expand(1, 1, -1), k.unsqueeze(0), row.values[None], scale=1 / row.tau)
        by_query, by_key = _backward(out.flatten() @ row.slope, q, k)
        p, losses = (row.scores / row.tau).softmax(-1), row.losses
        advantage = p * (losses - p @ losses)
        covariance = (p * losses) @ row.keys - (p @ losses) * (p @ row.keys)
        queries.append((by_query - covariance / row.tau).abs().max())
        keys.append((by_key - (advantage / row.tau).unsqueeze(1) * row.query).abs().max())
    evidence.below("|derivative of attention in q − Cov_p(k, l) / τ|", _largest(queries))
    evidence.below("|derivative of attention in k_j − (∂Loss/∂s_j) q|", _largest(keys))


@claim(
    "L-5pg",
    "−∂Loss/∂s = E_{j∼p}[(r_j − b) ∇_s log p_j], r = −l, for any baseline b",
    Verdict.CONFIRMED,
)
def policy_gradient(evidence: Evidence) -> None:
    plain, based, logs = [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        solution, r = _solved(row), -row.losses
        exact, p = _log_slopes(row.scores, row.tau), (row.scores / row.tau).softmax(-1)
        logs.append((solution.hessian() / solution.weights.unsqueeze(1) - exact).abs().max())
        logs.append((solution.weights - p).abs().max())
        descent = -solution.gradient(row.losses)
        plain.append(((p * r) @ exact - descent).abs().max())
        baselines = (p @ r, 10 * normal(generator, 1))
        based += [((p * (r - b)) @ exact - descent).abs().max() for b in baselines]
    evidence.below("|Σ_j p_j r_j ∇ log p_j + gradient of the library|", _largest(plain))
    evidence.below("the same with baselines E_p r and a random one", _largest(based))
    evidence.below("|∇ log p_j and p of the library − autograd's and softmax|", _largest(logs))


@claim(
    "L-5var",
    "Backpropagation is a variance-reduced policy gradient, E_p r being the baseline",
    Verdict.CORRECTED,
)
def variance_of_the_policy_gradient(evidence: Evidence) -> None:
    expected, least, shares, of_solve = [], [], [], []
    count = evidence.trials(1000, 10_000)
    sizes = [0.25, 0.5, 1.0, 2.0, 3.0, 4.0]
    for generator in evidence.generators():
        unit, r = normal(generator, count, N), normal(generator, count, N)
        for size in sizes:
            solution = fl.solve(size * unit, fl.Shannon())
            p, logs = (size * unit).softmax(-1), _log_slopes(size * unit)
            spreads = [_one_sample(p, logs, r - b) for b in _baselines(p, logs, r)]
            of_solve.append((solution.weights - p).abs().max())
            of_solve.append((solution.hessian() - p.unsqueeze(-1) * logs).abs().max())
            expected += [(mean - solution.gradient(r)).abs().max() for mean, _ in spreads]
            none, mean, best = (spread for _, spread in spreads)
            least += [(none - best).min(), (mean - best).min()]
            shares.append((mean > none).double().mean())
    worse = torch.stack(shares).reshape(-1, len(sizes)).mean(0).tolist()
    share, usual = (worse[sizes.index(size)] for size in (3.0, 1.0))
    evidence.below(
        "|expectation of one sample − gradient of the library|, three baselines", _largest(expected)
    )
    evidence.below(
        "|weights and hessian of the library − softmax, p_j ∇ log p_j|", _largest(of_solve)
    )
    evidence.above(
        "variance with another baseline − with b* = E[r |∇ log p|²] / E[|∇ log p|²]",
        torch.stack(least),
        -SLACK,
    )
    evidence.printed_below(
        "share of N(0, 9) scores for which E_p r has more variance than none", share, 0.0
    )
    evidence.correction = (
        "Backpropagation takes the expectation exactly, so that it has no variance to reduce. Of "
        "one-sample estimates the baseline E_p r is not the best one, which is b* = E[r |∇ log "
        f"p|²] / E[|∇ log p|²], and it is worse than none in {share:.0%} of cases with N(0, 9) "
        f"scores ({usual:.0%} with N(0, 1))."
    )
    lines = {"worse than none": (sizes, worse)}
    title = "Where the baseline E_p r adds variance"
    evidence.draw(Curves(title, "standard deviation of the scores", "share", lines))


def _baselines(p: Tensor, logs: Tensor, reward: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """None, the mean reward, and the one of least variance. (..., 1) each"""
    mean = (p * reward).sum(-1, keepdim=True)
    lengths = p * logs.square().sum(-1)
    best = (lengths * reward).sum(-1, keepdim=True) / lengths.sum(-1, keepdim=True)
    return torch.zeros_like(mean), mean, best


def _one_sample(p: Tensor, logs: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (..., n) and variance (...) of r_j ∇ log p_j with j ~ p, by going through all j."""
    chance, sample = p.unsqueeze(-1), reward.unsqueeze(-1) * logs
    mean = (chance * sample).sum(-2)
    return mean, (chance * (sample - mean.unsqueeze(-2)).square()).sum((-2, -1))


# ---- the geometry of the potential


@claim(
    "L-6",
    "φ(s) = τ LSE(s/τ): ∇φ = p, ∇²φ = (diag p − p pᵀ)/τ = τ F(s), F the Fisher matrix",
    Verdict.CONFIRMED,
)
def potential(evidence: Evidence) -> None:
    first, second, fisher, natural, values = [], [], [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        s, tau, solution = row.scores.requires_grad_(), row.tau, _solved(row)
        phi = torch.func.grad(lambda x, t=tau: t * torch.logsumexp(x / t, -1))
        leaf = row.scores.requires_grad_()
        (ours,) = _backward(fl.solve(leaf, fl.Shannon(tau)).potential, leaf)
        p = (s.detach() / tau).softmax(-1)
        first += [(phi(s.detach()) - solution.weights).abs().max(), (ours - p).abs().max()]
        curvature = torch.func.jacrev(phi)(s.detach())
        second.append((solution.hessian() - curvature).abs().max())
        second.append((curvature - (p.diag() - p.outer(p)) / tau).abs().max())
        information = _information(s, tau)
        fisher.append((solution.fisher() - information).abs().max())
        fisher.append((solution.hessian() - tau * information).abs().max())
        natural.append((solution.hessian() - _information(s / tau) / tau).abs().max())
        values.append((solution.potential - tau * torch.logsumexp(row.scores / tau, -1)).abs())
    evidence.below(
        "|hessian of the library − τ F(s)|, and its F − E[score scoreᵀ]", _largest(fisher)
    )
    evidence.below(
        "|hessian of the library − second derivative of φ| and its formula", _largest(second)
    )
    evidence.below("|∇φ − weights|, plain and of the library", _largest(first))
    evidence.below(
        "|hessian − F(η) / τ|, F(η) that of log softmax(η) at η = s/τ", _largest(natural)
    )
    evidence.below("|potential of the library − τ LSE(s/τ)|", _largest(values))


def _information(scores: Tensor, tau: float = 1.0) -> Tensor:
    """E_p[∇ log p ∇ log pᵀ] of p = softmax(s/τ), from one row of scores. (n, n)"""
    logs, p = _log_slopes(scores, tau), (scores.detach() / tau).softmax(-1)
    return logs.T @ (p.unsqueeze(1) * logs)


@claim(
    "L-6dual",
    "φ is the conjugate of −τ H on the simplex: φ(s) = max over p of ⟨s, p⟩ + τ H(p)",
    Verdict.CONFIRMED,
)
def conjugacy(evidence: Evidence) -> None:
    zero, equality, above = [], [], []
    for generator in evidence.generators():
        row = draw(generator)
        tau, s = row.tau, row.scores
        p = distributions(generator, N)
        at = fl.solve(tau * p.log(), fl.Shannon(tau))
        zero += [at.potential.abs(), (at.weights - p).abs().max()]
        solution = _solved(row)
        optimum = solution.weights
        equality.append((solution.potential - s @ optimum - tau * entropy(optimum)).abs())
        others = distributions(generator, evidence.trials(2000, 50_000), N)
        others = torch.cat((others, 0.99 * optimum + 0.01 * others))
        above.append((solution.potential - others @ s - tau * entropy(others)).min())
    evidence.below("|φ(s) − ⟨s, p⟩ − τ H(p)| at the weights", _largest(equality))
    evidence.below("|φ(τ log p)|, and the weights there − p", _largest(zero))
    evidence.above("φ(s) − ⟨s, p⟩ − τ H(p) of random p", torch.stack(above), -SLACK)


@claim("L-6KL", "KL(p(s + d) | p(s)) = dᵀ F(s) d / 2 + O(|d|³)", Verdict.CONFIRMED)
def divergence_and_fisher(evidence: Evidence) -> None:
    drawn = [(draw(g), normal(g, N)) for g in evidence.generators()]
    sizes = [10 ** (-k / 4) for k in range(2, 15)]
    rests, ratios = [], []
    for size in sizes:
        pairs = torch.stack([_two_sides(row, size * d) for row, d in drawn])
        rests.append(float((pairs[:, 0] - pairs[:, 1]).norm()))
        ratios.append(pairs[:, 0] / pairs[:, 1])
    evidence.near("order of KL − dᵀ F d / 2 in |d|", slope(sizes, rests), 3.0, 0.1)
    evidence.below("|2 KL / (dᵀ F d) − 1| at the smallest d", (ratios[-1] - 1).abs(), 1e-2)
    _weights_and_fisher(evidence, drawn)
    lines = {
        "KL − dᵀ F d / 2": (sizes, rests),
        "cubic": (sizes, [rests[-1] * (size / sizes[-1]) ** 3 for size in sizes]),
    }
    evidence.draw(
        Curves("The Fisher matrix is the divergence's curvature", "|d|", "rest", lines, "xy")
    )


def _two_sides(row: Row, step: Tensor) -> Tensor:
    """KL by softmax, and the library's quadratic form."""
    moved, p = ((s / row.tau).softmax(-1) for s in (row.scores + step, row.scores))
    return torch.stack((divergence(moved, p), step @ _solved(row).fisher() @ step / 2))


def _weights_and_fisher(evidence: Evidence, drawn: list[tuple[Row, Tensor]]) -> None:
    weights, fisher = [], []
    for row, step in drawn:
        for s in (row.scores, row.scores + step):
            solution = fl.solve(s, fl.Shannon(row.tau))
            weights.append((solution.weights - (s / row.tau).softmax(-1)).abs())
            fisher.append((solution.fisher() - _information(s, row.tau)).abs())
    evidence.below("|weights of the library − softmax|, at s and s + d", weights)
    evidence.below("|F of the library − E[∇ log p ∇ log pᵀ], by autograd|", fisher)


@claim(
    "L-7",
    "∇_s Loss = ∇²φ l = τ F(s) l; the natural gradient F⁺ ∇_s Loss is τ (l − mean l)",
    Verdict.CONFIRMED,
)
def natural_gradient(evidence: Evidence) -> None:
    conditioned, natural, multiplicative, plain = [], [], [], []
    for generator in evidence.generators():
        drawn = draw(generator)
        row = replace(drawn, tau=2 + drawn.tau)  # even enough for F's inverse to keep its digits
        tau, losses, s = row.tau, row.losses, row.scores
        leaf = row.scores.requires_grad_()
        (exact,) = _backward((leaf / tau).softmax(-1) @ losses, leaf)
        solution = _solved(row)
        conditioned.append((solution.hessian() @ losses - exact).abs().max())
        conditioned.append((tau * solution.fisher() @ losses - exact).abs().max())
        step = torch.linalg.pinv(solution.fisher(), hermitian=True, rtol=1e-10) @ exact
        natural.append((step - tau * (losses - losses.mean())).abs().max())
        p, eta = solution.weights, 0.3
        raised = p * (-eta * losses).exp()
        wanted = raised / raised.sum()
        moved = fl.solve(s - eta * step, fl.Shannon(tau)).weights
        multiplicative.append((moved - wanted).abs().max())
        usual = fl.solve(s - eta * exact, fl.Shannon(tau)).weights
        plain.append((usual - wanted).abs().max())
    evidence.below("|τ F(s) l and hessian · l of the library − autograd's|", _largest(conditioned))
    evidence.below("|F⁺ ∇_s Loss − τ (l − mean l)|", _largest(natural))
    evidence.below(
        "|weights after a natural step η − p e^{−η l} / Z|: multiplicative weights",
        _largest(multiplicative),
    )
    evidence.above("the same after a plain step: it is not the natural one", _largest(plain), 1e-3)
    evidence.note(
        "Plain backpropagation is the utility preconditioned by the Fisher matrix, not the natural "
        "gradient, which multiplies by its inverse."
    )
