"""A block entered in a generator or a coroutine holds while that runs, and only then."""

import asyncio
import contextlib

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fenchel as fl
from tests.attention.cases import dense, draw, largest_difference

OMEGA, OTHER = fl.Tsallis(1.5), fl.Tsallis(2.0)
X = draw(0, 2, 5, 4, scale=1.5)
EXPECTED = {omega: dense(X, X, X, omega) for omega in (fl.Shannon(), OMEGA, OTHER)}


def layer():
    return sdpa(X, X, X)


def assert_uses(omega, output):
    for other, expected in EXPECTED.items():
        assert (largest_difference(output, expected) <= 1e-13) == (other == omega)


def steps(omega=OMEGA):
    with fl.replace_sdpa(omega):
        yield layer()
        yield layer()
    yield layer()


@contextlib.contextmanager
def sparse(omega):
    with fl.replace_sdpa(omega):
        yield


class Entering:
    """Enters on behalf of its caller."""

    def __enter__(self):
        self.block = fl.replace_sdpa(OMEGA).__enter__()

    def __exit__(self, *raised):
        self.block.__exit__(*raised)


def test_a_suspended_generator_keeps_its_block_to_itself():
    generator = steps()
    for omega in (OMEGA, OMEGA, fl.Shannon()):
        assert_uses(omega, next(generator))
        assert_uses(fl.Shannon(), layer())  # the consumer


def test_blocks_of_the_consumer_hold_for_the_consumer():
    generator = steps()
    assert_uses(OMEGA, next(generator))
    with fl.replace_sdpa(OTHER):
        assert_uses(OTHER, layer())
        assert_uses(OMEGA, next(generator))
        assert_uses(OTHER, layer())
        assert_uses(OTHER, next(generator))  # its block has ended, the consumer's has not
    assert_uses(fl.Shannon(), layer())


def test_generators_end_in_any_order():
    first, second = steps(), steps(OTHER)
    assert_uses(OMEGA, next(first))
    assert_uses(OTHER, next(second))
    assert_uses(OMEGA, next(first))
    first.close()
    assert_uses(OTHER, next(second))
    assert_uses(fl.Shannon(), layer())
    del second
    assert torch._C._len_torch_function_stack() == 0


def test_one_block_for_several_generators():
    block = fl.replace_sdpa(OMEGA)

    def generate():
        with block:
            yield layer()
        yield layer()

    first, second = generate(), generate()
    assert_uses(OMEGA, next(first))
    assert_uses(OMEGA, next(second))
    assert_uses(fl.Shannon(), next(first))
    assert_uses(fl.Shannon(), next(second))
    assert torch._C._len_torch_function_stack() == 0


def test_what_a_generator_refuses_its_consumer_may_use():
    def generate():
        with fl.replace_sdpa(OMEGA):
            yield

    suspended, layer = generate(), torch.nn.MultiheadAttention(4, 2, dtype=torch.float64)
    next(suspended)
    assert layer(X, X, X)[0].isfinite().all()


@pytest.mark.parametrize("enter", [lambda: sparse(OMEGA), Entering], ids=["function", "class"])
def test_context_managers_around_a_block_pass_it_on(enter):
    def generate():
        with enter():
            yield layer()

    with enter():
        assert_uses(OMEGA, layer())
    with contextlib.ExitStack() as stack:
        stack.enter_context(enter())
        assert_uses(OMEGA, layer())
    generator = generate()
    assert_uses(OMEGA, next(generator))
    assert_uses(fl.Shannon(), layer())
    generator.close()
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture
def replaced():
    with fl.replace_sdpa(OMEGA):
        yield


def test_a_fixture_passes_its_block_on(replaced):
    assert_uses(OMEGA, layer())


def test_a_decorated_generator():
    @fl.replace_sdpa(OMEGA)
    def generate():
        yield layer()
        yield (yield)

    generator = generate()
    assert_uses(OMEGA, next(generator))
    assert_uses(fl.Shannon(), layer())
    next(generator)
    assert generator.send("sent") == "sent"


def test_coroutines_keep_their_blocks_apart():
    async def inner():
        await asyncio.sleep(0)
        return layer()

    async def entering(omega):
        with fl.replace_sdpa(omega):
            outputs = [layer()]
            await asyncio.sleep(0)
            outputs.append(await inner())
        return outputs

    @fl.replace_sdpa(OMEGA)
    async def decorated():
        return [await inner(), layer()]

    async def plain():
        await asyncio.sleep(0)
        return [layer()]

    async def main():
        return await asyncio.gather(entering(OMEGA), plain(), entering(OTHER), decorated())

    order = (OMEGA, fl.Shannon(), OTHER, OMEGA)
    for omega, outputs in zip(order, asyncio.run(main()), strict=True):
        for output in outputs:
            assert_uses(omega, output)
    assert torch._C._len_torch_function_stack() == 0


def test_an_asynchronous_generator_keeps_its_block_to_itself():
    async def generate():
        with fl.replace_sdpa(OMEGA):
            yield layer()

    async def main():
        async for output in generate():
            assert_uses(OMEGA, output)
            assert_uses(fl.Shannon(), layer())

    asyncio.run(main())
    with pytest.raises(TypeError, match="decorates functions, generators and coroutines"):
        fl.replace_sdpa(OMEGA)(generate)


def test_a_block_is_left_where_it_was_entered():
    with pytest.raises(RuntimeError, match="left in the thread that entered it"):
        fl.replace_sdpa(OMEGA).__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_function_in_a_generator():
    """Compiled code cannot ask whether the generator runs: it is not compiled, or raises."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda: layer(), backend="eager")
    whole = torch.compile(lambda: layer(), backend="eager", fullgraph=True)

    def generate():
        with fl.replace_sdpa(OMEGA):
            yield compiled()
            yield compiled()

    generator = generate()
    for _ in range(2):
        assert_uses(OMEGA, next(generator))
        assert_uses(fl.Shannon(), compiled())
        with pytest.raises(Exception, match="the generator or coroutine that entered replace_sdpa"):
            whole()
    generator.close()
    assert_uses(fl.Shannon(), whole())
