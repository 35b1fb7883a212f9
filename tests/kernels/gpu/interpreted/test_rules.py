"""What GPU attention promises beside its numbers: rows alone, the same bits, nothing read."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fenchel as fl
from fenchel import priors
from tests import needs

needs.package("triton", covers="fused attention on a GPU, interpreted")

from fenchel._attention.call import Options, prepare  # noqa: E402
from fenchel._attention.sparse import CallNumbers, arguments, for_gpu  # noqa: E402
from fenchel._kernels import attention  # noqa: E402
from fenchel._kernels.attention_call import TRAINED  # noqa: E402
from tests.kernels.gpu import interpreter  # noqa: E402

ENTMAX = fl.Tsallis(1.5)


def operands(queries=20, keys=37, heads=2, dim=16, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (queries, keys, keys)
    return [torch.randn(1, heads, n, dim, generator=g).to(dtype) for n in shapes]


def on_gpu(q, k, v, regularizer=ENTMAX, **options):
    with fl.use("gpu"):
        return fl.attention(q, k, v, regularizer, **options)


def gradients(output, leaves, seed=1):
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(output, leaves, g.to(output.dtype))


def trained(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def both(call_options, regularizer=ENTMAX, **sizes):
    """What the operator returns on the CPU and on the GPU."""
    q, k, v = operands(**sizes)
    call = prepare(q, k, v, Options(**call_options))
    x = arguments(CallNumbers(call), regularizer)
    native = attention.tsallis_attention(**x._asdict(), save=True)
    gpu = attention.tsallis_attention(**for_gpu(x, regularizer)._asdict(), save=True)
    return native, gpu


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_a_row_without_an_answer_is_alone(value, spread):
    q, k, v = operands()
    q *= spread
    expected = on_gpu(q, k, v)
    q[0, 1, 5] = value
    output = on_gpu(q, k, v)
    assert output[0, 1, 5].isnan().all()
    rest = torch.ones(20, dtype=torch.bool)
    rest[5] = False
    torch.testing.assert_close(output[0, 1, rest], expected[0, 1, rest], rtol=0, atol=1e-6)
    assert torch.equal(output[0, 0], expected[0, 0])


def test_what_a_row_without_an_answer_touches_is_nan():
    q, k, v = trained(*operands())
    with torch.no_grad():
        q[0, 1, 5] = torch.nan
    dq, dk, dv = gradients(on_gpu(q, k, v, is_causal=True), (q, k, v))
    rows = dq[0, 1].isnan().all(-1)
    assert rows.nonzero().flatten().tolist() == [5]
    for each in (dk, dv):
        keys = each[0, 1].isnan().all(-1)
        assert keys.nonzero().flatten().tolist() == list(range(6))
        assert each[0, 0].isfinite().all()


@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_a_hidden_key_does_not_count_whatever_it_holds(spread):
    q, k, v = operands()
    mask = torch.ones(37, dtype=torch.bool)
    mask[30] = False
    leaves = trained(q * spread, k, v)
    expected = on_gpu(*leaves, attn_mask=mask)
    clean = gradients(expected, leaves)
    k[..., 30, :], v[..., 30, :] = torch.nan, torch.inf
    leaves = trained(q * spread, k, v)
    output = on_gpu(*leaves, attn_mask=mask)
    assert torch.equal(output, expected)
    for mine, wanted in zip(gradients(output, leaves), clean, strict=True):
        assert torch.equal(mine, wanted)


def test_a_row_that_sees_nothing_is_zero():
    leaves = trained(*operands())
    real = torch.tensor([[0, 0]])
    output = on_gpu(*leaves, attn_mask=priors.KeyPadding(real))
    assert not output.any()
    assert not any(g.any() for g in gradients(output, leaves))


def test_the_same_call_has_the_same_bits():
    leaves = trained(*operands())
    first, second = (on_gpu(*leaves, is_causal=True) for _ in range(2))
    assert torch.equal(first, second)
    pairs = zip(gradients(first, leaves), gradients(second, leaves), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
def test_cpu_and_gpu_operators_keep_the_same(alpha):
    """Output, offset and size of the support."""
    native, gpu = both({"attn_mask": priors.Causal()}, fl.Tsallis(alpha))
    torch.testing.assert_close(gpu[0], native[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(gpu[1].sum(-1), native[1].sum(-1), rtol=0, atol=1e-5)
    assert torch.equal(gpu[2], native[2])


def test_dropout_drops_the_same():
    """Values are unit vectors, so that the output is the weights."""
    q, k, _ = operands(keys=32)
    value = torch.eye(32).expand(1, 2, 32, 32)
    torch.manual_seed(3)
    mine = on_gpu(q * 0.1, k, value, dropout_p=0.4)
    torch.manual_seed(3)
    with fl.use("torch"):
        wanted = fl.attention(q * 0.1, k, value, ENTMAX, dropout_p=0.4)
    assert torch.equal(mine == 0, wanted == 0)
    assert 0.3 < (mine == 0).double().mean() < 0.6
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}])
def test_packed_sequences_are_separate_calls(options):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 2, 16, generator=g) for _ in range(3))
    slopes = torch.tensor([0.1, 0.4])
    starts = torch.tensor([0, 3, 3, 21, 40])

    def run(kernels, dtype, dropped=options):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, slopes)]
        torch.manual_seed(7)
        prior = priors.Causal() * priors.ALiBi(2, leaves[3])
        with fl.use(kernels):
            output = fl.varlen_attention(
                *leaves[:3], starts, regularizer=ENTMAX, attn_mask=prior, **dropped
            )
        return output.detach(), gradients(output, leaves)

    (mine, slopes_of_mine), (wanted, exact) = run("gpu", torch.float32), run("torch", torch.float64)
    torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=1e-5)
    for a, b in zip(slopes_of_mine, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


def test_second_derivatives_follow_torch():
    leaves = trained(*operands(queries=5, keys=7, heads=1))

    def second(kernels):
        with fl.use(kernels):
            output = fl.attention(*leaves, ENTMAX)
            (dq,) = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
            return torch.autograd.grad(dq.square().sum(), leaves)

    for mine, wanted in zip(second("gpu"), second("torch"), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


class Unread(TorchDispatchMode):
    """Refuses what makes the host wait for a value on a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if name in self.WAITS or any(_is_mask(x) for x in args if name.startswith("index")):
            raise RuntimeError(f"{func} reads a value")
        return func(*args, **(kwargs or {}))


