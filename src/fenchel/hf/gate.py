"""Where transformers decides about a name: ours are found, and nothing stays behind in silence.

transformers takes any registered name for any model, also for one that never asks. Four of its
methods are wrapped once, when `fenchel.hf` is imported; other names pass through untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from fenchel.hf import in_place
from fenchel.hf.cache import use_cache
from fenchel.hf.convert import modules_that_ask
from fenchel.hf.held import CONFIG_ATTRIBUTE, CONFIG_MASKS, REGULARIZER_ATTRIBUTE, drop, rebuild
from fenchel.hf.library import GenerationMixin, PreTrainedModel
from fenchel.hf.names import PER_MODULE, PREFIX
from fenchel.hf.registry import resolve_name


def install() -> None:
    """Once; again it does nothing."""
    for (owner, name), wrap in _WRAPPED.items():
        method = getattr(owner, name)
        if not hasattr(method, "_fenchel_wraps"):
            wrapped: Any = wraps(method)(wrap(method))
            wrapped._fenchel_wraps = True
            setattr(owner, name, wrapped)


def _name_of(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", None) or "")


def _resolving(method: Any) -> Any:
    """`get_correct_attn_implementation`: a name that says its numbers needs no registering."""

    def choose(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> Any:
        if isinstance(requested_attention, str):
            resolve_name(requested_attention)
        return method(self, requested_attention, *args, **options)

    return choose


def _checking(method: Any) -> Any:
    """`set_attn_implementation`: what would stay on softmax is refused; another name leads back."""

    def switch(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> Any:
        ours = [name for name in tree_leaves(attn_implementation) if _is_ours(name)]
        for name in ours:
            resolve_name(name)
        if any(name != PER_MODULE for name in ours):
            modules_that_ask(self)
        if ours:
            _keep_masks(self)
        before = [part for part in _parts(self) if _is_ours(_name_of(part))]
        result = method(self, attn_implementation, *args, **options)
        if isinstance(attn_implementation, str) and not ours:
            lead_back(self)
        elif isinstance(attn_implementation, Mapping):  # a name for each part
            for part in [self, *before] if "" in attn_implementation else before:
                if not any(_is_ours(_name_of(inner)) for inner in _parts(part)):
                    lead_back(part)
                    vars(self.config).pop(CONFIG_ATTRIBUTE, None)  # no longer true of all
        return result

    return switch


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def _parts(model: nn.Module) -> list[Any]:
    """The models of transformers within, itself among them."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _keep_masks(model: Any) -> None:
    """A model without sdpa reads the masks of eager attention."""
    if not model._supports_sdpa:
        setattr(model.config, CONFIG_MASKS, "eager")


def lead_back(model: nn.Module) -> None:
    """Attentions hold nothing any more, and run the forward that they had."""
    drop(model)
    for module in model.modules():
        in_place.restore(module)
        config = vars(module).get("config")
        if config is not None:
            vars(config).pop(CONFIG_ATTRIBUTE, None)
            vars(config).pop(CONFIG_MASKS, None)


def _finishing(method: Any) -> Any:
    """`post_init`, the end of every model's constructor: the same check, and what a saved
    configuration says that attentions hold."""

    def finish(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        if _is_ours(_name_of(self)):
            _keep_masks(self)
            attentions = modules_that_ask(self)
            saved = getattr(self.config, CONFIG_ATTRIBUTE, None)
            if attentions and saved and _name_of(self) == PER_MODULE:
                _rebuild_once(saved, attentions)
            elif saved:
                warnings.warn(_LEFT_OUT.format(_name_of(self)), stacklevel=2)
        return result

    return finish


_LEFT_OUT = (
    "this configuration says what attentions learned or hold, and {} leaves it out; load the model "
    "with attn_implementation='fenchel:held' to have it"
)


def _rebuild_once(saved: Any, attentions: Mapping[str, nn.Module]) -> None:
    """A part of the model that is built before the whole, such as an encoder, waits for it."""
    held = any(hasattr(module, REGULARIZER_ATTRIBUTE) for module in attentions.values())
    if not held and len(attentions) >= len(saved.get("attentions", ())):
        rebuild(saved, attentions)


def _caching(method: Any) -> Any:
    """`_prepare_cache_for_generation`: a converted model decodes from a cache of ours."""

    def prepare(
        self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **rest: Any
    ) -> Any:
        given = model_kwargs.get("past_key_values")
        result = method(self, generation_config, model_kwargs, *args, **rest)
        if given is None and _name_of(self).startswith(PREFIX):
            use_cache(self, model_kwargs)
        return result

    return prepare


_WRAPPED = {
    (PreTrainedModel, "get_correct_attn_implementation"): _resolving,
    (PreTrainedModel, "set_attn_implementation"): _checking,
    (PreTrainedModel, "post_init"): _finishing,
    (GenerationMixin, "_prepare_cache_for_generation"): _caching,
}
