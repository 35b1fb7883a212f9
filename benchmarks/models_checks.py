"""One class of models: is its attention by fenchel what it should be?

`fenchel:softmax` is compared with the model's own attention, `fenchel:entmax15` with the package
entmax put in place of softmax; outputs and the gradients of all parameters, in float64.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

import fenchel as fl
from benchmarks.models import CRASHES, DIFFERENT, EQUAL, NOT_RUN, REFUSED, STAYS
from benchmarks.models_reference import Watch, entmax15, in_double, softmax
from benchmarks.models_testers import Tester, brief, first_line

TOLERANCE = 1e-10  # relative; float64 rounds at 1e-16, and models have tens of steps
_NOTHING = 1e-4  # of the largest gradient: those below are compared with that
_GAIN = 1.2  # of linear layers, so that scores are wide enough for entmax to drop keys
_ASIDE = re.compile("past_key_values|attentions")
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Outcome:
    """status: a word of `benchmarks.models`. own: what the model attends with, sdpa or eager.
    softmax, entmax: largest relative differences."""

    status: str
    why: str = ""
    own: str = ""
    softmax: float | None = None
    entmax: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}


class Run(NamedTuple):
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


class Stopped(Exception):
    """The comparison ends here, with this outcome."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.outcome = Outcome(status, why)


def check(tester: Tester, tell: Tell = lambda stage: None) -> Outcome:
    """tell: hears what begins, "own" (the model as it is) or "fenchel"."""
    tell("own")
    with in_double() as include:
        try:
            return _check(*_build(tester, include), tell)
        except Stopped as stopped:
            return stopped.outcome


def _check(model: Any, inputs: dict[str, Any], tell: Tell) -> Outcome:
    own = str(getattr(model.config, "_attn_implementation", None) or "eager")
    watch = Watch(softmax)
    expected = _attempt(NOT_RUN, own, lambda: run(copy.deepcopy(model), inputs, watch))
    if not watch.seen:
        raise Stopped(NOT_RUN, "no attention was seen")
    _refuse_nothing(expected)
    sparse, note = _reference(model, inputs, expected)
    tell("fenchel")
    soft = _converted(model, inputs, fl.Shannon(), expected)
    if soft > TOLERANCE:
        return _different("softmax", own, soft)
    hard = _converted(model, inputs, "fenchel:entmax15", sparse)
    if hard > TOLERANCE:
        left = _left(model, inputs)
        if left:
            return Outcome(STAYS, left, own, _digits(soft), _digits(hard))
        return _different("entmax", own, soft, hard)
    return Outcome(EQUAL, note, own, _digits(soft), _digits(hard))


def _digits(error: float) -> float | None:
    return float(f"{error:.1e}") if math.isfinite(error) else None


def _different(what: str, own: str, *errors: float) -> Outcome:
    told = what if all(map(math.isfinite, errors)) else f"{what} is not finite, or of another shape"
    return Outcome(DIFFERENT, told, own, *map(_digits, errors))


def _attempt(status: str, what: str, action: Callable[[], Any]) -> Any:
    """The result; or the end, if it raises."""
    try:
        return action()
    except Exception as problem:  # of a model: anything
        raise Stopped(status, f"{what}: {brief(problem)}") from problem


def _build(tester: Tester, include: Callable[[], None]) -> tuple[Any, dict[str, Any]]:
    """The tester's model in evaluation mode with wider weights, and its inputs, in float64."""
    _seed()
    config, inputs = _attempt(NOT_RUN, "the tester", tester.prepare)
    model = _attempt(NOT_RUN, "the model", lambda: tester.model_class(config))
    include()  # building may have loaded further files
    model = model.double().eval()
    _widen(model)
    if model._supports_sdpa and model.config._attn_implementation != "sdpa":
        with suppress(ValueError):  # a part of it that does not attend may lack sdpa
            model.set_attn_implementation("sdpa")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # others take no float64
    return model, _to_double(inputs)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  testers and models use it
    torch.manual_seed(0)


@torch.no_grad()
def _widen(model: nn.Module) -> None:
    """Wide scores, and no ties: tokens that all begin at zero would leave a maximum to rounding."""
    g = torch.Generator().manual_seed(1)
    for module in model.modules():
        linear = isinstance(module, nn.Linear)
        if linear or type(module).__name__ == "Conv1D":
            weight, bias = cast(Tensor, module.weight), cast(Tensor | None, module.bias)
            weight.normal_(0.0, _GAIN / weight.shape[1 if linear else 0] ** 0.5, generator=g)
            if bias is not None:
                bias.normal_(0.0, 0.1, generator=g)
    for parameter in model.parameters():
        if parameter.ndim > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.normal_(0.0, 0.1, generator=g)


