"""What attention decided: sparse weights, thresholds, certificates, without an n x n tensor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from fenchel._attention.call import AttentionCall, Options, prepare
from fenchel._attention.tiled import solve_tile, split, weights_of_keys
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
    rows[r] .. rows[r + 1] - 1 of `keys` and `weights`.
    """

    rows: Tensor  # (number of rows + 1,), int64
    keys: Tensor  # (entries,), int64
    weights: Tensor  # (entries,)
    threshold: Tensor  # (..., query)
    gap: Tensor  # (..., query)
    status: Tensor  # (..., query), codes of `Status`
    shape: torch.Size  # of the scores: (..., query, key)

    @property
    def support_size(self) -> Tensor:
        """How many keys each query attends to. (..., query)"""
        return self.rows.diff().reshape(self.shape[:-1])

    def __repr__(self) -> str:
        share = int((self.weights > 0).sum()) / max(1, self.shape.numel())
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
        parts = (rows - first, self.keys[first:last], self.weights[first:last])
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
        numbers = (solution.threshold, solution.gap, solution.status)
        columns[3].append(torch.stack([x.double().reshape(batch, heads, rows) for x in numbers]))
    row, key, weight = (torch.cat(column) for column in columns[:3])
    order = row.argsort(stable=True)
    counts = torch.bincount(row, minlength=batch * heads * queries)
    threshold, gap, status = (call.restore(x) for x in torch.cat(columns[3], -1))
    return AttentionSolution(
        rows=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        keys=key[order],
        weights=weight[order],
        threshold=threshold,
        gap=gap,
        status=status.long(),
        shape=torch.Size((*call.lead, queries, keys)),
    )
