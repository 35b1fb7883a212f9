"""convert: another regulariser for the attention of a model that exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import Module

from fenchel.nn.multihead import MultiheadAttention
from fenchel.nn.regularizer import as_module
from fenchel.regularizers.contract import Regularizer

M = TypeVar("M", bound=Module)


def convert(
    model: M, regularizer: Regularizer | Module | Callable[[Module], Regularizer | Module]
) -> M:
    """Every `torch.nn.MultiheadAttention` in `model` now solves <scores, p> - Omega(p); in place.

    >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 8), 2)
    >>> fl.nn.convert(encoder, fl.Tsallis(1.5))
    >>> fl.nn.convert(encoder, lambda layer: fl.nn.LearnedTsallis(layer.num_heads))

    Parameters stay the same objects, so that ties, optimisers and state dicts stay good; with
    `Shannon()` the outputs stay too. A converted model may be converted again.

    model: any module. Torch's own encoder layers, which in inference would leave their attention
        out and call a fused softmax, call it from now on; an encoder no longer makes nested
        tensors, whose padded positions come out as zeros.
    regularizer: one for all layers (what it learns is then shared by all), or a function of the
        attention module that makes one for each.

    A subclass of `torch.nn.MultiheadAttention` is refused: its own forward would be lost.
    """
    attentions = _find_attentions(model)
    choices = [choose(regularizer, module) for module in attentions]  # may raise: before changes
    for module, choice in zip(attentions, choices, strict=True):
        _adopt(module, choice)
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and _is_converted(module):
            module.use_nested_tensor = False
    return model


def _find_attentions(model: Module) -> list[Module]:
    """What can be converted, each once however often it is used."""
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    attentions: list[Module] = []
    for name, module in model.named_modules():
        if type(module) is torch.nn.MultiheadAttention or isinstance(module, MultiheadAttention):
            attentions.append(module)
        elif isinstance(module, torch.nn.MultiheadAttention):
            raise TypeError(
                f"{name or 'the model'} is a {type(module).__name__}, derived from "
                "torch.nn.MultiheadAttention: its own forward or parametrisation would be lost. "
                "Replace it by a fenchel.nn.MultiheadAttention, or convert other parts one by one"
            )
    if not attentions:
        raise ValueError(
            f"found no torch.nn.MultiheadAttention in {type(model).__name__}, nor a converted one; "
            "for a Hugging Face model use fenchel.hf.convert, for one that calls "
            "scaled_dot_product_attention itself fenchel.replace_sdpa"
        )
    return attentions


def _is_converted(model: Module) -> bool:
    """Whether any attention in it is ours."""
    return any(isinstance(module, MultiheadAttention) for module in model.modules())


def choose(
    regularizer: Regularizer | Module | Callable[[Module], Regularizer | Module], module: Module
) -> Module:
    """The regulariser of this attention module, as a module."""
    if isinstance(regularizer, Regularizer | Module):
        return as_module(regularizer)
    if isinstance(regularizer, type) or not callable(regularizer):
        raise TypeError(
            "regularizer must be a Regularizer such as Tsallis(1.5), a module that returns one, or "
            f"a function of the attention module, got {regularizer!r}"
        )
    with torch.inference_mode(False):  # what is made inside such a mode never trains
        return as_module(regularizer(module))


def _adopt(module: Module, regularizer: Module) -> None:
    """Change the class, not the object: hooks, ties and references from elsewhere stay true.

    Both classes keep the same attributes and parameters under the same names.
    """
    if type(module) is torch.nn.MultiheadAttention:
        del module._qkv_same_embed_dim  # our class answers for it
        module.__class__ = MultiheadAttention  # type: ignore[assignment]
    assert isinstance(module, MultiheadAttention)
    module.hold(regularizer)
