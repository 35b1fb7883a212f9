"""Sections 5, 6.1 and 6.2: Lipschitz constants of attention on measures, and fixed points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

import fenchel as fl
from fenchel import bounds, measures
from fenchel.bounds import Box, Setting
from fenchel.measures import Empirical
from papers.claims.evidence import SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.theory import printed
from papers.claims.theory._attacks import OfMeasures, falls, survives
from papers.claims.theory._draws import (
    F64,
    atoms,
    attended,
    by_pot,
    largest,
    measure,
    normal,
    number,
    on_the_line,
    shares,
    uniform,
)
from papers.claims.theory._spaces import Spaces, by_hand
from papers.claims.verdicts import Verdict

FLAT = Setting(measures.Dot(50.0), Box(1.0), 2, 3)  # G = exp(<x, y> / 50) on [-1, 1]^2
BY_HAND = OfMeasures(50.0)


def _distance(pair: Iterable[Empirical]) -> Tensor:
    """W1 of two."""
    one, other = pair
    return measures.wasserstein1(one, other)


@claim(
    "M-P19a",
    "W1(Ψ_{G(x,·)} μ, Ψ_{G(y,·)} μ) ≤ 2 Lx diam/eps |x − y|; the sharp factor is 1/2",
    Verdict.CONFIRMED,
)
def in_query(evidence: Evidence) -> None:
    ratios = []
    for generator in evidence.generators():
        for n in (2, 3, 4):
            spaces = Spaces.draw(generator, evidence.trials(300, 1500), n)
            matched = spaces.softmatched(spaces.mu)
            rows = measures.Empirical(matched.points.unsqueeze(1), matched.weights.unsqueeze(1))
            columns = measures.Empirical(matched.points.unsqueeze(1), matched.weights.unsqueeze(2))
            bound = (spaces.slope(0) * spaces.term)[:, None, None] * spaces.apart
            moved = measures.wasserstein1(rows, columns)
            ratios.append(torch.where(bound > 0, moved / bound, 0.0))
    evidence.below(
        "W1 / (Lx diam/eps |x − y|), sets of 2 to 4 points", largest(ratios), 0.5 + SLACK
    )
    small = 1e-6  # G = 1 -+ small at one point, 1 +- small at the other
    steps = torch.tensor([[-small, small], [small, -small]], dtype=F64)
    pair = Spaces(number(0, 1).reshape(1, 2, 1), steps.log1p()[None], number(0.5, 0.5)[None], steps)
    tilted = pair.softmatched(pair.mu).weights[0]
    moved = _distance(measures.Empirical(pair.points[0], row) for row in tilted)
    limit = moved / (pair.slope(0) * pair.term)
    evidence.near("two points, G nearly constant: attained", limit, 0.5, 1e-6)
    eps, _, slope, diameter = by_hand(FLAT)
    upper = bounds.contraction.in_query(FLAT)
    sharp = slope * diameter / eps / 2
    evidence.below("certified bound / (Lx diam/(2 eps)) − 1", abs(upper.value / sharp - 1))
    survives(evidence, upper, BY_HAND.in_query, 0.2)


@claim("M-P19b", "printed: W1(Ψ_G μ, Ψ_G ν) ≤ 2 Ly diam/eps W1(μ, ν)", Verdict.REFUTED)
def in_measure(evidence: Evidence) -> None:
    line = number(0, 1).unsqueeze(-1)
    mu, nu = (measures.Empirical(line, w) for w in (number(0.2, 0.8), number(0.5, 0.5)))
    flat = torch.zeros(2, dtype=F64)
    left = _distance(measures.boltzmann_gibbs(flat, m) for m in (mu, nu))
    evidence.printed_below("G = 1: left side, where the right side is 0", left, 0.0)
    evidence.near("G = 1: left side, |0.5 − 0.2| moved by 1", left, 0.3, SLACK)
    false, true, identity, exact = [], [], [], []
    for generator in evidence.generators():
        for n in (2, 3, 4):
            spaces = Spaces.draw(generator, evidence.trials(300, 1500), n)
            one, other = spaces.softmatched(spaces.mu), spaces.softmatched(spaces.nu)
            moved = measures.wasserstein1(one, other)
            exact.append(moved - on_the_line(one.points, one.weights, other.weights))
            quotient = moved.amax(-1) / on_the_line(spaces.points, spaces.mu, spaces.nu)
            top = spaces.table.exp().amax((-2, -1)) / spaces.table.exp().amin((-2, -1))
            lipschitz = spaces.slope(1) * spaces.term
            false.append(quotient / (2 * lipschitz))
            true.append(quotient / (lipschitz + top))
            identity.append(spaces.splitting(one, other, normal(generator, n)))
    evidence.printed_below("random: largest left side / right side", largest(false), 1.0)
    evidence.below("left side / ((Ly diam + sup G)/eps W1), random", largest(true), 1 + SLACK)
    evidence.below("Ψμ(f) − Ψν(f) − (μ − ν)(G(f − Ψν(f)))/μ(G)", largest(identity))
    evidence.below("W1 on the line − ∫ |F − G|", largest(exact))
    corrected = bounds.contraction.in_measure(FLAT)
    eps, top_of_g, slope, diameter = by_hand(FLAT)
    evidence.below(
        "certified / by hand − 1", abs(corrected.value * eps / (slope * diameter + top_of_g) - 1)
    )
    survives(evidence, corrected, BY_HAND.in_measure, 0.5)
    evidence.counterexample = (
        "G = 1 on {0, 1}, μ = (0.2, 0.8), ν = (0.5, 0.5): the right side is 0, the left side is "
        f"W1(μ, ν) = {float(left):.1f}"
    )
    evidence.correction = (
        "the constant is (Ly diam + sup G)/eps: the proof pulls f out of a signed integral"
    )


@claim("M-P20", "W1(Πμ, Πν) ≤ d W1(μ, ν); the factor 1 is enough, by Jensen", Verdict.CONFIRMED)
def projection(evidence: Evidence) -> None:
    ratios, diracs = [], []
    onto = measures.MomentProjection()
    for generator in evidence.generators():
        for d in range(1, 6):
            mu, nu = (measure(generator, 4, d, evidence.trials(12, 120)) for _ in range(2))
            moved = measures.wasserstein1(atoms(onto(mu)), atoms(onto(nu)))
            ratios.append(moved / by_pot(mu, nu))
            x, y = normal(generator, 2, d)
            one, other = (onto(measures.Dirac(point)) for point in (x, y))
            moved = measures.wasserstein1(atoms(one), atoms(other))
            diracs.append(moved / (x - y).abs().sum() - 1)
    evidence.below("W1(Πμ, Πν) / W1(μ, ν) by POT, d = 1 to 5", largest(ratios), 1 + SLACK)
    evidence.below("Diracs: W1(Πμ, Πν) / |x − y|₁ − 1", largest(diracs), SLACK)
    certified = bounds.contraction.projection(FLAT).value
    evidence.near("certified constant, whatever d", certified, 1.0, 0.0)


@claim(
    "M-P21", "a lookup δ_{ℓ(x)} contracts W1 by the l1-Lipschitz constant of ℓ", Verdict.CONFIRMED
)
def lookup(evidence: Evidence) -> None:
    ratios, attained = [], []
    for generator in evidence.generators():
        matrix = normal(generator, 3, 3)
        constant = matrix.abs().sum(0).max()
        kernel = measures.Lookup(matrix)
        mu, nu = (measure(generator, 5, 3, evidence.trials(20, 200)) for _ in range(2))
        moved = measures.wasserstein1(mu @ kernel, nu @ kernel)
        ratios.append(moved / (constant * measures.wasserstein1(mu, nu)))
        column = torch.eye(3, dtype=F64)[matrix.abs().sum(0).argmax()]
        one, other = measures.Dirac(mu.mean[0]), measures.Dirac(mu.mean[0] + column)
        attained.append(measures.wasserstein1(one @ kernel, other @ kernel) / constant - 1)
    evidence.below(
        "W1(μL, νL) / (K W1(μ, ν)), linear ℓ, K its largest column", largest(ratios), 1 + SLACK
    )
    evidence.below("Diracs along that column: the quotient / K − 1", largest(attained), SLACK)


@claim("M-D22", "τ(Φ) = sup over μ ≠ ν of W1(Φμ, Φν) / W1(μ, ν)", Verdict.DEFINITION)
def coefficient(evidence: Evidence) -> None:
    generator = torch.Generator().manual_seed(evidence.seed)
    projected = bounds.contraction.projection(FLAT)
    attack = bounds.attack(projected, 300, generator=generator)
    evidence.near("τ(Π) = 1, found by search: sup of the quotient", attack.observed, 1.0, 1e-9)
    evidence.note("in the text before it the supremum is of the left side of W1 ≤ τ W1 alone")
    mu, apart = attack.witness[0], attack.witness[2]
    weights = attack.witness[1].softmax(-1), attack.witness[3].softmax(-1)
    one, other = measures.Empirical(mu, weights[0]), measures.Empirical(apart, weights[1])
    quotient = (one.mean - other.mean).abs().sum() / measures.wasserstein1(one, other)
    evidence.near("the quotient of the pair it found, anew", quotient, attack.observed, 1e-9)


@claim("M-T23", "printed: τ(A) ≤ d K 2 (Lx + Ly) diam/eps", Verdict.REFUTED)
def attention(evidence: Evidence) -> None:
    eps, top, slope, diameter = by_hand(FLAT)
    false = 2 * 2 * 2 * slope * diameter / eps
    kernel = measures.AttentionKernel(measures.Dot(50.0), torch.eye(2, dtype=F64))
    ends = [measures.Dirac(number(*point)) for point in ((-1, -1), (1, 1))]
    moved = _distance(end @ kernel(end) for end in ends)
    quotient = float(moved / 4)  # |(-1, -1) - (1, 1)|_1
    evidence.printed_below("two Diracs: W1(μA, νA) / W1(μ, ν)", quotient, false)
    evidence.near("two Diracs, which attention leaves: the quotient", quotient, 1.0, SLACK)
    ratios, exact = [], []
    for generator in evidence.generators():
        mu, nu = (
            measures.Empirical(uniform(generator, 20, 3, 2), shares(generator, 20, 3)) for _ in "12"
        )
        moved = measures.wasserstein1(mu @ kernel(mu), nu @ kernel(nu))
        ratios.append(moved / by_pot(mu, nu))
        exact.append(moved - by_pot(_step(mu), _step(nu)))
    corrected = (1.5 * slope * diameter + top) / eps
    evidence.printed_below(
        "random measures: largest quotient / printed bound", largest(ratios) / false, 1.0
    )
    evidence.below("largest quotient / corrected bound", largest(ratios) / corrected, 1 + SLACK)
    evidence.below("W1(μA, νA) − by softmax and POT", largest(exact))
    upper = bounds.contraction.attention(FLAT)
    evidence.below(
        "certified / K((Lx/2 + Ly) diam + sup G)/eps − 1", abs(upper.value / corrected - 1)
    )
    survives(evidence, upper, BY_HAND.attention, 0.5)
    as_printed = printed.printed_attention(FLAT)
    falls(evidence, as_printed, BY_HAND.attention, "observed / printed bound, under attack")
    evidence.counterexample = (
        f"G = exp(⟨x, y⟩/50) on [−1, 1]², ℓ = id: the printed bound is {false:.3f}, but Diracs are "
        f"fixed, which gives τ(A) ≥ {quotient:.3f}"
    )
    evidence.correction = "τ(A) ≤ K ((Lx/2 + Ly) diam + sup G)/eps; and τ(A) ≥ K always, by Diracs"


def _step(mu: Empirical) -> Empirical:
    """μA for G = exp(⟨x, y⟩/50) and ℓ = id, as linear algebra has it."""
    points = BY_HAND.outputs(mu.points, mu.points, mu.weights.log().unsqueeze(-2))
    return measures.Empirical(points, mu.weights)


@claim(
    "M-C24",
    "|Att(q₁) − Att(q₂)|₂ ≤ d^{3/2} K 2 Lx diam/eps |q₁ − q₂|₂ for queries in E",
    Verdict.CONFIRMED,
)
def of_queries(evidence: Evidence) -> None:
    ratios, sharp, exact = [], [], []
    for generator in evidence.generators():
        for d in (2, 3, 4):
            setting = Setting(measures.Dot(math.sqrt(d)), Box(1.0), d, 6)
            eps, _, slope, diameter = by_hand(setting)
            bound = d**1.5 * 2 * slope * diameter / eps
            tokens, q = uniform(generator, 1, 6, d), uniform(generator, 1, 200, d)
            outputs = fl.attention(q, tokens, tokens, fl.Shannon())[0]
            exact.append(outputs - attended(q[0] @ tokens[0].mT / math.sqrt(d), tokens[0]))
            quotient = (outputs - outputs.roll(1, 0)).norm(dim=-1) / (q[0] - q[0].roll(1, 0)).norm(
                dim=-1
            )
            ratios.append(quotient / bound)
            upper = bounds.contraction.attention_query(setting)
            sharp.append(number(4 * d * upper.value / bound - 1))
    evidence.below("observed / bound, tokens and queries in [−1, 1]^d", largest(ratios), 1 + SLACK)
    evidence.below("attention − the formula of a softmax", largest(exact))
    evidence.below("√d K Lx diam/(2 eps), certified: 4d times smaller, − 1", largest(sharp))
    upper = bounds.contraction.attention_query(FLAT)
    survives(evidence, upper, BY_HAND.attention_query, 0.1)
    wide = bounds.contraction.attention_query(Setting(measures.Dot(1.0), Box(10.0), 2))
    evidence.above("on all of R^d eps is 0: the constant on [−10, 10]²", wide.value, 1e100)
    evidence.note("the last = of the chain is ≤; M-C24+ holds on all of R^d")


@claim(
    "M-C24+",
    "softmax attention: |Att(q₁) − Att(q₂)|₂ ≤ diam₂(K) diam₂(V)/(4τ) |q₁ − q₂|₂ on all of R^d",
    Verdict.CONFIRMED,
)
def globally(evidence: Evidence) -> None:
    ratios, tighter, pairs, two = [], [], [], []
    for generator in evidence.generators():
        for d in (2, 3, 4):
            keys, values = normal(generator, 6, d), normal(generator, 6, 3)
            constant = bounds.query_lipschitz(keys, values, fl.Shannon(0.7)).value
            best = (_apart(keys) * _apart(values)).max() / (4 * 0.7)
            pairs.append(constant / best - 1)
            tighter.append(constant / (_apart(keys).max() * _apart(values).max() / (4 * 0.7)))
            q = 10 ** (2 * uniform(generator, 200, 1)) * normal(generator, 200, d)
            outputs = attended(q @ keys.mT / 0.7, values)
            steps = (q - q.roll(1, 0)).norm(dim=-1)
            ratios.append((outputs - outputs.roll(1, 0)).norm(dim=-1) / (constant * steps))
            two.append(_of_two(keys[:2], values[:2]))
    evidence.below("two keys, p = 1/2: norm of the Jacobian / bound − 1, attained", largest(two))
    evidence.below("six keys, random queries: observed / certified", largest(ratios), 1 + SLACK)
    evidence.below("certified / (max |k_i − k_j| |v_i − v_j| / (4τ)) − 1", largest(pairs))
    evidence.below("the best pair of keys, certified / bound", largest(tighter), 1 + SLACK)
    for d, square, times in ((2, 1, 66), (2, 9, 5.4e6), (64, 9, 1.5e5)):
        heat, radius = math.sqrt(d), math.sqrt(square)
        setting = Setting(measures.Dot(heat), bounds.Ball(radius), d)
        ratio = 2 * d**1.5 * setting.query_term() / (square / heat)
        evidence.near(f"M-C24 exceeds it, d = {d}, R² = {square}, by", ratio, times, 0.04 * times)


def _apart(x: Tensor) -> Tensor:
    """Distances of all pairs, in l2."""
    distances: Tensor = (x.unsqueeze(1) - x).norm(dim=-1)
    return distances


def _of_two(keys: Tensor, values: Tensor) -> Tensor:
    """Norm of the Jacobian where two keys weigh alike / the bound, certified and by hand, − 1."""
    zero = torch.zeros(keys.shape[1], dtype=F64)
    slope = torch.autograd.functional.jacobian(lambda x: attended(x @ keys.mT / 0.7, values), zero)
    certified = bounds.query_lipschitz(keys, values, fl.Shannon(0.7)).value
    both = number(certified, float(_apart(keys).max() * _apart(values).max() / (4 * 0.7)))
    norm: Tensor = torch.linalg.matrix_norm(slope, 2)
    return norm / both - 1


@claim(
    "M-P25",
    "printed: |Att(x, N) − Att(x, N')| ≤ d K 2 Lip(G(x,·)) diam/eps W1(N, N')",
    Verdict.REFUTED,
)
def neighbourhood(evidence: Evidence) -> None:
    setting = Setting(measures.Dot(1e6), Box(1.0), 2, 3)
    eps, _, slope, diameter = by_hand(setting)
    false = 2 * 2 * slope * diameter / eps
    kernel = measures.AttentionKernel(measures.Dot(1e6), torch.eye(2, dtype=F64))
    x, one, other = number(0.5, 0.5), number(1.0, -0.2), number(-1.0, 0.4)
    sets = [measures.Empirical(torch.stack([x, token])) for token in (one, other)]
    means = [kernel(mu).at(x[None]).mean[0] for mu in sets]
    moved = (means[0] - means[1]).abs().sum()
    right = false * (one - other).abs().sum() / 2  # the other half of the mass stays
    evidence.printed_below(
        "temperature 1e6, one of two tokens replaced: left side", moved, float(right)
    )
    evidence.below("W1 of the two sets / half the distance − 1", abs(_distance(sets) / 1.3 - 1))
    ratios, over, exact = [], [], []
    for generator in evidence.generators():
        mu, nu = (
            measures.Empirical(uniform(generator, 40, 3, 2), shares(generator, 40, 3)) for _ in "12"
        )
        for heat in (1e6, 2.0):
            setting = Setting(measures.Dot(heat), Box(1.0), 2, 3)
            eps, top, slope, diameter = by_hand(setting)
            kernel = measures.AttentionKernel(measures.Dot(heat), torch.eye(2, dtype=F64))
            means = [kernel(m).at(mu.points[:, :1]).mean.squeeze(-2) for m in (mu, nu)]
            quotient = (means[0] - means[1]).abs().sum(-1) / by_pot(mu, nu)
            for m, output in zip((mu, nu), means, strict=True):
                logs = m.weights.log().unsqueeze(-2)
                plain = OfMeasures(heat).outputs(mu.points[:, :1], m.points, logs)
                exact.append(output - plain.squeeze(-2))
            ratios.append(quotient * eps / (slope * diameter + top))
            bound = bounds.contraction.neighbourhood(setting).value
            over.append(number(bound * eps / (slope * diameter + top) - 1))
    evidence.below("left side / (K (Lip diam + sup G)/eps W1), in l1", largest(ratios), 1 + SLACK)
    evidence.below("certified / by hand − 1", largest(over))
    evidence.below("outputs − softmax attention", largest(exact))
    as_printed = printed.printed_neighbourhood(FLAT)
    falls(evidence, as_printed, BY_HAND.neighbourhood, "observed / printed bound, under attack")
    upper = bounds.contraction.neighbourhood(FLAT)
    survives(evidence, upper, BY_HAND.neighbourhood, 0.5)
    evidence.counterexample = (
        "G = exp(⟨x, y⟩/10⁶), x = (0.5, 0.5), its other token (1, −0.2) becomes (−1, 0.4): the "
        f"output moves by {float(moved):.3f}, the printed bound is {float(right):.2g}"
    )
    evidence.correction = "K (Lip(G(x,·)) diam + sup G(x,·))/eps, with the l1 norm on the left"


# ---- fixed points

_SHIFT = (0.3, -0.2)


def _feed_forward(x: Tensor) -> Tensor:
    """Half of a hyperbolic tangent: Lipschitz constant 1/2."""
    return 0.5 * x.tanh() + number(*_SHIFT)


def _layer() -> measures.TransformerKernel:
    """G = exp(<x, y> / 50), values x / 2."""
    attention = measures.AttentionKernel(measures.Dot(50.0), 0.5 * torch.eye(2, dtype=F64))
    return measures.TransformerKernel(attention, _feed_forward)


def _plain(x: Tensor) -> Tensor:
    """The same layer as linear algebra has it, tokens (..., n, 2)."""
    return 0.5 * attended(x @ x.mT / 50, x / 2).tanh() + number(*_SHIFT)


@claim("M-P26", "τ(T) < 1: the stack with shared weights has one fixed point", Verdict.CONFIRMED)
def fixed_point(evidence: Evidence) -> None:
    value = 0.5 * torch.eye(2, dtype=F64)
    constant = bounds.contraction.attention(FLAT, value).value / 2
    evidence.near("τ(T), certified by the corrected M-T23", constant, 0.303, 5e-4)
    eps, top, slope, diameter = by_hand(FLAT)
    formula = 0.25 * (1.5 * slope * diameter + top) / eps
    evidence.below("certified / by hand − 1", abs(constant / formula - 1))
    start = torch.stack([uniform(g, 4, 5, 2) for g in evidence.generators()]).flatten(0, 1)
    stack = measures.flow(measures.Empirical(start), [_layer()] * 100)
    limits = stack[-1].points.flatten(0, 1)
    evidence.below("20 inputs, 100 layers: apart at the end", largest([limits - limits[0]]), 1e-15)
    last = stack[-1].points
    evidence.below(
        "the first layer − as linear algebra has it", largest([stack[1].points - _plain(start)])
    )
    evidence.below(
        "one more layer, as linear algebra has it: moved", largest([_plain(last) - last]), 1e-15
    )
    moved = [_neighbours(mu) for mu in stack[:12]]
    first = by_pot(stack[0], measures.Empirical(start.roll(1, 0)))
    evidence.below("W1 of the inputs / by POT − 1", (moved[0] / first - 1).abs())
    quotients = torch.stack([after / before for before, after in pairwise(moved)])
    evidence.below("observed W1(Tμ, Tν) / (τ(T) W1(μ, ν))", quotients / constant, 1 + SLACK)
    evidence.near("largest observed W1(Tμ, Tν) / W1(μ, ν)", quotients.max(), 0.245, 0.03)
    evidence.note("the printed constant of M-T23 is false and must not be used for the hypothesis")
    far = [float(_spread(mu, limits[0])) for mu in stack[:16]]
    steps = [float(step) for step in range(16)]
    certified = [far[0] * constant**step for step in range(16)]
    lines = {"largest W1 to the fixed point": (steps, far), "certified": (steps, certified)}
    evidence.draw(Curves("A stack of one layer", "layers", "W1", lines, "y"))


def _neighbours(mu: Empirical) -> Tensor:
    """W1 of each measure of a batch to the next."""
    return measures.wasserstein1(mu, measures.Empirical(mu.points.roll(1, 0)))


def _spread(mu: Empirical, point: Tensor) -> Tensor:
    return (mu.points - point).abs().sum(-1).mean(-1).max()


@claim(
    "M-R27", "the fixed point is the Dirac at x* = f(ℓ(x*)): all tokens collapse", Verdict.CORRECTED
)
def collapse(evidence: Evidence) -> None:
    point = torch.zeros(2, dtype=F64)
    for _ in range(200):
        point = 0.5 * (point / 2).tanh() + number(*_SHIFT)
    start = measures.Empirical(torch.stack([uniform(g, 5, 2) for g in evidence.generators()]))
    stack = measures.flow(start, [_layer()] * 40)
    off = largest([stack[-1].points - point])
    evidence.below("tokens after 40 layers − the solution of x = f(x/2)", off, 1e-14)
    generator = torch.Generator().manual_seed(evidence.seed)
    first, apart = _with_heads(generator, start)
    evidence.below("two heads: tokens − the solution of x = f(Σ_h O_h V_h x)", apart.abs(), 1e-12)
    layers = [stack[1].points - _plain(start.points), first]
    evidence.below("first layers, one head and two − as linear algebra has them", largest(layers))
    here = measures.Dirac(normal(generator, 9, 2))
    stay = (here @ measures.AttentionKernel(measures.Dot())(here)).points - here.points
    evidence.below("ℓ = id, no feed-forward: every Dirac stays, so τ(A) ≥ 1", stay.abs(), SLACK)
    evidence.correction = (
        "a sharpening: that it is 'not clear' what the fixed point is cannot be computed, but it "
        "is known: Diracs are invariant, so it is the Dirac at the fixed point of f ∘ ℓ; the "
        "input is forgotten, and with ℓ = id and no feed-forward map every Dirac is fixed"
    )


def _with_heads(generator: torch.Generator, start: Empirical) -> tuple[Tensor, Tensor]:
    """Tokens after a layer of two heads, less those by hand; and after 50, less the fixed point of
    one token alone."""
    # no entry of Σ_h O_h V_h exceeds 4/9: with f it contracts by 4/9
    values, outputs = (normal(generator, 2, 2, 2).clamp(-1, 1) / 3 for _ in range(2))
    heads = [measures.AttentionKernel(measures.Dot(50.0), value) for value in values]
    layer = measures.TransformerKernel(
        measures.MultiHeadKernel(heads, list(outputs)), _feed_forward
    )
    point = torch.zeros(2, dtype=F64)
    for _ in range(100):
        point = _feed_forward((outputs @ values).sum(0) @ point)
    x = start.points
    each = attended((x @ x.mT / 50).unsqueeze(1), x.unsqueeze(1) @ values.mT)
    joined = (each @ outputs.mT).sum(1)  # (seeds, heads, n, 2) -> (seeds, n, 2)
    stack = measures.flow(start, [layer] * 50)
    return stack[1].points - 0.5 * joined.tanh() - number(*_SHIFT), stack[-1].points - point