def _to_double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _to_double(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_to_double(item) for item in value)
    return value


# ---- running


def run(model: nn.Module, inputs: dict[str, Any], watch: Watch | None = None) -> Run:
    """Outputs, and gradients of their sum with fixed random weights."""
    _seed()  # some models draw numbers even in evaluation mode
    with watch or nullcontext():
        answer = model(**copy.deepcopy(inputs))
    outputs = list(_tensors(answer))
    loss = torch.zeros(())
    g = torch.Generator().manual_seed(2)
    for output in outputs:
        weights = torch.randn(output.shape, generator=g)
        finite = output.isfinite()
        loss = loss + (output[finite] * weights[finite]).sum()
    if loss.requires_grad:
        loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Run([output.detach() for output in outputs], gradients)


def _tensors(answer: Any) -> Iterator[Tensor]:
    """Floating tensors of an output, in order; without caches, and without weights, which only
    some attentions return."""
    if isinstance(answer, Tensor):
        if answer.is_floating_point():
            yield answer
    elif isinstance(answer, Mapping):
        for name, value in answer.items():
            if not _ASIDE.search(str(name)):
                yield from _tensors(value)
    elif isinstance(answer, list | tuple):
        for value in answer:
            yield from _tensors(value)


def _refuse_nothing(expected: Run) -> None:
    """A comparison of nothing could not fail."""
    if not any(bool(output.isfinite().any()) for output in expected.outputs):
        raise Stopped(NOT_RUN, "its own attention gives no finite output")


def _reference(model: Any, inputs: dict[str, Any], expected: Run) -> tuple[Run, str]:
    """The package entmax in place of softmax: in eager attention, or where that is not what the
    model computes by itself, in scaled_dot_product_attention written out; and a note of this."""
    eager, note = copy.deepcopy(model), ""
    try:
        eager.set_attn_implementation("eager")
        apart = difference(run(copy.deepcopy(eager), inputs, Watch(softmax)), expected)
        note = f"its eager attention differs from its own by {apart:.1e}"
    except Exception as problem:
        apart, note = math.inf, f"no eager attention: {brief(problem)}"
    chosen, note = (eager, "") if apart <= TOLERANCE else (copy.deepcopy(model), note)
    watch = Watch(entmax15, everywhere=True)
    return _attempt(NOT_RUN, "with entmax", lambda: run(chosen, inputs, watch)), note


def _converted(model: Any, inputs: dict[str, Any], regularizer: Any, expected: Run) -> float:
    """The largest relative difference of the converted model."""
    changed = copy.deepcopy(model)
    try:
        fl.hf.convert(changed, regularizer)
    except Exception as problem:
        raise Stopped(REFUSED, first_line(problem)) from problem
    return difference(_attempt(CRASHES, "forward", lambda: run(changed, inputs)), expected)


def _left(model: Any, inputs: dict[str, Any]) -> str:
    """Attentions that torch still computes."""
    changed, watch = fl.hf.convert(copy.deepcopy(model), "fenchel:entmax15"), Watch()
    run(changed, inputs, watch)
    if not watch.ours:
        return f"all {watch.seen} attentions"
    return f"{watch.seen} attentions" if watch.seen else ""


# ---- comparing


def difference(ours: Run, expected: Run) -> float:
    """Largest |ours - expected|, relative to the largest number of the same tensor."""
    if len(ours.outputs) != len(expected.outputs):
        return float("inf")
    names = ours.gradients.keys() | expected.gradients.keys()
    pairs = [(_of(ours, name, expected), _of(expected, name, ours)) for name in sorted(names)]
    outputs = list(zip(ours.outputs, expected.outputs, strict=True))
    return max(_largest(outputs), _largest(pairs))


def _of(run: Run, name: str, other: Run) -> Tensor:
    """A parameter that the loss did not reach has gradient zero."""
    gradient = run.gradients.get(name)
    return torch.zeros_like(other.gradients[name]) if gradient is None else gradient


def _largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Numbers that are not finite where they should be are infinitely far; what was not finite
    before is not compared."""
    if any(ours.shape != expected.shape for ours, expected in pairs):
        return float("inf")
    sizes = [_size(expected) for _, expected in pairs]
    least = _NOTHING * max(sizes, default=0.0)
    worst = 0.0
    for (ours, expected), size in zip(pairs, sizes, strict=True):
        finite = expected.isfinite()
        gap = (ours[finite] - expected[finite]).abs().nan_to_num(nan=float("inf"))
        if gap.numel() and float(gap.max()) > 0:
            worst = max(worst, float(gap.max()) / max(size, least, 1e-300))
    return worst


def _size(expected: Tensor) -> float:
    finite = expected[expected.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
