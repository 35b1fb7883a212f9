"""Studies of pretrained models and of random stacks, with measures and their distances.

found = robustness(model, tokenizer, sentences, layer=2)     # keys left out of attention
found = depth_of_model(model, tokenizer, sentences)          # two sentences through the layers
found = negation(model, tokenizer, drawn_cases(facts, 300))  # "not" against a neutral word
"""

from papers.studies.depth import Depth, depth_document, depth_of_model, depth_of_stacks
from papers.studies.documents import write
from papers.studies.facts import Case, Fact, drawn_cases, negation_folder, read_facts
from papers.studies.hidden import Cloud, clouds
from papers.studies.negation import Negation, negation
from papers.studies.robustness import Robustness, robustness

__all__ = [
    "Case",
    "Cloud",
    "Depth",
    "Fact",
    "Negation",
    "Robustness",
    "clouds",
    "depth_document",
    "depth_of_model",
    "depth_of_stacks",
    "drawn_cases",
    "negation",
    "negation_folder",
    "read_facts",
    "robustness",
    "write",
]
