"""DTensors: softmax attention takes them, as torch does; the rest refuses and names the way out."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import local_map

import fenchel as fl
from tests.distributed import run_spread
from tests.tracing.cases import normal

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
PLACES = [[Shard(0)], [Shard(1)], [Replicate()]]
ENTMAX = fl.Tsallis(1.5)


def operands():
    return [normal(2, 4, 6, 8, seed=seed).requires_grad_() for seed in range(3)]


def distributed(mesh, place):
    return [distribute_tensor(x, mesh, place) for x in operands()]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_refused_by_name(mesh, place):
    q, k, v = distributed(mesh, place)
    local = operands()
    with pytest.raises(NotImplementedError, match=r"query is a DTensor.*local_map"):
        fl.attention(q, k, v, ENTMAX)
    with pytest.raises(NotImplementedError, match=r"key is a DTensor.*local_map"):
        fl.attention(local[0], k, local[2], ENTMAX)
    for regularizer in (fl.Shannon(), ENTMAX, fl.Norm(2.0), fl.Budget(2.0), fl.Fused(0.1)):
        with pytest.raises(NotImplementedError, match=r"scores is a DTensor.*local_map"):
            fl.solve(q, regularizer)
    with pytest.raises(NotImplementedError, match=r"is a DTensor.*local_map"):
        fl.attention_solution(q, k, v, ENTMAX)


@pytest.mark.slow  # torch looks for a placement of its own attention
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_softmax_attention(mesh, place):
    output = fl.attention(*distributed(mesh, place))
    torch.testing.assert_close(output.full_tensor(), fl.attention(*operands()))


def assert_way_out(mesh, place):
    """Heads or sequences with several processes: output and gradients of the whole."""
    attend = local_map(
        partial(fl.attention, regularizer=ENTMAX, is_causal=True),
        out_placements=place,
        in_placements=(place, place, place),
        device_mesh=mesh,
    )
    parts, whole = distributed(mesh, place), operands()
    output, expected = attend(*parts), fl.attention(*whole, ENTMAX, is_causal=True)
    torch.testing.assert_close(output.full_tensor(), expected)
    gradients = torch.autograd.grad(output.square().sum(), parts)
    others = torch.autograd.grad(expected.square().sum(), whole)
    for actual, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(actual.full_tensor(), other)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_way_out(mesh, place):
    assert_way_out(mesh, place)


def work(rank):
    for place in PLACES[:2]:
        assert_way_out(init_device_mesh("cpu", (2,)), place)
    return rank


@pytest.mark.slow
def test_the_way_out_with_two_processes():
    assert run_spread(work) == [0, 1], "both came through"
