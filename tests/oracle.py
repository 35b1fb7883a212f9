"""An independent answer for Tsallis rows: bisection in extended precision, nothing shared.

p_i = nu_i [(alpha - 1)(s_i - t)]_+^(1/(alpha - 1)) with sum p = 1; softmax at alpha = 1.
"""

import numpy as np
import torch

_WIDE = np.longdouble


def tsallis(scores, alpha, base=None, temperature=1.0):
    """Weights (rows, n) as float64, one row at a time."""
    rows = scores.reshape(-1, scores.shape[-1]).numpy()
    bases = np.ones_like(rows) if base is None else np.broadcast_to(base.numpy(), rows.shape)
    weights = [_row(s, nu, alpha, temperature) for s, nu in zip(rows, bases, strict=True)]
    return torch.from_numpy(np.stack(weights)).reshape(scores.shape)


def _row(scores, base, alpha, temperature):
    z = (scores.astype(_WIDE) - scores.max()) / _WIDE(temperature)
    nu = base.astype(_WIDE)
    if alpha == 1:
        terms = nu * np.exp(z)
        return (terms / terms.sum()).astype(np.float64)
    eps = _WIDE(alpha) - 1
    live = nu > 0
    # At `low` one key alone carries everything; at `high` no key carries anything.
    low = np.max(z[live] - nu[live] ** (-eps) / eps)
    threshold = _bisect(lambda t: _weights(z, nu, eps, t).sum(), low, np.max(z[live]))
    if alpha <= 2:
        return _weights(z, nu, eps, threshold).astype(np.float64)
    # A key at the edge has unbounded slope: measure the threshold from that key and go on.
    centre = z[live][np.argmin(np.abs(z[live] - threshold))]
    reach = 64 * np.finfo(_WIDE).eps * (1 + abs(threshold))
    rest = threshold - centre
    rest = _bisect(lambda t: _weights(z - centre, nu, eps, t).sum(), rest - reach, rest + reach)
    return _weights(z - centre, nu, eps, rest).astype(np.float64)


def _weights(z, nu, eps, threshold):
    y = np.maximum(eps * (z - threshold), 0)
    return np.where(nu > 0, nu * y ** (1 / eps), 0)


def _bisect(decreasing, low, high):
    for _ in range(300):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if decreasing(middle) >= 1 else (low, middle)
    return (low + high) / 2
