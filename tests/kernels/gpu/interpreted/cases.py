"""Random calls of attention, each fixed by its seed, on the GPU's kernels and in float64.

A call has one level of each feature; over all seeds every pair of levels meets (`test_pairs`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fenchel as fl
from fenchel import priors
from fenchel._attention.call import Options, prepare
from fenchel._attention.tiled import drop, solve_tile, weights_of_keys

FEATURES: dict[str, tuple[str, ...]] = {
    "alpha": ("1.5", "2", "1.3", "1.05", "per head", "per row"),
    "dtype": ("float32", "float32", "float32", "bfloat16", "float16"),
    "heads": ("1", "2", "2 of 4", "1 of 3"),
    "lengths": ("equal", "more keys", "more queries"),
    "width": ("16", "24", "40 and 16"),
    "spread": ("flat", "usual", "sparse"),
    "layout": ("whole", "heads last", "components first", "expanded"),
    "seen": ("all", "causal", "causal later", "window", "documents", "lengths"),
    "bias": ("none", "none", "bool", "float", "alibi", "buckets", "by key", "sink"),
    "base": ("none", "none", "none", "mass", "by key", "by position", "sink"),
    "softcap": ("none", "none", "3"),
    "dropout": ("0", "0", "0.3"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH = 2


@dataclass
class Case:
    """leaves: what gets a gradient, by name, in its own precision."""

    seed: int
    levels: dict[str, str]
    leaves: dict[str, Tensor]
    constants: dict[str, Tensor]
    queries: int
    keys: int
    heads: int
    gradient: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.levels["dtype"]]


def levels_of(seed: int) -> dict[str, str]:
    r = random.Random(seed)
    levels = {name: r.choice(choices) for name, choices in FEATURES.items()}
    if levels["bias"] == "sink" and levels["base"] == "sink":  # there is one at most
        levels["base"] = "none"
    return levels


def make(seed: int, **fixed: str) -> Case:
    """fixed: levels that are asked for."""
    levels = levels_of(seed) | fixed
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    kv, heads = {"1": (1, 1), "2": (2, 2), "2 of 4": (2, 4), "1 of 3": (1, 3)}[levels["heads"]]
    queries, keys = {"equal": (37, 37), "more keys": (20, 53), "more queries": (41, 18)}[
        levels["lengths"]
    ]
    dim, width = {"16": (16, 16), "24": (24, 24), "40 and 16": (40, 16)}[levels["width"]]
    dtype = DTYPES[levels["dtype"]]
    spread = {"flat": 0.2, "usual": 1.0, "sparse": 2.5}[levels["spread"]]
    shapes = {
        "query": (BATCH, heads, queries, dim),
        "key": (BATCH, kv, keys, dim),
        "value": (BATCH, kv, keys, width),
    }
    leaves = {name: normal(*shape).to(dtype) for name, shape in shapes.items()}
    leaves["query"] = leaves["query"] * spread
    leaves = {name: _laid_out(x, levels["layout"]) for name, x in leaves.items()}
    if levels["alpha"].startswith("per"):
        rows = (heads, 1) if levels["alpha"] == "per head" else (heads, queries)
        leaves["alpha"] = 1.02 + 0.98 * torch.rand(rows, generator=g, dtype=torch.float64)
    constants = _constants(levels, g, queries, keys)
    leaves |= _trained(levels, normal, (heads, queries, keys), dtype)
    gradient = normal(BATCH, heads, queries, width).to(dtype)
    return Case(seed, levels, leaves, constants, queries, keys, heads, gradient)


def _laid_out(tensor: Tensor, how: str) -> Tensor:
    if how == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "components first":
        return tensor.mT.contiguous().mT
    if how == "expanded":
        return tensor[:1].expand_as(tensor)
    return tensor


def _constants(
    levels: dict[str, str], g: torch.Generator, queries: int, keys: int
) -> dict[str, Tensor]:
    constants: dict[str, Tensor] = {}
    if levels["bias"] == "bool":
        constants["mask"] = torch.rand(BATCH, 1, queries, keys, generator=g) < 0.6
    if levels["base"] == "mass":
        mass = torch.rand(keys, generator=g) + 0.1
        constants["mass"] = torch.where(torch.rand(keys, generator=g) < 0.8, mass, 0.0)
    if levels["seen"] == "lengths":
        constants["real"] = torch.tensor([[keys - 3], [0]])
    if levels["seen"] == "documents":
        constants["ids"] = torch.arange(max(keys, queries)) // 11
    return constants


def _trained(
    levels: dict[str, str], normal: Any, sizes: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Leaves of biases and bases."""
    heads, queries, keys = sizes
    shapes = {
        "float": ("bias", (heads, queries, keys)),
        "alibi": ("slopes", (heads,)),
        "buckets": ("table", (8, heads)),
        "by key": ("logits", (keys,)),
        "sink": ("null", (heads,)),
    }
    leaves: dict[str, Tensor] = {}
    if levels["bias"] in shapes:
        name, shape = shapes[levels["bias"]]
        leaves[name] = normal(*shape) * 0.3
    if "bias" in leaves:
        leaves["bias"] = leaves["bias"].to(dtype)
        leaves["bias"][0, :, ::5] = -torch.inf
    of_base = {"by key": "by key", "by position": "alibi", "sink": "sink"}.get(levels["base"])
    if of_base is not None:
        name, shape = shapes[of_base]
        leaves[f"{name} of base"] = normal(*shape) * 0.3
    return leaves


