"""What a model returns, whatever it is called: a state of every token, and predictions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fenchel.lens.heads.datasets import PreparedBatch


def last_states(outputs: Any) -> Tensor:
    """(B, Q, width), of the decoder where there is one."""
    states = getattr(outputs, "last_hidden_state", None)
    if isinstance(states, Tensor) and states.ndim == 3:
        return states
    for name in ("decoder_hidden_states", "hidden_states"):
        states = getattr(outputs, name, None)
        if states:
            last: Tensor = states[-1]
            return last
    raise ValueError(
        f"{type(outputs).__name__} holds neither last_hidden_state nor hidden_states: looked for "
        "a state of every token; give the model without its head"
    )


def embedding(states: Tensor, prepared: PreparedBatch) -> Tensor:
    """The mean over the tokens that count. (B, Q, width) -> (B, width)"""
    weight = prepared.last.real.to(states.dtype).unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1)


def logits_of(outputs: Any) -> Tensor | None:
    """(B, Q, words) of a language model, else None."""
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 3 else None