def _is_mask(indices):
    return isinstance(indices, list | tuple) and any(
        isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices
    )


def test_the_host_reads_no_value():
    """Neither in the forward pass nor in the backward one, launches apart."""
    from fenchel._kernels.gpu import launch

    leaves = trained(*operands())
    starts = torch.tensor([0, 15, 37])
    packed = trained(*(torch.randn(37, 2, 16) for _ in range(3)))
    slopes = torch.tensor([0.1, 0.4], requires_grad=True)
    learned = fl.Tsallis(torch.tensor([[1.3], [1.7]], requires_grad=True))
    run = launch.run

    def launched(*arguments, **constants):
        with torch.utils._python_dispatch._disable_current_modes():
            run(*arguments, **constants)

    with pytest.MonkeyPatch.context() as patch, Unread():
        patch.setattr(launch, "run", launched)
        patch.setattr("fenchel._attention.packed.on_host", lambda *_: False)  # as on a device
        output = on_gpu(*leaves, attn_mask=priors.ALiBi(2, slopes), dropout_p=0.1, is_causal=True)
        output.sum().backward()
        # Learned alphas: one per head, on the device.
        patch.setattr("fenchel._kernels.route.at_hand", lambda *_: False)
        on_gpu(*leaves, learned).sum().backward()
        with fl.use("gpu"):
            fl.varlen_attention(*packed, starts, regularizer=ENTMAX).sum().backward()
    assert all(x.grad.isfinite().all() for x in (*leaves, *packed))
    with pytest.raises(RuntimeError, match="reads a value"), Unread():
        leaves[0].sum().item()


@pytest.mark.parametrize("queries", [20, 1])
def test_an_alpha_that_nobody_could_ask_about_gives_nan(queries, monkeypatch):
    """On a device the host does not wait to see it; other heads are computed."""
    q, k, v = operands(queries, 200)
    alpha = torch.tensor([[2.5], [1.5]])
    monkeypatch.setattr("fenchel._kernels.route.at_hand", lambda *_: False)
    output = on_gpu(q, k, v, fl.Tsallis(alpha))
    assert output[:, 0].isnan().all()
    torch.testing.assert_close(output[:, 1], on_gpu(q, k, v)[:, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.01, 1.1, 1.5])
