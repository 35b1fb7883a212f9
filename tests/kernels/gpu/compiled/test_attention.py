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


def biased(dtype, dim):
    """Masks, biases and masses by pair, softcap, dropout, a value of another width."""
    pairs = (BATCH, HEADS, N, M)
    return plain(dtype, dim, value_dim=40)._replace(
        mask=absent(*pairs, dtype=torch.bool),
        bias=absent(*pairs),
        mass=absent(*pairs),
        seed=absent(1, dtype=torch.int64),
        softcap=20.0,
        dropout=0.1,
    )


def structured(dtype, dim):
    """Tables by position and by key, limits by query, a sink."""
    positions = (BATCH, HEADS, N + M - 1)
    limits = absent(BATCH, HEADS, N, dtype=torch.int64)
    return general(dtype, dim)._replace(
        start=limits,
        stop=limits,
        relative=absent(*positions),
        relative_log_mass=absent(*positions),
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


CALLS = {make.__name__: make for make in (plain, sparsemax, general, biased, structured, packed)}
TRAINS = {"general": {"eps"}, "biased": {"bias"}, "structured": set(TRAINED) - {"bias", "mass"}}


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
        *("rows", "row_tiles", "column_listing", "columns"),
    }
    for compiled in launches:
        compiled.check()


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
@pytest.mark.parametrize(("name", "device", "dtype", "dim"), combinations())
def test_every_device(name, device, dtype, dim):
    check(device, name, dtype, dim)
