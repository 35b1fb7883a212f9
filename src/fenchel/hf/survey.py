"""Who attends in a model, and how: seen in a run of it, or read from its source."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel._attention.replace import outside_blocks
from fenchel._uncompiled import uncompiled
from fenchel.hf import trial
from fenchel.hf.held import CONFIG_MASKS, REGULARIZER_ATTRIBUTE
from fenchel.hf.library import PreTrainedConfig, PreTrainedModel
from fenchel.hf.parallel import is_spread
from fenchel.hf.translate import Unsupported
from fenchel.hf.trial import ASKS, BY_HAND, FUSED, MULTIHEAD
from fenchel.hf.trial_inputs import make_inputs
from fenchel.nn.multihead import MultiheadAttention

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # how a forward of transformers asks for its function
_OUTSIDE = {"torch", "builtins", "abc", "typing"}
_NORMALISES = re.compile(r"softmax\(|scaled_dot_product_attention\(", re.IGNORECASE)
_TRIAL_NAME = "fenchel:softmax"


class Site(NamedTuple):
    """One module that attends."""

    path: str
    module: nn.Module
    how: str  # "interface", "sdpa", "softmax" or "nn.MultiheadAttention"
    ran: bool  # seen in a run; else read from the source
    causal: bool = False  # the first query saw one key
    trouble: str = ""  # why it would stay on softmax

    def __str__(self) -> str:
        return f"{self.path} ({type(self.module).__name__})"


class Run(NamedTuple):
    """One call that worked: the path of a model, and what it was called with."""

    path: str
    inputs: object


class Survey(NamedTuple):
    """All that attend, the calls that showed it, and why a part could not be run."""

    sites: list[Site]
    runs: list[Run]
    not_run: list[str]


def survey(model: nn.Module, inputs: object = None) -> Survey:
    """Nothing in the model changes. inputs: what it is called with; None: small ones are made."""
    roots(model)  # refuses what is no module
    if is_spread(model):
        return Survey(read_sites(model), [], ["the model is spread over processes"])
    twin = twin_of(model)
    switch(twin, _TRIAL_NAME)
    with in_evaluation(twin), trial.watching() as seen:
        runs, not_run = _run_all(twin, inputs, seen)
    modules = dict(model.named_modules())
    sites = [_of_model(site, modules.get(site.path), seen) for site in _sites(twin, seen)]
    return Survey(sites, runs, not_run)


def _of_model(site: Site, module: nn.Module | None, seen: trial.Trial) -> Site:
    """What was seen in the twin, of the model itself."""
    if type(module) is not type(site.module):
        trouble = "it changes with the length of its input; pass inputs= as long as yours"
        return site._replace(module=site.module if module is None else module, trouble=trouble)
    own = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if site.module in seen.causal_by_flag and own == "eager":
        trouble = "it says is_causal and gets no mask, so that eager attention sees all keys; set "
        return site._replace(module=module, trouble=trouble + "is_causal to False, or use sdpa")
    return site._replace(module=module)


def twin_of(model: nn.Module) -> nn.Module:
    """The same modules once more, around the same weights: some models change when they run."""
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)  # which may hold weights that are elsewhere
        if hook is not None:
            memo[id(hook)] = hook
    return copy.deepcopy(model, memo)


def read_sites(model: nn.Module) -> list[Site]:
    """Who attends by the source alone."""
    return _sites(model, trial.Trial())


def _sites(model: nn.Module, seen: trial.Trial) -> list[Site]:
    named = [pair for pair in model.named_modules() if REGULARIZER_ATTRIBUTE not in pair[0]]
    sites = (_site(path, module, seen) for path, module in named)
    return [site for site in sites if site is not None]


def _site(path: str, module: nn.Module, seen: trial.Trial) -> Site | None:
    ran = module in seen.how
    if not ran and module in seen.reached:
        return None
    alike = seen.way_of(type(module))  # a cross-attention beside a self-attention, say
    how = seen.how[module] if ran else alike or _read(type(module))
    if how is None:
        return None
    trouble = ""
    if how == ASKS and not hasattr(module, "config"):
        trouble = "it has no configuration to ask with"
    elif how == MULTIHEAD and type(module) not in (nn.MultiheadAttention, MultiheadAttention):
        derives = isinstance(module, nn.MultiheadAttention)
        trouble = (
            "it derives from torch.nn.MultiheadAttention, and its own forward would be lost"
            if derives
            else "it calls torch.nn.functional.multi_head_attention_forward itself"
        )
    elif how in (FUSED, BY_HAND) and not ran and alike is None:
        trouble = "it attends on its own, and no run came by to see how"
    elif how in (FUSED, BY_HAND) and (others := _other_softmaxes(module, seen)):
        trouble = f"it attends on its own, and {others[0]} in it takes a softmax that does not"
    return Site(path, module, how, ran, module in seen.causal, trouble)


def _other_softmaxes(module: nn.Module, seen: trial.Trial) -> list[str]:
    """Classes of modules in this one that take a softmax which is no attention."""
    return [
        type(taker).__name__
        for taker, around in seen.softmaxes.items()
        if taker is not module and taker not in seen.how and module in around
    ]


def _read(kind: type[nn.Module]) -> str | None:
    """How a module attends by its source; None: it does not."""
    if issubclass(kind, nn.MultiheadAttention | MultiheadAttention):
        return MULTIHEAD
    if _INTERFACE in _source(kind.forward):
        return ASKS
    if not trial.is_called_attention(kind):
        return None
    bases = (base for base in kind.__mro__ if base.__module__.split(".")[0] not in _OUTSIDE)
    sources = [_source(base) for base in bases]
    words = " ".join(match.group() for source in sources if (match := _NORMALISES.search(source)))
    if "scaled_dot" in words:
        return FUSED
    return BY_HAND if words or not all(sources) else None


@lru_cache(1024)  # reading a source takes milliseconds, and an audit asks for every batch
def _source(thing: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(thing))
    except (OSError, TypeError):  # written at a prompt, or not in Python
        return ""


def _run_all(model: nn.Module, inputs: object, seen: trial.Trial) -> tuple[list[Run], list[str]]:
    """Call the model, then the models within that nobody called: what worked, and what did not."""
    runs: list[Run] = []
    trouble: list[str] = []
    paths = {module: path for path, module in model.named_modules()}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        try:
            given = _try(part, inputs if part is model else None)
            runs.append(Run(paths[part], given))
        except Unsupported:
            raise
        except Exception as problem:  # a model may raise whatever it likes at made-up inputs
            if part is model and inputs is not None:
                raise
            trouble.append(f"{type(part).__name__}: {type(problem).__name__}: {problem}"[:300])
        waiting += _missed(part, seen)
    return runs, trouble


def _try(model: nn.Module, inputs: object) -> object:
    """What it could be called with: these inputs; or few that are made, or more."""
    if inputs is not None:
        call(model, inputs)
        return inputs
    made = make_inputs(model)
    try:
        call(model, made)
    except Unsupported:
        raise
    except Exception:  # it may need what its signature does not say
        more = make_inputs(model, more=True)
        if more.keys() == made.keys():
            raise
        made = more
        call(model, made)
    return made


def _missed(model: nn.Module, seen: trial.Trial) -> Iterator[nn.Module]:
    """The models within that no run has reached."""
    for root in (root for child in model.children() for root in roots(child)):
        if root in seen.reached:
            yield from _missed(root, seen)
        else:
            yield root


def call(model: nn.Module, inputs: object) -> Any:
    """The output of the model; inputs: a mapping of arguments, a tuple or a tensor."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(inputs, Mapping):
            return model(**inputs)
        elif isinstance(inputs, tuple | list):
            return model(*inputs)
        elif isinstance(inputs, Tensor):
            return model(inputs)
        raise TypeError(
            f"inputs must be a tensor, a tuple or a mapping of arguments, got "
            f"{type(inputs).__name__}"
        )


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside, this model is in evaluation, and torch's random numbers are always the same; outside
    they go on as if nothing had happened. In inference mode torch would not say what an operation
    is made of, and on the meta device what models make on the way would have no numbers."""
    with (
        torch.random.fork_rng(devices=[]),
        uncompiled(),
        outside_blocks(),
        torch.inference_mode(False),
        _numbers(),
    ):
        torch.manual_seed(0)
        model.eval()
        yield


def _numbers() -> AbstractContextManager[Any]:
    """Inside, new tensors have numbers, whatever device is the default around."""
    on_meta = torch.get_default_device().type == "meta"
    return torch.device("cpu") if on_meta else nullcontext()


def roots(model: nn.Module) -> list[Any]:
    """The outermost transformers models."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in roots(child)]


