"""Structure where it is least expected: far masses, hidden NaN, ranges far apart, odd tensors."""

import math

import pytest
import torch

import fenchel as fl
from tests import needs

P = fl.priors
pytestmark = needs.kernels("structure in the fused kernels")


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_as_in_torch(function, tolerance=1e-4):
    found = function()
    with fl.use("torch"):
        wanted = function()
    assert torch.equal(found.isnan(), wanted.isnan())
    found, wanted = found.nan_to_num(), wanted.nan_to_num()
    assert (found - wanted).abs().max() <= tolerance * (1 + wanted.abs().max())


@pytest.mark.parametrize("heads", [3, 48])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_heads_that_see_keys_far_apart(heads, order):
    """Short rows of one block, each somewhere else: none may touch another's scores."""
    keys, ranges = 500, [(480, 20), (360, 128), (0, 2)]
    table = torch.full((2 * keys, heads), -math.inf)
    for h in range(heads):
        first, width = ranges[order[h % 3]]
        table[first : first + width, h] = 0
    prior = P.RelativeBuckets(table, max_distance=10**5, bidirectional=False).shifted(keys - 1)
    q, k, v = draw(0, 1, heads, 1, 16), draw(1, 1, 1, keys, 16), draw(2, 1, 1, keys, 16)
    for alpha in (1.5, 2.0):
        assert_as_in_torch(
            lambda alpha=alpha: fl.attention(
                q, k, v, fl.Tsallis(alpha), attn_mask=prior, enable_gqa=True
            )
        )


@pytest.mark.parametrize(
    ("queries", "repeats"), [(15, 4), (13, 4), (10, 5), (7, 8), (7, 7), (16, 4), (1, 60)]
)
def test_gradients_of_few_queries_and_many_heads(queries, repeats):
    q = draw(0, 1, repeats, queries, 8).requires_grad_()
    k, v = (draw(i, 1, 1, 20, 8).requires_grad_() for i in (1, 2))

    def gradients():
        output = fl.attention(q, k, v, fl.Tsallis(1.5), enable_gqa=True)
        return torch.cat([x.flatten() for x in torch.autograd.grad(output.sin().sum(), (q, k, v))])

    assert_as_in_torch(gradients)


@pytest.mark.parametrize("shape", [(3, 2, 7, 8), (2, 7, 8), (1, 1, 7, 8)])
def test_gradients_of_operands_that_broadcast(shape):
    q = draw(0, 1, 2, 5, 8).requires_grad_()
    k, v = (draw(i, *shape).requires_grad_() for i in (1, 2))

    def gradients():
        output = fl.attention(q, k, v, fl.Tsallis(1.5))
        return torch.cat([x.flatten() for x in torch.autograd.grad(output.sin().sum(), (q, k, v))])

    assert_as_in_torch(gradients)
    assert_as_in_torch(gradients)  # and once more, as a call that was made before


def test_tensors_whose_sign_is_a_bit():
    q, v = draw(0, 1, 1, 4, 8).requires_grad_(), draw(1, 1, 1, 4, 8)
    odd = torch.view_as_complex(draw(2, 1, 1, 4, 8, 2)).conj().imag
    assert odd.is_neg()
    omega = fl.Tsallis(1.5)
    starts = torch.tensor([0, 4])
    assert_as_in_torch(lambda: fl.attention(q, odd, v, omega))
    assert_as_in_torch(lambda: fl.attention(q, v, odd, omega))
    assert_as_in_torch(lambda: fl.attention(q, v, v, omega, attn_mask=odd[0, 0, :, :4]))
    assert_as_in_torch(
        lambda: fl.attention(q, v, v, omega, attn_mask=P.Preference(odd[0, 0, 0, :4]))
    )
    assert_as_in_torch(
        lambda: fl.varlen_attention(
            q[0, 0, :, None], odd[0, 0, :, None], v[0, 0, :, None], starts, None, omega
        )
    )

    def gradient():
        output = fl.attention(q, v, v, omega)
        return torch.autograd.grad(output, q, torch._neg_view(-torch.ones_like(output)))[0]

    assert_as_in_torch(gradient)


def test_a_batch_of_gradients():
    q, k, v = (draw(i, 1, 1, 4, 8) for i in range(3))
    assert_as_in_torch(
        lambda: torch.autograd.functional.jacobian(
            lambda x: fl.attention(x, k, v, fl.Tsallis(1.5)), q, vectorize=True
        )
    )


LONE = torch.full((512,), -95.0).index_fill(0, torch.tensor([511]), 0.0)
FAR = {
    "fewer keys than queries": (64, lambda: {"base": P.ALiBi(8)}),
    "padding": (512, lambda: {"base": P.ALiBi(8) * P.KeyPadding(torch.tensor([[3]]))}),
    "padding of the bias": (
        512,
        lambda: {"base": P.ALiBi(8), "attn_mask": P.KeyPadding(torch.tensor([[3]]))},
    ),
    "causal": (512, lambda: {"base": P.Preference(LONE), "is_causal": True}),
    "a tensor, causal": (512, lambda: {"base": LONE.exp(), "is_causal": True}),
    "a mask": (512, lambda: {"base": P.ALiBi(8), "attn_mask": torch.arange(512) < 3}),
    "a bias of -inf": (
        512,
        lambda: {"base": P.ALiBi(8), "attn_mask": P.Preference(torch.log((LONE < 0).float()))},
    ),
    "a heavy sink": (512, lambda: {"base": P.Sink(torch.tensor(100.0))}),
    "a very heavy sink": (512, lambda: {"base": P.Sink(torch.tensor(800.0))}),
}


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("name", FAR)
def test_masses_far_from_one(name, alpha):
    """What a row sees may be of hardly any mass, whatever others see."""
    keys, options = FAR[name][0], FAR[name][1]()
    q, k, v = draw(0, 1, 8, 512, 16), draw(1, 1, 8, keys, 16), draw(2, 1, 8, keys, 16)
    assert_as_in_torch(lambda: fl.attention(q, k, v, fl.Tsallis(alpha), **options))


