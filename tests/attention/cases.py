"""Attention written out, and the judgement how far another computation may be from it.

`dense` shares nothing with `fenchel.attention`: scores, masks and repeated heads are explicit, and
`solve` (tested elsewhere against an oracle) makes the weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import fenchel as fl

DOUBLE = torch.float64
INF = math.inf

REGULARIZERS = {
    "shannon": fl.Shannon(),
    "shannon 0.6": fl.Shannon(0.6),
    "tsallis 1": fl.Tsallis(1.0),
    "tsallis 1.05": fl.Tsallis(1.05),
    "tsallis 1.3": fl.Tsallis(1.3, 0.8),
    "tsallis 1.5": fl.Tsallis(1.5),
    "tsallis 2": fl.Tsallis(2.0),
    "tsallis 2.5": fl.Tsallis(2.5),
    "tsallis 3": fl.Tsallis(3.0, 1.4),
    "tsallis 4": fl.Tsallis(4.0),
    "norm": fl.Norm(2.0),
    "budget": fl.Budget(1.7),
    "fused": fl.Fused(0.1),
}
ANY_BASE = [name for name in REGULARIZERS if name.split()[0] in ("shannon", "tsallis")]


def draw(seed, *shape, scale=1.0, dtype=DOUBLE):
    """Normal numbers that depend on nothing but the seed and the shape."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, dtype=DOUBLE, generator=generator)).to(dtype)


def chance(seed, share, *shape):
    """True with this share."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def dense(
    query,
    key,
    value,
    regularizer,
    *,
    base=None,
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    kept=None,
    dropout_p=0.0,
):
    """The whole n x n computation. `kept`: bool, the weights that survive dropout."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    scores = dense_scores(query, key, attn_mask, is_causal, scale)
    lead = torch.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
    weights = fl.solve(scores.expand(*lead, *scores.shape[-2:]), regularizer, base=base).weights
    if kept is not None:
        weights = torch.where(kept, weights / (1 - dropout_p), 0.0)
    return weights @ value


def dense_scores(query, key, attn_mask=None, is_causal=False, scale=None):
    """(..., query, key), hidden keys at -inf."""
    scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    scores = (query @ key.mT) * scale
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -INF)
    return scores


def _no_options(_):
    return {}


def _operands(leaves):
    return leaves["query"], leaves["key"], leaves["value"]


@dataclass(frozen=True)
class Case:
    """Leaves in float64, and how a call is made of them. The alphas among them stay above one."""

    leaves: dict
    regularizer: object = field(default_factory=fl.Shannon)  # or a function of the leaves
    options: Callable = _no_options  # leaves -> keyword arguments
    operands: Callable = _operands  # leaves -> query, key, value: views are made in the graph

    def call(self, attend, leaves):
        regularizer = self.regularizer
        regularizer = (
            regularizer(leaves) if not isinstance(regularizer, fl.Regularizer) else regularizer
        )
        return attend(*self.operands(leaves), regularizer, **self.options(leaves))

    def rounded(self, dtype):
        """The numbers that a computation in `dtype` is given, back in float64."""
        return replace(self, leaves={n: x.to(dtype).to(DOUBLE) for n, x in self.leaves.items()})

    def shaken(self, seed, size):
        """Every leaf but alpha changed relatively by up to `size`, as rounding would."""
        moved = {}
        for index, (name, x) in enumerate(self.leaves.items()):
            noise = draw(1000 * seed + index, *x.shape).clamp(-1, 1)
            moved[name] = x if name == "alpha" else x * (1 + size * noise)
        return replace(self, leaves=moved)


def make_case(
    regularizer=None,
    *,
    lead=(2, 3),
    queries=6,
    keys=9,
    d=5,
    d_value=4,
    kv_lead=None,
    seed=0,
    options=None,
    operands=_operands,
    spread=1.5,
    **leaves,
):
    """A case of random query, key and value; further leaves by name, options a dict or function."""
    kv_lead = lead if kv_lead is None else kv_lead
    tensors = {
        "query": draw(seed, *lead, queries, d, scale=spread),
        "key": draw(seed + 1, *kv_lead, keys, d),
        "value": draw(seed + 2, *kv_lead, keys, d_value),
        **leaves,
    }
    chosen = options if callable(options) else (lambda _: options or {})
    return Case(tensors, regularizer or fl.Shannon(), chosen, operands)


def derivatives(attend, case, dtype=DOUBLE):
    """The output, and the gradient of a fixed combination of it in every leaf."""
    leaves = {n: x.to(dtype, copy=True).requires_grad_() for n, x in case.leaves.items()}
    output = case.call(attend, leaves)
    cotangent = draw(77, *output.shape, dtype=output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent, allow_unused=True)
    assert all(gradient is not None for gradient in gradients), "a leaf was left out of the graph"
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_agrees(attend, case, dtype=DOUBLE, *, reference=dense):
    """Values and gradients of `attend` equal the reference's, as far as rounding allows.

    Allowed is what a backward-stable computation could do: a few units in the last place of the
    largest number (of 0.1, for gradients that cancel to nothing: all cases have numbers near one),
    and several times what shaking the inputs by two units does to the answer.
    """
    case, unit = case.rounded(dtype), torch.finfo(dtype).eps
    gradients = derivatives(attend, case, dtype)
    exact = derivatives(reference, case)
    shaken = [derivatives(reference, case.shaken(seed, 2 * unit)) for seed in (1, 2)]
    for name, expected in exact.items():
        moves = [largest_difference(other[name], expected) for other in shaken]
        allowed = 64 * unit * max(0.1, largest(expected)) + 8 * max(moves)
        assert_within(gradients[name], expected, allowed, name)


def assert_within(actual, expected, allowed, name="output"):
    """Same shape, NaN in the same places, and elsewhere no further apart than `allowed`."""
    assert actual.shape == expected.shape, (
        f"{name}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: NaN in other places"
    error = largest_difference(actual.to(DOUBLE), expected)
    assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}"


def largest(x):
    """The largest absolute value, NaN aside; 0 for an empty tensor."""
    x = x.detach().nan_to_num(0.0)
    return x.abs().max().item() if x.numel() else 0.0


def largest_difference(x, y):
    """NaN in the same places is no difference, in other places an infinite one."""
    if not torch.equal(x.isnan(), y.isnan()):
        return INF
    return largest(x.to(DOUBLE) - y.to(DOUBLE))


def margin(case):
    """Distance of the closest score of a case from its row's threshold."""
    query, key, _ = case.operands(case.leaves)
    options = {**case.options(case.leaves)}
    base = options.pop("base", None)
    if options.pop("enable_gqa", False):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    regularizer = case.regularizer
    regularizer = (
        regularizer(case.leaves) if not isinstance(regularizer, fl.Regularizer) else regularizer
    )
    scores = dense_scores(query, key, **options)
    threshold = fl.solve(scores, regularizer, base=base).threshold
    gaps = (scores - threshold.unsqueeze(-1)).abs()
    return gaps[gaps.isfinite()].min().item()
