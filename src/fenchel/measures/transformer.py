"""A layer of the Transformer as a kernel, and the measures along a stack of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import matmul

from torch import Tensor, nn

from fenchel.measures.affine import Map, check_settled
from fenchel.measures.attention import MultiHeadKernel
from fenchel.measures.empirical import Empirical
from fenchel.measures.kernels import Deterministic, Kernel, NonlinearKernel, Residual
from fenchel.measures.measure import Function


class TransformerKernel(NonlinearKernel):
    """mu -> T_mu = A_mu F, attention and then a feed-forward map of every token.

    With `residual` each of the two is added to its input, and with `norms`, two maps of tokens,
    each is normalised: after the sum, or with `norm_first` before the step. That is the layer as it
    is used; without them, the layer of the paper.

    >>> from fenchel.measures.attention import AttentionKernel
    >>> from fenchel.measures.potentials import Dot
    >>> T = TransformerKernel(AttentionKernel(Dot()), torch.tanh)
    >>> mu = Empirical(torch.tensor([[0.0], [1.0]]))
    >>> (mu @ T(mu)).points
    tensor([[0.4621],
            [0.6237]])
    """

    # Vuckovic et al. (2020), proposition 12

    def __init__(
        self,
        attention: NonlinearKernel,
        feed_forward: Kernel | Map,
        *,
        residual: bool = False,
        norms: tuple[Map, Map] | None = None,
        norm_first: bool = False,
    ) -> None:
        if not isinstance(attention, NonlinearKernel):
            raise TypeError(
                f"attention must be an AttentionKernel or MultiHeadKernel, got "
                f"{type(attention).__name__}; not A(mu), the layer gives it its measure"
            )
        if norms is not None and len(norms) != 2:
            raise ValueError(f"norms must be two maps, got {len(norms)}")
        if norm_first and norms is None:
            raise ValueError("norm_first needs norms, got None")
        self.attention = attention
        self.feed_forward: Kernel = (
            feed_forward if isinstance(feed_forward, Kernel) else Deterministic(feed_forward)
        )
        self.residual, self.norm_first = residual, norm_first
        self.norms = None if norms is None else [Deterministic(norm) for norm in norms]

    def __call__(self, mu: Empirical) -> Kernel:
        if self.norms is None:
            return self._sum(self.attention(mu)) @ self._sum(self.feed_forward)
        first, second = self.norms
        if self.norm_first:  # what attention sees is the normalised measure
            inner = self._sum(first @ self.attention(mu @ first))
            return inner @ self._sum(second @ self.feed_forward)
        steps = [self._sum(self.attention(mu)), first, self._sum(self.feed_forward), second]
        return reduce(matmul, steps)

    def _sum(self, kernel: Kernel) -> Kernel:
        return Residual(kernel) if self.residual else kernel

    def __repr__(self) -> str:
        parts = [repr(self.attention), repr(self.feed_forward)]
        parts += ["residual=True"] if self.residual else []
        parts += [] if self.norms is None else [f"norms={'before' if self.norm_first else 'after'}"]
        return f"TransformerKernel({', '.join(parts)})"

    @classmethod
    def from_layer(
        cls, layer: nn.TransformerEncoderLayer, *, residual: bool = True, norm: bool = True
    ) -> TransformerKernel:
        """A torch.nn.TransformerEncoderLayer, in eval mode if it has dropout.

        Parameters stay those of the layer, and derivatives reach them. `batch_first` does not
        matter: points are (..., n, d). Without residual and norm it is the layer of the paper.
        """
        if not isinstance(layer, nn.TransformerEncoderLayer):
            raise TypeError(
                f"layer must be a torch.nn.TransformerEncoderLayer, got {type(layer).__name__}; "
                "build others of TransformerKernel(attention, feed_forward)"
            )
        check_settled(layer)
        return cls(
            MultiHeadKernel.from_module(layer.self_attn),
            TokenFeedForward(layer),
            residual=residual,
            norms=(layer.norm1, layer.norm2) if norm else None,
            norm_first=norm and layer.norm_first,
        )


class TokenFeedForward(nn.Module):
    """The second half of a layer, with the layer's own parameters."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.linear1, self.linear2 = layer.linear1, layer.linear2
        self.activation: Function = layer.activation

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear2(self.activation(self.linear1(x)))
        return hidden


def flow(mu: Empirical, kernels: Iterable[Kernel | NonlinearKernel]) -> list[Empirical]:
    """mu and the measures after each layer: mu_{l+1} = mu_l @ K_l(mu_l).

    A layer is a kernel, or a map from measures to kernels, which gets the measure before it.

    >>> from fenchel.measures.attention import AttentionKernel
    >>> from fenchel.measures.potentials import GaussianPotential
    >>> mu = Empirical(torch.tensor([[0.0], [1.0]]))
    >>> measures = flow(mu, [AttentionKernel(GaussianPotential())] * 2)
    >>> [round(float(nu.covariance), 4) for nu in measures]  # tokens draw together
    [0.25, 0.0534, 0.0006]
    """
    # the flow of measures in Vuckovic et al. (2020)
    measures = [mu]
    for kernel in kernels:
        now = measures[-1]
        if not isinstance(kernel, Kernel | NonlinearKernel):
            raise TypeError(
                f"a layer must be a kernel, or a map from measures to kernels, got "
                f"{type(kernel).__name__}; for a map of points use Deterministic(function)"
            )
        step = kernel if isinstance(kernel, Kernel) else kernel(now)
        measures.append(now @ step)
    return measures
