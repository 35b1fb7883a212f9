"""How long attention takes on a CUDA device, as a ratio to torch's fused attention (SDPA).

All methods see the same operands, causal, and take turns, round after round. Times are of CUDA
events around as many calls as take milliseconds, launches included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fenchel as fl
from benchmarks.attention_rounds import Clock, Rounds, Samples, Thunk, interleave
from benchmarks.attention_summary import timed
from benchmarks.maps import DIRECTIONS

_AMPERE = (8, 0)  # older devices do not multiply bfloat16

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Method(NamedTuple):
    name: str
    attend: Attend


@dataclass(frozen=True)
class Sweep:
    """seconds: after them no further number of tokens is begun."""

    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    deviations: tuple[float, ...] = (1.0, 4.0)
    alphas: tuple[float, ...] = (1.5, 2.0)
    heads: int = 16
    width: int = 64
    seed: int = 0
    rounds: Rounds = field(default_factory=lambda: Rounds(3, 9, 10.0))
    seconds: float = 480.0


@dataclass(frozen=True)
class Place:
    """Where it runs, and what time is there. flash: torch has FlashAttention for it."""

    device: torch.device
    clock: Clock
    dtype: torch.dtype
    flash: bool


def cuda() -> Place:
    """The current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    amd = torch.version.hip is not None
    recent = amd or torch.cuda.get_device_capability(device) >= _AMPERE
    dtype = torch.bfloat16 if recent else torch.float16
    return Place(device, EventClock(), dtype, _takes_flash(device, dtype))


def _takes_flash(device: torch.device, dtype: torch.dtype) -> bool:
    little = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype)
    try:
        _flash(little, little, little)
    except RuntimeError:  # "No available kernel", after warnings that say why
        return False
    return True


class EventClock:
    """Seconds, told by events of the current stream; every look waits for all work before it."""

    def __init__(self) -> None:
        self._last, self._seconds = self._mark(), 0.0

    def __call__(self) -> float:
        # Added up: one event long after another would have the digits of float32 alone.
        now = self._mark()
        now.synchronize()
        self._seconds += self._last.elapsed_time(now) / 1e3
        self._last = now
        return self._seconds

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def measure(
    sweep: Sweep, place: Place, start: float, advance: Callable[[float], object]
) -> Iterator[dict[str, Any]]:
    """Times, size by size, the shortest first. start: by `time.monotonic`, of the whole run."""
    for n in sweep.sizes:
        if time.monotonic() - start > sweep.seconds:
            return
        yield from _measure_size(sweep, place, n, lambda share: advance(share / len(sweep.sizes)))


def _measure_size(
    sweep: Sweep, place: Place, n: int, advance: Callable[[float], object]
) -> Iterator[dict[str, Any]]:
    chosen = methods(sweep, place)
    plan = [(d, way, method) for d in sweep.deviations for way in DIRECTIONS for method in chosen]
    operands = {deviation: draw(sweep, place, n, deviation) for deviation in sweep.deviations}
    makers = [partial(_thunk, method, operands[d], way) for d, way, method in plan]
    samples = interleave(makers, sweep.rounds, advance, place.clock)
    baselines = {
        (deviation, way): median(sample.seconds)
        for (deviation, way, method), sample in zip(plan, samples, strict=True)
        if method is chosen[0] and sample.seconds
    }
    for (deviation, way, method), sample in zip(plan, samples, strict=True):
        entry = {"n": n, "deviation": deviation, "direction": way, "method": method.name}
        yield entry | _timed(sample, baselines.get((deviation, way)))


def _timed(sample: Samples, baseline: float | None) -> dict[str, Any]:
    return {**timed(sample.seconds, baseline), "error": sample.error}


def draw(sweep: Sweep, place: Place, n: int, deviation: float) -> tuple[Tensor, ...]:
    """Query, key, value and what arrives from behind; <q, k> / sqrt(width) has this deviation."""
    generator = torch.Generator().manual_seed(sweep.seed)
    shape = (4, 1, sweep.heads, n, sweep.width)
    query, key, value, incoming = torch.randn(shape, generator=generator).unbind(0)
    root = deviation**0.5
    return tuple(
        x.to(place.device, place.dtype) for x in (query * root, key * root, value, incoming)
    )


def _thunk(method: Method, operands: Sequence[Tensor], direction: str) -> Thunk:
    query, key, value, incoming = operands
    if direction == "forward":
        method.attend(query, key, value)  # compiles
        return lambda: method.attend(query, key, value)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]

    def step() -> object:
        return torch.autograd.grad(method.attend(*leaves), leaves, incoming)

    step()
    return step


# ---- the methods


def methods(sweep: Sweep, place: Place) -> list[Method]:
    """The baseline first."""
    ours = [Method(f"fl Tsallis({alpha:g})", partial(_ours, alpha)) for alpha in sweep.alphas]
    found = [sdpa(place), *ours, Method("FlexAttention", _flex)]
    release = adasplash_version()
    if release is not None:
        found.append(Method(f"AdaSplash {release}, alpha 1.5", _adasplash))
    return found


def sdpa(place: Place) -> Method:
    return Method("SDPA (flash)", _flash) if place.flash else Method("SDPA", _sdpa)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(query, key, value)


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def _ours(alpha: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fl.attention(query, key, value, fl.Tsallis(alpha), is_causal=True)


def _flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = _causal_blocks(query.shape[-2], str(query.device))
    output: Tensor = _compiled_flex(query.shape[-2])(query, key, value, block_mask=mask)
    return output


@cache
def _causal_blocks(tokens: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(sees, None, None, tokens, tokens, device=device)


@cache
def _compiled_flex(tokens: int) -> Callable[..., Any]:
    """One for each length, and no trace of others: torch gives up after eight for one function."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def adasplash_version() -> str | None:
    try:
        return version("adasplash")
    except PackageNotFoundError:
        return None


def _adasplash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tokens = query.shape[-2]
    if tokens & (tokens - 1):
        raise NotImplementedError(f"AdaSplash takes powers of two, got {tokens} tokens")
    from adasplash import adasplash

    output: Tensor = adasplash(query, key, value, alpha=1.5, is_causal=True)
    return output
