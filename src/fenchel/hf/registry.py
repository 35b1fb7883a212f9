"""Names under which transformers finds a regulariser. The registry itself is theirs."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor

from fenchel.attention.call import check_regularizer
from fenchel.hf.library import AttentionInterface, AttentionMaskInterface
from fenchel.hf.translate import Attention
from fenchel.regularizers import Regularizer, Shannon, Tsallis

_STANDARD = {
    "fenchel:softmax": Shannon(),
    "fenchel:sparsemax": Tsallis(2.0),
    "fenchel:entmax15": Tsallis(1.5),
}


def register(name: str | None = None, regularizer: Regularizer | None = None) -> None:
    """Make a regulariser available as `attn_implementation`.

    >>> hf.register()                                       # softmax, sparsemax, entmax15
    >>> hf.register("fenchel:entmax-1.3", Tsallis(1.3))
    >>> AutoModel.from_pretrained(folder, attn_implementation="fenchel:entmax-1.3")

    The attention function and its mask function go together: without the second, transformers
    passes no mask at all and says nothing. Registering the same again does nothing.

    name: "fenchel:" and letters, digits, dots or dashes. Without arguments, the standard names.
    regularizer: kept as it is, tensors included; parameters in it train but belong to no model.
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
    check_regularizer(regularizer)
    _check_name(name)
    _add(name, regularizer)


def names() -> list[str]:
    """Every name registered here, in alphabetical order.

    >>> hf.names()
    ['fenchel:entmax15', 'fenchel:softmax', 'fenchel:sparsemax']
    """
    interface = AttentionInterface()
    return sorted(key for key in interface if isinstance(interface[key], Attention))


def derived_name(regularizer: Regularizer) -> str:
    """The name that says what the regulariser is: Tsallis(1.3) is "fenchel:tsallis-1.3"."""
    kind = type(regularizer).__name__
    parts = [kind.lower()]
    if not dataclasses.is_dataclass(regularizer):
        raise TypeError(f"{kind} has no fields to name it by; {_REMEDY.format(kind=kind)}")
    for position, field in enumerate(dataclasses.fields(regularizer)):
        setting = getattr(regularizer, field.name)
        if isinstance(setting, Tensor):
            raise TypeError(
                f"{kind} holds a tensor in {field.name}, which a name cannot show; "
                f"{_REMEDY.format(kind=kind)}"
            )
        if position > 0 and setting == field.default:
            continue
        label = [] if position == 0 else [field.name]
        parts += [*label, re.sub(r"[^\w.+]+", "x", str(setting).strip("()"))]
    return "fenchel:" + "-".join(parts)


_REMEDY = "give it one: register('fenchel:my-{kind}', regularizer), then convert by that name"


def _add(name: str, regularizer: Regularizer) -> None:
    interface = AttentionInterface()
    if name in interface:
        known = interface[name]
        if isinstance(known, Attention) and _same(known.regularizer, regularizer):
            return
        raise ValueError(
            f"{name!r} already means {getattr(known, 'regularizer', known)!r}; choose another name "
            f"for {regularizer!r}"
        )
    # The mask function first: a name that transformers accepts never goes without it.
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    AttentionInterface.register(name, Attention(regularizer))


def _check_name(name: object) -> None:
    # transformers reads "flash", "flex_attention" and "sdpa" anywhere in a name as its own.
    if not isinstance(name, str) or not re.fullmatch(r"fenchel:[\w.+-]+", name):
        raise ValueError(
            f"a name must be 'fenchel:' and letters, digits, dots or dashes, such as "
            f"'fenchel:entmax-1.3'; got {name!r}"
        )
    if re.search("flash|flex_attention|sdpa", name):
        raise ValueError(f"{name!r} would be taken for an implementation of transformers' own")


def _same(left: Regularizer, right: Regularizer) -> bool:
    """One problem: the same kind with the same parameters; tensors must be the same object."""
    if left is right:
        return True
    mine, theirs = vars(left), vars(right)
    if type(left) is not type(right) or mine.keys() != theirs.keys():
        return False
    return all(
        value is theirs[key]
        if isinstance(value, torch.Tensor) or isinstance(theirs[key], torch.Tensor)
        else value == theirs[key]
        for key, value in mine.items()
    )
