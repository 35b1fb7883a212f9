"""Names that say which regulariser they mean: "fenchel:tsallis-1.3"."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal

from fenchel import regularizers
from fenchel.regularizers.contract import Regularizer
from fenchel.regularizers.shannon import Shannon
from fenchel.regularizers.tsallis import Tsallis

PREFIX = "fenchel:"
PER_MODULE = "fenchel:held"  # every attention has a regulariser of its own
STANDARD: dict[str, Regularizer] = {
    "fenchel:softmax": Shannon(),
    "fenchel:sparsemax": Tsallis(2.0),
    "fenchel:entmax15": Tsallis(1.5),
}
KINDS = {
    name.lower(): kind
    for name, kind in vars(regularizers).items()
    if isinstance(kind, type) and issubclass(kind, Regularizer) and dataclasses.is_dataclass(kind)
}


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
        parts += [*label, _word(setting)]
    return "fenchel:" + "-".join(parts)


def _word(setting: object) -> str:
    """A dash would end the word: 1e-05 is 0.00001."""
    if isinstance(setting, float):
        return str(setting) if "-" not in str(setting) else format(Decimal(str(setting)), "f")
    return re.sub(r"[^\w.+]+", "x", str(setting).strip("()"))


def _number(word: str) -> float:
    """Not as Python reads it, for which 1_3 is 13."""
    if not re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?|nan|inf", word):
        raise ValueError(f"{word!r} is no number; one is written as 1.3")
    return float(word)


def regularizer_by_name(name: str) -> Regularizer:
    """What `derived_name` named, or one of the standard names."""
    if name in STANDARD:
        return STANDARD[name]
    kind, *words = name.removeprefix(PREFIX).split("-")
    make = KINDS.get(kind)
    fields = [] if make is None else [field.name for field in dataclasses.fields(make)]
    if make is not None and fields and words:
        words = [fields[0], *words]
    settings = dict(zip(words[::2], words[1::2], strict=False))
    try:
        said_once = len(words) == 2 * len(settings)  # and each with its number
        if make is None or not said_once or not settings.keys() <= set(fields):
            raise ValueError("not understood")
        regularizer: Regularizer = make(**{key: _number(word) for key, word in settings.items()})
        return regularizer
    except (TypeError, ValueError) as problem:
        raise ValueError(
            f"{name!r} names no regulariser ({problem}); names are {', '.join(STANDARD)}, or the "
            f"regulariser and its numbers, such as 'fenchel:tsallis-1.3' or "
            "'fenchel:shannon-0.5', or what fenchel.hf.register(name, regularizer) was given"
        ) from None
