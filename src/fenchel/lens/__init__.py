"""Audits of pretrained models: how far their attention is from the problem it approximates.

model, tokenizer = lens.load("build/models/minilm")
found = lens.deviation(model, lens.encode(tokenizer, sentences))
found.multiplier[layer]                                   # (batch, head, query), padding NaN
"""

from fenchel.lens.auditing import Wanted, audit
from fenchel.lens.constants import Stability, stability
from fenchel.lens.deviations import Deviations
from fenchel.lens.estimation import deviation
from fenchel.lens.problems import LayerProblem, problems
from fenchel.lens.recognise import Kind
from fenchel.lens.store import Store
from fenchel.lens.table import Audit
from fenchel.lens.text import encode, load, sentences

__all__ = [
    "Audit",
    "Deviations",
    "Kind",
    "LayerProblem",
    "Stability",
    "Store",
    "Wanted",
    "audit",
    "deviation",
    "encode",
    "load",
    "problems",
    "sentences",
    "stability",
]
