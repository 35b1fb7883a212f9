"""Two processes that share a batch train a block to the weights of one process."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fenchel as fl

STEPS, BATCH, TOKENS, WIDTH = 20, 4, 24, 16


class Block(nn.Module):
    """Attention with an alpha of its own for each head, a residual, and a perceptron."""

    def __init__(self):
        super().__init__()
        omega = fl.nn.LearnedTsallis(2)
        self.attention = fl.nn.MultiheadAttention(WIDTH, 2, batch_first=True, regularizer=omega)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU())
        self.out = nn.Linear(32, WIDTH)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.out(self.mlp(x))


def train(model, share):
    """Mean squared error against a fixed target, on this share of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, target = torch.randn(2, BATCH, TOKENS, WIDTH, generator=generator)
        optimizer.zero_grad()
        (model(2 * x[share]) - target[share]).square().mean().backward()
        optimizer.step()


def fresh():
    torch.manual_seed(0)
    return Block()


def work(rank, port, path):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        model = nn.parallel.DistributedDataParallel(fresh())
        train(model, slice(rank, None, 2))
        if rank == 0:
            torch.save(model.module.state_dict(), path)
    finally:
        dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own, of DDP
def test_two_processes_train_as_one(tmp_path):
    mp.spawn(work, args=(free_port(), tmp_path / "weights.pt"), nprocs=2)
    alone = fresh()
    before = {name: x.clone() for name, x in alone.state_dict().items()}
    train(alone, slice(None))
    together = torch.load(tmp_path / "weights.pt")
    for name, weight in alone.state_dict().items():
        scale = weight.abs().max()
        assert (together[name] - weight).abs().max() <= 1e-5 * scale, name
        assert (before[name] - weight).abs().max() > 1e-4 * scale, f"{name} did not train"
