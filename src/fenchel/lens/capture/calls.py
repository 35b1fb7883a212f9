"""Every attention call of a model as it runs: queries, keys, values, and who may see whom.

The model is switched to an attention function of the library, through the interface by which
transformers looks its functions up. A module that asks for a function there is an attention,
whatever it is called. The function records the call and returns what softmax gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fenchel._numerics import certificate_dtype, where
from fenchel.lens.capture.evaluation import evaluating
from fenchel.lens.families import Attention, Kind
from fenchel.regularizers import Regularizer, Shannon

_NAME = "fenchel:lens"
_FOREIGN = ("key_value_states", "encoder_hidden_states")  # arguments that bring another's tokens


@dataclass(frozen=True, eq=False)
class EnteringTokens:
    """Tokens that enter an attention, before the projections: queries (B, Q, d), keys (B, n, d)."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: scores scaling <q, k> + bias, -inf where not visible; softmax; values.

    query (B, H, Q, f), key (B, K, n, f), value (B, K, n, e) with H = K r heads; visible and bias
    (B or 1, H or 1, Q, n) or None. output: what the model was given, (B, Q, H, e).
    layer: among the attentions of its kind, from 0. path: of the module within the model.
    tokens: recorded only where `watch` was asked for them.
    """

    path: str
    layer: int
    kind: Kind
    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor | None
    bias: Tensor | None
    scaling: float
    output: Tensor
    tokens: EnteringTokens | None = None

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def repeat_groups(self) -> tuple[Tensor, Tensor]:
        """Keys and values for every query head, (B, H, n, .), in float64."""
        groups = self.query.shape[1] // self.key.shape[1]
        inner = certificate_dtype(self.query.device)
        key, value = (x.to(inner).repeat_interleave(groups, 1) for x in (self.key, self.value))
        return key, value

    def select(self, heads: Sequence[int]) -> Call:
        """The same call, of these heads alone."""
        groups = self.query.shape[1] // self.key.shape[1]
        chosen = list(heads)
        beyond = [head for head in chosen if head >= self.heads]
        if beyond:
            raise ValueError(f"there are heads 0 to {self.heads - 1}, no head {beyond[0]}")
        return replace(
            self,
            query=self.query[:, chosen],
            key=self.key.repeat_interleave(groups, 1)[:, chosen],
            value=self.value.repeat_interleave(groups, 1)[:, chosen],
            visible=_select_heads(self.visible, chosen),
            bias=_select_heads(self.bias, chosen),
            output=self.output[:, :, chosen],
        )

    def mask(self) -> Tensor:
        """True: the query may see the key. (B, H, Q, n)"""
        shape = (*self.query.shape[:3], self.key.shape[2])
        mask = torch.ones((), dtype=torch.bool, device=self.query.device).expand(shape)
        if self.visible is not None:
            mask = mask & self.visible
        if self.bias is not None:
            mask = mask & (self.bias > -torch.inf)
        return mask

    def scores(self) -> Tensor:
        """(B, H, Q, n), float64."""
        key, _ = self.repeat_groups()
        scores = self.scaling * (self.query.to(key.dtype) @ key.mT)
        if self.bias is not None:
            scores = scores + self.bias.to(key.dtype)
        return where(self.mask(), scores, -torch.inf)

    def weights(self) -> Tensor:
        """(B, H, Q, n), float64; zeros in a row that sees nothing."""
        return masked_softmax(self.scores())


def masked_softmax(scores: Tensor) -> Tensor:
    """Softmax; zeros in a row that sees nothing."""
    any_key = scores.amax(-1, keepdim=True) > -torch.inf
    return where(any_key, where(any_key, scores, 0.0).softmax(-1), 0.0)


def _select_heads(x: Tensor | None, heads: list[int]) -> Tensor | None:
    return x if x is None or x.shape[1] == 1 else x[:, heads]


OnCall = Callable[[Call], object]
Choice = Callable[[Kind, int], Regularizer | None]


@contextmanager
def watch(
    model: Any,
    on_call: OnCall,
    *,
    instead: Choice | None = None,
    derivatives: bool = False,
    with_tokens: Sequence[Attention] = (),
) -> Iterator[dict[str, tuple[Kind, int]]]:
    """While open, every attention call of the model is handed to `on_call`, in the order it runs.

    >>> with watch(model, calls.append):
    ...     model(**inputs)

    Yields path -> (kind, layer) of the attentions met so far. One pass; in evaluation mode; the
    model is put back as it was.

    instead: the regulariser of an attention; None: softmax, as the model was trained.
    derivatives: whether the calls and the model's output can be differentiated.
    with_tokens: attentions whose calls also hold the tokens that enter them.
    """
    from fenchel.hf.convert import attention_modules

    modules = attention_modules(model)
    if any(module in _WATCHED for module in modules.values()):
        raise RuntimeError("this model is being watched already, by another thread or from within")
    _check_softmax(model)
    _register()
    met: dict[str, tuple[Kind, int]] = {}
    before = {id(config): config._attn_implementation for config in configs_of(model)}
    with evaluating(model), ExitStack() as undo, torch.set_grad_enabled(derivatives):
        undo.callback(_restore, model, before)
        model.set_attn_implementation(_NAME)
        for path, module in modules.items():
            _WATCHED[module] = _Watch(path, on_call, met, instead)
            undo.callback(_WATCHED.pop, module, None)
            hook = module.register_forward_pre_hook(_note_source, with_kwargs=True)
            undo.callback(hook.remove)
        for attention in with_tokens:
            for hook in _record_tokens(attention, _WATCHED[attention.module]):
                undo.callback(hook.remove)
        yield met


def capture_attentions(
    model: Any, attentions: Sequence[Attention], run: Callable[[], object]
) -> list[Call]:
    """The calls of these attentions during one pass, in their order, with the entering tokens.

    run: one pass of the model, or of the part that holds the attentions.
    """
    calls: dict[str, Call] = {}

    def record(call: Call) -> None:
        calls[call.path] = call

    with watch(model, record, with_tokens=attentions):
        run()
    return [calls[attention.path] for attention in attentions]


@dataclass
class _Watch:
    path: str
    on_call: OnCall
    met: dict[str, tuple[Kind, int]]
    instead: Choice | None
    foreign: bool = False  # the keys of the current call come from elsewhere
    query_tokens: Tensor | None = None
    key_tokens: Tensor | None = None

    def place(self, causal: bool) -> tuple[Kind, int]:
        """Kind and number, in the order of the calls."""
        if self.path in self.met:
            raise ValueError(
                f"{self.path} attends more than once in a pass, as the shared layers of ALBERT do: "
                "its layers cannot be told apart, and such models are not supported"
            )
        kind: Kind = "cross" if self.foreign else "decoder" if causal else "encoder"
        number = sum(other == kind for other, _ in self.met.values())
        self.met[self.path] = (kind, number)
        return kind, number

    def regularizer(self, kind: Kind, layer: int) -> Regularizer:
        chosen = None if self.instead is None else self.instead(kind, layer)
        return Shannon() if chosen is None else chosen

    def tokens(self) -> EnteringTokens | None:
        if self.query_tokens is None or self.key_tokens is None:
            return None
        return EnteringTokens(self.query_tokens, self.key_tokens)


_WATCHED: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def _record_tokens(attention: Attention, watch: _Watch) -> Iterator[Any]:
    def record_queries(_: Any, args: Any) -> None:
        watch.query_tokens = args[0]

    def record_keys(_: Any, args: Any) -> None:
        watch.key_tokens = args[0]

    yield attention.query.register_forward_pre_hook(record_queries)
    yield attention.key.register_forward_pre_hook(record_keys)


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


def _attend(
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
    from fenchel.hf.translate import TranslatedAttention, means_causal, split_mask

    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which changes its scores; the lens looks "
                "at scores that are products"
            )
    visible, bias = split_mask(attention_mask, position_bias)
    causal = means_causal(module, is_causal, attention_mask, query)
    if causal:
        past = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        visible = past.tril()[None, None]
    arguments = (query, key, value, attention_mask, scaling, dropout)
    others |= {"is_causal": is_causal, "position_bias": position_bias}
    watch = _WATCHED.get(module)
    if watch is None:
        return TranslatedAttention(Shannon())(module, *arguments, **others)
    kind, layer = watch.place(causal or bool(getattr(module, "is_causal", 0)))
    attend = TranslatedAttention(watch.regularizer(kind, layer))
    output, weights = attend(module, *arguments, **others)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    operands = (query, key, value, visible, bias, scale)
    watch.on_call(Call(watch.path, layer, kind, *operands, output, watch.tokens()))
    return output, weights


def _check_softmax(model: Any) -> None:
    """An audit is of softmax, and of what would change: a converted model is refused."""
    for config in configs_of(model):
        name = str(config._attn_implementation or "")
        if name.startswith("fenchel:") and name not in (_NAME, "fenchel:softmax"):
            raise ValueError(
                f"the attention of {type(model).__name__} was converted ({name}); an audit looks "
                'at softmax. Lead it back with model.set_attn_implementation("sdpa"), or compare '
                "outputs before and after the conversion yourself"
            )


def _register() -> None:
    from fenchel.hf.library import AttentionInterface, AttentionMaskInterface

    if _NAME not in AttentionInterface():
        AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])
        AttentionInterface.register(_NAME, _attend)


def configs_of(model: Any) -> list[Any]:
    """Every configuration within, once."""
    configs = {id(one.config): one.config for one in model.modules() if _has_config(one)}
    return list(configs.values())


def _has_config(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def _restore(model: Any, before: dict[int, str]) -> None:
    for config in configs_of(model):
        if id(config) in before:
            config._attn_implementation = before[id(config)]
