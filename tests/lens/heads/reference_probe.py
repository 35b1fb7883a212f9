"""The same for the measures of the probe: derivatives, the model with heads switched, a recipe."""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from fenchel import bounds
from fenchel.regularizers import Shannon
from tests.lens.heads.reference import (
    Reference,
    embedding,
    entmax,
    last_states,
    mean,
    output_of,
    softmax,
    spearman,
)


@dataclass
class Search:
    """How a recipe is looked for: alphas, log2 of the prices, steps of the bisection, and which
    part of the tolerance is used."""

    grid: list[float]
    prices: tuple[float, float]
    steps: int
    margin: float
    tolerance: float


class Probe(Reference):
    def fisher(self, kind, layer, head):
        """(mean of 1 - |p|^2, eigenvalues of the mean of scaling^2 Cov_p(k), falling)"""
        scores, total, count = [], 0.0, 0
        for _, seen, i in self._queries(kind, layer, self.probe):
            p = softmax(seen.scores(head, i))
            keys = seen.key[head, : len(p)]
            middle = sum(x * key for x, key in zip(p, keys, strict=True))
            for x, key in zip(p, keys, strict=True):
                total = total + seen.scaling**2 * x * torch.outer(key - middle, key - middle)
            scores.append(1 - sum(x * x for x in p))
            count += 1
        return mean(scores), torch.linalg.eigvalsh(total / count).flip(0).clamp_min(0).tolist()

    def local(self, kind, layer, head):
        """Largest singular value of the derivative of query -> output, by autograd: by text."""
        norms = defaultdict(list)
        for at, seen, i in self._queries(kind, layer, self.probe):
            count = seen.visible(i)
            keys, values = seen.key[head, :count], seen.value[head, :count]
            bias = 0.0 if seen.bias is None else seen.bias[head, i, :count]

            def output(query, keys=keys, values=values, bias=bias, scale=seen.scaling):
                return (scale * keys @ query + bias).softmax(-1) @ values

            jacobian = torch.autograd.functional.jacobian(output, seen.query[head, i])
            norms[at].append(float(torch.linalg.svdvals(jacobian)[0]))
        return dict(norms)

    def attacked(self, kind, layer, head, trials):
        seen = self.ran[self.probe[0]].seen[kind, layer]
        given = (seen.key[head], seen.value[head], Shannon(1 / seen.scaling))
        certificate = bounds.query_lipschitz(*given)
        return bounds.attack(certificate, trials).observed

    # ---- the loss

    def advantages(self):
        """(kind, layer, head) -> the three numbers, by the gradient in the scores themselves."""
        total = defaultdict(lambda: defaultdict(list))
        for at in self.probe:
            text = self.texts[at]
            ran = self.bench.run(text.given, derivatives=True)
            _loss(ran.outputs, text).backward()
            self.bench.model.zero_grad(set_to_none=True)
            attributed = [_attributed(one) for one in ran.entered]
            for (kind, layer), added in ran.added.items():
                for head, slope in enumerate(added.grad[0]):
                    here = total[kind, layer, head]
                    marked = torch.tensor(self._sides(kind, text))
                    here["size"] += slope.abs().sum(-1).tolist()
                    here["special"] += slope[:, marked].abs().sum(-1).tolist()
                    inputs = attributed[-1 if kind == "decoder" else 0]
                    # what comes before the patches of an image has no input
                    gains = (-slope).sum(0).tolist()[slope.shape[-1] - len(inputs) :]
                    here["agreement"].append(spearman(gains, inputs))
        return {place: _advantage(here) for place, here in total.items()}

    # ---- the model with heads switched

    def outputs(self, alphas=None):
        """(embedding, log-probabilities or None) of the texts of the probe."""
        return [self._output(at, alphas) for at in self.probe]

    def _output(self, at, alphas=None):
        outputs = self.bench.run(self.texts[at].given, alphas).outputs
        logits = getattr(outputs, "logits", None)
        return embedding(outputs), None if logits is None else logits[0].log_softmax(-1)

    def switched(self, alphas, before):
        """How far the model moves: moved, cosine, kl."""
        after = self.outputs(alphas)
        apart = [float((b - a).norm()) ** 2 for (a, _), (b, _) in zip(before, after, strict=True)]
        measures = {
            "moved": math.sqrt(sum(apart) / sum(float(a.norm()) ** 2 for a, _ in before)),
            "cosine": mean(
                float(a @ b / (a.norm() * b.norm()))
                for (a, _), (b, _) in zip(before, after, strict=True)
            ),
        }
        if before[0][1] is not None:
            measures["kl"] = mean(
                float((log_p.exp() * (log_p - log_q)).sum())
                for (_, one), (_, two) in zip(before, after, strict=True)
                for log_p, log_q in zip(one, two, strict=True)
            )
        return measures

    def one_head(self, kind, layer, head, alpha):
        alphas = [1.0] * len(self.ran[0].seen[kind, layer].query)
        alphas[head] = alpha
        return {(kind, layer): alphas}

    def everywhere(self, alpha):
        return {place: [alpha] * len(seen.query) for place, seen in self.ran[0].seen.items()}

    # ---- the recipe

    def curves(self, grid):
        """(kind, layer, head) -> for each alpha of the grid (move of the layer's output, share of
        links kept), the head switched alone."""
        points = {}
        for (kind, layer), first in self.ran[0].seen.items():
            project = output_of(self.bench.name, self.bench.model, self.bench.paths[kind, layer])
            matrix = project.weight.detach()
            matrix = matrix if self.bench.name == "gpt2" else matrix.T  # (in, out)
            size = sum(
                self._layer_square(project, seen, i) for _, seen, i in self._probed(kind, layer)
            )
            wide = first.value.shape[-1]
            for head in range(len(first.query)):
                projection = matrix[head * wide : (head + 1) * wide]
                points[kind, layer, head] = [
                    self._point(kind, layer, head, alpha, projection, size) for alpha in grid
                ]
        return points

    def _probed(self, kind, layer):
        return self._queries(kind, layer, self.probe)

    def _layer_square(self, project, seen, i):
        heads = range(len(seen.query))
        joined = torch.cat([seen.output(head, softmax(seen.scores(head, i))) for head in heads])
        with torch.no_grad():
            return float(project(joined).norm()) ** 2

    def _point(self, kind, layer, head, alpha, projection, size):
        apart, kept = 0.0, []
        for _, seen, i in self._probed(kind, layer):
            scores = seen.scores(head, i)
            p = entmax(scores, alpha)
            moved = seen.output(head, p) - seen.output(head, softmax(scores))
            apart += float((moved @ projection).norm()) ** 2
            kept.append(sum(x > 0 for x in p) / len(p))
        return math.sqrt(apart / size), mean(kept)

    def priced(self, curves, price, search):
        alphas = {place: [1.0] * len(seen.query) for place, seen in self.ran[0].seen.items()}
        for (kind, layer, head), points in curves.items():
            best = 0.0
            for alpha, (moved, kept) in zip(search.grid, points, strict=True):
                worth = 1 - kept - 2.0**price * moved**2
                if moved <= search.tolerance and worth > best:
                    best, alphas[kind, layer][head] = worth, alpha
        return alphas

    def moves(self, alphas, places):
        """|e' - e| / |e| of these texts."""
        pairs = [(self._output(at)[0], self._output(at, alphas)[0]) for at in places]
        return [float((b - a).norm() / a.norm()) for a, b in pairs]

    def recipe(self, search):
        """Alphas by place: of the lowest price at which every text of the probe stays."""
        curves = self.curves(search.grid)
        low, high = search.prices
        alphas = self.priced(curves, high, search)
        for _ in range(search.steps):
            middle = (low + high) / 2
            tried = self.priced(curves, middle, search)
            if max(self.moves(tried, self.probe)) <= search.margin * search.tolerance:
                high, alphas = middle, tried
            else:
                low = middle
        return alphas

    def kept(self, alphas):
        """(kind, layer, head) -> share of links with a weight, in the switched model."""
        shares = defaultdict(list)
        for at in self.probe:
            seen_by = self.bench.run(self.texts[at].given, alphas).seen
            for (kind, layer), seen in seen_by.items():
                for head in range(len(seen.query)):
                    for i in range(seen.query.shape[1]):
                        p = entmax(seen.scores(head, i), alphas[kind, layer][head])
                        shares[kind, layer, head].append(sum(x > 0 for x in p) / len(p))
        return {place: mean(values) for place, values in shares.items()}


def _attributed(vectors):
    """Minus gradient x input, by token."""
    pairs = zip(vectors.grad[0], vectors.detach()[0], strict=True)
    return [-float(slope.flatten() @ x.flatten()) for slope, x in pairs]


def _loss(outputs, text):
    """Of a language model its mean surprise; else minus the length of the embedding."""
    logits = getattr(outputs, "logits", None)
    if logits is None:
        return -last_states(outputs).mean(0).norm()
    ids = text.given.get("decoder_input_ids", text.given.get("input_ids"))[0]
    surprise = sum(-logits[0, i].log_softmax(-1)[ids[i + 1]] for i in range(len(ids) - 1))
    return surprise / (len(ids) - 1)


def _advantage(here):
    measures = {
        "advantage": mean(here["size"]),
        "advantage_special": sum(here["special"]) / sum(here["size"]),
    }
    if here["agreement"]:
        measures["advantage_agreement"] = mean(x for x in here["agreement"] if not math.isnan(x))
    return measures
