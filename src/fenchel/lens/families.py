"""Which modules of a transformers model are attentions, and what their parts are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

Kind = Literal["encoder", "decoder", "cross"]


@dataclass(frozen=True)
class Family:
    """Names, in a family of models: of the attention's parts and its sizes."""

    ending: str  # of the attention's class
    query: str
    key: str
    value: str
    heads: str
    head_size: str
    pair: bool = False  # of an encoder and a decoder


_BERT = Family(
    "SelfAttention",
    "query",
    "key",
    "value",
    "num_attention_heads",
    "attention_head_size",
)
_T5 = Family("T5Attention", "q", "k", "v", "n_heads", "key_value_proj_dim", pair=True)

# By `config.model_type`.
FAMILIES = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "t5": _T5,
    "mt5": _T5,
}


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a model: scores <K x_i + b, Q y_k + b'> times its scaling.

    path: of the module within the model.
    """

    path: str
    module: Any
    family: Family
    kind: Kind

    @property
    def query(self) -> nn.Linear:
        return self._linear(self.family.query)

    @property
    def key(self) -> nn.Linear:
        return self._linear(self.family.key)

    @property
    def value(self) -> nn.Linear:
        return self._linear(self.family.value)

    @property
    def heads(self) -> int:
        return int(getattr(self.module, self.family.heads))

    @property
    def head_size(self) -> int:
        return int(getattr(self.module, self.family.head_size))

    @property
    def scaling(self) -> float:
        """The model's own factor of the scores: 1 / sqrt(head_size) in BERT, 1 in T5."""
        return float(self.module.scaling)

    def _linear(self, name: str) -> nn.Linear:
        projection: nn.Linear = getattr(self.module, name)
        return projection

    def per_head(self, x: Tensor) -> Tensor:
        """(heads * head_size, ...) -> (heads, head_size, ...)"""
        return x.reshape(self.heads, self.head_size, *x.shape[1:])


def find_attentions(model: Any, kind: Kind) -> list[Attention]:
    """Those of one kind, from the first layer to the last."""
    if kind not in get_args(Kind):
        raise ValueError(f"attention must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    family = family_of(model)
    _check_implementation(model)
    every = [
        Attention(path, module, family, _kind(path, module, family))
        for path, module in model.named_modules()
        if type(module).__name__.endswith(family.ending)
    ]
    chosen = [attention for attention in every if attention.kind == kind]
    if not chosen:
        kinds = ", ".join(sorted({attention.kind for attention in every})) or "none"
        raise ValueError(f"{type(model).__name__} has no {kind} attention; it has: {kinds}")
    return chosen


def family_of(model: Any) -> Family:
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "model_type"):
        raise TypeError(
            f"model must be a transformers model, got {type(model).__name__}; "
            "load one with fenchel.lens.load(folder)"
        )
    family = FAMILIES.get(str(config.model_type))  # type: ignore[union-attr]
    if family is None:
        raise ValueError(
            f"{type(model).__name__} is of type {config.model_type!r}; "  # type: ignore[union-attr]
            f"the audit knows {', '.join(FAMILIES)}"
        )
    return family


def _kind(path: str, module: Any, family: Family) -> Kind:
    if not family.pair:
        return "decoder" if module.is_causal else "encoder"
    if path.endswith("EncDecAttention"):
        return "cross"
    return "decoder" if module.is_decoder else "encoder"


def _check_implementation(model: Any) -> None:
    """Masks are read as these two get them; and only softmax is the first-order solution."""
    name = model.config._attn_implementation
    if name not in ("eager", "sdpa"):
        raise ValueError(
            f"the audit is of softmax attention through eager or sdpa, but the model is on "
            f'{name!r}; use model.set_attn_implementation("eager")'
        )


def place_name(kind: str, layer: int) -> str:
    """How an attention is called in tallies, documents and pages, such as "encoder/0"."""
    return f"{kind}/{layer}"
