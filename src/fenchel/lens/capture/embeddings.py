"""The vectors of tokens as they enter a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

_SIDES = {"input_ids": "input", "decoder_input_ids": "output"}


@contextmanager
def watch_embeddings(model: Any, arguments: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """While open, the vectors of tokens as they enter the model, made leaves: "input", "output".

    They come from the embedding that is given the tokens' numbers, whatever it is called; those of
    an image from the layer that the model names as its input.
    """
    ids = {side: arguments[name] for name, side in _SIDES.items() if name in arguments}
    entered: dict[str, Tensor] = {}

    def take(module: nn.Module, args: Any, output: Any) -> Tensor | None:
        side = next(
            (s for s, x in ids.items() if s not in entered and _embeds(module, args, x)), None
        )
        if side is None and not ids and module is model.get_input_embeddings():
            side = "input"
        if side is None:
            return None
        entered[side] = output.detach().requires_grad_()
        return entered[side]

    hook = register_module_forward_hook(take)  # type: ignore[arg-type]  # it may replace
    try:
        yield entered
    finally:
        hook.remove()


def _embeds(module: nn.Module, args: Any, ids: Tensor) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and len(args) > 0
        and isinstance(args[0], Tensor)
        and args[0].shape == ids.shape
        and torch.equal(args[0], ids)
    )
