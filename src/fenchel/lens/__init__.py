"""Audits of pretrained models: what every head does, certified, and how far it is from the problem
it approximates.

model, tokenizer = lens.load("build/models/minilm")
found = lens.audit(model, tokenizer, sentences)
found.to_pandas(), found.plot("entropy")
"""

from fenchel.lens.deviations import Deviations
from fenchel.lens.estimation import deviation
from fenchel.lens.heads.auditing import Run, audit
from fenchel.lens.heads.pull import Advantages, advantage
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.table import Audit
from fenchel.lens.heads.wanted import MEASURES, Wanted
from fenchel.lens.problems import LayerProblem, problems
from fenchel.lens.reading import load
from fenchel.lens.recognise import Kind
from fenchel.lens.text import encode, sentences

__all__ = [
    "MEASURES",
    "Advantages",
    "Audit",
    "Deviations",
    "Kind",
    "LayerProblem",
    "Run",
    "Store",
    "Wanted",
    "advantage",
    "audit",
    "deviation",
    "encode",
    "load",
    "problems",
    "sentences",
]
