"""A table of who attends in a model, and what `convert` would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fenchel.hf.held import REGULARIZER_ATTRIBUTE
from fenchel.hf.names import PER_MODULE
from fenchel.hf.survey import Site, survey
from fenchel.hf.trial import ASKS, BY_HAND, FUSED, MULTIHEAD
from fenchel.regularizers.contract import resolve_regularizer

_WAYS = {
    ASKS: "asks transformers for its function",
    FUSED: "calls scaled_dot_product_attention",
    BY_HAND: "takes a softmax itself",
    MULTIHEAD: "torch.nn.MultiheadAttention",
}
_RESULTS = {
    ASKS: "converts",
    FUSED: "converts: the call is exchanged where it runs",
    BY_HAND: "converts: the softmax is exchanged, and stays dense",
    MULTIHEAD: "converts by fenchel.nn",
}


@dataclass(frozen=True)
class Row:
    """One attention: its path, its class, how it attends, whether that was seen in a run or only
    read, what `convert` would do, and what it runs on now."""

    path: str
    kind: str
    how: str
    seen: str
    result: str
    now: str

    @property
    def converts(self) -> bool:
        return self.result.startswith("converts")


@dataclass(frozen=True)
class Check:
    """Every attention of a model, in the order of its modules. Prints as a table.

    >>> print(hf.check(model))
    """

    rows: list[Row]
    not_run: list[str]  # why the model, or a part of it, could not be run

    @property
    def converts(self) -> bool:
        """Whether `convert` would switch all of them."""
        return bool(self.rows) and all(row.converts for row in self.rows)

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            groups.setdefault((row.kind, row.how, row.seen, row.result, row.now), []).append(
                row.path
            )
        head = ("attention", "module", "attends how", "seen", "fenchel.hf.convert", "now")
        lines = [head, *((_paths(paths), *cells) for cells, paths in groups.items())]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        notes = [f"could not be run: {reason}" for reason in self.not_run]
        return (
            "\n".join([*table, *notes]) if self.rows else "\n".join(["no attention found", *notes])
        )


def _paths(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]} ({len(paths)})"


def check(model: nn.Module, inputs: object = None) -> Check:
    """Who attends in the model, and how, seen in one run of it. The model stays as it is.

    >>> print(hf.check(model))
    >>> hf.check(model, inputs=processor(images=picture, text="a cat", return_tensors="pt"))

    inputs: what to run the model on, as a mapping of arguments, a tuple or a tensor. Without them a
        few tokens, an image or a second of silence are made, as the configuration says. Where the
        model cannot be run on those, the models within are; the rest is read from the source.
    """
    seen = survey(model, inputs)
    return Check([_row(site) for site in seen.sites], seen.not_run)


def _row(site: Site) -> Row:
    return Row(
        path=site.path,
        kind=type(site.module).__name__,
        how=_WAYS[site.how],
        seen="ran" if site.ran else "read",
        result=f"stays on softmax: {site.trouble}" if site.trouble else _RESULTS[site.how],
        now=_now(site),
    )


def _now(site: Site) -> str:
    module: Any = site.module
    if site.how == MULTIHEAD:
        ours = not isinstance(module, nn.MultiheadAttention)
        return "fenchel" if ours else "softmax"
    name = str(getattr(getattr(module, "config", None), "_attn_implementation", None) or "softmax")
    exchanged = "forward" in vars(module) and type(module.forward).__name__ == "ExchangedForward"
    if site.how != ASKS:
        return "fenchel" if exchanged else "softmax"
    held = getattr(module, REGULARIZER_ATTRIBUTE, None)
    return _words(held) if name == PER_MODULE and held is not None else name


def _words(held: nn.Module) -> str:
    """Of the regulariser that an attention holds."""
    if any(x.is_meta for x in (*held.parameters(), *held.buffers())):
        return f"{PER_MODULE}, on meta"
    omega = resolve_regularizer(held)
    alpha = getattr(omega, "alpha", None)
    if not isinstance(alpha, Tensor):
        return str(omega)
    low, high = (float(x) for x in alpha.detach().aminmax())
    return f"{type(omega).__name__}, alpha {low:.3g} to {high:.3g}"
