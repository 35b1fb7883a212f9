"""Numbers of a study as they are written down: rounded, with 95 % intervals, as small JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TAIL = 0.975


def interval(values: Tensor) -> dict[str, Any]:
    """The mean of what is not NaN and its 95 % interval by Student's t.

    Values are taken as independent. None where there are too few: none at all for the mean, one
    for the interval.
    """
    mean, half, n = _mean(values)
    if mean is None or half is None:
        return {"mean": rounded(mean), "low": None, "high": None, "n": n}
    return {
        "mean": rounded(mean),
        "low": rounded(mean - half),
        "high": rounded(mean + half),
        "n": n,
    }


def ratio_interval(values: Tensor) -> dict[str, Any]:
    """The geometric mean of ratios with its interval: that of the mean of their logarithms."""
    mean, half, n = _mean(values.log())
    if mean is None or half is None:
        return {"mean": _power(mean), "low": None, "high": None, "n": n}
    return {"mean": _power(mean), "low": _power(mean - half), "high": _power(mean + half), "n": n}


def quantiles(values: Tensor) -> dict[str, Any]:
    """Median, 5 % and 95 % of what is not NaN."""
    kept = values[~values.isnan()].double()
    if not kept.numel():
        return {"median": None, "q05": None, "q95": None}
    low, middle, high = torch.quantile(kept, kept.new_tensor([0.05, 0.5, 0.95])).tolist()
    return {"median": rounded(middle), "q05": rounded(low), "q95": rounded(high)}


def rounded(value: float | None) -> float | None:
    """Five digits."""
    return None if value is None else float(f"{float(value):.5g}")


def write(document: dict[str, Any], path: Path) -> Path:
    """As JSON, the innermost objects a line each."""
    text = json.dumps(document, indent=1, allow_nan=False)
    text = re.sub(r"[\[{][^\[\]{}\"]*[\]}]", _joined, text)
    text = re.sub(r"\{[^{}\[\]]*\}", _joined, text)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _joined(inner: re.Match[str]) -> str:
    return " ".join(inner.group().split())


def _mean(values: Tensor) -> tuple[float | None, float | None, int]:
    """Mean, half the interval, and how many."""
    kept = values[~values.isnan()].double()
    n = kept.numel()
    if n < 2:
        return (float(kept) if n else None), None, n
    from scipy.special import stdtrit  # of the extra `transport`, which W1 needs anyway

    half = float(stdtrit(n - 1, _TAIL)) * float(kept.std()) / n**0.5
    return float(kept.mean()), half, n


def _power(value: float | None) -> float | None:
    return None if value is None else rounded(float(torch.tensor(value, dtype=torch.float64).exp()))
