"""Masks and biases that priors tell in numbers: exact in the kernels, in every combination."""

import itertools
import random

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fenchel as fl
from tests import needs
from tests.attention.structure_cases import PRIORS, TERMS, Stored, make_case

P = fl.priors
DOUBLE = torch.float64
PAIRS = [pair for pair in itertools.combinations(TERMS, 2) if pair != ("causal", "offset")]
native = needs.kernels("structure in the fused kernels")


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_exact(case, tolerance=1e-10):
    """Output and all gradients against the definition; dropout against the tiles."""
    output = case.run()
    slope = torch.randn(
        output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1)
    )
    gradients = torch.autograd.grad(output, case.leaves, slope)
    if "dropout_p" in case.options:
        with fl.use("torch"):
            expected = case.run()
    else:
        expected = case.run_densely()
    wanted = torch.autograd.grad(expected, case.leaves, slope)
    for found, right in zip((output, *gradients), (expected, *wanted), strict=True):
        scale = 1 + right.abs().max()
        assert (found - right).abs().max() <= tolerance * scale


@native
@pytest.mark.parametrize("as_base", [True, False], ids=["base", "bias"])
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_pairs(pair, as_base):
    case = make_case(pair, as_base)
    assert fl.explain(*case.operands, case.regularizer, **case.options).path == "native kernels"
    assert_exact(case)


def random_case(seed, dtype=DOUBLE):
    rng = random.Random(seed)
    terms = rng.sample(TERMS, rng.randint(3, 7))
    if "causal" in terms and "offset" in terms:  # one product has one offset
        terms.remove("offset")
    heads = rng.choice((2, 4))
    queries = rng.choice((1, 2, 7, 16, 17, 48, 49, 60))
    shape = (rng.choice((1, 2)), heads, queries, queries + rng.choice((0, 1, 5, 90)), 3)
    alpha = rng.choice((1.0, 1.1, 1.3, 1.5, 1.5, 2.0))
    sides = [rng.random() < 0.5 for _ in PRIORS]
    return make_case(terms, sides, seed, dtype, alpha, shape)


@native
@pytest.mark.parametrize("seed", range(40))
def test_random_combinations(seed):
    assert_exact(random_case(seed))


@native
@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_five_hundred_random_combinations(block):
    for seed in range(100 + 50 * block, 150 + 50 * block):
        assert_exact(random_case(seed))


@native
@pytest.mark.parametrize("seed", range(12))
def test_single_precision_is_as_exact_as_plain_arithmetic(seed):
    """Errors against float64 of the same numbers, beside those of torch's operations."""
    single, double = random_case(200 + seed, torch.float32), random_case(200 + seed, torch.float32)
    single.options.pop("dropout_p", None)
    double.operands = tuple(x.double() for x in double.operands)
    right = double.run_densely()
    with fl.use("torch"):
        plain = (single.run() - right).abs().max()
    found = (single.run() - right).abs().max()
    assert found <= 2 * plain + 1e-6


TRAINED = {
    "slopes": (torch.tensor([0.5, 0.1], dtype=DOUBLE), lambda x: P.ALiBi(2, x)),
    "table": (
        torch.linspace(-1, 1, 16, dtype=DOUBLE).reshape(8, 2),
        lambda x: P.RelativeBuckets(x, 16) * P.Causal(2),
    ),
    "by key": (torch.linspace(-1, 1, 12, dtype=DOUBLE).reshape(2, 6), P.Preference),
    "sink": (torch.tensor([0.3, -0.2], dtype=DOUBLE), P.Sink),
}


@native
@pytest.mark.parametrize("side", ["base", "attn_mask"])
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("regularizer", [fl.Tsallis(1.5), fl.Tsallis(1.3), fl.Shannon()], ids=str)
def test_what_trains_is_differentiable_twice(regularizer, name, side):
    start, make = TRAINED[name]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, generator=g, dtype=DOUBLE) for n in (4, 6, 6))

    def attend(x):
        return fl.attention(q, k, v, regularizer, softcap=2.0, **{side: make(x)})

    assert gradcheck(attend, start.clone().requires_grad_())
    assert gradgradcheck(attend, start.clone().requires_grad_())


