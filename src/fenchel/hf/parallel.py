"""Models whose heads or weights are spread over processes: what a regulariser means there.

Under tensor parallelism each process computes some heads. A regulariser stays whole in every
process, so that it is saved and stepped as in one; each call takes the rows of its heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.regularizers.contract import Regularizer, resolve_regularizer


class HeadSplit(NamedTuple):
    """How the heads of one attention are spread."""

    mesh: Any  # the processes among which they are
    heads: int  # in this process


def is_spread(model: nn.Module) -> bool:
    """Whether processes hold parts of the weights. Such a model cannot be copied."""
    if any(_is_spread_tensor(x) for x in model.parameters()):
        return True
    return any(type(x).__name__ == "FullyShardedDataParallel" for x in model.modules())


def check_trained(model: nn.Module, regularizers: Iterable[nn.Module]) -> None:
    """Refuse what trains beside a wrapper that averages gradients: it does not know newcomers, and
    they would become different numbers in each process."""
    wrapper = next((x for x in model.modules() if _averages_gradients(x)), None)
    trains = any(x.requires_grad for held in regularizers for x in held.parameters())
    if wrapper is not None and trains:
        raise ValueError(
            f"{type(wrapper).__name__} averages the gradients of the parameters that it was given, "
            "and a regulariser that trains would come too late; convert the model before "
            "fully_shard, FullyShardedDataParallel or DistributedDataParallel"
        )


def _averages_gradients(module: nn.Module) -> bool:
    if not _may_be_spread():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (FSDPModule, FullyShardedDataParallel, nn.parallel.DistributedDataParallel)
    return isinstance(module, wrappers)


def regularizer_here(
    regularizer: Regularizer | nn.Module, module: nn.Module, query: Tensor, value: Tensor
) -> Regularizer | nn.Module:
    """The regulariser of the heads that this process computes.

    query: (batch, head, query, d); value: (batch, kv_head, key, d).
    """
    split = split_of(module, query.shape[1], value.shape[3])
    if split is None:
        return regularizer
    omega = resolve_regularizer(regularizer)
    if not is_dataclass(omega):
        return omega
    tensors = {name: x for name, x in vars(omega).items() if isinstance(x, Tensor)}
    here = {name: _rows_here(x, split) for name, x in tensors.items()}
    return replace(omega, **here) if here else omega


def split_of(module: nn.Module, heads: int, width: int) -> HeadSplit | None:
    """None: this process computes all heads. A projection that takes or makes exactly the heads of
    this process, and is a part of a larger one, says otherwise."""
    if not _may_be_spread():
        return None
    for weight in _spread_weights(module):
        for placement, axis in zip(weight.placements, range(weight.device_mesh.ndim), strict=True):
            if not placement.is_shard():
                continue
            whole, part = weight.shape[placement.dim], weight.to_local().shape[placement.dim]
            if part == heads * width and whole > part:
                return HeadSplit(_mesh_axis(weight.device_mesh, axis), heads)
    return None


def _rows_here(parameter: Tensor, split: HeadSplit) -> Tensor:
    """Of one number per head (..., head, 1) those of this process; a number for all as it is.

    Gradients are of the heads here: those of all processes are put together on the way back, and
    the regulariser stays the same in every process.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    everywhere = DTensor.from_local(parameter, split.mesh, [Replicate()], run_check=False)
    heads = parameter.shape[-2] if parameter.ndim > 1 else 1
    if heads == 1:
        return everywhere.to_local(grad_placements=[Partial()])
    if heads != split.heads * split.mesh.size():
        raise ValueError(
            f"one number per head must be of all heads, {split.heads * split.mesh.size()}, also "
            f"where {split.mesh.size()} processes compute {split.heads} each; got the shape "
            f"{tuple(parameter.shape)}"
        )
    return everywhere.redistribute(placements=[Shard(parameter.ndim - 2)]).to_local()


def _may_be_spread() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_spread_tensor(x: Tensor) -> bool:
    return type(x).__name__ == "DTensor"  # by name: its import is slow, and often for nothing


def _spread_weights(module: nn.Module) -> Iterator[Any]:
    return (x for x in module.parameters() if x.ndim > 1 and _is_spread_tensor(x))


def _mesh_axis(mesh: Any, axis: int) -> Any:
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axis]]
