"""Audits of pretrained models: what every head does, certified, and how far it is from the problem
it approximates.

model, tokenizer = lens.load("build/models/minilm")
audit = lens.audit(model, tokenizer, sentences)
audit.to_pandas(), audit.plot("entropy")
"""

from fenchel.lens.deviations import Deviations, deviation
from fenchel.lens.families import Kind
from fenchel.lens.heads.advantages import Advantages, advantage
from fenchel.lens.heads.auditing import AuditRun, audit
from fenchel.lens.heads.settings import MEASURES, AuditSettings
from fenchel.lens.heads.store import Store
from fenchel.lens.heads.table import Audit
from fenchel.lens.input_files import sentences
from fenchel.lens.layer_problems import LayerProblem, problems
from fenchel.lens.loading import load
from fenchel.lens.tokenizing import encode

__all__ = [
    "MEASURES",
    "Advantages",
    "Audit",
    "AuditRun",
    "AuditSettings",
    "Deviations",
    "Kind",
    "LayerProblem",
    "Store",
    "advantage",
    "audit",
    "deviation",
    "encode",
    "load",
    "problems",
    "sentences",
]
