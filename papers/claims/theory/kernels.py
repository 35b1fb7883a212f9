"""Sections 2 and 3 and the first appendix: attention, and whole layers, as Markov kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import fenchel as fl
from fenchel import measures
from fenchel.measures.measure import Function
from papers.claims.evidence import SLACK, Curves, Evidence
from papers.claims.ledger import claim
from papers.claims.theory._draws import (
    F64,
    atoms,
    attended,
    largest,
    measure,
    normal,
    shares,
    smallest,
    softmax,
)
from papers.claims.verdicts import Verdict


@claim(
    "M-D1",
    "Attention(q, K, V) = Σ_i softmax_i(a(q, k_i)) v_i, for any similarity a",
    Verdict.CONFIRMED,
)
def attention(evidence: Evidence) -> None:
    scaled, summed, additive, of_itself = [], [], [], []
    for generator in evidence.generators():
        q, k, v = normal(generator, 1, 4, 3), normal(generator, 1, 6, 3), normal(generator, 1, 6, 2)
        output = fl.attention(q, k, v, fl.Shannon())
        scaled.append(output - nn.functional.scaled_dot_product_attention(q, k, v))
        mass = (q @ k.mT / math.sqrt(3)).exp()
        summed.append(
            output
            - sum(mass[..., i, None] * v[..., i : i + 1, :] for i in range(6))
            / mass.sum(-1, keepdim=True)
        )
        direction = normal(generator, 3)
        weights = fl.solve(fl.scores.additive(q, k, direction), fl.Shannon()).weights
        scores = torch.stack([(q + k[:, i : i + 1]).tanh() @ direction for i in range(6)], -1)
        additive.append(weights @ v - attended(scores, v))
        of_itself.append(fl.attention(q, q, q) - attended(q @ q.mT / math.sqrt(3), q))
    evidence.below("library − torch, scaled dot products", largest(scaled))
    evidence.below("library − the sum over keys", largest(summed))
    evidence.below("an additive similarity", largest(additive))
    evidence.below("self-attention, Q = K = V", largest(of_itself))
    evidence.note(
        "as printed a lives on Q × V and the second softmax of (1) has the index j; Q × K and i"
    )


@claim("M-D2", "kernels compose: (μA)B = μ(AB) and μ(Af) = (μA)f", Verdict.CONFIRMED)
def composition(evidence: Evidence) -> None:
    measured, applied, composed = [], [], []
    for generator in evidence.generators():
        states, row = normal(generator, 4, 2), shares(generator, 4)
        one, two = shares(generator, 4, 4), shares(generator, 4, 4)
        values = normal(generator, 4)
        mu = measures.Empirical(states, row)
        a, b = (measures.Lookup.stochastic(states, matrix) for matrix in (one, two))

        def function(x: Tensor, states: Tensor = states, values: Tensor = values) -> Tensor:
            return (x.unsqueeze(-2) == states).all(-1).to(F64) @ values

        product = row @ (one @ two)
        measured += [((mu @ a) @ b).weights - product, (mu @ (a @ b)).weights - product]
        number_of = row @ one @ values
        applied += [mu.expectation(a @ function) - number_of]
        applied += [(mu @ a).expectation(function) - number_of]
        composed.append(atoms((a @ b).at(states)).weights - one @ two)
    evidence.below("(μA)B and μ(AB) − products of matrices", largest(measured))
    evidence.below("μ(Af) and (μA)f − products of matrices", largest(applied))
    evidence.below("AB − the product of two stochastic matrices", largest(composed))


@claim("M-D3", "Ψ_g(ν) = gν / ν(g): a semigroup, Ψ_g Ψ_h = Ψ_gh", Verdict.CONFIRMED)
def boltzmann_gibbs(evidence: Evidence) -> None:
    semigroup, weights, averages = [], [], []
    for generator in evidence.generators():
        nu = measure(generator, 7, 2)
        g, h, values = (normal(generator, 7) for _ in range(3))
        inner = measures.boltzmann_gibbs(h, nu)
        once = measures.boltzmann_gibbs(g, inner)
        twice = measures.boltzmann_gibbs(g + h, nu)
        semigroup.append(once.weights - twice.weights)
        mass = nu.weights * g.exp()
        tilted = measures.boltzmann_gibbs(g, nu)
        weights.append(tilted.weights - mass / mass.sum())
        mean = (nu.weights * g.exp() * values).sum() / mass.sum()
        averages.append(tilted.expectation(_given(values)) - mean)
    evidence.below("Ψ_g Ψ_h ν − Ψ_gh ν", largest(semigroup))
    evidence.below("weights − ν g / ν(g)", largest(weights))
    evidence.below("Ψ_g ν(f) − ν(g f) / ν(g)", largest(averages))


@claim(
    "M-D4",
    "δ_q Ψ_G(m(K)) has softmax weights on the keys; m(Q) Ψ_G(m(K)) averages its rows",
    Verdict.CONFIRMED,
)
def softmatch(evidence: Evidence) -> None:
    rows, averaged, weighted = [], [], []
    for generator in evidence.generators():
        q, k, prior = normal(generator, 4, 3), normal(generator, 6, 3), shares(generator, 6)
        kernel = measures.Softmatch(measures.Dot(1.5))
        matrix = softmax(q @ k.mT / 1.5)
        matched = kernel(measures.Empirical(k))
        rows.append(atoms(matched.at(q)).weights - matrix)
        averaged.append((measures.Empirical(q) @ matched).weights - matrix.mean(0))
        uneven = atoms(kernel(measures.Empirical(k, prior)).at(q)).weights
        weighted.append(uneven - softmax(q @ k.mT / 1.5 + prior.log()))
    evidence.below("rows − softmax", largest(rows))
    evidence.below("m(Q) Ψ_G(m(K)) − the mean of the rows", largest(averaged))
    evidence.below("keys of uneven weight ν − softmax(a + log ν)", largest(weighted))


@claim(
    "M-D5",
    "lookup kernel: L(k, ·) is the average of δ at the values v_i with k_i = k",
    Verdict.CORRECTED,
)
def lookup(evidence: Evidence) -> None:
    printed, off, once, masses, means = [], [], [], [], []
    for generator in evidence.generators():
        q, k, v = normal(generator, 5, 2), normal(generator, 6, 2), normal(generator, 6, 3)
        k[3] = k[0]
        weights = softmax(q @ k.mT)
        same = (k.unsqueeze(1) == k).all(-1).to(F64)  # 1{k_j = k_i}
        printed.append((weights @ same).sum(-1))
        off.append((q.unsqueeze(1) == k).all(-1).sum(-1))
        once.append((k[[0, 1]].unsqueeze(1) == k).all(-1).sum(-1) - torch.tensor([2, 1]))
        q = torch.cat([q, k[:2]])  # queries that are keys, too
        table = measures.Lookup.table(k, v)
        looked = atoms((measures.Softmatch(measures.Dot())(measures.Empirical(k)) @ table).at(q))
        masses.append(looked.weights.sum(-1) - 1)
        share = same / same.sum(-1, keepdim=True)
        means.append(table.at(k).mean - share @ v)
    evidence.printed_below(
        "as printed, largest mass of δ_q Ψ L where a key is there twice",
        largest(printed),
        1 + SLACK,
    )
    evidence.printed_near("as printed, mass off the keys", largest(off), 1.0, SLACK)
    evidence.below("as printed, mass at a key there twice − 2, once − 1", largest(once), 0)
    evidence.below("divided by the multiplicity: mass of δ_q Ψ L − 1", largest(masses))
    evidence.below("the mean at a key − the average of its values", largest(means))
    evidence.correction = (
        "divide by the number of i with k_i = k; it is a kernel on the keys, not on all queries"
    )


@claim(
    "M-D6/7/Eq2",
    "moment projection: Π(μ) is the member of the family with μ's moments",
    Verdict.CONFIRMED,
)
def moment_projection(evidence: Evidence) -> None:
    kept, again, second, lines = [], [], [], []
    grid = torch.linspace(-6, 6, 41, dtype=F64).unsqueeze(-1)

    def features(x: Tensor) -> Tensor:
        return torch.cat([x, x.square()], -1)

    onto = measures.MomentProjection(features, measures.GridFamily(grid))
    dirac, normals = (
        measures.MomentProjection(),
        measures.MomentProjection(family=measures.Gaussians()),
    )
    for generator in evidence.generators():
        mu = measure(generator, 6, 3)
        mean = (mu.weights.unsqueeze(-1) * mu.points).sum(0)
        apart = mu.points - mean
        once = atoms(dirac(mu))
        kept.append(once.points.squeeze(0) - mean)
        again.append(atoms(dirac(once)).points - once.points)
        spread = torch.einsum("i,ia,ib->ab", mu.weights, apart, apart)
        second += [normals(mu).mean - mean, normals(mu).covariance - spread]
        lines.append(measure(generator, 6, 1))
    line = measures.Empirical(
        torch.stack([x.points for x in lines]), torch.stack([x.weights for x in lines])
    )
    moments = (line.weights.unsqueeze(-1) * features(line.points)).sum(-2)
    family = onto(line).expectation(features) - moments
    evidence.below("Π(μ) = δ at − the mean of μ", largest(kept))
    evidence.below("Π Π μ − Π μ", largest(again))
    evidence.below("onto Gaussians: mean and covariance", largest(second))
    evidence.below("onto an exponential family on a grid: E x, E x²", family.abs())


@claim("M-D8/P9", "the kernel Π[Ψ_G(x,·)(m(K)) L] is attention", Verdict.CONFIRMED)
def attention_kernel(evidence: Evidence) -> None:
    distinct: list[Tensor] = []
    repeated: list[Tensor] = []
    printed = []
    for generator in evidence.generators():
        q, k, v = normal(generator, 4, 3), normal(generator, 6, 3), normal(generator, 6, 2)
        for keys, errors in ((k, distinct), (k[[0, 1, 2, 0, 4, 0]], repeated)):
            kernel = measures.AttentionKernel(measures.ScaledDot(), measures.Lookup.table(keys, v))
            output = measures.Empirical(q) @ kernel(measures.Empirical(keys))
            errors.append(output.points - attended(q @ keys.mT / math.sqrt(3), v))
        same = (keys.unsqueeze(1) == keys).all(-1).to(F64)
        weights = softmax(q @ keys.mT / math.sqrt(3))
        printed.append((weights @ same @ v - weights @ v).abs().amax())
    evidence.below("kernel − attention, distinct keys", largest(distinct))
    evidence.below(
        "kernel − attention, a key there three times, averaged lookup", largest(repeated)
    )
    evidence.above("the same with the sum of M-D5: off by at least", smallest(printed), 1e-3)
    evidence.note(
        "as printed for distinct keys only; the averaged lookup of M-D5 removes the restriction"
    )


@claim(
    "M-FLOW", "layers are a flow of measures: δ_{x_i} goes to δ_{x_i} A_{m(X)}", Verdict.CONFIRMED
)
def flow(evidence: Evidence) -> None:
    tokens, joint, order = [], [], []
    for generator in evidence.generators():
        values = normal(generator, 3, 3, 3) / 2
        layers = [measures.AttentionKernel(measures.ScaledDot(), value) for value in values]
        for _ in range(4):
            x = normal(generator, 5, 3)
            measured = measures.flow(measures.Empirical(x), layers)
            for value, layer, mu in zip(values, layers, measured[1:], strict=True):
                before = measures.Empirical(x)
                alone = [atoms(measures.Dirac(point) @ layer(before)).points for point in x]
                x = attended(x @ x.mT / math.sqrt(3), x @ value.mT)
                tokens.append(torch.cat(alone) - x)
                joint.append(mu.points - x)
            turn = measures.flow(measures.Empirical(before.points.flip(0)), layers[-1:])[-1]
            order.append(turn.points.flip(0) - x)
    evidence.below(
        "δ_{x_i} A_{m(X)}, token by token − the matrix form, 20 inputs, 3 layers", largest(tokens)
    )
    evidence.below("m(X) A_{m(X)}, all tokens at once", largest(joint))
    evidence.below("the order of the tokens does not matter", largest(order))
    start = measures.Empirical(normal(torch.Generator().manual_seed(evidence.seed), 6, 2))
    layer = measures.AttentionKernel(measures.GaussianPotential())
    paths = torch.stack([mu.points for mu in measures.flow(start, [layer] * 8)], -1)
    lines = {f"token {i + 1}": (path[0].tolist(), path[1].tolist()) for i, path in enumerate(paths)}
    evidence.draw(Curves("Six tokens through eight layers", "first coordinate", "second", lines))


@claim("M-R11", "if G is a likelihood, Ψ_G is Bayes' rule and Π gives E[V | q]", Verdict.CONFIRMED)
def bayes(evidence: Evidence) -> None:
    rule, conjugate, values = [], [], []
    grid = torch.linspace(-12, 12, 1201, dtype=F64)
    for generator in evidence.generators():
        noise, q = 0.5 + float(torch.rand((), generator=generator)), normal(generator, 3)
        prior = (-0.5 * ((grid - 0.4) / 1.3).square()).exp()
        nu = measures.Empirical.of_masses(grid.unsqueeze(-1), prior)
        likelihood = measures.GaussianPotential(2 * noise**2)
        image = atoms(measures.Softmatch(likelihood)(nu).at(q.unsqueeze(-1)))
        joint = (-0.5 * ((q.unsqueeze(-1) - grid) / noise).square()).exp() * prior
        posterior = joint / joint.sum(-1, keepdim=True)
        rule.append(image.weights - posterior)
        precision = 1 / noise**2 + 1 / 1.3**2
        conjugate.append(image.mean[:, 0] - (q / noise**2 + 0.4 / 1.3**2) / precision)
        kernel = measures.AttentionKernel(likelihood, torch.tanh)(nu)
        values.append(kernel.at(q.unsqueeze(-1)).mean[:, 0] - posterior @ grid.tanh())
    evidence.below("Ψ_G(ν) − prior times likelihood, normalised", largest(rule))
    evidence.below("its mean − that of the conjugate normal posterior", largest(conjugate))
    evidence.below("the attention kernel − E[V | q]", largest(values))


@claim(
    "M-S3.1", "on the index set {1..N} the kernels are matrices: softmax(Q Kᵀ) V", Verdict.CONFIRMED
)
def on_indices(evidence: Evidence) -> None:
    matrices, outputs = [], []
    places = torch.arange(6, dtype=F64).unsqueeze(-1)
    for generator in evidence.generators():
        q, k, v = normal(generator, 6, 3), normal(generator, 6, 3), normal(generator, 6, 3)

        def similarity(i: Tensor, j: Tensor, q: Tensor = q, k: Tensor = k) -> Tensor:
            return _row_of(q)(i) @ _row_of(k)(j).mT

        same = measures.Lookup.stochastic(places, torch.eye(6, dtype=F64))
        matched = measures.Softmatch(measures.Potential(similarity))(measures.Empirical(places))
        kernel = matched @ same
        matrices.append(atoms(kernel.at(places)).weights - (q @ k.mT).softmax(-1))
        output = (kernel @ _row_of(v))(places)
        whole = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0)
        outputs.append(output - whole[0])
    evidence.below("Π[Ψ_G(m(K)) L] − softmax(Q Kᵀ) V by torch", largest(outputs))
    evidence.below("Ψ_G(m(K)) L − softmax(Q Kᵀ)", largest(matrices))


def _given(values: Tensor) -> Function:
    """The function with these values, whatever the points."""
    return lambda points: values


def _row_of(table: Tensor) -> Function:
    """Of places 0, 1, ... on the line the rows of the table."""
    return lambda places: table[places[..., 0].long()]


@claim(
    "M-P12/Eq3/Eq5",
    "several heads are Π of the mixture (1/H) Σ_h A^h O^h, O^h scaled by H",
    Verdict.CORRECTED,
)
def heads(evidence: Evidence) -> None:
    kernel, torchs, rooted, transposed = [], [], [], []
    for generator in evidence.generators():
        x, shape = normal(generator, 5, 6), (3, 2, 6)  # three heads, from R^6 to R^2
        queries, keys, values = (normal(generator, *shape) / 2 for _ in range(3))
        out = normal(generator, 3, 6, 2) / 2
        parts = [
            measures.AttentionKernel(measures.ScaledDot(None, q, k), v)
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        mu = measures.Empirical(x)
        output = (mu @ measures.MultiHeadKernel(parts, list(out))(mu)).points
        asked, known, given = (x @ w.mT for w in (queries, keys, values))
        joined = [
            torch.cat(list(attended(asked @ known.mT / math.sqrt(size), given)), -1)
            @ torch.cat(list(out), -1).mT
            for size in (2, 6)
        ]
        kernel.append(output - joined[0])
        rooted.append((joined[1] - joined[0]).abs().amax())
        torchs.append(_of_module(generator, x))
        square = normal(generator, 6, 6)
        transposed.append((softmax(x @ square @ x.mT) - softmax(x @ square.mT @ x.mT)).abs().amax())
    evidence.below("kernel − concatenation times W^O, three heads", largest(kernel))
    evidence.below("kernel − torch.nn.MultiheadAttention", largest(torchs))
    evidence.printed_below("with √d for the temperature: off by", smallest(rooted))
    evidence.printed_below(
        "with (W^Q)ᵀ x, where d' = d lets it be computed: off by", smallest(transposed)
    )
    _layer(evidence)
    evidence.correction = (
        "scores ⟨W^Q x, W^K y⟩ / √d'; as printed (W^Q)ᵀ x has no meaning unless d' = d, and √d is "
        "not the temperature of the layer; residuals and layer norms are left out"
    )


def _of_module(generator: torch.Generator, x: Tensor) -> Tensor:
    """The kernel of a layer of torch, less the layer."""
    module = nn.MultiheadAttention(6, 3, batch_first=True, dtype=F64).eval()
    _randomise(module, generator)
    mu = measures.Empirical(x)
    with torch.no_grad():
        output = (mu @ measures.MultiHeadKernel.from_module(module)(mu)).points
        whole: Tensor = module(x[None], x[None], x[None])[0][0]
    return output - whole


def _layer(evidence: Evidence) -> None:
    """Feed-forward after attention: Eq. 3 and 5, and what they leave out."""
    plain, full, apart = [], [], []
    for generator in evidence.generators():
        layer = nn.TransformerEncoderLayer(6, 3, 8, batch_first=True, dtype=F64).eval()
        _randomise(layer, generator)
        x = normal(generator, 5, 6)
        mu = measures.Empirical(x)
        with torch.no_grad():
            bare = measures.TransformerKernel.from_layer(layer, residual=False, norm=False)
            whole = measures.TransformerKernel.from_layer(layer)
            attended_to = layer.self_attn(x[None], x[None], x[None])[0][0]
            output = (mu @ bare(mu)).points
            plain.append(output - layer.linear2(layer.linear1(attended_to).relu()))
            full.append((mu @ whole(mu)).points - layer(x[None])[0])
            apart.append((output - layer(x[None])[0]).abs().amax())
    evidence.below("T = A F − feed-forward after attention (Eq. 3 and 5)", largest(plain))
    evidence.below("with residuals and layer norms − torch's encoder layer", largest(full))
    evidence.above(
        "without them, as in the paper: from the whole layer at least", smallest(apart), 1e-2
    )


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Parameters from the generator: torch's own start depends on the global seed."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal(generator, *parameter.shape) / 2)
