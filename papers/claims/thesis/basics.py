"""Chapter 2 of the thesis: losses, alignment scores, heads, and sparsemax as a projection."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Generator, Tensor

import fenchel as fl
from fenchel import measures, nn, scores
from papers.claims.evidence import Evidence
from papers.claims.ledger import claim
from papers.claims.thesis._numbers import distributions, least, normal, worst
from papers.claims.verdicts import Verdict


@claim(
    "F-E2.2/2.3/2.6",
    "empirical risk = mean loss; cross-entropy -Σ_c y_c log f_c; ∇ of the mean = mean of the ∇",
    Verdict.DEFINITION,
)
def empirical_risk(evidence: Evidence) -> None:
    value, gradient = worst(evidence, _risk)
    evidence.below("mean Fenchel–Young loss of Shannon against -mean log softmax", value)
    evidence.below("its gradient in W against the mean of (f(x_i) - y_i) x_i'", gradient)
    evidence.note("(2.3) sums over examples and classes with one index; the sum is over classes")


def _risk(generator: Generator) -> tuple[Tensor, Tensor]:
    inputs, labels = normal(generator, 6, 3), torch.randint(0, 4, (6,), generator=generator)
    weight = normal(generator, 4, 3).requires_grad_()
    risk = fl.fenchel_young_loss(inputs @ weight.mT, labels, fl.Shannon())
    (gradient,) = torch.autograd.grad(risk, weight)
    raised = (inputs @ weight.detach().mT).exp()
    predicted = raised / raised.sum(-1, keepdim=True)
    expected = -predicted[torch.arange(6), labels].log().mean()
    excess = predicted - torch.eye(4, dtype=torch.float64)[labels]
    each = [torch.outer(e, x) for e, x in zip(excess, inputs, strict=True)]
    return risk - expected, gradient - torch.stack(each).mean(0)


@claim(
    "F-E2.4/2.5",
    "linear model x'w + b; one hidden layer φ(x; θ)'w, which fits what no linear model can",
    Verdict.DEFINITION,
)
def linear_and_hidden(evidence: Evidence) -> None:
    (error,) = worst(evidence, _affine)
    evidence.below("Affine(w', b)(x) against Σ_i x_i w_i + b", error)
    corners = torch.tensor(list(product((0.0, 1.0), repeat=2)), dtype=torch.float64)
    differ = (corners[:, 0] != corners[:, 1]).double()
    ones = torch.ones(4, 1, dtype=torch.float64)
    design = torch.cat([corners, ones], -1)
    best = design @ torch.linalg.lstsq(design, differ).solution
    evidence.near(
        "mean square error of the best linear model of xor", _square(best, differ), 0.25, 1e-10
    )
    hidden = measures.Affine(torch.ones(2, 2, dtype=torch.float64), -corners[1])
    outer = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    network = measures.FeedForward(lambda x: hidden(x).clamp_min(0) @ outer.mT)
    fitted = network.at(corners).mean.squeeze(-1)
    evidence.below("the same of two hidden units", _square(fitted, differ))


def _affine(generator: Generator) -> tuple[Tensor]:
    x, w, b = normal(generator, 5, 3), normal(generator, 3), normal(generator, 1)
    by_hand = [sum(float(a) * float(c) for a, c in zip(row, w, strict=True)) for row in x]
    image = measures.Affine(w.unsqueeze(0), b)(x).squeeze(-1)
    return (image - torch.tensor(by_hand, dtype=torch.float64) - b,)


def _square(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().mean()


@claim(
    "F-E2.7..2.12",
    "p(y) = Π_t p(y_t | y_<t, c_t); context c_i = Σ_j α_ij h_j with α_i = softmax(e_i)",
    Verdict.DEFINITION,
)
def encoder_decoder(evidence: Evidence) -> None:
    rows, context, chain = worst(evidence, _alignment)
    evidence.below("rows of the alignment weights: distance of their sum from 1", rows)
    evidence.below("contexts against Σ_j exp(e_ij) h_j / Σ_k exp(e_ik)", context)
    evidence.below("Σ_y p(y) - 1 over all sequences of length 3", chain)
    evidence.note("(2.8) mixes t and t': a symbol is given those before it, y_1 .. y_(t-1)")


def _alignment(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    states, hidden = normal(generator, 4, 3), normal(generator, 6, 3)
    of_state, of_hidden = normal(generator, 3, 5), normal(generator, 3, 5)
    direction = normal(generator, 5)
    aligned = scores.additive(states @ of_state, hidden @ of_hidden, direction)
    weights = fl.solve(aligned, fl.Shannon()).weights
    inner = torch.stack([(s @ of_state + hidden @ of_hidden).tanh() @ direction for s in states])
    raised = inner.exp()
    expected = raised @ hidden / raised.sum(-1, keepdim=True)
    # the next symbol's scores, from its context and what was said before
    said = normal(generator, 3, 3)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in product(range(3), repeat=3):
        probability = torch.ones((), dtype=torch.float64)
        for t, symbol in enumerate(sequence):
            before = said[list(sequence[:t])].sum(0)
            probability = probability * fl.softmax((weights @ hidden)[t] + before)[symbol]
        total = total + probability
    return weights.sum(-1) - 1, weights @ hidden - expected, total - 1


@claim("F-E2.13", "Attention(Q, K, V) = softmax(Q K' / √d_k) V", Verdict.CONFIRMED)
def scaled_dot_product(evidence: Evidence) -> None:
    torch_too, formula, single = worst(evidence, _attended)
    evidence.below("attention against torch's scaled_dot_product_attention", torch_too)
    evidence.below("attention against exp(Q K' / √d) V over its row sums", formula)
    evidence.below("with K = V = h and Q = s: the context (2.11) of the scores <s, h> / √d", single)


def _attended(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = normal(generator, 5, 4), normal(generator, 7, 4), normal(generator, 7, 3)
    output = fl.attention(query[None], key[None], value[None]).squeeze(0)
    reference = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None]
    )
    raised = (query @ key.mT / 2).exp()  # √4
    context = [sum(w * h for w, h in zip(row / row.sum(), key, strict=True)) for row in raised]
    alike = fl.attention(query[None], key[None], key[None]).squeeze(0)
    by_hand = raised @ value / raised.sum(-1, keepdim=True)
    return output - reference.squeeze(0), output - by_hand, alike - torch.stack(context)


@claim(
    "F-E2.14/2.15",
    "MultiHead(Q, K, V) = Concat(head_1 .. head_h) W^O, head_i attention of projections",
    Verdict.CONFIRMED,
)
def multi_head(evidence: Evidence) -> None:
    by_hand, torch_too, kernel = worst(evidence, _heads)
    evidence.below("MultiheadAttention against the concatenation of its heads", by_hand)
    evidence.below("MultiheadAttention against torch.nn.MultiheadAttention", torch_too)
    evidence.below("as a projected mixture of kernels (M-P12), self-attention", kernel)


def _heads(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    width, count, size = 6, 3, 2
    with torch.random.fork_rng():  # the modules start from torch's own generator
        layer = nn.MultiheadAttention(width, count, batch_first=True, dtype=torch.float64)
        reference = torch.nn.MultiheadAttention(width, count, batch_first=True, dtype=torch.float64)
    state = {name: normal(generator, *x.shape) for name, x in layer.state_dict().items()}
    layer.load_state_dict(state)
    reference.load_state_dict(state)
    query, key, value = (normal(generator, tokens, width) for tokens in (4, 7, 7))
    matrices, offsets = state["in_proj_weight"].chunk(3), state["in_proj_bias"].chunk(3)
    heads = []
    for h in range(count):
        rows = slice(h * size, (h + 1) * size)
        q, k, v = (
            x @ matrix[rows].mT + offset[rows]
            for x, matrix, offset in zip((query, key, value), matrices, offsets, strict=True)
        )
        heads.append(torch.softmax(q @ k.mT / math.sqrt(size), -1) @ v)
    expected = torch.cat(heads, -1) @ state["out_proj.weight"].mT + state["out_proj.bias"]
    output = layer(query, key, value)[0]
    mu = measures.Empirical(query)
    moved = (mu @ measures.MultiHeadKernel.from_module(reference.eval())(mu)).points
    of_itself = layer(query, query, query)[0]
    return output - expected, output - reference(query, key, value)[0], moved - of_itself


@claim(
    "F-Tab2.1",
    "scores: additive v'tanh(W s + U h), dot h's, general h'W s, scaled h's / √d",
    Verdict.CONFIRMED,
)
def alignment_models(evidence: Evidence) -> None:
    general, scaled, additive, dot, bilinear = worst(evidence, _aligned)
    evidence.below("general with W = I against dot", general)
    evidence.below("scaled against dot / √d", scaled)
    evidence.below("additive against Σ_k v_k tanh(W s + U h)_k, pair by pair", additive)
    evidence.below("dot against Σ_k h_k s_k, pair by pair", dot)
    evidence.below("general against Σ_kl h_k W_kl s_l, pair by pair", bilinear)
    evidence.note("v_a is called a matrix; a score is one number, so it is a vector")


def _aligned(generator: Generator) -> tuple[Tensor, ...]:
    states, hidden, form = normal(generator, 4, 3), normal(generator, 6, 3), normal(generator, 3, 3)
    of_state, of_hidden = normal(generator, 5, 3), normal(generator, 5, 3)
    direction = normal(generator, 5)
    eye = torch.eye(3, dtype=torch.float64)
    dot = scores.scaled_dot(states, hidden, scale=1.0)
    added = scores.additive(states @ of_state.mT, hidden @ of_hidden.mT, direction)
    general = scores.bilinear(states, hidden, form.mT)  # h'W s = s'W'h
    pairs = [[(s, h) for h in hidden] for s in states]

    def each(score: object) -> Tensor:
        assert callable(score)
        return torch.stack([torch.stack([score(s, h) for s, h in row]) for row in pairs])

    return (
        scores.bilinear(states, hidden, eye) - dot,
        scores.scaled_dot(states, hidden) - dot / math.sqrt(3),
        added - each(lambda s, h: (direction * (of_state @ s + of_hidden @ h).tanh()).sum()),
        dot - each(lambda s, h: (s * h).sum()),
        general - each(lambda s, h: (torch.outer(h, s) * form).sum()),
    )


@claim("F-E2.16", "sparsemax(z) = argmin over the simplex of |p - z|²", Verdict.CONFIRMED)
def sparsemax_projects(evidence: Evidence) -> None:
    count = evidence.trials(1_000, 20_000)

    def excess(generator: Generator) -> Tensor:
        z = 1.5 * normal(generator, 6)
        p = fl.sparsemax(z)
        others = distributions(generator, count, 6)
        farther = (others - z).square().sum(-1) - (p - z).square().sum()
        return farther - (others - p).square().sum(-1)  # >= 0 for a projection on a convex set

    (by_sorting,) = worst(evidence, _projection)
    evidence.below("sparsemax against the projection by sorting", by_sorting)
    evidence.above(
        f"|q - z|² - |p - z|² - |q - p|², least of {count} points q a seed",
        least(evidence, excess),
        -1e-12,
    )


def _projection(generator: Generator) -> tuple[Tensor]:
    """The largest k with 1 + k z_(k) > z_(1) + .. + z_(k) gives the threshold."""
    z = 1.5 * normal(generator, 8)
    ordered = sorted(z.tolist(), reverse=True)
    threshold, total = 0.0, 0.0
    for k, each in enumerate(ordered, 1):
        total += each
        if 1 + k * each > total:
            threshold = (total - 1) / k
    return (fl.sparsemax(z) - (z - threshold).clamp_min(0),)
