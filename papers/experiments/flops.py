"""Multiplications and additions of one training step, counted as they are called."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from papers.experiments.loop import Study


def step_flops(study: Study, model: nn.Module, batch: int) -> int:
    """Forward and backward of a step of `batch` examples, a mean over what a step can be.

    Products of matrices, convolutions, recurrent layers and attention count, each attention as if
    it were dense; what is done entry by entry, EM and integrals of densities do not.
    """
    examples = study.order(0, batch, 0)[0]
    was_training = model.training
    model.train()
    total = 0.0
    device = next(model.parameters()).device
    for share, case in study.cases(examples):
        if share == 0:
            continue
        with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
            study.loss(model, {k: v.to(device) for k, v in case.items()}).backward()
        total += share * counter.get_total_flops()
    model.zero_grad()
    model.train(was_training)
    return round(total)


def _attention(query: list[int], key: list[int], *_: Any, **__: Any) -> int:
    """Shapes (..., n, d) and (..., m, d): two products."""
    return 4 * math.prod(query[:-1]) * key[-2] * query[-1]


def _attention_backward(
    _: list[int], query: list[int], key: list[int], *__: Any, **___: Any
) -> int:
    """Weights again, then their gradient and those of query, key and value: five products."""
    return 10 * math.prod(query[:-1]) * key[-2] * query[-1]


def _average(query: list[int], key: list[int], *_: Any, **__: Any) -> int:
    """Shapes (g, r, q, d) and (g, n, d): scores, and weights averaged over the queries."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + 1)


def _average_backward(_: list[int], query: list[int], key: list[int], *__: Any, **___: Any) -> int:
    """Scores again, rewards and averages, and the gradients of query and key."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2)


def _recurrent(read: list[int], *weights: Any, **_: Any) -> int:
    """Words (..., width) and the two matrices they meet; or all weights of the layer, in a list."""
    first = weights[0]
    given = weights[:2] if isinstance(first[0], int) else first
    matrices = [shape for shape in given if len(shape) == 2]
    return 2 * math.prod(read[:-1]) * sum(map(math.prod, matrices))


def _recurrent_backward(read: list[int], *weights: Any, **_: Any) -> int:
    """The gradients of what was read and of the weights."""
    return 2 * _recurrent(read, *weights)


_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_MORE = {
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    torch.ops.aten._cudnn_rnn: _recurrent,
    torch.ops.aten._cudnn_rnn_backward: _recurrent_backward,
    _CPU: _attention,
    _CPU_BACKWARD: _attention_backward,
    torch.ops.fenchel.tsallis_attention: _attention,
    torch.ops.fenchel.tsallis_attention_backward: _attention_backward,
    torch.ops.fenchel.average_attention: _average,
    torch.ops.fenchel.average_attention_backward: _average_backward,
}
