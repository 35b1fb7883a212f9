"""A recipe: one alpha for every head of a model, as an audit finds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fenchel.regularizers import Tsallis

FORMAT = "fenchel-recipe-1"
_LARGEST = 1e6  # of an alpha


def alphas_of(recipe: str | Path | Mapping[str, Any]) -> dict[str, list[float]]:
    """Path of an attention -> alpha of each of its heads, checked.

    recipe: what `lens.Audit.recipe()` returns, or the JSON file that `fenchel audit` wrote.
    """
    document = recipe if isinstance(recipe, Mapping) else _read(Path(recipe))
    if document.get("format") != FORMAT or not isinstance(document.get("alphas"), Mapping):
        raise ValueError(
            f"a recipe says format {FORMAT!r} and alphas by path of an attention, got the keys "
            f"{', '.join(map(str, document)) or 'none'}; `fenchel audit` writes one as recipe.json"
        )
    by_path = {str(path): alphas for path, alphas in document["alphas"].items()}
    for path, alphas in by_path.items():
        if not isinstance(alphas, list | tuple) or not alphas or not all(map(_is_alpha, alphas)):
            raise ValueError(
                f"alphas of {path} must be a list of finite numbers of at least 1, got {alphas!r}"
            )
    return {path: list(alphas) for path, alphas in by_path.items()}


def _is_alpha(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 1 <= x <= _LARGEST


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"cannot read the recipe {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"the recipe {path} is not JSON: {problem}") from problem
    if not isinstance(document, Mapping):
        raise ValueError(f"the recipe {path} must hold an object, got {type(document).__name__}")
    return document


def read_regularizers(
    recipe: str | Path | Mapping[str, Any], attentions: Mapping[str, nn.Module]
) -> dict[str, Tsallis]:
    """The regulariser of every attention of the model."""
    alphas = alphas_of(recipe)
    names = match_paths(list(alphas), list(attentions))
    return {
        names[path]: regularizer_of(alphas[path], names[path], attentions[names[path]])
        for path in alphas
    }


def match_paths(ours: list[str], theirs: list[str]) -> dict[str, str]:
    """Path of an attention as it was written down -> its path in the model at hand.

    A model with a head on top has its attentions one name deeper than the model within, and the
    other way round: paths may differ by one prefix, the same for all.
    """
    for names in _renamings(ours, theirs):
        if names.keys() == set(ours):
            return names
    raise ValueError(
        f"the recipe is for another model: it names {len(ours)} attentions such as "
        f"{next(iter(ours), None)!r}, the model has {len(theirs)} such as "
        f"{next(iter(theirs), None)!r}"
    )


def _renamings(ours: list[str], theirs: list[str]) -> list[dict[str, str]]:
    """Path in the recipe -> path in the model, if all match, for each way to match them."""
    renamings = []
    for end in (ours[0], theirs[0]) if ours and len(ours) == len(theirs) else ():
        candidates = theirs if end == ours[0] else ours
        fitting = [path for path in candidates if path == end or path.endswith(f".{end}")]
        for path in fitting:
            prefix = path[: len(path) - len(end)]
            if end == ours[0]:
                renamings.append({name: prefix + name for name in ours if prefix + name in theirs})
            else:
                renamings.append({prefix + name: name for name in theirs if prefix + name in ours})
    return renamings


def regularizer_of(alphas: list[float], path: str, attention: nn.Module) -> Tsallis:
    """One alpha per head of this attention."""
    names = ("num_attention_heads", "num_heads", "n_heads")
    counts = [getattr(attention, name, None) for name in names]
    if not any(isinstance(heads, int) for heads in counts):
        counts = [getattr(getattr(attention, "config", None), name, None) for name in names]
    for heads in counts:
        if isinstance(heads, int) and heads != len(alphas):
            raise ValueError(
                f"the recipe is for another model: {path} has {heads} heads, the recipe "
                f"{len(alphas)} alphas"
            )
    return Tsallis(torch.tensor(alphas, device="cpu")[:, None])
