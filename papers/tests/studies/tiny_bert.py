"""A small random BERT that knows the words of the studies' sentences."""

from tests.lens.models import save_short_bert

WORDS = [
    "a",
    "man",
    "is",
    "not",
    "never",
    "indeed",
    "also",
    "really",
    "possibly",
    "allegedly",
    "formerly",
    "the",
    "guitar",
    "rome",
    ".",
]


def save_tiny_bert(folder):
    return save_short_bert(folder / "tiny-bert", WORDS)
