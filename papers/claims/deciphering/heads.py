"""The discrete form as attention, sections 6 to 8: masks, positions, BERT's and T5's heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import fenchel as fl
from fenchel import dual
from papers.claims.deciphering._problems import (
    F64,
    compare_by_hand,
    draw,
    halvings,
    normal,
    order,
    weights_of,
    worst,
)
from papers.claims.evidence import DIFFERENCES, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict

WORDS, WIDTH, HEAD, BUCKETS = 8, 4, 3, 32


@claim(
    "D-E16",
    "discrete u: h = Σ t_i softmax_i(α<t_i, z> + log u_i), Luong's attention for even u",
    Verdict.CONFIRMED,
)
def dot_product_attention(evidence: Evidence) -> None:
    even, preferred, front = [], [], []
    for generator in evidence.generators():
        problem = draw(generator)
        templates, u, z = problem.operands
        for alpha in (0.3, 1.0, 2.5):
            query, keys, logs = z[None, None], templates[None], u.log()[None, None]
            torchs = F.scaled_dot_product_attention(query, keys, keys, scale=alpha)
            even.append(dual.first_order(templates, None, z, alpha).mean - torchs[0, 0])
            torchs = F.scaled_dot_product_attention(query, keys, keys, attn_mask=logs, scale=alpha)
            preferred.append(dual.first_order(templates, u, z, alpha).mean - torchs[0, 0])
            front.append(fl.attention(query, keys, keys, base=u, scale=alpha) - torchs)
    evidence.below("|h - torch's attention, scale α, q = z, K = V = T|", worst(even))
    evidence.below("with u, and log u as torch's mask", worst(preferred))
    evidence.below("fenchel.attention with base u", worst(front))


# ---- positions and masks


def _positions(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Biases b, looked up by hand (query, word); which words are seen (query, word); the
    library's log-preferences."""
    module = fl.nn.PositionPreference(1, BUCKETS).double()
    with torch.no_grad():
        module.table.copy_(normal(generator, BUCKETS, 1))
        tokens = torch.zeros(1, WORDS, WIDTH, dtype=F64)
        logs = module(tokens, tokens)[0, 0]
    place = torch.arange(WORDS)
    ahead = place - place[:, None]  # of the word, from the query
    # Up to seven words apart each distance has its own bucket; the second half looks ahead.
    bias = module.table.detach()[ahead.abs() + (ahead > 0) * (BUCKETS // 2), 0]
    seen = torch.rand(WORDS, WORDS, generator=generator) < 0.6
    seen[place, place] = True
    return bias, seen, logs


@claim(
    "D-E17",
    "preference 0 on masked words, e^{b_{j-i}} / Z on the others",
    Verdict.CONFIRMED,
)
def positions_and_masks(evidence: Evidence) -> None:
    off, total, hidden = [], [], []
    for generator in evidence.generators():
        bias, seen, logs = _positions(generator)
        nothing = torch.zeros(WORDS, WORDS, dtype=F64)
        u = fl.solve(nothing, fl.Shannon(), base=logs.exp() * seen).weights
        raw = bias.exp() * seen
        off.append(u - raw / raw.sum(-1, keepdim=True))
        total.append(u.sum(-1) - 1)
        hidden.append(u[~seen])
    evidence.below("|preference - its formula|", worst(off))
    evidence.below("|its sum - 1|", worst(total))
    evidence.below("on masked words", worst(hidden), 0.0)
    alone = torch.full((3,), -math.inf, dtype=F64)
    evidence.near("with all masked the formula is 0/0: NaNs", alone.softmax(0).isnan().sum(), 3, 0)
    blind = fl.solve(torch.zeros(3, dtype=F64), fl.Shannon(), base=torch.zeros(3, dtype=F64))
    evidence.below("the library's weights then", blind.weights.abs(), 0.0)
    evidence.near("and its status, EMPTY", blind.status, int(fl.Status.EMPTY), 0)


@claim(
    "D-E18",
    "(16) with that preference, α = 1, is softmax(<t_i, z> + b_{j-i} + mask)",
    Verdict.CONFIRMED,
)
def bias_is_a_preference(evidence: Evidence) -> None:
    off, others, scaled = [], [], []
    for generator in evidence.generators():
        bias, seen, logs = _positions(generator)
        templates, z = normal(generator, WORDS, WIDTH), normal(generator, WORDS, WIDTH)
        mask = torch.zeros(WORDS, WORDS, dtype=F64).masked_fill(~seen, -math.inf)
        preference = logs.exp() * seen
        scores = z @ templates.mT
        estimate = dual.first_order(templates, preference, z, 1.0)
        weights = torch.softmax(scores + bias + mask, -1)
        off += [weights_of(estimate) - weights, estimate.mean - weights @ templates]
        estimate = dual.first_order(templates, preference, z, 2.5)
        others.append(estimate.mean - torch.softmax(2.5 * scores + bias + mask, -1) @ templates)
        wrong = torch.softmax(2.5 * (scores + bias) + mask, -1) @ templates
        scaled.append(estimate.mean - wrong)
    evidence.below("|weights and mean - those of the softmax|", worst(off))
    evidence.below("α = 2.5: softmax of α<t, z> + b", worst(others))
    evidence.above("α = 2.5: distance from softmax of α(<t, z> + b)", worst(scaled), 1e-2)


# ---- heads


@claim(
    "D-E19a",
    "BERT's head is V' Σ t_i softmax_i(<t_i, z>), t = x/√d', z = K'Q x_k, V' = √d' V",
    Verdict.CONFIRMED,
)
def bert_head(evidence: Evidence) -> None:
    off, front = [], []
    for generator in evidence.generators():
        x = normal(generator, WORDS, WIDTH)
        key, query, value = (normal(generator, HEAD, WIDTH) for _ in range(3))
        q, k, v = ((x @ matrix.mT)[None] for matrix in (query, key, value))
        head = F.scaled_dot_product_attention(q, k, v)[0]
        z = x @ query.mT @ key
        estimate = dual.first_order(x / math.sqrt(HEAD), None, z, 1.0)
        off.append(estimate.mean @ (math.sqrt(HEAD) * value).mT - head)
        front.append(fl.attention(q, k, v)[0] - head)
    evidence.below("|V' h - the head|, by torch", worst(off))
    evidence.below("|fenchel.attention - the head|", worst(front))


@claim(
    "D-E19b",
    "T5's head is Σ V x_i u_i e^{<K x_i, Q y_k>/√d'} over the sum without u",
    Verdict.CORRECTED,
)
def t5_head(evidence: Evidence) -> None:
    sums, mended, layers, crossed = [], [], [], []
    for generator in evidence.generators():
        x, y = normal(generator, WORDS, WIDTH), normal(generator, WORDS, WIDTH)
        bias = _positions(generator)[0]
        layer = _t5_layer(generator, bias)
        query, key, value, out = (part.weight.detach() for part in _projections(layer))
        scores = (x @ query.mT) @ (x @ key.mT).mT
        u, raised = bias.softmax(-1), (scores / math.sqrt(HEAD)).exp()
        sums.append((u * raised / raised.sum(-1, keepdim=True)).sum(-1))
        templates, z = x / math.sqrt(HEAD), x @ query.mT @ key
        whole = u * raised / (u * raised).sum(-1, keepdim=True)
        mended.append(dual.first_order(templates, u, z, 1.0).mean - whole @ templates)
        with torch.no_grad():
            attended = torch.softmax(scores + bias, -1) @ (x @ value.mT) @ out.mT
            layers.append(layer(x[None], x[None])[0] - attended)
            layer.preference = fl.nn.UniformPreference()
            scores = (y @ query.mT) @ (x @ key.mT).mT
            attended = torch.softmax(scores, -1) @ (x @ value.mT) @ out.mT
            crossed.append(layer(y[None], x[None])[0] - attended)
    away = (torch.stack(sums) - 1).abs().max()
    evidence.printed_below("|sum of the printed weights - 1|", away, DIFFERENCES)
    evidence.correction = (
        "u_j is missing in the denominator; T5 itself has no 1/√d', and no bias, so an even u, in "
        "its cross-attention"
    )
    evidence.below("with u_j there: |(16) - its weights' mean|", worst(mended))
    evidence.below("|layer - softmax(q k' + bias)|, self-attention of T5", worst(layers))
    evidence.below("|layer - softmax(q k')|, its cross-attention", worst(crossed))
    low, high = float(torch.stack(sums).min()), float(torch.stack(sums).max())
    evidence.note(f"the printed weights sum to {low:.2f} ... {high:.2f}")
    evidence.note("what T5 has is read from its code, against which `from_t5` is tested")


def _projections(layer: fl.nn.PreferenceAttention) -> tuple[torch.nn.Linear, ...]:
    return layer.evidence_proj, layer.template_proj, layer.value_proj, layer.out_proj


def _t5_layer(generator: torch.Generator, bias: Tensor) -> fl.nn.PreferenceAttention:
    """One head, with the weights drawn here and that bias (query, word)."""
    with torch.random.fork_rng():
        layer = fl.nn.PreferenceAttention(
            WIDTH,
            1,
            preference=lambda query, templates: bias[None, None],
            form=fl.nn.HeadForm(head_dim=HEAD, scale=1.0, bias=False),
        ).to(F64)
    with torch.no_grad():
        for part in _projections(layer):
            part.weight.copy_(normal(generator, *part.weight.shape))
    return layer


# ---- figures


@claim(
    "D-Fig1",
    "block g is (16) of preference u and evidence z, and differentiable in T, z and log u",
    Verdict.CONFIRMED,
)
def the_block(evidence: Evidence) -> None:
    slopes, values = [], []
    for generator in evidence.generators():
        problem = draw(generator, n=6)
        direction = normal(generator, 3)
        at = [problem.templates.flatten(), problem.evidence, problem.preference.log()]
        for solve in (dual.first_order, dual.estimate):
            output = partial(_output, solve, direction)
            slopes.append(_slope(output, torch.cat(at)) - _differences(output, torch.cat(at)))
        mean = problem.weights(1.5 * problem.evidence) @ problem.templates
        values.append(_output(dual.first_order, direction, torch.cat(at)) - mean @ direction)
    evidence.below("|autograd - central differences|, (16) and exact", worst(slopes), DIFFERENCES)
    evidence.below("|output - (16)|", worst(values))


def _output(solve: Callable[..., dual.Estimate], direction: Tensor, x: Tensor) -> Tensor:
    """A component of h, from 6 templates in R^3, evidence and log-preference in a row (..., 27)."""
    templates, z, logs = x.split((18, 3, 6), -1)
    return solve(templates.unflatten(-1, (6, 3)), logs.exp(), z, 1.5).mean @ direction


def _slope(output: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    return torch.autograd.grad(output(leaf), leaf, materialize_grads=True)[0]


def _differences(output: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    step = 1e-6 * torch.eye(len(at), dtype=F64)
    return (output(at + step) - output(at - step)) / 2e-6


@claim(
    "D-Fig2",
    "translation, captioning and filling-in share block g with their own u and z",
    Verdict.NOT_CHECKABLE,
)
def three_architectures(evidence: Evidence) -> None:
    evidence.note("a drawing of three architectures: nothing in it is computed")
    off, total, hidden = [], [], []
    for generator in evidence.generators():
        templates, z = normal(generator, WORDS, WIDTH), normal(generator, WIDTH)
        bias, seen, _ = _positions(generator)
        even = torch.ones(WORDS, dtype=F64)
        settings = {
            "translation": bias[2].exp(),  # by position
            "captioning": even,  # all parts of the image alike
            "filling in": bias[2].exp() * seen[2],  # masked words have none
        }
        for preference in settings.values():
            estimate = dual.first_order(templates, preference, z, 1.0)
            raised = preference * (templates @ z).exp()
            off.append(estimate.mean - (raised / raised.sum()) @ templates)
            weights = weights_of(estimate)
            total.append(weights.sum() - 1)
            hidden.append(torch.where(preference == 0, weights, 0.0))
    evidence.below("|block - (16)| for the three preferences", worst(off))
    evidence.below("|sum of weights - 1|", worst(total))
    evidence.below("weight where the preference is zero", worst(hidden), 0.0)


@claim(
    "D-Fig4",
    "|λ* - α z| / |λ*| is small in the heads of BERT and T5",
    Verdict.NOT_CHECKABLE,
)
def deviations(evidence: Evidence) -> None:
    evidence.note("needs the pretrained weights; what is checked is what the figure can say")
    templates, z = _random_heads(evidence)
    sizes = halvings(-2, 7)
    means, moved, apart = [], [], []
    layer = weights_of(dual.first_order(templates, None, z, 1.0))
    for size in sizes.tolist():
        operands = (size * templates, None, z / size, 1.0)
        rough, exact = dual.first_order(*operands), dual.estimate(*operands)
        means.append(rough.compare(exact).multiplier.mean((0, 2)))  # (head,)
        moved.append(weights_of(rough) - layer)
        shift = (exact.mean - exact.prior_mean).norm(dim=-1)
        apart.append((exact.multiplier - z / size).norm(dim=-1) - shift)
    by_head = torch.stack(means)  # (size, head)
    overall = by_head.mean(1)
    evidence.near("t → c t, z → z/c: order in c of the deviation", order(sizes, overall), 2, 0.05)
    evidence.below("change of the layer's weights", worst(moved))
    evidence.above("deviation at c = 4 over that at c = 1/8", overall[0] / overall[5], 50.0)
    evidence.below("| |λ* - α z| - α |ĥ - μ| |: what the figure measures", worst(apart), 1e-9)
    compare_by_hand(evidence)
    listed = ", ".join(f"{value:.3f}" for value in by_head[2].tolist())
    evidence.note(f"per-head means of random heads at c = 1: {listed}")
    _measured(evidence)
    lines = {f"head {h}": (sizes.tolist(), by_head[:, h].tolist()) for h in range(4)}
    title = "Deviation of one layer in several parametrisations"
    evidence.draw(Curves(title, "c", "|λ* - α z| / |λ*|", lines, "xy"))


def _random_heads(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Templates x/√d', (seed, 1, 1, word, width), and evidence K'Q x_k, (seed, 4, query, width)."""
    templates, z = [], []
    for generator in evidence.generators():
        x = normal(generator, WORDS, WIDTH)
        query, key = (normal(generator, 4, HEAD, WIDTH) / math.sqrt(WIDTH) for _ in range(2))
        templates.append(x[None, None] / math.sqrt(HEAD))
        z.append(x @ query.mT @ key)
    return torch.stack(templates), torch.stack(z)


def _measured(evidence: Evidence) -> None:
    evidence.note(
        "`fenchel audit --measures deviation` measures pretrained heads, with the printed "
        "templates x/√d' (columns token_deviation_*); papers/results/deviations.json holds what "
        "was found for MiniLM and flan-t5-small"
    )
    evidence.note(
        "it stores |h - ĥ| / |ĥ - μ| beside the figure's ratio: a small deviation of λ says that z "
        "is long beside the shift, not that the outputs agree"
    )