@native
def test_a_structured_gradient_needs_no_matrix():
    """16,384 queries with a table that trains: memory stays that of rows."""
    n = 16384
    q, k, v = (
        torch.randn(1, 1, n, 8, generator=torch.Generator().manual_seed(i)) for i in (1, 2, 3)
    )
    table = torch.zeros(8, 1, requires_grad=True)
    largest = [0]

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest[0] = max(largest[0], result.numel())
            return result

    prior = P.RelativeBuckets(table) * P.SlidingWindow(16)
    with Watch():
        fl.attention(q, k, v, fl.Tsallis(1.5), attn_mask=prior).sum().backward()
    assert table.grad.isfinite().all()
    assert 0 < largest[0] <= 400 * n


def test_an_offset_holds_for_the_whole_product():
    q, k = torch.randn(1, 2, 3, dtype=DOUBLE), torch.randn(1, 6, 3, dtype=DOUBLE)
    both = P.Causal(offset=4) * P.SlidingWindow(2)
    seen = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]], dtype=torch.bool)
    expected = fl.attention(q, k, k, fl.Tsallis(1.5), attn_mask=seen)
    for prior in (both, P.SlidingWindow(2) * P.Causal(offset=4)):
        found = fl.attention(q, k, k, fl.Tsallis(1.5), base=prior)
        assert (found - expected).abs().max() <= 1e-14
    with pytest.raises(ValueError, match="offsets 4 and 3"):
        P.Causal(offset=4) * P.SlidingWindow(2).shifted(3)


@pytest.mark.parametrize("regularizer", [fl.Tsallis(1.5), fl.Shannon(), fl.Norm(2.0)], ids=str)
def test_queries_that_an_offset_leaves_without_keys(regularizer):
    q, k = torch.randn(1, 4, 3, dtype=DOUBLE), torch.randn(1, 2, 3, dtype=DOUBLE)
    output = fl.attention(q, k, k, regularizer, base=P.Causal(offset=-2))
    assert not output[:, :2].any()
    assert (output[:, 2] - k[:, 0]).abs().max() <= 1e-14


@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
@pytest.mark.parametrize("regularizer", [fl.Tsallis(1.5), fl.Shannon()], ids=str)
def test_torch_causal_bias_means_what_it_says(corner, regularizer):
    from torch.nn.attention import bias

    q, k = torch.randn(1, 2, 4, 8, dtype=DOUBLE), torch.randn(1, 2, 6, 8, dtype=DOUBLE)
    mask = getattr(bias, f"causal_{corner}")(4, 6)
    expected = fl.attention(
        q, k, k, regularizer, attn_mask=torch.ones(4, 6).tril(2 if "right" in corner else 0) > 0
    )
    assert (fl.attention(q, k, k, regularizer, attn_mask=mask) - expected).abs().max() <= 1e-14
    with pytest.raises(ValueError, match="4 queries and 6 keys"):
        fl.attention(q[:, :, :3], k, k, regularizer, attn_mask=mask)


@pytest.mark.parametrize("regularizer", [fl.Tsallis(1.5), fl.Shannon(), fl.Norm(2.0)], ids=str)
def test_any_function_of_the_positions(regularizer):
    """Also its derivative in what it closes over."""
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, n, 4, generator=g, dtype=DOUBLE) for n in (5, 7))
    slope = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE, requires_grad=True)
    custom = P.Custom(lambda b, h, i, j: (b + 1) * slope[h] * (i - j).abs().sqrt().neg())

    def densely(x):
        distance = (torch.arange(5)[:, None] - torch.arange(7)).abs().sqrt()
        batch = torch.tensor([1, 2])[:, None, None, None]
        return fl.attention(q, k, k, regularizer, attn_mask=-batch * x[:, None, None] * distance)

    found = fl.attention(q, k, k, regularizer, attn_mask=custom)
    assert (found - densely(slope)).abs().max() <= 1e-13
    wanted = torch.autograd.grad(densely(slope).sin().sum(), slope)[0]
    assert (torch.autograd.grad(found.sin().sum(), slope)[0] - wanted).abs().max() <= 1e-12


BAD = {
    "window": (lambda: P.SlidingWindow(-1), ValueError, "width must be >= 0, got -1"),
    "right": (lambda: P.SlidingWindow(1, right=-1), ValueError, "right must be >= 0"),
    "offset": (lambda: P.Causal(offset=1.5), TypeError, "offset must be a whole number"),
    "ids": (lambda: P.Documents(torch.zeros(3)), TypeError, "ids must be whole numbers"),
    "sink": (lambda: P.Sink(torch.tensor([0.0, torch.nan])), ValueError, "must be finite"),
    "two sinks": (
        lambda: P.Sink(torch.zeros(2)) * P.Sink(torch.zeros(2)),
        ValueError,
        "one Sink",
    ),
    "function": (lambda: P.Custom(3), TypeError, "takes a function, got int"),
    "table": (lambda: P.RelativeBuckets(torch.zeros(1, 2)), ValueError, "buckets"),
}


