"""The one place that chooses which implementation runs, and can say why.

A *path* is one implementation of a computation. Callers list their paths, the fastest first; the
first one that nothing speaks against runs. The reasons against a path are written here, as
sentences for `fenchel.explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fenchel._kernels import library
from fenchel._kernels.choice import CHOSEN, GPU, NATIVE, TORCH, Reason, chosen_kernels, other_than
from fenchel._kernels.gpu import device
from fenchel._kernels.tsallis import EDGE_ABOVE
from fenchel._numerics import (
    at_hand,
    compute_dtype,
    exported_to_onnx,
    has,
    readable,
    transformed,
    where,
)
from fenchel.priors.contract import Structure

__all__ = ["Reason", "chosen_kernels"]  # beside what is written here

_FULL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Path:
    """One way to compute something. against: asked only when faster paths are ruled out."""

    name: str
    against: Callable[[], Reason]
    run: Callable[[], Any]


@dataclass(frozen=True)
class Route:
    """What `fenchel.explain` returns: the path that runs, and why each faster one does not."""

    path: str
    against: dict[str, str]

    def __str__(self) -> str:
        lines = [f"runs on: {self.path}"]
        return "\n".join([*lines, *(f"not on {path}: {why}" for path, why in self.against.items())])


def choose(paths: Sequence[Path]) -> tuple[Path, Route]:
    """The first path that nothing speaks against; the last one always runs."""
    against: dict[str, str] = {}
    for path in paths[:-1]:
        reason = path.against()
        if reason is None:
            return path, Route(path.name, against)
        against[path.name] = reason
    return paths[-1], Route(paths[-1].name, against)


@contextmanager
def use(kernels: str) -> Iterator[None]:
    """Inside the block, compute with these kernels: "native" (C++ on the CPU), "torch" or "gpu".

    >>> with fl.use("torch"):
    ...     fl.attention(q, k, v, fl.Tsallis(1.5))      # torch's own operations alone

    "native" raises where the native library is not built, "gpu" where triton is missing. Calls that
    the chosen kernels cannot do still run in torch. CUDA tensors use the GPU kernels without being
    asked; with TRITON_INTERPRET=1 in the environment, "gpu" runs them on CPU tensors, to check
    them where there is no device. The block holds for the thread that entered it.
    """
    if kernels not in (NATIVE, TORCH, GPU):
        raise ValueError(f'kernels must be "native", "torch" or "gpu", got {kernels!r}')
    if kernels == NATIVE and library.loaded() is None:
        raise RuntimeError(f"the native kernels are not there: {library.why_absent()}")
    if kernels == GPU:
        device.check_available()
    token = CHOSEN.set(kernels)
    try:
        yield
    finally:
        CHOSEN.reset(token)


def against_native(
    like: Tensor, *, under_compile: bool = True, under_transform: bool = False
) -> Reason:
    """What holds for every native kernel."""
    off = against_library()
    if off is not None:
        return off
    if like.device.type != "cpu":
        return f"native kernels run on the CPU, the operands are on {like.device}"
    if like.layout != torch.strided:
        return f"native kernels read dense tensors, got {like.layout}"
    if exported_to_onnx():
        return "ONNX knows torch's operations alone"
    if not under_transform and transformed():
        return "a transform (vmap, jvp, torch.func) is active, which only torch's operations take"
    if not under_compile and torch.compiler.is_compiling():
        return "torch.compile traces this call in torch's operations"
    return None


def against_library() -> Reason:
    """What speaks against the native library, whatever it is asked for."""
    other = other_than(NATIVE)
    if other is not None:
        return other
    if library.loaded() is None or (chosen_kernels() is None and library.is_disabled()):
        return library.why_absent()
    return None


# Compiled code keeps the choice that it was made with. This is the mark of torch.compiler's
# assume_constant_result, which itself would load the whole compiler with the package.
against_library._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe_native() -> tuple[bool, str]:
    """Whether native kernels run at all here, and why, for `fenchel info`."""
    reason, native = against_native(torch.empty(0)), library.loaded()
    if reason is not None or native is None:
        return False, reason or library.why_absent()
    return True, f"in use, {native.variant} instructions"


def against_rows(scores: Tensor, family: str = "tsallis") -> Reason:
    """The kernels of `row_weights` and its fellows: native ones, or those in Triton."""
    if scores.dtype not in _FULL or scores.numel() == 0:
        return "rows of scores must be float32 or float64, and not empty"
    if scores.device.type == "cpu" and not device.is_asked_for():
        return against_native(scores)
    if family == "fused":
        return "runs of equal weight have no kernel in Triton: torch's operations find them"
    if scores.dtype != torch.float32:
        return f"GPU kernels of rows compute in float32, got {scores.dtype}"
    return device.against_gpu(scores)


_MOST_AVERAGED = 1024  # keys; beyond, torch's fused attention has blocks of them


def against_average(like: Tensor, groups: int, keys: int) -> Reason:
    """The kernel of `average_attention`: whether it can be used, and pays."""
    if like.dtype not in _FULL:
        return f"averages are computed in float32 or float64, got {like.dtype}"
    if not 0 < keys <= _MOST_AVERAGED:
        return f"it pays for 1 to {_MOST_AVERAGED} keys, got {keys}"
    reason = against_native(like, under_compile=False)
    if reason is None and groups < torch.get_num_threads():
        return f"threads share groups: {groups} of them are too few"
    return reason


def against_continuous(like: Tensor) -> Reason:
    """The kernels of densities and mixtures; on `meta`, for shapes alone, they always run."""
    return None if like.device.type == "meta" else against_native(like, under_transform=True)


# ---- attention

# Log of the largest mass in a row, either way: far from one the kernels' 1 + eps d loses digits.
_WIDEST = {torch.float32: 7.0, torch.float64: 12.0}
# Below it a mass is no float32 any more, and near softmax a large score could make up for it.
_SMALLEST = -80.0


def against_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, base: Tensor | None
) -> Reason:
    """The fused kernels of Tsallis attention. base: without the copies of broadcasting."""
    reason = _against_operands(query, key, value) or _against_base(query, base)
    return reason or against_native(query)


WIDEST_HEAD = 256  # components that the GPU's kernels hold of a token


def against_gpu_attention(
    query: Tensor, key: Tensor, value: Tensor, base: Tensor | None, alpha: float | Tensor
) -> Reason:
    """The same on a GPU, in Triton."""
    reason = device.against_gpu(query) or _against_operands(query, key, value)
    if reason is not None:
        return reason
    if query.dtype == torch.float64:
        return "GPU kernels compute in float32, the operands are float64"
    widest = max(query.shape[-1], value.shape[-1])
    if widest > WIDEST_HEAD:
        return f"GPU kernels take {WIDEST_HEAD} components of a head at most, got {widest}"
    if isinstance(alpha, Tensor):
        # On a device nobody waits for the answer: the kernels give NaN to rows of other alphas.
        if at_hand(alpha) and has(alpha > 2):
            return "GPU kernels take alpha from 1 to 2, some of these are larger"
    elif not 1 < alpha <= 2:
        return f"GPU kernels take alpha above 1 and at most 2, got {alpha:g}"
    return _against_base(query, base)


def _against_operands(query: Tensor, key: Tensor, value: Tensor) -> Reason:
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "there is nothing to compute: an axis has length 0"
    return None


def _against_base(query: Tensor, base: Tensor | None) -> Reason:
    """base: without the copies of broadcasting."""
    if base is None or base.dtype == torch.bool:
        return None
    if base.requires_grad:
        return "the derivative in a base that trains is taken in torch's operations"
    if not readable(base):
        return "the masses of the base cannot be read here (compile, vmap or meta tensors)"
    if has(~(base >= 0)):
        return "the base holds masses that are negative or NaN"
    dtype = compute_dtype(query.dtype)
    if base.dtype == torch.float64 != dtype:
        return f"the base holds masses that {dtype} does not"
    return None


def against_masses(log_mass: Tensor, alpha: float | Tensor, some_hidden: bool = False) -> Reason:
    """Masses must be such that the kernels can multiply them as they are.

    some_hidden: a row may see any of its keys, so that any mass may be the largest that it sees.
    """
    largest = log_mass.amax(-1)
    hidden = log_mass == -torch.inf
    least = where(~hidden, log_mass, torch.inf).amin(-1) if some_hidden else largest
    wide = (largest >= _WIDEST[log_mass.dtype]) | (least <= -_WIDEST[log_mass.dtype])
    if has((wide & (largest != -torch.inf)) | largest.isnan()):
        return f"the largest mass of a row must lie within exp(±{_WIDEST[log_mass.dtype]:g})"
    if log_mass.dtype == torch.float32:
        lost = (log_mass < _SMALLEST) & ~hidden
        near_softmax = torch.as_tensor(alpha).detach() <= 1 + EDGE_ABOVE
        if has(lost.any() & near_softmax.any()):
            return f"a mass is below exp({_SMALLEST:g}), which float32 cannot hold near alpha = 1"
    return None


def against_structured_masses(
    masses: Structure, seen: Structure | None, dtype: torch.dtype, alpha: float | Tensor
) -> Reason:
    """The same for masses by position, by key and of a sink, from bounds linear in n.

    seen: which keys every query sees; None where a mask may hide any of them.
    """
    tables = [t for t in (masses.relative, masses.of_key, masses.sink) if t is not None]
    if not tables:
        return None
    if not readable(*tables):
        return "the masses of the prior cannot be read here (compile, vmap or meta tensors)"
    tables = [table.detach().to(dtype) for table in tables]
    if any(has(table.isnan() | (table == torch.inf)) for table in tables):
        return "the prior holds masses that are NaN or infinite"
    by_position = [t for t in (masses.relative, masses.of_key) if t is not None]
    most = sum(float(table.detach().amax()) for table in by_position)
    if masses.sink is not None:
        most = max(most, float(masses.sink.detach().abs().amax()))
    least = _least_of_largest(masses, seen)
    if not -_WIDEST[dtype] < least <= most < _WIDEST[dtype]:
        return f"the largest mass of a row must lie within exp(±{_WIDEST[dtype]:g})"
    smallest = sum(_smallest(table) for table in by_position)
    near_softmax = bool((torch.as_tensor(alpha).detach() <= 1 + EDGE_ABOVE).any())
    if dtype == torch.float32 and near_softmax and smallest < _SMALLEST:
        return f"a mass is below exp({_SMALLEST:g}), which float32 cannot hold near alpha = 1"
    return None


def _smallest(table: Tensor) -> float:
    """Of the logs of masses that are there."""
    there = table.detach()[table.detach() > -torch.inf]
    return float(there.amin()) if there.numel() else 0.0


def _least_of_largest(masses: Structure, seen: Structure | None) -> float:
    """A lower bound on the log of the largest mass that any row sees, if it sees any."""
    least = 0.0
    some_hidden = masses.of_key is not None and has(masses.of_key == -torch.inf)
    by_all = None if seen is None or some_hidden else _seen_by_all(seen)
    if masses.relative is not None:
        table = masses.relative.detach()
        least += _smallest(table if by_all is None else table[..., by_all].amax(-1))
    if masses.of_key is not None:
        table = masses.of_key.detach()
        everywhere = seen is not None and seen.says_nothing and masses.relative is None
        least += _smallest(table.amax(-1) if everywhere else table)
    return least


def _seen_by_all(seen: Structure) -> slice | None:
    """Relative positions, among all of them, that every query sees; None if there is none."""
    first = max(0, seen.lowest or 0)
    last = seen.keys - seen.queries
    last = last if seen.highest is None else min(last, seen.highest)
    if first > last:
        return None
    if seen.start is not None or seen.stop is not None:
        last = first
        place = torch.arange(seen.queries) + first
        late = seen.start is not None and has(seen.start > place)
        if late or (seen.stop is not None and has(seen.stop <= place)):
            return None
    return slice(first + seen.queries - 1, last + seen.queries)


def against_sdpa(
    operands: tuple[Tensor, Tensor, Tensor],
    *,
    bias: Tensor | None,
    base: Tensor | None,
    prior_trains: bool | None,
    dropout: bool,
    temperature: float | Tensor,
) -> Reason:
    """Torch's fused attention: first derivatives in query, key and value, biases in full precision.

    prior_trains: None without a prior.
    """
    query = operands[0]
    if transformed():
        return "a transform (vmap, jvp, torch.func) is active, which only plain operations take"
    if dropout:
        return "torch's dropout works on the whole n x n matrix"
    if isinstance(temperature, Tensor):
        return "torch's attention has one temperature, a number"
    if any(0 in operand.shape for operand in operands) or not finite(*operands):
        return "an operand is empty or not finite: torch spreads NaN of hidden keys to every query"
    if (base is not None or prior_trains is not None) and query.dtype not in _FULL:
        return f"a base needs full precision, the query is {query.dtype}"
    if bias is not None and (bias.requires_grad or bias.dtype != query.dtype):
        return "torch has no derivative in a bias, and wants it in the dtype of the query"
    if prior_trains:
        return "the prior trains, and torch has no derivative in a bias"
    if base is None or base.dtype == torch.bool:
        return None
    if base.requires_grad or base.dtype != query.dtype:
        return "the base trains, or has another dtype than the query"
    return "the base holds masses that are no finite numbers" if has(_unfit(base)) else None


def _unfit(base: Tensor) -> Tensor:
    return ~((base >= 0) & (base < torch.inf))


def finite(*tensors: Tensor) -> bool:
    """Neither NaN nor infinity, as far as Python may look. A sum tells, in one pass."""
    dtypes = (compute_dtype(tensor.dtype) for tensor in tensors)
    sums = [x.detach().sum(dtype=dtype) for x, dtype in zip(tensors, dtypes, strict=True)]
    return not has(~torch.stack(sums).isfinite())
