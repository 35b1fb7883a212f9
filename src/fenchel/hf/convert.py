"""Switch a loaded model, and make sure that nothing of it stays on softmax unnoticed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fenchel._kernels.route import use
from fenchel.hf import in_place
from fenchel.hf.held import (
    CONFIG_ATTRIBUTE,
    REGULARIZER_ATTRIBUTE,
    check_saved,
    describe,
    hold,
    is_marked,
)
from fenchel.hf.names import PER_MODULE, PREFIX, derived_name
from fenchel.hf.parallel import check_trained
from fenchel.hf.recipe import read_regularizers
from fenchel.hf.registry import names, register, resolve_name
from fenchel.hf.survey import (
    Run,
    Site,
    call,
    copy_configs,
    in_evaluation,
    read_sites,
    roots,
    survey,
    switch,
    twin_of,
)
from fenchel.hf.translate import check_budget
from fenchel.hf.trial import ASKS, MULTIHEAD
from fenchel.nn.conversion import choose
from fenchel.nn.conversion import convert as convert_torch
from fenchel.nn.multihead import MultiheadAttention
from fenchel.regularizers.contract import Regularizer
from fenchel.regularizers.shannon import Shannon

M = TypeVar("M", bound=nn.Module)
Held = Regularizer | nn.Module
RegularizerChoice = str | Path | Mapping[str, Any] | Held | Callable[[nn.Module], Held]


def convert(
    model: M,
    regularizer: RegularizerChoice,
    *,
    inputs: object = None,
    only: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (),
    allow_partial: bool = False,
) -> M:
    """The model itself, every attention in it switched to the regulariser.

    >>> hf.convert(model, Tsallis(1.3))                        # as "fenchel:tsallis-1.3"
    >>> hf.convert(model, "fenchel:entmax15")
    >>> hf.convert(model, lambda layer: LearnedTsallis(layer.config.num_attention_heads))
    >>> hf.convert(model, Path("audit/recipe.json"))           # an alpha for every head
    >>> hf.convert(model, Tsallis(1.5), skip="*.layers.0.*")   # the first layer stays on softmax

    The model is run once on a few tokens, to see who attends: see `hf.check`. Weights are
    untouched, and `model.set_attn_implementation("sdpa")` leads back. The model gets a
    configuration of its own, so that others made from the same one stay as they are. What
    attentions hold is written into it: `save_pretrained`, then
    `from_pretrained(folder, attn_implementation="fenchel:held")`, bring it back.

    model: a transformers model, or a module that holds some. Refused, before anything changes, if
        any attention in it would stay on softmax.
    regularizer: a `Regularizer`, or a name; or what learns: a regulariser that holds tensors, a
        module whose `forward()` returns one, or a function of the attention module that makes one
        for each. Each attention then holds it as a submodule, `fenchel_regularizer`.
        Or a recipe: what `lens.Audit.recipe()` returns, or the path of the JSON file that
        `fenchel audit` wrote.
    inputs: what to run the model on, as a mapping of arguments, a tuple or a tensor; small ones are
        made where it is None.
    only, skip: patterns for the paths of attentions; the others stay on softmax, computed here.
    allow_partial: leave what cannot be switched as it is, instead of refusing the model.
    """
    if not roots(model) and allow_partial is False:
        _refuse_foreign(model)
    seen = survey(model, inputs)
    stuck = [site for site in seen.sites if site.trouble]
    if stuck and not allow_partial:
        raise ValueError(_refusal(model, stuck, seen.not_run))
    sites = {site.path: site for site in seen.sites if not site.trouble}
    if not sites:
        _refuse_foreign(model)
    chosen = {path: site for path, site in sites.items() if _matches(path, only, skip)}
    if not chosen:
        raise ValueError(
            f"only={only!r} and skip={skip!r} leave no attention of {', '.join(list(sites)[:3])} …"
        )
    _check_patterns(sites, only, skip)
    if not _is_converted(model):
        check_same(model, sites, seen.runs)
    name, regularizers = _resolve(regularizer, chosen, partly=len(chosen) < len(sites))
    for path in sites.keys() - chosen.keys():
        regularizers[path] = choose(Shannon(), sites[path].module)
    check_trained(model, regularizers.values())
    check_saved(model, regularizers.values())
    _check_runs(model, sites, seen.runs, name, regularizers)
    _apply(model, sites, name, regularizers)
    return model


def _check_runs(
    model: nn.Module,
    sites: dict[str, Site],
    runs: list[Run],
    name: str,
    regularizers: dict[str, nn.Module],
) -> None:
    """Refuse regularisers that the model cannot run with, such as one for another number of
    heads."""
    for path, inputs in runs if regularizers else ():
        twin = twin_of(model)
        twins = {p: site._replace(module=twin.get_submodule(p)) for p, site in sites.items()}
        _apply(twin, twins, name, _where_it_runs(twin, regularizers))
        part = twin.get_submodule(path)
        try:
            with in_evaluation(part):
                call(part, inputs)
        except Exception as problem:  # of a model: anything
            raise ValueError(
                f"{type(model).__name__} does not run with this regulariser: {problem}. A function "
                "of the attention module may make another one for each"
            ) from problem


def _where_it_runs(model: nn.Module, regularizers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Beside weights that are to be loaded later, copies without numbers; else as they are."""
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    weights = (x for name, x in model.named_parameters() if REGULARIZER_ATTRIBUTE not in name)
    if hooked or not all(x.is_meta for x in weights):
        return regularizers
    return {path: copy.deepcopy(held).to("meta") for path, held in regularizers.items()}


