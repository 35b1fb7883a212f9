"""Every number of an audit once more, slowly: one head, one text, one query at a time, in float64,
from what transformers itself computes. Nothing of `fenchel.lens.heads` is used, and attentions are
found by their names.

Each text runs alone, without padding, through transformers' eager path with a hand-made attention
in its place: a plain softmax in float64, entmax by bisection where a head is switched.
"""

import math
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from tests.lens.models import reference as deviations_of_query

ATTENTIONS = {
    "bert": {"encoder": "encoder.layer.{}.attention.self"},
    "gpt2": {"decoder": "transformer.h.{}.attn"},
    "llama": {"decoder": "model.layers.{}.self_attn"},
    "t5": {
        "encoder": "encoder.block.{}.layer.0.SelfAttention",
        "decoder": "decoder.block.{}.layer.0.SelfAttention",
        "cross": "decoder.block.{}.layer.1.EncDecAttention",
    },
    "bart": {
        "encoder": "model.encoder.layers.{}.self_attn",
        "decoder": "model.decoder.layers.{}.self_attn",
        "cross": "model.decoder.layers.{}.encoder_attn",
    },
    "vit": {"encoder": "layers.{}.attention"},
}
OUTPUTS = {"gpt2": "c_proj", "llama": "o_proj", "t5": "o", "bart": "out_proj", "vit": "o_proj"}
KEYS = {"bert": "key", "t5": "k"}  # where the problem is one of tokens
EMBEDDINGS = {  # of the tokens that come in, and of those that are written
    "bert": ("embeddings.word_embeddings",),
    "gpt2": ("transformer.wte",),
    "llama": ("model.embed_tokens",),
    "t5": ("encoder.embed_tokens", "decoder.embed_tokens"),
    "bart": ("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
    "vit": ("embeddings.patch_embeddings",),
}
LAYERS = 2


def output_of(name, model, path):
    """The module that takes the joined heads of the attention at this path."""
    output = (
        path.removesuffix("self") + "output.dense" if name == "bert" else f"{path}.{OUTPUTS[name]}"
    )
    return model.get_submodule(output)


# ---- maps


def softmax(scores):
    top = max(scores)
    raised = [math.exp(score - top) for score in scores]
    return [x / sum(raised) for x in raised]


def entmax(scores, alpha):
    """p_j = [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)); tau by bisection until sum p = 1."""
    if alpha == 1:
        return softmax(scores)
    scaled, power = [(alpha - 1) * score for score in scores], 1 / (alpha - 1)
    low, high = max(scaled) - 1, max(scaled)
    while low < (middle := (low + high) / 2) < high:
        mass = sum((x - middle) ** power for x in scaled if x > middle)
        low, high = (middle, high) if mass > 1 else (low, middle)
    p = [max(x - low, 0.0) ** power for x in scaled]
    return [x / sum(p) for x in p]


def entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def spearman(one, two):
    """NaN where one of them is constant."""

    def ranks(xs):
        return [sum(y < x for y in xs) + (sum(y == x for y in xs) - 1) / 2 for x in xs]

    def centred(xs):
        return [x - sum(xs) / len(xs) for x in xs]

    a, b = centred(ranks(one)), centred(ranks(two))
    size = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size > 0 else math.nan


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


# ---- the model


@dataclass
class Seen:
    """One attention on one text: query (H, Q, f), key (H, n, f), value (H, n, e), bias (H, Q, n);
    tokens (n, d), what the key projection was given."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    causal: bool
    tokens: torch.Tensor | None = None
    known: dict = field(default_factory=dict, repr=False)

    def visible(self, query):
        return query + 1 if self.causal else self.key.shape[1]

    def scores(self, head, query):
        """Of the keys that the query sees: the first so many."""
        if (head, query) not in self.known:
            scores = []
            for j in range(self.visible(query)):
                score = self.scaling * float(self.query[head, query] @ self.key[head, j])
                added = 0.0 if self.bias is None else float(self.bias[head, query, j])
                scores.append(score + added)
            self.known[head, query] = scores
        return self.known[head, query]

    def output(self, head, p):
        return torch.tensor(p, dtype=torch.float64) @ self.value[head, : len(p)]


@dataclass
class Shown:
    """One text: what the model is given, and which of its tokens are special, by side."""

    given: dict
    special: dict


@dataclass
class Ran:
    outputs: object
    seen: dict
    added: dict = field(default_factory=dict)  # zeros added to the scores, with gradients
    entered: list = field(default_factory=list)  # embeddings of either side, with gradients


class Bench:
    """A model of this architecture, with its attention made by hand."""

    def __init__(self, name, model):
        self.name, self.model = name, model
        self.places = {
            path.format(layer): (kind, layer)
            for kind, path in ATTENTIONS[name].items()
            for layer in range(LAYERS)
        }
        self.paths = {place: path for path, place in self.places.items()}
        self.module_of = {model.get_submodule(path): place for path, place in self.places.items()}

    def run(self, given, alphas=None, derivatives=False):
        """alphas: place -> alpha of each head; softmax where there is none."""
        ran = Ran(None, {})
        tokens = {}

        def attention(module, query, key, value, mask, scaling=None, position_bias=None, **_):
            place = self.module_of[module]
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            bias = None if position_bias is None else position_bias[0].detach()
            cut = (query[0].detach(), key[0].detach(), value[0].detach())
            causal = place[0] == "decoder"
            seen = Seen(*cut, bias, scaling, causal, tokens.get(place))
            ran.seen[place] = seen
            scores = query @ key.mT * scaling
            scores = scores if position_bias is None else scores + position_bias
            if derivatives:
                ran.added[place] = torch.zeros_like(scores, requires_grad=True)
                scores = scores + ran.added[place]
            if causal:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -math.inf)
            weights = scores.softmax(-1)
            for head, alpha in enumerate((alphas or {}).get(place, ())):
                if alpha != 1:
                    weights[0, head] = _switched(seen, head, alpha)
            return (weights @ value).transpose(1, 2).contiguous(), weights

        with self._hooked(ran, tokens, derivatives), torch.set_grad_enabled(derivatives):
            file = sys.modules[type(next(iter(self.module_of))).__module__]
            with mock.patch.object(file, "eager_attention_forward", attention):
                ran.outputs = self.model(**given, output_hidden_states=True)
        return ran

    @contextmanager
    def _hooked(self, ran, tokens, derivatives):
        """Note what goes into the key projections, and cut the graph at the embeddings."""
        hooks = []
        for path, place in self.places.items() if self.name in KEYS else ():

            def note(_, args, place=place):
                tokens[place] = args[0][0].detach()

            projection = self.model.get_submodule(f"{path}.{KEYS[self.name]}")
            hooks.append(projection.register_forward_pre_hook(note))

        def enter(_, args, output):
            ran.entered.append(output.detach().requires_grad_())
            return ran.entered[-1]

        modules = [self.model.get_submodule(path) for path in EMBEDDINGS[self.name]]
        hooks += [one.register_forward_hook(enter) for one in modules if derivatives]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _switched(seen, head, alpha):
    weights = torch.zeros(seen.query.shape[1], seen.key.shape[1], dtype=torch.float64)
    for i in range(len(weights)):
        p = entmax(seen.scores(head, i), alpha)
        weights[i, : len(p)] = torch.tensor(p, dtype=torch.float64)
    return weights


def last_states(outputs):
    for name in ("last_hidden_state", "decoder_hidden_states", "hidden_states"):
        if getattr(outputs, name, None) is not None:
            states = getattr(outputs, name)
            return (states if name == "last_hidden_state" else states[-1])[0]
    raise AssertionError("no states")


def embedding(outputs):
    return last_states(outputs).mean(0)


# ---- the numbers of a head


@dataclass
class Reference:
    """texts: all of them. probe: places of those that the slow measures see."""

    bench: Bench
    texts: list[Shown]
    alphas: tuple[float, ...]
    probe: list[int]

    def __post_init__(self):
        self.ran = [self.bench.run(text.given) for text in self.texts]

    def heads(self):
        """(kind, layer, head) of every row."""
        for (kind, layer), seen in self.ran[0].seen.items():
            yield from ((kind, layer, head) for head in range(len(seen.query)))

    def _sides(self, kind, text):
        """Special tokens among the keys."""
        side = "second" if kind == "decoder" and "second" in text.special else "first"
        return text.special[side]

    def _queries(self, kind, layer, some=None):
        """(text, what the attention saw, query) of every query."""
        for at in range(len(self.texts)) if some is None else some:
            seen = self.ran[at].seen[kind, layer]
            for query in range(seen.query.shape[1]):
                yield at, seen, query

    def weights(self, kind, layer, head):
        total = defaultdict(list)
        for at, seen, i in self._queries(kind, layer):
            p = softmax(seen.scores(head, i))
            special = self._sides(kind, self.texts[at])
            marked = [x for j, x in enumerate(p) if special[j]]
            total["entropy"].append(entropy(p))
            most = math.log(max(len(p), 2))
            total["entropy_share"].append(min(max(entropy(p) / most, 0), 1))
            total["top_weight"].append(max(p))
            total["effective_support"].append(math.exp(entropy(p)))
            total["mass_first"].append(p[0])
            total["mass_special"].append(sum(marked))
            total["mass_separator"].append(sum(x for j, x in enumerate(p) if special[j] and j))
            if kind != "cross":
                at_offset = {j - i: x for j, x in enumerate(p)}
                total["mass_self"].append(at_offset.get(0, 0.0))
                total["mass_previous"].append(at_offset.get(-1, 0.0))
                total["mass_next"].append(at_offset.get(1, 0.0))
                total["distance"].append(sum(x * abs(j - i) for j, x in enumerate(p)))
        return dict(total)

    def agreement(self, kind, layer):
        """Cosine of every two heads, mean over queries."""
        heads = range(len(self.ran[0].seen[kind, layer].query))
        cosines = []
        for _, seen, i in self._queries(kind, layer):
            rows = [torch.tensor(softmax(seen.scores(head, i))) for head in heads]
            cosines.append([[float(a @ b / (a.norm() * b.norm())) for b in rows] for a in rows])
        return [[mean(one[a][b] for one in cosines) for b in heads] for a in heads]

    def offsets(self, kind, layer, head, offset):
        """Mean weight on the token so far from the query."""
        masses = []
        for _, seen, i in self._queries(kind, layer):
            p = softmax(seen.scores(head, i))
            masses.append(p[i + offset] if 0 <= i + offset < len(p) else 0.0)
        return mean(masses)

    def preference_support(self, kind, layer, head):
        supports = []
        for _, seen, i in self._queries(kind, layer):
            supports.append(math.exp(entropy(softmax(self._bias(seen, head, i)))))
        return mean(supports)

    def _bias(self, seen, head, i):
        return seen.bias[head, i, : seen.visible(i)].tolist()

    def preference_at(self, kind, layer, head, offset):
        """Mean of the bias at key - query."""
        biases = []
        for _, seen, i in self._queries(kind, layer):
            bias = self._bias(seen, head, i)
            biases += [bias[i + offset]] if 0 <= i + offset < len(bias) else []
        return mean(biases)

    def deviations(self, kind, layer, head):
        """In the space of the head's keys, and of BERT and T5 in that of the tokens too."""
        names = ("multiplier", "mean", "mean_shift")
        row = self._means("head", self._of_keys, (kind, layer, head), names)
        if self.bench.name in KEYS:
            names = (*names, "parameter")
            row |= self._means("token", self._of_tokens, (kind, layer, head), names)
        return row

    def _means(self, space, problem, place, names):
        kind, layer, head = place
        deviations = [
            self._deviation(seen, head, i, problem(place, seen, i))
            for _, seen, i in self._queries(kind, layer)
        ]
        return {
            f"{space}_deviation_{name}": mean(x[at] for x in deviations)
            for at, name in enumerate(names)
        }

    def _of_keys(self, place, seen, i):
        head = place[-1]
        return seen.scaling * seen.key[head], seen.query[head, i]

    def _of_tokens(self, place, seen, i):
        kind, layer, head = place
        query = seen.query[head, i]
        size = len(query)
        path = f"{self.bench.paths[kind, layer]}.{KEYS[self.bench.name]}"
        matrix = self.bench.model.get_submodule(path).weight.detach()
        of_head = matrix[head * size : (head + 1) * size]
        return seen.tokens / math.sqrt(size), seen.scaling * math.sqrt(size) * of_head.T @ query

    def _deviation(self, seen, head, i, problem):
        count = seen.visible(i)
        if count == 1:  # one token: nothing to be estimated
            return (0.0, 0.0, 0.0, 0.0)
        templates, evidence = problem
        bias = torch.zeros(count, dtype=torch.float64)
        if seen.bias is not None:
            bias = seen.bias[head, i, :count]
        return deviations_of_query(templates[:count].numpy(), bias.numpy(), evidence.numpy())

    def what_if(self, kind, layer, alpha):
        """Of all heads, since the layer's output is theirs together."""
        path = self.bench.paths[kind, layer]
        project = output_of(self.bench.name, self.bench.model, path)
        heads = range(len(self.ran[0].seen[kind, layer].query))
        total = [defaultdict(list) for _ in heads]
        for _, seen, i in self._queries(kind, layer):
            rows = [seen.scores(head, i) for head in heads]
            before = [seen.output(head, softmax(row)) for head, row in enumerate(rows)]
            weights = [entmax(row, alpha) for row in rows]
            after = [seen.output(head, p) for head, p in enumerate(weights)]
            with torch.no_grad():
                layer_before = project(torch.cat(before))
                layer_after = project(torch.cat(after))
            for head in heads:
                kept = sum(x > 0 for x in weights[head])
                moved, length = (after[head] - before[head]).norm(), before[head].norm()
                with torch.no_grad():
                    alone = project(torch.cat([*before[:head], after[head], *before[head + 1 :]]))
                here = total[head]
                here["support_size"].append(kept)
                here["kept"].append(kept / len(rows[head]))
                here["change"].append(float(moved / length))
                here["squares"].append(float(moved) ** 2)
                here["lengths"].append(float(length) ** 2)
                here["alone"].append(float((alone - layer_before).norm()) ** 2)
                here["all"].append(float((layer_after - layer_before).norm()) ** 2)
                here["layer"].append(float(layer_before.norm()) ** 2)
        return [
            {
                **{name: mean(one[name]) for name in ("support_size", "kept", "change")},
                "moved": math.sqrt(sum(one["squares"]) / sum(one["lengths"])),
                "layer_moved": math.sqrt(sum(one["alone"]) / sum(one["layer"])),
                "layer_all": math.sqrt(sum(one["all"]) / sum(one["layer"])),
            }
            for one in total
        ]

    def bounds(self, kind, layer, head):
        """scaling / 4 max |k_i - k_j| |v_i - v_j|, text by text."""
        bounds = []
        for ran in self.ran:
            seen = ran.seen[kind, layer]
            k, v = seen.key[head], seen.value[head]
            pairs = [float((k[i] - k[j]).norm() * (v[i] - v[j]).norm())
                     for i in range(len(k)) for j in range(len(k))]  # fmt: skip
            bounds.append(seen.scaling * max(pairs) / 4)
        return bounds
