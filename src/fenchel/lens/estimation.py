"""How far the attention of a pretrained model is from the estimate that it approximates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import where
from fenchel._solution import Status
from fenchel.dual.problem import read_positive
from fenchel.lens.deviations import MEASURES, PADDING, Deviations
from fenchel.lens.inputs import Batch
from fenchel.lens.problems import LayerProblem, check_scaling, layer_problems
from fenchel.lens.recognise import Kind, attentions

_ENTRIES = 2**20  # numbers of the largest temporary of a group of sentences


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
    >>> found = lens.deviation(model, lens.encode(tokenizer, ["A man is playing a guitar."]))
    >>> found.multiplier[2]                 # layer 2: (batch, head, query), here (1, 12, 9)

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
    found = attentions(model, attention)  # Deciphering Attention, figures 4 to 8
    factor = check_scaling(scaling, found[0])
    reliability = float(read_positive(reliability, "reliability", torch.empty(())))
    batch = Batch.of(model, inputs, attention)
    real = batch.real
    shape = (len(found), len(real), found[0].heads, real.shape[1])
    made = {name: real.new_full(shape, torch.nan, dtype=torch.float64) for name in MEASURES}
    codes = real.new_full(shape, PADDING, dtype=torch.int8)
    room = _ENTRIES // (found[0].heads * found[0].key.in_features)
    for places, part in batch.groups(max(1, room)):
        layers = layer_problems(model, found, part, reliability, factor)
        words = part.real
        for number, problem in enumerate(layers):
            values, status = _compared(problem)
            for name, value in values.items():
                _store(made[name][number], places, words, value)
            _store(codes[number], places, words, status.to(torch.int8))
            if advance is not None:
                advance(len(places) / len(real) / len(found))
    return Deviations(
        **made,
        codes=codes,
        model=_name(model),
        attention=attention,
        scaling=factor,
        reliability=reliability,
    )


def _compared(problem: LayerProblem) -> tuple[dict[str, Tensor], Tensor]:
    """Each (B, H, Q); NaN where there is no solution."""
    problem = problem.reduced()
    exact = problem.exact()
    apart = problem.first_order().compare(exact)
    values = {
        "multiplier": apart.multiplier,
        "mean": apart.mean,
        "mean_shift": apart.mean_shift,
        "parameter": problem.parameter(),
    }
    solved = exact.status == int(Status.OK)
    return {name: where(solved, x, torch.nan) for name, x in values.items()}, exact.status


def _store(into: Tensor, places: Tensor, words: Tensor, values: Tensor) -> None:
    """The queries that are words; into (all, H, Q), words (B, q), values (B, H, q)."""
    sentence, query = words.nonzero(as_tuple=True)
    into[places[sentence], :, query] = values[sentence, :, query].to(into.dtype)


def _name(model: Any) -> str:
    path = str(getattr(model, "name_or_path", "") or "").rstrip("/")
    return path.rpartition("/")[2] or type(model).__name__
