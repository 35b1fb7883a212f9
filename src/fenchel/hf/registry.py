"""Names under which transformers finds a regulariser. The registry itself is theirs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fenchel.hf.library import AttentionInterface, AttentionMaskInterface
from fenchel.hf.masks import make_mask
from fenchel.hf.names import PER_MODULE, PREFIX, STANDARD, regularizer_by_name
from fenchel.hf.translate import HeldAttention, TranslatedAttention
from fenchel.regularizers.contract import Regularizer, resolve_regularizer


def register(name: str, regularizer: Regularizer | Module) -> None:
    """Make a regulariser available as `attn_implementation`, under a name of your own.

    >>> hf.register("fenchel:mixed", Tsallis(torch.tensor([[1.2], [1.8]])))
    >>> AutoModel.from_pretrained(folder, attn_implementation="fenchel:mixed")

    Names that say their numbers, such as "fenchel:tsallis-1.3", need no registering.

    The attention function and its mask function go together: without the second, transformers
    passes no mask at all and says nothing. Registering the same again does nothing; tensors are the
    same if their numbers are, those with a gradient only if they are one object.

    name: "fenchel:" and letters, digits, dots or dashes.
    regularizer: kept as it is, tensors included; or a module whose `forward()` returns one.
        Parameters in it train but belong to no model. For those `convert` takes the regulariser
        itself.
    """
    resolve_regularizer(regularizer)  # refuses at once what is none
    _check_name(name)
    _add(name, regularizer)


def names() -> list[str]:
    """Every name registered here, in alphabetical order.

    >>> hf.names()
    ['fenchel:entmax15', 'fenchel:softmax', 'fenchel:sparsemax']
    """
    interface = AttentionInterface()
    return sorted(key for key in interface if isinstance(interface[key], TranslatedAttention))


def resolve_name(name: str) -> None:
    """Make sure that transformers finds this name, if it is one of ours."""
    if name.startswith(PREFIX) and name not in AttentionInterface():
        _put(name, TranslatedAttention(regularizer_by_name(name)))


def register_standard() -> None:
    """The names that are always there."""
    for name, regularizer in STANDARD.items():
        _add(name, regularizer)
    if PER_MODULE not in AttentionInterface():
        _put(PER_MODULE, HeldAttention())


def _add(name: str, regularizer: Regularizer | Module) -> None:
    interface = AttentionInterface()
    if name not in interface:
        _put(name, TranslatedAttention(regularizer))
        return
    bound_to = getattr(interface[name], "regularizer", None)
    if bound_to is not None and _same(bound_to, regularizer):
        return
    meaning = interface[name] if bound_to is None else _brief(bound_to)
    learned = " that is learned" if bound_to is not None and _learns(bound_to, regularizer) else ""
    raise ValueError(
        f"{name!r} already means {meaning}{learned}, and a name cannot be bound again: models may "
        f"use it. Choose another, such as {name + '-2'!r}, or convert(model, regularizer) without "
        "a name"
    )


def _put(name: str, function: Any) -> None:
    # The mask function first: a name that transformers accepts never goes without it.
    AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(name, function)
    setattr(AttentionInterface, name, function)  # Kosmos-2.5 looks it up as an attribute


def _check_name(name: object) -> None:
    # transformers reads "flash", "flex_attention" and "sdpa" anywhere in a name as its own.
    if not isinstance(name, str) or not re.fullmatch(r"fenchel:[\w.+-]+", name):
        raise ValueError(
            f"a name must be 'fenchel:' and letters, digits, dots or dashes, such as "
            f"'fenchel:entmax-1.3'; got {name!r}"
        )
    if re.search("flash|flex_attention|sdpa", name):
        raise ValueError(f"{name!r} would be taken for an implementation of transformers' own")
    if name == PER_MODULE:
        raise ValueError(f"{name!r} is what hf.convert uses for regularisers that a model holds")


def _same(left: Regularizer | Module, right: Regularizer | Module) -> bool:
    """One problem: the same kind with the same parameters. A module may learn: one object."""
    if isinstance(left, Module) or isinstance(right, Module):
        return left is right
    settings, other_settings = vars(left), vars(right)
    if type(left) is not type(right) or settings.keys() != other_settings.keys():
        return False
    return all(_equal(value, other_settings[key]) for key, value in settings.items())


def _equal(left: object, right: object) -> bool:
    """Tensors by their numbers, unless they learn: then they must be one object."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right
    if left is right or left.requires_grad or right.requires_grad:
        return left is right
    alike = left.dtype == right.dtype and left.device == right.device
    return alike and torch.equal(left, right)


def _learns(*regularizers: Regularizer | Module) -> bool:
    if any(isinstance(regularizer, Module) for regularizer in regularizers):
        return True
    settings = (value for regularizer in regularizers for value in vars(regularizer).values())
    return any(isinstance(value, Tensor) and value.requires_grad for value in settings)


def _brief(regularizer: Regularizer | Module) -> str:
    """Without the numbers of tensors."""
    if isinstance(regularizer, Module):
        return f"the module {type(regularizer).__name__}"
    settings = (
        f"{name}=<tensor {tuple(value.shape)}>" if isinstance(value, Tensor) else f"{name}={value}"
        for name, value in vars(regularizer).items()
    )
    return f"{type(regularizer).__name__}({', '.join(settings)})"