def _check_patterns(
    sites: Mapping[str, Site], only: str | Sequence[str], skip: str | Sequence[str]
) -> None:
    """Refuse a pattern that says nothing: it is misspelt."""
    for pattern in (*_listed(only), *_listed(skip)):
        if not any(fnmatch(path, pattern) for path in sites):
            raise ValueError(f"no attention matches {pattern!r}; there are {_some(list(sites))}")


def _is_converted(model: nn.Module) -> bool:
    """Whether some of it is off softmax already."""
    return any(
        is_marked(module)
        or isinstance(module, MultiheadAttention)
        or str(getattr(vars(module).get("config"), "_attn_implementation", "")).startswith(PREFIX)
        for module in model.modules()
    )


def check_same(model: nn.Module, sites: dict[str, Site], runs: list[Run]) -> None:
    """With softmax, the converted model answers what it answered before; else it is refused."""
    if not runs:
        return
    own, ours = twin_of(model), twin_of(model)
    twins = {path: site._replace(module=ours.get_submodule(path)) for path, site in sites.items()}
    others = {path: site.module for path, site in twins.items() if site.how != ASKS}
    softmax = {path: choose(Shannon(), module) for path, module in others.items()}
    _apply(ours, twins, "fenchel:softmax", softmax)
    for path, inputs in runs:
        outputs = []
        for twin in (own.get_submodule(path), ours.get_submodule(path)):
            # In torch's own softmax: what is compared is the switch, not how kernels round.
            with in_evaluation(twin), use("torch"):
                outputs.append(_answers(call(twin, inputs)))
        for before, after in zip(*outputs, strict=False):
            if not _is_close(before, after):
                raise ValueError(
                    f"{type(model).__name__} would not be the same model: with softmax, what "
                    f"{path or 'it'} answers to a few tokens changes when its attention is switched"
                    ". It computes more than an expectation under a softmax, or hides keys in a "
                    "way of its own; fenchel.hf.check(model) shows who attends"
                )


def _answers(output: Any) -> list[Tensor]:
    """What a model computes, without the weights and caches that it may hand out as well."""
    if isinstance(output, Mapping):
        output = [x for name, x in output.items() if not re.search("attentions|past_key", name)]
    return [x for x in tree_leaves(output) if isinstance(x, Tensor)]


def _is_close(before: Tensor, after: Tensor) -> bool:
    """Up to the rounding of many layers, some of which are float32 in every model; what was NaN
    before may be anything."""
    if not before.is_floating_point() or before.numel() == 0 or before.is_meta:
        return True
    if before.shape != after.shape:
        return False
    computed = before.dtype
    if computed == torch.float32 and torch.is_autocast_enabled(before.device.type):
        computed = torch.get_autocast_dtype(before.device.type)
    digits = {torch.float64: 1e-6, torch.float32: 1e-3}.get(computed, 0.05)
    before, after = before.double(), after.double()
    known = before.isfinite()
    size = before[known].abs().max() if known.any() else before.new_zeros(())
    return bool((before - after)[known].abs().le(digits * size + 1e-12).all())


def _apply(
    model: nn.Module, sites: dict[str, Site], name: str, regularizers: dict[str, nn.Module]
) -> None:
    copy_configs(model)
    switch(model, name, sites.values())
    for path, site in sites.items():
        regularizer = regularizers.get(path)
        if site.how == MULTIHEAD:
            convert_torch(site.module, regularizer)  # type: ignore[arg-type]
            continue
        hold(site.module, regularizer, name)
        if site.how != ASKS:
            in_place.exchange(site.module)
    asking = {path: held for path, held in regularizers.items() if sites[path].how == ASKS}
    description = describe(asking) if name == PER_MODULE and len(asking) == len(sites) else None
    for root in roots(model):
        vars(root.config).pop(CONFIG_ATTRIBUTE, None)
        if description is not None:
            setattr(root.config, CONFIG_ATTRIBUTE, description)


