"""Switch a loaded model, and make sure that nothing of it stays on softmax."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from torch import Tensor, nn

from fenchel.hf.library import VERSION, PreTrainedConfig, PreTrainedModel
from fenchel.hf.recipe import read_regularizers
from fenchel.hf.registry import derived_name, names, register, register_per_module
from fenchel.hf.translate import REGULARIZER_ATTRIBUTE
from fenchel.nn.conversion import choose
from fenchel.regularizers.contract import Regularizer

M = TypeVar("M", bound=nn.Module)
Held = Regularizer | nn.Module
RegularizerChoice = str | Path | Mapping[str, Any] | Held | Callable[[nn.Module], Held]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # how a forward of transformers asks for its function
_OUTSIDE = {"torch", "builtins", "abc", "typing"}
_OTHER_WAYS = (
    "fenchel.nn.convert(model, regularizer) is for torch.nn.MultiheadAttention and the layers made "
    "of it, fenchel.replace_sdpa for what calls scaled_dot_product_attention"
)
_NORMALISES = re.compile(r"softmax\(|scaled_dot_product_attention\(", re.IGNORECASE)


def convert(model: M, regularizer: RegularizerChoice) -> M:
    """The model itself, every attention in it switched to the regulariser.

    >>> hf.convert(model, Tsallis(1.3))              # registered as "fenchel:tsallis-1.3"
    >>> hf.convert(model, "fenchel:entmax15")
    >>> hf.convert(model, lambda layer: LearnedTsallis(layer.config.num_attention_heads))
    >>> hf.convert(model, Path("audit/recipe.json"))            # an alpha for every head

    Weights are untouched, and `model.set_attn_implementation("sdpa")` leads back. The model gets a
    configuration of its own, so that others made from the same one stay as they are. transformers
    does not save the choice: pass `attn_implementation=` to `from_pretrained`, or convert again.

    model: a transformers model, or a module that holds some. Refused, before anything changes, if
        any attention in it would stay as it is.
    regularizer: a `Regularizer`, or a registered name; or what learns: a regulariser that holds
        tensors, a module whose `forward()` returns one, or a function of the attention module that
        makes one for each. Each attention then holds it as a submodule, `fenchel_regularizer`.
        Or a recipe: what `lens.Audit.recipe()` returns, or the path of the JSON file that
        `fenchel audit` wrote.
    """
    register()
    roots = _roots(model)
    attentions = attention_modules(model)
    name, regularizers = _resolve(regularizer, attentions)
    shared = _copy_configs(model)
    for root in roots:
        root.set_attn_implementation(name)
    missed = [
        path for path, module in attentions.items() if module.config._attn_implementation != name
    ]
    if missed:
        for module, attribute, config in shared:
            setattr(module, attribute, config)
        raise RuntimeError(
            f"transformers {VERSION} did not switch {_some(missed)}; the model is as it was"
        )
    for path, module in attentions.items():
        _hold(module, regularizers.get(path))
    return model


def _resolve(
    regularizer: RegularizerChoice, attentions: dict[str, Any]
) -> tuple[str, dict[str, nn.Module]]:
    """The name to switch to, and the regularisers that attentions will hold under it."""
    if isinstance(regularizer, Path | Mapping) or _names_file(regularizer):
        recipe = read_regularizers(regularizer, attentions)
        return register_per_module(), {
            path: choose(omega, attentions[path]) for path, omega in recipe.items()
        }
    if isinstance(regularizer, str):
        if regularizer not in names():
            raise ValueError(
                f"unknown name {regularizer!r}; known are {', '.join(names())}. Add one with "
                "fenchel.hf.register(name, regularizer), or pass the regulariser itself"
            )
        return regularizer, {}
    if isinstance(regularizer, Regularizer) and not _holds_tensors(regularizer):
        name = derived_name(regularizer)
        register(name, regularizer)
        return name, {}
    regularizers = {path: choose(regularizer, module) for path, module in attentions.items()}
    return register_per_module(), regularizers


def _names_file(regularizer: object) -> TypeGuard[str]:
    """A string that is no registered name but ends as recipes do."""
    return isinstance(regularizer, str) and regularizer.endswith(".json")


def _holds_tensors(regularizer: Regularizer) -> bool:
    return any(isinstance(setting, Tensor) for setting in vars(regularizer).values())


def _hold(module: nn.Module, regularizer: nn.Module | None) -> None:
    """Beside the parameters of the attention; None: whatever it held is dropped."""
    if regularizer is None:
        module._modules.pop(REGULARIZER_ATTRIBUTE, None)
        return
    first = next(module.parameters(), None)
    regularizer = regularizer if first is None else regularizer.to(first.device)
    module.add_module(REGULARIZER_ATTRIBUTE, regularizer)


def _copy_configs(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Copies in place of every configuration within, one for one; and what was there before."""
    before = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    copied: dict[int, Any] = {}  # so that what was one object stays one
    for module, name, config in before:
        setattr(module, name, copy.deepcopy(config, copied))
    return before


def _roots(model: nn.Module) -> list[Any]:
    """The outermost transformers models."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in _roots(child)]


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """Path and module of everything that asks transformers for its attention function."""
    named = model.named_modules()
    modules = [(path, module) for path, module in named if REGULARIZER_ATTRIBUTE not in path]
    kinds = {type(module) for _, module in modules}
    asking = {kind for kind in kinds if _INTERFACE in _source(kind.forward)}
    alone = {kind for kind in kinds - asking if _computes_alone(kind)}
    attentions: dict[str, Any] = {}
    left: list[str] = []
    for path, module in modules:
        if type(module) in asking and hasattr(module, "config"):
            attentions[path] = module
        elif type(module) in asking | alone:
            left.append(f"{path} ({type(module).__name__})")
    if left:
        raise ValueError(
            f"{type(model).__name__} computes attention of its own in {_some(left)}: looked for "
            f"{_INTERFACE} in each forward of transformers {VERSION}. It would stay on softmax; "
            f"{_OTHER_WAYS}, and model.set_attn_implementation switches the rest alone"
        )
    if not attentions:
        raise ValueError(
            f"found no attention in {type(model).__name__}: looked through its modules for a "
            f"forward that uses {_INTERFACE}, in a transformers model; {_OTHER_WAYS}"
        )
    _check_semantics(model)
    return attentions


def _check_semantics(model: nn.Module) -> None:
    """Refuse models whose attention is more than scores, a mask and an expectation."""
    special = {
        type(module).__name__
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and not module._supports_sdpa
    }
    if special:
        raise ValueError(
            f"{_some(sorted(special))} declares that scaled_dot_product_attention cannot compute "
            "its attention (_supports_sdpa is False), and fenchel.attention means the same"
        )


def _computes_alone(kind: type[nn.Module]) -> bool:
    """An attention that normalises without asking, or whose source cannot be read; wrappers
    around one do neither."""
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if not re.search("attention|attn", kind.__name__, re.IGNORECASE):
        return False
    bases = (base for base in kind.__mro__ if base.__module__.split(".")[0] not in _OUTSIDE)
    sources = [_source(base) for base in bases]
    return any(not source or _NORMALISES.search(source) for source in sources)


@lru_cache(1024)  # reading a source takes milliseconds, and an audit asks for every batch
def _source(thing: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(thing))
    except (OSError, TypeError):  # written at a prompt, or not in Python
        return ""


def _some(items: list[str]) -> str:
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
