"""What computes attention where `replace_sdpa` cannot replace it: refused by name, never softmax in
silence."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.functional import multi_head_attention_forward, softmax
from torch.utils.checkpoint import checkpoint

_CONVERT = "fenchel.nn.convert or fenchel.hf.convert"
_MULTIHEAD = (
    "torch.nn.MultiheadAttention keeps its attention out of replace_sdpa's reach; "
    "convert the model with fenchel.nn.convert(model, regularizer)"
)
_NAMED = {
    multi_head_attention_forward: _MULTIHEAD,
    torch._native_multi_head_attention: _MULTIHEAD,
    torch._transformer_encoder_layer_fwd: _MULTIHEAD,
    checkpoint: (  # which only the compiler shows to a mode
        "torch.compile keeps the function of a checkpoint out of replace_sdpa's reach; compile "
        f"that function instead, or convert the model with {_CONVERT}"
    ),
}
_BY_HAND = {softmax, torch.softmax, Tensor.softmax}
_ATTENTION = re.compile("attention|attn|multi_head|transformer_encoder", re.IGNORECASE)
_OWN = {__name__, "fenchel._attention.replace"}
_COMPILER = "torch._dynamo.symbolic_convert"
_SCRIPTED = re.compile(rf"\w+::\w*({_ATTENTION.pattern})\w*")


def refuse(func: Any) -> None:
    """Raise if this function is an attention, or a part of one, that nobody can replace."""
    if func in _NAMED:
        raise RuntimeError(_NAMED[func])
    if func in _BY_HAND:
        _refuse_by_hand()
    elif isinstance(func, OpOverload | OpOverloadPacket):
        _refuse_operator(str(func))


def _refuse_operator(name: str) -> None:
    """name: as in aten._scaled_dot_product_flash_attention_for_cpu.default."""
    if _ATTENTION.search(name) and not name.startswith("fenchel."):
        raise RuntimeError(
            f"torch.ops.{name} computes softmax and cannot be replaced inside replace_sdpa; call "
            "torch.nn.functional.scaled_dot_product_attention, or fenchel.attention"
        )
    if name in ("aten._softmax.default", "aten._safe_softmax.default"):
        _refuse_decomposed()


def _refuse_by_hand() -> None:
    """A softmax in an attention of transformers; wherever else, a softmax is just that."""
    for code, module in _callers():
        package = module.partition(".")[0]
        if package == "torch" or module in _OWN:
            continue
        if not package.startswith("transformers"):
            return
        if _ATTENTION.search(code.co_qualname):
            raise RuntimeError(
                f"{code.co_qualname} of {module} computes softmax by itself, out of "
                'replace_sdpa\'s reach; call model.set_attn_implementation("sdpa") first, or '
                "convert the model with fenchel.hf.convert(model, regularizer)"
            )
        if code.co_varnames[:1] == ("self",):  # the module that this softmax belongs to
            return


def _callers() -> Iterator[tuple[CodeType, str]]:
    """Code and module of those that run now, the innermost first; in a function that is being
    compiled, of those that will."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        step = frame.f_locals.get("self") if _module(frame) == _COMPILER else None
        if hasattr(step, "f_code"):  # the compiler's own picture of a frame
            frame = step
        yield frame.f_code, _module(frame)
        frame = frame.parent if hasattr(frame, "parent") else frame.f_back


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _refuse_decomposed() -> None:
    """An exported module that still knows that its softmax was an attention."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        graph = getattr(frame.f_locals.get("self"), "graph", None)
        if isinstance(graph, torch.fx.Graph):
            origins = (str(node.meta.get("torch_fn", "")) for node in graph.nodes)
            if any(_ATTENTION.search(origin) for origin in origins):
                raise RuntimeError(
                    "a module of torch.export whose attention was decomposed is out of "
                    "replace_sdpa's reach; call it before run_decompositions, or the model itself"
                )
            return
        frame = frame.f_back


def refuse_script(graph: Any) -> None:
    """A traced or scripted function with an attention inside."""
    if operator := _SCRIPTED.search(str(graph)):
        raise RuntimeError(
            f"what torch.jit traced or scripted runs {operator.group()} out of replace_sdpa's "
            "reach; call the model itself inside the block"
        )


# The compiler runs them while it traces.
_refuse_by_hand._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]
