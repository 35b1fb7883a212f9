"""Every attention call of a model as it runs: queries, keys, values, and who may see whom.

The model is switched to an attention function of our own, through the interface by which
transformers looks its functions up; what asks for a function there is an attention, whatever it is
called. The function hands the call on and returns what softmax gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fenchel._numerics import certificate_dtype, where
from fenchel.lens.problems import evaluating
from fenchel.lens.recognise import Kind

_NAME = "fenchel:lens"
_FOREIGN = ("key_value_states", "encoder_hidden_states")  # arguments that bring another's tokens


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: scores scaling <q, k> + bias, -inf where not visible; softmax; values.

    query (B, H, Q, f), key (B, K, n, f), value (B, K, n, e) with H = K r heads; visible and bias
    (B or 1, H or 1, Q, n) or None.
    layer: among the attentions of its kind, from 0.
    """

    layer: int
    kind: Kind
    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    bias: Tensor | None
    scaling: float

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head, (B, H, n, .), in float64."""
        groups = self.query.shape[1] // self.key.shape[1]
        inner = certificate_dtype(self.query.device)
        key, value = (x.to(inner).repeat_interleave(groups, 1) for x in (self.key, self.value))
        return key, value

    def seen(self) -> Tensor:
        """True: may be seen. (B, H, Q, n)"""
        shape = (*self.query.shape[:3], self.key.shape[2])
        seen = torch.ones((), dtype=torch.bool, device=self.query.device).expand(shape)
        if self.visible is not None:
            seen = seen & self.visible
        if self.bias is not None:
            seen = seen & (self.bias > -torch.inf)
        return seen

    def scores(self) -> Tensor:
        """(B, H, Q, n), float64."""
        key, _ = self.repeated()
        scores = self.scaling * (self.query.to(key.dtype) @ key.mT)
        if self.bias is not None:
            scores = scores + self.bias.to(key.dtype)
        return where(self.seen(), scores, -torch.inf)

    def weights(self) -> Tensor:
        """(B, H, Q, n), float64; zeros in a row that sees nothing."""
        scores = self.scores()
        any_key = scores.amax(-1, keepdim=True) > -torch.inf
        return where(any_key, where(any_key, scores, 0.0).softmax(-1), 0.0)


OnCall = Callable[[Call], object]


@contextmanager
def watch(model: Any, on_call: OnCall) -> Iterator[dict[str, tuple[Kind, int]]]:
    """While open, every attention call of the model is handed to `on_call`, in the order it runs.

    >>> with watch(model, calls.append):
    ...     model(**inputs)

    Yields path -> (kind, layer) of the attentions met so far. In evaluation mode and without
    derivatives; the model is put back as it was.
    """
    from fenchel.hf.convert import attention_modules

    modules = attention_modules(model)
    _register()
    met: dict[str, tuple[Kind, int]] = {}
    before = {id(config): config._attn_implementation for config in _configs(model)}
    with evaluating(model), ExitStack() as undo, torch.no_grad():
        undo.callback(_restore, model, before)
        model.set_attn_implementation(_NAME)
        for path, module in modules.items():
            _WATCHED[module] = _Watch(path, on_call, met)
            undo.callback(_WATCHED.pop, module, None)
            hook = module.register_forward_pre_hook(_note_source, with_kwargs=True)
            undo.callback(hook.remove)
        yield met


@dataclass
class _Watch:
    path: str
    on_call: OnCall
    met: dict[str, tuple[Kind, int]]
    foreign: bool = False  # the keys of the current call come from elsewhere

    def place(self, causal: bool) -> tuple[Kind, int]:
        """Kind and number; the first call decides, for all that follow."""
        if self.path not in self.met:
            kind: Kind = "cross" if self.foreign else "decoder" if causal else "encoder"
            number = sum(known == kind for known, _ in self.met.values())
            self.met[self.path] = (kind, number)
        return self.met[self.path]


_WATCHED: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def _note_source(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    given = any(kwargs.get(name) is not None for name in _FOREIGN)
    _WATCHED[module].foreign = given or _second_is_foreign(module, args)


def _second_is_foreign(module: nn.Module, args: Any) -> bool:
    """The same when it is passed by position."""
    if len(args) < 2:
        return False
    names = list(inspect.signature(type(module).forward).parameters)[1 : len(args) + 1]
    return any(
        name in _FOREIGN and value is not None for name, value in zip(names, args, strict=False)
    )


def _handed_on(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function under `_NAME`."""
    from fenchel.hf.translate import Attention, means_causal, split_mask
    from fenchel.regularizers import Shannon

    visible, bias = split_mask(attention_mask, position_bias)
    causal = means_causal(module, is_causal, attention_mask, query)
    if causal:
        past = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        visible = past.tril()[None, None]
    watch = _WATCHED.get(module)
    if watch is not None:
        kind, layer = watch.place(bool(getattr(module, "is_causal", False)) or causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        watch.on_call(Call(layer, kind, query, key, value, visible, bias, scale))
    return Attention(Shannon())(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling,
        dropout,
        is_causal,
        position_bias,
        **others,
    )


def _register() -> None:
    from fenchel.hf.library import AttentionInterface, AttentionMaskInterface

    if _NAME not in AttentionInterface():
        AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])
        AttentionInterface.register(_NAME, _handed_on)


def _configs(model: Any) -> list[Any]:
    """Every configuration within, once."""
    found = {id(module.config): module.config for module in model.modules() if _has_config(module)}
    return list(found.values())


def _has_config(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def _restore(model: Any, before: dict[int, str]) -> None:
    for config in _configs(model):
        if id(config) in before:
            config._attn_implementation = before[id(config)]
