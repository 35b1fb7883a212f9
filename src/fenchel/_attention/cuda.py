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

from fenchel._attention.call import AttentionCall
from fenchel._kernels.route import Reason
from fenchel._numerics import transformed
from fenchel.regularizers.tsallis import Tsallis

DEVICE = "cuda"
_LENGTH = 128  # their blocks are read whole
_WIDTHS = (16, 32, 64, 128, 256)  # Triton's ranges are powers of two
_STEPS = 10  # of their hybrid of Halley's method and bisection


def against_adasplash(call: AttentionCall, regularizer: Tsallis) -> Reason:
    """Why their kernels cannot express this call: they take square, unmasked or causal calls with
    one alpha <= 2, and have first derivatives only."""
    query, numbers = call.query, (regularizer.alpha, regularizer.temperature)
    if query.device.type != DEVICE or query.device.index not in (None, _current_device()):
        return f"it runs on the current CUDA device, the operands are on {query.device}"
    if transformed() or torch.compiler.is_compiling():
        return "a transform or torch.compile is active"
    if any(isinstance(number, Tensor) for number in numbers) or not 1 < regularizer.alpha <= 2:
        return "it takes one alpha, a number above 1 and at most 2"
    if any(part is not None for part in (call.mask, call.bias, call.base, call.seed)):
        return "it takes no mask, bias, base or dropout"
    if query.dtype == torch.float64 or not query.shape == call.key.shape == call.value.shape:
        return "query, key and value must have one shape, in float32 or less"
    tokens, width = query.shape[2:]
    if tokens & (tokens - 1) or tokens < _LENGTH or width not in _WIDTHS:
        return (
            f"it takes powers of two from {_LENGTH} tokens and {_WIDTHS} components, got {tokens} "
            f"and {width}"
        )
    if importlib.util.find_spec("adasplash") is None:
        return 'the package adasplash is missing; pip install -c constraints.txt ".[cuda]"'
    return None


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def adasplash_attention(call: AttentionCall, regularizer: Tsallis) -> Tensor:
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
