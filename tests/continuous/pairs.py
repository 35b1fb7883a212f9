"""A thousand pairs of a density and a basis function in the plane, as attention has them."""

import numpy as np

from tests.continuous import reference


def plane(count=1000, seed=0):
    """mean (B, 2), scale (B, 2, 2) of paraboloids; centre, covariance alike of functions.

    A third of the functions has covariance 0.001 I, the others anything from 0.001 to 0.1; the
    densities' variances reach 0.3 and their ratios 100. All are float32 numbers.
    """
    rng = np.random.default_rng(seed)
    mean, centre = rng.uniform(0, 1, (2, count, 2))
    covariance = [reference.random_spd(rng, 2, 1e-3, 0.1) for _ in range(count)]
    covariance[::3] = [0.001 * np.eye(2)] * len(covariance[::3])
    ratio = 10 ** rng.uniform(0, 2, count)
    ratio[::7] = 100.0
    wide = 10 ** rng.uniform(-3, -0.5, count)
    variance = [_turned(rng, np.array([w, w / r])) for w, r in zip(wide, ratio, strict=True)]
    # scale = 9 pi |V|^(1/2) V, Farinhas, 2021, eq. 4.6
    scale = [9 * np.pi * np.sqrt(np.linalg.det(v)) * v for v in variance]
    return tuple(np.float32(x).astype(float) for x in (mean, scale, centre, covariance))


def narrowness(mean, scale, centre, covariance):
    """The function's least deviation where the density's support is the unit ball."""
    _, radius = reference.peak_and_radius(scale, 2)
    back = np.linalg.inv(np.linalg.cholesky(scale)) / radius[:, None, None]
    return np.sqrt(np.linalg.eigvalsh(back @ covariance @ back.mT)[:, 0])


def _turned(rng, values):
    axes, _ = np.linalg.qr(rng.standard_normal((2, 2)))
    matrix = axes * values @ axes.T
    return (matrix + matrix.T) / 2
