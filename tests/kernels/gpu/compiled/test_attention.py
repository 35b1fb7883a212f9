"""Kernels of attention, forward and backward, compiled for every device, dtype and head width."""

import pytest
import torch

from tests import needs

needs.package("triton", covers="kernels of attention, compiled for devices that are not here")

from fenchel._kernels.attention_call import TRAINED, Arguments, Saved  # noqa: E402
from fenchel._kernels.gpu import launch  # noqa: E402 - triton is there
from tests.kernels.gpu.compiler import DEVICES, compiled_for  # noqa: E402

BATCH, HEADS, KV_HEADS, N, M = 2, 4, 2, 300, 333
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def absent(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def plain(dtype, dim, value_dim=None):
    """Causal, alpha = 1.5, grouped heads."""
    query, key = (
        absent(BATCH, HEADS, N, dim, dtype=dtype),
        absent(BATCH, KV_HEADS, M, dim, dtype=dtype),
    )
    value = absent(BATCH, KV_HEADS, M, value_dim or dim, dtype=dtype)
    eps = absent(BATCH, HEADS, N, dtype=torch.float64)
    numbers = {"scale": dim**-0.5, "highest": M - N, "queries": N, "longest_query": N}
    return Arguments(query, key, value, eps, longest_key=M, gpu=True, uniform_eps=0.5, **numbers)


def sparsemax(dtype, dim):
    return plain(dtype, dim)._replace(uniform_eps=1.0)


def general(dtype, dim):
    """alpha by row, with its gradient."""
    return plain(dtype, dim)._replace(uniform_eps=-1.0)


def masked(dtype, dim):
    """A mask by pair, dropout, a value of another width."""
    return plain(dtype, dim, value_dim=40)._replace(
        mask=absent(BATCH, HEADS, N, M, dtype=torch.bool),
        seed=absent(1, dtype=torch.int64),
        dropout=0.1,
    )


def biased(dtype, dim):
    """A bias by pair, with its gradient, and softcap."""
    return plain(dtype, dim)._replace(bias=absent(BATCH, HEADS, N, M), softcap=20.0)


def weighed(dtype, dim):
    """Masses by pair."""
    return plain(dtype, dim)._replace(mass=absent(BATCH, HEADS, N, M))


def positioned(dtype, dim):
    """A table by relative position, with its gradient, within a window, and a sink."""
    limits = absent(BATCH, HEADS, N, dtype=torch.int64)
    return plain(dtype, dim)._replace(
        start=limits,
        stop=limits,
        relative=absent(BATCH, HEADS, N + M - 1),
        sink=absent(BATCH, HEADS, dtype=torch.float64),
    )


def keyed(dtype, dim):
    """Biases and masses by key, a sink with a mass, alpha by row, and all of their gradients."""
    return general(dtype, dim)._replace(
        of_key=absent(BATCH, HEADS, M),
        of_key_log_mass=absent(BATCH, HEADS, M),
        sink=absent(BATCH, HEADS, dtype=torch.float64),
        sink_log_mass=absent(BATCH, HEADS, dtype=torch.float64),
    )


def packed(dtype, dim):
    """Sequences one after the other."""
    x = plain(dtype, dim)
    starts = absent(4, dtype=torch.int64)
    one = {name: getattr(x, name)[:1] for name in ("query", "key", "value", "eps")}
    return x._replace(query_start=starts, key_start=starts, **one)


MAKERS = (plain, sparsemax, general, masked, biased, weighed, positioned, keyed, packed)
CALLS = {make.__name__: make for make in MAKERS}
TRAINS = {
    "general": {"eps"},
    "biased": {"bias"},
    "weighed": {"mass"},
    "positioned": {"relative", "sink"},
    "keyed": {"eps", "of_key", "of_key_log_mass", "sink", "sink_log_mass"},
}


def compile_call(device, name, dtype, dim):
    x = CALLS[name](dtype, dim)
    with compiled_for(device) as launches:
        output, *saved = launch.forward(x, True)
        launch.forward(x, False)
        trains = TRAINS.get(name, ())
        launch.backward(output, x, Saved(*saved), [part in trains for part in TRAINED])
    return launches


def check(device, name, dtype, dim):
    launches = compile_call(device, name, dtype, dim)
    assert {x.kernel for x in launches} >= {
        *("bound", "listing", "pack", "attend", "attend_tiles"),
        *("odd_blocks", "odd_units", "unfold", "rows", "column_listing", "columns"),
    }
    for compiled in launches:
        compiled.check(
            may_spill=device == "gfx1100"
        )  # whose threads have half of gfx942's registers


@pytest.mark.parametrize(
    ("device", "dtype", "dim"),
    [("sm_80", torch.bfloat16, 64), ("sm_90", torch.float16, 128), ("gfx942", torch.bfloat16, 64)],
)
def test_a_sample(device, dtype, dim):
    check(device, "plain", dtype, dim)


def combinations():
    for name in CALLS:
        for device in DEVICES.values():
            for dtype in DTYPES:
                if dtype != torch.bfloat16 or device.has_bfloat16:
                    for dim in (64, 128) if name != "plain" else (16, 64, 80, 128, 256):
                        yield name, device.name, dtype, dim


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device", "dtype", "dim"), list(combinations()))
def test_every_device(name, device, dtype, dim):
    check(device, name, dtype, dim)
