"""Tsallis attention on CUDA: AdaSplash's Triton kernels where they apply (Gonçalves, Treviso and
Martins, 2025). Install with `pip install -c constraints.txt ".[cuda]"`.

UNTESTED on a device: the translation below is tested against a stand-in, the kernels are theirs.
They iterate a fixed number of steps in the operands' precision, and have first derivatives only;
`fenchel.attention` on the CPU, and the tiles that run where this path does not, are exact.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from fenchel._attention.call import Call
from fenchel._numerics import transformed
from fenchel.regularizers.tsallis import Tsallis

DEVICE = "cuda"
_LENGTH = 128  # their blocks are read whole
_WIDTHS = (16, 32, 64, 128, 256)  # Triton's ranges are powers of two
_STEPS = 10  # of their hybrid of Halley's method and bisection


def adasplash_fits(call: Call, regularizer: Tsallis) -> bool:
    """A call that their kernels can express: square, unmasked or causal, a plain alpha."""
    if call.query.device.type != DEVICE or transformed() or torch.compiler.is_compiling():
        return False
    numbers = (regularizer.alpha, regularizer.temperature)
    if any(isinstance(number, Tensor) for number in numbers) or regularizer.alpha == 1:
        return False
    if any(part is not None for part in (call.mask, call.bias, call.base, call.seed)):
        return False
    if not call.query.shape == call.key.shape == call.value.shape:
        return False
    tokens, width = call.query.shape[2:]
    fits = tokens % _LENGTH == 0 and tokens > 0 and width in _WIDTHS
    return fits and importlib.util.find_spec("adasplash") is not None


def adasplash_attention(call: Call, regularizer: Tsallis) -> Tensor:
    """(batch, head, query, d). Their scale is always 1 / sqrt(d): the query carries ours."""
    from adasplash import adasplash

    factor = call.scale * math.sqrt(call.query.shape[3]) / regularizer.temperature
    output: Tensor = adasplash(
        (call.query * factor).contiguous(),
        call.key.contiguous(),
        call.value.contiguous(),
        alpha=regularizer.alpha,
        is_causal=call.causal,
        niter=_STEPS,
    )
    return output
