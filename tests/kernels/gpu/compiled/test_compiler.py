"""What the compilers say of a kernel is read right: planted spills, too much shared memory."""

import pytest
import torch

from tests import needs

triton = needs.package("triton", covers="kernels compiled for devices that are not here")
tl = pytest.importorskip("triton.language")

from tests.kernels.gpu.compiler import DEVICES, compiled_for  # noqa: E402 - triton is there


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def subtract_largest(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(source + at)
    tl.store(target + at, x - tl.max(x, 0))


@triton.jit
def multiply(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)
    i, j = at[:, None] * N, at[None, :]
    tl.store(c + i + j, tl.dot(tl.load(a + i + j), tl.load(b + i + j)))


@triton.jit
def add_bfloat16(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at) + source)


def absent(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_kernel_passes(device):
    with compiled_for(device) as launches:
        for count in (1000, 1000, 1024):  # the last is another kernel: a multiple of 16
            copy[(4,)](absent(1024), absent(1024), count, BLOCK=256)
    assert [launch.kernel for launch in launches] == ["copy", "copy"]
    for launch in launches:
        launch.check()
        assert 0 < launch.registers < 64


@pytest.mark.parametrize("device", ["sm_80", "gfx942"])
def test_spills_are_seen(device):
    """A thread holds more numbers than it is allowed registers."""
    few = {"sm_80": {"maxnreg": 32}, "gfx942": {"waves_per_eu": 8}}[device]
    with compiled_for(device) as launches:
        subtract_largest[(1,)](absent(2**13), absent(2**13), BLOCK=2**13, num_warps=1, **few)
    with pytest.raises(AssertionError, match="subtract_largest on .* spills"):
        launches[0].check()


def test_shared_memory_is_seen():
    """What a block of Hopper's can have is too much for Turing's."""
    operands = [absent(128, 128, dtype=torch.float16) for _ in range(2)]
    with compiled_for("sm_90") as launches:
        multiply[(1,)](*operands, absent(128, 128), N=128)
    launches[0].check()
    small = DEVICES["sm_75"]
    assert launches[0].shared > 0
    object.__setattr__(launches[0], "device", small.__class__("small", small.target, 1024))
    with pytest.raises(AssertionError, match="multiply on small takes .* bytes of shared memory"):
        launches[0].check()


def test_what_does_not_compile_raises():
    with (
        pytest.raises(triton.compiler.errors.CompilationError),
        compiled_for("sm_80"),
    ):
        add_bfloat16[(1,)](absent(16), absent(16), BLOCK=16)


def test_host_code_that_reads_a_value_fails():
    with pytest.raises(RuntimeError, match="meta"), compiled_for("sm_80"):
        copy[(1,)](absent(16), absent(16), int(absent(1)), BLOCK=16)
