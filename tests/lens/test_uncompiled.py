"""While a model is looked at, compiled code runs as written; afterwards it is compiled again."""

import torch

from fenchel._uncompiled import uncompiled


def count_graphs(function):
    """How many graphs torch compiles for one call."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.ones(3))
    return len(graphs)


def twice(x):
    return 2 * x


def test_threads_that_overlap_leave_nothing_behind():
    assert count_graphs(twice) == 1
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert count_graphs(twice) == 0, "the second is still inside"
    second.__exit__(None, None, None)
    assert count_graphs(twice) == 1
