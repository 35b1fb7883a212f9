"""Section 6.3: the Gaussian potential exp(−|x − y|²) on all of R^d."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel import bounds, measures
from fenchel.measures import Empirical
from papers.claims.evidence import DIFFERENCES, SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.theory import _codes, printed
from papers.claims.theory._attacks import falls, gaussian_softmatch, longest_token, survives
from papers.claims.theory._draws import F64, atoms, largest, normal, number, uniform
from papers.claims.verdicts import Verdict

STEP = 1e-6  # by which a token moves, where W1 itself is computed
_SMALL = ((1, 6, 4), (2, 8, 2), (3, 20, 1), (6, 60, 1))  # d, N and starts of a search


@claim(
    "M-P28",
    "printed: W1(Ψ_x m(X), Ψ_y m(Y)) ≤ B(d, N) (|x − y| + W1(m(X), m(Y))), B of order √(d ln N)",
    Verdict.REFUTED,
)
def softmatch(evidence: Evidence) -> None:
    bound = printed.printed_gaussian(1, 9).value
    quotient = _neighbour_moved(9, 0.8)
    evidence.printed_below(
        "N = 9: x = 0, neighbour at 0.8 moved, others far: quotient", quotient, bound
    )
    evidence.below("B(1, 9) − its formula", abs(bound - _printed_constant(1, 9)), SLACK)
    at = [_neighbour_moved(tokens, 0.8) / tokens for tokens in (8, 9, 40)]
    evidence.near("the quotient is 0.6346 N: quotient / N", at[2], 0.6346, 1e-4)
    formula = (number(*at) - _neighbour_rate(0.8)).abs()
    evidence.below("quotient / N − (p + 2z²p(1 − p)), N = 8, 9, 40", formula, DIFFERENCES)
    z = torch.linspace(0, 3, 3001, dtype=F64)
    rates = number(*(_neighbour_rate(float(each)) for each in z))
    evidence.near("largest p + 2z²p(1 − p)", rates.max(), 0.6625, 1e-4)
    evidence.near("at z", z[rates.argmax()], 1.02, 0.01)
    eight = printed.printed_gaussian(1, 8).value
    evidence.below("N = 8, z = 0.8: no violation yet", _neighbour_moved(8, 0.8), eight)
    evidence.printed_below("N = 8, z = 1.02: quotient", _neighbour_moved(8, 1.02), eight)
    for tokens, check in ((4.6e5, evidence.below), (5e5, evidence.printed_below)):
        moved = _query_moved(tokens)
        check(
            f"x and its token moved alone, N = {tokens:.2g}: quotient",
            moved,
            _printed_constant(1, tokens),
        )
    _loose_constant(evidence)
    falls(
        evidence,
        printed.printed_gaussian(1, 40),
        gaussian_softmatch,
        "N = 40, by search: observed / B",
        (2000, 2000),
    )
    evidence.counterexample = (
        f"d = 1, N = 9: x = y = 0, a neighbour at 0.8, the others far; moving the neighbour gives "
        f"{quotient:.3f} > B = {bound:.3f}; in general 0.6346 N"
    )
    evidence.correction = (
        "none of this form: the rate is N (p + 2z²p(1 − p)), p = e^(−z²)/(1 + e^(−z²)); the proof "
        "drops 1/N from the measures but not from W1, and takes |Gf|_Lip on E × E for finite"
    )


def _printed_constant(d: int, tokens: float) -> float:
    """B(d, N)"""
    return math.sqrt(d * (math.log(tokens) + 1 / (2 * math.e)) * 2 / math.e) + 3 + math.sqrt(d)


def _neighbour_rate(z: float) -> float:
    p = math.exp(-z * z) / (1 + math.exp(-z * z))
    return p + 2 * z * z * p * (1 - p)


def _neighbour_moved(tokens: int, z: float) -> float:
    """W1 of the softmatched measures at 0 over W1 of the tokens: 0, z, and the others at 30."""
    x = torch.full((tokens, 1), 30.0, dtype=F64)
    x[:2, 0] = number(0, z)
    y = x.clone()
    y[1] += STEP
    kernel = measures.Softmatch(measures.GaussianPotential())
    images = [_at(kernel(measures.Empirical(z)), z[0]) for z in (x, y)]
    return float(_distance(images) / (STEP / tokens))  # one of so many tokens moved


def _query_moved(tokens: float) -> float:
    """The query 0 and its own token moved, all others at z: the best z near √(ln N)."""
    log = math.log(tokens)
    tried = [_query_moved_at(tokens, math.sqrt(log + x)) for x in (0, 0.1, 0.2, 0.3)]
    return float(number(*tried).max())


def _query_moved_at(tokens: float, z: float) -> float:
    kernel = measures.Softmatch(measures.GaussianPotential())
    weights = number(1 / tokens, 1 - 1 / tokens)
    pair = [measures.Empirical(number(x, z).unsqueeze(-1), weights) for x in (0.0, STEP)]
    images = [_at(kernel(mu), mu.points[0]) for mu in pair]
    return float(_distance(images) / (STEP + STEP / tokens))


def _distance(pair: list[Empirical]) -> Tensor:
    one, other = pair
    return measures.wasserstein1(one, other)


def _at(kernel: measures.Kernel, x: Tensor) -> Empirical:
    """K(x, ·) for one x (d)."""
    image = atoms(kernel.at(x.unsqueeze(0)))
    return measures.Empirical(image.points.squeeze(0), image.weights.squeeze(0))


def _loose_constant(evidence: Evidence) -> None:
    """C ≤ √d + 2 of the proof: 2 (2 + |t|₁) |t|_∞ e^(−|t|²) is at most 4/√(2e) + 2√d/e."""
    over = []
    for generator in evidence.generators():
        for d in (1, 2, 8, 64):
            t = normal(generator, 500, d) * 10 ** uniform(generator, 500, 1)
            value = 2 * (2 + t.abs().sum(-1)) * t.abs().amax(-1) * (-t.square().sum(-1)).exp()
            over.append(value.max() / (4 / math.sqrt(2 * math.e) + 2 * math.sqrt(d) / math.e))
    evidence.below("C of the proof / (1.716 + 0.736 √d)", largest(over), 1 + SLACK)


# ---- whole attention


@claim(
    "M-T29",
    "printed: W1(μA_μ, νA_ν) ≤ 2 τ(Π) τ(L) B(d, min(N, M)) W1(μ, ν), with τ(Π) = d, or 1",
    Verdict.REFUTED,
)
def attention(evidence: Evidence) -> None:
    bound = 2 * _printed_constant(1, 1e16)
    line = _two_places(1e16)
    evidence.printed_below(
        "d = 1, N = 10¹⁶: one token at 0, the others near √(ln N): quotient", line, bound
    )
    exact = _two_places(1e16, math.log(1e16))
    evidence.near("the same with the others at √(ln N) itself", exact, 18.92, 0.01)
    evidence.printed_below("N = 10²⁰: quotient", _two_places(1e20), 2 * _printed_constant(1, 1e20))
    square, expected = _codes.best(32, _codes.GOLD)
    code = math.sqrt(square) * _codes.gold_code()
    local, step = _origin_rate(code), _origin_moved(code)
    of_code = 2 * _printed_constant(32, 513)
    evidence.printed_below(
        "a [32, 9] code and the origin, N = 513, τ(Π) = 1: W1 / W1", step, of_code
    )
    evidence.below("its local rate by derivatives − by symmetry", abs(local - expected), 1e-8)
    evidence.below("local rate / W1 over a small step − 1", abs(local / step - 1), 1e-5)
    golay = _codes.best(24, _codes.GOLAY)[1]
    evidence.printed_below(
        "Golay code, d = 24, N = 4097, τ(Π) = 1: rate", golay, 2 * _printed_constant(24, 4097)
    )
    evidence.near("the same", golay, 94.4, 0.1)
    for name, d, weights in (
        ("BCH [64, 24]", 64, _codes.BCH),
        ("RM(2, 7)", 128, _codes.reed_muller(7)),
    ):
        tokens = sum(weights.values()) + 1
        rate, by = _codes.best(d, weights)[1], 2 * d * _printed_constant(d, tokens)
        evidence.printed_below(f"{name}, N = {tokens}, printed τ(Π) = d: rate", rate, by)
    _check_codes(evidence)
    _name_codes(evidence, local)
    _small(evidence)
    _corrected(evidence)
    evidence.counterexample = (
        f"d = 1, N = 10¹⁶, one token at 0, the others near √(ln N): moving it gives {line:.2f} > "
        f"{bound:.2f}; d = 32, N = 513, a [32, 9] code and the origin: {step:.2f} > {of_code:.2f}"
    )
    evidence.correction = (
        "in the norm of the longest token the constant is 1 + 4 W((N − 1)/e), W of Lambert, of "
        "order ln N, for every d (bounds.gaussian_constant); none is shipped for W1"
    )


def _two_places(tokens: float, square: float | None = None) -> float:
    """Local W1 quotient in d = 1: one of N tokens at 0, moved, and the others at z.

    z² = ln N + 3 / ln N is nearly the best.
    """
    log = math.log(tokens)
    z = math.sqrt(log + 3 / log if square is None else square)
    weights = number(1 / tokens, 1 - 1 / tokens)
    kernel = measures.AttentionKernel(measures.GaussianPotential())

    def outputs(x: Tensor) -> Tensor:
        mu = measures.Empirical(torch.stack([x, number(z)]), weights)
        return (mu @ kernel(mu)).points

    moved = torch.autograd.functional.jacobian(outputs, number(0)).abs().flatten()
    return float((weights * moved).sum() / weights[0])


def _outputs(origin: Tensor, code: Tensor) -> Tensor:
    """Of attention among the origin and the words, (M + 1, d)."""
    return _outputs_of(torch.cat([origin, code]))


def _origin_rate(code: Tensor) -> float:
    """The sum of |dy_i|₁ as the origin moves along the first axis."""
    start, way = torch.zeros(1, code.shape[1], dtype=F64), torch.eye(1, code.shape[1], dtype=F64)
    moved = torch.func.jvp(lambda x: _outputs(x, code), (start,), (way,))[1]
    return float(moved.abs().sum())


def _origin_moved(code: Tensor) -> float:
    """W1 after over W1 before, the latter by hand, for a small step of the origin."""
    start = torch.zeros(1, code.shape[1], dtype=F64)
    end = start + STEP * torch.eye(1, code.shape[1], dtype=F64)
    images = [measures.Empirical(_outputs(x, code)) for x in (start, end)]
    return float(_distance(images) / (STEP / (len(code) + 1)))  # one of all tokens moved


def _check_codes(evidence: Evidence) -> None:
    """The numbers of words, where they are not of the code in use itself."""
    wrong = _codes.counted(_codes.quadratic_code(4)) != dict(sorted(_codes.reed_muller(4).items()))
    wrong |= _codes.counted(_codes.gold_code()) != _codes.GOLD
    wrong |= _codes.counted(_codes.golay_code()) != _codes.GOLAY
    evidence.near(
        "weights of RM(2, 4), [32, 9] and Golay by counting all words: differences", wrong, 0, 0
    )
    families = (
        (32, _codes.GOLD),
        (24, _codes.GOLAY),
        (64, _codes.BCH),
        (128, _codes.reed_muller(7)),
    )
    dual = [_codes.dual_words(d, weights, k) for d, weights in families for k in (1, 2)]
    evidence.below("words of weight 1 and 2 in the dual codes", map(abs, dual), 0)
    if evidence.slow:
        differ = _codes.bch_weights() != dict(sorted(_codes.BCH.items()))
        evidence.near("weights of BCH [64, 24] by counting all words: differences", differ, 0, 0)
        code = math.sqrt(_codes.best(24, _codes.GOLAY)[0]) * _codes.golay_code()
        evidence.near(
            "Golay code: rate by derivatives, all 4097 tokens", _origin_rate(code), 94.43, 0.01
        )


def _name_codes(evidence: Evidence, rate: float) -> None:
    """Of the [32, 9] code in use, and of another: a rate belongs to a code, not to its size."""
    code = _codes.five_bit_code()
    square = _codes.best(32, _codes.counted(code))[0]
    other = _origin_rate(math.sqrt(square) * code)
    evidence.near("another [32, 9] code, with four words of weight 8: rate", other, 44.10, 0.01)
    evidence.note(
        f"rates are of these codes: {rate:.2f} of the [32, 9] code c + Tr(bx) + Tr(ax³) over 32 "
        "elements, a in a space of dimension 3, whose words have weights 12, 16, 20; "
        f"{_codes.best(64, _codes.BCH)[1]:.1f} of the extended BCH code [64, 24, 16]. Other codes "
        f"of the same length and dimension have other rates: {other:.2f} is that of the [32, 9] "
        "code of 1, five bits, x₁x₃ + x₂x₄, x₁x₂ + x₃x₅ and x₂x₃"
    )


def _small(evidence: Evidence) -> None:
    """Gradient ascent on the largest column sum of the Jacobian: nothing found in small cases."""
    best, errors = [], []
    # the smaller the set, the more starts end in a poor maximum
    for d, tokens, starts in _SMALL[: evidence.trials(2, len(_SMALL))]:
        sums = []
        for generator in evidence.generators():
            for _ in range(starts):
                x = _ascended(normal(generator, tokens, d), evidence.trials(40, 500))
                sums.append(_column_sums(x).max())
                local = bounds.local_lipschitz(_outputs_of, x, norm=1).value
                errors.append(sums[-1] - local)
        best.append(largest(sums) / (2 * _printed_constant(d, tokens)))
    evidence.below("small N and d, gradient ascent: quotient / bound", best, 1.0)
    evidence.above("the same, the best of each N and d: least", best, 0.25)
    evidence.below("column sums of the Jacobian − local_lipschitz in l1", largest(errors))


def _ascended(x: Tensor, steps: int) -> Tensor:
    """Tokens (N, d) after so many steps of Adam."""
    x = x.requires_grad_()
    ascent = torch.optim.Adam([x], lr=0.05)
    for _ in range(steps):
        steepest = _column_sums(x).max()
        ascent.zero_grad()
        (-steepest).backward()
        ascent.step()
    return x.detach()


def _column_sums(x: Tensor) -> Tensor:
    """Of |dy_i / dx_j| over all outputs, (N, d): p_ij (I − 2 (x_j − y_i)(x_j − x_i)'), and for
    i = j also 2 Cov_i."""
    apart = x - x.unsqueeze(1)  # x_j - x_i, (i, j, d)
    weights = (-apart.square().sum(-1)).softmax(-1)
    about = x - (weights @ x).unsqueeze(1)  # x_j - y_i
    eye = torch.eye(x.shape[1], dtype=F64)
    products = weights[..., None, None] * about.unsqueeze(-1) * apart.unsqueeze(-2)
    jacobian = weights[..., None, None] * eye - 2 * products  # (i, j, d, d)
    diagonal = torch.eye(len(x), dtype=F64)[..., None, None] * 2 * products.sum(1, keepdim=True)
    return (jacobian + diagonal).abs().sum((0, 2))


def _outputs_of(x: Tensor) -> Tensor:
    mu = measures.Empirical(x)
    return (mu @ measures.AttentionKernel(measures.GaussianPotential())(mu)).points


def _corrected(evidence: Evidence) -> None:
    """In the norm of the longest token, where there is a bound that holds."""
    for d, tokens in ((1, 8), (2, 6)):
        eye = torch.eye(d, dtype=F64)
        bound = bounds.gaussian_attention_lipschitz(eye, eye, tokens, norm=bounds.LongestToken())
        setting = f"d = {d}, N = {tokens}"
        formula = bound.value / _by_lambert(tokens) - 1
        evidence.below(f"certified / (1 + 4 W((N − 1)/e)) − 1, {setting}", abs(formula))
        survives(
            evidence,
            bound,
            longest_token,
            0.2,
            name=f"1 + 4 W((N − 1)/e), {setting}",
            budget=(300, 20_000),
        )
    size = bounds.gaussian_constant(10**6, bounds.LongestToken()) - _by_lambert(10**6)
    evidence.below("the constant − 1 − 4 W((N − 1)/e), N = 10⁶", abs(size))


def _by_lambert(tokens: int) -> float:
    """1 + 4 W((N − 1)/e), by scipy."""
    from scipy.special import lambertw

    return 1 + 4 * float(lambertw((tokens - 1) / math.e).real)


@claim(
    "M-C30", "printed: for N = M the constant is O(√(ln N)), better than O(ln N)", Verdict.REFUTED
)
def order(evidence: Evidence) -> None:
    powers = [4, 8, 12, 15, 16, 20, 30, 50, 100, 200, 300]
    quotients = {power: _two_places(10.0**power) for power in powers}
    printed = {power: 2 * _printed_constant(1, 10.0**power) for power in powers}
    evidence.printed_below("N = 10¹⁰⁰: quotient", quotients[100], printed[100])
    evidence.near("N = 10¹⁰⁰: quotient / ln N", quotients[100] / math.log(1e100), 0.502, 1e-3)
    half = [quotients[power] - 0.5 * math.log(10.0**power) for power in powers]
    evidence.above("the quotient − (ln N)/2, least of 11 N from 10⁴ to 10³⁰⁰", half, 0.0)
    exponent = math.log(quotients[300] / quotients[20]) / math.log(300 / 20)
    evidence.printed_near("its order as a power of ln N, 10²⁰ to 10³⁰⁰", exponent, 0.5, 0.1)
    evidence.near("the same", exponent, 1.0, 0.02)
    evidence.near(
        "others at √(ln N): the bound is exceeded from N = 10¹⁵ times", _first(True), 2.6, 0.05
    )
    evidence.below("others at the best place: from N = 10¹⁵ times", _first(False), 2.4)
    evidence.counterexample = (
        f"d = 1, N = 10¹⁰⁰, one token at 0 and the others near √(ln N): {quotients[100]:.1f} > "
        f"{printed[100]:.1f}; the quotient is at least (ln N)/2 for each of the 11 N tried, "
        "10⁴ to 10³⁰⁰"
    )
    evidence.correction = (
        "the order in N is at least ln N, as far as N was tried: that of the constants it is "
        "compared with"
    )
    axis = [float(power) for power in powers]
    lines = {
        "local quotient of one family": (axis, [quotients[power] for power in powers]),
        "printed bound": (axis, [printed[power] for power in powers]),
    }
    evidence.draw(Curves("Tokens at two places, d = 1", "log₁₀ N", "W1 / W1", lines))


def _first(plain: bool) -> float:
    """The least N / 10¹⁵ from which on the bound is exceeded."""
    low, high = 1e15, 1e16
    for _ in range(40):
        middle = math.sqrt(low * high)
        quotient = _two_places(middle, math.log(middle) if plain else None)
        over = quotient > 2 * _printed_constant(1, middle)
        low, high = (low, middle) if over else (middle, high)
    return low / 1e15
