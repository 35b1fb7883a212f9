"""Attention of the GPU's kernels against float64 in torch's operations, on the same device.

A case passes where its errors are at most twice those of the plain computation in the same
precision, and at most four roundings, and in both cases 1e-5 more. The plain computation is a
product, a map of rows and a product; in half precision alone it would allow nearly anything, as a
rounded score changes which keys sparsemax supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fenchel as fl
from fenchel import priors

_FACTOR, _ROUNDINGS, _SLACK = 2.0, 4.0, 1e-5
LEAVES = ("query", "key", "value")
PATH = "GPU kernels"  # how the names of their paths begin, in `fl.explain`

PLAIN, CAUSAL, GROUPED, WINDOW, ALIBI = "plain", "causal", "grouped heads", "window", "ALiBi"
FORMS = (PLAIN, CAUSAL, GROUPED, WINDOW, ALIBI)
ALPHAS = (1.5, 2.0, 1.3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    alpha: float
    form: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Sizes:
    """Of every case. heads: of keys and values. window: keys that a query sees to its left."""

    batch: int = 2
    heads: int = 4
    tokens: int = 1000
    width: int = 64
    window: int = 100
    seed: int = 0


# Every alpha with and without causal in every precision; the rest with one alpha: each pair of a
# precision and an alpha is compiled anew, which takes most of the time.
FULL = (
    *(Case(alpha, form, dtype) for alpha in ALPHAS for form in FORMS[:2] for dtype in DTYPES),
    *(Case(ALPHAS[0], form, dtype) for form in FORMS[2:] for dtype in DTYPES),
)
# Every alpha, form and precision, in seconds of the interpreter.
SAMPLE = (
    Case(1.5, PLAIN, torch.float32),
    Case(1.5, CAUSAL, torch.bfloat16),
    Case(2.0, CAUSAL, torch.float16),
    Case(1.3, PLAIN, torch.float32),
    Case(1.5, GROUPED, torch.float32),
    Case(1.5, WINDOW, torch.bfloat16),
    Case(1.5, ALIBI, torch.float16),
)
LITTLE = Sizes(batch=1, heads=1, tokens=37, width=16, window=10)


@dataclass(frozen=True)
class Outcome:
    """Errors and their bars by name: output, query, key, value. error: why there are none."""

    case: Case
    errors: dict[str, float]
    bars: dict[str, float]
    error: str = ""

    @property
    def passes(self) -> bool:
        """False for NaN, too."""
        compared = self.errors.keys() == self.bars.keys() == {"output", *LEAVES}
        return compared and all(self.errors[name] <= self.bars[name] for name in self.bars)

    def as_json(self) -> dict[str, Any]:
        alpha, form, dtype = self.case
        return {
            "alpha": alpha,
            "form": form,
            "dtype": str(dtype).removeprefix("torch."),
            "passes": self.passes,
            "errors": self.errors,
            "bars": self.bars,
            "error": self.error,
        }


def compare(
    cases: Sequence[Case],
    sizes: Sizes,
    device: torch.device,
    advance: Callable[[float], object] = lambda share: None,
) -> Iterator[Outcome]:
    """One after the other."""
    for case in cases:
        yield _compare(case, sizes, device)
        advance(1 / len(cases))


def _compare(case: Case, sizes: Sizes, device: torch.device) -> Outcome:
    operands = _operands(case, sizes, device)
    try:
        check_path(case, sizes, operands)
        results = _differentiate(_ours(case, sizes, "gpu"), operands)
        exact = _differentiate(_ours(case, sizes, "torch"), [x.double() for x in operands])
        plain = _differentiate(lambda q, k, v: attend_plainly(case, sizes, q, k, v), operands)
    except Exception as failure:  # of one case is a result; the others go on
        lines = str(failure).strip().splitlines() or [""]
        return Outcome(case, {}, {}, f"{type(failure).__name__}: {lines[0][:200]}")
    return Outcome(case, measure(results, exact), allowed(case, plain, exact))


def _operands(case: Case, sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Query, key, value and what arrives from behind, on the device in the case's precision.

    Every other query has scores of deviation 3, whose support is short; the rest of 0.3.
    """
    generator = torch.Generator().manual_seed(sizes.seed)
    heads = 2 * sizes.heads if case.form == GROUPED else sizes.heads
    drawn = [
        torch.randn(sizes.batch, number, sizes.tokens, sizes.width, generator=generator)
        for number in (heads, sizes.heads, sizes.heads, heads)
    ]
    spread = torch.full((sizes.tokens, 1), 3.0)
    spread[::2] = 0.3
    drawn[0] *= spread
    return [tensor.to(device, case.dtype) for tensor in drawn]


def _arguments(case: Case, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Of `fl.attention`."""
    arguments: dict[str, Any] = {
        "is_causal": case.form != PLAIN,
        "enable_gqa": case.form == GROUPED,
    }
    prior = _prior(case, sizes, device)
    return arguments if prior is None else {**arguments, "attn_mask": prior}


def _prior(case: Case, sizes: Sizes, device: torch.device) -> priors.Prior | None:
    if case.form == WINDOW:
        return priors.SlidingWindow(sizes.window)
    if case.form != ALIBI:
        return None
    slopes = 0.1 / torch.arange(1, sizes.heads + 1, dtype=torch.float64, device=device)
    return priors.ALiBi(sizes.heads, slopes)


def _ours(case: Case, sizes: Sizes, kernels: str) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        arguments = _arguments(case, sizes, query.device)
        with fl.use(kernels):
            return fl.attention(query, key, value, fl.Tsallis(case.alpha), **arguments)

    return attend


def check_path(case: Case, sizes: Sizes, operands: Sequence[Tensor]) -> None:
    """Torch's operations would agree with themselves."""
    query, key, value = operands[:3]
    arguments = _arguments(case, sizes, query.device)
    with fl.use("gpu"):
        route = fl.explain(query, key, value, fl.Tsallis(case.alpha), **arguments)
    if not route.path.startswith(PATH):
        raise RuntimeError(" ".join(str(route).splitlines()))


def attend_plainly(case: Case, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scores and weights are rounded to the operands' precision; the map computes in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).float()
    places = torch.arange(sizes.tokens, device=query.device)
    prior = _prior(case, sizes, query.device)
    if prior is not None:
        scores = scores + prior.log_mass(places, places).float()
    if case.form != PLAIN:
        scores = scores.masked_fill(places > places[:, None], -torch.inf)
    with fl.use("torch"):
        weights = fl.entmax(scores, case.alpha)
    return weights.to(query.dtype) @ value


def _differentiate(attend: Callable[..., Tensor], operands: Sequence[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of its product with the last operand, in float64."""
    leaves = [x.detach().requires_grad_() for x in operands[:3]]
    output = attend(*leaves)
    gradients = torch.autograd.grad(output, leaves, operands[3])
    named = dict(zip(LEAVES, gradients, strict=True))
    return {name: x.detach().double() for name, x in {"output": output, **named}.items()}


def measure(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest of the output's, and of each gradient the norm, relative to its own."""
    errors = {"output": float((results["output"] - exact["output"]).abs().max())}
    for name in LEAVES:
        errors[name] = float((results[name] - exact[name]).norm() / exact[name].norm())
    return errors


def allowed(case: Case, plain: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error by name, from the plain computation and from the precision."""
    rounding = _ROUNDINGS * torch.finfo(case.dtype).eps
    sizes = {"output": float(exact["output"].abs().max()), **dict.fromkeys(LEAVES, 1.0)}
    return {
        name: min(_FACTOR * error, rounding * sizes[name]) + _SLACK
        for name, error in measure(plain, exact).items()
    }