def _resolve(
    regularizer: RegularizerChoice, sites: dict[str, Site], *, partly: bool
) -> tuple[str, dict[str, nn.Module]]:
    """The name to switch to, and the regularisers that attentions will hold under it."""
    modules = {path: site.module for path, site in sites.items()}
    if isinstance(regularizer, Path | Mapping) or _names_file(regularizer):
        recipe = read_regularizers(regularizer, modules)
        return PER_MODULE, {path: choose(omega, modules[path]) for path, omega in recipe.items()}
    if isinstance(regularizer, str):
        resolve_name(regularizer)
        if regularizer not in names():
            raise ValueError(
                f"unknown name {regularizer!r}; known are {', '.join(names())}. Add one with "
                "fenchel.hf.register(name, regularizer), or pass the regulariser itself"
            )
        name, chosen = regularizer, bound_regularizer(regularizer)
    elif isinstance(regularizer, Regularizer) and not _holds_tensors(regularizer):
        name, chosen = derived_name(regularizer), regularizer
        if any(site.causal for site in sites.values()):
            check_budget(regularizer)
        register(name, regularizer)
    else:
        held = {path: choose(regularizer, module) for path, module in modules.items()}
        return PER_MODULE, held
    if partly:
        return PER_MODULE, {path: choose(chosen, module) for path, module in modules.items()}
    others = {path: site for path, site in sites.items() if site.how != ASKS}
    return name, {path: choose(chosen, site.module) for path, site in others.items()}


def bound_regularizer(name: str) -> Held:
    """What a registered name means."""
    from fenchel.hf.library import AttentionInterface

    regularizer: Held = AttentionInterface()[name].regularizer
    return regularizer


def _names_file(regularizer: object) -> TypeGuard[str]:
    """A string that is no registered name but ends as recipes do."""
    return isinstance(regularizer, str) and regularizer.endswith(".json")


def _holds_tensors(regularizer: Regularizer) -> bool:
    return any(isinstance(setting, Tensor) for setting in vars(regularizer).values())


def _matches(path: str, only: str | Sequence[str], skip: str | Sequence[str]) -> bool:
    wanted = any(fnmatch(path, pattern) for pattern in _listed(only))
    return wanted and not any(fnmatch(path, pattern) for pattern in _listed(skip))


def _listed(patterns: str | Sequence[str]) -> list[str]:
    if isinstance(patterns, str):
        return [patterns]
    if not isinstance(patterns, Iterable) or not all(isinstance(x, str) for x in patterns):
        raise TypeError(
            f"only and skip must be patterns such as '*.layers.0.*', one or several, got "
            f"{patterns!r}"
        )
    return list(patterns)


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """Path and module of everything that asks transformers for its attention function, by its
    source. Refused if nothing does, or if anything else attends."""
    modules = modules_that_ask(model)
    if not modules:
        _refuse_foreign(model)
    return modules


def modules_that_ask(model: nn.Module) -> dict[str, Any]:
    """The same of a model that may have no attention at all."""
    sites = read_sites(model)
    others = [site for site in sites if site.how != ASKS or site.trouble]
    if others:
        raise ValueError(_refusal(model, others, []))
    return {site.path: site.module for site in sites}


def _refusal(model: nn.Module, stuck: list[Site], not_run: list[str]) -> str:
    reasons = sorted({site.trouble for site in stuck if site.trouble})
    text = f"{type(model).__name__} would stay on softmax in {_some([str(x) for x in stuck])}"
    text += f": {'; '.join(reasons)}. " if reasons else ". "
    if not_run:
        text += f"It could not be run ({not_run[0]}); pass inputs=. "
    return (
        f"{text}fenchel.hf.check(model) shows all, fenchel.hf.convert switches what it can, with "
        "allow_partial=True without the rest"
    )


def _refuse_foreign(model: nn.Module) -> None:
    raise ValueError(
        f"found no attention in {type(model).__name__} that is of a transformers model; "
        "fenchel.nn.convert(model, regularizer) is for torch.nn.MultiheadAttention and the layers "
        "made of it, fenchel.replace_sdpa for what calls scaled_dot_product_attention"
    )


def _some(items: list[str]) -> str:
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
