"""The checker of interpreted kernels finds what is planted, and the mended interpreter is right."""

import pytest
import torch

from tests import needs

triton = needs.package("triton", covers="the checks of interpreted kernels")
tl = triton.language

from tests.kernels.gpu import interpreter  # noqa: E402 - triton is there

InterpreterError = triton.runtime.errors.InterpreterError
BLOCK = 16


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def copy_beyond(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at), mask=at < count)


@triton.jit
def store_beyond(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, at.to(tl.float32))


@triton.jit
def load_before(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at - 1))


@triton.jit
def add_program(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at) + tl.program_id(0))


@triton.jit
def write_twice(target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.zeros([BLOCK], tl.float32))
    tl.store(target + at, tl.zeros([BLOCK], tl.float32) + 1)


@triton.jit
def write_and_read(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))
    tl.store(source + at, tl.load(target + BLOCK - 1 - at))


@triton.jit
def read_and_write(target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(target + at) + 1)


@triton.jit
def pass_on(target):
    """Program i reads element i, which program i - 1 writes."""
    program = tl.program_id(0)
    value = tl.load(target + program)
    tl.store(target + program + 1, value)


@triton.jit
def read_later_written(target):
    """Program i reads element i + 1, which program i + 1 writes."""
    program = tl.program_id(0)
    value = tl.load(target + program + 1)
    tl.store(target + program, value)


@triton.jit
def two_values(target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at // 2, at.to(tl.float32))


@triton.jit
def one_value(target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at // 2, (at // 2).to(tl.float32))


@triton.jit
def add_atomically(target, BLOCK: tl.constexpr):
    tl.atomic_add(target + tl.arange(0, BLOCK), 1.0)


@triton.jit
def mixed_pointers(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(tl.where(at < 8, source + at, target + at)))


@triton.jit
def double_in_place(x):
    return x + x


@triton.jit
def double(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, double_in_place(tl.load(source + at)))


@triton.jit
def total(source, target, BLOCK: tl.constexpr):
    tl.store(target, tl.sum(tl.load(source + tl.arange(0, BLOCK)), 0).to(tl.float32))


@triton.jit
def larger(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(source + at)
    tl.store(target + at, tl.maximum(x, 0.0))


@triton.jit
def product(a, b, c, KIND: tl.constexpr):
    at = tl.arange(0, 16)
    i, j = at[:, None] * 16, at[None, :]
    out = tl.dot(tl.load(a + i + j), tl.load(b + i + j), input_precision=KIND)
    tl.store(c + i + j, out)


def numbers(count=BLOCK, **options):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(**options)


FAULTS = {
    "unmasked load": (
        "load from source out of bounds",
        copy_beyond,
        2,
        (numbers(20), numbers(20), 20),
    ),
    "unmasked store": (
        "store to target out of bounds",
        store_beyond,
        2,
        (numbers(20), numbers(20)),
    ),
    "before the first": (
        "load from source out of bounds: elements -1",
        load_before,
        1,
        (numbers(), numbers()),
    ),
    "two writers": (
        "program 1 writes to target what program 0 wrote",
        add_program,
        2,
        (numbers(), numbers()),
    ),
    "one writer twice": (
        "program 0 writes to target what program 0 wrote",
        write_twice,
        1,
        (numbers(),),
    ),
    "own read": (
        "program 0 reads what program 0 wrote to target",
        write_and_read,
        1,
        (numbers(), numbers()),
    ),
    "in place": ("program 0 writes to target what program 0 read", read_and_write, 1, (numbers(),)),
    "read after write": ("program 1 reads what program 0 wrote", pass_on, 2, (numbers(3),)),
    "write after read": (
        "program 1 writes to target what program 0 read",
        read_later_written,
        2,
        (numbers(3),),
    ),
    "two values": ("two values for an element of target", two_values, 1, (numbers(),)),
    "atomics": ("an atomic operation", add_atomically, 1, (numbers(),)),
    "mixed pointers": ("does not come from one tensor", mixed_pointers, 1, (numbers(), numbers())),
    "bfloat16": ("arithmetic in bfloat16", double, 1, (numbers(dtype=torch.bfloat16),) * 2),
    "bfloat16 sum": (
        "arithmetic in bfloat16",
        total,
        1,
        (numbers(dtype=torch.bfloat16), numbers(1)),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    message, kernel, programs, arguments = FAULTS[name]
    options = {"BLOCK": BLOCK} if "BLOCK" in kernel.arg_names else {}
    with pytest.raises(InterpreterError, match=message):
        kernel[(programs,)](*arguments, **options)


def test_a_right_kernel_passes_and_is_counted():
    source, target = numbers(20), torch.empty(20)
    with interpreter.watch("copy.target") as launches:
        copy[(2,)](source, target, 20, BLOCK=BLOCK)
    assert target.equal(source)
    assert [(x.kernel, x.loads, x.stores) for x in launches] == [("copy", 2, 2)]


def test_an_output_that_is_not_written_is_found_on_demand():
    source, target = numbers(20), torch.empty(20)
    copy[(1,)](source, target, 20, BLOCK=BLOCK)
    with (
        pytest.raises(interpreter.Fault, match="copy left 4 elements of target unwritten"),
        interpreter.watch("copy.target"),
    ):
        copy[(1,)](source, target, 20, BLOCK=BLOCK)


def test_two_lanes_may_agree():
    target = torch.zeros(8)
    one_value[(1,)](target, BLOCK=BLOCK)
    assert target.equal(torch.arange(8.0))


def test_a_stray_into_the_neighbour_is_found():
    """Two views of one storage: beyond the first lies memory of the second."""
    first, second = numbers(40).split(20)
    with pytest.raises(InterpreterError, match="load from source out of bounds"):
        copy_beyond[(2,)](first, torch.empty(20), 20, BLOCK=BLOCK)
    with pytest.raises(InterpreterError, match="load from source between the elements"):
        copy[(1,)](numbers(40)[::2], second, 16, BLOCK=BLOCK)


def test_views_of_one_storage_race():
    """Elements are the storage's, whatever tensor they are reached by."""
    both = numbers(24)
    with pytest.raises(InterpreterError, match="writes to target what program 0 read"):
        copy[(1,)](both[:16], both[8:], 16, BLOCK=BLOCK)


def test_bfloat16_is_rounded_to_nearest_even():
    values = torch.cat([numbers(1000) * 10.0**e for e in range(-38, 39, 4)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    for source, dtype in ((values, torch.bfloat16), (values.to(torch.bfloat16), torch.float32)):
        target = torch.empty(len(source), dtype=dtype)
        copy[(len(source) // BLOCK + 1,)](source, target, len(source), BLOCK=BLOCK)
        torch.testing.assert_close(target, source.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products(dtype):
    a, b = (numbers(256, dtype=dtype).reshape(16, 16) for _ in range(2))
    c = torch.empty(16, 16)
    product[(1,)](a, b, c, "ieee")
    assert (c.double() - a.double() @ b.double()).abs().max() < 1e-5


def test_tf32_is_as_coarse_as_it_is():
    a = numbers(256).reshape(16, 16)
    c = torch.empty(16, 16)
    product[(1,)](a, a, c, "tf32")
    error = (c.double() - a.double() @ a.double()).abs().max()
    assert 1e-4 < error < 1e-1


def test_the_larger_of_a_number_and_nan_is_the_number():
    source, target = torch.full((BLOCK,), torch.nan), torch.empty(BLOCK)
    larger[(1,)](source, target, BLOCK=BLOCK)
    assert target.equal(torch.zeros(BLOCK))
