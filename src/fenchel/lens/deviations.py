"""How far the attention of a pretrained model is from the estimate that it approximates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status
from fenchel.dual.problem import read_positive
from fenchel.lens.families import Kind, find_attentions
from fenchel.lens.inputs import Batch
from fenchel.lens.layer_problems import LayerProblem, check_scaling, layer_problems

MEASURES = ("multiplier", "mean", "mean_shift", "parameter")
PADDING = -1  # in `codes`, where a query is no word
_ENTRIES = 2**20  # numbers of the largest temporary of a group of sentences


@dataclass(frozen=True, eq=False)
class Deviations:
    """Of a model's attention from the exact estimates; padding, and what has no solution, is NaN.

    Each measure is (layer, batch, head, query), also for one sentence, so that `multiplier[layer]`
    is (batch, head, query).
    multiplier: |lam - lam*| / |lam*|, lam = reliability z the model's, lam* exact.
    mean: |h - h*| / |h*| of the estimates, in units of their distance to the origin;
    mean_shift: |h - h*| / |h* - mean_u|, in units of what attention does to the prior mean.
    parameter: reliability |Sigma z| / |z|, Sigma the covariance of the templates under u; the
        deviation of the multiplier to leading order, and of its size also where scores are large.
    Since lam* - lam = reliability (mean_u - h*), a small deviation of the multiplier says that the
    evidence is long beside what attention does to the mean; the weights may still be far off, which
    `mean` and `mean_shift` tell.
    codes: of `fenchel.Status`; -1: padding.
    model, attention, scaling (of the templates), reliability: the settings. Deviations depend on
        the scaling, the layer does not.
    """

    multiplier: Tensor = field(repr=False)
    mean: Tensor = field(repr=False)
    mean_shift: Tensor = field(repr=False)
    parameter: Tensor = field(repr=False)
    codes: Tensor = field(repr=False)
    model: str
    attention: str
    scaling: float
    reliability: float

    @property
    def layers(self) -> int:
        return self.codes.shape[0]

    @property
    def heads(self) -> int:
        return self.codes.shape[2]

    @property
    def sentences(self) -> int:
        return self.codes.shape[1]

    @property
    def queries(self) -> int:
        """Words that ask, in all sentences together."""
        return int((self.codes[0, :, 0] != PADDING).sum())

    @property
    def status(self) -> dict[str, int]:
        """How many problems, of all layers, heads and queries, ended how."""
        codes, counts = torch.unique(self.codes[self.codes != PADDING], return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return {Status(code).name: count for code, count in pairs}


def deviation(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    attention: Kind = "encoder",
    reliability: float = 1.0,
    scaling: float | None = None,
    advance: Callable[[float], object] | None = None,
) -> Deviations:
    """|lam* - reliability z| / |lam*| of every layer, head and query: how far off attention is.

    Of the problem of `fenchel.dual`, whose first-order solution the layer is: templates
    t_i = scaling x_i, x_i the inputs of the key projection, and reliability z the vector with
    which <t_i, reliability z> + log u_i are the model's own scores, up to a constant.

    >>> model, tokenizer = lens.load("build/models/minilm")
    >>> deviations = lens.deviation(model, lens.encode(tokenizer, ["A man is playing a guitar."]))
    >>> deviations.multiplier[2]            # layer 2: (batch, head, query), here (1, 12, 9)

    The folder holds any BERT or T5 that `from_pretrained` loads; `lens.load` takes a name on the
    Hugging Face hub as well. Needs the extra: pip install "fenchel[hf]".

    model: BERT, RoBERTa and their kin, T5 or mT5, with or without a head on top, on eager or sdpa
        attention. Left as it is; computed without dropout.
    inputs: what the tokenizer returns, padded as you like. Decoder and cross-attention need
        decoder_input_ids (their padding in decoder_attention_mask) or labels (-100 is padding);
        the encoder runs alone, without them.
    reliability: alpha of the problem; the evidence is divided by it, so that the layer stays.
    scaling: of the templates; None: 1 / sqrt(d'), d' the size of a head, as in the paper. The
        layer is the same for every value, THE DEVIATIONS ARE NOT: templates c times as long make
        them about c^2 times as large where they are small. Compare at one scaling only.
    advance: called with the share of the work that was done since the last call.
    """
    attentions = find_attentions(model, attention)  # Deciphering Attention, figures 4 to 8
    template_scale = check_scaling(scaling, attentions[0])
    reliability = float(read_positive(reliability, "reliability", torch.empty(())))
    batch = Batch.of(model, inputs, attention)
    table = _Table.empty(batch.real, len(attentions), attentions[0].heads)
    room = _ENTRIES // (attentions[0].heads * attentions[0].key.in_features)
    for places, part in batch.groups(max(1, room)):
        layers = layer_problems(model, attentions, part, reliability, template_scale)
        for number, problem in enumerate(layers):
            table.fill(number, places, part.real, problem)
            if advance is not None:
                advance(len(places) / len(batch.real) / len(attentions))
    return Deviations(
        **table.measures,
        codes=table.codes,
        model=_name(model),
        attention=attention,
        scaling=template_scale,
        reliability=reliability,
    )


@dataclass(frozen=True, eq=False)
class _Table:
    """The measures by name and the codes, each (layer, batch, head, query)."""

    measures: dict[str, Tensor]
    codes: Tensor

    @classmethod
    def empty(cls, real: Tensor, layers: int, heads: int) -> _Table:
        """All padding; real (B, Q)."""
        shape = (layers, len(real), heads, real.shape[1])
        nothing = {name: real.new_full(shape, torch.nan, dtype=torch.float64) for name in MEASURES}
        return cls(nothing, real.new_full(shape, PADDING, dtype=torch.int8))

    def fill(self, layer: int, places: Tensor, words: Tensor, problem: LayerProblem) -> None:
        """The layer's problem, solved, at the sentences' places in the whole batch."""
        measures, status = _compare(problem)
        for name, values in measures.items():
            _store(self.measures[name][layer], places, words, values)
        _store(self.codes[layer], places, words, status.to(torch.int8))


def _compare(problem: LayerProblem) -> tuple[dict[str, Tensor], Tensor]:
    """The measures of the layer against the exact estimates, NaN where there is no solution; and
    the status. Each (B, H, Q)."""
    problem = problem.reduce()
    exact = problem.exact()
    apart = problem.first_order().compare(exact)
    measures = {
        "multiplier": apart.multiplier,
        "mean": apart.mean,
        "mean_shift": apart.mean_shift,
        "parameter": problem.parameter(),
    }
    solved = exact.status == int(Status.OK)
    return {name: where(solved, x, torch.nan) for name, x in measures.items()}, exact.status


def _store(into: Tensor, places: Tensor, words: Tensor, values: Tensor) -> None:
    """The queries that are words; into (all, H, Q), words (B, q), values (B, H, q)."""
    sentence, query = words.nonzero(as_tuple=True)
    into[places[sentence], :, query] = values[sentence, :, query].to(into.dtype)


def _name(model: Any) -> str:
    path = str(getattr(model, "name_or_path", "") or "").rstrip("/")
    return path.rpartition("/")[2] or type(model).__name__