@pytest.mark.parametrize("omega", [fl.Shannon(), fl.Tsallis(1.5), fl.Norm(2.0)], ids=str)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_what_hidden_keys_hold_does_not_matter(kernels, omega):
    q, k, v = (draw(i, 2, 2, 6, 8) for i in range(3))
    k[:, :, 4:] = v[:, :, 4:] = math.nan
    expected = fl.attention(q, k[:, :, :4], v[:, :, :4], omega)
    hidden = torch.zeros(6).masked_fill(torch.arange(6) >= 4, -math.inf)
    terms = [P.Preference(hidden), P.KeyPadding(torch.tensor([[4], [4]]))]
    with fl.use(kernels):
        for prior in terms:
            sides = ("attn_mask",) if omega == fl.Norm(2.0) else ("base", "attn_mask")
            for side in sides:
                found = fl.attention(q, k, v, omega, **{side: prior})
                assert (found - expected).abs().max() <= 1e-5
        found = fl.attention(q, k, v, omega, attn_mask=hidden)
        assert (found - expected).abs().max() <= 1e-5


def test_a_finite_bias_hides_nothing_at_any_temperature():
    logits = torch.tensor([-1e37, -2e37])
    z, omega = torch.zeros, fl.Tsallis(1.5, temperature=1e-3)
    values = torch.eye(2)[None, None]
    found = fl.attention(
        z(1, 1, 1, 1), z(1, 1, 2, 1), values, omega, attn_mask=P.Preference(logits)
    )
    assert (found.sum() - 1).abs() <= 1e-6


def test_packed_lengths_have_one_source():
    x = draw(0, 12, 2, 8)
    starts = torch.tensor([0, 5, 12])
    with pytest.raises(ValueError, match="leave KeyPadding out"):
        fl.varlen_attention(x, x, x, starts, base=P.Causal() * P.KeyPadding(torch.tensor(2)))


def test_jagged_tensors_of_other_lengths():
    def jagged(*lengths):
        rows = [torch.zeros(n, 2, 4) for n in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)

    with pytest.raises(ValueError, match="equally many tokens in every sequence"):
        fl.attention(jagged(2, 3), jagged(2, 3), jagged(3, 2), fl.Tsallis(1.5))
    starts, lengths = torch.tensor([0, 0]), torch.tensor([3, 6])
    holes = torch.nested.narrow(torch.zeros(2, 6, 2, 4), 1, starts, lengths, layout=torch.jagged)
    holes = holes.transpose(1, 2)
    with pytest.raises(ValueError, match="with holes"):
        fl.attention(holes, holes, holes, fl.Tsallis(1.5))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_call():
    q, k, v = (draw(i, 1, 1, 4, 8) for i in range(3))
    traced = torch.jit.trace(lambda *x: fl.attention(*x, fl.Tsallis(1.5)), (q, k, v))
    assert torch.equal(traced(q + 1, k, v), fl.attention(q + 1, k, v, fl.Tsallis(1.5)))


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_masses_that_no_number_holds(alpha):
    """Keys far away come first, with masses of 1e-41 and less: alone they may not break the row."""
    n = 3300
    q, k, v = (draw(i, 1, 1, n, 8) for i in range(3))
    prior = P.ALiBi(heads=1, slopes=torch.tensor([0.0625]))
    found = fl.attention(q, k, v, fl.Tsallis(alpha), base=prior)
    near = P.SlidingWindow(1300, right=1300)
    wanted = fl.attention(q, k, v, fl.Tsallis(alpha), base=prior * near)
    assert (found - wanted).abs().max() < 1e-5
    masses = torch.ones(1000)
    masses[:600] = 1e-42
    few, seen = q[..., :40, :], slice(600, 1000)
    found = fl.attention(few, k[..., :1000, :], v[..., :1000, :], fl.Tsallis(alpha), base=masses)
    wanted = fl.attention(few, k[..., seen, :], v[..., seen, :], fl.Tsallis(alpha))
    assert (found - wanted).abs().max() < 1e-5


def test_tiny_masses_of_the_keys_that_are_left():
    """What is hidden by a key's own mass of none leaves a row with far keys only."""
    q, k, v = draw(0, 1, 2, 20, 16), draw(1, 1, 2, 3000, 16), draw(2, 1, 2, 3000, 16)
    seen = torch.where(torch.arange(3000) < 1400, -math.inf, 5.0)
    base = P.ALiBi(2) * P.Preference(seen)
    assert_as_in_torch(lambda: fl.attention(q, k, v, fl.Tsallis(1.5), base=base))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_a_second_bias_does_not_bring_back_what_the_first_one_hides(alpha):
    """Hidden between positions that are not: queries in the middle see no key at all."""
    table = torch.full((128, 1), -math.inf)
    table[2] = table[45] = 0
    by_position = P.RelativeBuckets(table, max_distance=10**5, bidirectional=False).shifted(27)
    prior = by_position * P.Preference(draw(3, 30))
    q, k, v = (draw(i, 1, 1, 30, 8) for i in range(3))
    expected = fl.attention(
        q, k, v, fl.Tsallis(alpha), attn_mask=prior.log_mass(*2 * (torch.arange(30),))
    )
    assert (expected == 0).all(-1).any()
    found = fl.attention(q, k, v, fl.Tsallis(alpha), attn_mask=prior)
    assert torch.equal((found == 0).all(-1), (expected == 0).all(-1))
    assert (found - expected).abs().max() <= 1e-5
