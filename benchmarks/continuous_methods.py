"""What `python -m benchmarks continuous` times: grids, mixtures, transformer layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential, TransformerEncoderLayer

import fenchel as fl
import fenchel.continuous as fc
from benchmarks import extras
from benchmarks.attention_rounds import Thunk


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Modules draw their parameters from the global generator, which is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---- attention over a grid

SOFTMAX = "softmax"
HEAD = "head alone"


@dataclass(frozen=True)
class Images:
    """Features (batch, side^2, channels), a head that scores them, and the functions."""

    batch: int = 64
    side: int = 14
    channels: int = 512
    functions: int = 100
    seed: int = 0

    def features(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.batch, self.side**2, self.channels, generator=generator)

    def head(self) -> Sequential:
        c = self.channels
        with _seeded(self.seed):
            return Sequential(Linear(c, c), ReLU(), Linear(c, 1))


Attend = Callable[[Tensor, Tensor], Tensor]


class Kind(NamedTuple):
    """make: from sizes to (features, scores) -> context; slow: by so much that it waits alone."""

    name: str
    make: Callable[[Images], Attend]
    slow: bool = False


def continuous(regularizer: fl.Regularizer, modes: int, name: str, slow: bool = False) -> Kind:
    def make(images: Images) -> Attend:
        grid = (images.side, images.side)
        layer = fl.nn.ContinuousAttention2d(grid, regularizer, images.functions, modes=modes)
        return lambda features, scores: layer(features, scores).context

    return Kind(name, make, slow)


def _softmax(features: Tensor, scores: Tensor) -> Tensor:
    return (torch.softmax(scores, -1).unsqueeze(-2) @ features).squeeze(-2)


KINDS = (
    Kind(SOFTMAX, lambda images: _softmax),
    Kind(HEAD, lambda images: lambda features, scores: scores),
    continuous(fl.Shannon(), 1, "fl Shannon()"),
    continuous(fl.Tsallis(2.0), 1, "fl Tsallis(2)"),
    continuous(fl.Shannon(), 4, "fl Shannon(), 4 modes"),
    continuous(fl.Tsallis(1.5), 1, "fl Tsallis(1.5)", slow=True),
)


def image_thunk(kind: Kind, images: Images, direction: str) -> Thunk:
    """Head and attention; backward to the features and to every parameter of the head."""
    attend, head, features = kind.make(images), images.head(), images.features()

    def forward() -> Tensor:
        return attend(features, head(features).squeeze(-1))

    if direction == "forward":
        return torch.no_grad()(forward)
    wanted = [features.requires_grad_(), *head.parameters()]

    def both() -> tuple[Tensor, ...]:
        output = forward()
        return torch.autograd.grad(output, wanted, output.detach())

    return both


# ---- mixtures

SKLEARN = "scikit-learn"
EM = "fl fit_mixture"


@dataclass(frozen=True)
class Mixtures:
    """Equal weights, for scikit-learn knows no others, and a start of its own for each."""

    batch: int = 64
    modes: int = 4
    iterations: int = 20
    side: int = 14
    seed: int = 0

    def positions(self) -> Tensor:
        return fc.cell_centers(self.side, self.side).to(torch.float64)

    def start(self) -> fc.Mixture:
        """Means on different positions, all with the covariance of the whole."""
        generator, positions = torch.Generator().manual_seed(self.seed), self.positions()
        order = [torch.randperm(len(positions), generator=generator) for _ in range(self.batch)]
        mean = positions[torch.stack(order)[:, : self.modes]]  # (batch, modes, 2)
        components = fc.Gaussian(mean, positions.mT.cov(correction=0))
        return fc.Mixture(torch.full_like(mean[..., 0], 1 / self.modes), components)


def ours(sizes: Mixtures) -> Callable[[], fc.Mixture]:
    start, positions = sizes.start(), sizes.positions()
    weights = torch.ones(sizes.batch, len(positions), dtype=torch.float64)
    return lambda: fc.fit_mixture(
        weights, positions, sizes.modes, iterations=sizes.iterations, start=start
    )


def sklearn(sizes: Mixtures) -> Callable[[], list[Any]]:
    """One after the other, which is how it is used."""
    model = extras.load("sklearn.mixture").GaussianMixture
    # One thread for its 2 x 2 systems: with more it waits for them a hundred times as long.
    limits = extras.load("threadpoolctl").threadpool_limits
    start, positions = sizes.start(), sizes.positions().numpy()
    precisions = torch.linalg.inv(start.components.covariance_matrix).numpy()
    starts = list(zip(start.mixing.numpy(), start.components.mean.numpy(), precisions, strict=True))
    # tol = 0: all iterations are done, as ours are.
    options = {"max_iter": sizes.iterations, "tol": 0.0, "reg_covar": 1e-15, "random_state": 0}

    def fit() -> list[Any]:
        with limits(1, "blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged is meant
            return [
                model(sizes.modes, weights_init=w, means_init=m, precisions_init=p, **options).fit(
                    positions
                )
                for w, m, p in starts
            ]

    return fit


FITS: tuple[tuple[str, Callable[[Mixtures], Thunk]], ...] = ((SKLEARN, sklearn), (EM, ours))


def likelihood_difference(sizes: Mixtures) -> float | None:
    """The largest over the batch, per position; None where scikit-learn is missing."""
    try:
        peers = sklearn(sizes)()
    except ModuleNotFoundError:
        return None
    positions = sizes.positions()
    likelihoods = ours(sizes)().log_likelihood(positions.new_ones(len(positions)), positions)
    other = likelihoods.new_tensor([peer.score(positions.numpy()) for peer in peers])
    return float((likelihoods - other).abs().max())


# ---- transformer layers

STANDARD = "torch TransformerEncoderLayer"
CONTINUOUS = "fl ContinuousTransformerLayer"


@dataclass(frozen=True)
class Layers:
    """Sizes of a pre-norm layer, and how many functions take the place of the tokens."""

    embed: int = 256
    heads: int = 4
    functions: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    seed: int = 0


def _standard(sizes: Layers) -> Module:
    options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
    return TransformerEncoderLayer(sizes.embed, sizes.heads, 4 * sizes.embed, **options)  # type: ignore[arg-type]


def _continuous(sizes: Layers) -> Module:
    return fl.nn.ContinuousTransformerLayer(sizes.embed, sizes.heads, sizes.functions)


LAYERS: tuple[tuple[str, Callable[[Layers], Module]], ...] = (
    (STANDARD, _standard),
    (CONTINUOUS, _continuous),
)


def layer_thunk(make: Callable[[Layers], Module], sizes: Layers, length: int) -> Thunk:
    """Forward, in training mode: torch's short cut for inference stores length^2 weights."""
    with _seeded(sizes.seed):
        layer = make(sizes).train().requires_grad_(False)
    generator = torch.Generator().manual_seed(sizes.seed)
    tokens = torch.randn(1, length, sizes.embed, generator=generator)
    return lambda: layer(tokens)
