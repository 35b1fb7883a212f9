"""What one step of decoding skipped, and why that is right: `DecodeProof`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fenchel._attention.call import AttentionCall, Options, prepare
from fenchel._attention.tiled import log_mass_of_tile, scores, solve_tile
from fenchel._numerics import compute_dtype
from fenchel.priors.contract import Prior
from fenchel.regularizers.tsallis import Tsallis


@dataclass(frozen=True, eq=False)
class DecodeProof:
    """One step of decoding, with the reason why every key that was skipped has weight zero.

    >>> proof = fl.decode(query, cache, fl.Tsallis(1.5), proof=True)
    >>> proof.check(cache.key)                                    # raises where it does not hold

    No skipped key has a score above `largest_skipped`, which is at most `cut`. The candidates alone
    have a threshold of at least `cut`, and more keys only raise it. Hence skipped keys lie at or
    below the threshold, where weights are zero. Scores count with the temperature divided out.

    output: as of `decode`.
    cut, largest_skipped: float64 (batch, head, query); -inf where nothing was skipped.
    candidates: bool (batch, head, query, key), the keys that were scored.
    """

    output: Tensor
    cut: Tensor
    largest_skipped: Tensor
    candidates: Tensor
    question: tuple[Tensor, Tsallis, Options]

    def __repr__(self) -> str:
        share = float(self.candidates.double().mean())
        return f"DecodeProof(scores {tuple(self.candidates.shape)}, {100 * share:.3g}% candidates)"

    def check(self, key: Tensor) -> None:
        """Verify against the scores of all keys (batch, kv_head, key, d), in float64.

        Raises AssertionError, naming the first row that fails.
        """
        query, regularizer, options = self.question
        batch, keys = self.candidates.shape[0], self.candidates.shape[-1]
        if key.ndim != 4 or key.shape[0] != batch or key.shape[2] != keys:
            raise ValueError(
                f"key must have shape ({batch}, kv_head, {keys}, d), got {tuple(key.shape)}"
            )
        options = _in_double(options)
        call = prepare(query.double(), key.double(), key.double(), options)
        temperature: Any = regularizer.temperature
        exact = scores(call) / temperature
        seen = exact != -torch.inf
        hidden = _hidden_by_base(call, compute_dtype(query.dtype))
        seen = seen if hidden is None else seen & ~hidden
        room = self._rounding(query, key, options, temperature)
        skips = seen & ~self.candidates
        skipped = exact.masked_fill(~skips, -torch.inf).amax(-1)
        within = skipped <= self.largest_skipped + room
        self._require(within | ~skips.any(-1), "a skipped key exceeds its bound")
        self._require(self.largest_skipped <= self.cut, "a bound exceeds the cut")
        rows = replace(
            call, mask=self.candidates if call.mask is None else call.mask & self.candidates
        )
        solution = solve_tile(rows, regularizer)
        threshold = solution.threshold / temperature
        # a candidate that is no number leaves none in the output, whatever else is read
        broken = (exact.isnan() & seen & self.candidates).any(-1)
        self._require(
            ~skips.any(-1) | broken | (threshold.reshape(self.cut.shape) >= self.cut - room),
            "the candidates do not reach the cut",
        )

    def _rounding(self, query: Tensor, key: Tensor, options: Options, temperature: Any) -> Tensor:
        """How far a score that was computed in float32 may be from the exact one."""
        ulp = torch.finfo(compute_dtype(query.dtype)).eps
        scale = query.shape[-1] ** -0.5 if options.scale is None else abs(options.scale)
        repeats = query.shape[1] // key.shape[1]
        longest = key.double().norm(dim=-1).nan_to_num(0.0).amax(-1).repeat_interleave(repeats, 1)
        product = query.double().norm(dim=-1) * longest.unsqueeze(-1) * scale / temperature
        added = [x.abs().nan_to_num(0.0, 0.0) for x in (self.largest_skipped, self.cut)]
        room: Tensor = ulp * ((query.shape[-1] + 16) * product + 4 * (added[0] + added[1]))
        return room  # a bias is rounded with the score

    @staticmethod
    def _require(holds: Tensor, what: str) -> None:
        if not bool(holds.all()):
            row = tuple((~holds).nonzero()[0].tolist())
            raise AssertionError(f"{what}, at (batch, head, query) {row}")


def _in_double(options: Options) -> Options:
    mask = options.attn_mask
    if isinstance(mask, Tensor) and mask.is_floating_point():
        options = options._replace(attn_mask=mask.double())
    return options


def _hidden_by_base(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """Keys to which the base gives no mass that counts: see `mass` of native/scores.h."""
    if call.base is None:
        return None
    if isinstance(call.base, Prior):
        mass = log_mass_of_tile(call.base, call).to(dtype).exp()
    else:
        mass = call.restore(call.base).to(dtype)
    hidden: Tensor = mass < 4 * torch.finfo(dtype).tiny
    return hidden.expand(call.caller_shape).reshape(call.scores_shape)