@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9])
def test_a_row_of_large_scores_is_right_and_alone(alpha, hidden):
    """Where a mask of finite numbers hides a row whole; near alpha = 1 the search starts close."""
    bias = torch.zeros(20, 37)
    bias[3] = hidden
    leaves, natives = trained(*operands()), trained(*operands())
    output = on_gpu(*leaves, fl.Tsallis(alpha), attn_mask=bias)
    expected = fl.attention(*natives, fl.Tsallis(alpha), attn_mask=bias)
    found, wanted = (output, *gradients(output, leaves)), (expected, *gradients(expected, natives))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_memory_is_linear():
    """Scratch does not grow with the square of the length: what a chunk takes is bounded."""
    from fenchel._kernels.attention_call import Arguments
    from fenchel._kernels.gpu import shapes

    entries = []
    for n in (1024, 4096):
        q = torch.empty(1, 1, n, 64, device="meta")
        x = Arguments(q, q, q, q[..., 0].double(), longest_query=n, longest_key=n, gpu=True)
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(shapes, "architecture", lambda _: "sm_80")
            sizes = shapes.shapes(x)
            size = sizes.settings
            chunk = max(c.stop - c.start for c in sizes.chunks(x))
            entries.append(chunk * size.rows * (4 * sizes.key_blocks + 16 * size.capacity))
            tiles, means = shapes.kept(x)
            assert 4 * tiles <= 4 * means / 64
    assert max(entries) <= 2**28


@pytest.mark.parametrize(
    ("reason", "operand", "alpha"),
    [
        ("float64", {"dtype": torch.float64}, 1.5),
        ("at most 2", {}, 2.5),
        ("some of these are larger", {}, torch.tensor([2.5, 1.5]).unsqueeze(-1)),
        ("256 components", {"dim": 260}, 1.5),
    ],
)
def test_what_the_kernels_cannot_do_says_why(reason, operand, alpha):
    q, k, v = operands(**operand)
    with fl.use("gpu"):
        route = fl.explain(q, k, v, fl.Tsallis(alpha))
    (gpu,) = (why for path, why in route.against.items() if path.startswith("GPU"))
    assert reason in gpu
    on_gpu(q, k, v, fl.Tsallis(alpha))


@pytest.mark.parametrize("trains", [(), ("eps", "bias")])
def test_the_operators_pass_opcheck(trains):
    q, k, v = operands(queries=5, keys=7)
    bias = torch.randn(1, 2, 5, 7)
    call = prepare(q, k, v, Options(attn_mask=bias))
    x = arguments(CallNumbers(call), ENTMAX)._replace(gpu=True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    forward = {**x._asdict(), "save": True}
    torch.library.opcheck(attention.tsallis_attention, (), forward, test_utils=tests)
    output, *saved = attention.tsallis_attention(**forward)
    names = ("offset", "support_size", "saved_key", "saved_distance")
    backward = {
        "gradient": torch.ones_like(output),
        **x._asdict(),
        **dict(zip(names, saved, strict=True)),
        "output_mask": [name in trains for name in TRAINED],
    }
    torch.library.opcheck(attention.tsallis_attention_backward, (), backward, test_utils=tests)


def test_compiled_code_has_the_operators():
    leaves = trained(*operands(queries=5, keys=7))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v):
        return fl.attention(q, k, v, ENTMAX)

    with fl.use("gpu"):
        output = compiled(*leaves)
    torch.testing.assert_close(output, on_gpu(*leaves))
    wanted = gradients(on_gpu(*leaves), leaves)
    for mine, theirs in zip(gradients(output, leaves), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_autocast_chooses_the_precision():
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        output = on_gpu(q, k, v)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, on_gpu(*(x.bfloat16() for x in (q, k, v))))


def test_every_launch_is_checked():
    """The checker sees the tensors within the call's tuple, too."""
    with interpreter.watch() as launches:
        leaves = trained(*operands())
        on_gpu(*leaves).sum().backward()
    kinds = {launch.kernel for launch in launches}
    names = {"bound", "listing", "pack", "attend", "attend_tiles", "unfold", "rows"}
    assert names | {"odd_blocks", "odd_units", "column_listing", "columns"} <= kinds
    assert sum(launch.loads for launch in launches) > 100
    assert sum(launch.stores for launch in launches) > len(launches)
