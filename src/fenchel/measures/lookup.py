"""From keys to values: by a function, by a table, by a stochastic matrix."""

from __future__ import annotations

from torch import Tensor

from fenchel._numerics import check_tensor, has
from fenchel.measures.affine import Affine, Map, map_name
from fenchel.measures.empirical import Empirical, coincide
from fenchel.measures.kernels import Deterministic, Kernel
from fenchel.measures.measure import check_points


class Lookup(Kernel):
    """k -> a law of values. `Lookup(f)` is the Dirac at f(k), f a matrix or a callable.

    `Lookup.table` and `Lookup.stochastic` are defined at finitely many points only.

    >>> keys, values = torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[5.0], [2.0], [4.0]])
    >>> Lookup.table(keys, values).at(torch.tensor([[1.0]])).mean  # of a key that is there twice
    tensor([[3.]])
    """

    def __init__(self, function: Map) -> None:
        self._kernel: Kernel = Deterministic(function)

    @classmethod
    def table(cls, keys: Tensor, values: Tensor, weights: Tensor | None = None) -> Lookup:
        """k -> the average of Diracs at the values v_i with k_i = k.

        keys (..., n, d), values (..., n, e). As printed in the paper it is their sum, whose mass
        exceeds 1 where a key is repeated. With `weights` (..., n), those of a measure on the pairs,
        it is the law of the value given the key.
        """
        # Vuckovic et al. (2020), definition 5, divided by how often a key repeats
        check_points(keys, "keys")
        check_points(values, "values")
        n = keys.shape[-2]
        if values.shape[-2] != n or n == 0:
            raise ValueError(
                f"a table needs one value for each key, got keys {tuple(keys.shape)} and values "
                f"{tuple(values.shape)}"
            )
        share = Empirical(keys) if weights is None else Empirical.of_masses(keys, weights)
        return cls._of(_Finite(share, None, values))

    @classmethod
    def stochastic(cls, points: Tensor, matrix: Tensor, targets: Tensor | None = None) -> Lookup:
        """Point i goes to target j with probability matrix[i, j].

        points (n, d), matrix (..., n, n') with rows that sum to 1, targets (n', d'), by default the
        points.

        >>> states = torch.tensor([[0.0], [1.0]])
        >>> chain = Lookup.stochastic(states, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> (Empirical(states) @ chain @ chain).weights
        tensor([0.6250, 0.3750])
        """
        check_points(points, "points")
        targets = points if targets is None else targets
        check_points(targets, "targets")
        check_tensor(matrix, "matrix")
        shape = (points.shape[-2], targets.shape[-2])
        if points.dim() != 2 or targets.dim() != 2 or matrix.shape[-2:] != shape:
            raise ValueError(
                f"points and targets must be (n, d) and matrix (..., {shape[0]}, {shape[1]}), "
                f"got {tuple(points.shape)}, {tuple(targets.shape)} and {tuple(matrix.shape)}"
            )
        if has(coincide(points, points).sum(-1) > 1):
            raise ValueError(
                "points must be distinct: a point listed twice has two rows of the matrix; "
                "average its rows, or use Lookup.table"
            )
        Empirical(targets, matrix)  # checks the rows
        return cls._of(_Finite(Empirical(points), matrix, targets))

    @classmethod
    def _of(cls, kernel: Kernel) -> Lookup:
        lookup = object.__new__(cls)
        lookup._kernel = kernel
        return lookup

    def _at(self, x: Tensor) -> Empirical:
        image = self._kernel._at(x)
        assert isinstance(image, Empirical)
        return image

    def affine(self) -> Affine | None:
        return self._kernel.affine()

    def __repr__(self) -> str:
        if isinstance(self._kernel, Deterministic):
            return f"Lookup({map_name(self._kernel.function)})"
        return repr(self._kernel)


class _Finite(Kernel):
    """x -> the rows of `matrix` at the keys equal to x, averaged by the weights of the keys."""

    def __init__(self, keys: Empirical, matrix: Tensor | None, targets: Tensor) -> None:
        self.keys, self.matrix, self.targets = keys, matrix, targets

    def __repr__(self) -> str:
        kind = "table" if self.matrix is None else "stochastic"
        return f"Lookup.{kind}({self.keys.size} points)"

    def _at(self, x: Tensor) -> Empirical:
        if x.shape[-1] != self.keys.dim:
            raise ValueError(f"keys have dimension {self.keys.dim}, got x {tuple(x.shape)}")
        same = coincide(x.detach(), self.keys.points.detach())  # (..., m, n)
        mass = same * self.keys.weights.unsqueeze(-2)
        total = mass.sum(-1, keepdim=True)
        if has(total.detach() == 0):
            index = tuple(int(i) for i in (total.detach() == 0).nonzero()[0, :-1])
            raise ValueError(
                f"x at {index} is not a key with mass: the lookup knows {self.keys.size} points, "
                "compared to the last bit; use Lookup(function) for one that is defined everywhere"
            )
        weights = mass / total
        if self.matrix is not None:
            weights = weights @ self.matrix
        return Empirical._unchecked(self.targets.unsqueeze(-3), weights)