@pytest.mark.parametrize("name", BAD)
def test_priors_that_make_no_sense(name):
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()


CALLS = {
    "documents of other length": ({"base": P.Documents(torch.zeros(5).long())}, "5 ids"),
    "documents of a batch": ({"base": P.Documents(torch.zeros(2, 6).long())}, r"ids\[:, None\]"),
    "sinks of other heads": ({"attn_mask": P.Sink(torch.zeros(3))}, "Sink has 3 heads"),
    "table of other heads": ({"base": P.RelativeBuckets(torch.zeros(8, 3))}, "has 3 heads"),
    "softcap 0": ({"softcap": 0.0}, "softcap must be a number from 1e-30"),
    "softcap NaN": ({"softcap": float("nan")}, "softcap must be a number from 1e-30"),
    "two sinks": (
        {"base": P.Sink(torch.zeros(2)), "attn_mask": P.Sink(torch.zeros(2))},
        "one Sink",
    ),
}


@pytest.mark.parametrize("regularizer", [fl.Tsallis(1.5), fl.Shannon(), fl.Norm(2.0)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_make_no_sense(name, regularizer):
    options, message = CALLS[name]
    x = torch.zeros(2, 2, 6, 4)
    with pytest.raises(ValueError, match=message):
        fl.attention(x, x, x, regularizer, **options)


def test_a_sink_is_no_key_of_solve():
    with pytest.raises(ValueError, match="null key"):
        fl.solve(torch.zeros(2, 3), fl.Tsallis(1.5), base=P.Sink(torch.zeros(())))


def test_a_sink_in_the_solution():
    """What the weights lack to one lies on it."""
    q = torch.randn(1, 2, 5, 4, dtype=DOUBLE)
    logits = torch.tensor([1.0, -9.0], dtype=DOUBLE)
    solution = fl.attention_solution(q, q, q, fl.Tsallis(1.5), attn_mask=P.Sink(logits))
    sums = torch.stack([solution.head(0, h).to_dense().sum(-1) for h in (0, 1)])
    assert (sums[0] < 0.99).any()
    assert (sums[1] - 1).abs().max() <= 1e-12
    assert solution.gap.max() <= 1e-12


@pytest.mark.parametrize("name", PRIORS)
def test_numbers_say_the_same_as_log_masses(name):
    """Each prior describes itself twice; shifted and in products, too."""
    case = make_case((name,), False)
    prior = case.options["attn_mask"].bind(torch.Size((2, 4, 9, 13)))
    for start in (0, 2):
        later = prior.shifted(start)
        numbers = later.structure(9, 13, 0, torch.device("cpu"))
        again = fl.priors.contract.Structured(numbers)
        rows, columns = torch.arange(9), torch.arange(13)
        wanted, found = later.log_mass(rows, columns), again.log_mass(rows, columns)
        assert torch.equal(*torch.broadcast_tensors(wanted.double(), found.double()))


def test_documents_apart_are_a_mask_in_blocks():
    ids = torch.tensor([0, 1, 0, 1, 0])
    q = torch.randn(1, 2, 5, 4, dtype=DOUBLE)
    expected = fl.attention(q, q, q, fl.Tsallis(1.5), attn_mask=ids[:, None] == ids)
    found = fl.attention(q, q, q, fl.Tsallis(1.5), base=P.Documents(ids))
    assert (found - expected).abs().max() <= 1e-14
    route = fl.explain(q, q, q, fl.Tsallis(1.5), base=P.Documents(ids))
    assert route.path != "native kernels"


def test_a_stored_prior_takes_the_tiles():
    q = torch.randn(1, 2, 5, 4, dtype=DOUBLE)
    stored = Stored(torch.randn(5, 5, dtype=DOUBLE))
    expected = fl.attention(q, q, q, fl.Tsallis(1.5), attn_mask=stored.tensor)
    found = fl.attention(q, q, q, fl.Tsallis(1.5), attn_mask=stored)
    assert (found - expected).abs().max() <= 1e-13
