"""Two processes that share a batch train a block to the weights of one process."""

import pytest
import torch
from torch import nn

import fenchel as fl
from tests.distributed import PROCESSES, run_spread

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


def work(rank):
    model = nn.parallel.DistributedDataParallel(fresh())
    train(model, slice(rank, None, PROCESSES))
    return model.module.state_dict()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own, of DDP
def test_two_processes_train_as_one():
    together, _ = run_spread(work)
    alone = fresh()
    before = {name: x.clone() for name, x in alone.state_dict().items()}
    train(alone, slice(None))
    for name, weight in alone.state_dict().items():
        scale = weight.abs().max()
        assert (together[name] - weight).abs().max() <= 1e-5 * scale, name
        assert (before[name] - weight).abs().max() > 1e-4 * scale, f"{name} did not train"
