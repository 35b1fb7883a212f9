"""What attention decided: sparse weights, thresholds, certificates, without an n x n tensor."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.call import AttentionCall, Options, prepare
from fenchel._attention.tiled import (
    StoredLogMass,
    log_mass_of_tile,
    solve_tile,
    split,
    weights_of_keys,
)
from fenchel._numerics import expands_to
from fenchel._solution import Status
from fenchel.priors.contract import Prior
from fenchel.regularizers.contract import Regularizer, resolve_regularizer
from fenchel.regularizers.shannon import Shannon

_SHANNON = Shannon()


@dataclass(frozen=True, eq=False)
class AttentionSolution:
    """The weights of every query in compressed rows, and how far each row may be from optimal.

    >>> fl.attention_solution(q, k, v, fl.Tsallis(1.5))
    AttentionSolution(scores (2, 8, 300, 300), support 7.1%, gap <= 4.1e-15, 4800 OK)

    Rows run over the leading axes and the queries in order: row r of the weights owns the entries
    rows[r] .. rows[r + 1] - 1 of `keys` and `entries`. Names are those of `Solution`.
    """

    rows: Tensor  # (number of rows + 1,), int64
    keys: Tensor  # (entries,), int64
    entries: Tensor  # (entries,): weights that are not zero
    threshold: Tensor  # (..., query)
    gap: Tensor  # (..., query)
    status: Tensor  # (..., query), codes of `Status`
    visible_size: Tensor  # (..., query): how many keys each query may attend to
    shape: torch.Size  # of the scores: (..., query, key)

    @property
    def weights(self) -> Tensor:
        """A `torch.sparse_coo` tensor in the shape of the scores; `.to_dense()` has the zeros."""
        places = self._rows_of_entries() * self.shape[-1] + self.keys
        indices = torch.stack(torch.unravel_index(places, self.shape))
        return torch.sparse_coo_tensor(
            indices, self.entries, self.shape, check_invariants=False, is_coalesced=True
        )

    @property
    def support(self) -> Tensor:
        """Which keys carry weight. bool, shape of the scores, dense."""
        mask = torch.zeros(self.shape.numel(), dtype=torch.bool, device=self.keys.device)
        mask[self._rows_of_entries() * self.shape[-1] + self.keys] = self.entries > 0
        return mask.reshape(self.shape)

    @property
    def support_size(self) -> Tensor:
        """How many keys carry weight. int64, (..., query)"""
        count = self.shape[:-1].numel()
        positive = self._rows_of_entries()[self.entries > 0]
        return torch.bincount(positive, minlength=count).reshape(self.shape[:-1])

    def _rows_of_entries(self) -> Tensor:
        """(entries,)"""
        return torch.repeat_interleave(self.rows.diff())

    def __repr__(self) -> str:
        share = int((self.entries > 0).sum()) / max(1, self.shape.numel())
        gaps = self.gap[~self.gap.isnan()]
        gap = f"gap <= {float(gaps.max()):.2g}" if gaps.numel() else "no gap"
        counts = [(int((self.status == status).sum()), status.name) for status in Status]
        rows = ", ".join(f"{count} {name}" for count, name in counts if count) or "no rows"
        shape = tuple(self.shape)
        return f"AttentionSolution(scores {shape}, support {100 * share:.3g}%, {gap}, {rows})"

    def head(self, *index: int) -> Tensor:
        """The weights of one head as a `torch.sparse_csr` matrix (query, key).

        >>> fl.attention_solution(q, k, v, fl.Tsallis(1.5)).head(0, 3)     # batch 0, head 3
        """
        lead, (queries, keys) = self.shape[:-2], self.shape[-2:]
        if len(index) != len(lead):
            raise ValueError(f"head needs one index for each leading axis {tuple(lead)}")
        number = 0
        for position, size in zip(index, lead, strict=True):
            if not -size <= position < size:
                raise IndexError(f"head {index} is outside of the leading axes {tuple(lead)}")
            number = number * size + position % size
        rows = self.rows[number * queries : (number + 1) * queries + 1]
        first, last = int(rows[0]), int(rows[-1])
        parts = (rows - first, self.keys[first:last], self.entries[first:last])
        with warnings.catch_warnings():  # torch calls its sparse matrices beta, once a process
            warnings.filterwarnings("ignore", "Sparse CSR tensor support", UserWarning)
            return torch.sparse_csr_tensor(*parts, (queries, keys), check_invariants=False)


def attention_solution(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    regularizer: Regularizer | Module = _SHANNON,
    *,
    base: Tensor | Prior | None = None,
    attn_mask: Tensor | Prior | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> AttentionSolution:
    """The distribution behind each output of `attention`, with its certificate.

    >>> sol = fl.attention_solution(q, k, v, fl.Tsallis(1.5))
    >>> sol.support_size.float().mean(), sol.gap.max(), sol.head(0, 0)

    Arguments are those of `attention` but dropout. Not differentiable; weights in float32 at least.
    A `Sink` takes what the weights of a row lack to one.
    """
    regularizer = resolve_regularizer(regularizer)
    options = Options(base, attn_mask, is_causal, scale, 0.0, enable_gqa, softcap)
    call = prepare(query, key, value, options)
    with torch.no_grad():
        return _gather(call, regularizer)


def _gather(call: AttentionCall, regularizer: Regularizer) -> AttentionSolution:
    batch, heads, queries, keys = call.scores_shape
    columns: list[list[Tensor]] = [[], [], [], []]
    for tile, of_rows in split(call, regularizer):
        solution = solve_tile(tile, of_rows)
        rows = tile.query.shape[2]
        weights = weights_of_keys(solution, tile).reshape(batch * heads, rows, keys)
        entries = weights.nonzero()  # (entries, 3): head, query, key; NaN counts as an entry
        row = entries[:, 0] * queries + entries[:, 1] + (tile.first - call.first)
        columns[0].append(row)
        columns[1].append(entries[:, 2])
        columns[2].append(weights[entries.unbind(-1)])
        visible = solution.problem.base.allowed[..., :keys].sum(-1)
        numbers = (solution.threshold, solution.gap, solution.status, visible)
        columns[3].append(torch.stack([x.double().reshape(batch, heads, rows) for x in numbers]))
    row, key, weight = (torch.cat(column) for column in columns[:3])
    order = row.argsort(stable=True)
    counts = torch.bincount(row, minlength=batch * heads * queries)
    threshold, gap, status, visible = (call.restore(x) for x in torch.cat(columns[3], -1))
    return AttentionSolution(
        rows=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        keys=key[order],
        entries=weight[order],
        threshold=threshold,
        gap=gap,
        status=status.long(),
        visible_size=visible.long(),
        shape=torch.Size((*call.lead, queries, keys)),
    )


def solve_head(
    call: AttentionCall, regularizer: Regularizer, batch: int, head: int
) -> tuple[AttentionSolution, Regularizer]:
    """Of one head alone, scores (query, key), with the regulariser of its rows."""
    with torch.no_grad():
        of_rows = _select_rows(regularizer, call, batch, head)
        return _gather(_select_head(call, batch, head), of_rows), of_rows


def _select_head(call: AttentionCall, batch: int, head: int) -> AttentionCall:
    read = head * call.key.shape[1] // call.query.shape[1]  # the key head

    def select(x: Tensor, head: int = head) -> Tensor:
        return x[batch : batch + 1, head : head + 1]

    def select_term(term: Tensor | Prior | None) -> Tensor | Prior | None:
        if not isinstance(term, Prior):
            return term if term is None else select(term)
        log_mass = log_mass_of_tile(term, call).reshape(call.scores_shape)[batch, head]
        sink = term.sink
        if sink is not None:
            sink = sink.expand(call.lead).reshape(call.scores_shape[:2])[batch, head]
        return StoredLogMass(log_mass, sink, term.is_mask)

    return replace(
        call,
        query=select(call.query),
        key=select(call.key, read),
        value=select(call.value, read),
        mask=call.mask if call.mask is None else select(call.mask),
        bias=select_term(call.bias),
        base=select_term(call.base),
        lead=torch.Size(),
    )


def _select_rows(
    regularizer: Regularizer, call: AttentionCall, batch: int, head: int
) -> Regularizer:
    """A copy with its own tensors. Parameters broadcast over the rows: cut to those of the head."""
    part, shape = copy.copy(regularizer), call.caller_shape[:-1]  # (..., query)
    for name, value in vars(regularizer).items():
        if not isinstance(value, Tensor):
            continue
        if value.ndim and expands_to(value.shape, shape):
            of_heads = value.expand(*call.lead, value.shape[-1])
            value = of_heads.reshape(*call.scores_shape[:2], -1)[batch, head]
            value = value[0] if len(value) == 1 else value
        object.__setattr__(part, name, value.detach().clone())
    return part
