"""Hugging Face models on any regulariser: their attention calls, translated and nothing else.

hf.register()
AutoModel.from_pretrained(folder, attn_implementation="fenchel:entmax15")
hf.convert(model, Tsallis(1.3))
"""

from fenchel.hf.convert import convert
from fenchel.hf.registry import names, register

__all__ = ["convert", "names", "register"]
