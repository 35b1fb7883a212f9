"""Attention as a kernel: match, look up, average."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fenchel.measures.affine import Affine, Map, affine_of, as_map
from fenchel.measures.empirical import Empirical
from fenchel.measures.kernels import Deterministic, Kernel, KernelMixture, NonlinearKernel
from fenchel.measures.lookup import Lookup
from fenchel.measures.potentials import InteractionPotential, ScaledDot
from fenchel.measures.projection import MomentProjection
from fenchel.measures.softmatch import Softmatch


class AttentionKernel(NonlinearKernel):
    """mu -> A_mu, A_mu(x, .) = Pi[Psi_{G(x, .)}(mu) L]: the Dirac at what attention gives query x.

    `mu @ A(mu)` is a step of self-attention, `Empirical(queries) @ A(keys)` cross-attention.
    Without a lookup, values are the keys themselves.

    >>> from fenchel.measures.potentials import Dot
    >>> A = AttentionKernel(Dot())
    >>> mu = Empirical(torch.tensor([[0.0], [1.0]]))
    >>> (mu @ A(mu)).points
    tensor([[0.5000],
            [0.7311]])
    """

    # Vuckovic et al. (2020), definition 8 and proposition 9

    def __init__(self, potential: InteractionPotential, lookup: Kernel | Map | None = None) -> None:
        self.softmatch = Softmatch(potential)
        if lookup is None or isinstance(lookup, Kernel):
            self.lookup = lookup
        else:
            self.lookup = Lookup(lookup)

    def __call__(self, mu: Empirical) -> Kernel:
        matched = self.softmatch(mu)
        looked_up = matched if self.lookup is None else matched @ self.lookup
        return MomentProjection()(looked_up)

    def __repr__(self) -> str:
        parts = [repr(self.softmatch.potential)]
        parts += [] if self.lookup is None else [repr(self.lookup)]
        return f"AttentionKernel({', '.join(parts)})"


class MultiHeadKernel(NonlinearKernel):
    """mu -> Pi of the mixture (1 / H) sum_h A^h_mu O^h, with O^h = H times the h-th output map.

    That is sum_h outputs_h(head_h(x)) + bias, concatenation and projection in one.

    heads: H kernels such as AttentionKernel, each not yet given its measure.
    outputs: H matrices (d, d'), or linear maps, from a head's R^d' to the model's R^d: the blocks
        of columns of a torch.nn.MultiheadAttention's out_proj.weight.
    bias: (d,), added once.
    """

    # Vuckovic et al. (2020), proposition 12

    def __init__(
        self, heads: Sequence[NonlinearKernel], outputs: Sequence[Map], bias: Tensor | None = None
    ) -> None:
        if len(heads) != len(outputs) or not heads:
            raise ValueError(
                f"there must be one output map for each head, got {len(heads)} heads and "
                f"{len(outputs)} maps"
            )
        for head in heads:
            if not isinstance(head, NonlinearKernel):
                raise TypeError(
                    f"heads must be AttentionKernels, got {type(head).__name__}; the measure is "
                    "given to all of them at once"
                )
        self.heads = list(heads)
        self.outputs = [_scale_output(output, len(heads), bias) for output in outputs]

    def __call__(self, mu: Empirical) -> Kernel:
        parts = [head(mu) @ out for head, out in zip(self.heads, self.outputs, strict=True)]
        return MomentProjection()(KernelMixture(parts))

    def __repr__(self) -> str:
        return f"MultiHeadKernel({len(self.heads)} heads)"

    @classmethod
    def from_module(cls, module: nn.MultiheadAttention) -> MultiHeadKernel:
        """Self-attention of a torch.nn.MultiheadAttention, biases included, without dropout.

        >>> layer = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
        >>> x = torch.randn(3, 4)
        >>> mu = Empirical(x)
        >>> torch.allclose((mu @ MultiHeadKernel.from_module(layer)(mu)).points, layer(x, x, x)[0])
        True
        """
        _check_module(module)
        weights = module.in_proj_weight.chunk(3)  # each (d, d), heads one below the other
        offsets = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        size, heads = module.head_dim, []
        for h in range(module.num_heads):
            rows = slice(h * size, (h + 1) * size)
            query, key, value = (
                Affine(weight[rows], None if offset is None else offset[rows])
                for weight, offset in zip(weights, offsets, strict=True)
            )
            heads.append(AttentionKernel(ScaledDot(query=query, key=key), value))
        outputs = list(module.out_proj.weight.split(size, dim=1))  # each (d, d / H)
        return cls(heads, outputs, module.out_proj.bias)


def _scale_output(output: Map, count: int, bias: Tensor | None) -> Deterministic:
    """z -> count * output(z) + bias"""
    function = as_map(output, "output")
    affine = affine_of(function)
    if affine is None:
        return Deterministic(lambda z: _plus(count * function(z), bias))
    if affine.offset is not None:
        raise ValueError("an output map must be linear: give its offset as `bias`, added once")
    return Deterministic(Affine(count * affine.matrix, bias))


def _plus(value: Tensor, bias: Tensor | None) -> Tensor:
    return value if bias is None else value + bias


def _check_module(module: object) -> None:
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(
            f"a torch.nn.MultiheadAttention is needed, got {type(module).__name__}; for others "
            "build the heads: MultiHeadKernel([AttentionKernel(...), ...], outputs)"
        )
    if module.training and module.dropout > 0:
        raise ValueError(f"dropout of {module.dropout} in training is random; call .eval()")
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn add keys that mu does not have: refused")
    if module.in_proj_weight is None:
        raise ValueError("kdim and vdim must be embed_dim: queries, keys and values are one mu")
