"""The sentence that everything else on the page is about."""

from __future__ import annotations

from fenchel.report.chapter import Chapter, Table, Tour

ORDER = 10

_INTRO = """
Attention is the expectation of values under the distribution that solves a regularised problem:

    p* = argmax_p  <scores, p> − Ω(p)
    output = Σ p*_i values_i

Ω is convex and decides what the weights look like: softmax, exact zeros, equal weights on few
keys, a fixed number of keys, runs of neighbours. A base measure decides how much room each key
has before any score is seen; zero room is a mask.

    import fenchel as fl
    solution = fl.solve(scores, fl.Tsallis(1.5))
    solution.weights, solution.support, solution.gap

The chapters below show the maps, the base measures, the certificate that comes with each answer,
its derivatives checked while the page was written, two views that follow from the curvature, times
on this machine, sparse attention, and attention as a density over an image.
"""

_ROWS = (
    ("Shannon()", "Σ p log p", "softmax: every key gets something"),
    ("Tsallis(alpha)", "Σ (p^α − p) / (α(α − 1))", "entmax: exact zeros; sparsemax at 2"),
    ("Norm(alpha)", "‖p‖_α", "normmax: near-equal weights on few keys"),
    ("Budget(k)", "‖p‖² / 2 on 0 ≤ p ≤ 1, Σ p = k", "picks about k keys, none above one"),
    ("Fused(strength)", "‖p‖² / 2 + strength Σ |p_i − p_j|", "equal weights on runs or patches"),
)


def chapter(tour: Tour) -> Chapter:
    rows = tuple((f"`{name}`", omega, effect) for name, omega, effect in _ROWS)
    caption = "The regularisers of this version, at temperature one and without a base measure."
    table = Table(caption, ("regulariser", "Ω(p)", "its map"), rows, words=True)
    return Chapter("One sentence", _INTRO, tables=(table,))
