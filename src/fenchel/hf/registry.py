"""Names under which transformers finds a regulariser. The registry itself is theirs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fenchel.hf.library import AttentionInterface, AttentionMaskInterface
from fenchel.hf.translate import HeldAttention, TranslatedAttention
from fenchel.regularizers import Regularizer, Shannon, Tsallis
from fenchel.regularizers.contract import resolve_regularizer

_STANDARD = {
    "fenchel:softmax": Shannon(),
    "fenchel:sparsemax": Tsallis(2.0),
    "fenchel:entmax15": Tsallis(1.5),
}
_PER_MODULE = "fenchel:held"


def register(name: str | None = None, regularizer: Regularizer | Module | None = None) -> None:
    """Make a regulariser available as `attn_implementation`.

    >>> hf.register()                                       # softmax, sparsemax, entmax15
    >>> hf.register("fenchel:entmax-1.3", Tsallis(1.3))
    >>> AutoModel.from_pretrained(folder, attn_implementation="fenchel:entmax-1.3")

    The attention function and its mask function go together: without the second, transformers
    passes no mask at all and says nothing. Registering the same again does nothing; tensors are the
    same if their numbers are, those with a gradient only if they are one object.

    name: "fenchel:" and letters, digits, dots or dashes. Without arguments, the standard names.
    regularizer: kept as it is, tensors included; or a module whose `forward()` returns one.
        Parameters in it train but belong to no model. For those `convert` takes the regulariser
        itself.
    """
    if name is None and regularizer is None:
        for standard, omega in _STANDARD.items():
            _add(standard, omega)
        return
    if name is None or regularizer is None:
        raise TypeError(
            "register takes a name and a regulariser, or neither; got "
            f"name={name!r}, regularizer={regularizer!r}"
        )
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


def derived_name(regularizer: Regularizer) -> str:
    """What says the regulariser's numbers: Tsallis(1.3) is "fenchel:tsallis-1.3"."""
    kind = type(regularizer).__name__
    parts = [kind.lower()]
    if not dataclasses.is_dataclass(regularizer):
        raise TypeError(
            f"{kind} has no fields to name it by; give it a name: register('fenchel:my-{kind}', "
            "regularizer), then convert by that name"
        )
    for position, field in enumerate(dataclasses.fields(regularizer)):
        setting = getattr(regularizer, field.name)
        if position > 0 and setting == field.default:
            continue
        label = [] if position == 0 else [field.name]
        parts += [*label, re.sub(r"[^\w.+]+", "x", str(setting).strip("()"))]
    return "fenchel:" + "-".join(parts)


def register_per_module() -> str:
    """The name under which every attention asks its own module for the regulariser."""
    if _PER_MODULE not in AttentionInterface():
        _put(_PER_MODULE, HeldAttention())
    return _PER_MODULE


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
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    AttentionInterface.register(name, function)


def _check_name(name: object) -> None:
    # transformers reads "flash", "flex_attention" and "sdpa" anywhere in a name as its own.
    if not isinstance(name, str) or not re.fullmatch(r"fenchel:[\w.+-]+", name):
        raise ValueError(
            f"a name must be 'fenchel:' and letters, digits, dots or dashes, such as "
            f"'fenchel:entmax-1.3'; got {name!r}"
        )
    if re.search("flash|flex_attention|sdpa", name):
        raise ValueError(f"{name!r} would be taken for an implementation of transformers' own")
    if name == _PER_MODULE:
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
