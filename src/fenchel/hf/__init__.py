"""Hugging Face models on any regulariser: their attention calls, translated and nothing else.

AutoModel.from_pretrained(folder, attn_implementation="fenchel:entmax15")
hf.check(model)
hf.convert(model, Tsallis(1.3))
"""

from fenchel.hf.cache import Cache
from fenchel.hf.check import Check, check
from fenchel.hf.convert import convert
from fenchel.hf.gate import install as _install
from fenchel.hf.registry import names, register, register_standard

__all__ = ["Cache", "Check", "check", "convert", "names", "register"]

register_standard()
_install()
