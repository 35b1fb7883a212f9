"""What a converted attention carries: its regulariser, where it has one of its own, and a mark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.hf.library import AttentionInterface
from fenchel.hf.names import KINDS, PER_MODULE
from fenchel.hf.recipe import FORMAT, match_paths
from fenchel.nn.regularizer import HeldRegularizer, LearnedTsallis, as_module

REGULARIZER_ATTRIBUTE = "fenchel_regularizer"  # a submodule of the attention
CONFIG_ATTRIBUTE = "fenchel_attention"  # of a configuration: how to make what attentions hold
CONFIG_MASKS = "fenchel_masks"  # in a configuration: "eager" where the model reads such masks
_MARK = "_fenchel_mark"


class Mark:
    """Says that a module was converted, and to which name. Whoever unpickles it, in whatever
    process, has that name registered."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        bound = getattr(AttentionInterface().get(self.name), "regularizer", None)
        return {"name": self.name, "bound": bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from fenchel.hf.registry import register

        self.name = state["name"]
        if state["bound"] is not None and self.name not in AttentionInterface():
            register(self.name, state["bound"])


def is_marked(module: nn.Module) -> bool:
    """Whether the module was converted."""
    return _MARK in vars(module)


def hold(module: nn.Module, regularizer: nn.Module | None, name: str) -> None:
    """Beside the parameters of the attention; None: whatever it held is dropped."""
    module.__dict__[_MARK] = Mark(name)
    module._modules.pop(REGULARIZER_ATTRIBUTE, None)
    if regularizer is not None:
        tensors = (*regularizer.parameters(), *regularizer.buffers())
        if not any(x.is_meta for x in tensors):  # else weights follow
            regularizer.to(_device(module))
        regularizer.train(module.training)
        regularizer._non_persistent_buffers_set.clear()  # saved with the weights, and loaded
        module.add_module(REGULARIZER_ATTRIBUTE, regularizer)


def check_saved(model: nn.Module, regularizers: Iterable[nn.Module]) -> None:
    """Refuse what trains beside an adapter that exists: its files would not have it."""
    adapted = any(hasattr(module, "peft_config") for module in model.modules())
    if adapted and any(x.requires_grad for held in regularizers for x in held.parameters()):
        raise ValueError(
            "the model has an adapter already, which would be saved without a regulariser that "
            "trains; convert the model first, then get_peft_model(model, LoraConfig(..., "
            f"modules_to_save=[{REGULARIZER_ATTRIBUTE!r}]))"
        )


def _device(module: nn.Module) -> torch.device:
    """Where the module computes. Offloaded weights are nowhere until they are used."""
    hook = getattr(module, "_hf_hook", None)
    chosen = getattr(hook, "execution_device", None)
    places = (x.device for x in module.parameters() if x.device.type != "meta")
    return torch.device(chosen) if chosen is not None else next(places, torch.device("cpu"))


def drop(model: nn.Module) -> None:
    """Everything that attentions hold."""
    for module in model.modules():
        module._modules.pop(REGULARIZER_ATTRIBUTE, None)
        module.__dict__.pop(_MARK, None)


def describe(regularizers: Mapping[str, nn.Module]) -> dict[str, Any] | None:
    """For a configuration file; None where a module cannot be made again from numbers."""
    entries = {path: _entry(module) for path, module in regularizers.items()}
    return None if None in entries.values() else {"format": FORMAT, "attentions": entries}


def _entry(module: nn.Module) -> dict[str, Any] | None:
    if type(module) is LearnedTsallis:
        return {"learned": {"heads": module.raw.shape[0], "upper": module.upper}}
    omega = module() if type(module) is HeldRegularizer else None
    kind = type(omega).__name__.lower()
    if KINDS.get(kind) is not type(omega):  # of the user's own make
        return None
    tensors = {name: x for name, x in vars(omega).items() if isinstance(x, Tensor)}
    if any(x.is_meta for x in tensors.values()):
        return None
    return {
        "kind": kind,
        "settings": {name: x for name, x in vars(omega).items() if name not in tensors},
        "tensors": {name: x.tolist() for name, x in tensors.items()},
        "trained": [name for name, _ in module.named_parameters()],
    }


def rebuild(description: Mapping[str, Any], attentions: Mapping[str, nn.Module]) -> None:
    """Give attentions what a configuration says; the state dict brings the numbers that train."""
    if description.get("format") != FORMAT:
        raise ValueError(
            f"the configuration's {CONFIG_ATTRIBUTE} is of another format than {FORMAT!r}"
        )
    entries = description["attentions"]
    names = match_paths(list(entries), list(attentions))
    for path, entry in entries.items():
        module = attentions[names[path]]
        hold(module, _from_entry(entry), PER_MODULE)


def _from_entry(entry: Mapping[str, Any]) -> nn.Module:
    if "learned" in entry:
        upper = entry["learned"]["upper"]
        return LearnedTsallis(entry["learned"]["heads"], (1 + upper) / 2, upper)
    if "kind" not in entry:
        raise ValueError(
            f"the configuration's {CONFIG_ATTRIBUTE} is of an older fenchel; load the model "
            "without attn_implementation, convert it as before, and then load the state dict"
        )
    settings = {name: _as_tuple(x) for name, x in entry["settings"].items()}
    for name, numbers in entry["tensors"].items():
        trained = name in entry["trained"]
        # Weights are loaded later, also where they have no numbers yet; settings must have theirs.
        tensor = torch.tensor(numbers, device=None if trained else "cpu")
        settings[name] = nn.Parameter(tensor) if trained else tensor
    return as_module(KINDS[entry["kind"]](**settings))


def _as_tuple(setting: Any) -> Any:
    """JSON has lists only."""
    return tuple(setting) if isinstance(setting, list) else setting