def seen_prior(case: Case) -> priors.Prior | None:
    later = max(0, case.keys - case.queries)
    kinds = {
        "causal later": lambda: priors.Causal(later),
        "window": lambda: priors.SlidingWindow(6, right=3),
        "documents": lambda: priors.Documents(case.constants["ids"]),
        "lengths": lambda: priors.KeyPadding(case.constants["real"]),
    }
    make_prior = kinds.get(case.levels["seen"])
    return None if make_prior is None else make_prior()


def arguments(case: Case, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """Of `fl.attention`, beside the operands."""
    kind, of_base = case.levels["bias"], case.levels["base"]
    trained = {
        "alibi": lambda name: priors.ALiBi(case.heads, leaves[name.format("slopes")]),
        "buckets": lambda name: priors.RelativeBuckets(leaves[name.format("table")], 20),
        "by key": lambda name: priors.Preference(leaves[name.format("logits")]),
        "sink": lambda name: priors.Sink(leaves[name.format("null")]),
    }
    mask: Any = leaves.get("bias", case.constants.get("mask"))
    base: Any = case.constants.get("mass")
    if kind in trained:
        mask = trained[kind]("{}")
    if of_base in ("by key", "by position", "sink"):
        base = trained["alibi" if of_base == "by position" else of_base]("{} of base")
    seen = seen_prior(case)
    if seen is not None and not isinstance(mask, Tensor):
        mask = seen if mask is None else mask * seen
    elif seen is not None and not isinstance(base, Tensor):
        base = seen if base is None else base * seen
    return {
        "attn_mask": mask,
        "base": base,
        "is_causal": case.levels["seen"] == "causal",
        "softcap": None if case.levels["softcap"] == "none" else float(case.levels["softcap"]),
        "dropout_p": float(case.levels["dropout"]),
        "enable_gqa": "of" in case.levels["heads"],
    }


def regularizer(case: Case, leaves: dict[str, Tensor]) -> fl.Tsallis:
    fixed = case.levels["alpha"]
    return fl.Tsallis(leaves["alpha"] if fixed.startswith("per") else float(fixed))


def run(case: Case, kernels: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output and gradients by name; dtype: another precision for everything."""
    leaves = _fresh(case, dtype)
    torch.manual_seed(case.seed)
    with fl.use(kernels):
        output = fl.attention(
            *(leaves[name] for name in ("query", "key", "value")),
            regularizer(case, leaves),
            **_cast(arguments(case, leaves), dtype),
        )
    return _results(case, leaves, output)


def run_plainly(case: Case) -> dict[str, Tensor]:
    """Products and weights rounded to the operands' precision, as written in plain torch."""
    leaves = _fresh(case, None)
    torch.manual_seed(case.seed)
    names = ("query", "key", "value")
    call = prepare(*(leaves[name] for name in names), Options(**arguments(case, leaves)))
    call = replace(call, modify=lambda scores, first: scores.to(case.dtype).to(scores.dtype))
    weights = weights_of_keys(solve_tile(call, regularizer(case, leaves)), call)
    weights = drop(weights.reshape(call.scores_shape), call).to(case.dtype)
    value = call.value.repeat_interleave(case.heads // call.value.shape[1], 1)
    return _results(case, leaves, weights @ value)


def _fresh(case: Case, dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {name: _as(x, dtype).detach().requires_grad_() for name, x in case.leaves.items()}


def _as(x: Any, dtype: torch.dtype | None) -> Any:
    real = isinstance(x, Tensor) and x.is_floating_point()
    return x.to(dtype) if real and dtype is not None else x


def _cast(options: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    return {name: _as(x, dtype) for name, x in options.items()}


def _results(case: Case, leaves: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(output, list(leaves.values()), case.gradient.to(output.dtype))
    return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def errors(case: Case, results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Of the output the largest, of a gradient relative to it; a gradient that is nearly zero is
    measured against what came in."""
    found = {"output": float((results["output"].double() - exact["output"]).abs().max())}
    for name in case.leaves:
        wrong = (results[name].double() - exact[name].double()).norm()
        size = max(float(exact[name].norm()), 1e-2 * float(case.gradient.double().norm()))
        found[name] = float(wrong) / size
    return found
