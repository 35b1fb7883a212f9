"""Total variation on a chain and on a grid: the partition behind the solution.

    x* = argmin_x  1/2 |x - s|^2 + lam * sum_{edges (i, j)} |x_i - x_j|

The solution is constant on connected groups g, and there it is linear in the data:

    x_i = mean over g(i) of (s - lam * t),    t_i = sum_{edges (i, j)} sign(x_i - x_j).

So the solvers below return the discrete part only (group labels and signs t); `group_means`
recomputes x from it with plain differentiable operations, and derivatives of every order follow.

Certificate, used by both shapes: with (D x)_e = x_j - x_i on the edge e = (i, j), i before j,
and any dual w with |w| <= lam,

    gap(x, w) = sum_e (lam |Dx|_e - w_e (Dx)_e) + 1/2 |x - (s - D^T w)|^2  >=  1/2 |x - x*|^2,

and at the solution s - x = D^T w.

A node that is not `allowed` has no edges: it is a group of its own and influences nobody.
"""

from fenchel._kernels.total_variation.chain import chain_dual, chain_solution, group_means, tv_chain
from fenchel._kernels.total_variation.grid import components, grid_solution, tv_grid

__all__ = [
    "chain_dual",
    "chain_solution",
    "components",
    "grid_solution",
    "group_means",
    "tv_chain",
    "tv_grid",
]
