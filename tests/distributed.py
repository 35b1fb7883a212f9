"""Several processes on one machine, for tests of models that are spread over them."""

import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed

PROCESSES = 2


def run_spread(work, *arguments):
    """What work(rank, *arguments) returned in each process. It is a function of a module."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_enter, (folder, work, arguments), nprocs=PROCESSES)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(PROCESSES)]


def _enter(rank, folder, work, arguments):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    with _group(rank, PROCESSES, folder):
        torch.save(work(rank, *arguments), Path(folder) / f"{rank}.pt")
        distributed.barrier()


@contextmanager
def alone(folder):
    """A group of this process only."""
    with _group(0, 1, folder):
        yield


@contextmanager
def _group(rank, size, folder):
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        yield
    finally:
        distributed.destroy_process_group()