def switch(model: nn.Module, name: str, sites: Collection[Site] | None = None) -> None:
    """The configurations of these attentions, and of the models around them, say this name; all
    within the model where no sites are given. A model without them keeps the masks that its own
    attention reads. Some models give their parts copies of their configuration, which
    transformers' own method does not reach."""
    if sites is None:
        asking, kept, mixed = set(model.modules()), set[int](), True
    else:
        asking = {site.module for site in sites if site.how == ASKS}
        kept = _kept_configs(model, sites)
        mixed = any(site.how in (FUSED, BY_HAND) for site in sites)
    for module in model.modules():
        if asking.isdisjoint(module.modules()):
            continue
        for config in vars(module).values():
            if isinstance(config, PreTrainedConfig) and id(config) not in kept:
                eager = config._attn_implementation_internal in (None, "eager")
                if eager and (mixed or not getattr(module, "_supports_sdpa", True)):
                    setattr(config, CONFIG_MASKS, "eager")
                config._attn_implementation_internal = name


def _kept_configs(model: nn.Module, sites: Collection[Site]) -> set[int]:
    """Of models that attend on their own, whatever models within them do: their masks stay."""
    named = dict(model.named_modules())
    models = {path: x for path, x in named.items() if isinstance(x, PreTrainedModel)}
    asking = {_config_of(site, models) for site in sites if site.how == ASKS}
    return {_config_of(site, models) for site in sites} - asking


def _config_of(site: Site, models: Mapping[str, Any]) -> int:
    """Identity of the configuration of the innermost model that holds this attention; 0: none."""
    holding = [path for path in models if f"{site.path}.".startswith(f"{path}." if path else "")]
    return id(models[max(holding, key=len)].config) if holding else 0


def copy_configs(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
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
