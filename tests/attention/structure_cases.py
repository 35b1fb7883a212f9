"""Calls of attention with structure, drawn from a seed: some of the terms, as base or as bias."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import fenchel as fl

P = fl.priors
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 9, 13, 5
PRIORS = ("causal", "offset", "window", "documents", "lengths", "alibi", "table", "by key", "sink")
OTHERS = ("softcap", "grouped", "dropout", "alphas")
TERMS = (*PRIORS, *OTHERS)


@dataclass
class Case:
    """Operands, a regulariser and options; `leaves` are what a gradient is asked of."""

    operands: tuple[Tensor, Tensor, Tensor]
    regularizer: fl.Regularizer
    options: dict[str, object]
    leaves: list[Tensor] = field(default_factory=list)

    def run(self) -> Tensor:
        torch.manual_seed(5)  # of the dropout
        return fl.attention(*self.operands, self.regularizer, **self.options)

    def run_densely(self) -> Tensor:
        """From the definition: all scores, `solve`, and the expectation of the values."""
        query, key, value = self.operands
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        scores = query @ key.mT / query.shape[-1] ** 0.5
        cap = self.options.get("softcap")
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        bias, base = (self.options.get(name) for name in ("attn_mask", "base"))
        rows, columns = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
        log_mass = torch.zeros_like(scores)
        if bias is not None:
            scores = scores + bias.log_mass(rows, columns).to(scores.dtype)
        if base is not None:
            log_mass = log_mass + base.log_mass(rows, columns).to(scores.dtype)
        for prior, as_mass in ((bias, False), (base, True)):
            if prior is None or prior.sink is None:
                continue
            column = prior.sink[:, None, None].expand(*scores.shape[:-1], 1)
            nothing = torch.zeros_like(column)
            scores = torch.cat([scores, nothing if as_mass else column], -1)
            log_mass = torch.cat([log_mass, column if as_mass else nothing], -1)
        solution = fl.solve(scores, self.regularizer, base=Stored(log_mass))
        return solution.weights[..., : key.shape[2]] @ value


@dataclass(frozen=True, eq=False)
class Stored(fl.priors.Prior):
    """A log mass as it is."""

    tensor: Tensor

    def log_mass(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.tensor[..., rows, :][..., columns]


def make_case(terms, as_base, seed=0, dtype=torch.float64, alpha=1.5, shape=None) -> Case:
    """as_base: one truth value for all priors, or one per prior."""
    batch, heads, queries, keys, width = shape or (BATCH, HEADS, QUERIES, KEYS, WIDTH)
    g = torch.Generator().manual_seed(seed)
    leaves = []

    def leaf(*sizes, factor=1.0):
        leaves.append((factor * torch.randn(*sizes, generator=g, dtype=dtype)).requires_grad_())
        return leaves[-1]

    kv = heads // 2 if "grouped" in terms else heads
    operands = (
        leaf(batch, heads, queries, width, factor=2.0),
        leaf(batch, kv, keys, width),
        leaf(batch, kv, keys, width),
    )
    makers = {
        "causal": P.Causal,
        "offset": lambda: P.Causal(offset=keys - queries),
        "window": lambda: P.SlidingWindow(max(1, keys // 4), right=max(1, keys // 6)),
        "documents": lambda: P.Documents(torch.randint(0, 2, (keys,), generator=g).cumsum(0)),
        "lengths": lambda: P.KeyPadding(torch.randint(1, keys + 1, (batch, 1), generator=g)),
        "alibi": lambda: P.ALiBi(heads, leaf(heads, factor=0.3)),
        "table": lambda: P.RelativeBuckets(leaf(8, heads, factor=0.5), max_distance=16),
        "by key": lambda: P.Preference(leaf(batch, heads, keys, factor=0.5)),
        "sink": lambda: P.Sink(leaf(heads)),
    }
    options: dict[str, object] = {"enable_gqa": kv != heads}
    priors = [name for name in PRIORS if name in terms]
    sides = [as_base] * len(priors) if isinstance(as_base, bool) else as_base
    for name, base in zip(priors, sides, strict=False):
        side, prior = "base" if base else "attn_mask", makers[name]()
        fixed = options.get(side)
        options[side] = prior if fixed is None else fixed * prior
    if "softcap" in terms:
        options["softcap"] = 1.5
    if "dropout" in terms:
        options["dropout_p"] = 0.3
    if "alphas" in terms:
        alphas = torch.linspace(1.2, 2.0, heads, dtype=dtype)[:, None].requires_grad_()
        leaves.append(alphas)
        return Case(operands, fl.Tsallis(alphas), options, leaves)
    return Case(operands, fl.Tsallis(alpha) if alpha != 1 else fl.Shannon(), options, leaves)
